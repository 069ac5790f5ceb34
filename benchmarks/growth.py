"""How long the longest append takes while a bank grows to a million rows, one by one and in blocks.

``python -m benchmarks.growth`` measures processor time of the appending thread, which other programs hardly disturb,
and the time that passed, which they do.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from adanpc import MemoryBank
from adanpc.core import Append
from adanpc.index.grid import Array
from adanpc.lab.environment import machine
from adanpc.progress import track

CLASSES = 10
SETTINGS = ((64, "float32"), (512, "float32"), (512, "float16"), (512, "int8"))  # dimensions and storage
SINGLES = 64  # rows that are appended one by one, before each block
BLOCK = 960  # rows that are appended at once
NOTHING = 0  # rows that the control appends
LIMIT = 20.0  # milliseconds that no append should exceed
CONTROL_BYTES = 4 << 20  # that the control computes with, again and again
CONTROL_PASSES = 25  # which take about as long as appending a block
CONDITIONS = (
    "A bank without capacity, from empty to {rows:,} rows: {singles} rows one by one, then {block} at once, and so on. "
    "Milliseconds of one append: processor time of the appending thread, page faults included, and in brackets the "
    "time that passed, which has in it whatever else ran on the machine. Another thread has memory supplied ahead, and "
    "its time is not counted. Control: after each block, arithmetic in place on 4 MiB that were touched long before, "
    "without the library, an allocation or a system call: what it takes beyond its median is the machine's doing. "
    "Page faults: pages touched for the first time by the appending thread, in the median and in the longest append; "
    "one of 2 MiB counts as one. What was imported is hidden from Python's garbage collector "
    "(`gc.freeze()`) unless `--collect-all` is given."
)


POOLED = (
    "All settings and runs together. Where the machine holds up whatever runs, long pauses come in proportion to the "
    "time that something takes. Appends would pause by themselves if they had more long ones in a second of their work "
    "than the control, which has nothing to do with the library."
)


class Time(NamedTuple):
    """What one append took, in milliseconds."""

    rows: float  # that were there before
    added: float  # that were appended
    processor: float
    passed: float
    faults: float  # of pages that were touched for the first time


ROWS, ADDED, PROCESSOR, PASSED, FAULTS = range(len(Time._fields))  # where each is in a row of an array


def main() -> None:
    """Grows a bank for each setting, as often as is wanted, and writes the longest appends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1, help="how often to grow a bank of each setting")
    parser.add_argument("--collect-all", action="store_true", help="lets Python's collector visit what was imported")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/growth.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.collect_all:
        # Every so often Python's collector visits all objects of a process. Those of torch alone take a tenth of a
        # second, whoever allocates; that pause is not the bank's.
        gc.freeze()
    measured: dict[tuple[str, int], list[Array]] = {}  # the times of each run, by setting and rows appended at once
    for _ in track(range(options.runs), "runs"):
        for dim, storage in SETTINGS:
            times = run(dim, storage, options.rows)
            for count in (1, BLOCK, NOTHING):
                of_count = times[times[:, ADDED] == count]
                measured.setdefault((f"{dim} x {storage}", count), []).append(of_count)
    lines = [
        "# Appends while a bank grows",
        "",
        f"`python -m benchmarks.growth --runs {options.runs}` on {machine()}.",
        "",
        CONDITIONS.format(rows=options.rows, singles=SINGLES, block=BLOCK),
        "",
        "| rows | appended | median | 99 % | 99.9 % | longest | longest at rows | page faults | above 20 ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (setting, count), runs in measured.items():
        lines.append(row(setting, appended(count), numpy.concatenate(runs)))
    lines += ["", POOLED, "", "| appended | number | seconds of work | above 20 ms | in a second of work |"]
    lines += ["|---|---|---|---|---|"]
    lines += pooled(measured)
    options.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def run(dim: int, storage: str, rows: int) -> Array:
    """The times of all appends of one run, a row each with the fields of ``Time``."""
    measured = array("d")  # plain numbers: a hundred thousand tuples would be visited by Python's collector, too
    for each in appends(dim, storage, rows):
        measured.extend(each)
    return numpy.reshape(measured, (-1, len(Time._fields)))


def appended(count: int) -> str:
    """What a line of a table is about."""
    if count == NOTHING:
        return "control"
    return f"{count}"


def pooled(measured: dict[tuple[str, int], list[Array]]) -> Iterator[str]:
    """For single rows, blocks and the control of all settings and runs: how often one took too long."""
    for count in (1, BLOCK, NOTHING):
        runs = [times for (_, added), some in measured.items() if added == count for times in some]
        processor = numpy.concatenate(runs)[:, PROCESSOR]
        seconds = processor.sum() / 1000
        above = int((processor > LIMIT).sum())
        yield f"| {appended(count)} | {len(processor):,} | {seconds:,.0f} | {above} | {above / seconds:.3f} |"


def appends(dim: int, storage: str, most: int) -> Iterator[Time]:
    """The times of all appends to a bank that grows to at least so many rows."""
    bank = MemoryBank(dim, CLASSES, storage=storage)
    generator = torch.Generator().manual_seed(0)
    numbers = numpy.ones(CONTROL_BYTES // 8)
    rows = 0
    while rows < most:
        features = torch.randn(SINGLES + BLOCK, dim, generator=generator)
        labels = torch.arange(SINGLES + BLOCK) % CLASSES
        sizes = [1] * SINGLES + [BLOCK]
        for some, theirs in zip(features.split(sizes), labels.split(sizes), strict=True):
            yield time_of(partial(bank.apply, Append(some, theirs)), rows, len(some))
            rows += len(some)
        yield time_of(partial(control, numbers), rows, NOTHING)


def time_of(action: Callable[[], object], rows: int, added: int) -> Time:
    """What an action takes, in a bank of so many rows to which it adds so many."""
    faults = page_faults()
    passed = time.perf_counter()
    processor = time.thread_time()
    action()
    processor = time.thread_time() - processor
    passed = time.perf_counter() - passed
    return Time(rows, added, 1000 * processor, 1000 * passed, page_faults() - faults)


def control(numbers: Array) -> None:
    """Some arithmetic that needs nothing of the system."""
    for _ in range(CONTROL_PASSES):
        numpy.multiply(numbers, 0.999, out=numbers)
        numpy.add(numbers, 1.0, out=numbers)


def page_faults() -> int:
    """How many pages this thread has had to wait for so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def row(setting: str, what: str, times: Array) -> str:
    """A line of the table of settings."""
    processor = times[:, PROCESSOR]
    passed = times[:, PASSED]
    longest = times[processor.argmax()]
    typical = numpy.median(times[:, FAULTS])
    cells = [setting, what]
    for share in (0.5, 0.99, 0.999, 1.0):
        cells.append(f"{numpy.quantile(processor, share):.2f} ({numpy.quantile(passed, share):.2f})")
    cells.append(f"{longest[ROWS]:,.0f}")
    cells.append(f"{typical:.0f}, of the longest {longest[FAULTS]:,.0f}")
    cells.append(f"{(processor > LIMIT).sum()} of {len(times):,}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
