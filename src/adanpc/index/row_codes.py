"""RowCodes: the codes of all rows of a progressive index, and what kernels read in them."""

from __future__ import annotations

from threading import local
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from adanpc.index import hunt
from adanpc.index.blocks import Blocks, Kind
from adanpc.index.codes import (
    FITTED_ROWS,
    HEAD,
    WIDEST,
    Coded,
    Coder,
    bytes_of_coder,
    number_of_signs,
    padded_length,
    shapes_of_parts,
)
from adanpc.index.counting import ceil_div
from adanpc.index.grid import Array, Columns, decode
from adanpc.index.kernels import LANES, HeadAndBits, Nibbles, bound_rows, chosen, reach_rows, scan_tiles

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex

ROWS_FOR_CODES = 16384  # codes are made once there are this many rows: reading fewer rows is faster than bounding them
SPAN = 4096  # slots whose tails share a center
ENCODED_AT_ONCE = 512  # rows encoded at once
CODER_PREFIX = "coder."  # prefix of the names under which the parts of the coder are kept
EVERY_SLOT = numpy.zeros(0, bool)  # instead of a mask


class RowCodes:
    """The codes of all rows that were ever added, by slot.

    All versions of the index share one object, which changes: codes are written together with the row of their slot,
    when nobody reads that slot, and a center is written once, before the codes that need it. So no search sees what it
    reads change.

    Args:
        dim: length of a row.
    """

    def __init__(self, dim: int) -> None:
        self.coder: Coder | None = None
        self.longest = 0.0  # the greatest ``Coded.longest`` so far
        self._dim = dim
        self._slots = 0  # the most slots in use in any version
        padded = padded_length(dim)
        tile: dict[str, Kind] = {
            "head": ((HEAD // 2, LANES, 2), torch.int8),
            "bits": ((number_of_signs(dim) // 32, LANES), torch.uint32),
            "weights": ((3, LANES), torch.float32),
        }
        row: dict[str, Kind] = {"nibbles": ((padded // 2,), torch.uint8), "factors": ((2,), torch.float32)}
        self._rows = Blocks(row, torch.device("cpu"))
        self._tiles = Blocks(tile, torch.device("cpu"), block=self._rows.block // LANES)  # the same rows in each block
        self._centers: Array = numpy.zeros((0, padded))  # one for each span, with room to grow
        self._spans = 0
        self._sum: Array = numpy.zeros(padded)  # the sum of the tails in the newest span
        self._summed = 0
        self._memory = local()  # two arrays of bounds for each thread, overwritten by every search

    def nbytes(self, slots: int) -> int:
        """Returns the bytes of the codes of this many slots and of the coder; 0 as long as there are too few rows."""
        if self.coder is None and (slots < ROWS_FOR_CODES or self._dim > WIDEST):
            return 0
        tiles = ceil_div(slots, LANES)
        centers = (ceil_div(slots, SPAN) + 1) * self._sum.nbytes  # and the sum that yields the next one
        codes = tiles * self._tiles.slot_bytes + slots * self._rows.slot_bytes
        return codes + centers + bytes_of_coder(self._dim)

    def bytes_ahead(self, slots: int) -> int:
        """Returns the most bytes that are requested for codes of later rows when this many slots are in use."""
        return self._tiles.bytes_ahead(ceil_div(slots, LANES)) + self._rows.bytes_ahead(slots)

    def add(self, exact: ExactIndex, slots: Array) -> None:
        """Encodes the rows in these slots (n,), or all rows as soon as there are enough."""
        self._slots = max(self._slots, exact.slots)
        if self.coder is not None:
            self._write(self.coder, exact, slots)
        elif exact.count >= ROWS_FOR_CODES and self._dim <= WIDEST:
            coder = self._fitted(exact)
            self._write(coder, exact, numpy.arange(self._slots))
            self.coder = coder  # from now on, searches read codes

    def _fitted(self, exact: ExactIndex) -> Coder:
        """Returns a coder fitted to these rows, whose mean tail will be the first center."""
        visible = exact.visible
        places = torch.linspace(0, len(visible) - 1, min(FITTED_ROWS, len(visible)), dtype=torch.float64).long()
        sample = exact.rows(visible[places]).numpy().astype(numpy.float64)
        coder = Coder.fitted(sample)
        _, tails = coder.split(sample)
        self._sum = tails.sum(0)
        self._summed = len(tails)
        self._spans = 0
        return coder

    def _write(self, coder: Coder, exact: ExactIndex, slots: Array) -> None:
        """Encodes the rows in these slots (n,) span by span, because each span gets its center from the one before."""
        if not len(slots):
            return
        slots = numpy.sort(slots)
        last = int(slots[-1])
        self._tiles.reserve(last // LANES + 1)
        self._rows.reserve(last + 1)
        for span in range(int(slots[0]) // SPAN, last // SPAN + 1):
            start, end = numpy.searchsorted(slots, [span * SPAN, (span + 1) * SPAN])
            for piece in range(start, end, ENCODED_AT_ONCE):
                self._open(span)
                self._encode(coder, exact, slots[piece : min(piece + ENCODED_AT_ONCE, end)], span)

    def _open(self, span: int) -> None:
        """Sets the centers of all spans up to this one, for good: each is the mean tail of the previous span."""
        while self._spans <= span:
            center = self._sum / max(self._summed, 1)
            if self._spans and not self._summed:
                center = self._centers[self._spans - 1]
            if self._spans == len(self._centers):
                larger = numpy.zeros((max(4, 2 * self._spans), len(center)))
                larger[: self._spans] = self._centers
                self._centers = larger
            self._centers[self._spans] = center
            self._spans += 1
            self._sum = numpy.zeros_like(self._sum)
            self._summed = 0

    def _encode(self, coder: Coder, exact: ExactIndex, slots: Array, span: int) -> None:
        """Writes the codes of the rows in these slots (n,), all in one span."""
        rows = decode(exact.blocks.read(slots, *exact.encoded)).astype(numpy.float64)
        with numpy.errstate(all="ignore"):  # slots that were never written hold arbitrary values
            coded = coder.encode(rows, self._centers[span])
        self.longest = max(self.longest, coded.longest)
        if span == self._spans - 1:
            # Hidden slots are left out, because they may never have been written.
            shown = exact.shows(slots)
            self._sum += coded.tails[shown].sum(0)
            self._summed += int(numpy.count_nonzero(shown))
        if len(slots) == 1:
            self._store_one(coded, int(slots[0]))
            return
        tiles, lanes = numpy.divmod(slots, LANES)
        for block in numpy.unique(tiles // self._tiles.block):
            there = tiles // self._tiles.block == block
            offsets = tiles[there] - block * self._tiles.block
            arrays = {name: parts[block] for name, parts in self._tiles.arrays().items()}
            arrays["head"][offsets, :, lanes[there]] = coded.head[there].reshape(-1, HEAD // 2, 2)
            arrays["bits"][offsets, :, lanes[there]] = coded.bits[there]
            arrays["weights"][offsets, :, lanes[there]] = coded.weights[there]
        self._rows.write(torch.from_numpy(slots), {"nibbles": coded.nibbles, "factors": coded.factors})

    def _store_one(self, coded: Coded, slot: int) -> None:
        """Writes the codes of one row, without arrays of positions."""
        tile, lane = divmod(slot, LANES)
        block, offset = divmod(tile, self._tiles.block)
        tiles = self._tiles.arrays()
        tiles["head"][block][offset, :, lane] = coded.head.reshape(-1, 2)
        tiles["bits"][block][offset, :, lane] = coded.bits[0]
        tiles["weights"][block][offset, :, lane] = coded.weights[0]
        rows = self._rows.arrays()
        block, offset = divmod(slot, self._rows.block)
        rows["nibbles"][block][offset] = coded.nibbles[0]
        rows["factors"][block][offset] = coded.factors[0]

    def kept(self, coder: Coder, slots: Tensor) -> Columns:
        """Returns the codes of the rows in these slots, ordered by slot, and the coder's parts: (rows, columns) each.

        All other slots are zero: their rows were deleted, and must not be disclosed, or were never written.
        """
        used = int(slots.max()) + 1
        tiles = ceil_div(used, LANES)
        unused = numpy.ones(tiles * LANES, bool)
        unused[slots.numpy()] = False
        places = unused.nonzero()[0]
        columns = {"slot": slots}
        for name in self._tiles.kinds:
            column = torch.cat(self._tiles.used(name, tiles))
            column.numpy()[places // LANES, :, places % LANES] = 0
            if column.dtype == torch.uint32:
                column = column.view(torch.uint8)
            columns[name] = column.reshape(tiles, -1)
        for name in self._rows.kinds:
            column = torch.cat(self._rows.used(name, used))
            column.numpy()[places[places < used]] = 0
            columns[name] = column
        columns["centers"] = torch.from_numpy(self._centers[: self._spans].copy())
        columns["sum"] = torch.from_numpy(self._sum[None].copy())
        columns["numbers"] = torch.tensor([[self.longest, self._summed]], dtype=torch.float64)
        for name, part in coder.parts.items():
            columns[CODER_PREFIX + name] = torch.from_numpy(part.copy())
        return columns

    def restore(self, columns: Columns, slots: int) -> None:
        """Restores what ``kept`` returned for rows in this many slots."""
        tiles = {}
        for name, (shape, dtype) in self._tiles.kinds.items():
            tiles[name] = columns[name].view(dtype).view(-1, *shape)
        self._tiles.adopt(tiles)
        self._rows.adopt({name: columns[name] for name in self._rows.kinds})
        self._centers = columns["centers"].numpy()
        self._spans = len(self._centers)
        self._sum = columns["sum"].numpy()[0]
        longest, summed = columns["numbers"][0].tolist()
        self.longest = longest
        self._summed = int(summed)
        self._slots = slots
        self.coder = Coder({name: columns[CODER_PREFIX + name].numpy() for name in shapes_of_parts(self._dim)})

    def centers(self, slots: int) -> Array:
        """Returns the centers (spans, padded) of the first ``slots`` slots."""
        return self._centers[: ceil_div(slots, SPAN)]

    def one_pass(self, groups: Array, slots: int) -> hunt.Pass:
        """Returns a pass over the codes of the first ``slots`` slots, whose groups are given."""
        tiles = ceil_div(slots, LANES)
        blocks = list(hunt.blocks_of(self._tiles.arrays(), self._rows.arrays(), self._tiles.block, tiles))
        return hunt.Pass(chosen(), blocks, SPAN // LANES, groups, slots)

    def scan(self, query: HeadAndBits, slots: int) -> tuple[Array, Array]:
        """Returns what each row is known to reach without its tail and an upper bound on its similarity, both (slots,).

        This thread's next scan overwrites them.
        """
        tiles = ceil_div(slots, LANES)
        base, upper = self._room(tiles * LANES)
        path = chosen()
        size = self._tiles.block
        arrays = self._tiles.arrays()
        for block, first in enumerate(range(0, tiles, size)):
            some = min(size, tiles - first)
            rows = slice(first * LANES, (first + some) * LANES)
            codes = {name: parts[block] for name, parts in arrays.items()}
            scan_tiles(path, codes, some, first, SPAN // LANES, query, base[rows], upper[rows])
        return base[:slots], upper[:slots]

    def bounds(self, query: Nibbles, slots: Array, base: Array) -> Array:
        """Returns tighter bounds (n,) on the rows in these slots (n,), sorted; ``base`` is what ``scan`` returned."""
        upper = numpy.empty(len(slots), numpy.float32)
        path = chosen()
        size = self._rows.block
        arrays = self._rows.arrays()
        for block, first in enumerate(range(0, len(base), size)):
            start, end = numpy.searchsorted(slots, [first, first + size])
            codes = {name: parts[block] for name, parts in arrays.items()}
            bound_rows(path, codes, slots[start:end], first, query, base, upper[start:end])
        return upper

    def reaching(
        self, query: Nibbles, base: Array, upper: Array, usable: Array | None, first_least: float, least: float
    ) -> Array:
        """Returns the slots (n,) of rows whose two bounds reach two similarities; see ``reach_rows``.

        ``base`` and ``upper`` are what ``scan`` returned.
        """
        path = chosen()
        size = self._rows.block
        arrays = self._rows.arrays()
        if usable is None:
            usable = EVERY_SLOT
        found = []
        for block, first in enumerate(range(0, len(base), size)):
            rows = min(size, len(base) - first)
            codes = {name: parts[block] for name, parts in arrays.items()}
            found.append(reach_rows(path, codes, first, rows, query, base, upper, usable, first_least, least))
        return numpy.concatenate(found)

    def _room(self, slots: int) -> tuple[Array, Array]:
        """Returns two float32 arrays (slots,) that belong to this thread."""
        if getattr(self._memory, "size", 0) < slots:
            self._memory.base = numpy.empty(2 * slots, numpy.float32)
            self._memory.upper = numpy.empty(2 * slots, numpy.float32)
            self._memory.size = 2 * slots  # last, because memory may run out before
        base: Array = self._memory.base
        upper: Array = self._memory.upper
        return base[:slots], upper[:slots]
