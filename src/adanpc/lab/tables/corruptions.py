"""Tables of corrupted images: what all of them share, and CIFAR-10-C."""

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
from adanpc.lab.tables.table import HIDDEN_NOTE, Parts, Results, Table, averages, hidden, own_label


class Row(NamedTuple):
    """A row of a table: a method and its batch size, with settings that differ from its defaults.

    Without a method, the row shows only the paper's numbers.
    """

    label: str
    method: str
    settings: Mapping[str, Any] = {}
    batch: int = 32


REFRESHED = {"refresh": 100}  # encode source rows again, with the statistics that the queries are encoded with
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
WEIGHTS = "weights/cifar10-resnet56-4bfd9763.th"  # in the folder of the data
BANK = 10  # the most bank rows for each image of a corruption
RECALLED = 100  # the most clean images that are answered before and after each corruption


class Corrupted(NamedTuple):
    """A data set of corrupted images, the clean data set that fills the bank, and the model that answers."""

    data: str
    clean: str
    encoder: str
    weights: str  # a file in the folder of the data, or "pretrained"


CIFAR = Corrupted("cifar-10-c", "cifar-10", "cifar-resnet-56", WEIGHTS)


def task_for(corrupted: Corrupted, row: Row, corruption: str, severity: int, scale: Scale, seed: int) -> Adapt:
    """The task of a method on one corruption at one severity, from a fresh start."""
    images = None
    if scale.images is not None:
        # A table has many corruptions, so each gets a tenth of the images of the scale.
        images = max(1, scale.images // 10)
    return task_on(corrupted, row, title(corruption, severity), scale, seed, extent_of(images))


def extent_of(images: int | None) -> Extent:
    """How much of the data is used for a method that gets this many images of a corruption; None stands for all."""
    if images is None:
        return Extent(recalled=RECALLED)
    return Extent(images, BANK * images, recalled=min(images, RECALLED))


def task_on(corrupted: Corrupted, row: Row, target: str, scale: Scale, seed: int, extent: Extent) -> Adapt:
    """The task of a method on one domain of corrupted images, from a fresh start."""
    subject = Frozen(
        corrupted.data,
        (target,),
        scale.encoder or corrupted.encoder,
        corrupted.weights,
        "own",
        known=(corrupted.clean, "train"),
        seed=seed,
    )
    return Adapt(subject, row.method, row.batch, settings=row.settings, extent=extent, seed=seed)


def bank_notes(results: Results, tasks: Sequence[Task], title: str) -> list[str]:
    """What to know if banks were made without training images of a data set; nothing if they had some."""
    records = results.all_of(tasks)
    if not any(record.get("prototypes") for record in records):
        return []
    note = (
        f"There are no training images of {title} here: banks begin with the rows of the head, one per class, and "
        "methods that look at training images are refused."
    )
    return [note]


def error_cell(results: Results, tasks: Sequence[Adapt]) -> Cell:
    """The error of a method in percent, over seeds; the reason if it was refused."""
    errors = [100 - float(record["average"]) for record in results.all_of(tasks)]
    return Cell(value(errors), text=results.reason(tasks[0]))


def own_rows(scale: Scale, others: Sequence[Row]) -> list[Row]:
    """A row for each of the user's own methods, beside other rows."""
    labels = {row.label for row in others}
    return [Row(own_label(method, labels), method) for method in scale.methods]


def cifar_plan(severity: int, scale: Scale) -> list[Task]:
    """Every method on all fifteen corruptions."""
    requested = [row for row in CIFAR_ROWS if scale.wants(row.label)]
    # Methods come last, because all of them share a scene, and only the latest scene is kept.
    return [
        task_for(CIFAR, row, corruption, severity, scale, seed)
        for corruption in CORRUPTIONS
        for seed in range(scale.seeds)
        for row in (*requested, *own_rows(scale, CIFAR_ROWS))
    ]


def _by_seed(scale: Scale, row: Row, severity: int) -> list[list[Adapt]]:
    """For each seed, the tasks of a method on every corruption."""
    tasks = []
    for seed in range(scale.seeds):
        tasks.append([task_for(CIFAR, row, corruption, severity, scale, seed) for corruption in CORRUPTIONS])
    return tasks


def _mean_error(results: Results, row: Row, severity: int) -> Value | None:
    """The mean error over all corruptions, over the seeds that have finished them all; None if there are none."""
    _, accuracy = averages(results, _by_seed(results.scale, row, severity))
    return None if accuracy is None else replace(accuracy, mean=100 - accuracy.mean)


def cifar(severity: int, results: Results) -> tuple[Parts, list[str]]:
    """The errors by corruption and their mean, as a sheet and a chart."""
    scale = results.scale
    compared = (*CIFAR_ROWS, *own_rows(scale, CIFAR_ROWS))
    rows = []
    for corruption in CORRUPTIONS:
        cells = []
        for row in compared:
            tasks = [task_for(CIFAR, row, corruption, severity, scale, seed) for seed in range(scale.seeds)]
            cells.append(error_cell(results, tasks))
        rows.append((corruption, tuple(cells)))
    means = [_mean_error(results, row, severity) for row in compared]
    rows.append(("mean", tuple(Cell(mean) for mean in means)))
    headings = tuple(row.label for row in compared)
    name = f"CIFAR-10-C at severity {severity}"
    sheet = Sheet(name, headings, tuple(rows), "error in %", "")
    beside = hidden(results, name, {row.label: _by_seed(scale, row, severity) for row in compared})
    bars = line("mean error", headings, means)
    chart = Chart(f"{name}, mean of fifteen corruptions", "method", "error in %", (bars,), "bar")
    note = "The paper prints no numbers for its CIFAR-10-C figures, and uses Wide ResNets 40-2 and 28-10."
    bank = bank_notes(results, cifar_plan(severity, scale), "CIFAR-10")
    return (sheet, beside, chart), [*bank, note, HIDDEN_NOTE]


TABLES = [
    *(
        Table(
            f"cifar-10-c-{severity}",
            f"CIFAR-10-C at severity {severity}",
            "Figures 5 and 6 to 8",
            "A ResNet-56 with published weights. Each corruption is met from a fresh start, on a tenth of the number "
            "of images given below, with a bank of that number of CIFAR-10 training images. Settings are the defaults, "
            "except for EATA's weight of 1 and 500 source images, and a refreshed bank in the combinations.",
            partial(cifar_plan, severity),
            partial(cifar, severity),
            ("cifar-10", "cifar-10-c"),
            uses=("seeds", "images"),
            rows=tuple(row.label for row in CIFAR_ROWS),
            takes_methods=True,
        )
        for severity in (5, 1)
    ),
]
