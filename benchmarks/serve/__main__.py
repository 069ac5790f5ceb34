"""``python -m benchmarks.serve``: predictions a second of a durable service, without durability, and of a bare echo.

All three servers run all the time, each in a process of its own, and are loaded in turns, so that whatever else runs on
the machine disturbs them alike. Requests are of one query, in the binary tensors or in the JSON of the Open Inference
Protocol; the echo gives the same bytes or the same JSON back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adanpc import AdaNPC, MemoryBank
from adanpc.lab.environment import machine
from adanpc.store import DurableBank
from benchmarks.serve.load import WIRES, Load, Requests, load
from benchmarks.serve.servers import KINDS
from benchmarks.serve.started import Running, running

CLASSES = 10
QUERIES = 4096  # different ones
NOISE = 1.5  # of rows around the center of their class, whose coordinates have a deviation of 1
SHIFT = 0.3  # of the stream
AIM = 0.4  # of the echo
INFER = "v2/models/adanpc/infer"
HEADINGS = ("server", "predictions/s", "p50 ms", "p99 ms", "processor ms", "of the echo", "in processor time")


class Setting(NamedTuple):
    """A bank that is served."""

    rows: int
    dim: int
    preset: str
    storage: str

    @property
    def title(self) -> str:
        """What it is."""
        return f"{self.rows:,} × {self.dim}, preset `{self.preset}`, {self.storage}"


class Round(NamedTuple):
    """What one server did in one round."""

    load: Load
    processor: float  # milliseconds of the server for each answer


def main() -> None:
    """Measures each setting, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each server in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ids", action="store_true", help="give requests ids, so that their answers are kept")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serve.md"))
    options = parser.parse_args()
    settings = [
        Setting(options.rows, options.dim, "safe", "int8"),
        Setting(options.rows, options.dim, "paper", "int8"),
        Setting(options.rows, options.dim, "paper", "progressive"),
        Setting(1000, options.dim, "paper", "int8"),
    ]
    torch.set_num_threads(1)  # as in the servers
    parts = ["# The service under load", about(options)]
    for setting in settings:
        with TemporaryDirectory() as place:
            parts += report(setting, Path(place), options)
    options.out.write_text("\n\n".join(parts) + "\n")


def report(setting: Setting, place: Path, options: argparse.Namespace) -> list[str]:
    """The paragraphs about one bank, which are also printed."""
    classifier, queries = create_bank(place / "memory", setting)
    shutil.copytree(place / "memory", place / "durable")
    before = proposing(classifier, queries, options.clients)
    rounds = measured(place, queries, options)
    parts = [f"## {setting.title}"]
    for wire in WIRES:
        parts += [f"Features and answers as {wire}:", table(rounds[wire])]
    after = proposing(classifier, queries, options.clients)
    echo = median(one.processor for one in rounds["binary"]["echo"])
    parts.append(
        f"Search and vote alone, `propose` of {options.clients} queries: {before:.2f} ms of processor time a query "
        f"before these rounds and {after:.2f} after; an echo of bytes takes {echo:.2f}. Load of the machine at the "
        f"end, by uptime: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} cores."
    )
    print("\n\n".join(parts), flush=True)
    return parts


def proposing(classifier: AdaNPC, queries: np.ndarray, batch: int) -> float:
    """Milliseconds of processor time for each query of a batch that is answered, and not learned from."""
    times = []
    for start in range(0, 16 * batch, batch):
        features = torch.from_numpy(queries[start : start + batch])
        began = time.thread_time()
        classifier.propose(features)
        times.append(1000 * (time.thread_time() - began) / batch)
    return median(times)


def about(options: argparse.Namespace) -> str:
    """What is measured, and how."""
    ids = ""
    if options.ids:
        ids = " with ids"
    return (
        f"`make bench-serve` (`python -m benchmarks.serve`) on {machine()}. {options.clients} clients, each with one "
        f"connection, send requests{ids} of one query to /v2, as binary tensors or as JSON, and wait for the answer; "
        f"{options.rounds} rounds of {options.seconds:g} s for each server, in turns; medians of the rounds. "
        "*durable*: every answer is given once what it taught is on the disk. *memory*: the same service over a log "
        "that keeps nothing. *echo*: a bare FastAPI app that gives the body back, on the same uvicorn: the bytes as "
        "they came, or the JSON document that it read (`async def echo(body: dict) -> dict`). Processor time is that "
        "of the server for each answer. The clients share the machine."
    )


