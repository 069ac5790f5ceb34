"""The table of what test-time methods cost: time and memory, all measured in one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from adanpc.lab.adapt import ADAPTERS
from adanpc.lab.show.exhibit import Cell, Sheet, Value
from adanpc.lab.sweep.subjects import Trained
from adanpc.lab.sweep.task import Task
from adanpc.lab.sweep.timing import Timing
from adanpc.lab.tables.methods import settings
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import BENCHMARKS, Parts, Results, Row, Table, benchmarks_in, printed, remarks

TIMED = tuple(benchmark.data for benchmark in benchmarks_in("inference-time"))
IMAGES = {32: 64, 1: 8}  # in a round, by batch size


class Quantity(NamedTuple):
    """A quantity that is shown for each method: its field in the record, a title, a unit, and the decimals shown."""

    field: str
    title: str
    unit: str
    decimals: int


BESIDE = Quantity("ms", "Milliseconds per image beside the encoder's forward pass", "ms", 3)
TOTAL = Quantity("total_ms", "Milliseconds per image in total", "ms", 2)
MEMORY = Quantity("mb", "Megabytes held beyond the model", "MB", 1)
SHOWN = {32: (BESIDE, TOTAL, MEMORY), 1: (BESIDE, TOTAL)}  # by batch size; memory does not depend on it


def timing(scale: Scale, data: str, batch: int) -> Timing:
    """The task that times every method, on a model trained for only two steps: times do not depend on its weights."""
    target = BENCHMARKS[data].domains[:1]
    spec = scale.spec(data, target, "rotation")
    short = replace(spec, steps=2, every=2)
    names = []
    own = []
    for name, method in ADAPTERS.items():
        if scale.wants(name):
            names.append(name)
        if method.one_by_one:
            own.append((name, settings(name, data)))
    return Timing(Trained(short), tuple(names), batch, IMAGES[batch], tuple(own))


def timing_plan(scale: Scale) -> list[Task]:
    """All methods on each data set, in batches of 32 and one by one."""
    return [timing(scale, data, batch) for data in TIMED for batch in SHOWN]


def times(results: Results) -> tuple[Parts, list[str]]:
    """Sheets of milliseconds per image, without and with the encoder, and of memory."""
    headings = tuple(BENCHMARKS[data].title for data in TIMED)
    sheets = []
    for batch, quantities in SHOWN.items():
        measured = {data: _methods(results, data, batch) for data in TIMED}
        for quantity in quantities:
            rows = _rows(measured, quantity)
            title = f"{quantity.title}, batches of {batch}"
            sheets.append(Sheet(title, headings, rows, quantity.unit, "low", quantity.decimals))
    return tuple(sheets), remarks("inference-time")


def _rows(measured: Mapping[str, Mapping[str, Any]], quantity: Quantity) -> tuple[Row, ...]:
    """A row for each method that was measured on a data set: the quantity on all of them.

    Args:
        measured: for each data set, what was measured for each method.
        quantity: what to show.
    """
    rows = []
    for method in ADAPTERS:
        cells = tuple(_cell(measured[data], data, method, quantity) for data in TIMED)
        if any(cell.ours for cell in cells):
            rows.append((method, cells))
    return tuple(rows)


def _methods(results: Results, data: str, batch: int) -> Mapping[str, Any]:
    """What was measured for each method; empty if there is no record yet."""
    record = results.of(timing(results.scale, data, batch))
    return {} if record is None else record["methods"]


def _cell(methods: Mapping[str, Any], data: str, method: str, quantity: Quantity) -> Cell:
    ours = None
    theirs = None
    if method in methods:
        ours = Value(methods[method][quantity.field])
    if quantity is BESIDE:
        theirs = printed("inference-time", "all", ADAPTERS[method].in_paper, BENCHMARKS[data].title)
    return Cell(ours, theirs)


TABLES = [
    Table(
        "inference-time",
        "Inference time and memory of test-time methods",
        "Table 6",
        "All methods take turns on the same images and the same machine; times are medians of several rounds. The "
        "first domain is the target; the bank holds four fifths of all others.",
        timing_plan,
        times,
        TIMED,
        alone=True,
        uses=("images",),
        rows=tuple(ADAPTERS),
    ),
]
