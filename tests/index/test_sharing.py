"""Work that threads share: all of it is done, and an error in one part is raised."""

from __future__ import annotations

import threading
from functools import partial
from itertools import chain

import pytest

from adanpc.index.sharing import ranges, run


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 7, 64, 200])
def test_ranges_cover_everything_once_and_never_cross_a_block(count: int, threads: int) -> None:
    parts = ranges(count, 64, threads)
    assert list(chain.from_iterable(parts)) == list(range(count))
    assert all(part and part.start // 64 == part[-1] // 64 for part in parts)
    assert max(map(len, parts)) <= -(-count // threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_the_order_of_works(threads: int) -> None:
    works = [partial(pow, number, 2) for number in range(20)]
    assert run(works, threads) == [number**2 for number in range(20)]


def test_works_run_in_this_thread_if_there_is_no_other() -> None:
    assert run([threading.get_ident] * 3, 1) == [threading.get_ident()] * 3
    assert run([threading.get_ident], 4) == [threading.get_ident()]
    assert threading.get_ident() not in run([threading.get_ident] * 3, 2)


def failing() -> int:
    raise ZeroDivisionError


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_one_work_is_raised(threads: int) -> None:
    with pytest.raises(ZeroDivisionError):
        run([threading.get_ident, failing, threading.get_ident], threads)
