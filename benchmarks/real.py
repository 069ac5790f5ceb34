"""Searches among real features beside other engines, and what a bank adds to a whole prediction.

``python -m benchmarks.real --data-dir data``. The rows are images of CIFAR-10 as a published EfficientNet-Lite sees
them; the queries are other images of CIFAR-10, and sketches of PACS. Everything is measured in turn in one thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from adanpc import AdaNPC, Append, MemoryBank
from adanpc.index import ProgressiveIndex, kernels, unit
from adanpc.lab.data.domain import Domain, some
from adanpc.lab.data.read import read
from adanpc.lab.environment import machine
from adanpc.lab.networks import build
from adanpc.lab.networks.features import features
from adanpc.progress import track
from benchmarks.scale import FILE_FROM, PIECE, Features, approximate_engines

faiss: Any = import_module("faiss")

K = 50
CLASSES = 10
SIDE = 96  # pixels that the images of CIFAR-10 are enlarged to; 224 would take five times as long
SKETCHES = 1000  # of 3,929: each takes as long to encode as five images of CIFAR-10
ROUNDS = 100  # queries of each kind that are timed
BANKS = (10_000, 100_000, 1_281_167)  # rows of the banks whose share in a prediction is measured
PREDICTIONS = 40  # of each bank
RESULTS = Path(__file__).parent / "results" / "real.md"
CONDITIONS = f"""Rows: the training images of CIFAR-10 that are here, enlarged to {SIDE} × {SIDE} pixels. Queries: its
test images (*iid*), and {SKETCHES:,} sketches of PACS at their usual size (*far*). k = {K}, one thread; milliseconds of
processor time, median of {ROUNDS} queries of a kind, in turns. Recall and votes (the most frequent label of {K}) are
against faiss flat over float32 rows, on all queries of a kind; *same*: ids and similarities equal those of an exact
search of the same stored rows, to the bit."""

Search = Callable[[Tensor], Any]  # ids (B, K) of queries (B, D)


class Subject:
    """Real features: rows with labels, and queries of two kinds."""

    def __init__(self, data_dir: Path, encoder: str, cache: Path) -> None:
        self.model = build(encoder, 1000, pretrained=True).eval()
        cifar = read("cifar-10", data_dir)
        sketches = some(read("pacs", data_dir)["sketch"], SKETCHES, seed=0)
        train = cifar["train"]
        self.labels = train.labels
        enlarged = replace(self.model.preprocessing.straight(), size=SIDE)
        self.rows = self._encoded(train.with_transform(enlarged), cache)
        self.queries = {
            "iid": self._encoded(cifar["test"].with_transform(enlarged), cache),
            "far": self._encoded(sketches.with_transform(self.model.preprocessing), cache),
        }

    def _encoded(self, domain: Domain, cache: Path) -> Tensor:
        return unit(features(self.model, domain, cache=cache))

    def bank(self, storage: str) -> MemoryBank:
        """A bank of all rows."""
        bank = MemoryBank(self.rows.shape[1], CLASSES, storage=storage)
        bank.apply(Append(self.rows, self.labels), rows=self.rows)
        return bank


def engines(subject: Subject, flat: Any) -> dict[str, Search]:
    """What is compared, by name."""
    found: dict[str, Search] = {"faiss flat": lambda queries: flat.search(queries.numpy(), K)[1]}
    for storage in ("progressive", "float32", "float16", "int8"):
        index = subject.bank(storage).contents.index
        found[storage] = partial(_ids, index)
    for name, make in approximate_engines(len(subject.rows), subject.rows.shape[1]).items():
        search = make(subject.rows.numpy())
        found[name] = partial(_one_by_one, search)
    return found


def _ids(index: Any, queries: Tensor) -> Any:
    return index.search(queries, K).ids.numpy()


def _one_by_one(search: Callable[[Any], Any], queries: Tensor) -> Any:
    return numpy.stack([search(query.numpy()) for query in queries.split(1)])


def searches(subject: Subject) -> Iterator[str]:
    """The table of searches."""
    flat = faiss.IndexFlatIP(subject.rows.shape[1])
    flat.add(subject.rows.numpy())
    compared = engines(subject, flat)
    labels = subject.labels.numpy()
    yield f"## {len(subject.rows):,} × {subject.rows.shape[1]}"
    yield ""
    yield "| queries | engine | ms | faiss flat ÷ this | recall | votes | same |"
    yield "|---|---|---|---|---|---|---|"
    for kind, queries in subject.queries.items():
        times = _times(compared, queries)
        true = compared["faiss flat"](queries)
        for name, search in track(compared.items(), f"{kind} queries", len(compared)):
            ids = search(queries)
            recall = numpy.mean([len(set(ours) & set(theirs)) / K for ours, theirs in zip(ids, true, strict=True)])
            votes = numpy.mean(
                [_vote(labels, ours) == _vote(labels, theirs) for ours, theirs in zip(ids, true, strict=True)]
            )
            same = ""
            if name == "progressive":
                same = _same(search, queries)
            took = times[name]
            yield (
                f"| {kind}, {len(queries):,} | {name} | {took:.2f} | {times['faiss flat'] / took:.1f} "
                f"| {recall:.4f} | {votes:.4f} | {same} |"
            )
    yield ""


def _times(compared: dict[str, Search], queries: Tensor) -> dict[str, float]:
    """Median milliseconds of processor time a query of each engine, in turns."""
    step = len(queries) // (ROUNDS + 1)
    taken: dict[str, list[float]] = {name: [] for name in compared}
    for number, query in enumerate(queries[::step][: ROUNDS + 1].split(1)):
        for name, search in compared.items():
            began = time.thread_time()
            search(query)
            if number:  # the first one warms up
                taken[name].append(1000 * (time.thread_time() - began))
    return {name: float(numpy.median(some)) for name, some in taken.items()}


def _vote(labels: Any, ids: Any) -> int:
    return int(numpy.bincount(labels[ids[ids >= 0]]).argmax())


def _same(search: Any, queries: Tensor) -> str:
    """How many queries of a progressive search found what an exact search of the same rows finds."""
    index = search.args[0]
    equal = 0
    for batch in queries.split(1000):
        found = index.search(batch, K)
        exact = index._exact.search(batch, K)
        same = (found.ids == exact.ids).all(1) & (found.similarity == exact.similarity).all(1)
        equal += int(same.sum())
    return f"{equal} of {len(queries)}"


def shares(subject: Subject, data_dir: Path, folder: str) -> Iterator[str]:
    """The table of what a bank adds to a prediction."""
    photos = read("pacs", data_dir)["photo"].with_transform(subject.model.preprocessing)
    images = [photos.take([number]) for number in range(PREDICTIONS + 1)]
    dim = subject.rows.shape[1]
    yield "## The bank's share of a prediction"
    yield ""
    yield (
        "One at a time, one thread, preset `paper`: the encoder's pass over a photo of PACS, then `step` on features. "
        "Rows and queries are drawn with the spectrum of real features (see [scale](scale.md)), the queries shifted, "
        'because real features of so many images are not here. `storage="progressive"`, in a file from 1 GiB on. '
        "Medians of milliseconds of processor time."
    )
    yield ""
    yield "| rows | encoder | step | share of the bank | bank in memory, MiB |"
    yield "|---|---|---|---|---|"
    for rows in BANKS:
        bank = _drawn(rows, dim, folder)
        encoding, stepping = _times_of_predictions(subject, images, AdaNPC(bank, k=K))
        resident = bank.memory()["total"] / 2**20
        share = stepping / (encoding + stepping)
        yield f"| {rows:,} | {encoding:.1f} | {stepping:.2f} | {share:.1%} | {resident:,.0f} |"
    yield ""


def _times_of_predictions(subject: Subject, images: list[Tensor], classifier: AdaNPC) -> tuple[float, float]:
    """Median milliseconds of processor time of the encoder's pass over an image and of a step, in turns."""
    queries, _ = Features(classifier.bank.dim).draw(len(images), 7, "shifted")
    encoding = []
    stepping = []
    for image, query in zip(images, queries.split(1), strict=True):
        began = time.thread_time()
        with torch.no_grad():
            subject.model.features(image)
        middle = time.thread_time()
        classifier.step(query)
        encoding.append(1000 * (middle - began))
        stepping.append(1000 * (time.thread_time() - middle))
    return float(numpy.median(encoding[1:])), float(numpy.median(stepping[1:]))  # the first ones warm up


def _drawn(rows: int, dim: int, folder: str) -> MemoryBank:
    """A bank of drawn rows."""
    drawn = Features(dim)
    index: Any = ProgressiveIndex
    if rows * dim * 2 >= FILE_FROM:
        index = partial(ProgressiveIndex, folder=folder)
    bank = MemoryBank(dim, 1000, storage="progressive", index=index)
    for start in track(range(0, rows, PIECE), f"{rows:,} rows"):
        features, labels = drawn.draw(min(PIECE, rows - start), 1000 + start)
        bank.apply(Append(features, labels), rows=features)
    return bank


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="with CIFAR-10 and PACS")
    parser.add_argument("--encoder", default="efficientnet-lite0")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "adanpc-real", help="for features")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for rows in a file: 4 GB")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    subject = Subject(options.data_dir, options.encoder, options.cache)
    command = f"`python -m benchmarks.real --encoder {options.encoder}`"
    lines = ["# Real features", "", f"{command} on {machine()}, kernels {kernels.chosen()}, faiss {faiss.__version__}."]
    lines += ["", CONDITIONS, ""]
    lines += searches(subject)
    lines += shares(subject, options.data_dir, options.folder)
    options.out.write_text("\n".join(lines).rstrip() + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
