"""Nearest rows of queries in main memory, by a kernel or in NumPy: calls into torch take longer than a small search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor

from adanpc.index.blocks import TILE
from adanpc.index.grid import Array, decode, fine_weight, hidden_from_both
from adanpc.index.kernels import Nearest, Rows, chosen, nearest_rows, score_rows
from adanpc.index.protocol import Found, Wanted, one_after_another
from adanpc.index.scan import COORDINATES, kernel_error, multiplying_path, scan

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex

# With more int8 candidates than the wanted ones and these, scanning the second byte is faster than scoring them all.
SPARE_CANDIDATES = 64
SLOTS_PER_CANDIDATE = 128  # one more candidate for this many slots
LEAST_BYTES = 1 << 18  # from this many coordinates, reading a byte of each first takes less time
SLOTS_PER_SCORED = 16  # a kernel scores one more candidate for this many slots before it gives up
RANKED_TOGETHER = 16  # of this many values, only the best is ranked
LOWEST_FINITE = float(numpy.finfo(numpy.float32).min)
NOBODY = numpy.zeros(0, numpy.int64)  # no ids to exclude
EVERY_ROW = numpy.zeros(0, numpy.uint8)  # instead of groups


def nearest(index: ExactIndex, queries: Tensor, wanted: Sequence[Wanted], exclude: Tensor | None) -> list[Found]:
    """Returns the results of queries (B, D) in main memory: by a kernel as far as that settles them, else in NumPy."""
    by_bytes = reads_bytes(index)
    float32 = index.storage == "float32" and not by_bytes
    path = multiplying_path(index.padded * index.dim, float32=float32)
    worthwhile = by_bytes or (index.storage != "int8" and len(queries) == len(wanted) == 1)
    if path is None or exclude is not None or not worthwhile:
        return _nearest_in_numpy(index, queries, wanted, exclude)
    answers = _nearest_by_kernel(index, path, queries.numpy(), wanted, by_bytes=by_bytes)
    found = []
    for pair, (k, _) in enumerate(wanted):
        found.append(Found(*[_of_pair(column, pair, k) for column in answers[:3]]))
    if not answers.all_settled:
        _settle_in_numpy(index, queries, wanted, found, torch.from_numpy(~answers.settled))
    return found


def _settle_in_numpy(
    index: ExactIndex, queries: Tensor, wanted: Sequence[Wanted], found: list[Found], unsettled: Tensor
) -> None:
    """Replaces the results of some queries (B,) by those that are found in NumPy."""
    settled = _nearest_in_numpy(index, queries[unsettled], wanted, None)
    for all_queries, some in zip(found, settled, strict=True):
        for column, values in zip(all_queries, some, strict=True):
            column[unsettled] = values


def reads_bytes(index: ExactIndex) -> bool:
    """Returns whether a kernel reads a byte of each coordinate of all rows, and more of those that it scores."""
    coordinates = index.padded * index.dim
    few = coordinates < LEAST_BYTES and index.storage != "int8"
    if few or not index.bytes_tell:
        return False
    return multiplying_path(coordinates, float32=False) is not None


def _of_pair(values: Array, pair: int, k: int) -> Tensor:
    """Returns the first k values (B, k) that one of W searches found, given those of all (B, W, K)."""
    return torch.from_numpy(numpy.ascontiguousarray(values[:, pair, :k]))


def _nearest_by_kernel(
    index: ExactIndex, path: str, queries: Array, wanted: Sequence[Wanted], *, by_bytes: bool
) -> Nearest:
    """Returns the rows nearest to queries (B, D) by a single call of a kernel."""
    numbers = []
    groups = EVERY_ROW
    for k, group in wanted:
        code = index.group_code(group)
        numbers.append((k, max(code, 0)))
        if code >= 0:
            groups = index.groups
    arrays = index.blocks.arrays()
    columns = ["row", "id"]
    if index.storage == "int8":
        columns = ["fine", "id"]
    if by_bytes:
        columns += index.scanned
    rows = Rows([arrays[name] for name in columns], index.blocks.block, index.slots)
    crowd = _crowd(max(k for k, _ in wanted)) + index.slots // SLOTS_PER_SCORED
    slack = 2 * (kernel_error(index.dim) + 1e-6)
    return nearest_rows(path, rows, queries, numbers, groups, crowd=crowd, slack=slack)


def _nearest_in_numpy(
    index: ExactIndex, queries: Tensor, wanted: Sequence[Wanted], exclude: Tensor | None
) -> list[Found]:
    """``nearest``, using NumPy for everything but the scan.

    Candidates are all rows whose upper bound reaches the k-th highest lower bound: no other row can be among the best.
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
            if index.storage == "int8" and len(near) > most + SPARE_CANDIDATES + index.slots // SLOTS_PER_CANDIDATE:
                if finer is None:
                    finer = _finer_bounds(index, seen, error, queries[number : number + 1])
                near = _candidates(finer, usable, most)
            parts.append(ranked(index, query, near, k, excluded))
    return [one_after_another(parts) for parts in found]


