"""Upper bounds of similarities from codes of rows: in C where it was built, else in NumPy, to the same bit.

Sums are of whole numbers, which have no order; what is made of them is float32, one IEEE operation after another. So
every path gives the same bounds, and a search the same candidates.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy

from adanpc import require

Array = numpy.ndarray[Any, Any]
LANES = 16  # rows of a tile, whose codes stand side by side
SIDE = 8  # queries that are multiplied with a tile side by side
PLANES = 4  # bits of a query's coordinate beside the single bit of a row
PLANE_WEIGHTS = (1, 2, 4, -8)  # of those bits, in two's complement
PIECE = 64  # tiles, or rows, that NumPy looks at together: what the cache holds
LARGEST_WHOLE = 127 * 256  # of a query's coordinate beside int8 rows
LONGEST_SQUARES = 1 << 13  # coordinates of features that ``unit_rows`` takes: their squares fit into 53 bits
LONGEST = 1 << 16  # coordinates of int8 rows whose products are sure to fit into 32 bits
NO_STEPS = numpy.zeros(0)
VARIABLE = "ADANPC_KERNELS"  # names the path to take

COMPILED = "adanpc.index._kernels"  # the extension in C
_compiled: Any = import_module(COMPILED) if find_spec(COMPILED) else None


def paths(compiled: Any = _compiled) -> list[str]:
    """The names of the paths that run on this machine, the fastest first."""
    if compiled is None:
        return ["numpy"]
    return [*compiled.paths(), "numpy"]


FASTEST = paths()[0]


def chosen() -> str:
    """The path that searches take: the fastest, or the one that the environment names."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return FASTEST
    return require.one_of(VARIABLE, wanted, paths())


class HeadAndBits(NamedTuple):
    """A query as the scan of all tiles reads it."""

    head: Array  # (pairs, 2) int16
    bits: Array  # (words, PLANES) uint32
    centers: Array  # (spans,) float32: what the center of each span of tiles contributes, with the slack of it all
    head_step: float  # what one unit of a head's sum stands for
    head_slack: float  # how much the rounding of heads may hide, as a multiple of a row's scale
    bit_step: float  # what one unit of a sum of bits stands for
    bit_shift: float  # the sum over bits that are not set
    spread: float  # variance of what a row's bits leave out
    rounding: float  # variance of the rounding of the query
    sigmas: float  # standard deviations in the bound


class Nibbles(NamedTuple):
    """A query as bounds of single rows read it: each coordinate is 256 * high + low."""

    high: Array  # (2, width) int8
    low: Array  # (2, width) int8
    step: float  # what one unit of a sum stands for
    shift: float  # the middle of a nibble's range, over all coordinates
    spread: float  # how much a row's nibbles may leave out
    rounding: float  # how much the rounding of the query may hide, as a multiple of a row's weight


def scan_tiles(
    path: str, codes: dict[str, Array], tiles: int, first: int, span: int, query: HeadAndBits, base: Array, upper: Array
) -> None:
    """Writes, for each row of whole tiles, what it is known to reach without its tail, and an upper bound.

    Args:
        path: one of ``paths()``.
        codes: of a block of tiles: head (n, pairs, LANES, 2) int8, bits (n, words, LANES) uint32 and
            weights (n, 3, LANES) float32.
        tiles: how many of them.
        first: number of the first tile of the block among all.
        span: tiles that share a center.
        query: what is compared with them.
        base: (tiles * LANES,) float32, written.
        upper: (tiles * LANES,) float32, written.
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
    # Products of such whole numbers are added up without rounding: in float64 for heads, in float32 for bits.
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
    with numpy.errstate(all="ignore"):  # slots that were never written hold anything
        known = scale * (heads.astype(numpy.float32) * head_step + head_slack) + centers
        estimate = tail * (tails * bit_step - bit_shift)
        variance = (left_out * left_out) * spread + (tail * tail) * rounding
        bound = (known + estimate) + numpy.sqrt(variance) * sigmas
    base[:] = known.reshape(-1)
    upper[:] = bound.reshape(-1)


def bound_rows(
    path: str, codes: dict[str, Array], slots: Array, first: int, query: Nibbles, base: Array, upper: Array
) -> None:
    """Writes upper bounds of the rows in these slots, tighter than those of a scan.

    Args:
        path: one of ``paths()``.
        codes: of a block of rows: nibbles (n, width) uint8 and factors (n, 2) float32.
        slots: (m,) int64, of rows in the block.
        first: the first slot of the block.
        query: what is compared with them.
        base: of all slots, as ``scan_tiles`` wrote it.
        upper: (m,) float32, written.
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
    whole = 256.0 * query.high + query.low  # float64 adds up such numbers without rounding
    nibbles = codes["nibbles"]
    sums = numpy.vecdot(nibbles & 15, whole[0]) + numpy.vecdot(nibbles >> 4, whole[1])  # which wakes no threads
    weight = codes["factors"][:, 0]
    left_out = codes["factors"][:, 1]
    step, shift, spread, rounding = map(numpy.float32, query[2:])
    with numpy.errstate(all="ignore"):  # slots that were never written hold anything
        estimate = weight * (sums.astype(numpy.float32) * step - shift)
        width = left_out * spread + weight * rounding
        upper: Array = (base + estimate) + width
    return upper


