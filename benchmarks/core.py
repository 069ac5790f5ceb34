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
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from typing import Any

import numkong
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from adanpc import AdaNPC, Append, MemoryBank, Origin
from adanpc.lab.environment import machine
from adanpc.progress import track

faiss: Any = None
hnswlib: Any = None
with suppress(ImportError):  # results can be shown without them, but not measured
    faiss = import_module("faiss")
    hnswlib = import_module("hnswlib")

DIM = 512
CLASSES = 10
K = 50
BATCH = 256
TEMPERATURE = 0.1
CENTERS = 200
QUERIES = 2000
RESULTS = Path(__file__).parent / "results"

# The names of what is measured, as the tables and the JSON file have them.
ONE_BY_ONE = "one by one"
BATCHES = "batches of 256"
PUBLISHED = "published"
PRODUCT_ALONE = "product alone"
ONE_READ = "one read of the rows"
FAISS = "faiss flat"
SKLEARN = "scikit-learn brute"
HNSW = "hnswlib ef 128"

Timings = dict[str, float]
Results = dict[int, dict[str, Any]]  # by the number of rows
Search = Callable[[Tensor], np.ndarray]
Engines = dict[str, Search]


def clustered(count: int, shift: float, seed: int) -> tuple[Tensor, Tensor]:
    """Features (count, DIM) around centers that are always the same, and their labels (count,)."""
    centers = torch.randn(CENTERS, DIM, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    cluster = torch.randint(0, CENTERS, (count,), generator=generator)
    noise = 1.5 * torch.randn(count, DIM, generator=generator)
    offset = shift * torch.randn(DIM, generator=generator)
    features = centers[cluster] + noise + offset
    return normalize(features, dim=1), cluster % CLASSES


def bank_of(rows: Tensor, labels: Tensor, storage: str = "float32") -> MemoryBank:
    """A bank that holds these rows."""
    bank = MemoryBank(DIM, CLASSES, storage=storage)
    bank.apply(Append(rows, labels))
    return bank


def batch(queries: Tensor, number: int, start: int = 0) -> Tensor:
    """The batch of this number, counted from a start."""
    first = start + number * BATCH
    return queries[first : first + BATCH]


class Published:
    """The public code's way: the whole memory is copied for each insert; matrix product, topk, one-hot vote."""

    def __init__(self, rows: Tensor, labels: Tensor) -> None:
        self.rows = rows.clone()
        self.labels = labels.clone()

    def step(self, queries: Tensor) -> None:
        similarity, nearest = (queries @ self.rows.T).topk(K)
        weights = (similarity / TEMPERATURE).softmax(1)[:, :, None]  # (B, K, 1)
        probs = (weights * one_hot(self.labels[nearest], CLASSES)).sum(1)  # (B, C)
        self.rows = torch.cat([self.rows, queries])
        self.labels = torch.cat([self.labels, probs.argmax(1)])


def milliseconds(work: Callable[[int], object], repeats: int) -> float:
    """The median time of work(0), work(1), … in milliseconds."""
    times = []
    for number in range(repeats):
        start = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def time_steps(rows: Tensor, labels: Tensor, queries: Tensor, rounds: int, repeats: int) -> list[Timings]:
    """(a) and (b): milliseconds per query of step one by one, in batches, and of the published way."""
    return [time_steps_once(rows, labels, queries, repeats) for _ in track(range(rounds), f"step, {len(rows):,} rows")]


def time_steps_once(rows: Tensor, labels: Tensor, queries: Tensor, repeats: int) -> Timings:
    """One round; the product of a batch and all rows alone says how fast batches could be at best."""
    model = AdaNPC(bank_of(rows, labels), k=K)
    published = Published(rows, labels)
    products = torch.empty(BATCH, len(rows))

    def step_one(number: int) -> None:
        model.step(queries[number : number + 1])

    def step_batch(number: int) -> None:
        model.step(batch(queries, number, start=repeats))

    def step_published(number: int) -> None:
        published.step(queries[number : number + 1])

    def multiply(number: int) -> None:
        torch.mm(batch(queries, number), rows.T, out=products)

    return {
        ONE_BY_ONE: milliseconds(step_one, repeats),
        BATCHES: milliseconds(step_batch, 3) / BATCH,
        PUBLISHED: milliseconds(step_published, max(6, repeats // 4)),
        PRODUCT_ALONE: milliseconds(multiply, 3) / BATCH,
    }


def bank_search(bank: MemoryBank) -> Search:
    """Search by a bank."""
    return lambda query: bank.search(query, K).labels[0].numpy()


def faiss_search(rows: np.ndarray, labels: np.ndarray) -> Search:
    """Exact search by faiss."""
    index = faiss.IndexFlatIP(DIM)
    index.add(rows)

    def search(query: Tensor) -> np.ndarray:
        _, nearest = index.search(query.numpy(), K)
        nearest_labels: np.ndarray = labels[nearest[0]]
        return nearest_labels

    return search


def sklearn_search(rows: np.ndarray, labels: np.ndarray) -> Search:
    """Exact search by scikit-learn."""
    index = NearestNeighbors(n_neighbors=K, metric="cosine", algorithm="brute").fit(rows)

    def search(query: Tensor) -> np.ndarray:
        nearest = index.kneighbors(query.numpy(), return_distance=False)
        nearest_labels: np.ndarray = labels[nearest[0]]
        return nearest_labels

    return search


def hnsw_search(rows: np.ndarray, labels: np.ndarray) -> Search:
    """Approximate search by hnswlib."""
    graph = hnswlib.Index("ip", DIM)
    graph.init_index(len(rows), M=16, ef_construction=100)
    graph.add_items(rows)
    graph.set_ef(128)

    def search(query: Tensor) -> np.ndarray:
        nearest, _ = graph.knn_query(query.numpy(), K, num_threads=1)
        nearest_labels: np.ndarray = labels[nearest[0]]
        return nearest_labels

    return search


def engines_of(rows: Tensor, labels: Tensor, with_hnsw: bool) -> Engines:
    """Single-query search by each engine: from a query (1, D) to the labels of the k nearest rows (K,)."""
    engines: Engines = {}
    for storage in ("float32", "float16", "int8"):
        engines[f"adanpc {storage}"] = bank_search(bank_of(rows, labels, storage))
    engines[FAISS] = faiss_search(rows.numpy(), labels.numpy())
    engines[SKLEARN] = sklearn_search(rows.numpy(), labels.numpy())
    if with_hnsw:
        engines[HNSW] = hnsw_search(rows.numpy(), labels.numpy())
    return engines


def bare_products(rows: Tensor) -> dict[str, list[Callable[[Tensor], object]]]:
    """Products of one query (D,) and all rows, nothing else: in float32 by NumPy and torch, in int8 by SIMD kernels."""
    array = rows.numpy()
    codes = (127 * rows).round().to(torch.int8).numpy()
    products = np.empty(len(rows), np.float32)

    def by_numpy(query: Tensor) -> object:
        return np.vecdot(array, query.numpy(), out=products)

    def by_torch(query: Tensor) -> object:
        return rows @ query

    def by_numkong(query: Tensor) -> object:
        code = (127 * query).round().to(torch.int8).numpy()
        return numkong.cdist(code[None], codes, metric="dot", out_dtype="float32")

    return {
        "products alone, float32": [by_numpy, by_torch],
        "products alone, int8": [by_numkong],
    }


def time_searches(engines: Engines, rows: Tensor, queries: Tensor, rounds: int, repeats: int) -> list[Timings]:
    """(c): milliseconds of a single-query search by each engine, in each round."""
    products = bare_products(rows)
    return [
        time_searches_once(engines, products, rows, queries, repeats)
        for _ in track(range(rounds), f"search, {len(rows):,} rows")
    ]


def time_searches_once(
    engines: Engines,
    products: dict[str, list[Callable[[Tensor], object]]],
    rows: Tensor,
    queries: Tensor,
    repeats: int,
) -> Timings:
    """One round of every engine, of one read of the float32 rows, and of products alone.

    The fastest way to compute products says how fast a search could be at best.
    """

    def time_product(product: Callable[[Tensor], object]) -> float:
        return milliseconds(lambda number: product(queries[number]), repeats)

    def time_engine(engine: Search, repeats: int) -> float:
        return milliseconds(lambda number: engine(queries[number : number + 1]), repeats)

    times = {ONE_READ: milliseconds(lambda number: rows.sum(), repeats)}
    for name, ways in products.items():
        times[name] = min(time_product(way) for way in ways)
    for name, engine in engines.items():
        few = 3 if name == SKLEARN else repeats  # it is slow
        times[name] = time_engine(engine, few)
    # faiss is sometimes faster with one thread; its faster time counts.
    faiss.omp_set_num_threads(1)
    with_one_thread = time_engine(engines[FAISS], repeats)
    faiss.omp_set_num_threads(torch.get_num_threads())
    times[FAISS] = min(times[FAISS], with_one_thread)
    return times


def agreement(engines: Engines, queries: Tensor) -> Timings:
    """The share of queries whose majority of neighbors is that of faiss flat; scikit-learn is too slow for it."""
    majorities = {name: majority_labels(engine, queries) for name, engine in engines.items() if name != SKLEARN}
    return {name: float(np.mean(np.equal(labels, majorities[FAISS]))) for name, labels in majorities.items()}


def majority_labels(engine: Search, queries: Tensor) -> list[int]:
    """The most frequent label among the neighbors of each query."""
    return [int(np.bincount(engine(query[None]), minlength=CLASSES).argmax()) for query in queries]


def time_appends(rows: Tensor, labels: Tensor) -> Timings:
    """(d): microseconds to append one row: median, mean and most of 2,000."""
    bank = bank_of(rows, labels)
    times = []
    for number in range(2000):
        one_row = slice(number, number + 1)
        change = Append(rows[one_row], labels[one_row], Origin.ADMITTED)
        start = time.perf_counter()
        bank.apply(change)
        times.append(1e6 * (time.perf_counter() - start))
    return {"median": median(times), "mean": mean(times), "most": max(times)}


def memory(rows: Tensor, labels: Tensor) -> dict[str, Timings]:
    """(e): bytes per row after all rows came at once."""
    sizes = {}
    for storage, itemsize in (("float32", 4), ("float16", 2), ("int8", 2)):
        bank = bank_of(rows, labels, storage)
        sizes[storage] = {"bytes a row": bank.nbytes / len(bank), "dim x itemsize + 64": DIM * itemsize + 64}
    return sizes


def median_time(rounds: list[Timings], name: str) -> float:
    """The median over rounds of a time."""
    return median(times[name] for times in rounds)


def median_ratio(rounds: list[Timings], name: str, over: str) -> float:
    """The median over rounds of the ratio of two times."""
    return median(times[name] / times[over] for times in rounds)


def table(headings: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a Markdown table, with an empty line before it."""
    lines = ["", f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return lines


def step_rows(results: Results) -> list[list[str]]:
    """The rows of the table about step."""
    rows = []
    for size, result in results.items():
        rounds: list[Timings] = result["step"]
        times = [median_time(rounds, name) for name in (ONE_BY_ONE, BATCHES, PUBLISHED)]
        ratios = [
            median_ratio(rounds, ONE_BY_ONE, over=BATCHES),
            median_ratio(rounds, PUBLISHED, over=ONE_BY_ONE),
            median_ratio(rounds, PUBLISHED, over=BATCHES),
            median_ratio(rounds, PUBLISHED, over=PRODUCT_ALONE),
        ]
        row = [f"{size:,}"]
        row += [f"{time:.3f}" for time in times]
        row += [f"{ratio:.1f}x" for ratio in ratios]
        rows.append(row)
    return rows


def search_rows(results: Results) -> list[list[str]]:
    """The rows of the table about search."""
    rows = []
    for size, result in results.items():
        rounds: list[Timings] = result["search"]
        agreeing: Timings = result["agreement"]
        for name in rounds[0]:
            share = f"{agreeing[name]:.4f}" if name in agreeing else ""
            rows.append(
                [
                    f"{size:,}",
                    name,
                    f"{median_time(rounds, name):.3f}",
                    f"{median_ratio(rounds, name, over=ONE_READ):.2f}x",
                    f"{median_ratio(rounds, FAISS, over=name):.2f}x",
                    share,
                ]
            )
    return rows


def append_rows(results: Results) -> list[list[str]]:
    """The rows of the table about appending."""
    rows = []
    for size, result in results.items():
        cost: Timings = result["append"]
        rows.append([f"{size:,}", *(f"{cost[name]:.0f}" for name in ("median", "mean", "most"))])
    return rows


def memory_rows(results: Results) -> list[list[str]]:
    """The rows of the table about memory."""
    rows = []
    for size, result in results.items():
        for storage, sizes in result["memory"].items():
            rows.append([f"{size:,}", storage, f"{sizes['bytes a row']:.1f}", f"{sizes['dim x itemsize + 64']}"])
    return rows


def report(results: Results, where: str) -> str:
    """The results as Markdown."""
    step_headings = ["rows", ONE_BY_ONE, BATCHES, PUBLISHED, "(a)", "(b) one by one", "(b) batches"]
    step_headings.append("(b) product alone")
    search_headings = ["rows", "engine", "ms", "of one read", "faiss flat / this", "votes as faiss flat"]
    lines = [
        "# The bank beside its peers",
        "",
        f"`make bench` on {where}. Milliseconds a query, medians.",
        "",
        "## step: (a) batches against one by one, (b) against the published way",
        *table(step_headings, step_rows(results)),
        "",
        "The last column is what batches could reach if a matrix product were all they did.",
        "",
        "## (c) Search for one query",
        *table(search_headings, search_rows(results)),
        "",
        "## (d) Appending one row, microseconds",
        *table(["rows", "median", "mean", "most"], append_rows(results)),
        "",
        "## (e) Bytes a row",
        *table(["rows", "storage", "bytes a row", "dim x itemsize + 64"], memory_rows(results)),
        "",
        "int8 has two bytes a coordinate: one is scanned, the other re-ranks the candidates.",
    ]
    return "\n".join(lines) + "\n"


def plot(results: Results, path: Path) -> None:
    """Writes a figure: the cost of a query against the size of the bank."""
    curves: dict[str, list[float]] = {}
    for result in results.values():
        for part in ("step", "search"):
            rounds: list[Timings] = result[part]
            for name in rounds[0]:
                label = name if name == ONE_READ else f"{part}, {name}"
                curves.setdefault(label, []).append(median_time(rounds, name))
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    sizes = list(results)
    for label, times in curves.items():
        # An engine that is left out at large sizes has a shorter curve.
        axes.plot(sizes[: len(times)], times, line_style(label), label=label, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="rows in the bank (512 dimensions)", ylabel="milliseconds a query")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=130, pil_kwargs={"optimize": True})


def line_style(label: str) -> str:
    """Solid for step, dashed for search, dotted for what bounds both."""
    if label.startswith("step"):
        return "-o"
    if label.startswith("search"):
        return "--s"
    return ":k"


def measure(size: int, rounds: int, with_hnsw: bool) -> dict[str, Any]:
    """Everything about a bank of this size."""
    rows, labels = clustered(size, shift=0.0, seed=1)
    queries, _ = clustered(QUERIES, shift=0.5, seed=2)
    repeats = 60 if size <= 20_000 else 20
    compared_queries = 1000 if size <= 100_000 else 200
    steps = time_steps(rows, labels, queries, rounds, repeats)
    engines = engines_of(rows, labels, with_hnsw)
    searches = time_searches(engines, rows, queries, rounds, repeats)
    agreeing = agreement(engines, queries[:compared_queries])
    return {
        "step": steps,
        "search": searches,
        "agreement": agreeing,
        "append": time_appends(rows, labels),
        "memory": memory(rows, labels),
    }


def main() -> None:
    """Measures, prints and writes results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 500_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hnsw-up-to", type=int, default=100_000, help="larger graphs take long to build")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if faiss is None or hnswlib is None:
        parser.error("the peers faiss and hnswlib are not installed: pip install 'adanpc[bench]'")
    where = machine()
    results: Results = {}
    for size in options.sizes:
        results[size] = measure(size, options.rounds, with_hnsw=size <= options.hnsw_up_to)
    text = report(results, where)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "core.md").write_text(text)
    (options.out / "core.json").write_text(json.dumps({"machine": where, "results": results}, indent=1))
    plot(results, options.out / "core.png")
    print(text)


if __name__ == "__main__":
    main()
