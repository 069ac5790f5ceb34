"""Accuracy on a domain that was not trained on: by data set, and all data sets together."""

from __future__ import annotations

from functools import partial

from adanpc.lab.show.exhibit import Cell, Sheet, Value
from adanpc.lab.sweep.selection import LABELED, RULES, best
from adanpc.lab.sweep.subjects import ALL, Extent, Trained
from adanpc.lab.sweep.task import Adapt, Task, drawn
from adanpc.lab.tables import paper
from adanpc.lab.tables.scale import SIZES, Scale
from adanpc.lab.tables.table import (
    BENCHMARKS,
    Benchmark,
    Found,
    Parts,
    Table,
    cells,
    mean_of,
    printed,
    remarks,
    seeds_of,
)

AVERAGE = "average"
ROWS = {  # the paper's names: what is trained, and what answers
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
SPELLINGS = {
    "Fishr": ("Fisher",),
    "AdaNPC+BN": ("AdaNPC+NP", "+BN retraining"),
}  # as some of the paper's tables print them
GROUPS = {"source": "training-domain", LABELED: "test-domain"}


def trials(scale: Scale, data: str, target: str, row: str, seed: int, rule: str) -> list[Adapt]:
    """The trials among which a rule selects.

    Held-out target images select among last models, as in DomainBed; all other rules take the best on held-out source.
    """
    algorithm, method = ROWS[row]
    which = "last" if rule == LABELED else scale.selected
    return [
        Adapt(
            Trained(scale.spec(data, (target,), algorithm, seed, trial), which),
            method,
            settings=drawn(method, trial, seed),
            extent=Extent(recalled=None) if scale.images is None else ALL,
            seed=seed,
        )
        for trial in range(scale.trials)
    ]


def plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """Every row, target, seed and trial."""
    return [
        task
        for row in ROWS
        if scale.wants(row)
        for target in benchmark.domains
        for seed in range(scale.seeds)
        for rule in GROUPS
        for task in trials(scale, benchmark.data, target, row, seed, rule)
    ]


def accuracies(found: Found, benchmark: Benchmark, row: str, rule: str) -> list[list[float | None]]:
    """For each seed the selected accuracy on each target."""
    return [
        [_selected(found, benchmark.data, target, row, seed, rule) for target in benchmark.domains]
        for seed in range(found.scale.seeds)
    ]


def _selected(found: Found, data: str, target: str, row: str, seed: int, rule: str) -> float | None:
    tasks = trials(found.scale, data, target, row, seed, rule)
    records = [record for task in tasks if (record := found(task))]
    whole = all(task in found.records for task in tasks)  # among some of the trials nothing is selected
    return float(best(records, rule)["average"]) if records and whole else None


def _printed(table: str, group: str, row: str, column: str) -> Value | None:
    names = (row, *SPELLINGS.get(row, ()))
    return next((cell for name in names if (cell := printed(table, group, name, column))), None)


def sheet(found: Found, benchmark: Benchmark, rule: str) -> Sheet:
    """One selection rule: rows by targets."""
    group = GROUPS.get(rule, "")
    headings = paper.columns(benchmark.data) if benchmark.data in paper.tables() else (*benchmark.domains, AVERAGE)
    rows = []
    for row in ROWS:
        each = accuracies(found, benchmark, row, rule)
        ours = dict(zip(headings, [seeds_of(list(column)) for column in zip(*each, strict=True)], strict=False))
        ours[headings[-1]] = seeds_of([mean_of(seed) for seed in each])
        theirs = {heading: _printed(benchmark.data, group, row, heading) for heading in headings}
        if any(ours.values()) or not found.scale.only:
            rows.append((row, cells(ours, theirs)))
    return Sheet(f"{benchmark.title}, {RULES[rule]}", tuple(headings), tuple(rows))


def show(benchmark: Benchmark, found: Found) -> tuple[Parts, list[str]]:
    """The paper's two rules; the label-free ones where there is more than one trial to select from."""
    rules = list(RULES) if found.scale.trials > 1 else list(GROUPS)
    return tuple(sheet(found, benchmark, rule) for rule in rules), remarks(benchmark.data)


def summary_plan(scale: Scale) -> list[Task]:
    """All five data sets."""
    return [task for benchmark in BENCHMARKS.values() for task in plan(benchmark, scale)]


def summary(found: Found) -> tuple[Parts, list[str]]:
    """Averages over the targets of each data set, selected as the paper's Table 1: on the test domain."""
    rows, headings = [], (*(benchmark.title for benchmark in BENCHMARKS.values()), AVERAGE)
    for row in ROWS:
        each = [
            [mean_of(seed) for seed in accuracies(found, benchmark, row, LABELED)] for benchmark in BENCHMARKS.values()
        ]
        ours = [*map(seeds_of, each), seeds_of([mean_of(seed) for seed in zip(*each, strict=True)])]
        theirs = [_printed("ood", "all", row, heading) for heading in headings]
        if any(ours) or not found.scale.only:
            rows.append((row, tuple(map(Cell, ours, theirs))))
    sheet_ = Sheet(f"Averages over targets, {RULES[LABELED]}", headings, tuple(rows))
    return (sheet_,), remarks("ood")


TABLES = [
    Table(
        "ood",
        "Out-of-distribution accuracy on five data sets",
        "Table 1 (tab:ood)",
        "Each domain in turn is the target; models are trained on the others.",
        summary_plan,
        summary,
        tuple(BENCHMARKS),
        uses=SIZES,
        rows=tuple(ROWS),
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
        )
        for benchmark in BENCHMARKS.values()
    ),
]
