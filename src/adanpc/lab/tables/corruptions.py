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
from adanpc.lab.tables.table import Found, Parts, Table, averages, printed, remarks


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


def asked(data: str, encoder: str, row: Row, corruption: str, severity: int, scale: Scale, seed: int) -> Adapt:
    """A method on one corruption at one severity, from a fresh start."""
    known = ("cifar-10", "train") if data == "cifar-10-c" else ("imagenet", "train")
    weights = WEIGHTS if data == "cifar-10-c" else "pretrained"
    subject = Frozen(data, (title(corruption, severity),), encoder, weights, "own", known=known, seed=seed)
    images = None if scale.images is None else max(1, scale.images // 10)
    extent = Extent(images, None if images is None else BANK * images, recalled=images or 1000)
    return Adapt(subject, row.method, row.batch, settings=row.settings, extent=extent, seed=seed)


def _error(found: Found, made: Sequence[Adapt]) -> Cell:
    errors = [100 - float(record["average"]) for one in made if (record := found(one))]
    return Cell(value(errors), text=found.why(made[0]))


def cifar_plan(severity: int, scale: Scale) -> list[Task]:
    """All fifteen corruptions."""
    return [
        asked("cifar-10-c", scale.encoder or "cifar-resnet-56", row, corruption, severity, scale, seed)
        for corruption in CORRUPTIONS
        for seed in range(scale.seeds)
        for row in CIFAR_ROWS
        if scale.wants(row.label)
    ]


def _mean_error(found: Found, encoder: str, row: Row, severity: int) -> Value | None:
    """The mean over corruptions, where all are known, over seeds."""
    tasks = [
        [asked("cifar-10-c", encoder, row, name, severity, found.scale, seed) for name in CORRUPTIONS]
        for seed in range(found.scale.seeds)
    ]
    right = averages(found, tasks)[1]
    return None if right is None else replace(right, mean=100 - right.mean)


def cifar(severity: int, found: Found) -> tuple[Parts, list[str]]:
    """Errors by corruption, and their mean."""
    encoder, rows = found.scale.encoder or "cifar-resnet-56", []
    for corruption in CORRUPTIONS:
        tasks = [
            [
                asked("cifar-10-c", encoder, row, corruption, severity, found.scale, seed)
                for seed in range(found.scale.seeds)
            ]
            for row in CIFAR_ROWS
        ]
        rows.append((corruption, tuple(_error(found, each) for each in tasks)))
    means = [Cell(_mean_error(found, encoder, row, severity)) for row in CIFAR_ROWS]
    headings = tuple(row.label for row in CIFAR_ROWS)
    sheet = Sheet(f"CIFAR-10-C at severity {severity}", headings, (*rows, ("mean", tuple(means))), "error in %", "")
    bars = line("mean error", headings, [cell.ours for cell in means])
    chart = Chart(
        f"CIFAR-10-C at severity {severity}, mean of fifteen corruptions", "method", "error in %", (bars,), "bar"
    )
    return (sheet, chart), [
        "The paper prints no numbers for its figures of CIFAR-10-C, and uses Wide ResNets 40-2 and 28-10."
    ]


def imagenet_plan(scale: Scale) -> list[Task]:
    """The four blurs of the paper's table."""
    return [
        asked("imagenet-c", scale.encoder or "resnet-50", row, corruption, 5, scale, seed)
        for corruption in BLURS.values()
        for seed in range(scale.seeds)
        for row in (*IMAGENET_ROWS, *(each for rows in ONE_BY_ONE.values() for each in rows))
        if row.method and scale.wants(row.label)
    ]


def imagenet(found: Found) -> tuple[Parts, list[str]]:
    """Batches of 32, and one by one in both halves of the paper's table."""
    sheets = []
    groups: Mapping[str, Mapping[str, tuple[Row, ...]]] = {
        "imagenet-c": {"all": IMAGENET_ROWS},
        "imagenet-c-batch-1": ONE_BY_ONE,
    }
    for name, parts in groups.items():
        for group, rows in parts.items():
            made = []
            for row in rows:
                each = []
                for column, corruption in BLURS.items():
                    tasks = [
                        asked("imagenet-c", found.scale.encoder or "resnet-50", row, corruption, 5, found.scale, seed)
                        for seed in range(found.scale.seeds)
                        if row.method
                    ]
                    cell = _error(found, tasks) if tasks else Cell()
                    each.append(Cell(cell.ours, printed(name, group, row.label, column), cell.text))
                made.append((row.label, tuple(each)))
            label = {"all": "batches of 32"}.get(group, f"one by one, {group}")
            sheets.append(Sheet(f"ImageNet-C at severity 5, {label}", tuple(BLURS), tuple(made), "error in %", "low"))
    return tuple(sheets), [JOINT, *remarks(*groups)]


TABLES = [
    *(
        Table(
            f"cifar-10-c-{severity}",
            f"CIFAR-10-C at severity {severity}",
            "Figures 5 and 6 to 8 (fig:cifar10-5, fig:cifar10-1, fig:cifar10-3, fig:cifar10-4)",
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
        "Tables 3 and 11 (tab:corr, tab:corr_bsz1)",
        "A ResNet-50 with published weights and a bank of ImageNet training images.",
        imagenet_plan,
        imagenet,
        ("imagenet", "imagenet-c"),
        uses=("seeds", "images"),
        rows=tuple(row.label for row in IMAGENET_ROWS if row.method),
    ),
]
