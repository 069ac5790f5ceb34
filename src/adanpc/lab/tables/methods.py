"""Tables of test-time methods side by side, each on every target with default settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

from adanpc.lab.adapt import ADAPTERS, find
from adanpc.lab.own import split_name
from adanpc.lab.show.exhibit import Cell, Sheet
from adanpc.lab.sweep.subjects import ALL, Extent, Trained
from adanpc.lab.sweep.task import Adapt, Task
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import (
    BENCHMARKS,
    HIDDEN_NOTE,
    Parts,
    Results,
    Row,
    Table,
    averages,
    benchmarks_in,
    hidden,
    printed,
    remarks,
)

# Without the methods that need a model with a rotation head, so that all of them share one model.
METHODS = tuple(name for name, method in ADAPTERS.items() if not method.needs_rotation_head)
BATCHES = (32, 2)
COMPARED = tuple(benchmark.data for benchmark in benchmarks_in("adaptation"))
IMAGES = 200  # of each target, if the scale has no more than ten times as many
PASSES = 8  # through the network for each of these images, so that no method takes much longer than others
FEWEST = 10  # images of each target, however slow a method is: of fewer, a percentage says nothing


def methods_at(scale: Scale) -> tuple[str, ...]:
    """The methods of a table: those of the library that are requested and share one model, and the user's own."""
    requested = [method for method in METHODS if scale.wants(method)]
    return (*requested, *scale.methods)


def settings(method: str, data: str) -> Mapping[str, Any]:
    """Settings that differ from the defaults: digits are never mirrored, since a mirrored digit is not that digit."""
    mirrors = "mirror" in signature(find(method)).parameters
    if mirrors and not BENCHMARKS[data].photos:
        return {"mirror": False}
    return {}


def is_slow(method: str) -> bool:
    """Whether a method makes so many passes per image that it gets fewer images than others."""
    return find(method).passes > PASSES


def affordable(method: str, images: int) -> int:
    """How many images a method gets where others get this many: fewer if it is slow."""
    passes = PASSES * max(images, IMAGES)
    return min(images, max(FEWEST, passes // find(method).passes))


def limited(method: str, scale: Scale) -> Extent:
    """How many images of each target a method gets: a tenth of the scale's and at least 200, or fewer if it is slow."""
    if scale.images is None:
        return ALL
    most = max(IMAGES, scale.images // 10)
    images = affordable(method, min(most, scale.images))
    return Extent(images, recalled=images)


def how_many(method: str, scale: Scale) -> str:
    """How many images of each target a method gets, in words."""
    images = limited(method, scale).images
    return "all images" if images is None else f"at most {images} images of each target"


def task_for(scale: Scale, data: str, method: str, batch: int, target: str, seed: int) -> Adapt:
    """The task of a method with default settings on a model trained with defaults, as in the paper's Table 4."""
    subject = Trained(scale.spec(data, (target,), "erm", seed), scale.selected(data))
    extent = limited(method, scale)
    return Adapt(subject, method, batch, settings=settings(method, data), extent=extent, seed=seed)


def plan(data: Sequence[str], scale: Scale) -> list[Task]:
    """Every method that does not need its own training, on every target."""
    # Methods come last, because all of them share a scene, and only the latest scene is kept.
    return [
        task_for(scale, name, method, batch, target, seed)
        for name in data
        for target in BENCHMARKS[name].domains
        for seed in range(scale.seeds)
        for batch in BATCHES
        for method in methods_at(scale)
    ]


def _by_seed(scale: Scale, data: str, method: str, batch: int) -> list[list[Adapt]]:
    """For each seed, the tasks of a method on every target of a data set."""
    targets = BENCHMARKS[data].domains
    tasks = []
    for seed in range(scale.seeds):
        tasks.append([task_for(scale, data, method, batch, target, seed) for target in targets])
    return tasks


def cells_of(results: Results, data: str, method: str, batch: int) -> list[Cell]:
    """The cells of a method for each target of a data set, and for their average, which the paper prints."""
    benchmark = BENCHMARKS[data]
    tasks = _by_seed(results.scale, data, method, batch)
    each, mean = averages(results, tasks)
    reasons = [results.reason(task) for task in tasks[0]]
    theirs = printed("adaptation", f"batch-{batch}", find(method).in_paper, benchmark.title)
    cells = [Cell(ours, text=reason) for ours, reason in zip(each, reasons, strict=True)]
    return [*cells, Cell(mean, theirs, reasons[0])]


def show(data: str, results: Results) -> tuple[Parts, list[str]]:
    """For one data set, a sheet per batch size: methods by targets."""
    headings = (*BENCHMARKS[data].domains, "average")
    sheets, notes = _sheets(results, headings, lambda method, batch: cells_of(results, data, method, batch))
    beside = []
    for batch in BATCHES:
        rows = {}
        for method in methods_at(results.scale):
            _, label = split_name(method)  # the class, if it is a user's own
            rows[label] = _by_seed(results.scale, data, method, batch)
        beside.append(hidden(results, f"Batches of {batch}", rows))
    return (*sheets, *beside), [*notes, HIDDEN_NOTE]


def summary(results: Results) -> tuple[Parts, list[str]]:
    """For all data sets, a sheet per batch size: methods by data sets, averaged over targets."""

    def row(method: str, batch: int) -> list[Cell]:
        return [cells_of(results, data, method, batch)[-1] for data in COMPARED]

    titles = tuple(BENCHMARKS[data].title for data in COMPARED)
    return _sheets(results, titles, row)


def _sheets(
    results: Results, headings: tuple[str, ...], row: Callable[[str, int], Sequence[Cell]]
) -> tuple[Parts, list[str]]:
    """A sheet for each batch size and each number of images, so that only methods with equally many are compared."""
    sheets = []
    for batch in BATCHES:
        groups: dict[str, list[Row]] = {how_many(METHODS[0], results.scale): []}  # comes first, even if it is empty
        for method in methods_at(results.scale):
            cells = tuple(row(method, batch))
            if any(cell.ours or cell.text for cell in cells):
                _, label = split_name(method)  # the class, if it is a user's own
                groups.setdefault(how_many(method, results.scale), []).append((label, cells))
        for images, rows in groups.items():
            sheets.append(Sheet(f"Batches of {batch}, {images}", headings, tuple(rows)))
    return tuple(sheets), remarks("adaptation")


SOURCE = "Table 4"
ABOUT = (
    "Each domain in turn is the target, and ERM is trained on the others with default settings. Where a run saves "
    "several models, the best on held-out source images is used; nothing is selected on targets."
)
TABLES = [
    Table(
        "adaptation",
        "Test-time methods at batch sizes 32 and 2",
        SOURCE,
        ABOUT,
        partial(plan, COMPARED),
        summary,
        COMPARED,
        rows=METHODS,
        takes_methods=True,
    ),
    *(
        Table(
            f"adaptation-{data}",
            f"Test-time methods at batch sizes 32 and 2 on {BENCHMARKS[data].title}",
            SOURCE,
            ABOUT,
            partial(plan, (data,)),
            partial(show, data),
            (data,),
            rows=METHODS,
            takes_methods=True,
        )
        for data in COMPARED
    ),
]
