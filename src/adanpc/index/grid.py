"""Unit rows on a grid: how features are checked, normalized and encoded.

Every stored coordinate is a multiple of 2**-24, so the product of two coordinates is a multiple of 2**-48, and a cosine
needs at most 49 bits: float64 sums it without rounding, in any order. Because similarities are exact, a batch gives the
same results as its queries one by one, no matter how BLAS treats different shapes.
"""

from __future__ import annotations

import math
from reprlib import repr as brief
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from adanpc.errors import FeatureError
from adanpc.index.kernels import LONGEST_SQUARES, chosen, coarse_rows, have_direction, unit_rows

GRID = 2.0**24
WHOLE = 2.0**20  # coordinates are rounded to whole numbers up to this one, whose squares are summed without rounding
LARGEST_BYTE = 127  # the largest magnitude of a coordinate in one byte
ROUNDED_UP = 1.0001  # factor by which a bound stays one in spite of its own rounding; files hold such bounds
PIECE = 1 << 16  # numbers computed at once, few enough to stay in the cache
STORAGE = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.int8,
    "progressive": torch.float16,  # like float16; the codes are not part of the rows
}
COARSE = ("coarse", "scale", "residual")  # the columns that a search reads before float32 rows
INT8 = ("row", "fine", "scale", "residual")  # the columns of rows stored as int8

Columns = dict[str, Tensor]
Array = numpy.ndarray[Any, Any]
Rows = TypeVar("Rows", Tensor, Array)


def check_features(features: Any, dim: int) -> Tensor:
    """Returns features as a float32 tensor (B, dim).

    Raises:
        FeatureError: if the features are not dense real numbers of this shape, or if a row is zero or not finite.
    """
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
    values = values.detach().float().resolve_neg()  # NumPy cannot read tensors that torch negates lazily
    path = chosen()
    if values.is_cpu and path != "numpy" and have_direction(path, values.numpy()):
        return values
    # A row whose largest magnitude is finite contains neither NaN nor infinity.
    for row, size in enumerate(_magnitudes(values)):
        if 0 < size < torch.inf:
            continue
        flaw = "holds NaN or a value infinite in float32"
        if size == 0:
            flaw = "is the zero vector: it has no direction"
        raise FeatureError(f"feature row {row} {flaw}; drop or repair it")
    return values


def array_if_on_cpu(values: Any) -> Any:
    """Returns a tensor in main memory as a NumPy array, and anything else as it is.

    Calls to NumPy have less overhead than calls to torch, and they wake no threads.
    """
    if isinstance(values, Tensor) and values.is_cpu:
        return values.numpy()
    return values


def to_main_memory(values: Any) -> Array:
    """Returns an array, or a tensor on any device, as a NumPy array."""
    if isinstance(values, Tensor):
        return values.cpu().numpy()
    array: Array = values
    return array


def _magnitudes(values: Tensor) -> list[float]:
    """Returns the largest magnitude in each row of values (B, D); NaN for a row that contains NaN."""
    if not values.is_cpu:
        return _magnitudes_of_tensor(values)
    rows = values.numpy()
    largest: list[float] = []
    with numpy.errstate(invalid="ignore"):  # a signaling NaN, which only forged bytes contain, would warn
        for piece in _pieces(rows):
            largest += numpy.abs(rows[piece]).max(1, initial=0).tolist()
    return largest


def _magnitudes_of_tensor(values: Tensor) -> list[float]:
    """``_magnitudes`` on any device."""
    largest: list[float] = torch.linalg.vector_norm(values, torch.inf, dim=1).tolist()
    return largest


def tensor_of(values: Any) -> Tensor:
    """Returns an array or a list of numbers as a tensor.

    Arrays with negative strides are copied, because torch rejects them. So are read-only arrays, such as those from
    pandas and memory maps, because torch warns about them.
    """
    if isinstance(values, numpy.ndarray) and not (values.flags.writeable and min(values.strides, default=0) >= 0):
        values = values.copy()
    return torch.as_tensor(values)


def _as_tensor(features: Any) -> Tensor:
    """Returns features that are not a tensor as a tensor, or raises a FeatureError."""
    try:
        return tensor_of(numpy.asarray(features))
    except (TypeError, ValueError):
        raise FeatureError(
            f"features must be an array of numbers with rows of equal length, got {brief(features)}"
        ) from None


def snap(values: Tensor) -> Tensor:
    """Returns values rounded to the nearest multiples of 2**-24."""
    return (values * GRID).round() / GRID + 0.0  # no negative zeros: equal rows have equal bytes


