"""Every table and figure of the paper, by name."""

from __future__ import annotations

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.lab.tables import (
    corruptions,
    costs,
    frozen,
    gallery,
    imagenet,
    methods,
    ood,
    safety,
    successive,
    theory,
    training,
)
from adanpc.lab.tables.table import Table

MODULES = (ood, training, frozen, methods, successive, costs, corruptions, imagenet, gallery, theory, safety)
TABLES: dict[str, Table] = {table.name: table for module in MODULES for table in module.TABLES}


def table_of(name: str) -> Table:
    """The table of this name, or an error that names the one that was probably meant."""
    if name not in TABLES:
        raise AdaNPCError(f"{require.unknown('table', name, TABLES)}; adanpc table --list shows all")
    return TABLES[name]
