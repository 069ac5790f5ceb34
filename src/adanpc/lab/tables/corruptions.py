"""Corrupted images: CIFAR-10-C and ImageNet-C."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from adanpc.lab.data.corrupted import title
from adanpc.lab.data.corruptions import CORRUPTIONS
from adanpc.lab.show.exhibit import Cell, Chart, Sheet, Value, line, value
from adanpc.lab.sweep.subjects import Extent, Frozen
from adanpc.lab.sweep.task import Adapt, Task
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import Parts, Results, Table, averages, printed, remarks


class Row(NamedTuple):
    """A method of a table, with settings that differ from its defaults; without a method, the paper's alone."""

    label: str
    method: str
    settings: Mapping[str, Any] = {}
    batch: int = 32


REFRESHED = {"refresh": 100}  # source rows are made anew, with the statistics that queries are seen with
HEAD = {"trains": "head"}
CIFAR_ROWS = (
    Row("Linear", "source"),
    Row("k-NN", "knn"),
    Row("BN adapt", "bn-adapt"),
    Row("Tent", "tent"),
    Row("ETA", "eta"),
    Row("EATA", "eata", {"weight": 1.0, "samples": 500}),
    Row("T3A", "t3a"),
    Row("AdaNPC", "adanpc"),
    Row("AdaNPC+BN", "adanpc-bn"),
    Row("AdaNPC+Tent", "adanpc-tent", REFRESHED),
    Row("AdaNPC+ETA", "adanpc-eta", REFRESHED),
)
IMAGENET_ROWS = (
    Row("R-50 (GN)+JT", ""),
    Row("R-50 (BN)", "source"),
    Row("AdaNPC", "adanpc"),
    Row("TTT", ""),
    Row("TTA", "ttaug"),
    Row("BN adaptation", "bn-adapt"),
    Row("MEMO", "memo"),
    Row("Tent", "tent"),
    Row("Tent (episodic)", "tent", {"episodic": True}),
    Row("AdaNPC+Tent", "adanpc-tent", REFRESHED),
    Row("ETA", "eta"),
    Row("EATA", "eata"),
    Row("AdaNPC+ETA", "adanpc-eta", REFRESHED),
)
ONE_BY_ONE: Mapping[str, tuple[Row, ...]] = {
    "bn-retraining": (
        Row("R-50 (BN)", "source", batch=1),
        Row("Tent", "tent", batch=1),
        Row("ETA", "eta", batch=1),
        Row("EATA", "eata", batch=1),
        Row("AdaNPC", "adanpc", batch=1),
    ),
    "clf-retraining": (
        Row("R-50 (BN)", "source", batch=1),
        Row("Tent", "tent-clf", batch=1),
        Row("ETA", "eta", HEAD, batch=1),
        Row("EATA", "eata", HEAD, batch=1),
        Row("AdaNPC", "adanpc", batch=1),
    ),
}
JOINT = (
    "R-50 (GN)+JT and TTT are the paper's alone: they need a ResNet-50 with GroupNorm that was trained on ImageNet "
    "together with rotations; no weights of it come with a package."
)
BLURS = {"Defoc": "defocus_blur", "Glass": "glass_blur", "Motion": "motion_blur", "Zoom": "zoom_blur"}
WEIGHTS = "weights/cifar10-resnet56-4bfd9763.th"  # below the folder of the data
BANK = 10  # rows of the bank for each image of a corruption, at most


class Corrupted(NamedTuple):
    """A data set of corrupted images, the clean one that fills the bank, and the model that answers."""

    data: str
    clean: str
    encoder: str
    weights: str  # a file below the folder of the data, or "pretrained"


CIFAR = Corrupted("cifar-10-c", "cifar-10", "cifar-resnet-56", WEIGHTS)
IMAGENET = Corrupted("imagenet-c", "imagenet", "resnet-50", "pretrained")


