"""Finds the candidates of many queries in one shared pass over the codes of all rows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor

from adanpc.index import single
from adanpc.index.counting import ceil_div
from adanpc.index.grid import Array
from adanpc.index.kernels import SIDE, Codes, Hunt, Queries, hunt_tiles
from adanpc.index.protocol import Found

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex

STRIDE = 16  # one tile in this many is read for a first guess at the floor
CAUTION = 4 / 3  # the middle of a row's bounds, less two standard deviations: rarely more than the row reaches
CROWD = 256  # with more candidates than this beyond four per wanted row, surplus copies of equal rows are left out
ROOM = 4096  # a search has room for this many candidates, plus one for every SLOTS_PER_CANDIDATE slots
SLOTS_PER_CANDIDATE = 64

Block = tuple[Codes, int, int]  # codes of whole tiles, how many, and the number of the first


class Search(NamedTuple):
    """One search that is made for every query."""

    k: int
    group: int  # as in ``kernels.Hunt.wanted``
    spare: int  # rows to find beyond k, because they may turn out to be excluded


class Pass(NamedTuple):
    """A pass over all codes: everything that does not depend on the queries.

    The floor of a search is a guess, based on what rows probably reach. If the k-th exact similarity of the candidates
    is not below the floor, no row that was left out can be nearer. Otherwise the guess was too high, and the result is
    not certain.

    Queries are divided among as many threads as torch uses. These threads run only kernels, which need neither Python's
    lock nor the threads of torch or BLAS.
    """

    path: str  # which kernels to run, see ``kernels.paths``
    blocks: list[Block]
    span: int  # tiles that share a center
    groups: Array  # (n,) uint8: the groups of the slots
    slots: int  # how many slots are in use

    def candidates(self, queries: Queries, searches: list[Search]) -> Hunt:
        """Returns all rows whose bound reaches the floor, for each query and each search."""
        count = len(queries.numbers)
        guess = _hunt(count, [(rank_in_sample(search), search.group) for search in searches], 1)
        self._go_through(queries, guess, STRIDE)
        hunt = _hunt(count, [(search.k + search.spare, search.group) for search in searches], room(self.slots))
        hunt.floor[:] = guess.floor
        self._go_through(queries, hunt, 1)
        return hunt

    def _go_through(self, queries: Queries, hunt: Hunt, stride: int) -> None:
        """Reads all blocks, or one tile in ``stride``, with the queries divided among threads."""
        sides = len(queries.nibbles)
        threads = min(torch.get_num_threads(), sides)
        if threads == 1:
            self._in_this_thread(queries, hunt, stride)
            return
        size = ceil_div(sides, threads)
        with ThreadPoolExecutor(threads) as pool:
            works = [
                pool.submit(self._in_this_thread, *_shared(queries, hunt, start, start + size), stride)
                for start in range(0, sides, size)
            ]
        # An error in one of the threads is raised here.
        for work in works:
            work.result()

    def _in_this_thread(self, queries: Queries, hunt: Hunt, stride: int) -> None:
        """``_go_through`` in a single thread."""
        for codes, tiles, first in self.blocks:
            hunt_tiles(
                self.path, codes, tiles, first, self.span, self.groups, self.slots, queries, hunt,
                stride=stride, caution=CAUTION,
            )  # fmt: skip


def _shared(queries: Queries, hunt: Hunt, start: int, end: int) -> tuple[Queries, Hunt]:
    """Returns the queries of some sides and the state of their searches, as views that are changed in place."""
    some = slice(start * SIDE, end * SIDE)
    theirs = Queries(queries.nibbles[start:end], queries.heads[start:end], queries.centers[some], queries.numbers[some])
    return theirs, Hunt(hunt.wanted, *[column[some] for column in hunt[1:]])


def room(slots: int) -> int:
    """Returns how many candidates there is room for in each search."""
    return ROOM + slots // SLOTS_PER_CANDIDATE


def bytes_of_candidates(slots: int) -> int:
    """Returns the bytes of the room for the candidates of one query."""
    return room(slots) * 12


def rank_in_sample(search: Search) -> int:
    """Returns a rank among the sampled rows whose value is rarely above the k-th best of all rows."""
    expected = ceil_div(search.k + search.spare, STRIDE)
    return 2 * expected + 4


def _hunt(queries: int, wanted: list[tuple[int, int]], room: int) -> Hunt:
    """Returns the state of a hunt that has not begun."""
    shape = (queries, len(wanted))
    most = max(k for k, _ in wanted)
    return Hunt(
        wanted=numpy.array(wanted, numpy.int64),
        best=numpy.full((*shape, most), -numpy.inf, numpy.float32),
        floor=numpy.full(shape, -numpy.inf, numpy.float32),
        counts=numpy.zeros(shape, numpy.int64),
        slots=numpy.empty((*shape, room), numpy.int64),
        upper=numpy.empty((*shape, room), numpy.float32),
    )


def candidates_of(hunt: Hunt, number: int) -> Array:
    """Returns the slots (n,) of all candidates of one search, for all queries together."""
    counts = hunt.counts[:, number]
    listed = numpy.arange(hunt.slots.shape[2]) < counts[:, None]
    slots: Array = hunt.slots[:, number][listed]
    return slots


def nearest(
    index: ExactIndex, queries: Array, hunt: Hunt, number: int, search: Search, exclude: Array | None
) -> tuple[Found, Array]:
    """Returns the k best candidates of one search for queries (B, D), and for which queries (B,) they are certain."""
    counts = numpy.maximum(hunt.counts[:, number], 0)
    listed = numpy.arange(max(counts.max(), 1)) < counts[:, None]
    crowded = counts > 4 * (search.k + search.spare) + CROWD
    slots = hunt.slots[:, number, : listed.shape[1]]
    found = _best(index, queries, slots, listed & ~crowded[:, None], search.k, exclude)
    for query in crowded.nonzero()[0]:
        excluded = single.NOBODY
        if exclude is not None:
            excluded = exclude[query]
        one = single.ranked(index, queries[query], slots[query, : counts[query]], search.k, excluded)
        for column, value in zip(found, one, strict=True):
            column[query] = value[0]
    last = found.similarity.numpy()[:, -1]
    certain = (hunt.counts[:, number] >= 0) & (last >= hunt.floor[:, number])
    return found, certain


def _best(index: ExactIndex, queries: Array, near: Array, listed: Array, k: int, exclude: Array | None) -> Found:
    """Returns the k best of the slots (B, n) that are listed (B, n), by exact similarity, ties to the lowest id."""
    owners = listed.nonzero()[0]
    slots = near[listed]
    ids = numpy.full(listed.shape, -1)
    ids[listed] = index.blocks.read(slots, "id")["id"]
    similarity = numpy.full(listed.shape, -numpy.inf)  # of those that cannot be found
    similarity[listed] = single.scores(index, slots, owners, queries)
    if exclude is not None:
        for excluded in exclude.T:
            similarity[ids == excluded[:, None]] = -numpy.inf
    order = numpy.lexsort((ids, -similarity))[:, :k]
    best = numpy.take_along_axis(similarity, order, 1)
    missing = best == -numpy.inf
    slots_of_best = numpy.take_along_axis(near, order, 1)
    ids_of_best = numpy.take_along_axis(ids, order, 1)
    slots_of_best[missing] = -1
    ids_of_best[missing] = -1
    return Found(_padded(slots_of_best, k, -1), _padded(ids_of_best, k, -1), _padded(best, k, -numpy.inf))


def _padded(values: Array, k: int, missing: float) -> Tensor:
    """Returns values (B, n) in k columns, as a tensor."""
    short = k - values.shape[1]
    if short:
        values = numpy.pad(values, ((0, 0), (0, short)), constant_values=missing)
    return torch.from_numpy(values)


def blocks_of(tiles: dict[str, list[Array]], rows: dict[str, list[Array]], size: int, count: int) -> Iterator[Block]:
    """Yields the blocks of the first ``count`` tiles, all but the last of ``size`` tiles."""
    for number, first in enumerate(range(0, count, size)):
        codes = Codes(
            tiles["head"][number],
            tiles["weights"][number],
            rows["nibbles"][number],
            rows["factors"][number],
        )
        yield codes, min(size, count - first), first
