"""Memory that is supplied before it is needed, so that an append need not wait for it.

The system supplies memory when it is first touched, 2 MiB at a time where there are huge pages. That takes half a
millisecond at best, and up to twenty in a virtual machine whose host has to find the memory first. So another thread
asks for it, a little ahead of what is written.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from functools import cache
from threading import Thread
from typing import Any

from adanpc.index.grid import Array

PIECE = 2 << 20  # bytes requested at once: the size of a huge page
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
        # Piece by piece: while the system works on one, no other thread can map memory.
        for piece in range(start, stop, PIECE):
            size = min(PIECE, stop - piece)
            _libc().madvise(ctypes.c_void_p(piece), ctypes.c_size_t(size), POPULATE)  # an older system refuses


@cache
def _libc() -> Any:
    """The C library, called without Python's lock; None where it cannot supply memory."""
    if sys.platform != "linux":
        return None
    return ctypes.CDLL(None)