def task_for(corrupted: Corrupted, row: Row, corruption: str, severity: int, scale: Scale, seed: int) -> Adapt:
    """A method on one corruption at one severity, from a fresh start."""
    subject = Frozen(
        corrupted.data,
        (title(corruption, severity),),
        scale.encoder or corrupted.encoder,
        corrupted.weights,
        "own",
        known=(corrupted.clean, "train"),
        seed=seed,
    )
    if scale.images is None:
        extent = Extent()
    else:
        images = max(1, scale.images // 10)
        extent = Extent(images, BANK * images, recalled=images)
    return Adapt(subject, row.method, row.batch, settings=row.settings, extent=extent, seed=seed)


def _error(results: Results, tasks: Sequence[Adapt]) -> Cell:
    """The error of a method, over seeds."""
    errors = [100 - float(record["average"]) for record in results.all_of(tasks)]
    return Cell(value(errors), text=results.reason(tasks[0]))


def cifar_plan(severity: int, scale: Scale) -> list[Task]:
    """All fifteen corruptions."""
    return [
        task_for(CIFAR, row, corruption, severity, scale, seed)
        for corruption in CORRUPTIONS
        for seed in range(scale.seeds)
        for row in CIFAR_ROWS
        if scale.wants(row.label)
    ]


def _mean_error(results: Results, row: Row, severity: int) -> Value | None:
    """The mean over corruptions, where all are known, over seeds."""
    scale = results.scale
    tasks = []
    for seed in range(scale.seeds):
        tasks.append([task_for(CIFAR, row, corruption, severity, scale, seed) for corruption in CORRUPTIONS])
    _, accuracy = averages(results, tasks)
    return None if accuracy is None else replace(accuracy, mean=100 - accuracy.mean)


def cifar(severity: int, results: Results) -> tuple[Parts, list[str]]:
    """Errors by corruption, and their mean."""
    scale = results.scale
    rows = []
    for corruption in CORRUPTIONS:
        cells = []
        for row in CIFAR_ROWS:
            tasks = [task_for(CIFAR, row, corruption, severity, scale, seed) for seed in range(scale.seeds)]
            cells.append(_error(results, tasks))
        rows.append((corruption, tuple(cells)))
    means = [_mean_error(results, row, severity) for row in CIFAR_ROWS]
    rows.append(("mean", tuple(Cell(mean) for mean in means)))
    headings = tuple(row.label for row in CIFAR_ROWS)
    name = f"CIFAR-10-C at severity {severity}"
    sheet = Sheet(name, headings, tuple(rows), "error in %", "")
    bars = line("mean error", headings, means)
    chart = Chart(f"{name}, mean of fifteen corruptions", "method", "error in %", (bars,), "bar")
    note = "The paper prints no numbers for its figures of CIFAR-10-C, and uses Wide ResNets 40-2 and 28-10."
    return (sheet, chart), [note]


def imagenet_plan(scale: Scale) -> list[Task]:
    """The four blurs of the paper's table."""
    rows = [*IMAGENET_ROWS]
    for half in ONE_BY_ONE.values():
        rows += half
    wanted = [row for row in rows if row.method and scale.wants(row.label)]
    return [
        task_for(IMAGENET, row, corruption, 5, scale, seed)
        for corruption in BLURS.values()
        for seed in range(scale.seeds)
        for row in wanted
    ]


def imagenet(results: Results) -> tuple[Parts, list[str]]:
    """Batches of 32, and one by one in both halves of the paper's table."""
    sheets = [_blurs(results, "imagenet-c", "all", IMAGENET_ROWS, "batches of 32")]
    for group, rows in ONE_BY_ONE.items():
        sheets.append(_blurs(results, "imagenet-c-batch-1", group, rows, f"one by one, {group}"))
    return tuple(sheets), [JOINT, *remarks("imagenet-c", "imagenet-c-batch-1")]


def _blurs(results: Results, table: str, group: str, rows: Sequence[Row], about: str) -> Sheet:
    """A group of one of the paper's tables: methods by blurs."""
    shown = []
    for row in rows:
        cells = []
        for column, corruption in BLURS.items():
            theirs = printed(table, group, row.label, column)
            ours = Cell()
            if row.method:
                seeds = range(results.scale.seeds)
                ours = _error(results, [task_for(IMAGENET, row, corruption, 5, results.scale, seed) for seed in seeds])
            cells.append(replace(ours, paper=theirs))
        shown.append((row.label, tuple(cells)))
    return Sheet(f"ImageNet-C at severity 5, {about}", tuple(BLURS), tuple(shown), "error in %", "low")


TABLES = [
    *(
        Table(
            f"cifar-10-c-{severity}",
            f"CIFAR-10-C at severity {severity}",
            "Figures 5 and 6 to 8",
            "A ResNet-56 with published weights; each corruption from a fresh start, on a tenth as many images as are "
            "named below, with a bank of as many CIFAR-10 training images as are named. Default settings but for "
            "EATA's weight of 1 and 500 source images, and a refreshed bank in the combinations.",
            partial(cifar_plan, severity),
            partial(cifar, severity),
            ("cifar-10", "cifar-10-c"),
            uses=("seeds", "images"),
            rows=tuple(row.label for row in CIFAR_ROWS),
        )
        for severity in (5, 1)
    ),
    Table(
        "imagenet-c",
        "ImageNet-C at severity 5, alone and combined, in batches and one by one",
        "Tables 3 and 11",
        "A ResNet-50 with published weights and a bank of ImageNet training images.",
        imagenet_plan,
        imagenet,
        ("imagenet", "imagenet-c"),
        uses=("seeds", "images"),
        rows=tuple(row.label for row in IMAGENET_ROWS if row.method),
    ),
]
