"""The bank beside its peers, in one run: ``make bench``.

Everything that is compared is measured in turn, round after round, on the same rows and queries; the tables show
medians over rounds, and ratios are medians of the ratios within a round. Data: clustered unit vectors, queries shifted
away from the rows (a domain shift), 512 dimensions, 10 classes, k = 50.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import hnswlib
import numkong
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from adanpc import AdaNPC, Append, MemoryBank, Origin
from adanpc.lab.environment import machine
from adanpc.progress import track

DIM, CLASSES, K, BATCH = 512, 10, 50, 256
RESULTS = Path(__file__).parent / "results"
Timings = dict[str, float]
Engines = dict[str, Callable[[Tensor], np.ndarray]]


def clustered(count: int, shift: float, seed: int) -> tuple[Tensor, Tensor]:
    """Features around 200 centers and their labels."""
    centers = torch.randn(200, DIM, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    near = torch.randint(0, 200, (count,), generator=generator)
    noise = 1.5 * torch.randn(count, DIM, generator=generator)
    features = centers[near] + noise + shift * torch.randn(DIM, generator=generator)
    return torch.nn.functional.normalize(features, dim=1), near % CLASSES


class Published:
    """The public way: the whole memory is copied for each insert; matrix product, topk, one-hot vote."""

    def __init__(self, rows: Tensor, labels: Tensor) -> None:
        self.rows, self.labels = rows.clone(), labels.clone()

    def step(self, queries: Tensor) -> None:
        similarity, near = (queries @ self.rows.T).topk(K)
        weights = (similarity / 0.1).softmax(1)[:, :, None]
        probs = (weights * torch.nn.functional.one_hot(self.labels[near], CLASSES)).sum(1)
        self.rows = torch.cat([self.rows, queries])
        self.labels = torch.cat([self.labels, probs.argmax(1)])


def clock(work: Callable[[int], object], count: int) -> float:
    """Median milliseconds of work(0), work(1), …"""
    times = []
    for turn in range(count):
        start = time.perf_counter()
        work(turn)
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def online(rows: Tensor, labels: Tensor, queries: Tensor, rounds: int, few: int) -> list[Timings]:
    """(a) and (b): milliseconds a query of step one by one, in batches, and of the published way.

    The product of a batch and all rows alone says how far batches could be driven.
    """
    out = []
    for _ in track(range(rounds), f"step, {len(rows):,} rows"):
        bank = MemoryBank(DIM, CLASSES)
        bank.apply(Append(rows, labels))
        model = AdaNPC(bank, k=K)
        published = Published(rows, labels)
        one = clock(lambda turn: model.step(queries[turn : turn + 1]), few)  # noqa: B023
        many = clock(lambda turn: model.step(queries[few + turn * BATCH :][:BATCH]), 3) / BATCH  # noqa: B023
        theirs = clock(lambda turn: published.step(queries[turn : turn + 1]), max(6, few // 4))  # noqa: B023
        room = torch.empty(BATCH, len(rows))
        alone = clock(lambda turn: torch.mm(queries[turn * BATCH :][:BATCH], rows.T, out=room), 3) / BATCH  # noqa: B023
        out.append({"one by one": one, "batches of 256": many, "published": theirs, "product alone": alone})
    return out


def voters(bank: MemoryBank) -> Callable[[Tensor], np.ndarray]:
    """Search by this bank."""
    return lambda query: bank.search(query, K).labels[0].numpy()


def searchers(rows: Tensor, labels: Tensor, hnsw: bool) -> Engines:
    """Single-query search by each engine: the labels of the k nearest rows."""
    array, label = rows.numpy(), labels.numpy()
    found: Engines = {}
    for storage in ("float32", "float16", "int8"):
        bank = MemoryBank(DIM, CLASSES, storage=storage)
        bank.apply(Append(rows, labels))
        found[f"adanpc {storage}"] = voters(bank)
    flat = faiss.IndexFlatIP(DIM)
    flat.add(array)
    found["faiss flat"] = lambda query: label[flat.search(query.numpy(), K)[1][0]]
    brute = NearestNeighbors(n_neighbors=K, metric="cosine", algorithm="brute").fit(array)
    found["scikit-learn brute"] = lambda query: label[brute.kneighbors(query.numpy(), return_distance=False)[0]]
    if hnsw:
        graph = hnswlib.Index("ip", DIM)
        graph.init_index(len(array), M=16, ef_construction=100)
        graph.add_items(array)
        graph.set_ef(128)
        found["hnswlib ef 128"] = lambda query: label[graph.knn_query(query.numpy(), K, num_threads=1)[0][0]]
    return found


def bare(rows: Tensor) -> dict[str, list[Callable[[Tensor], object]]]:
    """Products of one query and all rows, nothing else: in float32 by NumPy and by torch, in int8 by SIMD kernels."""
    array, codes = rows.numpy(), (127 * rows).round().to(torch.int8).numpy()
    room = np.empty(len(rows), np.float32)

    def small(query: Tensor) -> object:
        code = (127 * query).round().to(torch.int8).numpy()
        return numkong.cdist(code[None], codes, metric="dot", out_dtype="float32")

    return {
        "products alone, float32": [
            lambda query: np.vecdot(array, query.numpy(), out=room),
            lambda query: rows @ query,
        ],
        "products alone, int8": [small],
    }


def search(engines: Engines, rows: Tensor, queries: Tensor, rounds: int, few: int) -> list[Timings]:
    """(c): milliseconds of a single-query search, and of one read of the float32 rows, for each engine and round.

    faiss runs with one thread and with all; its faster time counts. Products alone, by the fastest of some ways, say
    how far a search could be driven.
    """
    products, out = bare(rows), []
    for _ in track(range(rounds), f"search, {len(rows):,} rows"):
        times = {"one read of the rows": clock(lambda turn: rows.sum(), few)}
        for name, ways in products.items():
            times[name] = min(clock(lambda turn: way(queries[turn]), few) for way in ways)  # noqa: B023
        for name, engine in engines.items():
            turns = 3 if name.startswith("scikit") else few
            times[name] = clock(lambda turn: engine(queries[turn : turn + 1]), turns)  # noqa: B023
        faiss.omp_set_num_threads(1)
        alone = clock(lambda turn: engines["faiss flat"](queries[turn : turn + 1]), few)
        faiss.omp_set_num_threads(torch.get_num_threads())
        times["faiss flat"] = min(times["faiss flat"], alone)
        out.append(times)
    return out


def agreement(engines: Engines, queries: Tensor) -> Timings:
    """The share of queries whose majority of neighbors is that of faiss flat; scikit-learn is too slow to ask."""
    votes = {
        name: [int(np.bincount(engine(query[None]), minlength=CLASSES).argmax()) for query in queries]
        for name, engine in engines.items()
        if not name.startswith("scikit")
    }
    return {name: float(np.mean(np.equal(vote, votes["faiss flat"]))) for name, vote in votes.items()}


def append(rows: Tensor, labels: Tensor) -> Timings:
    """(d): microseconds to append one row: median and mean over 2,000."""
    bank = MemoryBank(DIM, CLASSES)
    bank.apply(Append(rows, labels))
    times = []
    for turn in range(2000):
        change = Append(rows[turn : turn + 1], labels[turn : turn + 1], Origin.ADMITTED)
        start = time.perf_counter()
        bank.apply(change)
        times.append(1e6 * (time.perf_counter() - start))
    return {"median": median(times), "mean": sum(times) / len(times), "most": max(times)}


def memory(rows: Tensor, labels: Tensor) -> dict[str, Timings]:
    """(e): bytes a row after all rows came at once."""
    out = {}
    for storage, width in (("float32", 4), ("float16", 2), ("int8", 2)):
        bank = MemoryBank(DIM, CLASSES, storage=storage)
        bank.apply(Append(rows, labels))
        out[storage] = {"bytes a row": bank.nbytes / len(bank), "dim x itemsize + 64": DIM * width + 64}
    return out


def middle(rounds: list[Timings], name: str, over: str | None = None) -> float:
    """The median over rounds of a time, or of its ratio to another."""
    return median(times[name] / (times[over] if over else 1) for times in rounds)


def report(results: dict[int, dict[str, Any]], where: str) -> str:
    """The results as Markdown."""
    lines = ["# The bank beside its peers", "", f"`make bench` on {where}. Milliseconds a query, medians.", ""]
    lines += ["## step: (a) batches against one by one, (b) against the published way", ""]
    lines += [
        "| rows | one by one | batches of 256 | published | (a) | (b) one by one | (b) batches | (b) product alone |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for size, result in results.items():
        steps: list[Timings] = result["step"]
        cells = [middle(steps, name) for name in ("one by one", "batches of 256", "published")]
        ratios = [
            middle(steps, "one by one", "batches of 256"),
            middle(steps, "published", "one by one"),
            middle(steps, "published", "batches of 256"),
            middle(steps, "published", "product alone"),
        ]
        numbers = " | ".join([*(f"{cell:.3f}" for cell in cells), *(f"{ratio:.1f}x" for ratio in ratios)])
        lines.append(f"| {size:,} | {numbers} |")
    lines += ["", "The last column is what batches could reach if a matrix product were all they did."]
    lines += ["", "## (c) Search for one query", ""]
    lines += [
        "| rows | engine | ms | of one read | faiss flat / this | votes as faiss flat |",
        "|---|---|---|---|---|---|",
    ]
    for size, result in results.items():
        found: list[Timings] = result["search"]
        votes: Timings = result["agreement"]
        for name in found[0]:
            read, speed = middle(found, name, "one read of the rows"), median(t["faiss flat"] / t[name] for t in found)
            agree = f"{votes[name]:.4f}" if name in votes else ""
            lines.append(f"| {size:,} | {name} | {middle(found, name):.3f} | {read:.2f}x | {speed:.2f}x | {agree} |")
    lines += ["", "## (d) Appending one row, microseconds", "", "| rows | median | mean | most |", "|---|---|---|---|"]
    for size, result in results.items():
        cost: Timings = result["append"]
        lines.append(f"| {size:,} | {cost['median']:.0f} | {cost['mean']:.0f} | {cost['most']:.0f} |")
    lines += [
        "",
        "## (e) Bytes a row",
        "",
        "| rows | storage | bytes a row | dim x itemsize + 64 |",
        "|---|---|---|---|",
    ]
    for size, result in results.items():
        for storage, held in result["memory"].items():
            lines.append(f"| {size:,} | {storage} | {held['bytes a row']:.1f} | {held['dim x itemsize + 64']} |")
    lines += ["", "int8 has two bytes a coordinate: one is scanned, the other re-ranks the candidates."]
    return "\n".join(lines) + "\n"


def plot(results: dict[int, dict[str, Any]], path: Path) -> None:
    """Cost of a query against the size of the bank."""
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    curves: dict[str, list[float]] = {}
    for result in results.values():
        for part, prefix in (("step", "step, "), ("search", "search, ")):
            rounds: list[Timings] = result[part]
            for name in rounds[0]:
                label = name if name == "one read of the rows" else prefix + name
                curves.setdefault(label, []).append(middle(rounds, name))
    for label, values in curves.items():
        style = {"step": "-o", "sear": "--s"}.get(label[:4], ":k")
        axes.plot(list(results)[: len(values)], values, style, label=label, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="rows in the bank (512 dimensions)", ylabel="milliseconds a query")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measures, prints and writes results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 500_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hnsw-up-to", type=int, default=100_000, help="larger graphs take long to build")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[int, dict[str, Any]] = {}
    where = machine()
    for size in options.sizes:
        rows, labels = clustered(size, 0.0, 1)
        queries, _ = clustered(2000, 0.5, 2)
        few = 60 if size <= 20_000 else 20
        step = online(rows, labels, queries, options.rounds, few)
        engines = searchers(rows, labels, size <= options.hnsw_up_to)
        results[size] = {
            "step": step,
            "search": search(engines, rows, queries, options.rounds, few),
            "agreement": agreement(engines, queries[: 1000 if size <= 100_000 else 200]),
            "append": append(rows, labels),
            "memory": memory(rows, labels),
        }
        del engines
    options.out.mkdir(parents=True, exist_ok=True)
    text = report(results, where)
    (options.out / "core.md").write_text(text)
    (options.out / "core.json").write_text(json.dumps({"machine": where, "results": results}, indent=1))
    plot(results, options.out / "core.png")
    print(text)


if __name__ == "__main__":
    main()
