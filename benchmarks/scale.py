"""Progressive search beside other engines and a plain read, in one run: ``make bench-scale``.

Everything is measured in turn, query by query, in one thread: processor time of the thread, which other programs hardly
disturb, and the time that passed, which they do.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from adanpc import AdaNPC, Append, MemoryBank, load, save
from adanpc.core import Delete
from adanpc.index import ProgressiveIndex, kernels, unit
from adanpc.lab.environment import machine
from adanpc.progress import track

faiss: Any = import_module("faiss")

K = 50
CLASSES = 1000
SUBCLUSTERS = 3
PIECE = 8192  # rows generated and appended at once
KINDS = ("iid", "shifted", "far", "outlier coordinate")
ROWS = (10_000, 100_000, 300_000, 1_281_167)
DIMS = (512, 2048)
AUDITED = 2500  # queries of each kind that are compared with exact search
ARRIVING = 100_000  # rows that arrive from a shifted distribution, or as many as there are if that is less
LARGEST_FLAT = 3 << 30  # bytes of float32 rows up to which faiss flat holds all of them
FILE_FROM = 1 << 30  # bytes of rows from which on they are kept in a file
SINGLES = 200  # rows appended and deleted one by one
BATCHES = (1, 2, 32, 64)
BATCH_ROUNDS = 12  # batches of each size that are timed
OPENINGS = 3  # of a saved bank, each in a process of its own
GRAPH_MOST = 100_000  # rows of which graphs are built: more take too long
CELLS = 1024  # of inverted files
BREADTH = 128  # of searches in graphs
RESULTS = Path(__file__).parent / "results" / "scale.md"
NOTES = "notes.md"  # in the folder of sections: what is said before them
CONDITIONS = f"""Features: {CLASSES} classes with {SUBCLUSTERS} subclusters each; of the energy, 0.33 is in the mean,
0.09 in class means, 0.05 in subclusters and 0.53 within. All but the mean have the spectrum λ(i) ∝ (i + 25)^-1.3, which
fits what EfficientNet-Lite0 makes of PACS photos and paintings within their classes (2,300 images: 0.019, 0.118, 0.444
and 0.897 of the energy are in the first 1, 8, 64 and 512 directions). The last 5 % of the rows are shifted by a vector
of energy 0.2. Queries: as the first rows; as the shifted ones; shifted and with isotropic noise of energy 1 (far); with
1 added to one coordinate. k = {K}, one thread. Milliseconds of processor time, p50 / p99 over the queries of a kind,
and in brackets the p50 of the time that passed. *Read*: a dot product over as many bytes as the first stage reads.
*Certified*: bounds that hold for certain. Recall and votes (the most frequent label of {K}) are against faiss flat over
float32 rows; *same*: ids and similarities equal those of an exact search of the same stored rows, to the bit."""


class Features:
    """Draws features with the spectrum of CONDITIONS."""

    def __init__(self, dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        spectrum = (torch.arange(1, dim + 1) + 25.0) ** -1.3
        self.deviation = (spectrum / spectrum.sum()).sqrt()
        self.dim = dim
        mean = torch.randn(dim, generator=generator)
        self.mean = mean / mean.norm() * 0.33**0.5
        self.classes = self._noise(CLASSES, 0.09, generator)
        self.subclusters = self._noise(CLASSES * SUBCLUSTERS, 0.05, generator)
        self.shift = self._noise(1, 0.2, generator)

    def _noise(self, count: int, energy: float, generator: torch.Generator) -> Tensor:
        return torch.randn(count, self.dim, generator=generator).mul_(self.deviation * energy**0.5)

    def draw(self, count: int, seed: int, kind: str = "iid") -> tuple[Tensor, Tensor]:
        """Unit features (count, D) and their labels (count,)."""
        generator = torch.Generator().manual_seed(seed)
        which = torch.randint(0, CLASSES * SUBCLUSTERS, (count,), generator=generator)
        labels = which // SUBCLUSTERS
        features = self._noise(count, 0.53, generator)
        features += self.mean
        features += self.classes[labels]
        features += self.subclusters[which]
        if kind in ("shifted", "far"):
            features += self.shift
        if kind == "far":
            features += torch.randn(count, self.dim, generator=generator) * self.dim**-0.5
        if kind == "outlier coordinate":
            features[:, 7] += 1
        return unit(features), labels


class Peers:
    """The same rows in every engine.

    Args:
        rows: how many.
        dim: their length.
        folder: for rows in a file.
    """

    def __init__(self, rows: int, dim: int, folder: str) -> None:
        self.rows = rows
        self.features = Features(dim)
        in_file = rows * dim * 2 >= FILE_FROM
        index = ProgressiveIndex
        if in_file:
            index = partial(ProgressiveIndex, folder=folder)  # type: ignore[assignment]
        self.bank = MemoryBank(dim, CLASSES, storage="progressive", index=index)
        self.int8 = MemoryBank(dim, CLASSES, storage="int8")
        self.with_int8 = not in_file
        self.flat = faiss.IndexFlatIP(dim)
        # From eight queries on; by default, faiss multiplies batches of less than 128,000 coordinates without BLAS.
        faiss.cvar.distance_compute_blas_threshold = 8 * dim
        self.in_flat = min(rows, LARGEST_FLAT // (4 * dim) // PIECE * PIECE)
        if rows * dim * 4 <= LARGEST_FLAT:
            self.in_flat = rows
        self.labels = numpy.zeros(rows, numpy.int64)
        self.float32 = MemoryBank(dim, CLASSES)
        self.with_float32 = rows <= GRAPH_MOST
        self.build_seconds = 0.0
        self.where = "in a file" if in_file else "in memory"
        self._fill()

    def _fill(self) -> None:
        for start in track(range(0, self.rows, PIECE), f"{self.rows:,} rows"):
            count = min(PIECE, self.rows - start)
            kind = "shifted" if start >= 0.95 * self.rows else "iid"
            rows, labels = self.features.draw(count, 1000 + start, kind)
            self.labels[start : start + count] = labels
            change = Append(rows, labels)
            began = time.thread_time()
            self.bank.apply(change, rows=rows)
            self.build_seconds += time.thread_time() - began
            if self.with_int8:
                self.int8.apply(change, rows=rows)
            if self.with_float32:
                self.float32.apply(change, rows=rows)
            if start < self.in_flat:
                self.flat.add(rows.numpy())

    @property
    def index(self) -> ProgressiveIndex:
        index = self.bank.contents.index
        assert isinstance(index, ProgressiveIndex)
        return index

    def engines(self) -> dict[str, Callable[[Tensor], Any]]:
        """What is timed, by name: each takes a query (1, D)."""
        certified = copy(self.index)
        certified.certified = True
        first_stage = 64 + 12 + min(self.features.dim, 1024) // 8  # bytes of a row
        read = numpy.ones(self.rows * first_stage // 4, numpy.float32)
        engines: dict[str, Callable[[Tensor], Any]] = {
            "progressive": lambda query: self.index.search(query, K),
            "read": lambda query: numpy.dot(read, read),
            "certified": lambda query: certified.search(query, K),
            "faiss flat": lambda query: self.flat.search(query.numpy(), K),
        }
        if self.with_int8:
            int8 = self.int8.contents.index
            engines["exact int8"] = lambda query: int8.search(query, K)
        return engines

    def batch_engines(self) -> dict[str, Callable[[Tensor], Any]]:
        """What is timed in batches, by name: each takes queries (B, D)."""
        engines: dict[str, Callable[[Tensor], Any]] = {
            "progressive": lambda queries: self.index.search(queries, K),
            "faiss flat": lambda queries: self.flat.search(queries.numpy(), K),
        }
        if self.with_int8:
            int8 = self.int8.contents.index
            engines["exact int8"] = lambda queries: int8.search(queries, K)
        if self.with_float32:
            float32 = self.float32.contents.index
            engines["exact float32"] = lambda queries: float32.search(queries, K)
        return engines

    def batch_times(self, kind: str) -> dict[str, list[float]]:
        """Median milliseconds of processor time a query of each engine, for each size of a batch, interleaved."""
        engines = self.batch_engines()
        times: dict[str, list[float]] = {name: [] for name in engines}
        for size in BATCHES:
            queries, _ = self.features.draw(size * (BATCH_ROUNDS + 1), 5000 + size, kind)
            taken: dict[str, list[float]] = {name: [] for name in engines}
            for number, batch in enumerate(queries.split(size)):
                for name, engine in engines.items():
                    began = time.thread_time()
                    engine(batch)
                    if number:  # the first one warms up
                        taken[name].append(1000 * (time.thread_time() - began) / size)
            for name, some in taken.items():
                scale = self.rows / self.in_flat if name == "faiss flat" else 1
                times[name].append(scale * float(numpy.median(some)))
        return times

    def two_threads(self, size: int) -> tuple[list[float], list[float]]:
        """Milliseconds that passed, and of processor time, a query in batches, with one thread and with two."""
        queries, _ = self.features.draw(size * BATCH_ROUNDS, 6000)
        took: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
        for batch in queries.split(size):
            for threads, times in took.items():
                torch.set_num_threads(threads)
                began = (time.perf_counter(), time.process_time())
                self.index.search(batch, K)
                times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        torch.set_num_threads(1)
        medians = [1000 * numpy.median(numpy.array(times), axis=0) / size for times in took.values()]
        return [float(passed) for passed, _ in medians], [float(processor) for _, processor in medians]

    def approximate(self, queries: Tensor) -> Iterator[tuple[str, float, float, float, float]]:
        """Name, p50 in milliseconds, recall, votes and seconds to build of each approximate engine.

        The time of the progressive search of the same queries, interleaved, is the first.
        """
        _, true = self.flat.search(queries.numpy(), K)
        first = True
        for name, make in approximate_engines(self.rows, self.features.dim).items():
            began = time.process_time()
            search = make(self._all_rows())
            seconds = time.process_time() - began
            ours = []
            theirs = []
            found = []
            for query in queries.split(1):
                began = time.thread_time()
                self.index.search(query, K)
                middle = time.thread_time()
                found.append(search(query.numpy()))
                theirs.append(time.thread_time() - middle)
                ours.append(middle - began)
            if first:
                yield "progressive", 1000 * float(numpy.median(ours)), *self._quality(self._ids(queries), true), 0.0
                first = False
            yield name, 1000 * float(numpy.median(theirs)), *self._quality(found, true), seconds
            del search
            gc.collect()

    def _ids(self, queries: Tensor) -> list[Any]:
        return list(self.index.search(queries, K).ids.numpy())

    def _all_rows(self) -> Any:
        """All rows (n, D) float32, as faiss flat has them."""
        return self.flat.reconstruct_n(0, self.rows)

    def _quality(self, found: list[Any], true: Any) -> tuple[float, float]:
        """Recall and share of equal votes."""
        recall = [len(set(ours) & set(theirs)) / K for ours, theirs in zip(found, true, strict=True)]
        votes = [
            _vote(self.labels[ours[ours >= 0]]) == _vote(self.labels[theirs])
            for ours, theirs in zip(found, true, strict=True)
        ]
        return float(numpy.mean(recall)), float(numpy.mean(votes))

    def times(self, queries: Tensor) -> dict[str, numpy.ndarray[Any, Any]]:
        """Processor time and time that passed (queries, 2) of each engine, in milliseconds, interleaved."""
        engines = self.engines()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for number, query in enumerate(queries.split(1)):
            for name, engine in engines.items():
                passed = time.perf_counter()
                processor = time.thread_time()
                engine(query)
                took = (time.thread_time() - processor, time.perf_counter() - passed)
                if number >= 3:  # the first ones warm up
                    times[name].append(took)
        scaled = {name: 1000 * numpy.array(some) for name, some in times.items()}
        scaled["faiss flat"] *= self.rows / self.in_flat
        return scaled

    def agreement(self, queries: Tensor) -> tuple[str, str, str]:
        """Recall and share of equal votes against faiss flat, and how often exact search finds the same."""
        found = self.index.search(queries, K)
        exact = self.index._exact.search(queries, K)
        same = (found.ids == exact.ids).all(1) & (found.similarity == exact.similarity).all(1)
        equal = f"{int(same.sum())} of {len(queries)}"
        if self.in_flat < self.rows:
            return "", "", equal
        _, true = self.flat.search(queries.numpy(), K)
        ids = found.ids.numpy()
        recall = numpy.mean([len(set(ours) & set(theirs)) / K for ours, theirs in zip(ids, true, strict=True)])
        votes = numpy.mean(
            [_vote(self.labels[ours]) == _vote(self.labels[theirs]) for ours, theirs in zip(ids, true, strict=True)]
        )
        return f"{recall:.4f}", f"{votes:.4f}", equal

    def singles(self) -> tuple[float, float]:
        """Median milliseconds of processor time of one append and of one deletion."""
        added = []
        removed = []
        given: list[int] = []
        for number in range(SINGLES):
            row, label = self.features.draw(1, number, "shifted")
            change = Append(row, label)
            began = time.thread_time()
            given += self.bank.apply(change)
            added.append(time.thread_time() - began)
        for row_id in given:
            began = time.thread_time()
            self.bank.apply(Delete((row_id,)))
            removed.append(time.thread_time() - began)
        return 1000 * float(numpy.median(added)), 1000 * float(numpy.median(removed))

    def arrivals(self) -> Iterator[str]:
        """What rows of another distribution cost that are appended without any rebuild, and what is found then."""
        count = min(ARRIVING, self.rows)
        before = self._shifted_milliseconds()
        began = time.thread_time()
        drawing = 0.0
        for start in range(0, count, PIECE):
            drew = time.thread_time()
            rows, labels = self.features.draw(min(PIECE, count - start), 500_000 + start, "far")
            drawing += time.thread_time() - drew
            self.bank.apply(Append(rows, labels), rows=rows)
        took = 1000 * (time.thread_time() - began - drawing) / count
        after = self._shifted_milliseconds()
        queries, _ = self.features.draw(SINGLES, 700_000, "far")
        found = self.index.search(queries, K)
        exact = self.index._exact.search(queries, K)
        same = (found.ids == exact.ids).all(1) & (found.similarity == exact.similarity).all(1)
        among = float((found.ids >= self.rows).double().mean())
        yield (
            f"* {count:,} rows far from the others appended without a rebuild: {took:.3f} ms a row. A search for such "
            f"a row took {before:.2f} ms before and {after:.2f} after, when {among:.0%} of what it finds has arrived; "
            f"{int(same.sum())} of {SINGLES} queries found what exact search finds."
        )

    def _shifted_milliseconds(self) -> float:
        """Median milliseconds of processor time of a search for a row of the other distribution."""
        queries, _ = self.features.draw(SINGLES // 4, 600_000, "far")
        taken = []
        for query in queries.split(1):
            began = time.thread_time()
            self.index.search(query, K)
            taken.append(time.thread_time() - began)
        return 1000 * float(numpy.median(taken))


Search = Callable[[Any], Any]  # ids (K,) of a query (1, D)


def approximate_engines(rows: int, dim: int) -> dict[str, Callable[[Any], Search]]:
    """What is compared with exact search where all rows fit, by name; each is built from all rows (n, D)."""
    engines: dict[str, Callable[[Any], Search]] = {
        f"faiss IVF{CELLS},SQ8, 64 cells": partial(_faiss_cells, f"IVF{CELLS},SQ8", dim),
        f"faiss IVF{CELLS},RaBitQ, refined, 64 cells": partial(_faiss_cells, f"IVF{CELLS},RaBitQ,RFlat", dim),
    }
    if rows <= GRAPH_MOST:
        engines[f"faiss HNSW32, breadth {BREADTH}"] = partial(_faiss_graph, dim)
        for name, make in (("hnswlib", _hnswlib), ("usearch", _usearch)):
            if find_spec(name):
                engines[f"{name} 32, breadth {BREADTH}"] = partial(make, dim)
    return engines


def _faiss_cells(factory: str, dim: int, rows: Any) -> Search:
    index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(rows[:: max(1, len(rows) // (40 * CELLS))])
    index.add(rows)
    if factory.endswith("RFlat"):
        index.k_factor = 4
    faiss.try_extract_index_ivf(index).nprobe = CELLS // 16
    return lambda query: index.search(query, K)[1][0]


def _faiss_graph(dim: int, rows: Any) -> Search:
    index = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efSearch = BREADTH
    index.add(rows)
    return lambda query: index.search(query, K)[1][0]


def _hnswlib(dim: int, rows: Any) -> Search:
    graph = import_module("hnswlib").Index("ip", dim)
    graph.init_index(len(rows), M=32, ef_construction=200)
    graph.add_items(rows, num_threads=1)
    graph.set_ef(BREADTH)
    return lambda query: graph.knn_query(query, K, num_threads=1)[0][0].astype(numpy.int64)


def _usearch(dim: int, rows: Any) -> Search:
    module = import_module("usearch.index")
    graph = module.Index(ndim=dim, metric="ip", dtype="f32", connectivity=32, expansion_search=BREADTH)
    graph.add(numpy.arange(len(rows)), rows, threads=1)
    return lambda query: graph.search(query[0], K, threads=1).keys.astype(numpy.int64)


def _vote(labels: Any) -> int:
    return int(numpy.bincount(labels).argmax())


def resident() -> tuple[float, float]:
    """GiB of this process in memory: its own, and pages of files that the system may drop."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(status[name].split()[0]) / 2**20 for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]


