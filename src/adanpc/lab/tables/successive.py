"""Tables of successive adaptation: all domains in order, with a test on the source after each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from adanpc.lab.adapt import ADAPTERS, find
from adanpc.lab.show.exhibit import Cell, Chart, Sheet, Value, line, value
from adanpc.lab.sweep.subjects import ALL, Extent, Trained
from adanpc.lab.sweep.task import Adapt, Task
from adanpc.lab.tables import paper
from adanpc.lab.tables.methods import how_many, is_slow, limited, settings
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import (
    BENCHMARKS,
    HIDDEN_NOTE,
    Benchmark,
    Parts,
    Results,
    Row,
    Table,
    hidden,
    own_label,
    printed,
    remarks,
)

DATA = ("rotated-mnist", "vlcs", "pacs", "terra-incognita", "domain-net")
BATCHES = (1, 2, 32)
IN_CHARTS = ("knn", "adanpc-bn")  # beside the methods that the paper has
ALL_IMAGES_BATCH = 32


class Setup(NamedTuple):
    """How one method is run: its batch size, and how many images it gets."""

    method: str
    batch: int
    extent: Extent


def task_for(benchmark: Benchmark, scale: Scale, setup: Setup, seed: int) -> Adapt:
    """The task of a method on all domains but the first, on which its model is trained."""
    algorithm = "erm"
    if find(setup.method).needs_rotation_head:
        algorithm = "rotation"
    subject = Trained(scale.spec(benchmark.data, benchmark.domains[1:], algorithm, seed))
    own = settings(setup.method, benchmark.data)
    return Adapt(subject, setup.method, setup.batch, "successive", own, setup.extent, seed)


def methods_of(scale: Scale) -> tuple[str, ...]:
    """All methods of the library, and the user's own."""
    return (*ADAPTERS, *scale.methods)


def _on_some_images(method: str, batch: int, scale: Scale) -> Setup:
    return Setup(method, batch, limited(method, scale))


def _on_all_images(scale: Scale) -> list[Setup]:
    """The methods that see features, which are fast enough to answer every image."""
    return [Setup(name, ALL_IMAGES_BATCH, ALL) for name in methods_of(scale) if find(name).sees == "features"]


def _batches(method: str) -> tuple[int, ...]:
    """The batch sizes that make a difference to a method."""
    if find(method).one_by_one:  # it answers one by one in any case
        return BATCHES[:1]
    return BATCHES


def plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """Every method on some images, one by one, in pairs and in batches; methods that see features also on all."""
    methods = methods_of(scale)
    setups = [_on_some_images(method, batch, scale) for method in methods for batch in _batches(method)]
    setups += _on_all_images(scale)
    requested = [setup for setup in setups if setup.method in scale.methods or scale.wants(setup.method)]
    tasks: list[Task] = []
    for seed in range(scale.seeds):
        tasks += [task_for(benchmark, scale, setup, seed) for setup in requested]
    return tasks


def show(benchmark: Benchmark, results: Results) -> tuple[Parts, list[str]]:
    """Sheets and charts of the accuracy on each domain as it arrives, and on the source after each."""
    scale = results.scale
    title = f"all images, batches of {ALL_IMAGES_BATCH}, methods that see features"
    on_all = _sheets(benchmark, results, _on_all_images(scale), title)
    charts = [chart for chart in map(_chart, on_all) if chart is not None]
    parts = [_hidden(benchmark, results, _on_all_images(scale), title)]
    fast = [method for method in methods_of(scale) if not is_slow(method)]
    for batch in BATCHES:
        setups = [_on_some_images(method, batch, scale) for method in fast]
        about = f"{how_many('source', scale)}, batches of {batch}"
        parts += _sheets(benchmark, results, setups, about)
        parts.append(_hidden(benchmark, results, setups, about))
    slow = [method for method in methods_of(scale) if is_slow(method)]
    setups = [_on_some_images(method, batch, scale) for method in slow for batch in _batches(method)]
    about = "methods that look at many copies of each image"
    parts += _sheets(benchmark, results, setups, about)
    parts.append(_hidden(benchmark, results, setups, about))
    return (*on_all, *charts, *parts), [*remarks(f"reval-{benchmark.data}"), HIDDEN_NOTE]


