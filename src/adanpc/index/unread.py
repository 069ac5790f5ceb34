"""Rows that stay in a file until a search needs them."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy
import torch
from torch import Tensor

from adanpc.index.grid import Array

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex


class StoredRows(Protocol):
    """Encoded rows somewhere else, numbered from 0 on. Whoever reads them checks them, every time."""

    def read(self, places: Array) -> Mapping[str, Tensor]:
        """The rows at these places (n,), as ``Index.put`` takes them; an error if they are not what they were."""


class Unread:
    """Which slots of an index still wait for their rows, shared by all versions of the index.

    A row is read once, when it is first needed. Two threads that need it at the same time both read it, and write the
    same bytes to the same place.

    Args:
        stored: the rows.
        slots: (n,) of each of them.
    """

    def __init__(self, stored: StoredRows, slots: Array) -> None:
        self._stored = stored
        self._places: Array = numpy.zeros(int(slots.max()) + 1, numpy.int64)
        self._places[slots] = numpy.arange(len(slots))
        self._waiting: Array = numpy.zeros(len(self._places), bool)
        self._waiting[slots] = True

    @property
    def count(self) -> int:
        """How many slots still wait."""
        return int(numpy.count_nonzero(self._waiting))

    def bring(self, index: ExactIndex, slots: Array) -> None:
        """Has the rows of all of these slots (n,) in memory."""
        slots = slots[slots < len(self._waiting)]
        wanted = numpy.unique(slots[self._waiting[slots]])
        if not len(wanted):
            return
        index.fill(torch.from_numpy(wanted), self._stored.read(self._places[wanted]))
        self._waiting[wanted] = False  # last: another thread may look meanwhile

    def forget(self, slots: Array) -> None:
        """These slots (n,) get other rows, and wait no longer."""
        self._waiting[slots[slots < len(self._waiting)]] = False


def scattered_memory(size: int) -> Array:
    """So many untouched bytes (size,) uint8 in small pages, so that writing here and there takes little memory."""
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # no file is involved, so nothing but memory can be lacking
        raise MemoryError(f"there is no memory for {size} bytes") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux alone has pages that are huge
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return numpy.frombuffer(mapped, numpy.uint8)
