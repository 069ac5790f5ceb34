"""Blocks: columns that grow without copying once they are large."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy
import torch
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.index.ahead import supply
from adanpc.index.counting import ceil_div, rounded_up
from adanpc.index.grid import Array, Columns, array_if_on_cpu, to_main_memory

TILE = 64  # slots are allocated in whole tiles, because a scan reads the rows of a tile together
BLOCK_BYTES = 128 << 20  # size of a full block, large enough that there are only a few blocks to scan and read
SMALL_BYTES = 1 << 20  # up to this size the first block doubles: copying this much takes less than a millisecond
AHEAD_BYTES = 16 << 20  # bytes of slots not yet in use for which memory is supplied
ONE_BY_ONE = 512  # up to this many slots in several blocks are read faster one by one than block by block
PIECE = 1 << 14  # rows written at once; a limit, because writing copies them
LINE = 64  # bytes of a cache line: scanning rows that start on one takes an eighth less time

Kind = tuple[tuple[int, ...], torch.dtype]  # the shape and type of a slot's value in a column


class Blocks:
    """Columns of numbers in slots 0, 1, …, each column (slots, …).

    Memory is allocated but not touched, so room for later rows costs nothing until it is written. The first block
    doubles while it is small. After that, growing adds a block and copies nothing, so an append never waits for all
    rows to be copied. Nor does it wait for memory, which is supplied a little ahead of what is written.

    Code that holds a list of blocks can keep reading slots that are already written while other slots are written.

    Args:
        kinds: the shape and type of each column, by name.
        device: where the columns are stored.
        folders: for columns that are stored in files instead, the folder of the file, by column name. A file has no
            name and disappears with the process. What is read from it stays in memory until the memory is needed
            elsewhere.
        block: slots in a full block; by default as many as fit into 128 MiB.
    """

    def __init__(
        self,
        kinds: Mapping[str, Kind],
        device: torch.device,
        folders: Mapping[str, str | os.PathLike[str]] | None = None,
        block: int | None = None,
    ) -> None:
        self.kinds = dict(kinds)
        self.device = device
        self.folders = {name: Path(folder) for name, folder in (folders or {}).items()}
        self._process = os.getpid()
        self.slot_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in kinds.values())
        tiles = max(1, BLOCK_BYTES // (self.slot_bytes * TILE))
        self.block = block or tiles * TILE  # slots in a full block
        self.columns: dict[str, list[Tensor]] = {name: [] for name in kinds}
        self._numbers = [name for name, (shape, _) in kinds.items() if prod(shape) == 1]  # one number in each slot
        self._supplied = 0  # slots whose memory was requested ahead of use
        self._supply_when_over = 0  # memory for more is requested once more slots than this are in use; 0: at once
        self._known_arrays: tuple[dict[str, list[Tensor]], dict[str, list[Any]]] = ({}, {})  # columns and their arrays

    @property
    def room(self) -> int:
        """How many slots fit into the memory allocated so far."""
        return sum(part.shape[0] for part in next(iter(self.columns.values())))

    def reserve(self, slots: int) -> None:
        """Makes room for at least this many slots, the first of which are in use."""
        if slots > self.room:
            self._grow(slots)
        if slots > self._supply_when_over:
            self._supply(slots)

    def _grow(self, slots: int) -> None:
        """Adds blocks until there is room for this many slots."""
        self._supply_when_over = 0
        if not self.room:
            self._supply_when_over = slots  # rows added all at once may be all there are: wait until there are more
        while self.room < slots:
            # A single assignment: if memory runs out or Ctrl-C comes before it, the old columns are still intact.
            self.columns = self._extended(slots)

    def _supply(self, slots: int) -> None:
        """Requests memory ahead of this many slots, for at most twice as many."""
        ahead_of_use = min(slots, AHEAD_BYTES // self.slot_bytes)
        start = max(slots, self._supplied)
        stop = slots + ahead_of_use
        self._supply_when_over = slots + ahead_of_use // 2
        if self.device.type != "cpu" or self.room < self.block:
            return  # a block that still doubles is too small to matter
        if stop > self.room and not self.folders:
            self._add_block_early(stop)
        self._supplied = min(stop, self.room)
        parts = []
        for name, blocks in self.arrays().items():
            if name not in self.folders:
                parts += self._between(blocks, start, stop)
        supply(parts)

    def bytes_ahead(self, slots: int) -> int:
        """Returns the most bytes of main memory that are requested ahead when this many slots are in use."""
        if self.device.type != "cpu" or slots * self.slot_bytes <= SMALL_BYTES:
            return 0
        in_memory = 0
        for name, (shape, dtype) in self.kinds.items():
            if name not in self.folders:
                in_memory += prod(shape) * dtype.itemsize
        return min(slots, AHEAD_BYTES // self.slot_bytes) * in_memory

    def _add_block_early(self, slots: int) -> None:
        """Adds the block that this many slots will need, if there is memory for it."""
        try:
            self.columns = self._extended(slots)
        except MemoryError:
            return  # nothing needs the block yet: an append that does need it will raise the error

    def _between(self, blocks: list[Array], start: int, stop: int) -> list[Array]:
        """Returns the parts of a column's blocks from slot ``start`` up to slot ``stop``."""
        parts = []
        for number, block in enumerate(blocks):
            first = number * self.block
            part = block[max(0, start - first) : max(0, stop - first)]
            if part.size:
                parts.append(part)
        return parts

    def _extended(self, slots: int) -> dict[str, list[Tensor]]:
        """Returns the columns with a larger first block or with one more block."""
        room = self.room
        extended = {}
        for name, parts in self.columns.items():
            if room < self.block:
                size = self._first_block(slots)
                larger = self._memory(name, size)
                if parts:
                    array_if_on_cpu(larger)[:room] = array_if_on_cpu(parts[0])
                extended[name] = [larger]
            else:
                extended[name] = [*parts, self._memory(name, self.block)]
        return extended

    def _first_block(self, slots: int) -> int:
        """Returns the size of a first block for this many slots: at least twice the present size, or a full block."""
        wanted = max(2 * self.room, rounded_up(slots, TILE))
        if wanted * self.slot_bytes > SMALL_BYTES:
            return self.block
        return min(wanted, self.block)

    def _memory(self, name: str, size: int) -> Tensor:
        """Returns untouched memory (size, …); main memory comes from NumPy, in huge pages, which are faster to scan."""
        shape, dtype = self.kinds[name]
        if self.device.type != "cpu":
            return torch.empty(size, *shape, dtype=dtype, device=self.device)
        wanted = size * prod(shape) * dtype.itemsize
        if name in self.folders:
            memory = _file_memory(self.folders[name], wanted)
            return torch.from_numpy(memory).view(dtype).view(size, *shape)
        return torch.from_numpy(main_memory(wanted)).view(dtype).view(size, *shape)

    def adopt(self, columns: Columns) -> None:
        """Uses the memory of columns (n, …) in main memory for slots 0 … n - 1, none of which may be in use.

        Whole blocks are used without a copy. The last block needs room for more rows: it is copied unless the memory
        of the column extends far enough beyond it.
        """
        count = len(next(iter(columns.values())))
        self.columns = {name: self._adopted(name, columns[name], count) for name in self.kinds}
        self._supply_when_over = count  # as for other rows that are added all at once

    def _adopted(self, name: str, column: Tensor, count: int) -> list[Tensor]:
        """Returns a column (count, …) as whole blocks."""
        whole = count // self.block
        parts = [column[number * self.block :][: self.block] for number in range(whole)]
        rest = column[whole * self.block :]
        if len(rest):
            last = _extended_in_place(rest, self.block)
            if last is None:
                last = self._memory(name, self.block)
                array_if_on_cpu(last)[: len(rest)] = rest.numpy()
            parts.append(last)
        return parts

    def write(self, slots: Tensor, values: Mapping[str, Any]) -> None:
        """Writes values, each a tensor or an array (n, …), into these slots (n,), for which there must be room."""
        if self.folders and os.getpid() != self._process:
            raise AdaNPCError(
                "a bank with rows in a file cannot be changed in a forked process, which shares the file: "
                "build or load it there"
            )
        count = slots.shape[0]
        if count == 1:
            self._write_one(int(slots.item()), values)
            return
        if count and bool((slots.diff() == 1).all()):
            self._write_run(int(slots[0]), count, values)
            return
        for start in range(0, len(slots), PIECE):
            piece = slice(start, start + PIECE)
            for block, positions, offsets in self._locate(slots[piece]):
                written = array_if_on_cpu(offsets)
                for name, targets in self.arrays().items():
                    targets[block][written] = array_if_on_cpu(values[name])[piece][positions]

    def _write_one(self, slot: int, values: Mapping[str, Any]) -> None:
        """``write`` for a single slot, without arrays of positions."""
        block, offset = divmod(slot, self.block)
        for name, targets in self.arrays().items():
            if name in self._numbers:
                targets[block][offset] = values[name].item()  # in a quarter of the time that an array takes
            else:
                targets[block][offset] = array_if_on_cpu(values[name])[0]

    def _write_run(self, first: int, count: int, values: Mapping[str, Any]) -> None:
        """``write`` for consecutive slots, such as those of an append, without intermediate copies."""
        stop = first + count
        for block in range(first // self.block, ceil_div(stop, self.block)):
            offset = block * self.block
            start_here = max(first, offset)
            stop_here = min(stop, offset + self.block)
            for name, targets in self.arrays().items():
                there = slice(start_here - offset, stop_here - offset)
                targets[block][there] = array_if_on_cpu(values[name])[start_here - first : stop_here - first]

    def arrays(self) -> dict[str, list[Any]]:
        """Returns the blocks of each column as NumPy arrays, or as tensors if they are on another device."""
        columns = self.columns
        known_columns, arrays = self._known_arrays
        if known_columns is not columns:
            arrays = {name: [array_if_on_cpu(part) for part in parts] for name, parts in columns.items()}
            self._known_arrays = (columns, arrays)  # a single assignment, because other threads may read the pair
        return arrays

    def read(self, slots: Array, *names: str) -> dict[str, Array]:
        """Returns the values of the named columns in these slots (n,) in main memory: ``take`` for a few slots."""
        arrays = self.arrays()
        if len(arrays[names[0]]) == 1:
            return {name: to_main_memory(arrays[name][0][slots]) for name in names}
        if 0 < len(slots) <= ONE_BY_ONE and self.device.type == "cpu":
            places = [divmod(slot, self.block) for slot in slots.tolist()]
            return {name: numpy.array([arrays[name][block][offset] for block, offset in places]) for name in names}
        columns = self.take(torch.from_numpy(slots).to(self.device), *names)
        return {name: to_main_memory(column) for name, column in columns.items()}

    def take(self, slots: Tensor, *names: str) -> Columns:
        """Returns the values of the named columns, or of all, in slots of any shape; each column is (*shape, …)."""
        wanted = names or tuple(self.kinds)
        arrays = self.arrays()
        if len(arrays[wanted[0]]) == 1:
            places = array_if_on_cpu(slots)
            return {name: torch.as_tensor(arrays[name][0][places]) for name in wanted}
        taken = {}
        for name in wanted:
            shape, dtype = self.kinds[name]
            taken[name] = torch.empty(*slots.shape, *shape, dtype=dtype, device=self.device)
        if not slots.numel():
            return taken  # there may be no block yet
        for block, positions, offsets in self._locate(slots):
            for name in wanted:
                values = arrays[name][block][array_if_on_cpu(offsets)]
                taken[name][positions] = torch.as_tensor(values)
        return taken

    def used(self, name: str, slots: int) -> list[Tensor]:
        """Returns the blocks of a column, cut off after the first ``slots`` slots."""
        parts = []
        for number, part in enumerate(self.columns[name]):
            left = slots - number * self.block
            if left <= 0:
                break
            parts.append(part[:left])
        return parts

    def _locate(self, slots: Tensor) -> Iterator[tuple[int, Tensor | slice, Tensor]]:
        """Yields for each block with some of ``slots`` its number, which slots it holds, and their offsets (n,)."""
        if self.room <= self.block:
            yield 0, slice(None), slots
            return
        block = slots // self.block
        offset = slots % self.block
        for number in block.unique().tolist():
            positions = block == number
            yield number, positions, offset[positions]


def _extended_in_place(column: Tensor, slots: int) -> Tensor | None:
    """Returns a column (n, …) extended to this many slots into the memory behind it; None if that is too small."""
    wanted = (column.storage_offset() + slots * column.stride(0)) * column.itemsize
    if column.untyped_storage().nbytes() < wanted:
        return None
    return column.as_strided((slots, *column.shape[1:]), column.stride())


def main_memory(size: int) -> Array:
    """Returns untouched bytes (size,) uint8 that start on a cache line; in huge pages if there are many."""
    memory = numpy.empty(size + LINE, numpy.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size]


def _file_memory(folder: Path, size: int) -> Array:
    """Returns bytes (size,) uint8 of a new file without a name, which is read page by page."""
    try:
        with TemporaryFile(dir=folder, prefix="adanpc-") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here rather than a signal later
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as error:
        reason = error.strerror or error
        raise AdaNPCError(f"{size} bytes of rows cannot be kept in {folder}: {reason}; give another folder") from error
    mapped.madvise(mmap.MADV_RANDOM)  # a search reads single rows, so reading ahead would be wasted
    return numpy.frombuffer(mapped, numpy.uint8)
