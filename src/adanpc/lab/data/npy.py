"""Arrays of numbers in ``.npy`` files, read without evaluating any text in them."""

from __future__ import annotations

import math
import os
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adanpc.lab.data.contents import ContentError, blaming, check_size, open_regular, read_at_most

Array = np.ndarray[Any, np.dtype[Any]]

MAGIC = b"\x93NUMPY"
LENGTH_BYTES = {1: 2, 2: 4, 3: 4}  # how many bytes hold the length of the header, by version of the format
LONGEST_HEADER = 10_000  # bytes, as in NumPy
# NumPy writes the header as a Python dict, and evaluates it when reading. It has always written the dict in this form,
# so a pattern is enough. Python 2 put an L after long numbers.
HEADER = re.compile(
    r"\{'descr': '(?P<descr>[^']{1,20})', 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>(?:\d{1,12}L?, ?){0,7}(?:\d{1,12}L?)?)\), \} *\n?"
)
NUMBERS = re.compile(r"[<>|](?:b1|[iu][1248]|f[248])")


@dataclass(frozen=True)
class ArrayLayout:
    """Where the numbers of an array are in its file.

    Args:
        dtype: the type of the numbers.
        shape: the shape of the array, which is stored row by row.
        start: the position of the first number in the file.
        stamp: a text that changes when the file does.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stamp: str

    @property
    def file_size(self) -> int:
        """The length that the file must have, in bytes."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def read_layout(path: Path) -> ArrayLayout:
    """Returns the layout of the array in a file; refuses a file whose length does not match it."""
    with _blaming(path):
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            head = read_at_most(file, len(MAGIC) + 2 + 4 + LONGEST_HEADER)  # 2 bytes of version, up to 4 of length
        header, start = _split_header(head)
        dtype, shape = _parse_header(header)
        layout = ArrayLayout(dtype, shape, start, f"{path.name} {status.st_size} {status.st_mtime_ns}")
        if status.st_size != layout.file_size:
            raise ContentError(f"it has {status.st_size:,} bytes instead of {layout.file_size:,}")
        return layout


def read_array(path: Path) -> Array:
    """Returns the whole array in a file."""
    layout = read_layout(path)
    return _read_numbers(path, layout, 0, layout.shape)


def read_row(path: Path, layout: ArrayLayout, row: int) -> Array:
    """Returns one entry along the first axis; the others are not read."""
    shape = layout.shape[1:]
    return _read_numbers(path, layout, row * math.prod(shape), shape)


def _read_numbers(path: Path, layout: ArrayLayout, first: int, shape: tuple[int, ...]) -> Array:
    """Returns an array of this shape, from the numbers of the file that start at position ``first``."""
    size = math.prod(shape) * layout.dtype.itemsize
    with _blaming(path):
        check_size(size)
        with open_regular(path) as file:
            file_size = os.fstat(file.fileno()).st_size
            file.seek(layout.start + first * layout.dtype.itemsize)
            numbers = read_at_most(file, size)
        if file_size != layout.file_size or len(numbers) != size:
            raise ContentError("it has been cut or replaced since it was listed")
    return np.frombuffer(numbers, layout.dtype).reshape(shape).copy()  # the copy is writable, as torch expects


def _split_header(head: bytes) -> tuple[str, int]:
    """Returns the text of the header, and the position where it ends."""
    if not head.startswith(MAGIC):
        raise ContentError("it does not begin like a .npy file")
    length_start = len(MAGIC) + 2
    version = head[len(MAGIC) : length_start]
    if len(version) != 2 or version[0] not in LENGTH_BYTES:
        raise ContentError("it is in an unknown version of the .npy format")
    text_start = length_start + LENGTH_BYTES[version[0]]
    length = int.from_bytes(head[length_start:text_start], "little")
    text = head[text_start : text_start + length]
    if length > LONGEST_HEADER or len(text) != length:
        raise ContentError(f"its header should have {length:,} bytes")
    return text.decode("latin-1"), text_start + length


def _parse_header(header: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the type and shape of an array that is stored row by row; refuses others."""
    match = HEADER.fullmatch(header)
    if match is None or NUMBERS.fullmatch(match["descr"]) is None:
        raise ContentError("its header does not describe an array of numbers")
    if match["fortran"] == "True":
        raise ContentError("it is in Fortran order, not row by row")
    sides = [side.strip(" L") for side in match["shape"].split(",")]
    shape = tuple(int(side) for side in sides if side)
    if 0 in shape:
        raise ContentError(f"it is empty, {shape}")
    return np.dtype(match["descr"]), shape


def _blaming(path: Path) -> AbstractContextManager[None]:
    """Turns a ``ContentError`` into a ``DataError`` that names the file."""
    return blaming(path, "is not an array", "unpack it again")