def opened(peers: Peers, folder: str) -> Iterator[str]:
    """The table of what it takes to open the bank from a file."""
    yield f"Opening it from a file, each in a process of its own, medians of {OPENINGS}; the file was in the cache:"
    yield ""
    yield "| rows | seconds of processor time | seconds passed | first answer, processor ms | GiB of its own then |"
    yield "|---|---|---|---|---|"
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "bank"
        began = time.process_time()
        save(AdaNPC(peers.bank, k=K), path)
        saving = time.process_time() - began
        gc.collect()
        for how in ("lazy", "all"):
            runs = [_in_a_process(path, how) for _ in range(OPENINGS)]
            processor, passed, answer, own = numpy.median(numpy.array(runs), axis=0)
            where = {"lazy": "left in the file", "all": "all read and checked"}[how]
            yield f"| {where} | {processor:.2f} | {passed:.2f} | {1000 * answer:.1f} | {own:.2f} |"
        size = path.stat().st_size / 2**30
    yield ""
    yield f"The file has {size:.2f} GiB; saving it took {saving:.1f} s of processor time."
    yield ""


def _in_a_process(path: Path, how: str) -> list[float]:
    """What ``open_and_answer`` measures in another process."""
    command = [sys.executable, "-m", "benchmarks.scale", "--open", str(path), "--how", how]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[1])
    numbers: list[float] = json.loads(found.stdout)
    return numbers


