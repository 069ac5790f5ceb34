"""How long it takes until a durable bank answers after a start: ``python -m benchmarks.serve.startup``.

A process that was killed left a snapshot and some changes since. Each start is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from adanpc import AdaNPC, MemoryBank, everyone
from adanpc.lab.environment import machine
from adanpc.store import DurableBank

ROOT = Path(__file__).parents[2]
CLASSES = 10
BLOCK = 50_000  # rows that are made at once
SETTINGS = tuple((rows, storage) for rows in (100_000, 1_000_000) for storage in ("float32", "int8", "progressive"))


def create_bank(folder: Path, rows: int, dim: int, storage: str) -> None:
    """Creates a bank of random rows."""
    generator = torch.Generator().manual_seed(0)
    classifier = AdaNPC(MemoryBank(dim, CLASSES, storage=storage), admission=everyone)
    for start in range(0, rows, BLOCK):
        count = min(BLOCK, rows - start)
        classifier.learn(torch.randn(count, dim, generator=generator), torch.arange(count) % CLASSES)
    DurableBank.create(folder, classifier).close()


def change_and_die(folder: Path, changes: int) -> None:
    """Makes so many changes, of one query each, and ends without closing."""
    bank = DurableBank.open(folder)
    queries = torch.randn(changes, bank.contents.settings.dim)
    for query in queries:
        bank.classify(query[None])
    os.kill(os.getpid(), signal.SIGKILL)


def start(folder: Path) -> None:
    """Opens a bank, answers, and tells how long that took."""
    began = time.perf_counter()
    processor = time.process_time()
    bank = DurableBank.open(folder)
    bank.predict(torch.ones(1, bank.contents.settings.dim))
    replayed = bank.position - max(bank.log.snapshots())
    measured = {
        "replayed": replayed,
        "seconds": time.perf_counter() - began,
        "processor": time.process_time() - processor,
        "file": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**30,
    }
    print(json.dumps(measured), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # the next one finds what this one found


def in_a_process(*arguments: object) -> str:
    """What a part of this program prints before it ends."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-m", "benchmarks.serve.startup", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False).stdout


def main() -> None:
    """Measures starts, and writes them down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", help="of the program, for processes that it starts itself")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--most-rows", type=int, default=1_000_000, help="leave larger banks out")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/startup.md"))
    options = parser.parse_args()
    match options.part:
        case ["die", folder, changes]:
            change_and_die(Path(folder), int(changes))
        case ["start", folder]:
            start(Path(folder))
        case _:
            options.out.write_text(report(options))


def report(options: argparse.Namespace) -> str:
    """Medians of the starts of each bank."""
    about = (
        f"`python -m benchmarks.serve.startup` on {machine()}: seconds from `DurableBank.open` to the first answer, "
        f"after a process was killed that had made {options.changes:,} changes of one query since the last snapshot. "
        f"{options.dim} dimensions, medians of {options.starts} starts, each in a process of its own; the files were "
        "in the cache of the system."
    )
    lines = [
        "# Start-up",
        "",
        about,
        "",
        "| rows | storage | seconds | processor seconds | folder GiB |",
    ]
    lines.append("|---|---|---|---|---|")
    for rows, storage in SETTINGS:
        if rows > options.most_rows:
            continue
        with TemporaryDirectory() as place:
            folder = Path(place) / "bank"
            create_bank(folder, rows, options.dim, storage)
            in_a_process("die", folder, options.changes)
            found: list[dict[str, Any]] = [json.loads(in_a_process("start", folder)) for _ in range(options.starts)]
        assert all(one["replayed"] == options.changes for one in found), found
        numbers = {name: median(one[name] for one in found) for name in found[0]}
        lines.append(
            f"| {rows:,} | {storage} | {numbers['seconds']:.1f} | {numbers['processor']:.1f} | {numbers['file']:.1f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
