"""Work that several threads share: parts that run only kernels, which do not need Python's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from operator import call
from typing import TypeVar

Result = TypeVar("Result")


def run(works: Sequence[Callable[[], Result]], threads: int) -> list[Result]:
    """Runs all works, in this thread or in several others, and returns their results; an error in one is raised."""
    if threads == 1 or len(works) == 1:
        return [work() for work in works]
    with ThreadPoolExecutor(min(threads, len(works))) as pool:
        return list(pool.map(call, works))


def ranges(count: int, size: int, threads: int) -> list[range]:
    """Returns the ranges into which threads divide 0 … count - 1: equal shares, cut again at multiples of ``size``."""
    cuts = {thread * count // threads for thread in range(threads)}
    cuts.update(range(0, count, size))
    return [range(start, end) for start, end in pairwise([*sorted(cuts), count])]
