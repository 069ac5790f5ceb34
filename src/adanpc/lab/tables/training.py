"""What training adds: the loss, the encoder, and the number of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from adanpc.lab.show.exhibit import Cell, Chart, Sheet, Value, line
from adanpc.lab.sweep.subjects import Trained
from adanpc.lab.sweep.task import Adapt, Task
from adanpc.lab.tables import paper
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import (
    BENCHMARKS,
    Benchmark,
    Found,
    Parts,
    Table,
    averages,
    cells,
    printed,
    remarks,
    seeds_of,
)

KS = (50, 75, 100, 125, 150)
MEMORIES = ((10, 500), (50, 500), (50, 1000), (50, 1500), (100, 1000))
BACKBONES = {
    "ResNet18": "resnet-18",
    "ResNet50": "resnet-50",
    "ViT-B16": "vit-b16",
    "EfficientNet-Lite0": "efficientnet-lite0",
}
CURVE = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of all steps


class Row(NamedTuple):
    """A row of a table: where the paper has it, what is trained and what answers."""

    label: str
    group: str
    printed: str
    algorithm: str
    method: str
    hyper: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    encoder: str = ""


PACS_LOSS = [
    Row("ERM, linear head", "ERM", "Linear", "erm", "source"),
    *(Row(f"ERM + AdaNPC, k {k}", "ERM", f"k={k}", "erm", "adanpc", {}, {"k": k}) for k in KS),
    *(
        Row(
            f"KNN loss, k {k}, memory {size}",
            "L_KNN",
            f"k={k}, M={size}",
            "knn",
            "adanpc",
            {"k": k, "size": size},
            {"k": k},
        )
        for k, size in MEMORIES
    ),
]
DIGITS_LOSS = [
    Row("ERM, linear head", "", "", "erm", "source"),
    Row("ERM, frozen vote", "all", "ERM", "erm", "knn"),
    Row("ERM + AdaNPC", "all", "ERM+AdaNPC", "erm", "adanpc"),
    Row("KNN loss, frozen vote", "all", "L_KNN", "knn", "knn"),
    Row("KNN loss + AdaNPC", "all", "L_KNN + AdaNPC", "knn", "adanpc"),
]
ENCODERS = [
    Row(f"{name}, {label}", name, name if method == "source" else label, "erm", method, encoder=encoder)
    for name, encoder in BACKBONES.items()
    for label, method in (("linear head", "source"), ("AdaNPC", "adanpc"), ("AdaNPC+BN", "adanpc-bn"))
]


def _asked_for(row: Row) -> str:
    """What --only calls it: its encoder where those are compared, or else what is trained."""
    return row.encoder or row.algorithm


def task(benchmark: Benchmark, scale: Scale, row: Row, target: str, seed: int) -> Adapt:
    """One row on one target."""
    scale = replace(scale, encoder=row.encoder or scale.encoder)
    spec = replace(scale.spec(benchmark.data, (target,), row.algorithm, seed), hyper=dict(row.hyper))
    return Adapt(Trained(spec), row.method, settings=row.settings, seed=seed)


def plan(benchmark: Benchmark, rows: list[Row], scale: Scale) -> list[Task]:
    """Every row on every target."""
    return [
        task(benchmark, scale, row, target, seed)
        for row in rows
        if scale.wants(_asked_for(row))
        for target in benchmark.domains
        for seed in range(scale.seeds)
    ]


def show(name: str, benchmark: Benchmark, rows: list[Row], found: Found) -> tuple[Parts, list[str]]:
    """Rows by targets."""
    headings, made = paper.columns(name), []
    for row in rows:
        seeds = range(found.scale.seeds)
        tasks = [[task(benchmark, found.scale, row, target, seed) for target in benchmark.domains] for seed in seeds]
        each, mean = averages(found, tasks)
        ours = dict(zip(headings, [*each, mean], strict=True))
        theirs = {heading: printed(name, row.group, row.printed, heading) for heading in headings}
        if any(ours.values()) or not found.scale.only:
            made.append((row.label, cells(ours, theirs)))
    return (Sheet(benchmark.title, headings, tuple(made)),), remarks(name)


def curve_steps(scale: Scale) -> list[int]:
    """After how many steps a model is looked at."""
    return sorted({max(2, round(share * scale.steps)) for share in CURVE})


def curve_task(scale: Scale, steps: int, method: str, seed: int) -> Adapt:
    """A model that was trained for so many steps; the same as one that is looked at on its way."""
    spec = replace(scale.spec("rotated-mnist", ("0",), "erm", seed), steps=steps, every=steps)
    return Adapt(Trained(spec), method, seed=seed)


def curves_plan(scale: Scale) -> list[Task]:
    """Every length of training, answered by head and by vote."""
    return [
        curve_task(scale, steps, method, seed)
        for steps in curve_steps(scale)
        for method in ("source", "knn", "adanpc")
        for seed in range(scale.seeds)
    ]


def curves(found: Found) -> tuple[Parts, list[str]]:
    """Accuracy on target and held-out source against steps."""
    steps, sheets, charts = curve_steps(found.scale), [], []
    names = {"source": "linear head", "knn": "frozen vote", "adanpc": "AdaNPC"}
    for part in ("target (0 degrees)", "held-out source"):
        rows = {label: [_point(found, step, method, part) for step in steps] for method, label in names.items()}
        title = f"Convergence on Rotated MNIST, {part}"
        cells = tuple((label, tuple(map(Cell, values))) for label, values in rows.items())
        sheets.append(Sheet(f"{title}: after as many steps", tuple(map(str, steps)), cells))
        series = tuple(line(label, steps, values) for label, values in rows.items())
        charts.append(Chart(title, "steps", "accuracy in %", series))
    return (*sheets, *charts), []


def _point(found: Found, steps: int, method: str, part: str) -> Value | None:
    records = [found(curve_task(found.scale, steps, method, seed)) for seed in range(found.scale.seeds)]
    return seeds_of([_curve(record, part) for record in records])


def _curve(record: Mapping[str, Any] | None, part: str) -> float | None:
    if record is None:
        return None
    return float(record["average"] if part.startswith("target") else record["source"]["before"])


def _table(name: str, title: str, source: str, data: str, rows: list[Row]) -> Table:
    benchmark = BENCHMARKS[data]
    about = "Each domain in turn is the target; the last model, default settings but for those named, nothing selected."
    return Table(
        name,
        title,
        source,
        about,
        partial(plan, benchmark, rows),
        partial(show, name, benchmark, rows),
        (data,),
        rows=tuple(dict.fromkeys(map(_asked_for, rows))),
    )


TABLES = [
    _table("backbones", "PACS with several encoders", "Table 2 (tab:backbons)", "pacs", ENCODERS),
    _table("loss-pacs", "Training loss, k and memory on PACS", "Table 5 (tab:knn-training-pacs)", "pacs", PACS_LOSS),
    _table(
        "loss-rotated-mnist",
        "Training loss on Rotated MNIST",
        "Table 12 (tab:knn-training)",
        "rotated-mnist",
        DIGITS_LOSS,
    ),
    Table(
        "convergence",
        "Convergence: head and vote after as many steps of ERM",
        "Figure 4d (fig:converge_exp)",
        "Rotated MNIST, 0 degrees is the target. Each point is a model trained for so many steps.",
        curves_plan,
        curves,
        ("rotated-mnist",),
    ),
]
