"""Unit rows on a grid: how features are checked, normalized and encoded.

Every stored coordinate is a multiple of 2**-24, so the product of two is a multiple of 2**-48 and a cosine needs at
most 49 bits: float64 adds it up without rounding, in any order. Exact similarities are why a batch answers as its
queries would one by one, whatever BLAS does with shapes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from adanpc.errors import FeatureError

GRID = 2.0**24
SMALL = 1 << 17  # numbers up to which NumPy takes no longer than torch, which wakes its threads from 2**15 on
STORAGE = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}

Columns = dict[str, Tensor]
Array = numpy.ndarray[Any, Any]
Rows = TypeVar("Rows", Tensor, Array)


def check_features(features: Any, dim: int) -> Tensor:
    """Finite float32 features of shape (B, dim), none of them zero, or a FeatureError that says what is wrong."""
    values = features if isinstance(features, Tensor) else _as_tensor(features)
    if values.ndim != 2 or values.shape[1] != dim:
        raise FeatureError(f"features must have shape (B, {dim}), got {tuple(values.shape)}")
    if values.is_complex():
        raise FeatureError(f"features must be real numbers, got {values.dtype}")
    values = values.detach().float()
    # One pass in the common case: a finite, non-zero sum of magnitudes has neither NaN nor infinity nor only zeros.
    for row, size in enumerate(_magnitudes(values)):
        if 0 < size < torch.inf:
            continue
        flaw = "holds NaN or a value infinite in float32"
        if size == 0:
            flaw = "is the zero vector: it has no direction"
        raise FeatureError(f"feature row {row} {flaw}; drop or repair it")
    return values


def in_main_memory(tensor: Tensor) -> Any:
    """The tensor as a NumPy array unless it lies on another device: NumPy's calls cost less and wake no threads."""
    if tensor.device.type != "cpu":
        return tensor
    return tensor.numpy()


def _is_small(values: Tensor) -> bool:
    """Whether NumPy, which takes less time for a call, is the faster one."""
    return values.device.type == "cpu" and values.numel() <= SMALL


def _magnitudes(values: Tensor) -> list[float]:
    """The sum of each row's magnitudes, of (B, D)."""
    sums: list[float]
    if _is_small(values):
        with numpy.errstate(invalid="ignore"):  # a signaling NaN, which only forged bytes hold, would warn
            sums = numpy.abs(values.numpy()).sum(1, dtype=numpy.float64).tolist()
        return sums
    sums = torch.linalg.vector_norm(values, 1, dim=1, dtype=torch.float64).tolist()
    return sums


def _as_tensor(features: Any) -> Tensor:
    """Arrays and lists of numbers as a tensor."""
    try:
        return torch.as_tensor(numpy.asarray(features))
    except (TypeError, ValueError) as error:
        kind = type(features).__name__
        raise FeatureError(f"features must be a tensor or an array of numbers, got {kind}: {error}") from None


def snap(values: Tensor) -> Tensor:
    """The nearest multiples of 2**-24."""
    return (values * GRID).round() / GRID + 0.0  # no negative zeros: equal rows have equal bytes


def unit(features: Tensor) -> Tensor:
    """Features at length one on the grid, (B, D) float32; each row a function of that row alone; zero stays zero."""
    if _is_small(features):
        return torch.from_numpy(_unit_array(features.numpy()))
    features = features.double()
    scaled = features / features.abs().amax(1, keepdim=True).clamp(min=1e-300)
    whole = (scaled * 2.0**20).round().long()  # squares of whole numbers sum without rounding
    length = whole.square().sum(1, keepdim=True).double().sqrt().clamp(min=1)
    return snap(scaled * (2.0**20 / length)).float()


def _unit_array(features: Array) -> Array:
    """``unit`` in NumPy, to the same bit."""
    features = features.astype(numpy.float64, order="C")
    scaled = features / numpy.maximum(numpy.abs(features).max(1, keepdims=True), 1e-300)
    whole = numpy.rint(scaled * 2.0**20).astype(numpy.int64)
    length = numpy.maximum(numpy.sqrt(numpy.vecdot(whole, whole))[:, None], 1)
    scaled *= 2.0**20 / length
    snapped: Array = numpy.rint(scaled * GRID) / GRID + 0.0
    return snapped.astype(numpy.float32)


def encode(rows: Tensor, storage: str) -> Columns:
    """Unit rows as stored columns.

    int8 has two planes: ``row``, which is scanned, and ``fine``, read for the few candidates only; together 16 bits a
    coordinate. ``residual`` is the length of what a scan of ``row`` cannot see.
    """
    if storage == "float32":
        return {"row": rows}
    if storage == "float16" and _is_small(rows):
        return {"row": torch.from_numpy(rows.numpy().astype(numpy.float16))}
    if storage == "float16":
        return {"row": rows.half()}
    scale = rows.abs().amax(1, keepdim=True).clamp(min=2.0**-24) / 127
    coarse = (rows / scale).round().to(torch.int8)
    left = rows - snap(coarse * scale)
    fine = (left * GRID / _fine_step(scale)).round().to(torch.int8)
    columns = {"row": coarse, "fine": fine, "scale": scale}
    hidden = decode(columns).double() - coarse.double() * scale.double()
    # A little more than the length itself, so that its own rounding cannot make the bound false.
    columns["residual"] = (hidden.norm(dim=1, keepdim=True) * 1.0001).float()
    return columns


def decode(columns: dict[str, Rows]) -> Rows:
    """The rows that stored columns stand for, (n, D) on the grid, float32 or as they are stored."""
    if "fine" not in columns:
        return columns["row"]
    scale = columns["scale"]
    coarse = (columns["row"] * (scale * GRID)).round()
    rows: Rows = (coarse + columns["fine"] * _fine_step(scale)) / GRID
    return rows


def _fine_step(scale: Rows) -> Rows:
    """How many steps of the grid one unit of ``fine`` stands for, rounded up so that 127 of them always suffice."""
    steps = scale / 254 * GRID
    return -(-steps // 1)  # the ceiling, for tensors and arrays alike
