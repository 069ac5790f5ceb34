"""Memory is supplied ahead of what is written, changes nothing, and is not needed."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from threading import Thread

import numpy
import pytest
import torch

from adanpc.index import ahead, blocks
from adanpc.index.grid import Array

CPU = torch.device("cpu")


def resident(part: Array) -> float:
    """The share of an array's pages that the system has supplied."""
    start = part.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = part.ctypes.data + part.nbytes - start
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is supplied ahead on Linux only")
def test_memory_is_supplied_and_keeps_what_it_holds() -> None:
    memory = numpy.frombuffer(mmap.mmap(-1, 16 << 20), numpy.uint8)  # not NumPy's own: that may have been used before
    written = memory[5 << 20 : 6 << 20]
    written[:] = 7
    wanted = memory[(5 << 20) + 100 : (9 << 20) + 100]
    accepted = ctypes.CDLL(None).madvise(
        ctypes.c_void_p(memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE), ctypes.c_size_t(1), ahead.POPULATE
    )
    if accepted != 0:
        pytest.skip("this system is older than Linux 5.14")
    ahead.supply_now([wanted])
    assert resident(wanted) == 1
    assert resident(memory[14 << 20 :]) == 0
    assert (written == 7).all()


def test_no_request_reaches_into_a_second_huge_page(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[int, int]] = []
    monkeypatch.setattr(ahead, "_supply_piece", lambda start, size: requested.append((start, start + size)))
    memory = numpy.frombuffer(mmap.mmap(-1, 16 << 20), numpy.uint8)
    wanted = memory[(3 << 20) + 5000 : (9 << 20) + 100]
    ahead.supply_now([wanted])
    first = wanted.ctypes.data
    assert requested[0][0] == first // mmap.PAGESIZE * mmap.PAGESIZE
    assert requested[-1][1] == first + wanted.nbytes
    assert [stop for _, stop in requested[:-1]] == [start for start, _ in requested[1:]]
    assert all(start // ahead.PIECE == (stop - 1) // ahead.PIECE for start, stop in requested)


def test_it_is_asked_for_ahead_of_use_and_no_more_than_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(blocks, "supply", lambda parts: asked.append([len(part) for part in parts]))
    made = blocks.Blocks({"row": ((256,), torch.float32), "id": ((), torch.int64)}, CPU)
    window = blocks.AHEAD_BYTES // made.slot_bytes
    made.reserve(1)
    made.reserve(900)
    assert not asked  # the block still doubles
    made.reserve(1_100)
    assert asked.pop() == [1_100, 1_100]  # as many as there are
    made.reserve(1_400)
    assert not asked
    made.reserve(1_700)
    assert asked.pop() == [1_200, 1_200]  # up to 3,400; the first 2,200 were asked for before
    made.reserve(50_000)
    assert asked.pop() == [window, window]
    made.reserve(made.block - 10)
    assert asked.pop() == [10, window - 10, 10, window - 10]  # the next block is there before it is needed
    made.reserve(made.block + 10)
    assert not asked


def test_a_block_that_is_not_needed_yet_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(blocks, "supply", lambda parts: asked.append([len(part) for part in parts]))
    made = blocks.Blocks({"row": ((256,), torch.float32)}, CPU)
    made.reserve(made.block - 100)
    with monkeypatch.context() as patch:
        patch.setattr(blocks.Blocks, "_memory", out_of_memory)
        made.reserve(made.block - 10)
        assert made.room == made.block
        assert asked.pop() == [10]  # as far as there is room
        with pytest.raises(MemoryError):
            made.reserve(made.block + 1)
    made.reserve(made.block + 1)
    assert made.room == 2 * made.block


def out_of_memory(made: blocks.Blocks, name: str, size: int) -> torch.Tensor:
    raise MemoryError(f"{size} slots of {name}")


def test_rows_that_come_all_at_once_are_perhaps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(blocks, "supply", lambda parts: asked.append(len(parts)))
    made = blocks.Blocks({"row": ((256,), torch.float32)}, CPU)
    made.reserve(5_000)
    assert not asked
    made.reserve(5_001)
    assert asked == [1]


def test_files_and_other_devices_need_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(blocks, "supply", lambda parts: asked.append(len(parts)))
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64 * 1024)
    kinds = {"row": ((256,), torch.float32), "id": ((), torch.int64)}
    in_file = blocks.Blocks(kinds, CPU, {"row": tmp_path})
    elsewhere = blocks.Blocks(kinds, torch.device("meta"))
    for made in (in_file, elsewhere):
        made.reserve(64)
        made.reserve(70)
    assert asked == [1]  # the ids


def test_an_append_does_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def refuse(thread: Thread) -> None:
        started.append(thread.name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refuse)
    part = numpy.zeros(3)
    ahead.supply([])
    assert not started
    ahead.supply([part])
    assert started == ["adanpc-memory"]
    monkeypatch.setattr(ahead.sys, "platform", "darwin")  # type: ignore[attr-defined]
    ahead._libc.cache_clear()
    ahead.supply([part])
    ahead._libc.cache_clear()
    assert started == ["adanpc-memory"]
