"""The nearest rows of a few queries in main memory, in NumPy: small searches in torch consist of the cost of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor

from adanpc.index.blocks import TILE
from adanpc.index.grid import Array, decode, fine_weight, hidden_from_both
from adanpc.index.kernels import chosen, score_rows
from adanpc.index.protocol import Found, Wanted, one_after_another
from adanpc.index.scan import COORDINATES, scan

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex

MORE = 64  # candidates beyond those wanted, and
SHARE = 128  # one row in so many: more candidates among int8 rows take longer to score than a scan of their second byte
GROUP = 16  # rows of which only the best is ranked
LEAST = float(numpy.finfo(numpy.float32).min)
NOBODY = numpy.zeros(0, numpy.int64)  # excluded


def nearest(index: ExactIndex, queries: Tensor, wanted: Sequence[Wanted], exclude: Tensor | None) -> list[Found]:
    """The searches of a few queries (B, D) in main memory, in NumPy but for the scan.

    Candidates are all rows whose upper bound reaches the k-th highest lower bound: no other can be among the best.
    """
    products = numpy.empty((index.padded // TILE, queries.shape[0], TILE), numpy.float32)
    errors = scan(index.blocks.used("row", index.padded), queries, torch.from_numpy(products))
    found: list[list[Found]] = [[] for _ in wanted]
    for number, query in enumerate(queries.numpy()):
        excluded = NOBODY
        if exclude is not None:
            excluded = exclude[number].numpy()
        seen = products[:, number].reshape(-1)[: index.slots]
        error = float(errors[number])
        bounds = _bounds(index, seen, error)
        finer: Bounds | None = None
        for (k, group), parts in zip(wanted, found, strict=True):
            usable = index.usable(group)
            most = k + len(excluded)
            near = _candidates(bounds, usable, most)
            if index.storage == "int8" and len(near) > most + MORE + index.slots // SHARE:
                if finer is None:
                    finer = _finer_bounds(index, seen, error, queries[number : number + 1])
                near = _candidates(finer, usable, most)
            parts.append(ranked(index, query, near, k, excluded))
    return [one_after_another(parts) for parts in found]


def ranked(index: ExactIndex, query: Array, candidates: Array, k: int, excluded: Array) -> Found:
    """The k best of candidates (n,) by exact similarity to one query (D,), padded to k."""
    slots = candidates
    ids = index.blocks.read(slots, "id")["id"]
    if len(slots) > 4 * (k + len(excluded)) + 256:
        kept = distinct(index, slots, ids, k + len(excluded))
        slots = slots[kept]
        ids = ids[kept]
    if len(excluded):
        allowed = ~numpy.isin(ids, excluded)
        slots = slots[allowed]
        ids = ids[allowed]
    similarity = exact(index, slots, query.astype(numpy.float64))
    order = numpy.lexsort((ids, -similarity))[:k]
    return _padded(slots[order], ids[order], similarity[order], k, index.device)


def distinct(index: ExactIndex, slots: Array, ids: Array, most: int) -> Array:
    """The positions of at most so many slots (n,) of each row that several of them hold, those of lowest id.

    Equal rows are equally similar, and the tie goes to the lowest ids, so no other can be among the best. Without
    this, a bank full of copies of one row would have all of them scored for every query that is near.
    """
    hashes = index.blocks.read(slots, "hash")["hash"]
    order = numpy.lexsort((ids, hashes))  # equal rows side by side, lowest ids first
    ordered = hashes[order]
    kept = numpy.ones(len(order), bool)
    # A row is one too many if the row so many places before it is equal, and so are all between.
    kept[most:] = ordered[most:] != ordered[:-most]
    positions: Array = numpy.sort(order[kept])
    return positions


def _padded(slots: Array, ids: Array, similarity: Array, k: int, device: torch.device) -> Found:
    """One query's result with K = k, (1, k)."""
    short = k - len(slots)
    if short:
        nobody = numpy.full(short, -1)
        slots = numpy.concatenate([slots, nobody])
        ids = numpy.concatenate([ids, nobody])
        similarity = numpy.concatenate([similarity, numpy.full(short, -numpy.inf)])
    return Found(_query(slots, device), _query(ids, device), _query(similarity, device))


def _query(column: Array, device: torch.device) -> Tensor:
    """The values of one query (K,) as those of a batch (1, K)."""
    return torch.from_numpy(column[None]).to(device)