def measured(place: Path, queries: np.ndarray, options: argparse.Namespace) -> dict[str, dict[str, list[Round]]]:
    """The rounds of each server, by wire and server."""
    rounds: dict[str, dict[str, list[Round]]] = {wire: {kind: [] for kind in KINDS} for wire in WIRES}
    requests = {wire: Requests(queries, wire) for wire in WIRES}
    with ExitStack() as stack:
        servers = {kind: stack.enter_context(running(kind, place / kind)) for kind in KINDS}
        for wire in WIRES:
            for kind in KINDS:
                one_round(servers[kind], kind, requests[wire], wire, options, seconds=1.0)  # all has been used once
        for number in range(options.rounds):
            order = KINDS if number % 2 else KINDS[::-1]
            for wire in WIRES:
                for kind in order:
                    done = one_round(servers[kind], kind, requests[wire], wire, options, options.seconds)
                    rounds[wire][kind].append(done)
    return rounds


def one_round(
    server: Running, kind: str, requests: Requests, wire: str, options: argparse.Namespace, seconds: float
) -> Round:
    """Loads one server for a while."""
    path = wire if kind == "echo" else INFER
    sent = requests.to(f"127.0.0.1:{server.port}/{path}", ids=options.ids)
    before = server.processor_seconds()
    seen = load(server.port, sent, options.clients, seconds)
    return Round(seen, 1000 * (server.processor_seconds() - before) / len(seen.latencies))


def create_bank(folder: Path, setting: Setting) -> tuple[AdaNPC, np.ndarray]:
    """Creates a durable bank; the classifier that it begins as, and queries for it."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, setting.dim, generator=generator)

    def features(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, CLASSES, (count,), generator=generator)
        return centers[labels] + NOISE * torch.randn(count, setting.dim, generator=generator), labels

    bank = MemoryBank(setting.dim, CLASSES, storage=setting.storage, soft=setting.preset == "safe")
    classifier = AdaNPC(bank, preset=setting.preset)
    classifier.learn(*features(setting.rows))
    DurableBank.create(folder, classifier).close()
    queries, _ = features(QUERIES)
    return classifier, (queries + SHIFT).numpy()


def table(rounds: dict[str, list[Round]]) -> str:
    """The medians, and how they compare with the echo in the same round."""
    lines = [" | ".join(("", *HEADINGS, "")).strip(), "|" + "---|" * len(HEADINGS)]
    for kind, own in rounds.items():
        pairs = list(zip(own, rounds["echo"], strict=True))
        share = median(one.load.rate / echo.load.rate for one, echo in pairs)
        of_processor = median(echo.processor / one.processor for one, echo in pairs)
        cells = (
            kind,
            f"{median(one.load.rate for one in own):,.0f}",
            f"{median(one.load.quantile(0.5) for one in own):.1f}",
            f"{median(one.load.quantile(0.99) for one in own):.1f}",
            f"{median(one.processor for one in own):.2f}",
            f"{100 * share:.0f} %",
            f"{100 * of_processor:.0f} %",
        )
        lines.append("| " + " | ".join(cells) + " |")
    pairs = list(zip(rounds["durable"], rounds["echo"], strict=True))
    share = median(one.load.rate / echo.load.rate for one, echo in pairs)
    of_processor = median(echo.processor / one.processor for one, echo in pairs)
    verdict = f"{_verdict(share)}; in processor time: {_verdict(of_processor)}"
    lines += ["", f"Aim, {100 * AIM:.0f} % of the echo: {verdict}."]
    return "\n".join(lines)


def _verdict(share: float) -> str:
    if share >= AIM:
        return "reached"
    return "not reached"


if __name__ == "__main__":
    main()
