"""Blocks: growing columns in memory that is not copied once it is large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor

from adanpc.index.grid import Columns, in_main_memory

TILE = 64  # slots come in whole tiles, which is what a scan reads together
BLOCK_BYTES = 128 << 20  # of a full block: few enough of them to scan and read well
SMALL_BYTES = 4 << 20  # of the first block while it still doubles: copying this much takes about a millisecond
PIECE = 1 << 14  # rows written at once, since writing copies them

Kind = tuple[tuple[int, ...], torch.dtype]  # the shape and type of what a slot holds in a column


class Blocks:
    """Columns of numbers in slots 0, 1, …, each column (slots, …).

    Memory is taken from the system untouched, so room for later rows costs nothing until it is written. The first
    block doubles while it is small; after that, growing adds a block and copies nothing, so no append has to wait for
    a copy of all rows.

    Whoever holds a list of blocks may go on reading the slots that were written before, while others are written.

    Args:
        kinds: of the columns, by name.
        device: where they are kept.
    """

    def __init__(self, kinds: Mapping[str, Kind], device: torch.device) -> None:
        self.kinds = dict(kinds)
        self.device = device
        self.slot_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in kinds.values())
        self.block = max(1, BLOCK_BYTES // (self.slot_bytes * TILE)) * TILE  # slots of every block but the last
        self.columns: dict[str, list[Tensor]] = {name: [] for name in kinds}
        self._known_targets: dict[str, list[Any]] = {}
        self._targets_of: dict[str, list[Tensor]] = {}  # the columns that these are made of

    @property
    def room(self) -> int:
        """How many slots there is memory for."""
        return sum(len(part) for part in next(iter(self.columns.values())))

    def reserve(self, slots: int) -> None:
        """Makes room for at least this many slots."""
        while self.room < slots:
            self.columns = self._extended(slots)  # one assignment: memory may run out, or Ctrl-C come, before it

    def _extended(self, slots: int) -> dict[str, list[Tensor]]:
        """The columns with a larger first block, or with one more block."""
        room = self.room
        extended = {}
        for name, parts in self.columns.items():
            if room < self.block:
                size = self._first_block(slots)
                larger = self._memory(name, size)
                if parts:
                    in_main_memory(larger)[:room] = in_main_memory(parts[0])
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
        memory = numpy.empty(size * prod(shape) * dtype.itemsize, numpy.uint8)
        return torch.from_numpy(memory).view(dtype).view(size, *shape)

    def write(self, slots: Tensor, values: Columns) -> None:
        """Writes values, each (n, …), into these slots (n,), for which there must be room."""
        for start in range(0, len(slots), PIECE):
            piece = slice(start, start + PIECE)
            for block, positions, offsets in self._locate(slots[piece]):
                written = in_main_memory(offsets)
                for name, targets in self._targets().items():
                    targets[block][written] = in_main_memory(values[name])[piece][positions]

    def _targets(self) -> dict[str, list[Any]]:
        """The blocks as they are written to, made again only when there are other blocks."""
        columns = self.columns
        if self._targets_of is not columns:
            self._known_targets = {name: [in_main_memory(part) for part in columns[name]] for name in columns}
            self._targets_of = columns
        return self._known_targets

    def take(self, slots: Tensor, *names: str) -> Columns:
        """The values at these slots (n,), each column (n, …): the named columns, or all."""
        wanted = names or tuple(self.kinds)
        columns = self.columns
        if len(columns[wanted[0]]) == 1:
            return {name: columns[name][0].index_select(0, slots) for name in wanted}
        taken = {}
        for name in wanted:
            shape, dtype = self.kinds[name]
            taken[name] = torch.empty(len(slots), *shape, dtype=dtype, device=self.device)
        if not len(slots):
            return taken  # there may be no block yet
        for block, positions, offsets in self._locate(slots):
            for name in wanted:
                taken[name][positions] = columns[name][block].index_select(0, offsets)
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
        """For each block touched: its number, the positions in ``slots``, and the offsets in the block."""
        if self.room <= self.block:
            yield 0, slice(None), slots
            return
        block = slots // self.block
        offset = slots % self.block
        for number in block.unique().tolist():
            positions = (block == number).nonzero()[:, 0]
            yield number, positions, offset[positions]
