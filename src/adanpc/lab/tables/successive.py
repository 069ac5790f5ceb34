"""Successive adaptation: through all domains in order, and back to the source after each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from adanpc.lab.adapt import ADAPTERS
from adanpc.lab.show.exhibit import Cell, Chart, Sheet, Value, line, value
from adanpc.lab.sweep.subjects import ALL, Extent, Trained
from adanpc.lab.sweep.task import Adapt, Task
from adanpc.lab.tables import paper
from adanpc.lab.tables.methods import how_many, is_slow, limited, settings
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import BENCHMARKS, Benchmark, Parts, Results, Row, Table, printed, remarks

DATA = ("rotated-mnist", "vlcs", "pacs", "terra-incognita", "domain-net")
BATCHES = (1, 2, 32)
IN_CHARTS = ("knn", "adanpc-bn")  # beside the methods that the paper has
ALL_IMAGES_BATCH = 32


class Passage(NamedTuple):
    """How a method is led through the domains."""

    method: str
    batch: int
    extent: Extent


def task_for(benchmark: Benchmark, scale: Scale, passage: Passage, seed: int) -> Adapt:
    """A method that is led through all domains but the first, on which its model was trained."""
    algorithm = "rotation" if ADAPTERS[passage.method].needs_rotation_head else "erm"
    subject = Trained(scale.spec(benchmark.data, benchmark.domains[1:], algorithm, seed))
    own = settings(passage.method, benchmark.data)
    return Adapt(subject, passage.method, passage.batch, "successive", own, passage.extent, seed)


def _limited(method: str, batch: int, scale: Scale) -> Passage:
    return Passage(method, batch, limited(method, scale))


def _on_all_images() -> list[Passage]:
    """Methods that see features are fast enough to meet every image."""
    return [Passage(name, ALL_IMAGES_BATCH, ALL) for name, method in ADAPTERS.items() if method.sees == "features"]


def _batches(method: str) -> tuple[int, ...]:
    """The batch sizes that make a difference to a method."""
    return BATCHES[:1] if ADAPTERS[method].one_by_one else BATCHES


def plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """Every method on some images, one by one, in pairs and in batches; methods that see features on all."""
    passages = [_limited(method, batch, scale) for method in ADAPTERS for batch in _batches(method)]
    passages += _on_all_images()
    wanted = [passage for passage in passages if scale.wants(passage.method)]
    tasks: list[Task] = []
    for seed in range(scale.seeds):
        tasks += [task_for(benchmark, scale, passage, seed) for passage in wanted]
    return tasks


def show(benchmark: Benchmark, results: Results) -> tuple[Parts, list[str]]:
    """Accuracy as domains are met, and on the source after each."""
    scale = results.scale
    title = f"all images, batches of {ALL_IMAGES_BATCH}, methods that see features"
    on_all = _sheets(benchmark, results, _on_all_images(), title)
    charts = [chart for chart in map(_chart, on_all) if chart is not None]
    parts: list[Sheet] = []
    for batch in BATCHES:
        usual = [_limited(method, batch, scale) for method in ADAPTERS if not is_slow(method)]
        parts += _sheets(benchmark, results, usual, f"{how_many('source', scale)}, batches of {batch}")
    slow = [_limited(method, batch, scale) for method in ADAPTERS if is_slow(method) for batch in _batches(method)]
    parts += _sheets(benchmark, results, slow, "methods that look at many copies of each image")
    return (*on_all, *charts, *parts), remarks(f"reval-{benchmark.data}")


def _sheets(benchmark: Benchmark, results: Results, passages: Sequence[Passage], title: str) -> tuple[Sheet, Sheet]:
    """What is met, and what is left of the source; one row for each passage."""
    first, *others = benchmark.domains
    table = f"reval-{benchmark.data}"
    columns = ("before", *others)
    paper_columns = columns
    if table in paper.tables():
        paper_columns = paper.columns(table)[:-1]  # the last is an average
    met: list[Row] = []
    source: list[Row] = []
    for passage in passages:
        tasks = [task_for(benchmark, results.scale, passage, seed) for seed in range(results.scale.seeds)]
        records = results.all_of(tasks)
        reason = results.reason(tasks[0])
        label = _label(passage, results.scale)
        if records:
            theirs = [printed(table, "all", ADAPTERS[passage.method].in_paper, column) for column in paper_columns]
            met.append((label, tuple(Cell(ours) for ours in _met(records, others))))
            source.append((label, tuple(map(Cell, _source(records, others), theirs))))
        elif reason:
            met.append((label, tuple(Cell(text=reason) for _ in (*others, "average"))))
    return (
        Sheet(f"Accuracy on each domain as it arrives: {title}", (*others, "average"), tuple(met)),
        Sheet(f"Accuracy on held-out images of {first} after each domain: {title}", columns, tuple(source)),
    )


def _label(passage: Passage, scale: Scale) -> str:
    """The method; where several stand in one sheet that meet different numbers of images, these too."""
    if is_slow(passage.method):
        return f"{passage.method}, {how_many(passage.method, scale)}, batches of {passage.batch}"
    return passage.method


def _met(records: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Value | None]:
    """The accuracy on each domain, and on average; one of which nothing was answered has none."""
    each = [_over_records([record["domains"] for record in records], name) for name in names]
    return [*each, value([record["average"] for record in records])]


def _source(records: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Value | None]:
    """The accuracy on the source before the stream, and after each domain."""
    before = _over_records([record["source"] for record in records], "before")
    return [before, *(_over_records([record["source"]["after"] for record in records], name) for name in names)]


def _over_records(numbers: Sequence[dict[str, Any]], name: str) -> Value | None:
    return value([each[name] for each in numbers if each.get(name) is not None])


def _chart(sheet: Sheet) -> Chart | None:
    """The sheet as lines, of the methods that the paper has and a few more; None if there are none."""
    columns = tuple(column for column in sheet.columns if column != "average")
    series = []
    for label, cells in sheet.rows:
        if label in IN_CHARTS or ADAPTERS[label].in_paper:
            series.append(line(label, columns, [cell.ours for cell in cells[: len(columns)]]))
    return Chart(sheet.title, "domain", sheet.unit, tuple(series)) if series else None


TABLES = [
    Table(
        f"successive-{data}",
        f"Successive adaptation on {BENCHMARKS[data].title}, and what is left of the source",
        "Figures 1b, 2 and 3, Tables 9 and 10",
        "Trained on the first domain alone, then led through the others in order, without a reset. Default settings, "
        "nothing selected on targets. Held-out source images are answered and not learned from.",
        partial(plan, BENCHMARKS[data]),
        partial(show, BENCHMARKS[data]),
        (data,),
        rows=tuple(ADAPTERS),
    )
    for data in DATA
]
