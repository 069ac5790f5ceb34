"""From the name of a table to what it shows: choose its scale, run what is missing, write it down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from adanpc import files
from adanpc.errors import AdaNPCError
from adanpc.lab.data.domain import DataError
from adanpc.lab.show import report
from adanpc.lab.show.exhibit import Exhibit
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.sweep import left
from adanpc.lab.sweep.task import Task
from adanpc.lab.tables import TABLES, Found, Table
from adanpc.lab.tables.scale import SCALES, Scale, length, seconds

CHOICES = "tables.json"


def table_of(name: str) -> Table:
    """The table of this name."""
    if name not in TABLES:
        raise AdaNPCError(f"there is no table {name!r}; there are: {', '.join(TABLES)}")
    return TABLES[name]


def check_choice(table: Table, only: Sequence[str], encoder: str) -> None:
    """Refuses names that no row of the table has, and an encoder where there is none to choose."""
    known = {row.lower() for row in table.rows}
    for name in only:
        if name.lower() not in known:
            rows = f"it has: {', '.join(table.rows)}" if known else "it is made as a whole: leave --only away"
            raise AdaNPCError(f"{table.name} has no row called {name!r}; {rows}")
    if encoder and _ids(table, "") == _ids(table, "another"):
        raise AdaNPCError(f"{table.name} has no encoder to choose: leave --encoder away")


def _ids(table: Table, encoder: str) -> list[str]:
    return [task.id for task in table.plan(replace(SCALES["least"], encoder=encoder))]


def absent(table: Table, workspace: Workspace) -> tuple[str, ...]:
    """The table's data sets that are not here."""
    return tuple(name for name in table.data if not _here(name, workspace))


def _here(name: str, workspace: Workspace) -> bool:
    try:
        workspace.data(name, 0)
    except DataError:
        return False
    return True


def wanted(table: Table, scale: Scale, missing: Sequence[str]) -> list[Task]:
    """The tasks of a table that can be run, without those on data that are not here."""
    return [task for task in table.plan(scale) if not set(task.data()) & set(missing)]


def choose(
    table: Table, budget: str, size: str, own: Mapping[str, Any], workspace: Workspace, workers: int
) -> tuple[Scale, str]:
    """The scale that is asked for by name, or the largest that fits into a time; and a sentence with its cost.

    A budget that was chosen for before, for the same table in the same folder with the same fields, gives the same
    scale again, so that an interrupted table goes on. Refuses a table of whose data nothing is here.

    Args:
        table: to be made.
        budget: such as 30m, or nothing.
        size: the name of a scale, or nothing: full.
        own: fields of the scale that are given, whatever its name.
        workspace: the folders.
        workers: processes.
    """
    if budget and size:
        raise AdaNPCError(f"give a --budget or a --scale, not both: {budget}, {size}")
    if size and size not in SCALES:
        raise AdaNPCError(f"there is no scale {size!r}; there are: {', '.join(SCALES)}")
    limit = seconds(budget) if budget else None
    records, costs, missing = Records(workspace.folder), CostModel(workspace), absent(table, workspace)
    if table.data and len(missing) == len(table.data):
        workspace.data(table.data[0], 0)  # says where it is to be had
    records.check({name: workspace.count(name) for name in table.data if name not in missing})
    before = choices(workspace.folder).get(table.name)
    if budget and before and before.budget == budget and before.scale == replace(SCALES[before.scale.name], **own):
        size = before.scale.name

    def priced(name: str) -> tuple[Scale, float]:
        scale = replace(SCALES[name], **own)
        return scale, left(wanted(table, scale, missing), records, costs, workers)

    first, *others = [size or "full"] if size or limit is None else reversed(SCALES)  # long plans take their time, too
    scale, cost = priced(first)
    for larger, needed in map(priced, others):
        if limit is not None and needed > limit:
            break
        scale, cost = larger, needed
    over = f", more than the budget of {budget}" if limit is not None and cost > limit else ""
    return scale, f"{scale.about(table.uses)} About {length(cost)} on {workers} cores are left{over}."


class Choice(NamedTuple):
    """What was asked for: a scale, and the budget that it was chosen by, if any."""

    scale: Scale
    budget: str


def choices(folder: Path) -> dict[str, Choice]:
    """What was asked for each table in this folder, the last time."""
    path = folder / CHOICES
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {
        name: Choice(Scale(**{**entry["scale"], "only": tuple(entry["scale"]["only"])}), entry["budget"])
        for name, entry in found.items()
    }


def note_choice(folder: Path, name: str, scale: Scale, budget: str) -> None:
    """Keeps what was asked for, so that the report shows it and a budget goes on as it began."""
    known = {**choices(folder), name: Choice(scale, budget)}
    text = {name: {"scale": asdict(choice.scale), "budget": choice.budget} for name, choice in known.items()}
    folder.mkdir(parents=True, exist_ok=True)
    files.replace(folder / CHOICES, lambda new: _write(new, json.dumps(text, indent=1)))


def exhibit(name: str, workspace: Workspace, scale: Scale) -> Exhibit:
    """What the records of a folder show of a table."""
    table = table_of(name)
    return table.exhibit(Found(Records(workspace.folder), scale, workspace, absent(table, workspace)))


def exhibits(workspace: Workspace) -> list[Exhibit]:
    """Every table that was asked for in a folder, as last asked for."""
    found = choices(workspace.folder)
    if not found:
        raise AdaNPCError(
            f"{workspace.folder} holds no tables: make one with adanpc table NAME --out {workspace.folder}"
        )
    return [exhibit(name, workspace, found[name].scale) for name in TABLES if name in found]


def measured_with(workspace: Workspace) -> dict[str, str]:
    """What the records of the tables of a folder were made with; several values where it was not always the same."""
    records, found = Records(workspace.folder), choices(workspace.folder)
    ids = dict.fromkeys(task.id for name in TABLES if name in found for task in TABLES[name].plan(found[name].scale))
    seen: dict[str, dict[str, None]] = {"machine": {}, "commit": {}, "versions": {}}
    for entry in (records.entries[name]["environment"] for name in ids if name in records.entries):
        versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
        for name, said in (("machine", entry["machine"]), ("commit", entry["commit"]), ("versions", versions)):
            seen[name][said or "unknown"] = None
    return {name: "; ".join(values) for name, values in seen.items() if values}


def write_report(workspace: Workspace) -> Path:
    """One page with everything that a folder holds."""
    path = workspace.folder / "report.html"
    text = report.page(exhibits(workspace), measured_with(workspace), "AdaNPC: tables and figures made again")
    files.replace(path, lambda new: _write(new, text))
    return path


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
