"""Reading a safetensors file into private memory, after checking every claim of its header.

The safetensors library memory-maps a file. If somebody truncates the file afterward, the process dies of SIGBUS,
whatever the library checked before. So the file is opened once here, its header is checked against its size, and its
tensors are copied into memory, where later writes to the file cannot affect them. For writing, the library is used.
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

LENGTH_BYTES = 8  # the size of the number in front of the header that gives its length
MOST_HEADER = 100_000_000  # bytes; the safetensors library does not read longer headers either
MOST_DIMENSIONS = 2  # no column has more, and a forged shape must not cost a million multiplications
MOST_BYTES = 2**63 - 1  # the largest possible file
PIECE = 64 << 20  # bytes of a tensor that a thread reads or hashes at a time
THREADS = 2  # more would only wait for memory
FIELDS = {"dtype", "shape", "data_offsets"}


class Entry(NamedTuple):
    """What a header says about a tensor."""

    dtype: str
    shape: list[int]
    start: int  # offset in the file
    end: int


class SafetensorsFile(NamedTuple):
    """An open file whose header has been checked."""

    file: BinaryIO
    metadata: dict[str, str]
    entries: dict[str, Entry]

    def tensor(self, name: str, spare: int = 0) -> Tensor:
        """Returns a tensor of the file in memory of its own, followed by ``spare`` untouched bytes."""
        entry = self.entries[name]
        size = entry.end - entry.start
        try:
            memory = main_memory(size + spare)
        except MemoryError:  # a sparse file may claim any size
            remedy = "load it on a machine with more memory"
            raise ContentsError(
                f"there is no memory for the {size} bytes of its column {brief(name)}", remedy
            ) from None
        self._read(memory[:size], entry.start)
        return torch.from_numpy(memory)[:size].view(DTYPES[entry.dtype]).view(entry.shape)

    def _read(self, room: Array, start: int) -> None:
        """Fills bytes (n,) from an offset in the file; two threads share a long read.

        Most of the time goes into providing the memory, which each thread does for the part that it writes.
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
    """Opens a file for the block; raises unless it is a regular file whose header describes exactly what follows it."""
    advice = "give the path of a file that adanpc saved"
    try:
        # Opening a pipe would block until somebody writes to it. So open without blocking, and check what it is first.
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
    """Returns the header of a file of this size, and the offset at which the tensors begin."""
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
    """Returns a JSON object; raises if a name occurs twice, because readers would differ on what that means."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ContentsError("its header names something twice")
    return found


def _entries(header: dict[str, Any], start: int, size: int) -> dict[str, Entry]:
    """Returns the tensors of a header, which must follow each other without gaps and fill the file."""
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
    """Returns what a header says about one tensor; raises a ContentsError if it cannot be true."""
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
    """Returns whether this is a list of whole numbers that are valid as counts of bytes."""
    if not isinstance(values, list):
        return False
    return all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_BYTES for value in values)