def _crowd(wanted: int) -> int:
    """Returns how many candidates are so many that surplus copies of equal rows are left out before they are scored."""
    return 4 * wanted + 256


def ranked(index: ExactIndex, query: Array, candidates: Array, k: int, excluded: Array) -> Found:
    """Returns the k best candidates (n,) by exact similarity to one query (D,), padded to k."""
    slots = candidates
    ids = index.blocks.read(slots, "id")["id"]
    if len(slots) > _crowd(k + len(excluded)):
        kept = distinct(index, slots, ids, k + len(excluded))
        slots = slots[kept]
        ids = ids[kept]
    if len(excluded):
        allowed = ~numpy.isin(ids, excluded)
        slots = slots[allowed]
        ids = ids[allowed]
    similarity = exact(index, slots, query.astype(numpy.float64, copy=False))
    order = numpy.lexsort((ids, -similarity))[:k]
    return _padded(slots[order], ids[order], similarity[order], k, index.device)


def distinct(index: ExactIndex, slots: Array, ids: Array, most: int) -> Array:
    """Returns the positions of slots (n,), keeping at most ``most`` copies of equal rows: those with the lowest ids.

    Equal rows are equally similar and ties go to the lowest ids, so no other copy can be among the best. Without this,
    a bank full of copies of one row would have all of them scored for every query near that row.
    """
    hashes = index.blocks.read(slots, "hash")["hash"]
    order = numpy.lexsort((ids, hashes))  # equal rows side by side, lowest ids first
    ordered = hashes[order]
    kept = numpy.ones(len(order), bool)
    # Equal rows are adjacent, so a row is one copy too many if it equals the row ``most`` places before it.
    kept[most:] = ordered[most:] != ordered[:-most]
    positions: Array = numpy.sort(order[kept])
    return positions


def _padded(slots: Array, ids: Array, similarity: Array, k: int, device: torch.device) -> Found:
    """Returns the result of one query, padded to (1, k)."""
    short = k - len(slots)
    if short:
        nobody = numpy.full(short, -1)
        slots = numpy.concatenate([slots, nobody])
        ids = numpy.concatenate([ids, nobody])
        similarity = numpy.concatenate([similarity, numpy.full(short, -numpy.inf)])
    return Found(_query(slots, device), _query(ids, device), _query(similarity, device))


def _query(column: Array, device: torch.device) -> Tensor:
    """Returns the values of one query (K,) as a batch of one (1, K)."""
    return torch.from_numpy(column[None]).to(device)


class Bounds(NamedTuple):
    """Bounds on the similarities of all rows to a query; arbitrary in slots without a row."""

    upper: Array  # (slots,)
    lower: Array  # (slots,)
    slack: float  # by how much either bound may be off


