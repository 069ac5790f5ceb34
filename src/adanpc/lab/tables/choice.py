"""Which size a table is made at: the one that is asked for, or the largest that a budget allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from adanpc import files, require
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt import find
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.shape import (
    RecordsError,
    both,
    count,
    fields,
    listed,
    named,
    optional,
    read_checked,
    refuse_link,
    text,
    where_present,
)
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.sweep import remaining_seconds
from adanpc.lab.sweep.task import Task
from adanpc.lab.tables.scale import SCALES, Scale, length, seconds
from adanpc.lab.tables.table import Table

CHOICES = "tables.json"
CHECK = named(  # of that file
    fields(
        budget=text,
        scale=both(
            fields(
                name=lambda value: text(value) and value in SCALES,
                steps=count,
                batch=count,
                trials=count,
                seeds=count,
                images=optional(count),
                encoder=text,
                only=listed(text),
            ),
            where_present(methods=listed(text)),  # noted since methods of one's own can be rows
        ),
    )
)
DATA = fields(folder=text, sets=named(fields(images=count, notice=text)))  # in that file, since it is noted
REMEDY = "delete it, and make its tables again"


class Request(NamedTuple):
    """What a user asks for.

    Args:
        budget: a time such as 30m, or nothing.
        scale: the name of a scale, or nothing; without both it is the paper's.
        own: fields of the scale that are given, whatever its name.
    """

    budget: str = ""
    scale: str = ""
    own: Mapping[str, Any] = {}

    def check(self) -> None:
        """Refuses what contradicts itself, or names nothing."""
        if self.budget and self.scale:
            raise AdaNPCError(f"give `budget` or `scale`, not both: {self.budget}, {self.scale}")
        if self.budget:
            seconds(self.budget)
        if self.scale:
            require.one_of("scale", self.scale, SCALES)

    def sized(self, name: str) -> Scale:
        """The scale of this name, with the fields that are given."""
        return replace(SCALES[name], **self.own)


class MadeFrom(NamedTuple):
    """The data that a table was made from.

    Args:
        folder: that held the data sets.
        sets: those that were there, by name: the number of their ``images``, and their ``notice``.
    """

    folder: str
    sets: Mapping[str, Mapping[str, Any]]


class Choice(NamedTuple):
    """How a table was made.

    Args:
        scale: its size.
        budget: that the scale was chosen by, or nothing.
        data: what it was made from; None if that was not noted, by an earlier version.
    """

    scale: Scale
    budget: str
    data: MadeFrom | None = None


class Estimate(NamedTuple):
    """A scale, and about how many seconds of work a table still is at it."""

    scale: Scale
    seconds: float


def check_rows(table: Table, only: Sequence[str], encoder: str) -> None:
    """Refuses names that no row of the table has, and an encoder where there is none to choose."""
    known = [row.lower() for row in table.rows]
    for name in only:
        if name.lower() not in known:
            hint = f"it has: {', '.join(table.rows)}{require.did_you_mean(name, table.rows)}"
            if not known:
                hint = "it is always made as a whole: omit `only`"
            raise AdaNPCError(f"{table.name} has no row called {name!r}; {hint}")
    if encoder and _ids(table, "") == _ids(table, "another"):
        raise AdaNPCError(f"{table.name} has no encoder to choose: omit `encoder`")


def check_methods(table: Table, methods: Sequence[str]) -> None:
    """Refuses methods that do not exist, and methods where a table does not compare any; imports those of your own."""
    if methods and not table.takes_methods:
        raise AdaNPCError(f"{table.name} does not compare methods of your own: omit `method`")
    for name in methods:
        find(name)


def _ids(table: Table, encoder: str) -> list[str]:
    return [task.id for task in table.plan(replace(SCALES["least"], encoder=encoder))]


def available(table: Table, scale: Scale, workspace: Workspace, absent: Sequence[str]) -> list[Task]:
    """The tasks of a table that can be run, without those on data sets or domains that are not here."""
    return [task for task in table.on_present_data(scale, absent) if not task.missing(workspace)]


def choose(table: Table, request: Request, workspace: Workspace, workers: int, absent: Sequence[str] = ()) -> Estimate:
    """The scale that is asked for by name, or the largest that fits into the budget.

    A budget that was chosen for before, for the same table in the same folder with the same fields, gives the same
    scale again, so that an interrupted table continues.

    Args:
        table: to be made.
        request: what the user asks for.
        workspace: where the data is, and the records of what was done before.
        workers: processes.
        absent: the table's data sets that are not here.
    """
    request.check()
    records = Records(workspace.folder)
    records.check({name: workspace.count(name) for name in table.data if name not in absent})
    costs = CostModel(workspace)
    before = choices(workspace.folder).get(table.name)

    def estimate(name: str) -> Estimate:
        scale = request.sized(name)
        tasks = available(table, scale, workspace, absent)
        return Estimate(scale, remaining_seconds(tasks, records, costs, workers))

    if not request.budget:
        return estimate(request.scale or "full")
    if before and before.budget == request.budget and before.scale == request.sized(before.scale.name):
        return estimate(before.scale.name)
    return _largest(seconds(request.budget), estimate)


def _largest(limit: float, estimate: Callable[[str], Estimate]) -> Estimate:
    """The estimate of the largest scale that takes no longer than the limit, or else of the smallest of all."""
    smallest, *larger = reversed(SCALES)
    best = estimate(smallest)
    for name in larger:  # from below: planning a large table takes time, too
        candidate = estimate(name)
        if candidate.seconds > limit:
            break
        best = candidate
    return best


def describe(table: Table, estimate: Estimate, budget: str, workers: int) -> str:
    """The scale and the time that is left, in words."""
    over = ""
    if budget and estimate.seconds > seconds(budget):
        over = f", more than the budget of {budget}"
    size = estimate.scale.about(table.uses)
    cores = "1 core" if workers == 1 else f"{workers} cores"
    return f"{size} About {length(estimate.seconds)} left on {cores}{over}."


def choices(folder: Path) -> dict[str, Choice]:
    """How each table in this folder was made the last time."""
    path = folder / CHOICES
    document = read_checked(path, CHECK, REMEDY) or {}
    noted = {}
    for name, entry in document.items():
        data = None
        if "data" in entry:
            if not DATA(entry["data"]):
                raise RecordsError(f"{path} is damaged (it does not say where data came from): {REMEDY}")
            data = MadeFrom(entry["data"]["folder"], entry["data"]["sets"])
        noted[name] = Choice(_scale(path, entry["scale"]), entry["budget"], data)
    return noted


def _scale(path: Path, document: Mapping[str, Any]) -> Scale:
    known = set(Scale.__dataclass_fields__)
    if not set(document) <= known:
        raise RecordsError(f"{path} is damaged (a scale has no {', '.join(set(document) - known)}): {REMEDY}")
    lists = {"only": tuple(document["only"]), "methods": tuple(document.get("methods", ()))}
    return Scale(**{**document, **lists})


def note_choice(folder: Path, name: str, scale: Scale, budget: str, data: MadeFrom | None = None) -> None:
    """Keeps how a table is made, so that the report shows it and a budget continues as it began."""
    known = {**choices(folder), name: Choice(scale, budget, data)}
    document = {name: _entry(choice) for name, choice in known.items()}
    path = folder / CHOICES
    refuse_link(path)
    folder.mkdir(parents=True, exist_ok=True)

    def write(new: Path) -> None:
        new.write_text(json.dumps(document, indent=1), encoding="utf-8")

    files.replace(path, write)


def _entry(choice: Choice) -> dict[str, Any]:
    entry: dict[str, Any] = {"scale": asdict(choice.scale), "budget": choice.budget}
    if choice.data is not None:
        entry["data"] = choice.data._asdict()
    return entry
