"""Rows of a bank file that are read when they are needed, and checked whenever they are read."""

from __future__ import annotations

import hashlib
import os
import weakref
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from adanpc.core.codec import DTYPES
from adanpc.index.grid import Array
from adanpc.store.check import BankFileError
from adanpc.store.safetensors_file import Entry

SEAL = 16  # bytes of the seal of a row


def seals_of(rows: Tensor) -> Tensor:
    """A seal (n, SEAL) uint8 for each row (n, D): the first bytes of its SHA-256."""
    array: Any = rows.numpy()
    whole = memoryview(array).cast("B")
    size = rows.shape[1] * rows.element_size()
    seals = b"".join(
        hashlib.sha256(whole[start : start + size]).digest()[:SEAL] for start in range(0, len(whole), size)
    )
    return torch.frombuffer(bytearray(seals), dtype=torch.uint8).view(len(rows), SEAL)


class RowsInFile:
    """The rows of a file that stays open, and that others may replace meanwhile but should not overwrite.

    Nothing is mapped: a file that is cut or overwritten makes an error here, not a signal or another answer.

    Args:
        path: of the file, for messages.
        file: its descriptor, of which a copy is kept.
        entry: where the rows are in it.
        seals: (n, SEAL) of the rows, which can be trusted.
    """

    def __init__(self, path: Path, file: int, entry: Entry, seals: Tensor) -> None:
        self._path = path
        self._file = os.dup(file)
        self._start = entry.start
        self._dtype = DTYPES[entry.dtype]
        self._row_bytes = entry.shape[1] * self._dtype.itemsize
        self._seals = seals.numpy()
        weakref.finalize(self, os.close, self._file)

    def read(self, places: Array) -> dict[str, Tensor]:
        """The rows at these places (n,) of the column; a BankFileError if one of them is not what was saved."""
        rows: Any = numpy.empty((len(places), self._row_bytes), numpy.uint8)
        for row, place in zip(rows, places.tolist(), strict=True):
            try:
                read = os.preadv(self._file, [row], self._start + place * self._row_bytes)
            except OSError as error:
                reason = error.strerror or error
                raise BankFileError(f"{self._path} cannot be read any more: {reason}; check the disk") from error
            if read != self._row_bytes or hashlib.sha256(row).digest()[:SEAL] != self._seals[place].tobytes():
                raise BankFileError(
                    f"{self._path} was damaged or overwritten: row {place} of it does not have its seal; "
                    "load another copy, or build the bank again"
                )
        return {"row": torch.from_numpy(rows).view(self._dtype)}