def unit(features: Tensor) -> Tensor:
    """Returns features (B, D) scaled to length one on the grid, float32; zero stays zero.

    Each row of the result depends only on the same row of the features.
    """
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
    """Returns slices that split rows (n, D) into pieces small enough that what is computed from one stays in the cache.

    The memory of one piece's results can be reused for the next piece.
    """
    size = max(1, PIECE // rows.shape[1])
    return [slice(start, start + size) for start in range(0, max(len(rows), 1), size)]


def _unit_array(features: Array) -> Array:
    """``unit`` in NumPy, except that the result is float64."""
    scaled = features.astype(numpy.float64, order="C")
    largest = numpy.abs(scaled).max(1, keepdims=True)  # (n, 1)
    scaled /= numpy.maximum(largest, 1e-300)
    whole = numpy.rint(scaled * WHOLE)
    if whole.shape[1] > LONGEST_SQUARES:
        whole = whole.astype(numpy.int64)  # the sum of this many squares may exceed the 53 bits of float64
    squares = numpy.vecdot(whole, whole)  # (n,)
    length = numpy.maximum(numpy.sqrt(squares)[:, None], 1)
    scaled *= WHOLE * GRID / length
    numpy.rint(scaled, out=scaled)
    scaled /= GRID
    scaled += 0.0  # no negative zeros: equal rows have equal bytes
    return scaled


def _unit_tensor(features: Tensor) -> Tensor:
    """``unit`` on any device: the same steps as in ``_unit_array``, to the same bit."""
    features = features.double()
    scaled = features / features.abs().amax(1, keepdim=True).clamp(min=1e-300)
    whole = (scaled * WHOLE).round().long()
    length = whole.square().sum(1, keepdim=True).double().sqrt().clamp(min=1)
    return snap(scaled * (WHOLE / length)).float()


def encode(rows: Tensor, storage: str) -> Columns:
    """Returns unit rows as the columns that are stored.

    int8 rows have two planes, together 16 bits per coordinate: ``row`` is scanned, and ``fine`` is read only for the
    few candidates. ``residual`` is the length of what a scan of ``row`` cannot see.
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


def coarse(rows: Array) -> dict[str, Array]:
    """Returns a byte for each coordinate of unit rows (n, D) float32, which a search reads before the rows themselves.

    ``coarse`` holds the bytes, ``scale`` (n, 1) the value of one unit, and ``residual`` (n, 1) the length of what a
    scan of the bytes cannot see.
    """
    path = chosen()
    if path != "numpy":
        return dict(zip(COARSE, coarse_rows(path, rows), strict=True))
    parts = [_coarse_array(rows[piece]) for piece in _pieces(rows)]
    return {name: numpy.concatenate([part[name] for part in parts]) for name in COARSE}


def _coarse_array(rows: Array) -> dict[str, Array]:
    """``coarse`` in NumPy."""
    whole, scale = _rounded_to_bytes(rows)
    hidden = rows - whole * scale.astype(numpy.float64)
    length = numpy.sqrt(numpy.vecdot(hidden, hidden))[:, None]
    residual = (length * ROUNDED_UP).astype(numpy.float32)
    return {"coarse": whole, "scale": scale, "residual": residual}


def _rounded_to_bytes(rows: Array) -> tuple[Array, Array]:
    """Returns rows (n, D) rounded to a byte for each coordinate, and the values (n, 1) float32 of one unit."""
    largest = numpy.abs(rows).max(1, keepdims=True)  # (n, 1)
    scale = numpy.maximum(largest, numpy.float32(2.0**-24)) / numpy.float32(LARGEST_BYTE)
    return numpy.rint(rows / scale).astype(numpy.int8), scale


def _int8_array(rows: Array) -> Columns:
    """``encode`` to int8 in NumPy."""
    whole, scale = _rounded_to_bytes(rows)
    seen = whole * scale
    left = rows - numpy.rint(seen * GRID) / GRID
    fine = numpy.rint(left * GRID / _fine_step(scale)).astype(numpy.int8)
    read = decode({"row": whole, "fine": fine, "scale": scale})
    hidden = torch.from_numpy(read.astype(numpy.float64) - whole * scale.astype(numpy.float64))
    return {
        "row": torch.from_numpy(whole),
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
    """Returns the length (n, 1) float32 of the hidden part (n, D) of each row.

    It is slightly more than the true length, so that it stays an upper bound in spite of its own rounding.
    """
    length: Tensor = torch.linalg.vector_norm(hidden, dim=1, keepdim=True)
    return (length * ROUNDED_UP).float()


def decode(columns: dict[str, Rows]) -> Rows:
    """Returns the rows (n, D) on the grid that stored columns represent, in float32 or in the stored type."""
    if "fine" not in columns:
        return columns["row"]
    scale = columns["scale"]
    coarse = (columns["row"] * (scale * GRID)).round()
    rows: Rows = (coarse + columns["fine"] * _fine_step(scale)) / GRID
    return rows


def fine_weight(scale: Rows) -> Rows:
    """Returns the value of one unit of ``fine`` in rows of this scale (n, 1)."""
    return _fine_step(scale) / GRID


def hidden_from_both(dim: int) -> float:
    """Returns a bound on the length of the difference between a row (dim,) and the sum of its ``row`` and ``fine``.

    ``decode`` rounds each coordinate to the grid, and float32 may round twice on the way: less than two steps in total.
    """
    return math.sqrt(dim) * 2 / GRID


def _fine_step(scale: Rows) -> Rows:
    """Returns how many grid steps one unit of ``fine`` represents, rounded up so that 127 units always suffice."""
    steps = scale / 254 * GRID
    if isinstance(steps, Tensor):
        return steps.ceil()
    return numpy.ceil(steps)
