"""The table of ImageNet-C: the paper's four blurs, and every method on all fifteen corruptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from adanpc.lab.adapt import ADAPTERS, find
from adanpc.lab.data.corrupted import title
from adanpc.lab.data.corruptions import CORRUPTIONS
from adanpc.lab.show.exhibit import Cell, Sheet
from adanpc.lab.sweep.task import Adapt, Task
from adanpc.lab.tables.corruptions import (
    REFRESHED,
    Corrupted,
    Row,
    bank_notes,
    error_cell,
    extent_of,
    own_rows,
    task_on,
)
from adanpc.lab.tables.methods import PASSES, affordable
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import HIDDEN_NOTE, Parts, Results, Table, averages, hidden, printed, remarks

IMAGENET = Corrupted("imagenet-c", "imagenet", "resnet-50", "pretrained")
SEVERITY = 5
BLURS = {"Defoc": "defocus_blur", "Glass": "glass_blur", "Motion": "motion_blur", "Zoom": "zoom_blur"}
HEAD = {"trains": "head"}
ROWS = (
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
    "R-50 (GN)+JT and TTT have only the paper's numbers: they need a ResNet-50 with GroupNorm that was trained on "
    "ImageNet together with rotations, and no package provides its weights."
)
SLOW = (
    f"Methods that look at more than {PASSES} views of each image are run on fewer images, so that they make about as "
    "many passes as one with that number of views would, unless the scale takes all images."
)


def _others(batch: int) -> tuple[Row, ...]:
    """Rows for the methods that are missing from the paper's tables and that can use this network."""
    in_paper = {row.method for row in ROWS}
    rows = []
    for name, method in ADAPTERS.items():
        if name in in_paper or method.needs_rotation_head or "published" in name:
            continue
        if batch >= method.least:
            rows.append(Row(name, name, batch=batch))
    return tuple(rows)


OTHERS = _others(32)
# Methods that see images are slow one by one, so only those in the paper's table are run that way.
OTHERS_ONE_BY_ONE = tuple(row for row in _others(1) if ADAPTERS[row.method].sees == "features")


def task_for(row: Row, corruption: str, scale: Scale, seed: int) -> Adapt:
    """The task of a method on one corruption, from a fresh start; slow methods get fewer images."""
    images = None
    if scale.images is not None:
        images = affordable(row.method, max(1, scale.images // 10))
    return task_on(IMAGENET, row, title(corruption, SEVERITY), scale, seed, extent_of(images))


def _effort(row: Row) -> tuple[bool, int]:
    """A sort key from quick to slow: methods that see features come first, then those with few views of an image."""
    method = find(row.method)
    return method.sees == "images", method.passes


def plan(scale: Scale) -> list[Task]:
    """Every method on every corruption, quick methods first, and the paper's blurs before other corruptions."""
    rows = [*ROWS, *OTHERS, *OTHERS_ONE_BY_ONE]
    for half in ONE_BY_ONE.values():
        rows += half
    wanted = [row for row in rows if row.method and scale.wants(row.label)]
    wanted += own_rows(scale, rows)
    wanted.sort(key=_effort)
    corruptions = sorted(CORRUPTIONS, key=lambda corruption: corruption not in BLURS.values())
    tasks: list[Task] = []
    for effort in sorted({_effort(row) for row in wanted}):
        for corruption in corruptions:
            for seed in range(scale.seeds):
                tasks += [task_for(row, corruption, scale, seed) for row in wanted if _effort(row) == effort]
    return tasks


def show(results: Results) -> tuple[Parts, list[str]]:
    """Sheets like the paper's tables, and sheets with these and all other methods on fifteen corruptions."""
    sheets = [_blurs(results, "imagenet-c", "all", ROWS, "batches of 32")]
    for group, rows in ONE_BY_ONE.items():
        sheets.append(_blurs(results, "imagenet-c-batch-1", group, rows, f"one by one, {group}"))
    shown = {
        "batches of 32": [*ROWS, *OTHERS, *own_rows(results.scale, [*ROWS, *OTHERS])],
        "one by one": _each_once([*ONE_BY_ONE.values(), OTHERS_ONE_BY_ONE]),
    }
    for about, methods in shown.items():
        sheets.append(_fifteen(results, methods, about))
        by_method = {row.label: _by_seed(results.scale, row) for row in methods if row.method}
        sheets.append(hidden(results, f"ImageNet-C, {about}", by_method))
    bank = bank_notes(results, plan(results.scale), "ImageNet")
    return tuple(sheets), [*bank, JOINT, SLOW, HIDDEN_NOTE, *remarks("imagenet-c", "imagenet-c-batch-1")]


def _each_once(groups: Iterable[Sequence[Row]]) -> list[Row]:
    """The rows of all groups, each once; the label of a row that trains the head says so."""
    rows: dict[tuple[str, str], Row] = {}
    for group in groups:
        for row in group:
            label = row.label
            if row.settings == HEAD or row.method == "tent-clf":
                label += ", head"
            rows.setdefault((label, row.method), row._replace(label=label))
    return list(rows.values())


def _by_seed(scale: Scale, row: Row) -> list[list[Adapt]]:
    """For each seed, the tasks of a method on every corruption."""
    tasks = []
    for seed in range(scale.seeds):
        tasks.append([task_for(row, corruption, scale, seed) for corruption in CORRUPTIONS])
    return tasks


def _tasks(results: Results, row: Row, corruption: str) -> list[Adapt]:
    """The tasks of a method on one corruption, one per seed."""
    return [task_for(row, corruption, results.scale, seed) for seed in range(results.scale.seeds)]


def _blurs(results: Results, table: str, group: str, rows: Sequence[Row], about: str) -> Sheet:
    """One group of rows in one of the paper's tables: methods by blurs."""
    shown = []
    for row in rows:
        cells = []
        for column, corruption in BLURS.items():
            theirs = printed(table, group, row.label, column)
            ours = Cell()
            if row.method:
                ours = error_cell(results, _tasks(results, row, corruption))
            cells.append(replace(ours, paper=theirs))
        shown.append((row.label, tuple(cells)))
    return Sheet(f"ImageNet-C at severity 5, {about}", tuple(BLURS), tuple(shown), "error in %", "low")


def _fifteen(results: Results, rows: Sequence[Row], about: str) -> Sheet:
    """Methods by corruptions, with the mean over corruptions where all have a record."""
    shown = []
    for row in rows:
        if row.method:
            cells = [error_cell(results, _tasks(results, row, corruption)) for corruption in CORRUPTIONS]
            _, accuracy = averages(results, _by_seed(results.scale, row))
            mean = None if accuracy is None else replace(accuracy, mean=100 - accuracy.mean)
            shown.append((row.label, (*cells, Cell(mean))))
    name = f"ImageNet-C at severity 5, all fifteen corruptions, {about}"
    return Sheet(name, (*CORRUPTIONS, "mean"), tuple(shown), "error in %", "low")


TABLES = [
    Table(
        "imagenet-c",
        "ImageNet-C at severity 5, alone and combined, in batches and one by one",
        "Tables 3 and 11",
        "A ResNet-50 with published weights and a bank of ImageNet training images. Each corruption is met from a "
        "fresh start, on a tenth of the number of images given below.",
        plan,
        show,
        ("imagenet", "imagenet-c"),
        uses=("seeds", "images"),
        rows=tuple(dict.fromkeys(row.label for row in (*ROWS, *OTHERS) if row.method)),
        takes_methods=True,
    ),
]
