"""ProgressiveIndex: a few bits of every row tell which rows are worth reading more bits of, or scoring exactly."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from copy import copy
from threading import Lock
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.index import hunt, single
from adanpc.index.codes import Coder
from adanpc.index.counting import ceil_div
from adanpc.index.exact import ExactIndex
from adanpc.index.grid import STORAGE, Array, Columns
from adanpc.index.kernels import chosen
from adanpc.index.protocol import AHEAD, FILE, Found, Kept, Wanted, one_after_another
from adanpc.index.row_codes import RowCodes
from adanpc.index.unread import Unread

logger = logging.getLogger("adanpc")

# To find what the k-th nearest must reach, four bits are read of the rows with the highest bounds:
LEAST_REREAD = 1024  # of at least this many rows,
REREAD_PER_WANTED = 4  # of at least this many for each wanted one,
REREAD_ONE_IN = 400  # and of at least one row in this many
SAMPLED_BOUNDS = 16384  # sampled bounds, from which a bound that a given number of rows reach is estimated
SPARE_SCORED = 14  # rows scored beyond the wanted number to find what the k-th nearest must reach
SEARCH_BYTES_PER_SLOT = 16  # bytes that a search may write for each slot: two bounds, and the slot if both reach
LEAST_TOGETHER = 5  # at least this many queries share a pass over four bits of each row: fewer are faster one by one
MOST_TOGETHER = 64  # at most this many queries share such a pass
ROWS_PER_WANTED = 8  # with fewer rows than this for each wanted one, every row is scored
SPARSE_SLOTS_PER_ROW = 2  # with this many slots per row or more, codes are not kept: making them again takes less room


class ProgressiveIndex:
    """An ``ExactIndex`` with 16 bits per coordinate, and codes that tell which of its rows to score.

    A search reads 64 bytes and 1,024 signs of every row to get an upper bound on its similarity. For the rows with the
    highest bounds, it reads four bits per coordinate and scores the best of them exactly, which tells what the k-th
    nearest row must reach. All rows whose bound reaches that get a tighter bound from four bits per coordinate, and
    those whose tighter bound still reaches it are scored exactly. The result is that of an ``ExactIndex``, except that
    one of the k rows is missed with a probability below 2e-6 for each query with k = 50; see docs/architecture.md. The
    number of rows that are read affects only the time, never the result.

    Codes are made once there are 16,384 rows; until then, every row is read. ``codes`` returns the codes so that they
    can be kept in a file, and ``put_kept`` restores them. The coder is fitted once, to the rows present at that time:
    if later rows are different, their bounds are looser.

    Args:
        dim: length of a row.
        storage: how the rows are stored, see ``MemoryBank``.
        device: only the CPU is supported.
        certified: if true, no row is ever missed, at two to four times the cost: the four bits of every row are read,
            and the bounds always hold.
        folder: if given, rows are stored in a temporary file in this folder, which disappears with the process, and
            only the codes are in memory.
        sample: the share of queries that are also answered by exact search, which takes the time to read every row.
            ``audit`` tells how many of them had a different result; such a result is corrected.
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
        self._exact = ExactIndex(dim, storage, device, folder=folder, coarse=False)
        self._codes = RowCodes(dim)
        self._auditor = _Auditor(require.between("sample", sample, 0, 1))
        self._unread: Unread | None = None  # the rows that are still in a file, if any

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
        """Whether the rows have codes, that is, whether there were ever enough rows to make them."""
        return self._codes.coder is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use, of their codes and of the coder."""
        return self._exact.nbytes + self._codes.nbytes(self.slots)

    @property
    def audit(self) -> Audit:
        """How many queries were compared with exact search so far, in all versions of the index."""
        return self._auditor.audit

    def memory(self, slots: int) -> dict[str, int]:
        """Returns the bytes that this many slots need, by purpose; each searching thread needs those of "a search"."""
        parts = self._exact.memory(slots)
        if self._unread is not None:
            unread = self._unread.count * self.dim * STORAGE[self.storage].itemsize
            parts["rows"] -= unread
            parts[FILE] = unread
            parts["what is known of them"] = self._unread.nbytes
        codes = self._codes.nbytes(slots)
        if codes:
            parts["codes"] = codes
            ahead = parts.get(AHEAD, 0) + self._codes.bytes_ahead(slots)
            if ahead:
                parts[AHEAD] = ahead
            parts["a search"] = slots * SEARCH_BYTES_PER_SLOT + hunt.bytes_of_candidates(slots) * MOST_TOGETHER
        return parts

    def encode(self, rows: Tensor) -> Columns:
        """Returns unit rows (n, D) as they are stored."""
        return self._exact.encode(rows)

    def stored(self, rows: Tensor) -> Tensor:
        """Returns the rows (n, D) float32 that would be read back if these unit rows were stored."""
        return self._exact.stored(rows)

    def ids(self, slots: Tensor) -> Tensor:
        """Returns the ids (n,) of the rows in these slots."""
        return self._exact.ids(slots)

    def find(self, ids: Sequence[int]) -> list[int]:
        """Returns the slots of the rows with these ids; -1 for a row that is hidden or not there."""
        return self._exact.find(ids)

    def rows(self, slots: Tensor) -> Tensor:
        """Returns the rows in these slots, (n, D) float32."""
        self._bring(slots.numpy())
        return self._exact.rows(slots)

    def state(self, slots: Tensor) -> Columns:
        """Returns the encoded rows in these slots, as ``put`` takes them."""
        self._bring(slots.numpy())
        return self._exact.state(slots)

    def put(self, slots: Tensor, ids: Tensor, columns: Columns, group: Tensor) -> ProgressiveIndex:
        """Returns the index with rows added; see ``Index.put``."""
        if self._unread is not None:
            self._unread.forget(slots.numpy())
        exact = self._exact.put(slots, ids, columns, group)
        self._codes.add(exact, slots.numpy())
        return self._with(exact)

    def _bring(self, slots: Array) -> None:
        """Loads the rows of these slots (n,) into memory if necessary; must be called before rows are read."""
        if self._unread is not None:
            self._unread.bring(self._exact, slots)

    def codes(self, slots: Tensor) -> Columns:
        """Returns the codes of the rows in these slots, as ``put_kept`` takes them; empty if not worth keeping."""
        coder = self._codes.coder
        if coder is None or self.storage != "progressive":
            return {}
        if not len(slots) or int(slots.max()) >= SPARSE_SLOTS_PER_ROW * len(slots):
            return {}
        return self._codes.kept(coder, slots)

    def put_kept(self, ids: Tensor, columns: Columns, group: Tensor, kept: Kept) -> ProgressiveIndex:
        """Returns the index with rows added in the slots that ``codes`` returned, without making codes; see ``put``.

        The index must have no rows yet. The codes are not checked, so the caller must be sure that they belong to these
        rows. The index takes over the memory of columns and codes if ``kept.given_away`` is true, and copies them
        otherwise. If ``kept.rows`` is given, rows are read from there when they are needed, or all at once if the index
        keeps its rows in a folder.
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
        changed._codes = RowCodes(self.dim)
        codes = kept.codes
        if not kept.given_away:
            codes = {name: column.clone() for name, column in codes.items()}
        changed._codes.restore(codes, changed.slots)
        return changed

    def hide(self, slots: Tensor) -> ProgressiveIndex:
        """Returns the index with the rows in these slots (n,) hidden."""
        return self._with(self._exact.hide(slots))

    def show(self, slots: Tensor, group: Tensor) -> ProgressiveIndex:
        """Returns the index with the rows in these slots (n,) no longer hidden, each in its group (n,)."""
        return self._with(self._exact.show(slots, group))

    def _with(self, exact: ExactIndex) -> ProgressiveIndex:
        """Returns the index with another version of the rows and the same codes."""
        changed = copy(self)
        changed._exact = exact
        return changed

    def search(self, queries: Tensor, k: int, *, group: int | None = None, exclude: Tensor | None = None) -> Found:
        """Returns the k rows nearest to each query; see ``Index.search``."""
        return self.search_groups(queries, [(k, group)], exclude=exclude)[0]

    def search_groups(self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None) -> list[Found]:
        """Returns the result of ``search`` for each pair of a number of rows and a group; see ``Index``."""
        exclude = self._exact.checked_exclude(exclude, len(queries))
        coder = self._codes.coder
        if coder is None or not len(queries):
            return self._exact.search_groups(queries, wanted, exclude=exclude)
        parts = []
        for start in range(0, len(queries), MOST_TOGETHER):
            part = slice(start, start + MOST_TOGETHER)
            excluded = None
            if exclude is not None:
                excluded = exclude[part].numpy()
            parts.append(self._search_some(coder, queries[part].numpy(), wanted, excluded))
        return [one_after_another(pieces) for pieces in zip(*parts, strict=True)]

    def _search_some(
        self, coder: Coder, queries: Array, wanted: Sequence[Wanted], exclude: Array | None
    ) -> list[Found]:
        """``search_groups`` for at most ``TOGETHER`` queries (B, D)."""
        precise = queries.astype(numpy.float64)
        if len(queries) < LEAST_TOGETHER or chosen() == "numpy":
            ones = []
            for number, query in enumerate(precise):
                ones.append(self._one_by_one(coder, query, wanted, _excluded_from(exclude, number)))
            found = [one_after_another(parts) for parts in zip(*ones, strict=True)]
        else:
            found = self._together(coder, precise, wanted, exclude)
        for number in range(len(queries)):
            if self._auditor.is_due():
                self._audit(found, number, queries[number], wanted, _excluded_from(exclude, number))
        return found

    def _one_by_one(self, coder: Coder, query: Array, wanted: Sequence[Wanted], excluded: Array) -> list[Found]:
        """``search_groups`` for one query (D,) float64."""
        bounds = _Bounds(self._codes, coder, query, self.slots, certified=self.certified)
        return [self._nearest(bounds, query, min(k, self.slots), group, excluded) for k, group in wanted]

    def _together(self, coder: Coder, queries: Array, wanted: Sequence[Wanted], exclude: Array | None) -> list[Found]:
        """``search_groups`` for several queries (B, D) float64, by one pass as far as that settles them."""
        answers = self._from_one_pass(coder, queries, wanted, exclude)
        for number, query in enumerate(queries):
            open_questions = [pair for pair, answer in enumerate(answers) if not answer.certain[number]]
            if not open_questions:
                continue
            asked = [wanted[pair] for pair in open_questions]
            ones = self._one_by_one(coder, query, asked, _excluded_from(exclude, number))
            for pair, one in zip(open_questions, ones, strict=True):
                for column, value in zip(answers[pair].found, one, strict=True):
                    column[number] = value[0]
        return [answer.found for answer in answers]

    def _from_one_pass(
        self, coder: Coder, queries: Array, wanted: Sequence[Wanted], exclude: Array | None
    ) -> list[_Answers]:
        """Returns what one pass over all codes finds for each pair in ``wanted``, and which queries that settles.

        If a pass is not worthwhile, it settles none of them.
        """
        spare = 0
        if exclude is not None:
            spare = exclude.shape[1]
        answers: list[_Answers] = []
        searches: dict[int, hunt.Search] = {}  # by the position of the pair in ``wanted``
        for pair, (k, group) in enumerate(wanted):
            answers.append(_nothing_certain(len(queries), min(k, self.slots)))
            if (k + spare) * ROWS_PER_WANTED <= self._exact.count_of(group) and not self.certified:
                searches[pair] = hunt.Search(min(k, self.slots), self._exact.group_code(group), spare)
        if not searches:
            return answers
        prepared = coder.prepare_many(queries, self._codes.centers(self.slots), self._codes.longest)
        one_pass = self._codes.one_pass(self._exact.groups, self.slots)
        hunted = one_pass.candidates(prepared, list(searches.values()))
        for number, (pair, search) in enumerate(searches.items()):
            if self._unread is not None:
                self._bring(hunt.candidates_of(hunted, number))
            found, certain = hunt.nearest(self._exact, queries, hunted, number, search, exclude)
            answers[pair] = _Answers(found, certain)
        return answers

    def _nearest(self, bounds: _Bounds, query: Array, k: int, group: int | None, excluded: Array) -> Found:
        """Returns the k rows nearest to one query (D,)."""
        usable = self._exact.usable(group)
        count = self.slots
        if usable is not None:
            count = int(numpy.count_nonzero(usable))
        wanted = k + len(excluded)
        if wanted * ROWS_PER_WANTED > count:
            everyone = _places(usable, count)
            self._bring(everyone)
            return single.ranked(self._exact, query, everyone, k, excluded)
        reach = self._reach(bounds, query, usable, wanted)
        candidates = bounds.reaching(reach, usable)
        self._bring(candidates)
        return single.ranked(self._exact, query, candidates, k, excluded)

    def _audit(self, found: list[Found], number: int, query: Array, wanted: Sequence[Wanted], excluded: Array) -> None:
        """Compares the result of one query (D,) of a batch with exact search, whose result replaces it in ``found``."""
        exclude = torch.from_numpy(excluded[None])
        # Only visible slots: a slot whose row was removed may be reused for another row while this thread reads.
        self._bring(self.visible.numpy())
        exact = self._exact.search_groups(torch.from_numpy(query[None]), wanted, exclude=exclude)
        same = all(torch.equal(ours.ids[number], theirs.ids[0]) for ours, theirs in zip(found, exact, strict=True))
        self._auditor.note(same)
        if not same:
            logger.warning("a progressive search missed a neighbor: %s; certified=True never does", self.audit)
        for ours, theirs in zip(found, exact, strict=True):
            for column, value in zip(ours, theirs, strict=True):
                column[number] = value[0]

    def _reach(self, bounds: _Bounds, query: Array, usable: Array | None, wanted: int) -> float:
        """Returns a similarity that at least ``wanted`` rows reach, from exact scores of the rows that seem nearest."""
        reread = max(LEAST_REREAD, REREAD_PER_WANTED * wanted, self.slots // REREAD_ONE_IN)
        near = bounds.highest(reread, usable)
        tighter = bounds.of_rows(near)
        some = wanted + SPARE_SCORED
        if len(near) > some:
            near = near[numpy.argpartition(tighter, -some)[-some:]]
        self._bring(near)
        similarity = single.exact(self._exact, near, query)
        return float(numpy.partition(similarity, -wanted)[-wanted])


class _Answers(NamedTuple):
    """The results of B queries, and for which of them the result is certain."""

    found: Found
    certain: Array  # (B,) bool


def _nothing_certain(queries: int, k: int) -> _Answers:
    """Returns empty results for this many queries, none of them certain."""
    nobody = torch.full((queries, k), -1)
    found = Found(nobody, nobody.clone(), torch.full((queries, k), -torch.inf, dtype=torch.float64))
    return _Answers(found, numpy.zeros(queries, bool))


def _excluded_from(exclude: Array | None, number: int) -> Array:
    """Returns the ids (E,) that are excluded from the result of one of the queries."""
    if exclude is None:
        return single.NOBODY
    excluded: Array = exclude[number]
    return excluded


class Audit(NamedTuple):
    """How many queries were compared with exact search, and for how many of them exact search found other rows."""

    queries: int = 0
    differing: int = 0


class _Auditor:
    """Chooses evenly spaced queries for comparison with exact search, and counts the results.

    Args:
        sample: the share of queries that are compared.
    """

    def __init__(self, sample: float) -> None:
        self.audit = Audit()
        self._sample = sample
        self._due = 0.0  # the fraction of a comparison that is due
        self._lock = Lock()

    def is_due(self) -> bool:
        """Returns whether the next query is to be compared."""
        if not self._sample:
            return False
        with self._lock:
            self._due += self._sample
            if self._due < 1:
                return False
            self._due -= 1
            return True

    def note(self, same: bool) -> None:
        """Counts a comparison, and whether exact search found the same."""
        with self._lock:
            self.audit = Audit(self.audit.queries + 1, self.audit.differing + (not same))


class _Bounds:
    """Upper bounds on the similarities of all rows to one query.

    Args:
        codes: the codes of the rows.
        coder: the coder that made them.
        query: (D,) float64.
        slots: how many slots are in use.
        certified: see ``ProgressiveIndex``.
    """

    def __init__(self, codes: RowCodes, coder: Coder, query: Array, slots: int, *, certified: bool) -> None:
        self._codes = codes
        self._certified = certified
        head_and_bits, self._nibbles = coder.prepare(query, codes.centers(slots), certified=certified)
        self._base, self._upper = codes.scan(head_and_bits, slots)

    def highest(self, count: int, usable: Array | None) -> Array:
        """Returns about ``count`` slots with the highest bounds, in rising order: at least half as many if possible."""
        step = max(1, len(self._upper) // SAMPLED_BOUNDS)
        sample = self._upper[::step]
        if usable is not None:
            sample = sample[usable[::step]]
        rank_in_sample = ceil_div(count, step)
        slots = single.NOBODY
        # The value to reach comes from a sample. If too few rows reach it, a lower one is tried.
        while 2 * len(slots) < count:
            if rank_in_sample >= len(sample):
                return _places(usable, len(self._upper))
            least = numpy.partition(sample, -rank_in_sample)[-rank_in_sample]
            slots = _reached(self._upper, least, usable)
            rank_in_sample *= 2
        return slots

    def of_rows(self, slots: Array) -> Array:
        """Returns tighter bounds (n,) on the rows in these slots (n,), which must be in rising order."""
        return self._codes.bounds(self._nibbles, slots, self._base)

    def reaching(self, least: float, usable: Array | None) -> Array:
        """Returns the slots of all rows whose similarity may reach ``least``."""
        first_least = least
        if self._certified:
            first_least = -numpy.inf  # what a scan tells does not hold for certain
        return self._codes.reaching(self._nibbles, self._base, self._upper, usable, first_least, least)


def _places(usable: Array | None, count: int) -> Array:
    """Returns the slots that may be found, in rising order."""
    if usable is None:
        return numpy.arange(count)
    places: Array = usable.nonzero()[0]
    return places


def _reached(upper: Array, least: float, usable: Array | None) -> Array:
    """Returns the slots that may be found and whose upper bound (slots,) reaches ``least``."""
    reached = upper >= least
    if usable is not None:
        reached &= usable
    slots: Array = reached.nonzero()[0]
    return slots
