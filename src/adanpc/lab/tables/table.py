"""What a table is: the tasks that it needs, and how their records are shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any, NamedTuple

from adanpc.lab.data.digits import ANGLES
from adanpc.lab.data.folders import DOMAIN_NET, PACS, TERRA_INCOGNITA, VLCS, Layout
from adanpc.lab.own import split_name
from adanpc.lab.show.exhibit import Cell, Chart, Exhibit, Gallery, Series, Sheet, Value, value
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.task import Task
from adanpc.lab.tables import paper
from adanpc.lab.tables.scale import Scale

Parts = tuple[Sheet | Chart | Gallery, ...]
Row = tuple[str, tuple[Cell, ...]]  # the label and the cells of a row in a sheet


class Benchmark(NamedTuple):
    """A data set of several domains.

    Args:
        data: its name here.
        title: the paper's name for it.
        domains: in the paper's order.
        photos: true for photos and drawings, which published encoders accept and which may be mirrored; false for
            digits.
    """

    data: str
    title: str
    domains: tuple[str, ...]
    photos: bool = True


def _from_layout(layout: Layout, title: str) -> Benchmark:
    domains = tuple(names[0] for names in layout.domains)  # the other names are those of folders
    return Benchmark(layout.name, title, domains)


BENCHMARKS = {
    benchmark.data: benchmark
    for benchmark in (
        Benchmark("rotated-mnist", "RMNIST", tuple(str(angle) for angle in ANGLES), photos=False),
        _from_layout(VLCS, "VLCS"),
        _from_layout(PACS, "PACS"),
        _from_layout(DOMAIN_NET, "DomainNet"),
        _from_layout(TERRA_INCOGNITA, "TerraIncognita"),
    )
}


def benchmarks_in(table: str) -> tuple[Benchmark, ...]:
    """The benchmarks that have a column in one of the paper's tables, in its order."""
    by_title = {benchmark.title: benchmark for benchmark in BENCHMARKS.values()}
    return tuple(by_title[column] for column in paper.columns(table) if column in by_title)


@dataclass(frozen=True)
class Results:
    """The results that a table has so far, at one scale.

    Args:
        records: the records of a folder.
        scale: the scale of the table.
        workspace: where the data is, for tables that show images.
        absent: the data sets that are missing here.
        notices: for each data set, a caution about the data that the records were made on; by default the notices of
            the data that is here.
    """

    records: Records
    scale: Scale
    workspace: Workspace
    absent: tuple[str, ...] = ()
    notices: Mapping[str, str] | None = None

    def notice(self, name: str) -> str:
        """A caution about a data set, or an empty string."""
        if self.notices is not None:
            return self.notices.get(name, "")
        return self.workspace.data(name, 0).notice

    def not_here(self, tasks: Iterable[Task]) -> list[str]:
        """The domains that tasks need but that are missing here, each once; none for records made elsewhere."""
        if self.notices is not None:
            return []
        names = dict.fromkeys(name for task in tasks for name in task.missing(self.workspace))
        return list(names)

    def of(self, task: Task) -> dict[str, Any] | None:
        """The record of a task; None if there is none, or if the task was refused."""
        record = self.records.of(task)
        if record is None or "error" in record:
            return None
        return record

    def all_of(self, tasks: Iterable[Task]) -> list[dict[str, Any]]:
        """The records of those tasks that have one."""
        records = [self.of(task) for task in tasks]
        return [record for record in records if record is not None]

    def reason(self, task: Task) -> str:
        """What to show instead of a number: "refused" if the task was, else an empty string."""
        record = self.records.of(task)
        return "refused" if record is not None and "error" in record else ""