class Codes(NamedTuple):
    """The codes of a block of tiles that ``hunt_tiles`` reads; see ``scan_tiles`` and ``bound_rows``."""

    head: Array
    weights: Array
    nibbles: Array
    factors: Array


class Queries(NamedTuple):
    """B queries, as ``hunt_tiles`` takes them: a coordinate has one byte, and SIDE queries stand side by side."""

    nibbles: Array  # (sides, width / 4, SIDE, 2, 4) int8: what is beside low nibbles, then beside high ones
    heads: Array  # (sides, pairs, SIDE, 2) int16
    centers: Array  # (B, spans) float32
    numbers: Array  # (B, 6) float32: head_step, head_slack, step, shift, spread, and rounding and slack together


class Hunt(NamedTuple):
    """What is known of the searches of B queries for W things each, altered from block to block."""

    wanted: Array  # (W, 2) int64: how many rows, and of which group; 0 for all that are not hidden, -1 for all
    best: Array  # (B, W, K) float32: heaps of what rows probably reach, the least first; -inf where there are fewer
    floor: Array  # (B, W) float32: rows that cannot reach it are left out
    counts: Array  # (B, W) int64: how many candidates there are; -1 if more than there is room for
    slots: Array  # (B, W, room) int64: of the candidates
    upper: Array  # (B, W, room) float32: their bounds


