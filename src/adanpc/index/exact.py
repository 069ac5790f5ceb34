"""ExactIndex: unit rows in slots, and the exact nearest of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from adanpc.errors import AdaNPCError
from adanpc.index.grid import STORAGE, Columns, decode, encode
from adanpc.index.scan import TILE, scan

BLOCK_BYTES = 128 << 20  # of a full block: few enough of them to scan and read well
PIECE = 1 << 14  # rows written at once, since writing copies them
SCORES = 1 << 25  # bounds held at once: 128 MiB
COORDINATES = 1 << 20  # coordinates re-scored in float64 at once: what the cache holds


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
            parts = {
                name: torch.empty(size, width, dtype=dtype, device=self.device)
                for name, (width, dtype) in self.widths.items()
            }
            for name, part in parts.items():  # nothing has changed if memory ran out before
                if last:
                    part[:last] = self.columns[name].pop()
                self.columns[name].append(part)
            room += size - last
        self.slots = max(self.slots, wanted)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: slots in use, and no memory that was never written."""
        names = {name: [part.clone() for part in self._used(name)] for name in self.columns}
        return {**self.__dict__, "columns": names}

    def _used(self, name: str) -> list[Tensor]:
        """A column's blocks as far as they are in use."""
        return [part[: self.slots - number * self.block] for number, part in enumerate(self.columns[name])]

    def put(self, slots: Tensor, values: Columns) -> None:
        """Writes encoded rows into these slots (n,)."""
        for start in range(0, len(slots), PIECE):
            piece = slice(start, start + PIECE)
            for block, positions, offsets in self._locate(slots[piece]):
                for name in self.widths:
                    self.columns[name][block][offsets] = values[name][piece][positions]
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
                column.index_copy_(0, positions, self.columns[name][block].index_select(0, offsets))
        return out

    def rows(self, slots: Tensor) -> Tensor:
        """The rows at these slots, (n, D) float32."""
        return decode(self.take(slots))

    def stored(self, queries: Tensor) -> Tensor:
        """What unit queries are read back as once they are stored, (B, D) float32."""
        return decode(encode(queries, self.storage))

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
        found = []
        size = max(1, SCORES // max(1, self.slots))
        for start in range(0, len(queries) if self.slots else 0, size):
            part = slice(start, start + size)
            hidden = None if exclude is None else exclude[part].to(self.device)
            found.append(self._nearest(queries[part], k, usable, ids, hidden))
        if not found:
            slots = torch.full((len(queries), k), -1, device=self.device)
            return slots, torch.full(slots.shape, -torch.inf, dtype=torch.float64, device=self.device)
        slots, similarity = (torch.cat(column) if len(found) > 1 else column[0] for column in zip(*found, strict=True))
        short = k - slots.shape[1]  # columns that no row is there to fill
        return pad(slots, (0, short), value=-1), pad(similarity, (0, short), value=-torch.inf)

    def _nearest(
        self, queries: Tensor, k: int, usable: Tensor, ids: Tensor, exclude: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The search of as many queries as the bounds have room for.

        Candidates are the rows with the highest bounds. They are enough once no other bound reaches the exact k-th
        similarity; queries for which they are not are asked again with twice as many.
        """
        bounds, slack = self._bounds(queries, usable)
        peaks = bounds.amax(2).T  # (B, tiles)
        k, hidden = min(k, self.slots), 0 if exclude is None else exclude.shape[1]
        width = min(k + hidden + (k + 32 if self.storage == "int8" else 16), self.slots)
        slots, similarity, rest = self._ranked(queries, bounds, peaks, ids, exclude, k, width)
        while width < self.slots:
            again = ((rest + slack >= similarity[:, -1]) & ~rest.isneginf()).nonzero()[:, 0]
            if not len(again):
                break
            width = min(2 * width, self.slots)
            some = None if exclude is None else exclude[again]
            wider = self._ranked(queries[again], bounds[:, again], peaks[again], ids, some, k, width)
            slots[again], similarity[again], rest[again] = wider
        return slots, similarity

    def _ranked(
        self,
        queries: Tensor,
        bounds: Tensor,
        peaks: Tensor,
        ids: Tensor,
        exclude: Tensor | None,
        k: int,
        width: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Slots and exact similarities (B, k) of the best of ``width`` candidates, and the bound of all others (B,)."""
        ranked = []
        size = max(1, COORDINATES // (width * self.dim))
        for start in range(0, len(queries), size):
            part = slice(start, start + size)
            bound, near = _highest(bounds[:, part], peaks[part], width)
            rows = self.rows(near.flatten()).view(*near.shape, self.dim)
            exact = torch.bmm(rows.double(), queries[part].double()[:, :, None])[:, :, 0]
            hidden, numbers = bound.isneginf(), ids[near]
            if exclude is not None:
                hidden |= (numbers[:, :, None] == exclude[part][:, None]).any(2)
            exact.masked_fill_(hidden, -torch.inf)
            by_id = numbers.argsort(1)
            order = by_id.gather(1, exact.gather(1, by_id).argsort(dim=1, descending=True, stable=True)[:, :k])
            best = exact.gather(1, order)
            ranked.append((near.gather(1, order).masked_fill(best.isneginf(), -1), best, bound[:, -1].double()))
        if len(ranked) == 1:
            return ranked[0]
        slots, similarity, rest = (torch.cat(column) for column in zip(*ranked, strict=True))
        return slots, similarity, rest

    def _bounds(self, queries: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        """Upper bounds of all similarities (tiles, B, 64), -inf for rows that are not usable, and their slack (B,)."""
        bounds = queries.new_empty(self.slots // TILE, len(queries), TILE)
        slack = scan(self._used("row"), queries, bounds)
        if self.storage == "int8":
            for block, (scale, residual) in enumerate(zip(self._used("scale"), self._used("residual"), strict=True)):
                start = block * self.block // TILE
                part = bounds[start : start + len(scale) // TILE]
                torch.addcmul(residual.view(-1, 1, TILE), part, scale.view(-1, 1, TILE), out=part)
        usable = usable.view(-1, 1, TILE)
        holes = (usable.sum((1, 2)) < TILE).nonzero()[:, 0]  # torch sums faster than it asks for all
        if len(holes):
            bounds[holes] = bounds[holes].masked_fill(~usable[holes], -torch.inf)
        return bounds, slack * (1 + self.residual) + 1e-6

    def _locate(self, slots: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each block touched: its number, the positions in ``slots``, and the offsets in the block."""
        block, offset = slots // self.block, slots % self.block
        for number in block.unique().tolist():
            positions = (block == number).nonzero()[:, 0]
            yield number, positions, offset[positions]


def _highest(bounds: Tensor, peaks: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` highest of bounds (tiles, B, 64) for each query and their slots, (B, width), highest first.

    They lie in the ``width`` tiles with the highest peaks (B, tiles), so only those are looked into.
    """
    tiles = peaks.topk(min(width, peaks.shape[1]), sorted=False).indices  # (B, tiles)
    inside = bounds[tiles, torch.arange(len(tiles), device=tiles.device)[:, None]].flatten(1)  # (B, tiles * 64)
    best = inside.topk(width)
    return best.values, tiles.gather(1, best.indices // TILE) * TILE + best.indices % TILE