@dataclass(frozen=True)
class Table:
    """A table or figure of the paper, by name.

    Args:
        name: the name on the command line.
        title: the title in words.
        paper_place: where it is in the paper.
        about: what is run, in a sentence or two.
        plan: gives the tasks at a scale.
        show: makes the parts and notes from the records.
        data: the names of the data sets that are used.
        alone: run tasks one after another, because the table shows times.
        uses: the sizes of a scale that matter to this table.
        rows: the rows that can be made alone; empty if the table is always made as a whole.
        takes_methods: whether a user's own methods can be further rows.
        takes_algorithms: whether a user's own training algorithms can be.
    """

    name: str
    title: str
    paper_place: str
    about: str
    plan: Callable[[Scale], list[Task]]
    show: Callable[[Results], tuple[Parts, Sequence[str]]]
    data: tuple[str, ...]
    alone: bool = False
    uses: tuple[str, ...] = ("steps", "batch", "seeds", "images")
    rows: tuple[str, ...] = ()
    takes_methods: bool = False
    takes_algorithms: bool = False

    def on_present_data(self, scale: Scale, absent: Sequence[str]) -> list[Task]:
        """The tasks at a scale that need none of the absent data sets."""
        tasks = self.plan(scale)
        return [task for task in tasks if set(absent).isdisjoint(task.needs())]

    def exhibit(self, results: Results) -> Exhibit:
        """Everything that the records show so far."""
        parts, notes = self.show(results)
        if results.scale.only:
            parts = _without_empty(parts)
            notes = [note for note in notes if self._concerns(note, results.scale)]
        about = f"{self.about} {results.scale.about(self.uses)}"
        return Exhibit(self.name, self.title, self.paper_place, about, parts, (*notes, *self._cautions(results)))

    def _concerns(self, note: str, scale: Scale) -> bool:
        """Whether a note is about a requested row, or about no row in particular."""
        ordered = sorted(self.rows, key=len, reverse=True)  # longest first: "AdaNPC" also begins "AdaNPC+BN"
        names = "|".join(re.escape(row) for row in ordered)
        named = re.findall(rf"(?<![a-z0-9])(?:{names})(?![a-z0-9+])", note, re.IGNORECASE)
        return not named or any(scale.wants(row) for row in named)

    def _cautions(self, results: Results) -> list[str]:
        """Notes on the data, on what is missing or damaged, and on what was refused."""
        tasks = {task.id: task for task in self.on_present_data(results.scale, results.absent)}
        pending = [task for task in tasks.values() if task not in results.records]
        notes = self._notes_on_data(results, pending)
        if pending:
            notes.append(f"{len(pending)} of {len(tasks)} tasks have no record yet.")
        damaged = results.records.damaged
        if damaged:
            notes.append(f"Damaged lines of {results.records.path.name} were skipped: {damaged}.")
        return notes + _refusals(results, tasks.values())

    def _notes_on_data(self, results: Results, pending: Sequence[Task]) -> list[str]:
        """Cautions about the data sets, and which sets and domains are missing; ``pending`` tasks have no record."""
        notes = []
        for name in self.data:
            if name not in results.absent:
                notice = results.notice(name)
                if notice:
                    notes.append(f"{name}: {notice}")
        for name in results.absent:
            notes.append(f"{name} is not in the data's folder, or not all of it, so nothing is run on it.")
        not_here = results.not_here(pending)
        if not_here:
            notes.append(f"Not in the data's folder, so nothing is run on it: {', '.join(not_here)}.")
        return notes


def _without_empty(parts: Parts) -> Parts:
    """The parts without rows and lines that have no numbers, and without parts that are then empty."""
    kept: list[Sheet | Chart | Gallery] = []
    for part in parts:
        if isinstance(part, Sheet):
            part = replace(part, rows=_rows_with_numbers(part))
            if part.rows:
                kept.append(part)
        elif isinstance(part, Chart):
            part = replace(part, series=_lines_with_numbers(part))
            if part.series:
                kept.append(part)
        else:
            kept.append(part)
    return tuple(kept)


def _rows_with_numbers(sheet: Sheet) -> tuple[Row, ...]:
    """The rows of a sheet in which a cell has a number of ours, or a text."""
    return tuple(row for row in sheet.rows if any(cell.ours or cell.text for cell in row[1]))


def _lines_with_numbers(chart: Chart) -> tuple[Series, ...]:
    """The lines of a chart that have a point."""
    return tuple(line for line in chart.series if not all(isnan(y) for y in line.y))


