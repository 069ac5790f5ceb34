"""What a table is: tasks that it needs, and how their records are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from adanpc.lab.data.digits import ANGLES
from adanpc.lab.data.folders import DOMAIN_NET, PACS, TERRA_INCOGNITA, VLCS, Layout
from adanpc.lab.show.exhibit import Cell, Chart, Exhibit, Gallery, Sheet, Value, value
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.task import Task
from adanpc.lab.tables import paper
from adanpc.lab.tables.scale import Scale


class Benchmark(NamedTuple):
    """A data set of domains: its name here, the paper's name for it, and its domains in the paper's order."""

    data: str
    title: str
    domains: tuple[str, ...]


def _laid_out(layout: Layout, title: str) -> Benchmark:
    return Benchmark(layout.name, title, tuple(names[0] for names in layout.domains))


BENCHMARKS = {
    made.data: made
    for made in (
        Benchmark("rotated-mnist", "RMNIST", tuple(map(str, ANGLES))),
        _laid_out(VLCS, "VLCS"),
        _laid_out(PACS, "PACS"),
        _laid_out(DOMAIN_NET, "DomainNet"),
        _laid_out(TERRA_INCOGNITA, "TerraIncognita"),
    )
}


@dataclass(frozen=True)
class Found:
    """The records of tasks, at one scale.

    Args:
        records: of a folder.
        scale: that was asked for.
        workspace: where data lie, for tables that show images.
        absent: data sets that are not here.
    """

    records: Records
    scale: Scale
    workspace: Workspace
    absent: tuple[str, ...] = ()

    def __call__(self, task: Task) -> dict[str, Any] | None:
        """The record of a task; None if it has none, or was refused."""
        record = self.records.of(task)
        return None if record is None or "error" in record else record

    def why(self, task: Task) -> str:
        """Why there is no number: refused, or nothing yet."""
        return "refused" if "error" in (self.records.of(task) or {}) else ""


Parts = tuple[Sheet | Chart | Gallery, ...]


@dataclass(frozen=True)
class Table:
    """A table or figure of the paper, by name.

    Args:
        name: what the command is given.
        title: in words.
        source: where the paper has it.
        about: what is run, in a sentence or two.
        plan: the tasks at a scale.
        show: the parts and notes made of their records.
        data: the data sets that are used, by name.
        alone: times are shown, so tasks run one after another.
        uses: the sizes of a scale that matter here.
        rows: what can be asked for alone; none if it is all or nothing.
    """

    name: str
    title: str
    source: str
    about: str
    plan: Callable[[Scale], list[Task]]
    show: Callable[[Found], tuple[Parts, Sequence[str]]]
    data: tuple[str, ...]
    alone: bool = False
    uses: tuple[str, ...] = ("steps", "batch", "seeds", "images")
    rows: tuple[str, ...] = ()

    def exhibit(self, found: Found) -> Exhibit:
        """All that the records show so far."""
        parts, notes = self.show(found)
        about = f"{self.about} {found.scale.about(self.uses)}"
        return Exhibit(self.name, self.title, self.source, about, parts, (*notes, *self._cautions(found)))

    def _cautions(self, found: Found) -> list[str]:
        """What is particular about the data here, what is missing, and what was refused."""
        here = [name for name in self.data if name not in found.absent]
        notices = [f"{name}: {said}" for name in here if (said := found.workspace.data(name, 0).notice)]
        missing = [f"{name} is not in the data's folder, so nothing is run on it." for name in found.absent]
        tasks = {task.id: task for task in self.plan(found.scale) if not set(task.data()) & set(found.absent)}
        waiting = sum(task not in found.records for task in tasks.values())
        unfinished = [f"{waiting} of {len(tasks)} tasks have no record yet."] if waiting else []
        return [*notices, *missing, *unfinished, *_refusals(found, tasks.values())]


def _refusals(found: Found, tasks: Iterable[Task]) -> list[str]:
    """Why there are cells without numbers, each reason once."""
    records = [found.records.of(task) or {} for task in tasks]
    return [
        f"Refused: {reason}" for reason in dict.fromkeys(record["error"] for record in records if "error" in record)
    ]


def printed(table: str, group: str, row: str, column: str) -> Value | None:
    """The paper's number, or None where it has none."""
    if table not in paper.tables() or group not in paper.tables()[table]:
        return None
    if row not in paper.rows(table, group) or column not in paper.columns(table):
        return None
    return paper.cell(table, group, row, column)


def remarks(*tables: str) -> list[str]:
    """What to know of the paper's tables before one compares with them; nothing where it prints none."""
    return [f"The paper: {note}" for table in tables if table in paper.tables() for note in paper.notes(table)]


def averages(found: Found, tasks: Sequence[Sequence[Task]]) -> tuple[list[Value | None], Value | None]:
    """The accuracy on each target, and their mean, over seeds; the tasks are in rows by seed, columns by target."""
    each = [[None if record is None else float(record["average"]) for record in map(found, seed)] for seed in tasks]
    return [seeds_of(target) for target in zip(*each, strict=True)], seeds_of([mean_of(seed) for seed in each])


def mean_of(each: Sequence[float | None]) -> float | None:
    """The mean, or None if anything is missing."""
    known = [number for number in each if number is not None]
    return sum(known) / len(known) if known and len(known) == len(each) else None


def seeds_of(each: Sequence[float | None]) -> Value | None:
    """What several seeds gave; those that are missing do not count."""
    return value([number for number in each if number is not None])


def cells(ours: Mapping[str, Value | None], theirs: Mapping[str, Value | None]) -> tuple[Cell, ...]:
    """One cell for each column of ours."""
    return tuple(Cell(number, theirs.get(column)) for column, number in ours.items())
