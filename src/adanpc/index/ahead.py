"""Memory that is supplied before it is needed, so that an append need not wait for it.

The system supplies memory when it is first touched, 2 MiB at a time where there are huge pages. That takes a tenth of
a millisecond at best, and up to twenty in a virtual machine whose host has to find the memory first. So another thread
asks for it, a little ahead of what is written.

Such a host may hold up every processor of the virtual machine while it finds memory for one of them, whatever the
others are doing. So pieces are requested one at a time, with a rest after each: an append is held up by one of them
at most.
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

PIECE = 2 << 20  # bytes of a huge page: no more are requested at once
POPULATE = 23  # MADV_POPULATE_WRITE supplies pages and leaves what they hold as it is; Linux 5.14 and newer have it


def supply(parts: Sequence[Array]) -> None:
    """Has the memory of these arrays supplied by another thread, and does not wait for it.

    Nothing depends on it: where it cannot be done, memory is supplied as it is written to.
    """
    if not parts or _libc() is None:
        return
    thread = Thread(target=supply_now, args=(parts,), name="adanpc-memory", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads are allowed, or the interpreter is shutting down
        return


def supply_now(parts: Sequence[Array]) -> None:
    """Has the memory of these arrays supplied, and holds them until it is, so that nothing else gets it meanwhile."""
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
    """Has so many bytes supplied, and rests for as long as that took."""
    began = time.thread_time()
    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), POPULATE)  # an older system refuses
    time.sleep(time.thread_time() - began)


@cache
def _turn(process: int) -> Lock:
    """Held by the thread of this process that has memory supplied, and while it rests.

    A forked process has its own: the thread that holds the other one does not exist in it.
    """
    return Lock()


@cache
def _libc() -> Any:
    """The C library, called without Python's lock; None where it cannot supply memory."""
    if sys.platform != "linux":
        return None
    return ctypes.CDLL(None)
