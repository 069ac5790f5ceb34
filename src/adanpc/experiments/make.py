"""From the name of a table to what it shows: choose its scale, run what is missing, write it down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from adanpc import durable
from adanpc.data.domain import DataError
from adanpc.errors import AdaNPCError
from adanpc.experiments import report
from adanpc.experiments.exhibit import Exhibit
from adanpc.experiments.records import Records
from adanpc.experiments.ruler import Ruler
from adanpc.experiments.scale import SCALES, Scale, length, seconds
from adanpc.experiments.subjects import Workshop
from adanpc.experiments.sweep import left
from adanpc.experiments.tables import TABLES, Found, Table
from adanpc.experiments.task import Task

CHOICES = "tables.json"


def table_of(name: str) -> Table:
    """The table of this name."""
    if name not in TABLES:
        raise AdaNPCError(f"there is no table {name!r}; there are: {', '.join(TABLES)}")
    return TABLES[name]


def check_rows(table: Table, only: Sequence[str]) -> None:
    """Refuses names that no row of the table has."""
    known = {row.lower() for row in table.rows}
    for name in only:
        if name.lower() not in known:
            rows = f"it has: {', '.join(table.rows)}" if known else "it is made as a whole: leave --only away"
            raise AdaNPCError(f"{table.name} has no row called {name!r}; {rows}")


def absent(table: Table, shop: Workshop) -> tuple[str, ...]:
    """The table's data sets that are not here; refuses if nothing of them is."""
    missing, reason = [], ""
    for name in table.data:
        try:
            shop.data(name, 0)
        except DataError as error:
            missing.append(name)
            reason = str(error)
    if table.data and len(missing) == len(table.data):
        raise DataError(reason)
    return tuple(missing)


def wanted(table: Table, scale: Scale, missing: Sequence[str]) -> list[Task]:
    """The tasks of a table that can be run, without those on data that are not here."""
    return [task for task in table.plan(scale) if not set(task.data()) & set(missing)]


def choose(
    table: Table, budget: str, size: str, own: Mapping[str, Any], shop: Workshop, workers: int
) -> tuple[Scale, str]:
    """The scale that is asked for by name, or the largest that fits into a time; and a sentence with its cost.

    A budget that was chosen for before, for the same table in the same folder, gives the same scale again, so that an
    interrupted table goes on.

    Args:
        table: to be made.
        budget: such as 30m, or nothing.
        size: the name of a scale, or nothing: full.
        own: fields of the scale that are given, whatever its name.
        shop: the folders.
        workers: processes.
    """
    if budget and size:
        raise AdaNPCError(f"give a --budget or a --scale, not both: {budget}, {size}")
    if size and size not in SCALES:
        raise AdaNPCError(f"there is no scale {size!r}; there are: {', '.join(SCALES)}")
    records, ruler, missing = Records(shop.folder), Ruler(shop), absent(table, shop)
    limit = seconds(budget) if budget else None
    before = choices(shop.folder).get(table.name, {})
    if budget and before.get("budget") == budget:
        size, limit = before["scale"]["name"], None

    def priced(name: str) -> tuple[Scale, float]:
        scale = replace(SCALES[name], **own)
        return scale, left(wanted(table, scale, missing), records, ruler, workers)

    first, *others = [size or "full"] if limit is None else reversed(SCALES)  # upwards: long plans take their time, too
    scale, cost = priced(first)
    for larger, needed in map(priced, others):
        if limit is not None and needed > limit:
            break
        scale, cost = larger, needed
    over = f", more than the budget of {budget}" if limit is not None and cost > limit else ""
    return scale, f"{scale.about(table.uses)} About {length(cost)} on {workers} cores are left{over}."


def choices(folder: Path) -> dict[str, Any]:
    """What was asked for each table in this folder, the last time."""
    path = folder / CHOICES
    return dict(json.loads(path.read_text())) if path.exists() else {}


def note_choice(folder: Path, name: str, scale: Scale, budget: str) -> None:
    """Keeps what was asked for, so that the report shows it and a budget goes on as it began."""
    known = {**choices(folder), name: {"scale": asdict(scale), "budget": budget}}
    folder.mkdir(parents=True, exist_ok=True)
    durable.replace(folder / CHOICES, lambda new: _write(new, json.dumps(known, indent=1)))


def exhibit(name: str, shop: Workshop, scale: Scale) -> Exhibit:
    """What the records of a folder show of a table."""
    table = table_of(name)
    return table.exhibit(Found(Records(shop.folder), scale, shop, absent(table, shop)))


def exhibits(shop: Workshop) -> list[Exhibit]:
    """Every table that was asked for in a folder, as last asked for."""
    found = choices(shop.folder)
    if not found:
        raise AdaNPCError(f"{shop.folder} holds no tables: make one with adanpc table NAME --out {shop.folder}")
    scales = {name: Scale(**{**entry["scale"], "only": tuple(entry["scale"]["only"])}) for name, entry in found.items()}
    return [exhibit(name, shop, scales[name]) for name in TABLES if name in scales]


def write_report(shop: Workshop, environment: dict[str, str]) -> Path:
    """One page with everything that a folder holds."""
    path = shop.folder / "report.html"
    text = report.page(exhibits(shop), environment, "AdaNPC: tables and figures made again")
    durable.replace(path, lambda new: _write(new, text))
    return path


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