def _hidden(benchmark: Benchmark, results: Results, setups: Sequence[Setup], title: str) -> Sheet:
    """A sheet of what the mean accuracies over a whole stream hide; a row per setup."""
    scale = results.scale
    rows = {}
    for setup in setups:
        rows[_label(setup, scale)] = [[task_for(benchmark, scale, setup, seed)] for seed in range(scale.seeds)]
    return hidden(results, title, rows)


def _sheets(benchmark: Benchmark, results: Results, setups: Sequence[Setup], title: str) -> tuple[Sheet, Sheet]:
    """One sheet of the accuracy on each domain, and one of the accuracy on the source; a row per setup."""
    first, *others = benchmark.domains
    on_arrival: list[Row] = []
    on_source: list[Row] = []
    for setup in setups:
        tasks = [task_for(benchmark, results.scale, setup, seed) for seed in range(results.scale.seeds)]
        records = results.all_of(tasks)
        reason = results.reason(tasks[0])
        label = _label(setup, results.scale)
        if records:
            on_arrival.append((label, tuple(Cell(ours) for ours in _arrival_values(records, others))))
            theirs = _printed_on_source(benchmark, setup.method)
            on_source.append((label, tuple(map(Cell, _source_values(records, others), theirs))))
        elif reason:
            on_arrival.append((label, tuple(Cell(text=reason) for _ in (*others, "average"))))
    return (
        Sheet(f"Accuracy on each domain as it arrives: {title}", (*others, "average"), tuple(on_arrival)),
        Sheet(
            f"Accuracy on held-out images of {first} after each domain: {title}", ("before", *others), tuple(on_source)
        ),
    )


def _printed_on_source(benchmark: Benchmark, method: str) -> list[Value | None]:
    """The paper's accuracies on the source, before the stream and after each domain; None where it prints none."""
    table = f"reval-{benchmark.data}"
    columns = ("before", *benchmark.domains[1:])
    if table in paper.tables():
        columns = paper.columns(table)[:-1]  # the last is an average
    return [printed(table, "all", find(method).in_paper, column) for column in columns]


def _label(setup: Setup, scale: Scale) -> str:
    """The label of a row: the method and, for slow ones, whose numbers of images differ, that number."""
    label = setup.method
    if label not in ADAPTERS:
        label = own_label(label, ADAPTERS)
    if is_slow(setup.method):
        return f"{label}, {how_many(setup.method, scale)}, batches of {setup.batch}"
    return label


def _arrival_values(records: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Value | None]:
    """The accuracy on each domain, and the average; None for a domain without a single answer."""
    by_domain = [record["domains"] for record in records]
    each = [_over_records(by_domain, name) for name in names]
    average = value([record["average"] for record in records])
    return [*each, average]


def _source_values(records: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Value | None]:
    """The accuracy on the source before the stream, and after each domain."""
    before = _over_records([record["source"] for record in records], "before")
    after = [record["source"]["after"] for record in records]
    return [before, *(_over_records(after, name) for name in names)]


def _over_records(numbers: Sequence[dict[str, Any]], name: str) -> Value | None:
    """The numbers of this name in all records that have it, as one value."""
    known = [each[name] for each in numbers if each.get(name) is not None]
    return value(known)


def _chart(sheet: Sheet) -> Chart | None:
    """A line chart of the sheet, with the methods of the paper, a few more, and the user's own; None without any."""
    columns = tuple(column for column in sheet.columns if column != "average")
    series = []
    for label, cells in sheet.rows:
        if label in IN_CHARTS or label not in ADAPTERS or ADAPTERS[label].in_paper:
            series.append(line(label, columns, [cell.ours for cell in cells[: len(columns)]]))
    return Chart(sheet.title, "domain", sheet.unit, tuple(series)) if series else None


TABLES = [
    Table(
        f"successive-{data}",
        f"Successive adaptation on {BENCHMARKS[data].title}, and how much of the source is forgotten",
        "Figures 1b, 2 and 3, Tables 9 and 10",
        "A model is trained on the first domain alone and then meets the others in order, without a reset. Settings "
        "are the defaults; nothing is selected on targets. Held-out source images are answered but not learned from.",
        partial(plan, BENCHMARKS[data]),
        partial(show, BENCHMARKS[data]),
        (data,),
        rows=tuple(ADAPTERS),
        takes_methods=True,
    )
    for data in DATA
]
