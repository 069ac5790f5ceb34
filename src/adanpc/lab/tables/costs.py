"""What test-time methods cost: time and memory, all in one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adanpc.lab.adapt import ADAPTERS
from adanpc.lab.show.exhibit import Cell, Sheet, Value
from adanpc.lab.sweep.subjects import Trained
from adanpc.lab.sweep.task import Task
from adanpc.lab.sweep.timing import Timing
from adanpc.lab.tables.methods import EACH, NAMES, settings
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import BENCHMARKS, Found, Parts, Table, printed, remarks

TIMED = ("rotated-mnist", "pacs", "vlcs", "domain-net")


def timing(scale: Scale, data: str, batch: int) -> Timing:
    """Every method in one run, on a model that is trained for two steps: its weights decide no time."""
    spec = replace(scale.spec(data, BENCHMARKS[data].domains[:1], "rotation"), steps=2, every=2)
    names = tuple(method for method in ADAPTERS if scale.wants(method))
    return Timing(
        Trained(spec), names, batch, 64 if batch == 32 else 8, tuple((name, settings(name, data)) for name in EACH)
    )


def timing_plan(scale: Scale) -> list[Task]:
    """Batches of 32, and one by one."""
    return [timing(scale, data, batch) for data in TIMED for batch in (32, 1)]


def times(found: Found) -> tuple[Parts, list[str]]:
    """Milliseconds an image, with the encoder's, and without; and what is held in memory."""
    headings = tuple(BENCHMARKS[data].title for data in TIMED)
    parts = []
    for batch in (32, 1):
        records = {data: found(timing(found.scale, data, batch)) or {"methods": {}} for data in TIMED}
        for quantity, title, decimals in (
            ("ms", "Milliseconds an image beside the encoder's forward pass", 3),
            ("total_ms", "Milliseconds an image, all in all", 2),
            ("mb", "Megabytes held beyond the model", 1),
        ):
            if quantity == "mb" and batch == 1:
                continue
            rows = tuple(
                (method, tuple(_time(records[data], data, method, quantity) for data in TIMED)) for method in ADAPTERS
            )
            known = tuple(row for row in rows if any(cell.ours for cell in row[1]))
            unit = "MB" if quantity == "mb" else "ms"
            parts.append(Sheet(f"{title}, batches of {batch}", headings, known, unit, "low", decimals))
    return tuple(parts), remarks("inference-time")


def _time(record: Mapping[str, Any], data: str, method: str, quantity: str) -> Cell:
    theirs = printed("inference-time", "all", NAMES.get(method, method), BENCHMARKS[data].title)
    if method not in record["methods"]:
        return Cell(None, theirs if quantity == "ms" else None)
    return Cell(Value(record["methods"][method][quantity]), theirs if quantity == "ms" else None)


TABLES = [
    Table(
        "inference-time",
        "Inference time and memory of test-time methods",
        "Table 6 (tab:infernece_time)",
        "All methods in turns on the same images and one machine, the median of several rounds. The first domain is "
        "the target; the bank holds four fifths of all others.",
        timing_plan,
        times,
        TIMED,
        alone=True,
        uses=("images",),
        rows=tuple(ADAPTERS),
    ),
]
