"""Every table and figure of the paper, by name, and ``make``, which makes one."""

from __future__ import annotations

from adanpc.lab.tables.registry import TABLES
from adanpc.lab.tables.table import Results, Table
from adanpc.lab.tables.workflow import make

__all__ = ["TABLES", "Results", "Table", "make"]
