"""Short codes of rows, and what they tell about similarities: the arithmetic of a progressive search.

A row x is split by directions V that were fitted once. Its head Vx is stored in one byte per direction. Its tail, which
is what remains of x, is turned by a random rotation and stored twice: as signs, and in four bits per coordinate. For a
code y of a turned tail z, with F = |z|² / ⟨y, z⟩, the estimate of ⟨z, q⟩ is F⟨y, q⟩. The code leaves out z - Fy, which
has length G and is orthogonal to z. So the product of z - Fy and q is G|q| times a coordinate of a random unit vector:
its standard deviation is G|q| / √(D - 1), it exceeds 6 standard deviations with a probability below exp(-18), and it is
never more than G|q|.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt
from typing import NamedTuple

import numpy

from adanpc.index.counting import rounded_up
from adanpc.index.grid import ROUNDED_UP, Array
from adanpc.index.kernels import (
    PLANES,
    Frame,
    HeadAndBits,
    Nibbles,
    Queries,
    chosen,
    encode_rows,
    side_by_side,
    split_rows,
)

RULE = 1  # version of the codes; must change whenever codes of the same rows would differ or have another meaning
HEAD = 64  # directions of a head
BIT_STEPS = 7  # steps on either side of zero for a query's coordinate that is multiplied by a single bit of a row
LEAST_SIGNS = 1024  # signs read of every row: all of a shorter tail, half of a longer one but no fewer than these
LONGEST_DENSE = 256  # up to this many coordinates, the rotation is drawn from all rotations
WIDEST = 1 << 14  # the longest rows for which codes are made
NIBBLE_STEP = 0.335  # step of four bits, in standard deviations of a coordinate: the least error for a normal one
SIGMAS = 6.0
SLACK = 2.0**-18  # allowance for the float32 arithmetic of bounds
USEFUL = 0.1  # the least cosine between a tail and its code for which the code is used
FITTED_ROWS = 4096  # rows to which directions are fitted
FIT_ITERATIONS = 4  # of the iteration that finds the directions
NOTHING = numpy.zeros(0)
LARGEST_BYTE = 127  # the largest magnitude of a row's coordinate in one byte, and of a query's
MOST_UNITS = 32000  # the largest magnitude of a query's coordinate in 16 bits
MIDDLE = 7.5  # of the levels 0 … 15 of four bits
TINY = 1e-30  # instead of zero in a denominator
LENGTHENED = 1 + 1e-9  # factor by which a computed length in float64 is never below the true one
MOST_ENCODED_BY_KERNEL = 128  # rows, as a service appends at once; unlike BLAS, a kernel wakes no threads
MOST_SPLIT_BY_KERNEL = 64  # rows; a kernel is no faster than BLAS at this, but it wakes no threads
MIXED_TOGETHER = 64  # coordinates that a small rotation mixes


def padded_length(dim: int) -> int:
    """Returns the length of a turned tail for rows of this length, padded because kernels read whole vectors."""
    return rounded_up(dim, 128)


def number_of_signs(dim: int) -> int:
    """Returns how many signs of its turned tail are read for every row."""
    padded = padded_length(dim)
    return min(padded, max(LEAST_SIGNS, padded // 64 * 32))


def bytes_of_coder(dim: int) -> int:
    """Returns the bytes of a ``Coder`` for rows of this length."""
    return 8 * sum(prod(shape) for shape in shapes_of_parts(dim).values())


class Coded(NamedTuple):
    """The codes of n rows."""

    head: Array  # (n, HEAD) int8
    bits: Array  # (n, words) uint32
    weights: Array  # (n, 3) float32: the scale of the head, then F and G of the signs
    nibbles: Array  # (n, width) uint8
    factors: Array  # (n, 2) float32: F and G of the nibbles
    longest: float  # the greatest length of F times the nibbles
    tails: Array  # (n, padded) float64: the turned tails before a center was subtracted


class Coder:
    """Encodes rows, and prepares queries for the kernels that compare them with codes. A coder is immutable.

    Args:
        parts: the matrices that define it, (rows, columns) float64 each, with the shapes of ``shapes_of_parts``.
    """

    def __init__(self, parts: Mapping[str, Array]) -> None:
        self.parts = dict(parts)
        self.directions = parts["directions"]  # (HEAD, D)
        self.scales = parts["scales"][0]  # (HEAD,)
        dim = self.directions.shape[1]
        self.padded = padded_length(dim)
        self.signs = number_of_signs(dim)
        self._rotation = _Rotation(parts)
        self._dither = parts["dither"][0]
        self._frame = Frame(self.directions, self.scales, *self._rotation.parts())

    @classmethod
    def fitted(cls, rows: Array, seed: int | None = None) -> Coder:
        """Returns a coder fitted to a sample of rows.

        Args:
            rows: (n, D) float64, the sample.
            seed: the seed of the rotation; None for an unpredictable rotation, so that nobody can craft rows for which
                it is bad.
        """
        random = numpy.random.default_rng(seed)
        dim = rows.shape[1]
        directions = _directions(rows, random)
        energy = numpy.square(rows @ directions.T).mean(0)
        scales = numpy.maximum(numpy.sqrt(energy), 1 / sqrt(dim))
        rotation = _random_rotation(padded_length(dim), random)
        dither = random.random((1, padded_length(dim)))
        return cls({"directions": directions, "scales": scales[None], "dither": dither, **rotation})

    def split(self, rows: Array) -> tuple[Array, Array]:
        """Returns the heads (n, HEAD) of rows (n, D) and their turned tails (n, padded), all float64."""
        path = chosen()
        if path != "numpy" and len(rows) <= MOST_SPLIT_BY_KERNEL:
            return split_rows(path, rows, self._frame, self.padded)
        return self._split(rows)

    def _split(self, rows: Array) -> tuple[Array, Array]:
        """``split`` in NumPy."""
        heads = rows @ self.directions.T
        tails = numpy.zeros((len(rows), self.padded))
        numpy.subtract(rows, heads @ self.directions, out=tails[:, : rows.shape[1]])
        return heads, self._rotation.turned(tails)

    def encode(self, rows: Array, center: Array) -> Coded:
        """Returns the codes of rows (n, D) float64, after subtracting ``center`` (padded,) from their turned tails."""
        path = chosen()
        if path == "numpy" or len(rows) > MOST_ENCODED_BY_KERNEL:
            return self._encoded(rows, center)
        made, tails = encode_rows(path, rows, self._frame, center, self.signs, NIBBLE_STEP, USEFUL)
        return Coded(
            head=made.head,
            bits=made.bits,
            weights=made.weights,
            nibbles=made.nibbles,
            factors=made.factors,
            longest=_longest(made.lengths),
            tails=tails,
        )

    def _encoded(self, rows: Array, center: Array) -> Coded:
        """``encode`` in NumPy."""
        heads, tails = self._split(rows)
        largest = numpy.abs(heads / self.scales).max(1)
        scale = numpy.maximum(largest / LARGEST_BYTE, TINY).astype(numpy.float32)
        head = numpy.rint(heads / (scale[:, None] * self.scales)).astype(numpy.int8)
        centered = tails - center
        square = numpy.vecdot(centered, centered)
        signed = centered[:, : self.signs]
        bits = numpy.packbits(signed > 0, axis=1, bitorder="little").view(numpy.uint32)
        weights = _weights(square, numpy.abs(signed).sum(1), float(self.signs), self.padded)
        step = NIBBLE_STEP * numpy.maximum(numpy.sqrt(square / self.padded), TINY)
        levels = numpy.clip(numpy.floor(centered / step[:, None]) + 8, 0, 15)  # zero lies between 7 and 8
        first, second = numpy.split(levels.astype(numpy.uint8), 2, axis=1)
        levels -= MIDDLE
        code_square = numpy.vecdot(levels, levels)
        factors = _weights(square, numpy.vecdot(levels, centered), code_square, self.padded)
        lengths = factors[:, 0] * numpy.sqrt(code_square)
        return Coded(
            head=head,
            bits=bits,
            weights=numpy.column_stack([scale, weights]),
            nibbles=first | second << 4,
            factors=factors,
            longest=_longest(lengths),
            tails=tails,
        )

    def prepare(self, query: Array, centers: Array, *, certified: bool) -> tuple[HeadAndBits, Nibbles]:
        """Returns a query in the forms that kernels compare with codes.

        Args:
            query: (D,) float64, of length one.
            centers: (spans, padded) the centers that were subtracted from tails.
            certified: whether bounds from nibbles must always hold, rather than with high probability.
        """
        heads, tails = self.split(query[None])
        tail = tails[0]
        length = sqrt(tail @ tail) * LENGTHENED
        deviation = length / sqrt(self.padded - 1)
        # vecdot stays in this thread. For this many numbers, BLAS would wake threads and wait for them, which on a busy
        # machine takes a thousand times as long as the product itself.
        at_centers = numpy.vecdot(centers, tail) + SLACK
        width = length
        if not certified:
            width = min(length, SIGMAS * deviation)
        return self._head_and_bits(heads[0], tail, at_centers, deviation), self._nibbles(tail, width)

    def _head_and_bits(self, head: Array, tail: Array, at_centers: Array, deviation: float) -> HeadAndBits:
        """Returns a query for the scan: its head in 16 bits per direction, the signed part of its tail in four bits."""
        scaled = head * self.scales
        head_step = max(numpy.abs(scaled).max(), TINY) / MOST_UNITS
        rounded = numpy.rint(scaled / head_step)
        # Half a unit of a row's byte in each direction, plus the rounding error of the query times up to 127 units.
        lost = numpy.abs(scaled - rounded * head_step).sum()
        head_slack = 0.5 * numpy.abs(scaled).sum() + LARGEST_BYTE * lost
        signed = tail[: self.signs]
        step = max(numpy.abs(signed).max(), TINY) / BIT_STEPS
        # Rounded up or down at random, with probabilities that preserve the mean, so the sum of errors is sub-Gaussian.
        units = numpy.floor(signed / step + self._dither[: self.signs]).astype(numpy.int8)
        planes = numpy.unpackbits(units.view(numpy.uint8)[:, None], axis=1, bitorder="little")[:, :PLANES]  # (signs, 4)
        words = numpy.packbits(planes.T, axis=1, bitorder="little").view(numpy.uint32)  # (4, words)
        return HeadAndBits(
            head=rounded.astype(numpy.int16).reshape(-1, 2),
            bits=numpy.ascontiguousarray(words.T),
            centers=at_centers.astype(numpy.float32),
            head_step=head_step,
            head_slack=head_slack * ROUNDED_UP,
            bit_step=2 * step,
            bit_shift=step * float(units.sum(dtype=numpy.int64)),
            spread=deviation**2,
            rounding=self.signs * step**2 / 4,
            sigmas=SIGMAS,
        )

    def _nibbles(self, tail: Array, width: float) -> Nibbles:
        """Returns a query for bounds on single rows: its whole tail in 16 bits per coordinate."""
        most = min(MOST_UNITS, 2**31 // (16 * self.padded))  # sums with levels below 16 must stay below 2**31
        step = max(numpy.abs(tail).max(), TINY) / most
        whole = numpy.rint(tail / step).astype(numpy.int32)
        high = (whole + 128) >> 8
        low = whole - (high << 8)
        return Nibbles(
            high=high.astype(numpy.int8).reshape(2, -1),
            low=low.astype(numpy.int8).reshape(2, -1),
            step=step,
            shift=MIDDLE * step * float(whole.sum(dtype=numpy.int64)),
            spread=width,
            rounding=MIDDLE * self.padded * step / 2,
        )

    def prepare_many(self, queries: Array, centers: Array, longest: float) -> Queries:
        """Returns many queries in the form that a pass over all codes takes.

        Args:
            queries: (B, D) float64, of length one.
            centers: (spans, padded) the centers that were subtracted from tails.
            longest: the greatest ``Coded.longest`` of all rows.
        """
        heads, tails = self.split(queries)
        length, deviation = self._spread(tails)
        whole_heads, head_numbers = self._heads(heads)
        step = numpy.maximum(numpy.abs(tails).max(1), TINY) / LARGEST_BYTE
        # Rounded at random, as in ``_head_and_bits``.
        units = numpy.floor(tails / step[:, None] + self._dither).astype(numpy.int8)
        shift = MIDDLE * step * units.sum(1, dtype=numpy.int64)
        width = numpy.minimum(length, SIGMAS * deviation)
        rounding = ROUNDED_UP * SIGMAS * longest * step / 2 + SLACK
        numbers = numpy.column_stack([head_numbers, step, shift, width, rounding])
        at_centers = numpy.vecdot(centers, tails[:, None]) + SLACK  # in this thread, as in ``prepare``
        quarters = units.reshape(len(units), 2, -1, 4).swapaxes(1, 2)  # (B, width / 4, 2, 4)
        return Queries(
            nibbles=side_by_side(quarters),
            heads=side_by_side(whole_heads),
            centers=at_centers.astype(numpy.float32),
            numbers=numbers.astype(numpy.float32),
        )

    def _spread(self, tails: Array) -> tuple[Array, Array]:
        """Returns the lengths (B,) of tails (B, padded), and the standard deviations (B,) of what codes leave out.

        A standard deviation is that of the product of a tail and what a code leaves out, per unit of G.
        """
        length = numpy.sqrt(numpy.vecdot(tails, tails)) * LENGTHENED
        return length, length / sqrt(self.padded - 1)

    def _heads(self, heads: Array) -> tuple[Array, Array]:
        """Returns the heads of queries (B, HEAD) in 16 bits per direction, and their steps and slacks (B, 2)."""
        scaled = heads * self.scales
        step = numpy.maximum(numpy.abs(scaled).max(1), TINY) / MOST_UNITS
        rounded = numpy.rint(scaled / step[:, None])
        # Half a unit of a row's byte in each direction, plus the rounding error of the query times up to 127 units.
        lost = numpy.abs(scaled - rounded * step[:, None]).sum(1)
        slack = 0.5 * numpy.abs(scaled).sum(1) + LARGEST_BYTE * lost
        numbers = numpy.column_stack([step, slack * ROUNDED_UP])
        pairs = rounded.astype(numpy.int16).reshape(len(heads), -1, 2)  # as the kernels read them
        return pairs, numbers.astype(numpy.float32)


def _longest(lengths: Array) -> float:
    """Returns the greatest of these lengths (n,), ignoring those of rows that were never written."""
    return float(numpy.max(lengths, initial=0, where=numpy.isfinite(lengths)))


def _weights(square: Array, along: Array, code_square: Array | float, padded: int) -> Array:
    """Returns F and G (n, 2) float32 of codes, given |z|², ⟨y, z⟩ and |y|², each (n,)."""
    useful = along > USEFUL * numpy.sqrt(square * code_square)
    weight = numpy.zeros_like(square)
    numpy.divide(square, along, out=weight, where=useful)
    left_out = numpy.sqrt(numpy.maximum(weight * weight * code_square - square, 0))
    # If the code is useless, all of the tail is left out, and it may point in the direction of the query.
    left_out = numpy.where(useful, left_out, numpy.sqrt(square * padded))
    left_out *= 1 + 1e-6  # more than what is lost when it becomes float32
    return numpy.column_stack([weight, left_out]).astype(numpy.float32)


def _directions(rows: Array, random: numpy.random.Generator) -> Array:
    """Returns orthonormal directions (HEAD, D) in which rows (n, D) have the most energy, padded with zeros."""
    dim = rows.shape[1]
    sample = rows.astype(numpy.float32)
    found = random.standard_normal((dim, min(dim, HEAD + 16)))
    for _ in range(FIT_ITERATIONS):
        found, _ = numpy.linalg.qr(sample.T @ (sample @ found.astype(numpy.float32)))
    projected = rows @ found
    _, mixed = numpy.linalg.eigh(projected.T @ projected)  # the most energy last
    best, _ = numpy.linalg.qr(found.astype(numpy.float64) @ mixed[:, ::-1][:, :HEAD])
    directions = numpy.zeros((HEAD, dim))
    directions[: best.shape[1]] = best.T
    return directions


class _Rotation:
    """A random rotation: dense for few coordinates, two rounds of random signs and small rotations for many.

    Args:
        parts: the matrices that ``_random_rotation`` returned.
    """

    def __init__(self, parts: Mapping[str, Array]) -> None:
        self._rounds: list[tuple[Array, Array, Array]] = []
        self._dense = parts.get("dense")
        if self._dense is None:
            lefts = numpy.split(parts["lefts"], 2)
            rights = numpy.split(parts["rights"], 2)
            self._rounds = list(zip(parts["signs"], lefts, rights, strict=True))

    def parts(self) -> tuple[Array, Array, Array, Array]:
        """Returns the dense rotation, then the signs, left and right factors of the rounds; empty where not used."""
        if self._dense is not None:
            return self._dense, NOTHING, NOTHING, NOTHING
        signs, lefts, rights = (numpy.stack(parts) for parts in zip(*self._rounds, strict=True))
        return NOTHING, signs, lefts, rights

    def turned(self, rows: Array) -> Array:
        """Returns rows (n, size) after the rotation."""
        if self._dense is not None:
            turned: Array = rows @ self._dense
            return turned
        for signs, left, right in self._rounds:
            squares = (rows * signs).reshape(len(rows), len(left), MIXED_TOGETHER)
            squares = left @ (squares @ right)
            rows = squares.transpose(0, 2, 1).reshape(len(rows), -1)
        return rows


def shapes_of_parts(dim: int) -> dict[str, tuple[int, int]]:
    """Returns the shapes of the parts of a ``Coder`` for rows of this length, by name."""
    padded = padded_length(dim)
    shapes = {"directions": (HEAD, dim), "scales": (1, HEAD), "dither": (1, padded)}
    if padded <= LONGEST_DENSE:
        return shapes | {"dense": (padded, padded)}
    left = padded // MIXED_TOGETHER
    return shapes | {"signs": (2, padded), "lefts": (2 * left, left), "rights": (2 * MIXED_TOGETHER, MIXED_TOGETHER)}


def _random_rotation(size: int, random: numpy.random.Generator) -> dict[str, Array]:
    """Returns the parts of a random rotation of ``size`` coordinates, a multiple of 128."""
    if size <= LONGEST_DENSE:
        return {"dense": _haar(size, random)}
    signs = []
    lefts = []
    rights = []
    for _ in range(2):
        signs.append(random.integers(0, 2, size) * 2.0 - 1)
        lefts.append(_haar(size // MIXED_TOGETHER, random))
        rights.append(_haar(MIXED_TOGETHER, random))
    return {"signs": numpy.stack(signs), "lefts": numpy.concatenate(lefts), "rights": numpy.concatenate(rights)}


def _haar(size: int, random: numpy.random.Generator) -> Array:
    """Returns a rotation (size, size) drawn uniformly from all rotations."""
    factor, triangle = numpy.linalg.qr(random.standard_normal((size, size)))
    rotation: Array = numpy.ascontiguousarray(factor * numpy.sign(numpy.diag(triangle)))
    return rotation