class Bounds(NamedTuple):
    """Bounds of the similarities of all rows to a query; any number where no row is."""

    upper: Array  # (slots,)
    lower: Array  # (slots,)
    slack: float  # by how much either may be wrong


def _bounds(index: ExactIndex, products: Array, error: float) -> Bounds:
    """The bounds that follow from the products (slots,) of a scan, whose error is a share of the length of rows."""
    slack = error * (1 + index.residual) + 1e-6
    if index.storage != "int8":
        return Bounds(products, products, slack)
    scale = _joined(index.blocks.used("scale", index.slots))
    residual = _joined(index.blocks.used("residual", index.slots))
    with numpy.errstate(all="ignore"):  # slots that were never written hold anything
        upper = products * scale + residual
        lower = upper - 2 * residual
    return Bounds(upper, lower, slack)


def _finer_bounds(index: ExactIndex, products: Array, error: float, query: Tensor) -> Bounds:
    """The bounds of int8 rows by both of their bytes, for a query (1, D).

    One byte says little of a row in which one coordinate dominates: it sets the step for all the others.
    """
    fine = numpy.empty((index.padded // TILE, 1, TILE), numpy.float32)
    fine_error = float(scan(index.blocks.used("fine", index.padded), query, torch.from_numpy(fine))[0])
    scale = _joined(index.blocks.used("scale", index.slots))
    with numpy.errstate(all="ignore"):  # slots that were never written hold anything
        similarity = products * scale + fine.reshape(-1)[: index.slots] * fine_weight(scale)
    hidden = hidden_from_both(index.dim)
    slack = error * (1 + index.residual) + fine_error * (index.residual + hidden) + hidden + 1e-6
    return Bounds(similarity, similarity, slack)


def _joined(blocks: list[Tensor]) -> Array:
    """A column of one number for each slot, (slots,)."""
    arrays = [block.numpy()[:, 0] for block in blocks]
    if len(arrays) == 1:
        return arrays[0]
    return numpy.concatenate(arrays)


def _only(usable: Array | None, bounds: Array) -> Array:
    """Bounds (slots,), -inf where the slot may not be found."""
    if usable is None:
        return bounds
    return numpy.where(usable, bounds, numpy.float32(-numpy.inf))


def exact(index: ExactIndex, slots: Array, query: Array) -> Array:
    """The similarities of the rows in these slots (n,) to one query (D,), both float64."""
    path = chosen()
    if path != "numpy" and index.blocks.device.type == "cpu" and "fine" not in index.encoded:
        owners = numpy.zeros(len(slots), numpy.int64)
        return score_rows(path, index.blocks.arrays()["row"], index.blocks.block, slots, owners, query[None])
    similarity = numpy.empty(len(slots))
    size = max(1, COORDINATES // index.dim)
    for start in range(0, len(slots), size):
        part = slice(start, start + size)
        rows = decode(index.blocks.read(slots[part], *index.encoded))
        numpy.vecdot(rows.astype(numpy.float64), query, out=similarity[part])
    return similarity


def scores(index: ExactIndex, slots: Array, owners: Array, queries: Array) -> Array:
    """The similarities (n,) of the rows in these slots (n,), each to its own of the queries (B, D), float64."""
    path = chosen()
    if path != "numpy" and "fine" not in index.encoded:
        return score_rows(path, index.blocks.arrays()["row"], index.blocks.block, slots, owners, queries)
    similarity = numpy.empty(len(slots))
    for number in numpy.unique(owners):
        own = owners == number
        similarity[own] = exact(index, slots[own], queries[number])
    return similarity


def _candidates(bounds: Bounds, usable: Array | None, k: int) -> Array:
    """The usable slots whose upper bound may reach the k-th highest lower bound."""
    upper = _only(usable, bounds.upper)
    lower = upper
    if bounds.lower is not bounds.upper:
        lower = _only(usable, bounds.lower)
    least = max(LEAST, _kth(lower, k) - 2 * bounds.slack)  # which -inf never reaches
    reaching: Array = (upper >= least).nonzero()[0]
    return reaching


def _kth(values: Array, k: int) -> float:
    """The k-th highest of values (n,), or a little less: of many values, only the best of each group are ranked."""
    k = min(k, len(values))
    heads = values
    if 2 * k * GROUP <= len(values):
        whole = len(values) // GROUP * GROUP
        heads = values[:whole].reshape(GROUP, -1).max(0)
    return float(numpy.partition(heads, -k)[-k])