def open_and_answer(path: Path, how: str) -> list[float]:
    """Processor time and time passed to open a bank, processor time of the first answer, and GiB in memory then."""
    passed = time.perf_counter()
    processor = time.process_time()
    classifier = load(path, lazy_rows=how == "lazy")
    opening = [time.process_time() - processor, time.perf_counter() - passed]
    query, _ = Features(classifier.bank.dim).draw(1, 7)
    processor = time.process_time()
    classifier.predict(query)
    return [*opening, time.process_time() - processor, resident()[0]]


def report(rows: int, dim: int, audited: int, options: argparse.Namespace) -> Iterator[str]:
    """The section of one size."""
    gc.collect()
    before = resident()[0]
    peers = Peers(rows, dim, options.folder)
    scaled = ""
    if peers.in_flat < rows:
        scaled = (
            f" faiss flat holds {peers.in_flat:,} of the rows; its times are multiplied by {rows / peers.in_flat:.2f}."
        )
    yield f"## {rows:,} × {dim}"
    yield ""
    yield f"Rows {peers.where}; codes in use: {peers.index.coded}.{scaled}"
    yield ""
    yield "| queries | engine | p50 / p99 ms (passed) | faiss flat ÷ this | this ÷ read | recall | votes | same |"
    yield "|---|---|---|---|---|---|---|---|"
    for number, kind in enumerate(KINDS):
        queries, _ = peers.features.draw(options.queries + 3, 7 + number, kind)
        times = peers.times(queries)
        compared, _ = peers.features.draw(audited, 77 + number, kind)
        agreement = peers.agreement(compared)
        flat = numpy.median(times["faiss flat"][:, 0])
        read = numpy.median(times["read"][:, 0])
        for name, took in times.items():
            middle = numpy.median(took[:, 0])
            cells = [
                kind,
                name,
                f"{middle:.2f} / {numpy.quantile(took[:, 0], 0.99):.2f} ({numpy.median(took[:, 1]):.2f})",
            ]
            cells += [f"{flat / middle:.1f}", f"{middle / read:.2f}"]
            cells += agreement if name == "progressive" else ("", "", "")
            yield f"| {' | '.join(cells)} |"
        if kind == KINDS[0]:
            note_points(options.out, rows, dim, {name: float(numpy.median(took[:, 0])) for name, took in times.items()})
    yield ""
    yield from batches(peers, options)
    if peers.in_flat == rows and options.peers:
        yield from approximate(peers, options)
    insert, delete = peers.singles()
    own, files = resident()
    build = 1000 * peers.build_seconds / rows
    yield f"* Build: {build:.3f} ms of processor time a row."
    yield f"* Append of one row: {insert:.3f} ms; deletion of one: {delete:.3f} ms. Both by `bank.apply`."
    slots = peers.index.slots
    beside = peers.bank.nbytes / slots - 2 * dim
    yield f"* Bytes a row: {2 * dim} of the row, {peers.where}; {beside:.0f} of codes, ids, labels and the like."
    yield from peers.arrivals()
    yield f"* Bytes of the bank by purpose: {peers.bank.memory()}"
    yield f"* Resident: {own:.2f} GiB of its own, all peers included ({before:.2f} before); {files:.2f} GiB of files."
    yield ""
    if peers.index.coded:
        peers.flat.reset()
        yield from opened(peers, options.folder)