def side_by_side(queries: Array) -> Array:
    """Queries (B, n, …) as (sides, n, SIDE, …), zeros where there is none."""
    count = len(queries)
    sides = -(-count // SIDE)
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

    Bounds are of head and nibbles, as in ``bound_rows``, but of a query in one byte a coordinate, and of all rows: many
    queries share what is read. What a row probably reaches lies below its upper bound by ``caution`` halves of its
    range; the k-th highest of that becomes the floor. Whether it was too high is for the caller to find out. There is
    no NumPy for this: ``scan_tiles`` and ``bound_rows`` lead to the same answers, query by query.

    Args:
        path: one of ``paths()`` but for numpy.
        codes: of the block.
        tiles: how many of them.
        first: number of the first tile of the block among all.
        span: tiles that share a center.
        groups: of all slots, (n,) uint8.
        slots: in use; others are not looked at.
        queries: what is compared with the codes.
        hunt: altered.
        stride: more than 1 to look at one of so many tiles alone, and to note no candidates: for a guess at the floor.
        caution: see above.
    """
    width = codes.nibbles.shape[1]
    _compiled.hunt_tiles(
        path, stride > 1, *codes, tiles, first, span, stride, groups, slots, *queries, len(queries.numbers), width,
        caution, *hunt, hunt.slots.shape[2],
    )  # fmt: skip


def score_rows(path: str, blocks: list[Array], size: int, slots: Array, owners: Array, queries: Array) -> Array:
    """The exact similarities (n,) float64 of rows on the grid and queries.

    Args:
        path: one of ``paths()`` but for numpy, which needs no kernel for it.
        blocks: of rows (m, D), float16 or float32.
        size: rows of every block but the last.
        slots: (n,) int64, of rows.
        owners: (n,) int64, the query that each is compared with.
        queries: (B, D) float64.
    """
    slots = numpy.ascontiguousarray(slots, numpy.int64)
    owners = numpy.ascontiguousarray(owners, numpy.int64)
    similarity = numpy.empty(len(slots))
    _compiled.score_rows(path, blocks, size, queries.shape[1], blocks[0].itemsize, slots, owners, queries, similarity)
    return similarity


def have_direction(path: str, features: Array) -> bool:
    """Whether all features (n, D) float32 are finite and have a coordinate that is neither zero nor denormal.

    Args:
        path: one of ``paths()`` but for numpy, where ``grid.check_features`` does it.
        features: to be checked.
    """
    directed: bool = _compiled.have_direction(path, numpy.ascontiguousarray(features), features.shape[1])
    return directed


def unit_rows(path: str, features: Array) -> Array | None:
    """Features (n, D) float32 at length one on the grid, as ``grid.unit`` makes them; None if some are not finite.

    Args:
        path: one of ``paths()`` but for numpy, where ``grid.unit`` does it.
        features: of at most ``LONGEST_SQUARES`` coordinates.
    """
    made = numpy.empty(features.shape, numpy.float32)
    if not _compiled.unit_rows(path, numpy.ascontiguousarray(features), features.shape[1], made):
        return None
    return made


class ByteQueries(NamedTuple):
    """B queries as int8 rows are multiplied with them: a coordinate is step * (256 * high + low)."""

    parts: Array  # (B, 2, D) int8: high, then low
    steps: Array  # (B,) float64

    @classmethod
    def of(cls, queries: Array) -> ByteQueries:
        """Queries (B, D), rounded to such coordinates."""
        exact = queries.astype(numpy.float64)
        largest = numpy.abs(exact).max(1)
        steps = numpy.maximum(largest, 2.0**-48) / LARGEST_WHOLE
        whole = numpy.rint(exact / steps[:, None])
        high = numpy.floor((whole + 128) / 256)
        low = whole - 256 * high
        parts = numpy.stack([high, low], axis=1).astype(numpy.int8)
        return cls(parts, steps)

    def read(self) -> Array:
        """The queries (B, D) float64 that these parts stand for."""
        whole = 256.0 * self.parts[:, 0] + self.parts[:, 1]
        queries: Array = whole * self.steps[:, None]
        return queries


def multiply_rows(path: str, rows: Array, queries: Array | ByteQueries, out: Array) -> None:
    """Writes the products of a block of rows and a few queries; rows are read once for two queries.

    Products with int8 rows are exact up to one final rounding, and equal to the bit on every path. Other products are
    float32 sums in an order that depends on the path; no term is rounded more than ``roundings(dim)`` times.

    Args:
        path: one of ``paths()`` but for numpy, which needs no kernel for it.
        rows: (tiles * 64, D) float32, float16 or int8.
        queries: (B, D) float32, or ``ByteQueries`` beside int8 rows of at most ``LONGEST`` coordinates.
        out: (tiles, B, 64) float32, written.
    """
    parts = queries
    steps = NO_STEPS
    if isinstance(queries, ByteQueries):
        parts = queries.parts
        steps = queries.steps
    tiles, count, _ = out.shape
    _compiled.multiply_rows(path, rows, rows.itemsize, tiles, rows.shape[1], count, parts, steps, out)


def roundings(dim: int) -> int:
    """How often a number is rounded at most while ``multiply_rows`` adds up products of so many coordinates.

    There are eight sums, or sixteen, of which each takes every eighth product: one rounding of the product and dim / 8
    of the sum. Adding up the sums takes seven more, and at most seven products are left over at the end.
    """
    return dim // 8 + 16


class Frame(NamedTuple):
    """By what rows are turned before they are encoded, float64; a rotation is dense or two rounds of small ones."""

    directions: Array  # (HEAD, D)
    scales: Array  # (HEAD,)
    dense: Array  # (padded, padded), or empty
    signs: Array  # (2, padded), or empty
    lefts: Array  # (2, padded / 64, padded / 64), or empty
    rights: Array  # (2, 64, 64), or empty


class Encoded(NamedTuple):
    """The codes of n rows, as ``codes.Coded`` has them."""

    head: Array  # (n, HEAD) int8
    bits: Array  # (n, words) uint32
    weights: Array  # (n, 3) float32
    nibbles: Array  # (n, width) uint8
    factors: Array  # (n, 2) float32
    lengths: Array  # (n,) float64: of F times the nibbles


def split_rows(path: str, rows: Array, frame: Frame, padded: int) -> tuple[Array, Array]:
    """The heads (n, HEAD) of rows (n, D) and their turned tails (n, padded), all float64; in this thread alone.

    Args:
        path: one of ``paths()`` but for numpy, where ``codes.Coder`` does it.
        rows: to be split.
        frame: by what they are turned.
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
    """The codes and turned tails (n, padded) of rows (n, D) float64, as ``codes.Coder.encode`` makes them.

    Sums are rounded in another order than NumPy rounds them.

    Args:
        path: one of ``paths()`` but for numpy, where ``codes.Coder`` does it.
        rows: to be encoded.
        frame: by what they are turned.
        center: (padded,) that is subtracted from their tails.
        signs: how many signs of a tail there are.
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
