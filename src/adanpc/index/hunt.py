"""The candidates of many queries in one pass over the codes of all rows, which they share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from adanpc.index import single
from adanpc.index.grid import Array
from adanpc.index.kernels import SIDE, Codes, Hunt, Queries, hunt_tiles
from adanpc.index.protocol import Found

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex

STRIDE = 16  # of tiles, one is looked at for a first guess at the floor
CAUTION = 4 / 3  # the middle of a row's bounds, less two standard deviations: rarely more than it reaches
CROWD = 256  # candidates beyond four for each row that is wanted from which on equal ones are sought among them
ROOM = 4096  # candidates of a query that there is room for, at least
SHARE = 64  # and one in so many slots

Block = tuple[Codes, int, int]  # codes of whole tiles, how many, and the number of the first


class Search(NamedTuple):
    """One of the things that are wanted of every query."""

    k: int
    group: int  # as ``kernels.Hunt`` has it
    spare: int  # rows beyond k that may turn out to be excluded


class Pass(NamedTuple):
    """What all queries of a search have in common.

    The floor of a search is a guess, from what rows probably reach. If the k-th exact similarity of the candidates is
    not below it, then no row that was left out can be nearer; otherwise the guess was wrong, and nothing is said.

    Queries are shared among as many threads as torch uses. Those run kernels only, which need neither Python's lock nor
    the threads of torch or BLAS.
    """

    path: str  # of the kernels
    blocks: list[Block]
    span: int  # tiles that share a center
    groups: Array  # of the slots, (n,) uint8
    slots: int  # in use

    def candidates(self, queries: Queries, searches: list[Search]) -> Hunt:
        """All rows that reach the floor, for each query and each thing that is wanted of it."""
        count = len(queries.numbers)
        guess = _hunt(count, [(rank_in_sample(search), search.group) for search in searches], 1)
        self._go_through(queries, guess, STRIDE)
        hunt = _hunt(count, [(search.k + search.spare, search.group) for search in searches], room(self.slots))
        hunt.floor[:] = guess.floor
        self._go_through(queries, hunt, 1)
        return hunt

    def _go_through(self, queries: Queries, hunt: Hunt, stride: int) -> None:
        sides = len(queries.nibbles)
        threads = min(torch.get_num_threads(), sides)
        if threads == 1:
            self._in_this_thread(queries, hunt, stride)
            return
        size = -(-sides // threads)
        with ThreadPoolExecutor(threads) as pool:
            works = [
                pool.submit(self._in_this_thread, *_shared(queries, hunt, start, start + size), stride)
                for start in range(0, sides, size)
            ]
        for work in works:
            work.result()

    def _in_this_thread(self, queries: Queries, hunt: Hunt, stride: int) -> None:
        for codes, tiles, first in self.blocks:
            hunt_tiles(
                self.path, codes, tiles, first, self.span, self.groups, self.slots, queries, hunt,
                stride=stride, caution=CAUTION,
            )  # fmt: skip


def _shared(queries: Queries, hunt: Hunt, start: int, end: int) -> tuple[Queries, Hunt]:
    """The queries of some sides, and what is known of their searches: views, which are altered in place."""
    some = slice(start * SIDE, end * SIDE)
    theirs = Queries(queries.nibbles[start:end], queries.heads[start:end], queries.centers[some], queries.numbers[some])
    return theirs, Hunt(hunt.wanted, *[column[some] for column in hunt[1:]])


def room(slots: int) -> int:
    """How many candidates there is room for."""
    return ROOM + slots // SHARE


def bytes_of_candidates(slots: int) -> int:
    """Bytes of the room for the candidates of one query."""
    return room(slots) * 12


def rank_in_sample(search: Search) -> int:
    """The rank, among the best of the sampled rows, of what is rarely above the k-th best of all."""
    return 2 * -(-(search.k + search.spare) // STRIDE) + 4


def _hunt(queries: int, wanted: list[tuple[int, int]], room: int) -> Hunt:
    """A hunt that has not begun."""
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
    """The slots (n,) of all candidates of one search, of all queries."""
    counts = hunt.counts[:, number]
    listed = numpy.arange(hunt.slots.shape[2]) < counts[:, None]
    slots: Array = hunt.slots[:, number][listed]
    return slots


def nearest(
    index: ExactIndex, queries: Array, hunt: Hunt, number: int, search: Search, exclude: Array | None
) -> tuple[Found, Array]:
    """The k best of the candidates of one search of all queries (B, D), and for which of them (B,) that is certain."""
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
    """The k best of the slots (B, n) that are listed (B, n), by exact similarity, ties to the lowest id."""
    owners = listed.nonzero()[0]
    slots = near[listed]
    ids = index.blocks.read(slots, "id")["id"]
    if exclude is not None:
        allowed = ~(ids[:, None] == exclude[owners]).any(1)
        owners = owners[allowed]
        slots = slots[allowed]
        ids = ids[allowed]
    similarity = single.scores(index, slots, owners, queries)
    order = numpy.lexsort((ids, -similarity, owners))
    owners = owners[order]
    rank = numpy.arange(len(owners)) - numpy.searchsorted(owners, owners)
    kept = rank < k
    places = (owners[kept], rank[kept])
    columns = (slots[order][kept], ids[order][kept], similarity[order][kept])
    shape = (len(queries), k)
    made = (numpy.full(shape, -1), numpy.full(shape, -1), numpy.full(shape, -numpy.inf))
    for target, column in zip(made, columns, strict=True):
        target[places] = column
    return Found(*[torch.from_numpy(column) for column in made])


def blocks_of(tiles: dict[str, list[Array]], rows: dict[str, list[Array]], size: int, count: int) -> Iterator[Block]:
    """The blocks of so many tiles, each but the last of this size."""
    for number, first in enumerate(range(0, count, size)):
        codes = Codes(
            tiles["head"][number],
            tiles["weights"][number],
            rows["nibbles"][number],
            rows["factors"][number],
        )
        yield codes, min(size, count - first), first
