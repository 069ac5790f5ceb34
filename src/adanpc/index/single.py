"""The nearest rows of one query in main memory, in NumPy: a small search in torch consists of the cost of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from adanpc.index.blocks import TILE
from adanpc.index.grid import Array, decode
from adanpc.index.protocol import Found
from adanpc.index.scan import COORDINATES, scan

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex

GROUP = 16  # rows of which only the best is ranked
LEAST = float(numpy.finfo(numpy.float32).min)


def nearest(index: ExactIndex, query: Tensor, k: int, hidden: Tensor | None, exclude: Tensor | None) -> Found:
    """The search of one query (1, D) in main memory, in NumPy but for the scan.

    Candidates are all rows whose upper bound reaches the k-th highest lower bound: no other can be among the best.
    """
    upper, lower, slack = _both_bounds(index, query)
    upper[index.slots :] = -numpy.inf
    lower[index.slots :] = -numpy.inf
    if hidden is not None:
        upper[hidden.numpy()] = -numpy.inf
        lower[hidden.numpy()] = -numpy.inf
    excluded = numpy.zeros(0, numpy.int64)
    if exclude is not None:
        excluded = exclude[0].numpy()
    near = _candidates(upper, lower, k + len(excluded), 2 * slack)
    return ranked(index, query, torch.from_numpy(near), k, excluded)


def ranked(index: ExactIndex, query: Tensor, candidates: Tensor, k: int, excluded: Array) -> Found:
    """The k best of candidates (n,) by exact similarity to one query (1, D), padded to k."""
    ids = index.ids(candidates)
    if len(candidates) > 4 * (k + len(excluded)) + 256:
        kept = distinct(index, candidates, ids, k + len(excluded))
        candidates = candidates[kept]
        ids = ids[kept]
    slots = candidates.cpu().numpy()
    numbers = ids.cpu().numpy()
    if len(excluded):
        allowed = ~numpy.isin(numbers, excluded)
        slots = slots[allowed]
        numbers = numbers[allowed]
    exact = _exact(index, slots, query[0].cpu().double().numpy())
    order = numpy.lexsort((numbers, -exact))[:k]
    found = Found(torch.from_numpy(slots[order]), torch.from_numpy(numbers[order]), torch.from_numpy(exact[order]))
    return _padded(found, k, index.device)


def distinct(index: ExactIndex, candidates: Tensor, ids: Tensor, most: int) -> Tensor:
    """The positions of at most so many candidates (n,) of each row that several of them share, those of lowest id.

    Equal rows are equally similar, and the tie goes to the lowest ids, so no other can be among the best. Without
    this, a bank full of copies of one row would have all of them scored for every query that is near.
    """
    hashes = index.blocks.take(candidates, "hash")["hash"].cpu().numpy()
    order = numpy.lexsort((ids.cpu().numpy(), hashes))  # equal rows side by side, lowest ids first
    ordered = hashes[order]
    kept = numpy.ones(len(order), bool)
    # A row is one too many if the row so many places before it is equal, and so are all between.
    kept[most:] = ordered[most:] != ordered[:-most]
    return torch.from_numpy(numpy.sort(order[kept])).to(candidates.device)


def _padded(found: Found, k: int, device: torch.device) -> Found:
    """One query's result with K = k, (1, k)."""
    short = k - len(found.slots)
    if short:
        nobody = torch.full((short,), -1)
        slots = torch.cat([found.slots, nobody])
        ids = torch.cat([found.ids, nobody])
        similarity = torch.cat([found.similarity, nobody.double() * torch.inf])
        found = Found(slots, ids, similarity)
    return Found(found.slots[None].to(device), found.ids[None].to(device), found.similarity[None].to(device))


def _both_bounds(index: ExactIndex, query: Tensor) -> tuple[Array, Array, float]:
    """Upper and lower bounds of all similarities (padded,), and the slack of either; any number where no row is."""
    products = query.new_empty(index.padded // TILE, 1, TILE)
    error = scan(index.blocks.used("row", index.padded), query, products)
    slack = float(error) * (1 + index.residual) + 1e-6
    upper = products.view(-1).numpy()
    if index.storage != "int8":
        return upper, upper, slack
    scale = _joined(index.blocks.used("scale", index.padded))
    residual = _joined(index.blocks.used("residual", index.padded))
    with numpy.errstate(all="ignore"):  # slots that were never written hold anything
        upper = upper * scale + residual
        lower = upper - 2 * residual
    return upper, lower, slack


def _joined(blocks: list[Tensor]) -> Array:
    """A column of one number for each slot, (slots,)."""
    return numpy.concatenate([block.numpy()[:, 0] for block in blocks])


def _exact(index: ExactIndex, slots: Array, query: Array) -> Array:
    """The similarities of the rows in these slots (n,) to one query (D,), both float64."""
    exact = numpy.empty(len(slots))
    size = max(1, COORDINATES // index.dim)
    for start in range(0, len(slots), size):
        part = slice(start, start + size)
        columns = index.state(torch.from_numpy(slots[part]).to(index.device))
        rows = decode({name: column.cpu().numpy() for name, column in columns.items()})
        numpy.vecdot(rows.astype(numpy.float64), query, out=exact[part])
    return exact


def _candidates(upper: Array, lower: Array, k: int, slack: float) -> Array:
    """The slots whose upper bound (n,) comes within ``slack`` of the k-th highest lower bound; -inf never does."""
    return numpy.flatnonzero(upper >= max(LEAST, _kth(lower, k) - slack))


def _kth(values: Array, k: int) -> float:
    """The k-th highest of values (n,), or a little less: of many values, only the best of each group are ranked."""
    k = min(k, len(values))
    heads = values
    if 2 * k * GROUP <= len(values):
        heads = values.reshape(GROUP, -1).max(0)
    return float(numpy.partition(heads, -k)[-k])
