"""Upper bounds on similarities from the codes of rows: in C if the extension was built, otherwise in NumPy.

All sums are of whole numbers, so their order does not matter, and everything computed from them is float32, in the same
sequence of IEEE operations. So every path computes the same bounds, to the bit, and a search gets the same candidates.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy

from adanpc import require
from adanpc.index.counting import ceil_div

Array = numpy.ndarray[Any, Any]
LANES = 16  # rows in a tile, whose codes are interleaved
SIDE = 8  # queries that are interleaved and multiplied by a tile together
PLANES = 4  # bits of a query's coordinate that is multiplied by a single bit of a row
PLANE_WEIGHTS = (1, 2, 4, -8)  # weights of those bits, in two's complement
PIECE = 64  # tiles, or rows, that NumPy processes at once, few enough to stay in the cache
LARGEST_WHOLE = 127 * 256  # the largest whole number in a query that is multiplied by int8 rows
LONGEST_SQUARES = 1 << 13  # the longest features that ``unit_rows`` takes: the sum of their squares fits into 53 bits
LONGEST = 1 << 16  # the longest int8 rows whose products are sure to fit into 32 bits
NO_STEPS = numpy.zeros(0)
VARIABLE = "ADANPC_KERNELS"  # the environment variable that selects a path
WANTED = os.environ.get(VARIABLE)  # read once: looking into the environment takes longer than many a calculation

COMPILED = "adanpc.index._kernels"  # the extension in C
_compiled: Any = import_module(COMPILED) if find_spec(COMPILED) else None


def paths(compiled: Any = _compiled) -> list[str]:
    """Returns the names of the paths that run on this machine, fastest first."""
    if compiled is None:
        return ["numpy"]
    return [*compiled.paths(), "numpy"]


FASTEST = paths()[0]


def chosen() -> str:
    """Returns the path that searches take: the one named in the environment, or else the fastest."""
    if not WANTED:
        return FASTEST
    return require.one_of(VARIABLE, WANTED, paths())


class HeadAndBits(NamedTuple):
    """A query in the form that ``scan_tiles`` takes."""

    head: Array  # (pairs, 2) int16
    bits: Array  # (words, PLANES) uint32
    centers: Array  # (spans,) float32: what the center of each span of tiles contributes, plus slack for all rounding
    head_step: float  # the value of one unit of a sum over heads
    head_slack: float  # how much rounding of heads may hide, as a multiple of a row's scale
    bit_step: float  # the value of one unit of a sum over bits
    bit_shift: float  # what is subtracted because bits that are not set count as -1
    spread: float  # variance of what a row's bits leave out
    rounding: float  # variance of the query's rounding
    sigmas: float  # standard deviations in the bound


class Nibbles(NamedTuple):
    """A query in the form that ``bound_rows`` takes: each coordinate is 256 * high + low."""

    high: Array  # (2, width) int8
    low: Array  # (2, width) int8
    step: float  # the value of one unit of a sum
    shift: float  # the contribution of the middle of a nibble's range, summed over all coordinates
    spread: float  # how much a row's nibbles may leave out
    rounding: float  # how much the query's rounding may hide, as a multiple of a row's weight


def scan_tiles(
    path: str, codes: dict[str, Array], tiles: int, first: int, span: int, query: HeadAndBits, base: Array, upper: Array
) -> None:
    """Writes, for each row of whole tiles, what it is known to reach without its tail, and an upper bound.

    Args:
        path: one of ``paths()``.
        codes: the codes of a block of tiles: head (n, pairs, LANES, 2) int8, bits (n, words, LANES) uint32 and
            weights (n, 3, LANES) float32.
        tiles: how many tiles of the block to read.
        first: the number of the block's first tile among all tiles.
        span: how many tiles share a center.
        query: the query to compare with the codes.
        base: (tiles * LANES,) float32, overwritten with what each row is known to reach without its tail.
        upper: (tiles * LANES,) float32, overwritten with the upper bounds.
    """
    if path == "numpy":
        for start in range(0, tiles, PIECE):
            part = slice(start, min(start + PIECE, tiles))
            rows = slice(part.start * LANES, part.stop * LANES)
            some = {name: code[part] for name, code in codes.items()}
            spans = numpy.arange(first + part.start, first + part.stop) // span
            _scan_tiles(some, query, query.centers[spans, None], base[rows], upper[rows])
        return
    _compiled.scan_tiles(
        path, codes["head"], codes["bits"], codes["weights"], tiles, first, query.head, query.bits, query.centers, span,
        query[3:], base, upper,
    )  # fmt: skip


def _scan_tiles(codes: dict[str, Array], query: HeadAndBits, centers: Array, base: Array, upper: Array) -> None:
    """``scan_tiles`` for a few tiles, in NumPy."""
    # These whole numbers are small enough to be summed without rounding: in float64 for heads, in float32 for bits.
    heads = numpy.zeros((len(codes["head"]), LANES))
    for side in range(2):
        numbers = codes["head"][..., side].astype(numpy.float64)  # (tiles, pairs, LANES)
        heads += query.head[:, side].astype(numpy.float64) @ numbers
    tails = numpy.zeros((len(codes["bits"]), LANES), numpy.float32)
    every_word = numpy.ones(len(query.bits), numpy.float32)
    for plane, weight in enumerate(PLANE_WEIGHTS):
        common = numpy.bitwise_count(codes["bits"] & query.bits[:, plane, None])
        tails += weight * (every_word @ common.astype(numpy.float32))
    scale = codes["weights"][:, 0]
    tail = codes["weights"][:, 1]
    left_out = codes["weights"][:, 2]
    head_step, head_slack, bit_step, bit_shift, spread, rounding, sigmas = map(numpy.float32, query[3:])
    with numpy.errstate(all="ignore"):  # slots that were never written hold arbitrary values
        known = scale * (heads.astype(numpy.float32) * head_step + head_slack) + centers
        estimate = tail * (tails * bit_step - bit_shift)
        variance = (left_out * left_out) * spread + (tail * tail) * rounding
        bound = (known + estimate) + numpy.sqrt(variance) * sigmas
    base[:] = known.reshape(-1)
    upper[:] = bound.reshape(-1)


def bound_rows(
    path: str, codes: dict[str, Array], slots: Array, first: int, query: Nibbles, base: Array, upper: Array
) -> None:
    """Writes upper bounds on the rows in these slots, tighter than those of a scan.

    Args:
        path: one of ``paths()``.
        codes: the codes of a block of rows: nibbles (n, width) uint8 and factors (n, 2) float32.
        slots: (m,) int64, the slots of rows in the block.
        first: the first slot of the block.
        query: the query to compare with the codes.
        base: for all slots, what ``scan_tiles`` wrote.
        upper: (m,) float32, overwritten with the bounds.
    """
    if path == "numpy":
        for start in range(0, len(slots), PIECE):
            part = slots[start : start + PIECE]
            some = {name: code[part - first] for name, code in codes.items()}
            upper[start : start + PIECE] = _bound_rows(some, query, base[part])
        return
    _compiled.bound_rows(
        path, codes["nibbles"], codes["factors"], slots, first, query.high, query.low, base, query[2:], upper
    )


def _bound_rows(codes: dict[str, Array], query: Nibbles, base: Array) -> Array:
    """``bound_rows`` for a few rows, in NumPy."""
    whole = 256.0 * query.high + query.low  # float64 sums these numbers without rounding
    nibbles = codes["nibbles"]
    sums = numpy.vecdot(nibbles & 15, whole[0]) + numpy.vecdot(nibbles >> 4, whole[1])  # vecdot wakes no threads
    weight = codes["factors"][:, 0]
    left_out = codes["factors"][:, 1]
    step, shift, spread, rounding = map(numpy.float32, query[2:])
    with numpy.errstate(all="ignore"):  # slots that were never written hold arbitrary values
        estimate = weight * (sums.astype(numpy.float32) * step - shift)
        width = left_out * spread + weight * rounding
        upper: Array = (base + estimate) + width
    return upper


def reach_rows(
    path: str,
    codes: dict[str, Array],
    first: int,
    rows: int,
    query: Nibbles,
    base: Array,
    upper: Array,
    usable: Array,
    first_least: float,
    least: float,
) -> Array:
    """Returns the slots (n,) of rows whose bounds reach two similarities: that of a scan, and then a tighter one.

    Args:
        path: one of ``paths()``.
        codes: the codes of a block of rows; see ``bound_rows``.
        first: the first slot of the block.
        rows: how many rows of the block to look at.
        query: the query to compare with the codes.
        base: for all slots, what ``scan_tiles`` wrote.
        upper: for all slots, the upper bounds that ``scan_tiles`` wrote.
        usable: for all slots, bool, whether it may be found; empty if every one may.
        first_least: what the bound of a scan must reach.
        least: what the tighter bound must reach.
    """
    if path == "numpy":
        reaching = upper[first : first + rows] >= first_least
        if len(usable):
            reaching &= usable[first : first + rows]
        slots: Array = reaching.nonzero()[0] + first
        tighter = numpy.empty(len(slots), numpy.float32)
        bound_rows(path, codes, slots, first, query, base, tighter)
        return slots[tighter >= least]
    found = numpy.empty(rows, numpy.int64)
    count = _compiled.reach_rows(
        path, codes["nibbles"], codes["factors"], first, rows, query.high, query.low, base, query[2:], upper, usable,
        first_least, least, found,
    )  # fmt: skip
    return found[:count]


class Codes(NamedTuple):
    """The codes of a block of tiles in the form that ``hunt_tiles`` takes; see ``scan_tiles`` and ``bound_rows``."""

    head: Array
    weights: Array
    nibbles: Array
    factors: Array


class Queries(NamedTuple):
    """B queries in the form that ``hunt_tiles`` takes: one byte per coordinate, and SIDE queries interleaved."""

    nibbles: Array  # (sides, width / 4, SIDE, 2, 4) int8: factors of the low nibbles, then of the high ones
    heads: Array  # (sides, pairs, SIDE, 2) int16
    centers: Array  # (B, spans) float32
    numbers: Array  # (B, 6) float32: head_step, head_slack, step, shift, spread, and rounding and slack together


class Hunt(NamedTuple):
    """The state of W searches for each of B queries, updated block by block."""

    wanted: Array  # (W, 2) int64: how many rows to find, and in which group; 0 for all rows not hidden, -1 for all rows
    best: Array  # (B, W, K) float32: heaps of what rows probably reach, least first; -inf where there are fewer
    floor: Array  # (B, W) float32: rows that cannot reach it are left out
    counts: Array  # (B, W) int64: the number of candidates; -1 if there are more than there is room for
    slots: Array  # (B, W, room) int64: the slots of the candidates
    upper: Array  # (B, W, room) float32: their upper bounds


def side_by_side(queries: Array) -> Array:
    """Returns queries (B, n, …) interleaved as (sides, n, SIDE, …), padded with zeros."""
    count = len(queries)
    sides = ceil_div(count, SIDE)
    padded = numpy.zeros((sides * SIDE, *queries.shape[1:]), queries.dtype)
    padded[:count] = queries
    grouped = padded.reshape(sides, SIDE, *queries.shape[1:])
    return numpy.ascontiguousarray(grouped.swapaxes(1, 2))


def hunt_tiles(
    path: str,
    codes: Codes,
    tiles: int,
    first: int,
    span: int,
    groups: Array,
    slots: int,
    queries: Queries,
    hunt: Hunt,
    *,
    stride: int,
    caution: float,
) -> None:
    """Finds all rows of a block of tiles whose bound reaches the floor of a search, and raises the floor as it goes.

    As in ``bound_rows``, bounds come from heads and nibbles, but queries have one byte per coordinate, and all rows are
    bounded, because many queries share what is read. What a row probably reaches lies below its upper bound by
    ``caution`` halves of its range; the k-th highest of these values becomes the floor. The caller must find out
    whether the floor was too high. There is no NumPy version of this: ``scan_tiles`` and ``bound_rows`` lead to the
    same results, query by query.

    Args:
        path: one of ``paths()``, except numpy.
        codes: the codes of the block.
        tiles: how many tiles of the block to read.
        first: the number of the block's first tile among all tiles.
        span: how many tiles share a center.
        groups: (n,) uint8, the groups of all slots.
        slots: how many slots are in use; others are not read.
        queries: the queries to compare with the codes.
        hunt: the state of the searches, changed in place.
        stride: if more than 1, only one tile in this many is read and no candidates are recorded, to guess the floor.
        caution: see above.
    """
    width = codes.nibbles.shape[1]
    _compiled.hunt_tiles(
        path, stride > 1, *codes, tiles, first, span, stride, groups, slots, *queries, len(queries.numbers), width,
        caution, *hunt, hunt.slots.shape[2],
    )  # fmt: skip


class Rows(NamedTuple):
    """The rows of an index, in the form that ``nearest_rows`` takes."""

    lists: list[list[Array]]  # blocks of rows (m, D), of ids (m,), and of bytes if there are any; see ``nearest_rows``
    size: int  # how many rows each block has, a multiple of 64; a single one may have fewer
    slots: int  # how many slots are in use


def score_rows(path: str, blocks: list[Array], size: int, slots: Array, owners: Array, queries: Array) -> Array:
    """Returns the exact similarities (n,) float64 of rows on the grid to their queries.

    Args:
        path: one of ``paths()``, except numpy, which needs no kernel for this.
        blocks: the rows in blocks (m, D), float16 or float32.
        size: how many rows each block has, except the last.
        slots: (n,) int64, the slots of the rows.
        owners: (n,) int64, for each row the number of the query to compare it with.
        queries: (B, D) float64.
    """
    slots = numpy.ascontiguousarray(slots, numpy.int64)
    owners = numpy.ascontiguousarray(owners, numpy.int64)
    similarity = numpy.empty(len(slots))
    _compiled.score_rows(path, blocks, size, queries.shape[1], blocks[0].itemsize, slots, owners, queries, similarity)
    return similarity


class Nearest(NamedTuple):
    """The rows nearest to B queries, as W searches found them; missing ones have -1 and -inf."""

    slots: Array  # (B, W, K) int64
    ids: Array  # (B, W, K) int64
    similarity: Array  # (B, W, K) float64
    settled: Array  # (B,) bool, whether the rest holds for the query: there were not too many candidates
    all_settled: bool


def nearest_rows(
    path: str, rows: Rows, queries: Array, wanted: list[tuple[int, int]], groups: Array, *, crowd: int, slack: float
) -> Nearest:
    """Returns the rows nearest to each query, in order.

    Bounds on the similarities of all rows come from their bytes, if there are any, read once for eight queries. If
    these leave too many candidates, or if there are none, they come from float32 products of the rows themselves,
    except for int8 rows. Rows that may be among the k best are scored exactly. If there are still too many candidates,
    the query is not settled: then copies of equal rows should be left out first.

    Args:
        path: one of ``paths()``, except numpy.
        rows: the rows on the grid, in float16 or float32, with their ids. Bytes are those of ``coarse_rows``: lists of
            blocks of bytes (m, D), scales (m, 1) and residuals (m, 1). Of int8 rows, these are the first byte, and the
            second one is given as the row.
        queries: (B, D) float32.
        wanted: how many rows to find, at least 1, and in which group; 0 for all rows that are not hidden.
        groups: (n,) uint8, the groups of the slots; empty if all rows may be found.
        crowd: the most candidates, at least as many as are wanted.
        slack: by how much the difference of two products may be off.
    """
    queries = numpy.ascontiguousarray(queries)
    count, dim = queries.shape
    most = max(k for k, _ in wanted)
    shape = (count, len(wanted), most)
    slots = numpy.empty(shape, numpy.int64)
    ids = numpy.empty(shape, numpy.int64)
    similarity = numpy.empty(shape)
    settled = numpy.empty(count, bool)
    width = rows.lists[0][0].itemsize
    settled_ones = _compiled.nearest_rows(
        path, rows.lists, rows.size, dim, width, rows.slots, queries, groups, numpy.array(wanted, numpy.int64), most,
        crowd, slack, slots, ids, similarity, settled,
    )  # fmt: skip
    return Nearest(slots, ids, similarity, settled, settled_ones == count)


def coarse_rows(path: str, rows: Array) -> tuple[Array, Array, Array]:
    """Returns a byte for each coordinate, with scales (n, 1) and residuals (n, 1), as by ``grid.coarse``.

    Sums are added up, and so rounded, in another order than in NumPy.

    Args:
        path: one of ``paths()``, except numpy.
        rows: (n, D) float32.
    """
    rows = numpy.ascontiguousarray(rows)
    count, dim = rows.shape
    whole = numpy.empty((count, dim), numpy.int8)
    scales = numpy.empty((count, 1), numpy.float32)
    residuals = numpy.empty((count, 1), numpy.float32)
    _compiled.coarse_rows(path, rows, dim, whole, scales, residuals)
    return whole, scales, residuals


def have_direction(path: str, features: Array) -> bool:
    """Returns whether all features are finite and have a coordinate that is neither zero nor denormal.

    Args:
        path: one of ``paths()``, except numpy, for which ``grid.check_features`` does this.
        features: (n, D) float32.
    """
    directed: bool = _compiled.have_direction(path, numpy.ascontiguousarray(features), features.shape[1])
    return directed


def unit_rows(path: str, features: Array) -> Array | None:
    """Returns features scaled to length one on the grid, as by ``grid.unit``; None if some are not finite.

    Args:
        path: one of ``paths()``, except numpy, for which ``grid.unit`` does this.
        features: (n, D) float32, with D at most ``LONGEST_SQUARES``.
    """
    made = numpy.empty(features.shape, numpy.float32)
    if not _compiled.unit_rows(path, numpy.ascontiguousarray(features), features.shape[1], made):
        return None
    return made


class ByteQueries(NamedTuple):
    """B queries in the form by which int8 rows are multiplied: a coordinate is step * (256 * high + low)."""

    parts: Array  # (B, 2, D) int8: high, then low
    steps: Array  # (B,) float64

    @classmethod
    def of(cls, queries: Array) -> ByteQueries:
        """Returns queries (B, D) rounded to such coordinates."""
        exact = queries.astype(numpy.float64)
        largest = numpy.abs(exact).max(1)
        steps = numpy.maximum(largest, 2.0**-48) / LARGEST_WHOLE
        whole = numpy.rint(exact / steps[:, None])
        high = numpy.floor((whole + 128) / 256)
        low = whole - 256 * high
        parts = numpy.stack([high, low], axis=1).astype(numpy.int8)
        return cls(parts, steps)

    def read(self) -> Array:
        """Returns the queries (B, D) float64 that these parts represent."""
        whole = 256.0 * self.parts[:, 0] + self.parts[:, 1]
        queries: Array = whole * self.steps[:, None]
        return queries


def multiply_rows(path: str, rows: Array, queries: Array | ByteQueries, out: Array) -> None:
    """Writes the products of a block of rows and a few queries; each row is read once for every two queries.

    Products with int8 rows are exact up to one final rounding, and equal to the bit on every path. Other products are
    float32 sums in an order that depends on the path; no term is rounded more than ``roundings(dim)`` times.

    Args:
        path: one of ``paths()``, except numpy, which needs no kernel for this.
        rows: (tiles * 64, D) float32, float16 or int8.
        queries: (B, D) float32, or ``ByteQueries`` for int8 rows, with D at most ``LONGEST``.
        out: (tiles, B, 64) float32, overwritten with the products.
    """
    parts = queries
    steps = NO_STEPS
    if isinstance(queries, ByteQueries):
        parts = queries.parts
        steps = queries.steps
    tiles, count, _ = out.shape
    _compiled.multiply_rows(path, rows, rows.itemsize, tiles, rows.shape[1], count, parts, steps, out)


def roundings(dim: int) -> int:
    """Returns how often ``multiply_rows`` rounds a term at most, for rows of this length.

    There are eight partial sums, or sixteen, and each takes every eighth product: one rounding of the product and
    dim / 8 of the sum. Adding up the partial sums takes seven more, and at most seven products are left over at the
    end.
    """
    return dim // 8 + 16


class Frame(NamedTuple):
    """The float64 matrices that transform rows before encoding; the rotation is dense or two rounds of small ones."""

    directions: Array  # (HEAD, D)
    scales: Array  # (HEAD,)
    dense: Array  # (padded, padded), or empty
    signs: Array  # (2, padded), or empty
    lefts: Array  # (2, padded / 64, padded / 64), or empty
    rights: Array  # (2, 64, 64), or empty


class Encoded(NamedTuple):
    """The codes of n rows, as in ``codes.Coded``."""

    head: Array  # (n, HEAD) int8
    bits: Array  # (n, words) uint32
    weights: Array  # (n, 3) float32
    nibbles: Array  # (n, width) uint8
    factors: Array  # (n, 2) float32
    lengths: Array  # (n,) float64: the length of F times the nibbles


def split_rows(path: str, rows: Array, frame: Frame, padded: int) -> tuple[Array, Array]:
    """Returns the heads (n, HEAD) of rows and their turned tails (n, padded), all float64, using only this thread.

    Args:
        path: one of ``paths()``, except numpy, for which ``codes.Coder`` does this.
        rows: (n, D) float64.
        frame: the matrices that split and turn the rows.
        padded: length of a tail.
    """
    count, dim = rows.shape
    heads = numpy.empty((count, len(frame.scales)))
    tails = numpy.empty((count, padded))
    _compiled.split_rows(path, dim, padded, rows, *frame, heads, tails)
    return heads, tails


def encode_rows(
    path: str, rows: Array, frame: Frame, center: Array, signs: int, nibble_step: float, useful: float
) -> tuple[Encoded, Array]:
    """Returns the codes and turned tails (n, padded) of rows, as by ``codes.Coder.encode``.

    Sums are added up, and so rounded, in another order than in NumPy.

    Args:
        path: one of ``paths()``, except numpy, for which ``codes.Coder`` does this.
        rows: (n, D) float64.
        frame: the matrices that split and turn the rows.
        center: (padded,) what to subtract from the turned tails.
        signs: how many signs of a tail to store.
        nibble_step: see ``codes.NIBBLE_STEP``.
        useful: see ``codes.USEFUL``.
    """
    count, dim = rows.shape
    padded = len(center)
    made = Encoded(
        numpy.empty((count, len(frame.scales)), numpy.int8),
        numpy.empty((count, signs // 32), numpy.uint32),
        numpy.empty((count, 3), numpy.float32),
        numpy.empty((count, padded // 2), numpy.uint8),
        numpy.empty((count, 2), numpy.float32),
        numpy.empty(count),
    )
    heads = numpy.empty((count, len(frame.scales)))
    tails = numpy.empty((count, padded))
    _compiled.encode_rows(
        path, dim, padded, rows, *frame, heads, tails, center, signs, nibble_step, useful, *made
    )  # fmt: skip
    return made, tails
