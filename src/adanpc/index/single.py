"""The nearest rows of one query in main memory, in NumPy: a small search in torch consists of the cost of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from adanpc.index.grid import Array, decode
from adanpc.index.scan import COORDINATES, TILE, scan

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex

GROUP = 16  # rows of which only the best is ranked
LEAST = float(numpy.finfo(numpy.float32).min)


def nearest(
    index: ExactIndex, query: Tensor, k: int, usable: Tensor, ids: Tensor, exclude: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The search of one query (1, D) in main memory, in NumPy but for the scan.

    Candidates are all rows whose upper bound reaches the k-th highest lower bound: no other can be among the best.
    """
    upper, lower, slack = _both_bounds(index, query)
    hidden = ~usable.numpy()
    upper[hidden] = lower[hidden] = -numpy.inf
    near = _candidates(upper, lower, k + (0 if exclude is None else exclude.shape[1]), 2 * slack)
    numbers = ids.numpy()[near]
    if exclude is not None:
        visible = ~numpy.isin(numbers, exclude.numpy())
        near, numbers = near[visible], numbers[visible]
    exact = _exact(index, near, query[0].double().numpy())
    order = _ranking(exact, numbers, k)
    return torch.from_numpy(near[order])[None], torch.from_numpy(exact[order])[None]


def _both_bounds(index: ExactIndex, query: Tensor) -> tuple[Array, Array, float]:
    """Upper and lower bounds of all similarities (slots,), and the slack of either; any number where no row is."""
    products = query.new_empty(index.slots // TILE, 1, TILE)
    slack = float(scan(index.used("row"), query, products)) * (1 + index.residual) + 1e-6
    upper = lower = products.view(-1).numpy()
    if index.storage == "int8":
        scale, residual = (_joined(index.columns[name])[: index.slots] for name in ("scale", "residual"))
        with numpy.errstate(all="ignore"):  # slots that were never written hold anything
            upper = upper * scale + residual
            lower = upper - 2 * residual
    return upper, lower, slack


def _joined(blocks: list[Tensor]) -> Array:
    """A column of one number for each slot, (slots,)."""
    return numpy.concatenate([block.numpy()[:, 0] for block in blocks])


def _exact(index: ExactIndex, near: Array, query: Array) -> Array:
    """The similarities of the rows at these slots (n,) to one query (D,), both float64."""
    exact = numpy.empty(len(near))
    size = max(1, COORDINATES // index.dim)
    for start in range(0, len(near), size):
        part = slice(start, start + size)
        columns = index.take(torch.from_numpy(near[part]))
        rows = decode({name: column.numpy() for name, column in columns.items()})
        numpy.vecdot(rows.astype(numpy.float64), query, out=exact[part])
    return exact


def _candidates(upper: Array, lower: Array, k: int, slack: float) -> Array:
    """The slots whose upper bound (n,) comes within ``slack`` of the k-th highest lower bound; -inf never does."""
    return numpy.flatnonzero(upper >= max(LEAST, _kth(lower, k) - slack))


def _kth(values: Array, k: int) -> float:
    """The k-th highest of values (n,), or a little less: of many values, only the best of each group are ranked."""
    k = min(k, len(values))
    heads = values.reshape(GROUP, -1).max(0) if 2 * k * GROUP <= len(values) else values
    return float(numpy.partition(heads, -k)[-k])


def _ranking(similarity: Array, ids: Array, k: int) -> Array:
    """Positions of the k highest similarities, highest first, ties to the lowest id."""
    return numpy.lexsort((ids, -similarity))[:k]
