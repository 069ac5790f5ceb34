"""Tables of the accuracy on a domain that was not trained on: for each data set, and for all together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from adanpc.lab.show.exhibit import Sheet, Value
from adanpc.lab.sweep.selection import LABELED, RULES, best
from adanpc.lab.sweep.subjects import ALL, Extent, Trained
from adanpc.lab.sweep.task import Adapt, Task, drawn
from adanpc.lab.tables import paper
from adanpc.lab.tables.scale import SIZES, Scale
from adanpc.lab.tables.table import (
    BENCHMARKS,
    HIDDEN_NOTE,
    Benchmark,
    Parts,
    Results,
    Table,
    cells,
    hidden_in,
    mean_of,
    number_in,
    over_seeds,
    own_label,
    printed,
    remarks,
)
from adanpc.lab.train.algorithm import Algorithm
from adanpc.lab.train.registry import find

AVERAGE = "average"
ROWS = {  # by the paper's names: the training algorithm, and the test-time method
    "ERM": ("erm", "source"),
    "IRM": ("irm", "source"),
    "GDRO": ("group-dro", "source"),
    "Mixup": ("mixup", "source"),
    "MLDG": ("mldg", "source"),
    "CORAL": ("coral", "source"),
    "MMD": ("mmd", "source"),
    "DANN": ("dann", "source"),
    "CDANN": ("cdann", "source"),
    "MTL": ("mtl", "source"),
    "SagNet": ("sag-net", "source"),
    "ARM": ("arm", "source"),
    "VREx": ("vrex", "source"),
    "RSC": ("rsc", "source"),
    "Fish": ("fish", "source"),
    "Fishr": ("fishr", "source"),
    "AdaNPC": ("erm", "adanpc"),
    "AdaNPC+BN": ("erm", "adanpc-bn"),
    "KNN loss": ("knn", "knn"),
    "KNN loss + AdaNPC": ("knn", "adanpc"),
}
SPELLINGS = {  # other names for these rows in some of the paper's tables
    "Fishr": ("Fisher",),
    "AdaNPC+BN": ("AdaNPC+NP", "+BN retraining"),
}
GROUPS = {"source": "training-domain", LABELED: "test-domain"}


def rows_at(scale: Scale) -> dict[str, tuple[str, str]]:
    """The rows of a table, by name: all of ``ROWS``, and the user's own algorithms, each with what answers for it."""
    rows = dict(ROWS)
    for algorithm in scale.algorithms:
        method = "source"
        if find(algorithm).source_vote is not Algorithm.source_vote:  # its runs are judged by a vote, not by the head
            method = "knn"
        rows[own_label(algorithm, rows)] = (algorithm, method)
    return rows


def wanted(scale: Scale) -> list[str]:
    """The rows to make: those of ``ROWS`` that are requested, and all of the user's own."""
    return [row for row in rows_at(scale) if row not in ROWS or scale.wants(row)]


def trials(scale: Scale, data: str, target: str, row: str, seed: int, rule: str) -> list[Adapt]:
    """The trials among which a rule selects.

    As in DomainBed, the rule that uses held-out target images selects among last models. All other rules select among
    the models that are best on held-out source images.
    """
    algorithm, method = rows_at(scale)[row]
    which = "last" if rule == LABELED else scale.selected(data)
    extent = Extent(recalled=None) if scale.images is None else ALL
    result = []
    for trial in range(scale.trials):
        subject = Trained(scale.spec(data, (target,), algorithm, seed, trial), which)
        settings = drawn(method, trial, seed)
        result.append(Adapt(subject, method, settings=settings, extent=extent, seed=seed))
    return result


def plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """Every row, target, seed and trial."""
    return [
        task
        for row in wanted(scale)
        for target in benchmark.domains
        for seed in range(scale.seeds)
        for rule in GROUPS
        for task in trials(scale, benchmark.data, target, row, seed, rule)
    ]


def selected(results: Results, benchmark: Benchmark, row: str, rule: str) -> list[list[Mapping[str, Any] | None]]:
    """For each seed, the record of the selected trial on each target; None until all trials are finished."""
    result = []
    for seed in range(results.scale.seeds):
        tasks = [trials(results.scale, benchmark.data, target, row, seed, rule) for target in benchmark.domains]
        result.append([_best(results, each, rule) for each in tasks])
    return result


def _best(results: Results, tasks: Sequence[Adapt], rule: str) -> Mapping[str, Any] | None:
    """The record of the trial that a rule selects; None until all trials are finished."""
    complete = all(task in results.records for task in tasks)
    records = results.all_of(tasks)  # without the trials that were refused
    if not complete or not records:
        return None
    return best(records, rule)


