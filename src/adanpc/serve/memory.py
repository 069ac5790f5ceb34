"""Memory: makes the C library of Linux give freed memory back, so that a service does not grow for days."""

from __future__ import annotations

import ctypes
import os
import sys

ARENAS = 2  # heaps; by default glibc keeps up to eight for each core, and each keeps what its threads once needed
LARGE = 2**20  # bytes from which a block gets pages of its own, which go back to the system when it is freed
LEFT_OVER = 2**24  # free bytes that may remain at the end of a heap

# The numbers of the settings in <malloc.h>.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def give_freed_memory_back() -> bool:
    """Limits what glibc keeps of freed memory; returns False where there is no glibc, or MALLOC_… variables are set.

    By default, once a block of some size has been freed, glibc takes all blocks up to that size (32 MiB at most) from
    its heaps, one heap for each thread, and a heap shrinks only at its end. In a service that answers in many threads,
    half of the memory was free blocks after some minutes.
    """
    if sys.platform != "linux":
        return False
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False  # whoever runs the service has decided
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt(M_ARENA_MAX, ARENAS)
    mallopt(M_MMAP_THRESHOLD, LARGE)
    mallopt(M_TRIM_THRESHOLD, LEFT_OVER)
    return True