def batches(peers: Peers, options: argparse.Namespace) -> Iterator[str]:
    """The table of batches, and what a second thread is worth."""
    yield "Milliseconds of processor time a query, in batches, one thread:"
    yield ""
    yield f"| queries | engine | {' | '.join(f'batches of {size}' for size in BATCHES)} |"
    yield "|---|---|" + "---|" * len(BATCHES)
    for kind in ("iid", "far"):
        measured = peers.batch_times(kind)
        if kind == "iid":
            in_batches = {"progressive, batches of 64": measured["progressive"][-1]}
            note_points(options.out, peers.rows, peers.features.dim, in_batches)
        for name, taken in measured.items():
            yield f"| {kind} | {name} | {' | '.join(f'{took:.3f}' for took in taken)} |"
    for size in (1, 64):
        passed, processor = peers.two_threads(size)
        yield ""
        yield (
            f"Progressive, batches of {size}, one thread and two: {passed[0]:.3f} and {passed[1]:.3f} ms passed, "
            f"{processor[0]:.3f} and {processor[1]:.3f} ms of processor time a query."
        )
    yield ""


def note_points(out: Path, rows: int, dim: int, milliseconds: dict[str, float]) -> None:
    """Keeps what a query costs beside the results, so that runs of single sizes add up to one plot."""
    path = out.with_suffix(".json")
    points = {}
    if path.exists():
        points = json.loads(path.read_text())
    for name, took in milliseconds.items():
        points[f"{name} | {rows} | {dim}"] = round(took, 4)
    path.write_text(json.dumps(points, indent=1, sort_keys=True) + "\n")