def accuracies(results: Results, benchmark: Benchmark, row: str, rule: str) -> list[list[float | None]]:
    """For each seed, the accuracy of the selected trial on each target."""
    records = selected(results, benchmark, row, rule)
    return [[number_in(record, "average") for record in of_seed] for of_seed in records]


def _printed(table: str, group: str, row: str, column: str) -> Value | None:
    """The paper's number, under whichever name the paper has the row; None if it has none."""
    for name in (row, *SPELLINGS.get(row, ())):
        cell = printed(table, group, name, column)
        if cell is not None:
            return cell
    return None


def sheet(results: Results, benchmark: Benchmark, rule: str) -> Sheet:
    """The sheet of one selection rule: rows by targets."""
    group = GROUPS.get(rule, "")
    headings = (*benchmark.domains, AVERAGE)
    if benchmark.data in paper.tables():
        headings = paper.columns(benchmark.data)
    rows = []
    for row in rows_at(results.scale):
        seeds = accuracies(results, benchmark, row, rule)
        each = [over_seeds(target) for target in zip(*seeds, strict=True)]
        mean = over_seeds([mean_of(seed) for seed in seeds])
        ours = dict(zip(headings, [*each, mean], strict=True))
        theirs = {heading: _printed(benchmark.data, group, row, heading) for heading in headings}
        if any(ours.values()) or not results.scale.only:
            rows.append((row, cells(ours, theirs)))
    return Sheet(f"{benchmark.title}, {RULES[rule]}", tuple(headings), tuple(rows))


def show(benchmark: Benchmark, results: Results) -> tuple[Parts, list[str]]:
    """A sheet for each of the paper's two rules, and for the label-free rules if there are several trials.

    The last sheet has what the means of the first hide.
    """
    rules: Mapping[str, str] = GROUPS
    if results.scale.trials > 1:
        rules = RULES
    sheets = [sheet(results, benchmark, rule) for rule in rules]
    first = next(iter(rules))
    records = {row: selected(results, benchmark, row, first) for row in rows_at(results.scale)}
    beside = hidden_in(f"{benchmark.title}, {RULES[first]}", records)
    return (*sheets, beside), [*remarks(benchmark.data), HIDDEN_NOTE]


def summary_plan(scale: Scale) -> list[Task]:
    """Every row on all five data sets."""
    return [task for benchmark in BENCHMARKS.values() for task in plan(benchmark, scale)]


def summary(results: Results) -> tuple[Parts, list[str]]:
    """Averages over the targets of each data set, selected on the test domain, as in the paper's Table 1."""
    titles = [benchmark.title for benchmark in BENCHMARKS.values()]
    headings = (*titles, AVERAGE)
    rows = []
    for row in rows_at(results.scale):
        ours = dict(zip(headings, _means_of(results, row), strict=True))
        theirs = {heading: _printed("ood", "all", row, heading) for heading in headings}
        if any(ours.values()) or not results.scale.only:
            rows.append((row, cells(ours, theirs)))
    return (Sheet(f"Averages over targets, {RULES[LABELED]}", headings, tuple(rows)),), remarks("ood")


def _means_of(results: Results, row: str) -> list[Value | None]:
    """The mean over the targets of each data set, and the average of these means; each over seeds."""
    by_data_set = []  # for each data set, the mean of each seed
    for benchmark in BENCHMARKS.values():
        by_data_set.append([mean_of(seed) for seed in accuracies(results, benchmark, row, LABELED)])
    by_seed = zip(*by_data_set, strict=True)
    average = over_seeds([mean_of(means) for means in by_seed])
    return [*map(over_seeds, by_data_set), average]


TABLES = [
    Table(
        "ood",
        "Out-of-distribution accuracy on five data sets",
        "Table 1",
        "Each domain in turn is the target; models are trained on the others.",
        summary_plan,
        summary,
        tuple(BENCHMARKS),
        uses=SIZES,
        rows=tuple(ROWS),
        takes_algorithms=True,
    ),
    *(
        Table(
            f"ood-{benchmark.data}",
            f"Out-of-distribution accuracy on {benchmark.title}",
            f"the table of {benchmark.title} in the appendix",
            "Each domain in turn is the target; models are trained on the others, with four fifths of each.",
            partial(plan, benchmark),
            partial(show, benchmark),
            (benchmark.data,),
            uses=SIZES,
            rows=tuple(ROWS),
            takes_algorithms=True,
        )
        for benchmark in BENCHMARKS.values()
    ),
]
