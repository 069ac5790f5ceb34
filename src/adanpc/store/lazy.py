"""Lazy reading of the rows of a bank file: each is read when it is needed, and checked every time."""

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

SEAL = 16  # bytes in the seal of a row


def seals_of(rows: Tensor) -> Tensor:
    """Returns a seal for each row (n, D): the first bytes of its SHA-256, as (n, SEAL) uint8."""
    array: Any = rows.numpy()
    whole = memoryview(array).cast("B")
    size = rows.shape[1] * rows.element_size()
    seals = b"".join(
        hashlib.sha256(whole[start : start + size]).digest()[:SEAL] for start in range(0, len(whole), size)
    )
    return torch.frombuffer(bytearray(seals), dtype=torch.uint8).view(len(rows), SEAL)


class RowsInFile:
    """The rows of a file that is kept open. Others may replace the file in the meantime but should not overwrite it.

    The file is not memory-mapped, so truncating or overwriting it causes an error here, not a signal or a wrong answer.

    Args:
        path: the path of the file, for messages.
        file: its descriptor, which is duplicated.
        entry: where the rows are in the file.
        seals: (n, SEAL) trusted seals of the rows.
    """

    def __init__(self, path: Path, file: int, entry: Entry, seals: Tensor) -> None:
        self._path = path
        self._file = os.dup(file)
        self._start = entry.start
        self._dtype = DTYPES[entry.dtype]
        self._row_bytes = entry.shape[1] * self._dtype.itemsize
        self._seals = seals.numpy()
        weakref.finalize(self, os.close, self._file)

    @property
    def nbytes(self) -> int:
        """Bytes of the seals."""
        return int(self._seals.nbytes)

    def read(self, places: Array) -> dict[str, Tensor]:
        """Returns the rows at these places (n,) of the column; raises a BankFileError if one is not what was saved."""
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
