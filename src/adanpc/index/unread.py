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
    """Encoded rows that are stored elsewhere, numbered from 0. Every read checks what it returns."""

    @property
    def nbytes(self) -> int:
        """Bytes of main memory that are needed to read and check rows."""

    def read(self, places: Array) -> Mapping[str, Tensor]:
        """Returns the rows at these places (n,), as ``Index.put`` takes them; raises an error if they have changed."""


class Unread:
    """The slots of an index whose rows have not been read yet, shared by all versions of the index.

    A row is read once, when it is first needed. If two threads need it at the same time, both read it and write the
    same bytes to the same place.

    Args:
        stored: the rows.
        slots: (n,) the slot of each row.
    """

    def __init__(self, stored: StoredRows, slots: Array) -> None:
        self._stored = stored
        self._places: Array = numpy.zeros(int(slots.max()) + 1, numpy.int64)
        self._places[slots] = numpy.arange(len(slots))
        self._waiting: Array = numpy.zeros(len(self._places), bool)
        self._waiting[slots] = True

    @property
    def count(self) -> int:
        """How many rows have not been read yet."""
        return int(numpy.count_nonzero(self._waiting))

    @property
    def nbytes(self) -> int:
        """Bytes of what is known of the rows that are stored elsewhere."""
        return self._places.nbytes + self._waiting.nbytes + self._stored.nbytes

    def bring(self, index: ExactIndex, slots: Array) -> None:
        """Reads the rows of these slots (n,) into the index, unless they have been read before."""
        slots = slots[slots < len(self._waiting)]
        wanted = numpy.unique(slots[self._waiting[slots]])
        if not len(wanted):
            return
        index.fill(torch.from_numpy(wanted), self._stored.read(self._places[wanted]))
        self._waiting[wanted] = False  # last, because another thread may check it meanwhile

    def forget(self, slots: Array) -> None:
        """Stops waiting for the rows of these slots (n,), which are about to be overwritten."""
        self._waiting[slots[slots < len(self._waiting)]] = False


def scattered_memory(size: int) -> Array:
    """Returns untouched bytes (size,) uint8 in small pages, so that scattered writes take little memory."""
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # no file is involved, so only memory can be lacking
        raise MemoryError(f"there is no memory for {size} bytes") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # only Linux has it
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return numpy.frombuffer(mapped, numpy.uint8)
