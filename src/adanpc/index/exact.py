"""ExactIndex: unit rows in slots, and the exact nearest of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad

from adanpc.errors import AdaNPCError
from adanpc.index import batch, single
from adanpc.index.grid import STORAGE, Columns, decode, encode
from adanpc.index.scan import TILE

BLOCK_BYTES = 128 << 20  # of a full block: few enough of them to scan and read well
PIECE = 1 << 14  # rows written at once, since writing copies them
SCORES = 1 << 25  # bounds held at once: 128 MiB


class ExactIndex:
    """Rows in slots 0, 1, …, kept in blocks.

    A search reads every row once to bound its similarity, then scores exactly all rows whose bound could reach the
    k-th best. The result is that of exact arithmetic, for every storage, device, batch size and scan.
    """

    def __init__(self, dim: int, storage: str, device: torch.device) -> None:
        if storage not in STORAGE:
            raise AdaNPCError(f"storage must be one of {', '.join(STORAGE)}, got {storage!r}")
        self.dim, self.storage, self.device = dim, storage, device
        self.widths = {"row": (dim, STORAGE[storage])}
        if storage == "int8":
            self.widths |= {"fine": (dim, torch.int8), "scale": (1, torch.float32), "residual": (1, torch.float32)}
        self.columns: dict[str, list[Tensor]] = {name: [] for name in self.widths}
        self.row_bytes = sum(width * dtype.itemsize for width, dtype in self.widths.values())
        self.block = max(1, BLOCK_BYTES // (self.row_bytes * TILE)) * TILE  # slots of every block but the last
        self.slots = 0  # in use, a multiple of 64
        self.residual = 0.0  # the largest of any row

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use."""
        return self.slots * self.row_bytes

    def grow(self, slots: int) -> None:
        """Makes slots usable up to this number, rounded up to whole tiles.

        Blocks are taken from the system as they are, untouched, so that room for later rows costs no memory and growing
        costs no copy, but for the first block, which starts small.
        """
        wanted = -(-slots // TILE) * TILE
        room = sum(map(len, self.columns["row"]))
        while room < wanted:
            last = room % self.block  # 0 where the next block begins
            size = self.block if room > self.block else min(self.block, max(2 * last, wanted))
            parts = {name: self._room(size, *column) for name, column in self.widths.items()}
            for name, part in parts.items():  # nothing has changed if memory ran out before
                if last:
                    part[:last] = self.columns[name].pop()
                self.columns[name].append(part)
            room += size - last
        self.slots = max(self.slots, wanted)

    def _room(self, size: int, width: int, dtype: torch.dtype) -> Tensor:
        """Untouched memory (size, width); main memory comes from NumPy, in huge pages that are faster to scan."""
        if self.device.type != "cpu":
            return torch.empty(size, width, dtype=dtype, device=self.device)
        return torch.from_numpy(numpy.empty(size * width * dtype.itemsize, numpy.uint8)).view(dtype).view(size, width)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: slots in use, and no memory that was never written."""
        names = {name: [part.clone() for part in self.used(name)] for name in self.columns}
        return {**self.__dict__, "columns": names}

    def used(self, name: str) -> list[Tensor]:
        """A column's blocks as far as they are in use."""
        return [part[: self.slots - number * self.block] for number, part in enumerate(self.columns[name])]

    def put(self, slots: Tensor, values: Columns) -> None:
        """Writes encoded rows into these slots (n,)."""
        for start in range(0, len(slots), PIECE):
            piece = slice(start, start + PIECE)
            for block, positions, offsets in self._locate(slots[piece]):
                for name in self.widths:
                    self.columns[name][block].index_copy_(0, offsets, values[name][piece][positions])
        if "residual" in values and len(slots):
            self.residual = max(self.residual, float(values["residual"].max()))

    def take(self, slots: Tensor) -> Columns:
        """The encoded rows at these slots (n,), each column (n, width)."""
        if len(self.columns["row"]) == 1:
            return {name: parts[0].index_select(0, slots) for name, parts in self.columns.items()}
        out = {
            name: torch.empty(len(slots), width, dtype=dtype, device=self.device)
            for name, (width, dtype) in self.widths.items()
        }
        for block, positions, offsets in self._locate(slots):
            for name, column in out.items():
                column[positions] = self.columns[name][block].index_select(0, offsets)
        return out

    def rows(self, slots: Tensor) -> Tensor:
        """The rows at these slots, (n, D) float32."""
        return decode(self.take(slots)).float()

    def stored(self, queries: Tensor) -> Tensor:
        """What unit queries are read back as once they are stored, (B, D) float32."""
        return decode(encode(queries, self.storage)).float()

    def search(
        self, queries: Tensor, k: int, usable: Tensor, ids: Tensor, exclude: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Slots and exact similarities (B, k) of the nearest usable rows, ties to the lowest id; changes nothing.

        Args:
            queries: (B, D) as ``unit`` returns them.
            usable: (slots,) bool, which rows may be found.
            ids: (slots,) the id of each row.
            exclude: (B, E) ids that may not be found for that query.

        Where fewer than k rows are found, the slot is -1 and the similarity -inf.
        """
        if exclude is not None and (exclude.ndim != 2 or len(exclude) != len(queries) or exclude.is_floating_point()):
            shape = f"{exclude.dtype} of shape {tuple(exclude.shape)}"
            raise AdaNPCError(
                f"exclude must be whole numbers of shape ({len(queries)}, E), ids for each query, got {shape}"
            )
        nearest = single.nearest if len(queries) == 1 and self.device.type == "cpu" else batch.nearest
        found = []
        size = max(1, SCORES // max(1, self.slots))
        for start in range(0, len(queries) if self.slots else 0, size):
            part = slice(start, start + size)
            hidden = None if exclude is None else exclude[part].to(self.device)
            found.append(nearest(self, queries[part], k, usable, ids, hidden))
        if not found:
            slots = torch.full((len(queries), k), -1, device=self.device)
            return slots, torch.full(slots.shape, -torch.inf, dtype=torch.float64, device=self.device)
        slots, similarity = (torch.cat(column) if len(found) > 1 else column[0] for column in zip(*found, strict=True))
        if not (short := k - slots.shape[1]):  # columns that no row is there to fill
            return slots, similarity
        return pad(slots, (0, short), value=-1), pad(similarity, (0, short), value=-torch.inf)

    def _locate(self, slots: Tensor) -> Iterator[tuple[int, Tensor | slice, Tensor]]:
        """For each block touched: its number, the positions in ``slots``, and the offsets in the block."""
        if len(self.columns["row"]) == 1:
            yield 0, slice(None), slots
            return
        block, offset = slots // self.block, slots % self.block
        for number in block.unique().tolist():
            positions = (block == number).nonzero()[:, 0]
            yield number, positions, offset[positions]
