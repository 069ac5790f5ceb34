"""Memory: makes the C library of Linux give freed memory back, so that a service does not grow for days."""

from __future__ import annotations

import ctypes
import os
import sys

ARENAS = 2  # heaps; by default glibc keeps up to eight for each core, and each keeps what its threads once needed
LARGE = 2**20  # bytes from which a block gets pages of its own, which go back to the system when it is freed
LARGEST = 2**25  # the most bytes that a block of a heap may have; glibc accepts no more
FOR_EACH_ROW = 512  # bytes of a block that a search needs for each row of a bank: 128 queries, four bytes each
LEFT_OVER = 2**24  # free bytes that may remain at the end of a heap
LARGE_BLOCKS_LEFT_OVER = 4  # or as many of the blocks that a search needs

# The numbers of the settings in <malloc.h>.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def give_freed_memory_back(rows: int = 0) -> bool:
    """Limits what glibc keeps of freed memory; returns False where there is no glibc, or MALLOC_… variables are set.

    By default, once a block of some size has been freed, glibc takes all blocks up to that size (32 MiB at most) from
    its heaps, one heap for each thread, and a heap shrinks only at its end. In a service that answers in many threads,
    half of the memory was free blocks after some minutes.

    Args:
        rows: of the bank. The blocks that its searches need stay in the heaps: to have the system supply their pages
            anew for every search takes as long as the search.
    """
    if sys.platform != "linux":
        return False
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False  # whoever runs the service has decided
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt(M_ARENA_MAX, ARENAS)
    large = min(max(LARGE, rows * FOR_EACH_ROW), LARGEST)
    mallopt(M_MMAP_THRESHOLD, large)
    mallopt(M_TRIM_THRESHOLD, max(LEFT_OVER, LARGE_BLOCKS_LEFT_OVER * large))
    return True
