"""ProgressiveIndex: a few bits of every row say which rows are worth more bits, and which an exact look."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from copy import copy
from threading import Lock, local
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.index import hunt, single
from adanpc.index.blocks import Blocks, Kind
from adanpc.index.codes import (
    HEAD,
    SAMPLE,
    WIDEST,
    Coded,
    Coder,
    bytes_of_coder,
    number_of_signs,
    padded_length,
    shapes_of_parts,
)
from adanpc.index.exact import ExactIndex
from adanpc.index.grid import STORAGE, Array, Columns, decode
from adanpc.index.kernels import LANES, HeadAndBits, Nibbles, bound_rows, chosen, scan_tiles
from adanpc.index.protocol import FILE, Found, Kept, Wanted, one_after_another
from adanpc.index.unread import Unread

logger = logging.getLogger("adanpc")

LEAST = 16384  # rows from which on codes are made of them: fewer are read faster than they are bounded
SPAN = 4096  # slots whose tails share a center
ENCODED = 512  # rows encoded at once
FIRST = 1024  # rows with the highest bounds that are looked at to find what the k-th nearest must reach, at least
SHARE = 400  # and at least one in so many
SAMPLED = 16384  # bounds from which the one is guessed that so many rows reach
SPARE = 14  # rows scored beyond the wanted number to find what the k-th nearest must reach
BOUNDS = 8  # bytes of what a search writes of a slot
SEVERAL = 8  # queries from which on they share a pass over four bits of each row: fewer are faster one by one
TOGETHER = 64  # queries that share such a pass, at most
MANY = 8  # one in so many rows may be wanted; if more are, every row is scored
PART = "coder."  # before the names of what codes were made with, where they are kept
SPARSE = 2  # slots for each row from which on codes are not kept: made again, they take less room


class ProgressiveIndex:
    """Rows in 16 bits a coordinate, as an ``ExactIndex`` holds them, and codes that say which of them to look at.

    A search reads 64 bytes and 1,024 signs of every row, for an upper bound of its similarity. Four bits a coordinate
    of the rows with the highest bounds, and exact scores of the best of those, say what the k-th nearest row must
    reach. Of the rows whose bound reaches it, four bits a coordinate give a tighter bound, and those whose bound still
    does are scored exactly. What is found is what an ``ExactIndex`` finds, but for a probability below 2e-6 for each
    query with k = 50 that one of the k rows is missed; see docs/architecture.md. How many rows are looked at is a
    matter of time, never of the answer.

    Codes are made from the first 16,384 rows on; until then, every row is read. ``codes`` gives them to be kept, and
    ``put_kept`` takes them back.
    How they are made is fitted once, to the rows that are there at that moment: other rows later make bounds wider.

    Args:
        dim: length of a row.
        storage: of the rows, see ``MemoryBank``.
        device: main memory alone.
        certified: whether nothing may be missed, at two to four times the cost: the four bits of every row are read,
            and bounds hold for certain.
        folder: where rows are kept in a file, which is gone with the process; only codes are in memory then.
        sample: the share of queries that every row is read for, too, which takes its time: ``audit`` says how many of
            them were answered as exact search does, and an answer that was not is corrected.
    """

    def __init__(
        self,
        dim: int,
        storage: str = "progressive",
        device: torch.device | str = "cpu",
        *,
        certified: bool = False,
        folder: str | os.PathLike[str] | None = None,
        sample: float = 0.0,
    ) -> None:
        if torch.device(device).type != "cpu":
            raise AdaNPCError(f"a progressive search works in main memory: pass device='cpu' instead of {device!s}")
        self.dim = dim
        self.storage = storage
        self.device = torch.device(device)
        self.certified = certified
        self._exact = ExactIndex(dim, storage, device, folder=folder)
        self._codes = _Codes(dim)
        self._auditor = _Auditor(require.between("sample", sample, 0, 1))
        self._unread: Unread | None = None  # rows that are still in a file

    def __repr__(self) -> str:
        certified = ", certified=True" if self.certified else ""
        return f"<ProgressiveIndex of {self.count} rows: dim={self.dim}, storage={self.storage!r}{certified}>"

    @property
    def slots(self) -> int:
        """How many slots are in use."""
        return self._exact.slots

    @property
    def visible(self) -> Tensor:
        """The slots (n,) whose rows can be found, in rising order."""
        return self._exact.visible

    @property
    def count(self) -> int:
        """How many rows can be found."""
        return self._exact.count

    @property
    def coded(self) -> bool:
        """Whether there are codes of the rows: whether there were ever enough rows to make them."""
        return self._codes.coder is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use, and of what codes are made with."""
        return self._exact.nbytes + self._codes.nbytes(self.slots)

    @property
    def audit(self) -> Audit:
        """How many queries were also answered by exact search so far, by all versions of the rows."""
        return self._auditor.audit

    def memory(self, slots: int) -> dict[str, int]:
        """Bytes that so many slots need, by what they are for; each thread that searches needs those of a search."""
        parts = self._exact.memory(slots)
        if self._unread is not None:
            unread = self._unread.count * self.dim * STORAGE[self.storage].itemsize
            parts["rows"] -= unread
            parts[FILE] = unread
        codes = self._codes.nbytes(slots)
        if codes:
            parts["codes"] = codes
            parts["a search"] = slots * BOUNDS + hunt.bytes_of_candidates(slots) * TOGETHER
        return parts

    def encode(self, rows: Tensor) -> Columns:
        """Unit rows (n, D) as they are stored."""
        return self._exact.encode(rows)

    def stored(self, rows: Tensor) -> Tensor:
        """What unit rows are read back as once they are put, (n, D) float32."""
        return self._exact.stored(rows)

    def ids(self, slots: Tensor) -> Tensor:
        """The ids (n,) of the rows in these slots."""
        return self._exact.ids(slots)

    def find(self, ids: Sequence[int]) -> list[int]:
        """The slots of the rows under these ids; -1 where no row under it can be found."""
        return self._exact.find(ids)

    def rows(self, slots: Tensor) -> Tensor:
        """The rows in these slots, (n, D) float32."""
        self._bring(slots.numpy())
        return self._exact.rows(slots)

    def state(self, slots: Tensor) -> Columns:
        """The encoded rows in these slots, as ``put`` takes them."""
        self._bring(slots.numpy())
        return self._exact.state(slots)

    def put(self, slots: Tensor, ids: Tensor, columns: Columns, group: Tensor) -> ProgressiveIndex:
        """With encoded rows in these slots (n,), each under its id (n,) and in its group (n,); group 0 is hidden."""
        if self._unread is not None:
            self._unread.forget(slots.numpy())
        exact = self._exact.put(slots, ids, columns, group)
        self._codes.add(exact, slots.numpy())
        return self._with(exact)

    def _bring(self, slots: Array) -> None:
        """Has the rows of these slots (n,) in memory. Whatever looks at rows calls it first."""
        if self._unread is not None:
            self._unread.bring(self._exact, slots)

    def codes(self, slots: Tensor) -> Columns:
        """The codes of the rows in these slots, as ``put_kept`` takes them; nothing if they are better made again."""
        coder = self._codes.coder
        if coder is None or self.storage != "progressive":
            return {}
        if not len(slots) or int(slots.max()) >= SPARSE * len(slots):
            return {}
        return self._codes.kept(coder, slots)

    def put_kept(self, ids: Tensor, columns: Columns, group: Tensor, kept: Kept) -> ProgressiveIndex:
        """``put`` for an index without rows: in the slots that ``codes`` named, without making codes.

        Codes are believed, so whoever has read them from somewhere must know that they are those of these rows. The
        memory of columns and codes becomes that of the index if it is given away. Rows that are not given but stored
        are read when they are needed; all at once if the index keeps rows in a folder.
        """
        slots = kept.codes["slot"]
        unread = None
        if self._exact.blocks.folders:
            exact = self._exact.put(slots, ids, kept.with_rows(columns), group)
        elif kept.rows is not None:
            unread = Unread(kept.rows, slots.numpy())
            exact = self._exact.put_unread(slots, ids, group)
        elif kept.given_away and torch.equal(slots, torch.arange(len(slots))):
            exact = self._exact.put_all(ids, columns, group)
        else:
            exact = self._exact.put(slots, ids, columns, group)
        changed = self._with(exact)
        changed._unread = unread
        changed._codes = _Codes(self.dim)
        codes = kept.codes
        if not kept.given_away:
            codes = {name: column.clone() for name, column in codes.items()}
        changed._codes.restore(codes, changed.slots)
        return changed

    def hide(self, slots: Tensor) -> ProgressiveIndex:
        """With the rows in these slots no longer to be found."""
        return self._with(self._exact.hide(slots))

    def show(self, slots: Tensor, group: Tensor) -> ProgressiveIndex:
        """With the rows in these slots to be found again, each in its group (n,)."""
        return self._with(self._exact.show(slots, group))

    def _with(self, exact: ExactIndex) -> ProgressiveIndex:
        """The same codes for another version of the rows."""
        changed = copy(self)
        changed._exact = exact
        return changed

    def search(self, queries: Tensor, k: int, *, group: int | None = None, exclude: Tensor | None = None) -> Found:
        """The k nearest rows of unit queries (B, D), of one group if given, without the ids in ``exclude`` (B, E)."""
        return self.search_groups(queries, [(k, group)], exclude=exclude)[0]

    def search_groups(self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None) -> list[Found]:
        """What ``search`` finds for each of several numbers of rows and groups; all rows are read once for all."""
        exclude = self._exact.checked_exclude(exclude, len(queries))
        coder = self._codes.coder
        if coder is None or not len(queries):
            return self._exact.search_groups(queries, wanted, exclude=exclude)
        parts = []
        for start in range(0, len(queries), TOGETHER):
            part = slice(start, start + TOGETHER)
            excluded = None
            if exclude is not None:
                excluded = exclude[part].numpy()
            parts.append(self._search_some(coder, queries[part].numpy(), wanted, excluded))
        return [one_after_another(pieces) for pieces in zip(*parts, strict=True)]

    def _search_some(
        self, coder: Coder, queries: Array, wanted: Sequence[Wanted], exclude: Array | None
    ) -> list[Found]:
        """``search_groups`` for as many queries (B, D) as are searched together."""
        precise = queries.astype(numpy.float64)
        answers = self._from_one_pass(coder, precise, wanted, exclude)
        for number in range(len(queries)):
            open_questions = [place for place, answer in enumerate(answers) if not answer.certain[number]]
            if not open_questions:
                continue
            bounds = _Bounds(self._codes, coder, precise[number], self.slots, certified=self.certified)
            for place in open_questions:
                k, group = wanted[place]
                excluded = _excluded_from(exclude, number)
                one = self._nearest(bounds, queries[number], min(k, self.slots), group, excluded)
                for column, value in zip(answers[place].found, one, strict=True):
                    column[number] = value[0]
        found = [answer.found for answer in answers]
        for number in range(len(queries)):
            if self._auditor.is_due():
                self._audit(found, number, queries[number], wanted, _excluded_from(exclude, number))
        return found

    def _from_one_pass(
        self, coder: Coder, queries: Array, wanted: Sequence[Wanted], exclude: Array | None
    ) -> list[_Answers]:
        """What one pass over all codes finds for each thing that is wanted, and for which queries that is certain."""
        spare = 0
        if exclude is not None:
            spare = exclude.shape[1]
        answers: list[_Answers] = []
        searches: dict[int, hunt.Search] = {}
        for number, (k, group) in enumerate(wanted):
            answers.append(_nothing_certain(len(queries), min(k, self.slots)))
            if (k + spare) * MANY <= self._exact.count_of(group) and not self.certified:
                searches[number] = hunt.Search(min(k, self.slots), self._exact.group_code(group), spare)
        path = chosen()
        if not searches or path == "numpy" or len(queries) < SEVERAL:
            return answers
        prepared = coder.prepare_many(queries, self._codes.centers(self.slots), self._codes.longest)
        one_pass = hunt.Pass(path, self._codes.blocks(self.slots), SPAN // LANES, self._exact.groups, self.slots)
        hunted = one_pass.candidates(prepared, list(searches.values()))
        for place, (number, search) in enumerate(searches.items()):
            if self._unread is not None:
                self._bring(hunt.candidates_of(hunted, place))
            answers[number] = _Answers(*hunt.nearest(self._exact, queries, hunted, place, search, exclude))
        return answers

    def _nearest(self, bounds: _Bounds, query: Array, k: int, group: int | None, excluded: Array) -> Found:
        """The k nearest rows of one query (D,)."""
        usable = self._exact.usable(group)
        count = self.slots
        if usable is not None:
            count = int(numpy.count_nonzero(usable))
        wanted = k + len(excluded)
        if wanted * MANY > count:
            everyone = _places(usable, count)
            self._bring(everyone)
            return single.ranked(self._exact, query, everyone, k, excluded)
        reach = self._reach(bounds, query, usable, wanted)
        candidates = bounds.reaching(reach, usable)
        self._bring(candidates)
        return single.ranked(self._exact, query, candidates, k, excluded)

    def _audit(self, found: list[Found], number: int, query: Array, wanted: Sequence[Wanted], excluded: Array) -> None:
        """Notes whether exact search finds the same for one query (D,) of a batch; what it finds is the answer."""
        exclude = torch.from_numpy(excluded[None])
        self._bring(self.visible.numpy())  # no hidden slots: another thread may be writing other rows to them
        exact = self._exact.search_groups(torch.from_numpy(query[None]), wanted, exclude=exclude)
        same = all(torch.equal(ours.ids[number], theirs.ids[0]) for ours, theirs in zip(found, exact, strict=True))
        self._auditor.note(same)
        if not same:
            logger.warning("a progressive search missed a neighbor: %s; certified=True never does", self.audit)
        for ours, theirs in zip(found, exact, strict=True):
            for column, value in zip(ours, theirs, strict=True):
                column[number] = value[0]

    def _reach(self, bounds: _Bounds, query: Array, usable: Array | None, wanted: int) -> float:
        """A similarity that so many rows have: the least exact one of those that seem nearest."""
        near = bounds.highest(max(FIRST, 4 * wanted, self.slots // SHARE), usable)
        tighter = bounds.of_rows(near)
        some = wanted + SPARE
        if len(near) > some:
            near = near[numpy.argpartition(tighter, -some)[-some:]]
        self._bring(near)
        similarity = single.exact(self._exact, near, query.astype(numpy.float64))
        return float(numpy.partition(similarity, -wanted)[-wanted])


class _Answers(NamedTuple):
    """What was found for B queries, and for which of them it is certain."""

    found: Found
    certain: Array  # (B,) bool


def _nothing_certain(queries: int, k: int) -> _Answers:
    """Room for what so many queries find."""
    nobody = torch.full((queries, k), -1)
    found = Found(nobody, nobody.clone(), torch.full((queries, k), -torch.inf, dtype=torch.float64))
    return _Answers(found, numpy.zeros(queries, bool))


def _excluded_from(exclude: Array | None, number: int) -> Array:
    """The ids that are excluded from what one of the queries finds."""
    if exclude is None:
        return single.NOBODY
    excluded: Array = exclude[number]
    return excluded


class Audit(NamedTuple):
    """How many queries were compared with exact search, and for how many of them it found other rows."""

    queries: int = 0
    differing: int = 0


class _Auditor:
    """Chooses queries to be compared with exact search, at even distances, and counts how they fare.

    Args:
        sample: their share of all queries.
    """

    def __init__(self, sample: float) -> None:
        self.audit = Audit()
        self._sample = sample
        self._due = 0.0  # comparisons that are due and not yet made, less than one
        self._lock = Lock()

    def is_due(self) -> bool:
        """Whether the next query is one of them."""
        if not self._sample:
            return False
        with self._lock:
            self._due += self._sample
            if self._due < 1:
                return False
            self._due -= 1
            return True

    def note(self, same: bool) -> None:
        """Counts a comparison."""
        with self._lock:
            self.audit = Audit(self.audit.queries + 1, self.audit.differing + (not same))


class _Bounds:
    """Upper bounds of the similarities of all rows to one query.

    Args:
        codes: of the rows.
        coder: that made them.
        query: (D,) float64.
        slots: in use.
        certified: see ``ProgressiveIndex``.
    """

    def __init__(self, codes: _Codes, coder: Coder, query: Array, slots: int, *, certified: bool) -> None:
        self._codes = codes
        self._certified = certified
        head_and_bits, self._nibbles = coder.prepare(query, codes.centers(slots), certified=certified)
        self._base, self._upper = codes.scan(head_and_bits, slots)

    def highest(self, count: int, usable: Array | None) -> Array:
        """About so many slots with the highest bounds, in rising order: at least half as many, if there are any."""
        step = max(1, len(self._upper) // SAMPLED)
        sample = self._upper[::step]
        if usable is not None:
            sample = sample[usable[::step]]
        rank = -(-count // step)
        slots = single.NOBODY
        while 2 * len(slots) < count:
            if rank >= len(sample):
                return _places(usable, len(self._upper))
            least = numpy.partition(sample, -rank)[-rank]
            slots = _reached(self._upper, least, usable)
            rank *= 2
        return slots

    def of_rows(self, slots: Array) -> Array:
        """Tighter bounds of the rows in these slots (n,), which rise."""
        return self._codes.bounds(self._nibbles, slots, self._base)

    def reaching(self, least: float, usable: Array | None) -> Array:
        """The slots of all rows that can be so similar."""
        slots = _places(usable, len(self._upper))
        if not self._certified:
            slots = _reached(self._upper, least, usable)
        return slots[self.of_rows(slots) >= least]


def _places(usable: Array | None, count: int) -> Array:
    """The slots that may be found, in rising order."""
    if usable is None:
        return numpy.arange(count)
    places: Array = usable.nonzero()[0]
    return places


def _reached(upper: Array, least: float, usable: Array | None) -> Array:
    """The slots that may be found and whose bound (slots,) is not lower."""
    reached = upper >= least
    if usable is not None:
        reached &= usable
    slots: Array = reached.nonzero()[0]
    return slots


class _Codes:
    """The codes of all rows that were ever put, shared by all versions of the rows.

    A slot's codes are written when its row is: nobody reads it then.

    Args:
        dim: length of a row.
    """

    def __init__(self, dim: int) -> None:
        self.coder: Coder | None = None
        self.longest = 0.0  # of all codes, see ``Coded``
        self._dim = dim
        self._slots = 0  # that any version has had
        padded = padded_length(dim)
        tile: dict[str, Kind] = {
            "head": ((HEAD // 2, LANES, 2), torch.int8),
            "bits": ((number_of_signs(dim) // 32, LANES), torch.uint32),
            "weights": ((3, LANES), torch.float32),
        }
        row: dict[str, Kind] = {"nibbles": ((padded // 2,), torch.uint8), "factors": ((2,), torch.float32)}
        self._rows = Blocks(row, torch.device("cpu"))
        self._tiles = Blocks(tile, torch.device("cpu"), block=self._rows.block // LANES)  # of the same rows
        self._centers: Array = numpy.zeros((0, padded))  # with room for more
        self._spans = 0
        self._sum: Array = numpy.zeros(padded)  # of the tails in the newest span
        self._summed = 0
        self._memory = local()  # bounds, one pair for each thread, which is written again by every search

    def nbytes(self, slots: int) -> int:
        """Bytes of the codes of so many slots, and of what they are made with, once there are enough rows."""
        if self.coder is None and (slots < LEAST or self._dim > WIDEST):
            return 0
        tiles = -(-slots // LANES)
        centers = (-(-slots // SPAN) + 1) * self._sum.nbytes  # and the sum from which the next is made
        codes = tiles * self._tiles.slot_bytes + slots * self._rows.slot_bytes
        return codes + centers + bytes_of_coder(self._dim)

    def add(self, exact: ExactIndex, slots: Array) -> None:
        """Encodes the rows in these slots (n,), or all rows once there are enough of them."""
        self._slots = max(self._slots, exact.slots)
        if self.coder is not None:
            self._write(self.coder, exact, slots)
        elif exact.count >= LEAST and self._dim <= WIDEST:
            coder = self._fitted(exact)
            self._write(coder, exact, numpy.arange(self._slots))
            self.coder = coder  # from now on, searches read codes

    def _fitted(self, exact: ExactIndex) -> Coder:
        """A coder for rows such as these; their mean tail is to be the first center."""
        visible = exact.visible
        places = torch.linspace(0, len(visible) - 1, min(SAMPLE, len(visible)), dtype=torch.float64).long()
        sample = exact.rows(visible[places]).numpy().astype(numpy.float64)
        coder = Coder.fitted(sample)
        _, tails = coder.split(sample)
        self._sum = tails.sum(0)
        self._summed = len(tails)
        self._spans = 0
        return coder

    def _write(self, coder: Coder, exact: ExactIndex, slots: Array) -> None:
        """Encodes the rows in these slots (n,), span by span: each takes its center from the one before."""
        if not len(slots):
            return
        slots = numpy.sort(slots)
        last = int(slots[-1])
        self._tiles.reserve(last // LANES + 1)
        self._rows.reserve(last + 1)
        for span in range(int(slots[0]) // SPAN, last // SPAN + 1):
            start, end = numpy.searchsorted(slots, [span * SPAN, (span + 1) * SPAN])
            for piece in range(start, end, ENCODED):
                self._open(span)
                self._encode(coder, exact, slots[piece : min(piece + ENCODED, end)], span)

    def _open(self, span: int) -> None:
        """Gives centers to spans up to this one: the mean tail of the one before each, for good."""
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
        """Writes the codes of the rows in these slots (n,) of a span."""
        rows = decode(exact.blocks.read(slots, *exact.encoded)).astype(numpy.float64)
        with numpy.errstate(all="ignore"):  # slots that were never written hold anything
            coded = coder.encode(rows, self._centers[span])
        self.longest = max(self.longest, coded.longest)
        if span == self._spans - 1:
            # What is hidden may never have been written.
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
        """Writes the codes of one row, without lists of places."""
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
        """The codes of the rows in these slots, by slot, and what they were made with: (rows, columns) each.

        Of other slots there are zeros: their rows were deleted, or never written, and are nobody's business.
        """
        used = int(slots.max()) + 1
        tiles = -(-used // LANES)
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
            columns[PART + name] = torch.from_numpy(part.copy())
        return columns

    def restore(self, columns: Columns, slots: int) -> None:
        """Takes what ``kept`` gave of rows in so many slots."""
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
        self.coder = Coder({name: columns[PART + name].numpy() for name in shapes_of_parts(self._dim)})

    def centers(self, slots: int) -> Array:
        """The centers (spans, padded) of so many slots."""
        return self._centers[: -(-slots // SPAN)]

    def blocks(self, slots: int) -> list[hunt.Block]:
        """The codes of so many slots, block by block."""
        tiles = -(-slots // LANES)
        return list(hunt.blocks_of(self._tiles.arrays(), self._rows.arrays(), self._tiles.block, tiles))

    def scan(self, query: HeadAndBits, slots: int) -> tuple[Array, Array]:
        """What each row is known to reach without its tail, and its upper bound (slots,); overwritten by the next."""
        tiles = -(-slots // LANES)
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
        """Tighter bounds (n,) of the rows in these slots (n,), which rise, from what ``scan`` wrote."""
        upper = numpy.empty(len(slots), numpy.float32)
        path = chosen()
        size = self._rows.block
        arrays = self._rows.arrays()
        for block, first in enumerate(range(0, len(base), size)):
            start, end = numpy.searchsorted(slots, [first, first + size])
            codes = {name: parts[block] for name, parts in arrays.items()}
            bound_rows(path, codes, slots[start:end], first, query, base, upper[start:end])
        return upper

    def _room(self, slots: int) -> tuple[Array, Array]:
        """Memory for two float32 numbers a slot, this thread's own."""
        if getattr(self._memory, "size", 0) < slots:
            self._memory.base = numpy.empty(2 * slots, numpy.float32)
            self._memory.upper = numpy.empty(2 * slots, numpy.float32)
            self._memory.size = 2 * slots  # last: memory may run out before
        base: Array = self._memory.base
        upper: Array = self._memory.upper
        return base[:slots], upper[:slots]
