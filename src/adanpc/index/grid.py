"""Unit rows on a grid: how features are checked, normalized and encoded.

Every stored coordinate is a multiple of 2**-24, so the product of two is a multiple of 2**-48 and a cosine needs at
most 49 bits: float64 adds it up without rounding, in any order. Exact similarities are why a batch answers as its
queries would one by one, whatever BLAS does with shapes.
"""

from __future__ import annotations

import math
from reprlib import repr as brief
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from adanpc.errors import FeatureError
from adanpc.index.kernels import LONGEST_SQUARES, chosen, have_direction, unit_rows

GRID = 2.0**24
PIECE = 1 << 16  # numbers computed at once: what the cache holds
STORAGE = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.int8,
    "progressive": torch.float16,  # as float16, with codes beside the rows that are no part of them
}
INT8 = ("row", "fine", "scale", "residual")  # the columns of rows that are stored as int8

Columns = dict[str, Tensor]
Array = numpy.ndarray[Any, Any]
Rows = TypeVar("Rows", Tensor, Array)


def check_features(features: Any, dim: int) -> Tensor:
    """Finite float32 features of shape (B, dim), none of them zero, or a FeatureError that says what is wrong."""
    values = features if isinstance(features, Tensor) else _as_tensor(features)
    if values.ndim != 2 or values.shape[1] != dim:
        remedy = ""
        if values.shape == (dim,):
            remedy = ": pass features[None] for a single one"
        raise FeatureError(f"features must have shape (B, {dim}), got {tuple(values.shape)}{remedy}")
    if values.is_complex():
        raise FeatureError(f"features must be real numbers, got {values.dtype}")
    if values.layout != torch.strided:
        raise FeatureError(f"features must be dense, got {values.layout}: pass features.to_dense()")
    values = values.detach().float().resolve_neg()  # NumPy reads no tensor that is negated only when it is read
    path = chosen()
    if values.is_cpu and path != "numpy" and have_direction(path, values.numpy()):
        return values
    # A row whose largest magnitude is finite has no NaN and no infinity.
    for row, size in enumerate(_magnitudes(values)):
        if 0 < size < torch.inf:
            continue
        flaw = "holds NaN or a value infinite in float32"
        if size == 0:
            flaw = "is the zero vector: it has no direction"
        raise FeatureError(f"feature row {row} {flaw}; drop or repair it")
    return values


def array_if_on_cpu(values: Any) -> Any:
    """A tensor as a NumPy array unless it lies on another device: NumPy's calls cost less and wake no threads."""
    if isinstance(values, Tensor) and values.is_cpu:
        return values.numpy()
    return values


def to_main_memory(values: Any) -> Array:
    """An array, or a tensor on any device, as a NumPy array."""
    if isinstance(values, Tensor):
        return values.cpu().numpy()
    array: Array = values
    return array


def _magnitudes(values: Tensor) -> list[float]:
    """The largest magnitude in each row of (B, D); NaN where a row has one."""
    if not values.is_cpu:
        return _magnitudes_of_tensor(values)
    rows = values.numpy()
    largest: list[float] = []
    with numpy.errstate(invalid="ignore"):  # a signaling NaN, which only forged bytes hold, would warn
        for piece in _pieces(rows):
            largest += numpy.abs(rows[piece]).max(1, initial=0).tolist()
    return largest


def _magnitudes_of_tensor(values: Tensor) -> list[float]:
    """``_magnitudes`` on any device."""
    largest: list[float] = torch.linalg.vector_norm(values, torch.inf, dim=1).tolist()
    return largest


def tensor_of(values: Any) -> Tensor:
    """Arrays and lists of numbers as a tensor.

    Arrays that run backward are copied, since torch refuses them, and so are those that cannot be written to, as
    pandas and memory maps give them, since it warns.
    """
    if isinstance(values, numpy.ndarray) and not (values.flags.writeable and min(values.strides, default=0) >= 0):
        values = values.copy()
    return torch.as_tensor(values)


def _as_tensor(features: Any) -> Tensor:
    """Features that are not a tensor, as one."""
    try:
        return tensor_of(numpy.asarray(features))
    except (TypeError, ValueError):
        raise FeatureError(
            f"features must be an array of numbers with rows of equal length, got {brief(features)}"
        ) from None


def snap(values: Tensor) -> Tensor:
    """The nearest multiples of 2**-24."""
    return (values * GRID).round() / GRID + 0.0  # no negative zeros: equal rows have equal bytes


def unit(features: Tensor) -> Tensor:
    """Features at length one on the grid, (B, D) float32; each row a function of that row alone; zero stays zero."""
    if not features.is_cpu:
        return _unit_tensor(features)
    rows = features.numpy()
    path = chosen()
    if path != "numpy" and rows.dtype == numpy.float32 and rows.shape[1] <= LONGEST_SQUARES:
        at_length_one = unit_rows(path, rows)
        if at_length_one is not None:
            return torch.from_numpy(at_length_one)
    if rows.size <= PIECE:
        return torch.from_numpy(_unit_array(rows).astype(numpy.float32))
    made = numpy.empty(rows.shape, numpy.float32)
    for piece in _pieces(rows):
        made[piece] = _unit_array(rows[piece])
    return torch.from_numpy(made)