def _refusals(results: Results, tasks: Iterable[Task]) -> list[str]:
    """The reasons why tasks were refused, each once."""
    reasons: dict[str, None] = {}
    for task in tasks:
        record = results.records.of(task)
        if record is not None and "error" in record:
            reasons[record["error"]] = None
    return [f"Refused: {reason}" for reason in reasons]


def own_label(name: str, taken: Collection[str]) -> str:
    """What the row of a class of the user's own is called: by the class alone, unless another row has that label."""
    _, label = split_name(name)
    return name if label in taken else label


def printed(table: str, group: str, row: str, column: str) -> Value | None:
    """The paper's number, or None if the paper has none there."""
    if table not in paper.tables() or group not in paper.tables()[table]:
        return None
    if row not in paper.rows(table, group) or column not in paper.columns(table):
        return None
    return paper.cell(table, group, row, column)


def remarks(*tables: str) -> list[str]:
    """What to know about some of the paper's tables before comparing with them."""
    printed_tables = paper.tables()
    notes = []
    for table in tables:
        if table in printed_tables:
            notes += [f"The paper: {note}" for note in paper.notes(table)]
    return notes


def averages(results: Results, tasks: Sequence[Sequence[Task]]) -> tuple[list[Value | None], Value | None]:
    """The accuracy on each target, and the mean over targets; each over seeds.

    Args:
        results: the records.
        tasks: for each seed, one task per target.
    """
    accuracies = [[number_in(results.of(task), "average") for task in seed] for seed in tasks]
    each = [over_seeds(target) for target in zip(*accuracies, strict=True)]
    mean = over_seeds([mean_of(seed) for seed in accuracies])
    return each, mean


def number_in(record: Mapping[str, Any] | None, field: str) -> float | None:
    """A number in a record; None if there is no record, or if it lacks the number, as in earlier versions."""
    if record is None or record.get(field) is None:
        return None
    return float(record[field])


def mean_of(numbers: Sequence[float | None]) -> float | None:
    """The mean, or None if anything is missing."""
    known = [number for number in numbers if number is not None]
    if not known or len(known) < len(numbers):
        return None
    return sum(known) / len(known)


def over_seeds(numbers: Sequence[float | None]) -> Value | None:
    """One value from the numbers of several seeds; missing ones do not count."""
    return value([number for number in numbers if number is not None])


# What a mean accuracy hides, all in percent: headings of columns, with the fields of records that they show.
HIDDEN = {
    "accuracy": "average",
    "worst tenth": "worst_tenth",
    "calibration error": "calibration_error",
    "OOD AUROC": "ood_auroc",
}
HIDDEN_NOTE = (
    "Worst tenth is the accuracy over the worst tenth of windows of 100 answers; calibration error is the expected "
    "calibration error. OOD AUROC is how well confidence separates held-out images of the target from the same images "
    "with their patches in random order."
)


def hidden(results: Results, title: str, rows: Mapping[str, Sequence[Sequence[Task]]]) -> Sheet:
    """A sheet of what mean accuracies hide: the mean over targets, where all have a record, over seeds.

    Args:
        results: the records.
        title: the title of the sheet.
        rows: for each label and each seed, one task per target.
    """
    records = {}
    for label, tasks in rows.items():
        records[label] = [[results.of(task) for task in of_seed] for of_seed in tasks]
    return hidden_in(title, records)


def hidden_in(title: str, rows: Mapping[str, Sequence[Sequence[Mapping[str, Any] | None]]]) -> Sheet:
    """The sheet of ``hidden``, given for each label and each seed one record per target, None where there is none."""
    shown = []
    for label, records in rows.items():
        line = []
        for field in HIDDEN.values():
            means = [mean_of([number_in(record, field) for record in of_seed]) for of_seed in records]
            line.append(Cell(over_seeds(means)))
        if any(cell.ours for cell in line):
            shown.append((label, tuple(line)))
    return Sheet(f"{title}: what the mean hides", tuple(HIDDEN), tuple(shown), "%", "")


def cells(ours: Mapping[str, Value | None], theirs: Mapping[str, Value | None]) -> tuple[Cell, ...]:
    """One cell per column, with our number and the paper's."""
    result = []
    for column, number in ours.items():
        result.append(Cell(number, theirs.get(column)))
    return tuple(result)
