"""Test-time methods side by side, each on every target with default settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adanpc.adapt import ADAPTERS
from adanpc.experiments import paper
from adanpc.experiments.exhibit import Cell, Sheet
from adanpc.experiments.scale import Scale
from adanpc.experiments.subjects import Extent, Trained
from adanpc.experiments.tables.table import BENCHMARKS, Found, Parts, Table, averages, printed
from adanpc.experiments.task import Adapt, Task

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
COMPARED = ("rotated-mnist", "pacs", "vlcs", "domain-net")
FEW = {"cotta": 50, "ttaug": 50, "memo": 10, "ttt": 10, "ttt-online": 10}  # images of each target: many copies of each
SOME = 200  # for all other methods
EACH = ("ttaug", "memo", "ttt", "ttt-online")  # look at each image by itself, so that batches are all the same to them


def settings(method: str, data: str) -> Mapping[str, Any]:
    """The library's defaults, but mirrored digits are other digits."""
    return {"mirror": False} if method in EACH and data == "rotated-mnist" else {}


def short(method: str, scale: Scale) -> Extent:
    """As many images of each target for every method, but for those that look at many copies of each."""
    most = FEW.get(method, SOME)
    images = most if scale.images is None else min(most, scale.images)
    return Extent(images, recalled=images)


def compared(scale: Scale, data: str, method: str, batch: int, target: str, seed: int) -> Adapt:
    """A method with default settings on a model trained with default settings, as the paper's Table 4."""
    subject = Trained(scale.spec(data, (target,), "erm", seed))
    return Adapt(subject, method, batch, settings=settings(method, data), extent=short(method, scale), seed=seed)


def comparison_plan(scale: Scale) -> list[Task]:
    """Every method but those that need their own training, on every target."""
    return [
        compared(scale, data, method, batch, target, seed)
        for data in COMPARED
        for target in BENCHMARKS[data].domains
        for seed in range(scale.seeds)
        for batch in (32, 2)
        for method in ADAPTERS
        if scale.wants(method) and method not in ("ttt", "ttt-online")
    ]


def comparison(found: Found) -> tuple[Parts, list[str]]:
    """One sheet for each batch size."""
    sheets = []
    for batch in (32, 2):
        rows = []
        for method in ADAPTERS:
            made = tuple(_compared(found, data, method, batch) for data in COMPARED)
            if any(cell.ours or cell.text for cell in made):
                rows.append((method, made))
        titles = tuple(BENCHMARKS[data].title for data in COMPARED)
        sheets.append(Sheet(f"Batches of {batch}, average over targets", titles, tuple(rows)))
    return tuple(sheets), [f"The paper: {note}" for note in paper.notes("adaptation")]


def _compared(found: Found, data: str, method: str, batch: int) -> Cell:
    tasks = [
        [compared(found.scale, data, method, batch, target, seed) for target in BENCHMARKS[data].domains]
        for seed in range(found.scale.seeds)
    ]
    theirs = printed("adaptation", f"batch-{batch}", NAMES.get(method, method), BENCHMARKS[data].title)
    ours = averages(found, tasks)[1]
    return Cell(ours, theirs, "" if ours else found.why(tasks[0][0]))


TABLES = [
    Table(
        "adaptation",
        "Test-time methods at batch sizes 32 and 2",
        "Table 4 (tab:adapt_comp)",
        "Each domain in turn is the target; ERM on the others, default settings, nothing selected on targets.",
        comparison_plan,
        comparison,
        COMPARED,
    ),
]