def _pieces(rows: Array) -> list[slice]:
    """A few rows of (n, D) at a time: what is computed of them stays in the cache, and in memory that is used again."""
    size = max(1, PIECE // rows.shape[1])
    return [slice(start, start + size) for start in range(0, max(len(rows), 1), size)]


def _unit_array(features: Array) -> Array:
    """``unit`` in NumPy, but for the type."""
    scaled = features.astype(numpy.float64, order="C")
    largest = numpy.abs(scaled).max(1, keepdims=True)  # (n, 1)
    scaled /= numpy.maximum(largest, 1e-300)
    # The length is taken of whole numbers, whose squares add up without rounding.
    whole = numpy.rint(scaled * 2.0**20)
    if whole.shape[1] > 2**13:
        whole = whole.astype(numpy.int64)  # so many squares are more than the 53 bits of float64 hold
    squares = numpy.vecdot(whole, whole)  # (n,)
    length = numpy.maximum(numpy.sqrt(squares)[:, None], 1)
    scaled *= 2.0**20 * GRID / length
    numpy.rint(scaled, out=scaled)
    scaled /= GRID
    scaled += 0.0  # no negative zeros: equal rows have equal bytes
    return scaled


def _unit_tensor(features: Tensor) -> Tensor:
    """``unit`` on any device, to the same bit."""
    features = features.double()
    scaled = features / features.abs().amax(1, keepdim=True).clamp(min=1e-300)
    whole = (scaled * 2.0**20).round().long()
    length = whole.square().sum(1, keepdim=True).double().sqrt().clamp(min=1)
    return snap(scaled * (2.0**20 / length)).float()


def encode(rows: Tensor, storage: str) -> Columns:
    """Unit rows as stored columns.

    int8 has two planes: ``row``, which is scanned, and ``fine``, read for the few candidates only; together 16 bits a
    coordinate. ``residual`` is the length of what a scan of ``row`` cannot see.
    """
    if storage == "float32":
        return {"row": rows}
    if STORAGE[storage] == torch.float16:
        return {"row": rows.half()}
    if not rows.is_cpu:
        return _int8_tensor(rows)
    array = rows.numpy()
    parts = [_int8_array(array[piece]) for piece in _pieces(array)]
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in INT8}


def _int8_array(rows: Array) -> Columns:
    """``encode`` to int8 in NumPy."""
    largest = numpy.abs(rows).max(1, keepdims=True)  # (n, 1)
    scale = numpy.maximum(largest, numpy.float32(2.0**-24)) / numpy.float32(127)
    coarse = numpy.rint(rows / scale).astype(numpy.int8)
    seen = coarse * scale
    left = rows - numpy.rint(seen * GRID) / GRID
    fine = numpy.rint(left * GRID / _fine_step(scale)).astype(numpy.int8)
    read = decode({"row": coarse, "fine": fine, "scale": scale})
    hidden = torch.from_numpy(read.astype(numpy.float64) - coarse * scale.astype(numpy.float64))
    return {
        "row": torch.from_numpy(coarse),
        "fine": torch.from_numpy(fine),
        "scale": torch.from_numpy(scale),
        "residual": _residual(hidden),
    }


def _int8_tensor(rows: Tensor) -> Columns:
    """``encode`` to int8 on any device, to the same bit."""
    scale = rows.abs().amax(1, keepdim=True).clamp(min=2.0**-24) / 127
    coarse = (rows / scale).round().to(torch.int8)
    left = rows - snap(coarse * scale)
    fine = (left * GRID / _fine_step(scale)).round().to(torch.int8)
    columns = {"row": coarse, "fine": fine, "scale": scale}
    hidden = decode(columns).double() - coarse.double() * scale.double()
    return {**columns, "residual": _residual(hidden)}


def _residual(hidden: Tensor) -> Tensor:
    """The length of what is hidden of each row (n, D), (n, 1) float32.

    It is a little more than the length itself, so that its own rounding cannot make the bound false.
    """
    length: Tensor = torch.linalg.vector_norm(hidden, dim=1, keepdim=True)
    return (length * 1.0001).float()


def decode(columns: dict[str, Rows]) -> Rows:
    """The rows that stored columns stand for, (n, D) on the grid, float32 or as they are stored."""
    if "fine" not in columns:
        return columns["row"]
    scale = columns["scale"]
    coarse = (columns["row"] * (scale * GRID)).round()
    rows: Rows = (coarse + columns["fine"] * _fine_step(scale)) / GRID
    return rows


def fine_weight(scale: Rows) -> Rows:
    """What one unit of ``fine`` stands for in rows of this scale (n, 1)."""
    return _fine_step(scale) / GRID


def hidden_from_both(dim: int) -> float:
    """The most that rows of so many coordinates differ, in length, from what ``row`` and ``fine`` add up to.

    ``decode`` rounds each coordinate to the grid, and float32 may round twice on the way: less than two steps in all.
    """
    return math.sqrt(dim) * 2 / GRID


def _fine_step(scale: Rows) -> Rows:
    """How many steps of the grid one unit of ``fine`` stands for, rounded up so that 127 of them always suffice."""
    steps = scale / 254 * GRID
    if isinstance(steps, Tensor):
        return steps.ceil()
    return numpy.ceil(steps)
