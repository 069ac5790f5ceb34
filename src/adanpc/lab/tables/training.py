"""Tables of what training contributes: the loss, the encoder, and the number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    HIDDEN_NOTE,
    Benchmark,
    Parts,
    Results,
    Table,
    averages,
    cells,
    hidden,
    over_seeds,
    printed,
    remarks,
)

KS = (50, 75, 100, 125, 150)
MEMORIES = ((10, 500), (50, 500), (50, 1000), (50, 1500), (100, 1000))
BACKBONES = {
    "ResNet18": "resnet-18",
    "ResNet50": "resnet-50",
    "ViT-B16": "vit-b16",
    "EfficientNet-Lite0": "efficientnet-lite0",
}
CURVE = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # shares of all steps after which a model is tested
CURVES = {"source": "linear head", "knn": "frozen vote", "adanpc": "AdaNPC"}  # methods with their labels


class Row(NamedTuple):
    """A row of a table: where it is in the paper, the training algorithm, and the test-time method."""

    label: str
    group: str  # of the paper's table
    printed: str  # the name of the row there
    algorithm: str
    method: str
    hyper: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    encoder: str = ""


def _pacs_loss() -> list[Row]:
    """The head, votes after ERM, and votes after training with the KNN loss."""
    rows = [Row("ERM, linear head", "ERM", "Linear", "erm", "source")]
    for k in KS:
        rows.append(Row(f"ERM + AdaNPC, k {k}", "ERM", f"k={k}", "erm", "adanpc", settings={"k": k}))
    for k, size in MEMORIES:
        label = f"KNN loss, k {k}, memory {size}"
        hyper = {"k": k, "size": size}
        rows.append(Row(label, "L_KNN", f"k={k}, M={size}", "knn", "adanpc", hyper, settings={"k": k}))
    return rows


def _encoders() -> list[Row]:
    """Each encoder with its head and with two votes."""
    rows = []
    for name, encoder in BACKBONES.items():
        rows.append(Row(f"{name}, linear head", name, name, "erm", "source", encoder=encoder))
        rows.append(Row(f"{name}, AdaNPC", name, "AdaNPC", "erm", "adanpc", encoder=encoder))
        rows.append(Row(f"{name}, AdaNPC+BN", name, "AdaNPC+BN", "erm", "adanpc-bn", encoder=encoder))
    return rows


DIGITS_LOSS = [
    Row("ERM, linear head", "", "", "erm", "source"),
    Row("ERM, frozen vote", "all", "ERM", "erm", "knn"),
    Row("ERM + AdaNPC", "all", "ERM+AdaNPC", "erm", "adanpc"),
    Row("KNN loss, frozen vote", "all", "L_KNN", "knn", "knn"),
    Row("KNN loss + AdaNPC", "all", "L_KNN + AdaNPC", "knn", "adanpc"),
]


def _choice(row: Row) -> str:
    """The name of a row for ``only``: its encoder where encoders are compared, or else its algorithm."""
    return row.encoder or row.algorithm


def task_for(benchmark: Benchmark, scale: Scale, row: Row, target: str, seed: int) -> Adapt:
    """The task of one row on one target; the last model is used, so it is the only one that is evaluated."""
    if row.encoder:
        scale = replace(scale, encoder=row.encoder)
    spec = scale.spec(benchmark.data, (target,), row.algorithm, seed)
    spec = replace(spec, hyper=dict(row.hyper), every=scale.steps)
    return Adapt(Trained(spec), row.method, settings=row.settings, seed=seed)


def plan(benchmark: Benchmark, rows: Sequence[Row], scale: Scale) -> list[Task]:
    """Every row on every target."""
    return [
        task_for(benchmark, scale, row, target, seed)
        for row in rows
        if scale.wants(_choice(row))
        for target in benchmark.domains
        for seed in range(scale.seeds)
    ]


def show(name: str, benchmark: Benchmark, rows: Sequence[Row], results: Results) -> tuple[Parts, list[str]]:
    """A sheet of rows by targets, and one of what their means hide."""
    scale = results.scale
    headings = paper.columns(name)
    shown = []
    by_row = {}
    for row in rows:
        tasks = []
        for seed in range(scale.seeds):
            tasks.append([task_for(benchmark, scale, row, target, seed) for target in benchmark.domains])
        by_row[row.label] = tasks
        each, mean = averages(results, tasks)
        ours = dict(zip(headings, [*each, mean], strict=True))
        theirs = {heading: printed(name, row.group, row.printed, heading) for heading in headings}
        if any(ours.values()) or not scale.only:
            shown.append((row.label, cells(ours, theirs)))
    sheet = Sheet(benchmark.title, headings, tuple(shown))
    return (sheet, hidden(results, benchmark.title, by_row)), [*remarks(name), HIDDEN_NOTE]


def curve_steps(scale: Scale) -> list[int]:
    """The numbers of training steps at which the curve has points."""
    return sorted({max(2, round(share * scale.steps)) for share in CURVE})


def curve_task(scale: Scale, steps: int, method: str, seed: int) -> Adapt:
    """The task of a method on a model trained for this many steps, which equals a longer run at that step."""
    spec = replace(scale.spec("rotated-mnist", ("0",), "erm", seed), steps=steps, every=steps)
    return Adapt(Trained(spec), method, seed=seed)


def curves_plan(scale: Scale) -> list[Task]:
    """Every length of training, answered by the head and by votes."""
    return [
        curve_task(scale, steps, method, seed)
        for steps in curve_steps(scale)
        for method in CURVES
        for seed in range(scale.seeds)
    ]


def curves(results: Results) -> tuple[Parts, list[str]]:
    """The accuracy on the target and on held-out source images by steps, as sheets and charts."""
    steps = curve_steps(results.scale)
    sheets = []
    charts = []
    for part, read in (("target (0 degrees)", _on_target), ("held-out source", _on_source)):
        title = f"Convergence on Rotated MNIST, {part}"
        rows = []
        series = []
        for method, label in CURVES.items():
            values = [_point(results, step, method, read) for step in steps]
            rows.append((label, tuple(Cell(ours) for ours in values)))
            series.append(line(label, steps, values))
        headings = tuple(str(step) for step in steps)
        sheets.append(Sheet(f"{title}: by training steps", headings, tuple(rows)))
        charts.append(Chart(title, "steps", "accuracy in %", tuple(series)))
    return (*sheets, *charts), []


def _point(
    results: Results, steps: int, method: str, read: Callable[[Mapping[str, Any]], float | None]
) -> Value | None:
    """One point of a curve, over seeds: what ``read`` takes from the records of a model after this many steps."""
    tasks = [curve_task(results.scale, steps, method, seed) for seed in range(results.scale.seeds)]
    return over_seeds([read(record) for record in results.all_of(tasks)])


def _on_target(record: Mapping[str, Any]) -> float | None:
    accuracy: float = record["average"]
    return accuracy


def _on_source(record: Mapping[str, Any]) -> float | None:
    accuracy: float | None = record["source"]["before"]
    return accuracy


def _table(name: str, title: str, source: str, data: str, rows: Sequence[Row]) -> Table:
    benchmark = BENCHMARKS[data]
    about = (
        "Each domain in turn is the target. The last model of each run is used, with default settings except for those "
        "in the name of the row; nothing is selected."
    )
    return Table(
        name,
        title,
        source,
        about,
        partial(plan, benchmark, rows),
        partial(show, name, benchmark, rows),
        (data,),
        rows=tuple(dict.fromkeys(_choice(row) for row in rows)),
    )


TABLES = [
    _table("backbones", "PACS with several encoders", "Table 2", "pacs", _encoders()),
    _table("loss-pacs", "Training loss, k and memory on PACS", "Table 5", "pacs", _pacs_loss()),
    _table(
        "loss-rotated-mnist",
        "Training loss on Rotated MNIST",
        "Table 12",
        "rotated-mnist",
        DIGITS_LOSS,
    ),
    Table(
        "convergence",
        "Convergence: head and vote after the same number of ERM steps",
        "Figure 4d",
        "Rotated MNIST with 0 degrees as the target. Each point is a model trained for that many steps.",
        curves_plan,
        curves,
        ("rotated-mnist",),
    ),
]