def plot(out: Path) -> None:
    """Draws cost against size, on log axes, from all points that are kept."""
    pyplot = import_module("matplotlib.pyplot")
    points = json.loads(out.with_suffix(".json").read_text())
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for name, took in points.items():
        engine, rows, dim = name.split(" | ")
        lines.setdefault((engine, dim), []).append((int(rows), took))
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    engines = sorted({engine for engine, _ in lines})
    for (engine, dim), line in sorted(lines.items()):
        style = {"512": "o-", "2048": "s--"}[dim]
        color = f"C{engines.index(engine)}"
        label = f"{engine}, {dim} wide"
        if engine == "read":
            color = "black"
            label = f"memory limit: a read of what the first stage reads, {dim} wide"
        axes.plot(*zip(*sorted(line), strict=True), style, color=color, label=label, markersize=4, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="ms of processor time a query (k = 50, one thread)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(out.with_suffix(".svg"), bbox_inches="tight")


def approximate(peers: Peers, options: argparse.Namespace) -> Iterator[str]:
    """The table of approximate engines."""
    yield "Approximate engines, built of all rows at once, one query at a time; recall and votes as above:"
    yield ""
    yield "| queries | engine | p50 ms | recall | votes | seconds to build |"
    yield "|---|---|---|---|---|---|"
    halves = [peers.features.draw(options.queries, 9000 + number, kind)[0] for number, kind in enumerate(KINDS)]
    for name, took, recall, votes, seconds in peers.approximate(torch.cat(halves)):
        build = f"{seconds:.0f}" if seconds else ""
        yield f"| all four kinds | {name} | {took:.2f} | {recall:.4f} | {votes:.4f} | {build} |"
    yield ""


def main() -> None:
    """Measures every size that was asked for, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="only these sizes")
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS, help="only these widths")
    parser.add_argument("--again", action="store_true", help="measures sizes again that were measured before")
    parser.add_argument("--queries", type=int, default=100, help="of each kind that are timed")
    parser.add_argument("--audited", type=int, default=AUDITED, help="of each kind that are compared with exact search")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leaves approximate engines out")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for rows in a file: 5 GB")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--open", type=Path, help="opens a bank and says what that took, for processes of its own")
    parser.add_argument("--how", choices=("lazy", "all"), default="all", help="whether to leave rows in the file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.open:
        print(json.dumps(open_and_answer(options.open, options.how)))
        return
    faiss.omp_set_num_threads(1)
    for rows, dim in product(options.rows, options.dims):
        section = section_of(options.out, rows, dim)
        if section.exists() and not options.again:
            print(f"{rows:,} x {dim} was measured before: {section}; --again measures it again")
            continue
        section.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for line in report(rows, dim, options.audited, options):
            lines.append(line)
            unfinished = section.with_suffix(".unfinished")
            unfinished.write_text("\n".join(lines))  # what is known so far: a run may be stopped
        lines.insert(2, f"`{command_of(options, rows, dim)}` on {machine()}, kernels {kernels.chosen()}.")
        section.write_text("\n".join(lines))
        unfinished.unlink()
        assemble(options.out)
    assemble(options.out)
    plot(options.out)


def section_of(out: Path, rows: int, dim: int) -> Path:
    """Where the results of one size are kept: a run that is stopped goes on with the next size."""
    return out.with_suffix("") / f"{dim:05}-{rows:08}.md"


def command_of(options: argparse.Namespace, rows: int, dim: int) -> str:
    """The command that measures one size as it was measured."""
    without = "" if options.peers else " --no-peers"
    sizes = f"--rows {rows} --dims {dim} --again"
    return f"python -m benchmarks.scale {sizes} --queries {options.queries} --audited {options.audited}{without}"


def assemble(out: Path) -> None:
    """Puts the notes and the sections of all sizes that were measured together."""
    folder = out.with_suffix("")
    parts = ["# Scale\n", f"Made by `make bench-scale`, faiss {faiss.__version__}, size by size.\n", CONDITIONS + "\n"]
    notes = folder / NOTES
    if notes.exists():
        parts.append(notes.read_text())
    parts.append(f"![Cost against size]({out.stem}.svg)\n")
    parts += [path.read_text() for path in sorted(folder.glob("[0-9]*.md"))]
    out.write_text("\n".join(part.rstrip() + "\n" for part in parts))


if __name__ == "__main__":
    main()
