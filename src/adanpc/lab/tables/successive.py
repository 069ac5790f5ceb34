"""Successive adaptation: through all domains in order, and back to the source after each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from adanpc.lab.adapt import ADAPTERS
from adanpc.lab.show.exhibit import Cell, Chart, Sheet, Value, line, value
from adanpc.lab.sweep.subjects import ALL, Extent, Trained
from adanpc.lab.sweep.task import Adapt, Task
from adanpc.lab.tables import paper
from adanpc.lab.tables.methods import EACH, FEW, NAMES, how_many, settings, short
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import BENCHMARKS, Benchmark, Found, Parts, Table, printed, remarks

DATA = ("rotated-mnist", "vlcs", "pacs", "terra-incognita", "domain-net")
BATCHES = (1, 2, 32)
DRAWN = (*NAMES, "knn", "adanpc-bn")  # in the charts


def led(benchmark: Benchmark, scale: Scale, method: str, batch: int, extent: Extent, seed: int) -> Adapt:
    """A method that is led through all domains but the first, on which its model was trained."""
    algorithm = "rotation" if method in ("ttt", "ttt-online") else "erm"
    subject = Trained(scale.spec(benchmark.data, benchmark.domains[1:], algorithm, seed))
    return Adapt(subject, method, batch, "successive", settings(method, benchmark.data), extent, seed)


def plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """Every method on some images, one by one, in pairs and in batches; methods that see features on all."""
    wanted = [method for method in ADAPTERS if scale.wants(method)]
    few = [(method, batch, short(method, scale)) for method in wanted for batch in BATCHES if _differs(method, batch)]
    all_ = [(method, 32, ALL) for method in wanted if ADAPTERS[method].sees == "features"]
    return [led(benchmark, scale, *what, seed) for seed in range(scale.seeds) for what in (*few, *all_)]


def _differs(method: str, batch: int) -> bool:
    return batch == 1 or method not in EACH


def show(benchmark: Benchmark, found: Found) -> tuple[Parts, list[str]]:
    """Accuracy as domains are met, and on the source after each."""
    seen = [(method, 32, ALL) for method in ADAPTERS if ADAPTERS[method].sees == "features"]
    long = _sheets(benchmark, found, seen, "all images, batches of 32, methods that see features")
    charts = [chart for sheet in long if (chart := _chart(sheet))]
    parts: list[Sheet] = []
    for batch in BATCHES:
        usual = [(method, batch, short(method, found.scale)) for method in ADAPTERS if method not in FEW]
        parts += _sheets(benchmark, found, usual, f"{how_many('source', found.scale)}, batches of {batch}")
    few = [
        (method, batch, short(method, found.scale)) for method in FEW for batch in BATCHES if _differs(method, batch)
    ]
    parts += _sheets(benchmark, found, few, "methods that look at many copies of each image")
    return (*long, *charts, *parts), remarks(f"reval-{benchmark.data}")


def _sheets(
    benchmark: Benchmark, found: Found, rows: Sequence[tuple[str, int, Extent]], what: str
) -> tuple[Sheet, Sheet]:
    """What is met, and what is left of the source; one row for each method, batch size and extent."""
    first, *others = benchmark.domains
    table = f"reval-{benchmark.data}"
    theirs = paper.columns(table)[:-1] if table in paper.tables() else ("before", *others)
    met, back = [], []
    for method, batch, extent in rows:
        tasks = [led(benchmark, found.scale, method, batch, extent, seed) for seed in range(found.scale.seeds)]
        label = f"{method}, {how_many(method, found.scale)}, batches of {batch}" if method in FEW else method
        if records := [record for task in tasks if (record := found(task))]:
            met.append((label, tuple(map(Cell, _met(records, others)))))
            cells = [printed(table, "all", NAMES.get(method, method), column) for column in theirs]
            back.append((label, tuple(map(Cell, _back(records, others), cells))))
        elif text := found.why(tasks[0]):
            met.append((label, tuple(Cell(text=text) for _ in (*others, "average"))))
    return (
        Sheet(f"Accuracy on each domain as it is met: {what}", (*others, "average"), tuple(met)),
        Sheet(f"Accuracy on held-out images of {first} after each domain: {what}", ("before", *others), tuple(back)),
    )


def _met(records: list[dict[str, Any]], names: list[str]) -> list[Value | None]:
    each = [value([record["domains"][name] for record in records if name in record["domains"]]) for name in names]
    return [*each, value([record["average"] for record in records])]


def _back(records: list[dict[str, Any]], names: list[str]) -> list[Value | None]:
    before = value([record["source"]["before"] for record in records])
    return [before, *(value([record["source"]["after"][name] for record in records]) for name in names)]


def _chart(sheet: Sheet) -> Chart | None:
    columns = tuple(column for column in sheet.columns if column != "average")
    series = tuple(
        line(label, columns, [cell.ours for cell in made[: len(columns)]])
        for label, made in sheet.rows
        if label in DRAWN
    )
    return Chart(sheet.title, "domain", sheet.unit, series) if series else None


TABLES = [
    Table(
        f"successive-{data}",
        f"Successive adaptation on {BENCHMARKS[data].title}, and what is left of the source",
        "Figures 1b, 2 and 3, Tables 9 and 10 (reval-1, reval-2)",
        "Trained on the first domain alone, then led through the others in order, without a reset. Default settings, "
        "nothing selected on targets. Held-out source images are answered and not learned from.",
        partial(plan, BENCHMARKS[data]),
        partial(show, BENCHMARKS[data]),
        (data,),
        rows=tuple(ADAPTERS),
    )
    for data in DATA
]
