"""Blocks: growing columns in memory that is not copied once it is large."""

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
from adanpc.index.grid import Array, Columns, array_if_on_cpu, to_main_memory

TILE = 64  # slots come in whole tiles, which is what a scan reads together
BLOCK_BYTES = 128 << 20  # of a full block: few enough of them to scan and read well
SMALL_BYTES = 1 << 20  # of the first block while it still doubles: copying this much takes less than a millisecond
AHEAD_BYTES = 16 << 20  # of slots that are not in use yet, for which memory is supplied
ONE_BY_ONE = 512  # slots in several blocks that are read faster one by one than block by block
PIECE = 1 << 14  # rows written at once, since writing copies them
LINE = 64  # bytes of a line of the cache: a scan of rows that begin with one takes an eighth less time

Kind = tuple[tuple[int, ...], torch.dtype]  # the shape and type of what a slot holds in a column


class Blocks:
    """Columns of numbers in slots 0, 1, …, each column (slots, …).

    Memory is taken from the system untouched, so room for later rows costs nothing until it is written. The first
    block doubles while it is small; after that, growing adds a block and copies nothing, so no append has to wait for
    a copy of all rows. Nor does it wait for memory, which is supplied a little ahead of what is written.

    Whoever holds a list of blocks may go on reading the slots that were written before, while others are written.

    Args:
        kinds: of the columns, by name.
        device: where they are kept.
        folders: where columns are kept that shall be in files instead, by name. A file has no name and is gone with
            the process. What is read of it stays in memory as long as nothing else needs that.
        block: slots of a full block; by default as many as make 128 MiB.
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
        self.block = block or tiles * TILE  # slots of all but the last
        self.columns: dict[str, list[Tensor]] = {name: [] for name in kinds}
        self._supplied = 0  # slots whose memory was requested ahead of use
        self._supply_beyond = 0  # once more slots than this are in use, memory for more is requested
        self._known_arrays: tuple[dict[str, list[Tensor]], dict[str, list[Any]]] = ({}, {})  # and what they are made of

    @property
    def room(self) -> int:
        """How many slots there is memory for."""
        return sum(part.shape[0] for part in next(iter(self.columns.values())))

    def reserve(self, slots: int) -> None:
        """Makes room for at least this many slots, the first of which are in use."""
        if slots > self.room:
            self._grow(slots)
        if slots > self._supply_beyond:
            self._supply(slots)

    def _grow(self, slots: int) -> None:
        """Adds blocks until there is room for this many slots."""
        self._supply_beyond = 0
        if not self.room:
            self._supply_beyond = slots  # rows that come all at once are perhaps all: wait until there are more
        while self.room < slots:
            self.columns = self._extended(slots)  # one assignment: memory may run out, or Ctrl-C come, before it

    def _supply(self, slots: int) -> None:
        """Has memory supplied ahead of this many slots, for twice as many at most."""
        ahead_of_use = min(slots, AHEAD_BYTES // self.slot_bytes)
        start = max(slots, self._supplied)
        stop = slots + ahead_of_use
        self._supply_beyond = slots + ahead_of_use // 2
        if self.device.type != "cpu" or self.room < self.block:
            return  # a block that still doubles is small
        if stop > self.room and not self.folders:
            self._add_block_early(stop)
        self._supplied = min(stop, self.room)
        parts = []
        for name, blocks in self.arrays().items():
            if name not in self.folders:
                parts += self._between(blocks, start, stop)
        supply(parts)

    def _add_block_early(self, slots: int) -> None:
        """Adds the block that this many slots will need, if there is memory for it."""
        try:
            self.columns = self._extended(slots)
        except MemoryError:
            return  # what is in use has room: whoever needs more will be told

    def _between(self, blocks: list[Array], start: int, stop: int) -> list[Array]:
        """What the blocks of a column hold from one slot to another."""
        parts = []
        for number, block in enumerate(blocks):
            first = number * self.block
            part = block[max(0, start - first) : max(0, stop - first)]
            if part.size:
                parts.append(part)
        return parts

    def _extended(self, slots: int) -> dict[str, list[Tensor]]:
        """The columns with a larger first block, or with one more block."""
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
        """How many slots the first block gets when it must hold this many: twice as many as now, or all of them."""
        wanted = max(2 * self.room, -(-slots // TILE) * TILE)
        if wanted * self.slot_bytes > SMALL_BYTES:
            return self.block
        return min(wanted, self.block)

    def _memory(self, name: str, size: int) -> Tensor:
        """Untouched memory (size, …); main memory comes from NumPy, in huge pages that are faster to scan."""
        shape, dtype = self.kinds[name]
        if self.device.type != "cpu":
            return torch.empty(size, *shape, dtype=dtype, device=self.device)
        wanted = size * prod(shape) * dtype.itemsize
        if name in self.folders:
            memory = _file_memory(self.folders[name], wanted)
            return torch.from_numpy(memory).view(dtype).view(size, *shape)
        memory = numpy.empty(wanted + LINE, numpy.uint8)
        start = -memory.ctypes.data % LINE
        return torch.from_numpy(memory[start : start + wanted]).view(dtype).view(size, *shape)

    def write(self, slots: Tensor, values: Mapping[str, Any]) -> None:
        """Writes values, each a tensor or array (n, …), into these slots (n,), for which there must be room."""
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
        """``write`` for a single slot, which needs no lists of places."""
        block, offset = divmod(slot, self.block)
        for name, targets in self.arrays().items():
            targets[block][offset] = array_if_on_cpu(values[name])[0]

    def _write_run(self, first: int, count: int, values: Mapping[str, Any]) -> None:
        """``write`` for slots that follow one another, as those of an append do: nothing is copied on the way."""
        stop = first + count
        for block in range(first // self.block, -(-stop // self.block)):
            offset = block * self.block
            start_here = max(first, offset)
            stop_here = min(stop, offset + self.block)
            for name, targets in self.arrays().items():
                there = slice(start_here - offset, stop_here - offset)
                targets[block][there] = array_if_on_cpu(values[name])[start_here - first : stop_here - first]

    def arrays(self) -> dict[str, list[Any]]:
        """The blocks as NumPy reads and writes them, or as torch does if they lie on another device."""
        columns = self.columns
        known_columns, arrays = self._known_arrays
        if known_columns is not columns:
            arrays = {name: [array_if_on_cpu(part) for part in parts] for name, parts in columns.items()}
            self._known_arrays = (columns, arrays)  # one assignment: others may ask meanwhile
        return arrays

    def read(self, slots: Array, *names: str) -> dict[str, Array]:
        """The values of the named columns at these slots (n,), in main memory: ``take`` for few slots."""
        arrays = self.arrays()
        if len(arrays[names[0]]) == 1:
            return {name: to_main_memory(arrays[name][0][slots]) for name in names}
        if 0 < len(slots) <= ONE_BY_ONE and self.device.type == "cpu":
            places = [divmod(slot, self.block) for slot in slots.tolist()]
            return {name: numpy.array([arrays[name][block][offset] for block, offset in places]) for name in names}
        columns = self.take(torch.from_numpy(slots).to(self.device), *names)
        return {name: to_main_memory(column) for name, column in columns.items()}

    def take(self, slots: Tensor, *names: str) -> Columns:
        """The values at these slots, of any shape, each column (*shape, …): the named columns, or all."""
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
        """A column's blocks, as far as they hold the first so many slots."""
        parts = []
        for number, part in enumerate(self.columns[name]):
            left = slots - number * self.block
            if left <= 0:
                break
            parts.append(part[:left])
        return parts

    def _locate(self, slots: Tensor) -> Iterator[tuple[int, Tensor | slice, Tensor]]:
        """For each block touched: its number, where ``slots`` are in it, and their offsets in the block (n,)."""
        if self.room <= self.block:
            yield 0, slice(None), slots
            return
        block = slots // self.block
        offset = slots % self.block
        for number in block.unique().tolist():
            positions = block == number
            yield number, positions, offset[positions]


def _file_memory(folder: Path, size: int) -> Array:
    """So many bytes in a file without a name, (size,) uint8, read page by page."""
    try:
        with TemporaryFile(dir=folder, prefix="adanpc-") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and not a signal later
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as error:
        reason = error.strerror or error
        raise AdaNPCError(f"{size} bytes of rows cannot be kept in {folder}: {reason}; give another folder") from error
    mapped.madvise(mmap.MADV_RANDOM)  # a search reads single rows: what lies behind them is not wanted
    return numpy.frombuffer(mapped, numpy.uint8)
