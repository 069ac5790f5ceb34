"""Choose the scale of a table: the one that was requested, or the largest that fits a budget; and remember it."""

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
from adanpc.lab.sweep.forecast import Forecast
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
from adanpc.lab.sweep.task import Task
from adanpc.lab.tables.scale import SCALES, Scale, length, seconds
from adanpc.lab.tables.table import Table
from adanpc.lab.train.registry import find as find_algorithm

CHOICES = "tables.json"
CHECK = named(  # what the file must look like
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
            where_present(methods=listed(text), algorithms=listed(text)),  # files of earlier versions do not have them
        ),
    )
)
DATA = fields(folder=text, sets=named(fields(images=count, notice=text)))  # in that file, unless it is an earlier one
REMEDY = "delete it, and make its tables again"


class Request(NamedTuple):
    """The size that a user requests. Without a budget or a scale it is the paper's.

    Args:
        budget: a time such as 30m, or an empty string.
        scale: the name of a scale, or an empty string.
        own: fields that replace those of the scale, whichever it is.
    """

    budget: str = ""
    scale: str = ""
    own: Mapping[str, Any] = {}

    def check(self) -> None:
        """Refuses a request that contradicts itself, or that names an unknown scale."""
        if self.budget and self.scale:
            raise AdaNPCError(f"give `budget` or `scale`, not both: {self.budget}, {self.scale}")
        if self.budget:
            seconds(self.budget)
        if self.scale:
            require.one_of("scale", self.scale, SCALES)

    def sized(self, name: str) -> Scale:
        """The scale of this name, with the requested fields replaced."""
        return replace(SCALES[name], **self.own)


class MadeFrom(NamedTuple):
    """The data that a table was made from.

    Args:
        folder: the folder of the data sets.
        sets: the data sets that were there, by name, each with its number of ``images`` and its ``notice``.
    """

    folder: str
    sets: Mapping[str, Mapping[str, Any]]


class Choice(NamedTuple):
    """How a table was made.

    Args:
        scale: its size.
        budget: the budget by which the scale was chosen, or an empty string.
        data: what it was made from; None if an earlier version made it, which did not record that.
    """

    scale: Scale
    budget: str
    data: MadeFrom | None = None


class Estimate(NamedTuple):
    """A scale, and about how many seconds of work are left for a table at that scale."""

    scale: Scale
    seconds: float


def check_rows(table: Table, only: Sequence[str], encoder: str) -> None:
    """Refuses rows that the table does not have, and an encoder if the table has none to choose."""
    known = [row.lower() for row in table.rows]
    for name in only:
        if name.lower() in known:
            continue
        if not known:
            raise AdaNPCError(f"{table.name} has no row called {name!r}; it is always made as a whole: omit `only`")
        raise AdaNPCError(f"{table.name}: {require.unknown('row', name, table.rows)}")
    # An encoder can be chosen if it changes what is run.
    if encoder and _ids(table, "") == _ids(table, "another"):
        raise AdaNPCError(f"{table.name} has no encoder to choose: omit `encoder`")


def check_methods(table: Table, methods: Sequence[str]) -> None:
    """Refuses unknown methods, and any method if the table does not compare methods; imports a user's own classes."""
    if methods and not table.takes_methods:
        raise AdaNPCError(f"{table.name} does not compare methods of your own: omit `method`")
    for name in methods:
        find(name)


def check_algorithms(table: Table, algorithms: Sequence[str]) -> None:
    """Refuses unknown training algorithms, and any if the table does not compare them; imports a user's own classes."""
    if algorithms and not table.takes_algorithms:
        raise AdaNPCError(f"{table.name} does not compare training algorithms of your own: omit `algorithm`")
    for name in algorithms:
        find_algorithm(name)


def _ids(table: Table, encoder: str) -> list[str]:
    """The ids of the tasks of a table at the smallest scale with an encoder."""
    scale = replace(SCALES["least"], encoder=encoder)
    return [task.id for task in table.plan(scale)]


def available(table: Table, scale: Scale, workspace: Workspace, absent: Sequence[str]) -> list[Task]:
    """The tasks of a table that can be run, without those on data sets or domains that are missing here."""
    tasks = table.on_present_data(scale, absent)
    return [task for task in tasks if not task.missing(workspace)]


def choose(table: Table, request: Request, workspace: Workspace, workers: int, absent: Sequence[str] = ()) -> Estimate:
    """The requested scale, or the largest one that fits the budget.

    The same request for the same table in the same folder gives the same scale again, so that an interrupted table
    continues, although less work is left by then.

    Args:
        table: the table to make.
        request: what the user requests.
        workspace: where the data is, and the records of earlier work.
        workers: the number of processes.
        absent: the table's data sets that are missing here.
    """
    request.check()
    records = Records(workspace.folder)
    records.check({name: workspace.count(name) for name in table.data if name not in absent})
    costs = CostModel(workspace)
    before = choices(workspace.folder).get(table.name)

    def estimate(name: str) -> Estimate:
        scale = request.sized(name)
        tasks = available(table, scale, workspace, absent)
        return Estimate(scale, Forecast(tasks, records, costs).seconds(workers))

    if not request.budget:
        return estimate(request.scale or "full")
    if before is not None:
        same_scale = before.scale == request.sized(before.scale.name)
        if same_scale and before.budget == request.budget:
            return estimate(before.scale.name)
    return _largest(seconds(request.budget), estimate)


def _largest(limit: float, estimate: Callable[[str], Estimate]) -> Estimate:
    """The estimate of the largest scale that takes no longer than the limit, or else that of the smallest scale."""
    smallest, *larger = reversed(SCALES)
    best = estimate(smallest)
    for name in larger:  # upward from the smallest, because merely planning a large table takes time
        candidate = estimate(name)
        if candidate.seconds > limit:
            break
        best = candidate
    return best


def describe(table: Table, estimate: Estimate, budget: str, workers: int) -> str:
    """The scale and the estimated time in words."""
    over = ""
    if budget and estimate.seconds > seconds(budget):
        over = f", more than the budget of {budget}"
    size = estimate.scale.about(table.uses)
    cores = "1 core" if workers == 1 else f"{workers} cores"
    return f"{size} About {length(estimate.seconds)} left on {cores}{over}."


def choices(folder: Path) -> dict[str, Choice]:
    """How each table in a folder was made the last time."""
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
    """The scale that a file describes; refuses fields that a scale does not have."""
    unknown = set(document) - set(Scale.__dataclass_fields__)
    if unknown:
        raise RecordsError(f"{path} is damaged (a scale has no {', '.join(unknown)}): {REMEDY}")
    arguments = dict(document)
    arguments["only"] = tuple(document["only"])
    for own in ("methods", "algorithms"):
        arguments[own] = tuple(document.get(own, ()))
    return Scale(**arguments)


def note_choice(folder: Path, name: str, scale: Scale, budget: str, data: MadeFrom | None = None) -> None:
    """Records how a table is made, so that the report can show it and a budget continues as it began."""
    known = choices(folder)
    known[name] = Choice(scale, budget, data)
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
