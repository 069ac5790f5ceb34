"""Test-time methods side by side, each on every target with default settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from adanpc.lab.adapt import ADAPTERS
from adanpc.lab.show.exhibit import Cell, Sheet
from adanpc.lab.sweep.subjects import ALL, Extent, Trained
from adanpc.lab.sweep.task import Adapt, Task
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import BENCHMARKS, Found, Parts, Table, averages, printed, remarks

NAMES = {  # as the paper prints them
    "source": "ResNet50",
    "pl-clf": "PLClf",
    "pl-full": "PLFull",
    "shot": "SHOT",
    "shot-im": "SHOTIM",
    "t3a": "T3A",
    "tent": "Tent",
    "tent-clf": "Tent-clf",
    "adanpc": "AdaNPC",
}
ROWS = tuple(method for method in ADAPTERS if method not in ("ttt", "ttt-online"))  # without a training of their own
BATCHES = (32, 2)
COMPARED = ("rotated-mnist", "pacs", "vlcs", "domain-net")
FEW = {"cotta": 50, "ttaug": 50, "memo": 10, "ttt": 10, "ttt-online": 10}  # images of each target: many copies of each
SOME = 200  # for all other methods
EACH = ("ttaug", "memo", "ttt", "ttt-online")  # look at each image by itself, so that batches are all the same to them


def settings(method: str, data: str) -> Mapping[str, Any]:
    """The library's defaults, but mirrored digits are other digits."""
    return {"mirror": False} if method in EACH and data == "rotated-mnist" else {}


def short(method: str, scale: Scale) -> Extent:
    """As many images of each target for every method, but for those that look at many copies of each; or all."""
    if scale.images is None:
        return ALL
    images = min(FEW.get(method, SOME), scale.images)
    return Extent(images, recalled=images)


def how_many(method: str, scale: Scale) -> str:
    """How many images of each target a method meets, in words."""
    images = short(method, scale).images
    return "all images" if images is None else f"{images} images of each target at most"


def compared(scale: Scale, data: str, method: str, batch: int, target: str, seed: int) -> Adapt:
    """A method with default settings on a model trained with default settings, as the paper's Table 4."""
    subject = Trained(scale.spec(data, (target,), "erm", seed), scale.selected)
    return Adapt(subject, method, batch, settings=settings(method, data), extent=short(method, scale), seed=seed)


def plan(data: Sequence[str], scale: Scale) -> list[Task]:
    """Every method but those that need their own training, on every target."""
    return [
        compared(scale, name, method, batch, target, seed)
        for name in data
        for target in BENCHMARKS[name].domains
        for seed in range(scale.seeds)
        for batch in BATCHES
        for method in ROWS
        if scale.wants(method)
    ]


def row_of(found: Found, data: str, method: str, batch: int) -> list[Cell]:
    """A method on each target of a data set, and on average, which is what the paper prints."""
    domains = BENCHMARKS[data].domains
    tasks = [
        [compared(found.scale, data, method, batch, target, seed) for target in domains]
        for seed in range(found.scale.seeds)
    ]
    each, mean = averages(found, tasks)
    theirs = printed("adaptation", f"batch-{batch}", NAMES.get(method, method), BENCHMARKS[data].title)
    why = [found.why(task) for task in tasks[0]]
    return [*(Cell(ours, text=reason) for ours, reason in zip(each, why, strict=True)), Cell(mean, theirs, why[0])]


def show(data: str, found: Found) -> tuple[Parts, list[str]]:
    """One data set: a sheet for each batch size, methods by targets."""
    headings = (*BENCHMARKS[data].domains, "average")
    return _sheets(found, headings, lambda method, batch: row_of(found, data, method, batch))


def summary(found: Found) -> tuple[Parts, list[str]]:
    """All data sets: a sheet for each batch size, methods by data sets, averages over targets."""
    titles = tuple(BENCHMARKS[data].title for data in COMPARED)
    return _sheets(
        found,
        titles,
        lambda method, batch: [row_of(found, data, method, batch)[-1] for data in COMPARED],
    )


def _sheets(
    found: Found, headings: tuple[str, ...], row: Callable[[str, int], Sequence[Cell]]
) -> tuple[Parts, list[str]]:
    """For each batch size, methods that meet as many images side by side, and the others by themselves."""
    sheets = []
    for batch in BATCHES:
        groups: dict[str, list[tuple[str, tuple[Cell, ...]]]] = {how_many(ROWS[0], found.scale): []}
        for method in ROWS:
            cells = tuple(row(method, batch))
            if any(cell.ours or cell.text for cell in cells):
                groups.setdefault(how_many(method, found.scale), []).append((method, cells))
        sheets += [Sheet(f"Batches of {batch}, {said}", headings, tuple(made)) for said, made in groups.items()]
    return tuple(sheets), remarks("adaptation")


SOURCE = "Table 4 (tab:adapt_comp)"
ABOUT = (
    "Each domain in turn is the target; ERM on the others, default settings, the best model on held-out source images "
    "where there are several, nothing selected on targets."
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
        rows=ROWS,
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
            rows=ROWS,
        )
        for data in COMPARED
    ),
]