def _bounds(index: ExactIndex, products: Array, error: float) -> Bounds:
    """Returns bounds from the products (slots,) of a scan, whose error is relative to the length of a row."""
    slack = error * (1 + index.residual) + 1e-6
    if index.storage != "int8":
        return Bounds(products, products, slack)
    scale = _joined(index.blocks.used("scale", index.slots))
    residual = _joined(index.blocks.used("residual", index.slots))
    with numpy.errstate(all="ignore"):  # slots that were never written hold arbitrary values
        upper = products * scale + residual
        lower = upper - 2 * residual
    return Bounds(upper, lower, slack)


def _finer_bounds(index: ExactIndex, products: Array, error: float, query: Tensor) -> Bounds:
    """Returns bounds from both bytes of int8 rows, for a query (1, D).

    The first byte says little about a row in which one coordinate dominates, because that coordinate sets the step for
    all the others.
    """
    fine = numpy.empty((index.padded // TILE, 1, TILE), numpy.float32)
    fine_error = float(scan(index.blocks.used("fine", index.padded), query, torch.from_numpy(fine))[0])
    scale = _joined(index.blocks.used("scale", index.slots))
    with numpy.errstate(all="ignore"):  # slots that were never written hold arbitrary values
        similarity = products * scale + fine.reshape(-1)[: index.slots] * fine_weight(scale)
    hidden = hidden_from_both(index.dim)
    slack = error * (1 + index.residual) + fine_error * (index.residual + hidden) + hidden + 1e-6
    return Bounds(similarity, similarity, slack)


def _joined(blocks: list[Tensor]) -> Array:
    """Returns the blocks of a column with one number per slot as a single array (slots,)."""
    arrays = [block.numpy()[:, 0] for block in blocks]
    if len(arrays) == 1:
        return arrays[0]
    return numpy.concatenate(arrays)


def _only(usable: Array | None, bounds: Array) -> Array:
    """Returns bounds (slots,) with -inf in slots that must not be found."""
    if usable is None:
        return bounds
    return numpy.where(usable, bounds, numpy.float32(-numpy.inf))


def exact(index: ExactIndex, slots: Array, query: Array) -> Array:
    """Returns the exact similarities (n,) of the rows in these slots (n,) to one query (D,), both float64."""
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
    """Returns the exact similarity (n,) of the row in each slot (n,) to the query that owns it, all float64.

    Args:
        index: the index in main memory that holds the rows.
        slots: (n,) where the rows are stored.
        owners: (n,) for each slot, the number of its query.
        queries: (B, D) float64.
    """
    path = chosen()
    if path != "numpy" and "fine" not in index.encoded:
        return score_rows(path, index.blocks.arrays()["row"], index.blocks.block, slots, owners, queries)
    similarity = numpy.empty(len(slots))
    for number in numpy.unique(owners):
        own = owners == number
        similarity[own] = exact(index, slots[own], queries[number])
    return similarity


def _candidates(bounds: Bounds, usable: Array | None, k: int) -> Array:
    """Returns the usable slots whose upper bound may reach the k-th highest lower bound."""
    upper = _only(usable, bounds.upper)
    lower = upper
    if bounds.lower is not bounds.upper:
        lower = _only(usable, bounds.lower)
    least = max(LOWEST_FINITE, _kth(lower, k) - 2 * bounds.slack)  # finite, so that -inf never reaches it
    reaching: Array = (upper >= least).nonzero()[0]
    return reaching


def _kth(values: Array, k: int) -> float:
    """Returns the k-th highest of values (n,), or a little less: of many values, only the best of every 16 count."""
    k = min(k, len(values))
    heads = values
    if 2 * k * RANKED_TOGETHER <= len(values):
        whole = len(values) // RANKED_TOGETHER * RANKED_TOGETHER
        heads = values[:whole].reshape(RANKED_TOGETHER, -1).max(0)
    return float(numpy.partition(heads, -k)[-k])
