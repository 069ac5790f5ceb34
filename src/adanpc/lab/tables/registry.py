"""Every table and figure of the paper, by name."""

from __future__ import annotations

from adanpc import require
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
    """The table of this name."""
    return TABLES[require.one_of("table", name, TABLES)]
