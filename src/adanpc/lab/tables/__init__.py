"""Every table and figure of the paper, by name."""

from __future__ import annotations

from adanpc.lab.tables import corruptions, costs, frozen, gallery, methods, ood, successive, theory, training
from adanpc.lab.tables.table import Found, Table

__all__ = ["TABLES", "Found", "Table"]

TABLES: dict[str, Table] = {
    table.name: table
    for module in (ood, training, frozen, methods, successive, costs, corruptions, gallery, theory)
    for table in module.TABLES
}
