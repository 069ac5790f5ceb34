"""Reading a safetensors file into memory of its own, with every claim of its header checked first.

The safetensors library maps a file into memory. If somebody then cuts the file, the process dies of SIGBUS, whatever
the library checked before. So the file is opened once, its header is checked against its size, and its tensors are
read: what a later writer does to the file touches nobody. Files are written by the library itself.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from reprlib import repr as brief
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from adanpc.core.codec import DTYPES
from adanpc.index.blocks import main_memory
from adanpc.index.grid import Array
from adanpc.store.check import ContentsError

LENGTH_BYTES = 8  # of the number before the header that says how long it is
MOST_HEADER = 100_000_000  # bytes; the safetensors library reads no longer one
MOST_DIMENSIONS = 2  # no column has more, so nobody has to multiply a million sizes
MOST_BYTES = 2**63 - 1  # what a file can have at all
PIECE = 64 << 20  # bytes of a tensor that one thread reads, or hashes
THREADS = 2  # that share them; more would wait for memory
FIELDS = {"dtype", "shape", "data_offsets"}


class Entry(NamedTuple):
    """What a header says of a tensor."""

    dtype: str
    shape: list[int]
    start: int  # in the file
    end: int


class SafetensorsFile(NamedTuple):
    """An open file whose header has been checked."""

    file: BinaryIO
    metadata: dict[str, str]
    entries: dict[str, Entry]

    def tensor(self, name: str, spare: int = 0) -> Tensor:
        """A tensor of the file, in memory of its own, which goes on behind it for so many untouched bytes."""
        entry = self.entries[name]
        size = entry.end - entry.start
        try:
            memory = main_memory(size + spare)
        except MemoryError:  # a file of holes may be of any size
            remedy = "load it on a machine with more memory"
            raise ContentsError(
                f"there is no memory for the {size} bytes of its column {brief(name)}", remedy
            ) from None
        self._read(memory[:size], entry.start)
        return torch.from_numpy(memory)[:size].view(DTYPES[entry.dtype]).view(entry.shape)

    def _read(self, room: Array, start: int) -> None:
        """Fills bytes (n,) with those from a place of the file on; two threads share what is long.

        Most of the time goes into supplying the memory, which each thread does for what it writes.
        """
        number = self.file.fileno()

        def read_piece(begin: int) -> bool:
            piece: Any = room[begin : begin + PIECE]
            return os.preadv(number, [piece], start + begin) == len(piece)

        with ThreadPoolExecutor(THREADS) as pool:
            if not all(pool.map(read_piece, range(0, len(room), PIECE))):
                raise _cut_short()


@contextmanager
def opened(path: Path) -> Iterator[SafetensorsFile]:
    """The file at a path, if it is a regular file and its header describes exactly the bytes that follow it."""
    advice = "give the path of a file that adanpc saved"
    try:
        # Opening a pipe would wait for its writer, so a file is opened without waiting, and looked at before it is
        # read.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError):
        raise ContentsError("there is no such file", advice) from None
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise ContentsError("it is a folder or a device", advice)
        with open(number, "rb", closefd=False) as file:
            header, start = _header(file, status.st_size)
            metadata = header.pop("__metadata__", {})
            if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
                raise ContentsError("its metadata must be texts")
            yield SafetensorsFile(file, metadata, _entries(header, start, status.st_size))
    finally:
        os.close(number)


def _header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header of a file of this size, and where the tensors begin."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    start = LENGTH_BYTES + length
    if size < LENGTH_BYTES or length > MOST_HEADER or start > size:
        raise ContentsError(f"it is not a safetensors file: {size} bytes cannot hold a header of {length} bytes")
    text = file.read(length)
    if len(text) != length:
        raise _cut_short()
    if not text.startswith(b"{"):
        raise ContentsError("it is not a safetensors file: its header is not a JSON object")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except ContentsError:
        raise
    except (ValueError, RecursionError) as error:
        raise ContentsError(f"its header cannot be read: {error}") from None
    return header, start


def _cut_short() -> ContentsError:
    return ContentsError("it became shorter while it was read", "load it again when nothing is writing to it")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, refused if it names anything twice: readers would differ on what it means."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ContentsError("its header names something twice")
    return found


def _entries(header: dict[str, Any], start: int, size: int) -> dict[str, Entry]:
    """The tensors of a header, which must lie one behind the other and fill the file."""
    entries = {name: _entry(name, described, start) for name, described in header.items()}
    end = start
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].end)):
        if entry.start != end:
            raise ContentsError(f"its column {brief(name)} begins at byte {entry.start}, but {end} is the next one")
        end = entry.end
    if end != size:
        raise ContentsError(f"its header describes {end} bytes, but it has {size}")
    return entries


def _entry(name: str, described: Any, start: int) -> Entry:
    """What a header says of one tensor, if it can be true."""
    column = f"its column {brief(name)}"
    if not isinstance(described, dict) or described.keys() != FIELDS:
        raise ContentsError(f"{column} must be described by its type, shape and offsets, got {brief(described)}")
    dtype = described["dtype"]
    shape = described["shape"]
    offsets = described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ContentsError(f"{column} has an unknown type, {brief(dtype)}")
    if not _whole_numbers(shape) or len(shape) > MOST_DIMENSIONS:
        raise ContentsError(f"{column} has no proper shape, {brief(shape)}")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise ContentsError(f"{column} has no proper offsets, {brief(offsets)}")
    begin, end = offsets
    width = DTYPES[dtype].itemsize
    if end - begin != prod(shape) * width:
        raise ContentsError(f"{column} of type {dtype} and shape {shape} cannot have {end - begin} bytes")
    if (start + begin) % width:
        raise ContentsError(f"{column} does not start at a multiple of its {width} bytes")
    return Entry(dtype, shape, start + begin, start + end)


def _whole_numbers(values: Any) -> bool:
    """Whether this is a list of whole numbers that bytes can be counted with."""
    if not isinstance(values, list):
        return False
    return all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_BYTES for value in values)
