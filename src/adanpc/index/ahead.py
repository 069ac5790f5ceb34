"""Supplies memory before it is needed, so that an append does not have to wait for it.

The operating system supplies memory when it is first touched, 2 MiB at a time with huge pages. That takes a tenth of a
millisecond at best, and up to twenty milliseconds in a virtual machine whose host has to find the memory first. So
another thread requests it, a little ahead of what is written.

Such a host may stall every processor of the virtual machine while it finds memory for one of them, no matter what the
others are doing. So memory is requested one piece at a time, with a rest after each: an append is delayed by at most
one piece.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from threading import Lock, Thread
from typing import Any

from adanpc.index.grid import Array

PIECE = 2 << 20  # bytes of a huge page, the most that is requested at once
POPULATE = 23  # MADV_POPULATE_WRITE supplies pages without changing their contents; available since Linux 5.14


def supply(parts: Sequence[Array]) -> None:
    """Starts a thread that supplies the memory of these arrays, and does not wait for it.

    Nothing depends on the thread: if it cannot run, the system supplies memory when it is written.
    """
    if not parts or _libc() is None:
        return
    thread = Thread(target=supply_now, args=(parts,), name="adanpc-memory", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads are allowed, or the interpreter is shutting down
        return


def supply_now(parts: Sequence[Array]) -> None:
    """Supplies the memory of these arrays, and keeps a reference to them so that the memory is not freed meanwhile."""
    for part in parts:
        start = part.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        stop = part.ctypes.data + part.nbytes
        while start < stop:
            end_of_huge_page = (start // PIECE + 1) * PIECE
            piece_stop = min(stop, end_of_huge_page)
            with _turn(os.getpid()):
                _supply_piece(start, piece_stop - start)
            start = piece_stop


def _supply_piece(start: int, size: int) -> None:
    """Supplies ``size`` bytes of memory, then rests for as long as that took."""
    began = time.thread_time()
    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), POPULATE)  # older systems refuse, without harm
    time.sleep(time.thread_time() - began)


@cache
def _turn(process: int) -> Lock:
    """Returns the lock that a thread of this process holds while it supplies memory and rests.

    A forked process needs its own lock: the thread that holds its parent's lock does not exist there.
    """
    return Lock()


@cache
def _libc() -> Any:
    """Returns the C library, whose functions run without Python's lock; None if it cannot supply memory."""
    if sys.platform != "linux":
        return None
    return ctypes.CDLL(None)
