"""What a query costs in a bank of a few thousand rows, where calls cost as much as products; and int8 beside faiss.

``python -m benchmarks.small`` measures processor time in one thread, which other programs on the machine disturb less
than the time that passes. Everything is measured in turn, round after round; the table shows medians.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch
from torch import Tensor

from adanpc import AdaNPC, Append, MemoryBank, Origin
from adanpc.index import unit
from adanpc.lab.environment import machine
from adanpc.progress import track

faiss: Any = import_module("faiss") if find_spec("faiss") else None  # the extra `bench`

CLASSES = 10
CENTERS = 200
K = 50
REPEATS = 100  # of each work in a round
BANKS: tuple[tuple[int, int, dict[str, Any]], ...] = (  # rows, dimensions, settings
    (1_000, 64, {}),
    (8_000, 128, {}),
    (10_000, 512, {}),
    (10_000, 512, {"storage": "float16"}),
    (10_000, 512, {"storage": "int8"}),
    (10_000, 512, {"capacity": 1_000}),
)

OUTLIERS = ((10_000, 512), (100_000, 512))  # rows, dimensions
DOMINANCE = (0.0, 1.0, 4.0)  # of one coordinate: its size beside the length of all others
SIDE_BY_SIDE = 64  # queries of a batch

Work = Callable[[int], object]


def clustered(count: int, dim: int, shift: float, seed: int) -> tuple[Tensor, Tensor]:
    """Features (count, dim) around centers that are always the same, and their labels (count,)."""
    centers = torch.randn(CENTERS, dim, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    cluster = torch.randint(0, CENTERS, (count,), generator=generator)
    noise = 1.5 * torch.randn(count, dim, generator=generator)
    offset = shift * torch.randn(dim, generator=generator)
    return centers[cluster] + noise + offset, cluster % CLASSES


def works(rows: int, dim: int, settings: dict[str, Any]) -> dict[str, Work]:
    """What is measured of a bank, by the headings of the table; each has a bank of its own."""
    features, labels = clustered(rows, dim, 0.0, 1)
    queries, _ = clustered(4096, dim, 0.5, 2)
    given = Append(features, labels)

    def filled() -> MemoryBank:
        bank = MemoryBank(dim, CLASSES, **settings)
        bank.apply(given)
        return bank

    asked = AdaNPC(filled(), k=K)
    learning = AdaNPC(filled(), k=K)
    in_batches = AdaNPC(filled(), k=K)
    grown = filled()
    array = unit(features).numpy()
    vectors = unit(queries).numpy()
    products = numpy.empty(rows, numpy.float32)

    def one(number: int) -> Tensor:
        return queries[number % 4096][None]

    def step_batch(number: int) -> None:
        start = number * 256 % 4096
        in_batches.step(queries[start : start + 256])

    return {
        "float32 products alone": lambda number: numpy.vecdot(array, vectors[number % 4096], out=products),
        "predict": lambda number: asked.predict(one(number)),
        "step": lambda number: learning.step(one(number)),
        "append": lambda number: grown.apply(Append(one(number), labels[:1], Origin.ADMITTED)),
        "step, in batches of 256": step_batch,
    }


def dominated(count: int, dim: int, dominance: float, seed: int) -> Tensor:
    """Clustered features (count, dim) at length one, in which one coordinate may be larger than all others together."""
    features = unit(clustered(count, dim, 0.0, seed)[0])
    generator = torch.Generator().manual_seed(seed)
    if dominance:
        features[:, 7] = dominance * (1 + 0.02 * torch.randn(count, generator=generator))
    return unit(features)


def searches(rows: int, dim: int, dominance: float) -> dict[str, Work]:
    """Searches of int8 rows and of faiss, by the headings of the table."""
    features = dominated(rows, dim, dominance, 1)
    queries = dominated(512, dim, dominance, 2)
    banks = {}
    for storage in ("float32", "int8"):
        banks[storage] = MemoryBank(dim, CLASSES, storage=storage)
        banks[storage].apply(Append(features, torch.zeros(rows, dtype=torch.int64)))
    flat = faiss.IndexFlatIP(dim)
    flat.add(features.numpy())
    arrays = queries.numpy()

    def some(number: int, count: int) -> slice:
        start = number * count % 512
        return slice(start, start + count)

    return {
        "faiss flat": lambda number: flat.search(arrays[some(number, 1)], K),
        "float32": lambda number: banks["float32"].search(queries[some(number, 1)], K),
        "int8": lambda number: banks["int8"].search(queries[some(number, 1)], K),
        "faiss flat, in batches of 64": lambda number: flat.search(arrays[some(number, SIDE_BY_SIDE)], K),
        "int8, in batches of 64": lambda number: banks["int8"].search(queries[some(number, SIDE_BY_SIDE)], K),
    }


def measure_searches(rows: int, dim: int, dominance: float, rounds: int) -> dict[str, float]:
    """Microseconds a query, by what searched; each searches eight times in a row, since rivals empty the cache."""
    times: dict[str, list[float]] = {}
    measured = searches(rows, dim, dominance)
    for number in range(rounds + 1):
        for name, work in measured.items():
            queries = SIDE_BY_SIDE if "batches" in name else 1
            taken = microseconds(work, 8 * number, 8) / queries
            if number:  # the first round warms up
                times.setdefault(name, []).append(taken)
    return {name: median(taken) for name, taken in times.items()}


def outlier_table(rounds: int) -> list[str]:
    """The lines about rows in which one coordinate dominates; none without faiss."""
    if faiss is None:
        return []
    faiss.omp_set_num_threads(1)
    lines: list[str] = []
    for rows, dim in OUTLIERS:
        for dominance in DOMINANCE:
            times = measure_searches(rows, dim, dominance, rounds)
            if not lines:
                lines = [f"| rows | dominance | {' | '.join(times)} |", "|---" * (len(times) + 2) + "|"]
            numbers = " | ".join(f"{taken:.0f}" for taken in times.values())
            lines.append(f"| {rows:,} x {dim} | {dominance:g} | {numbers} |")
    what = (
        "Dominance: how many times as large as all others together one coordinate is. Searches alone, processor time "
        f"in microseconds a query, k = {K}."
    )
    return ["", "## Rows in which one coordinate dominates", "", what, "", *lines]


def microseconds(work: Work, start: int, repeats: int) -> float:
    """The median processor time of work(start), work(start + 1), …"""
    times = []
    for number in range(start, start + repeats):
        begin = time.process_time()
        work(number)
        times.append(time.process_time() - begin)
    return 1e6 * median(times)


def measure(rows: int, dim: int, settings: dict[str, Any], rounds: int) -> dict[str, float]:
    """Microseconds a query, by what was measured."""
    times: dict[str, list[float]] = {}
    measured = works(rows, dim, settings)
    for number in range(rounds + 1):
        for name, work in measured.items():
            queries = 256 if "batches" in name else 1
            repeats = REPEATS // 25 if "batches" in name else REPEATS
            taken = microseconds(work, number * repeats, repeats) / queries
            if number:  # the first round warms up
                times.setdefault(name, []).append(taken)
    return {name: median(taken) for name, taken in times.items()}


def main() -> None:
    """Measures all banks, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/small.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    lines: list[str] = []
    for rows, dim, settings in track(BANKS, "banks"):
        times = measure(rows, dim, settings, options.rounds)
        if not lines:
            lines = [f"| rows | settings | {' | '.join(times)} |", "|---" * (len(times) + 2) + "|"]
        named = ", ".join(f"{name} {value}" for name, value in settings.items())
        lines.append(f"| {rows:,} x {dim} | {named} | {' | '.join(f'{taken:.0f}' for taken in times.values())} |")
    conditions = (
        f"`python -m benchmarks.small` on {machine()}, load {load:.1f} when it began. Processor time in microseconds a "
        f"query, medians; k = {K}, {CLASSES} classes, preset `paper`."
    )
    text = ["# Small banks", "", conditions, "", *lines, *outlier_table(options.rounds)]
    options.out.write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
