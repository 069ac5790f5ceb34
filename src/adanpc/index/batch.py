"""Nearest rows of many queries, in torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor

from adanpc.index import single
from adanpc.index.blocks import TILE
from adanpc.index.grid import fine_weight, hidden_from_both, to_main_memory
from adanpc.index.protocol import Found, Wanted
from adanpc.index.scan import COORDINATES, scan

SPARE_CANDIDATES = 16  # scored beyond those that are needed
LONG = 1 << 13  # from this many coordinates in a query's candidates, NumPy scores them faster, query by query

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex


class Bounds(NamedTuple):
    """Upper bounds on the similarities of the rows in some tiles to B queries; -inf where no row may be found."""

    upper: Tensor  # (T, B, 64)
    tiles: Tensor  # (T,) the numbers of these tiles
    slack: Tensor  # (B,) by how much a bound may be off

    def slots(self, places: Tensor) -> Tensor:
        """Returns the slots of rows, given their places among the rows of these tiles."""
        return self.tiles[places // TILE] * TILE + places % TILE


def nearest(index: ExactIndex, queries: Tensor, wanted: Sequence[Wanted], exclude: Tensor | None) -> list[Found]:
    """Returns the results of a batch of queries (B, D) whose bounds fit into memory.

    Candidates are the rows with the highest bounds. They suffice if no other bound reaches the exact k-th similarity.
    If they do not suffice for a query, int8 rows get tighter bounds from their second byte. If even that does not
    settle a query, because many rows are nearly equal, all rows whose bound reaches the k-th similarity are scored for
    that query.
    """
    products, errors = scanned(index, queries)
    return nearest_by(index, queries, products, errors, wanted, exclude)


def scanned(index: ExactIndex, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Returns products (tiles, B, 64) of all rows and queries (B, D), and their errors (B,); see ``scan``."""
    products = queries.new_empty(index.padded // TILE, len(queries), TILE)
    errors = scan(index.blocks.used("row", index.padded), queries, products)
    return products, errors


def nearest_by(
    index: ExactIndex,
    queries: Tensor,
    products: Tensor,
    errors: Tensor,
    wanted: Sequence[Wanted],
    exclude: Tensor | None,
) -> list[Found]:
    """Returns the result of ``nearest``, given products (tiles, B, 64) and their errors (B,), as ``scan`` gives them.

    Only products of slots not in use are overwritten.
    """
    upper, slack = _bounds(index, products, errors)
    found = []
    for k, group in wanted:
        width = k + SPARE_CANDIDATES
        if exclude is not None:
            width += exclude.shape[1]
        if index.storage == "int8":
            width += k + SPARE_CANDIDATES  # bounds of int8 rows are looser, so more candidates are needed
        bounds = _shown(index, upper, slack, group, width)
        found.append(_nearest_by(index, queries, bounds, k, width, exclude))
    return found


def _nearest_by(
    index: ExactIndex,
    queries: Tensor,
    bounds: Bounds,
    k: int,
    width: int,
    exclude: Tensor | None,
) -> Found:
    """Returns the k nearest rows: by the ``width`` highest bounds where these settle it, otherwise by more work."""
    found, unsettled = _by_highest(index, queries, bounds, k, width, exclude)
    if index.storage == "int8" and len(unsettled):
        _settle_by_both_bytes(index, queries, bounds, k, width, exclude, found, unsettled)
    else:
        _settle_by_scores(index, queries, bounds, exclude, found, unsettled)
    return found


def _by_highest(
    index: ExactIndex, queries: Tensor, bounds: Bounds, k: int, width: int, exclude: Tensor | None
) -> tuple[Found, Tensor]:
    """Returns the k best of ``width`` rows with the highest bounds, and the queries (n,) that they do not settle."""
    every = len(bounds.tiles) * TILE
    found, others = _best_of(index, queries, bounds, exclude, k, min(width, every))
    if width >= every:
        return found, torch.empty(0, dtype=torch.int64)  # there are no others
    unsettled = (others + bounds.slack >= found.similarity[:, -1]) & ~others.isneginf()
    return found, unsettled.nonzero()[:, 0]


def _settle_by_both_bytes(
    index: ExactIndex,
    queries: Tensor,
    bounds: Bounds,
    k: int,
    width: int,
    exclude: Tensor | None,
    found: Found,
    unsettled: Tensor,
) -> None:
    """Replaces the results of some queries (n,) by those that bounds from both bytes of int8 rows lead to."""
    some = queries[unsettled]
    finer = _finer_bounds(index, queries, bounds, unsettled)
    excluded = None
    if exclude is not None:
        excluded = exclude[unsettled]
    settled, left = _by_highest(index, some, finer, k, width, excluded)
    _settle_by_scores(index, some, finer, excluded, settled, left)
    for column, values in zip(found, settled, strict=True):
        column[unsettled] = values


def _settle_by_scores(
    index: ExactIndex, queries: Tensor, bounds: Bounds, exclude: Tensor | None, found: Found, unsettled: Tensor
) -> None:
    """Replaces the results of some queries (n,) by the best of all rows whose bound reaches the k-th similarity."""
    for query in unsettled.tolist():
        settled = _best_of_all(index, queries, bounds, exclude, found, query)
        for column, value in zip(found, settled, strict=True):
            column[query] = value[0]


def _best_of_all(
    index: ExactIndex, queries: Tensor, bounds: Bounds, exclude: Tensor | None, found: Found, query: int
) -> Found:
    """Returns the k best for one query among all rows whose bound reaches the k-th similarity found so far."""
    reach = found.similarity[query, -1] - bounds.slack[query]
    everyone = bounds.upper[:, query].flatten()
    candidates = ((everyone >= reach) & ~everyone.isneginf()).nonzero()[:, 0]
    excluded = single.NOBODY
    if exclude is not None:
        excluded = to_main_memory(exclude[query])
    slots = to_main_memory(bounds.slots(candidates))
    return single.ranked(index, to_main_memory(queries[query]), slots, found.slots.shape[1], excluded)


def _best_of(
    index: ExactIndex, queries: Tensor, bounds: Bounds, exclude: Tensor | None, k: int, width: int
) -> tuple[Found, Tensor]:
    """Returns the k best of the ``width`` candidates with the highest bounds, and a bound (B,) on all other rows."""
    bound, places = _highest(bounds.upper, width)  # (B, width)
    near = bounds.slots(places)
    exact = _exact(index, queries, near)
    ids = index.ids(near)
    unusable = bound.isneginf()
    if exclude is not None:
        unusable |= (ids[:, :, None] == exclude[:, None]).any(2)
    exact.masked_fill_(unusable, -torch.inf)
    by_id = ids.argsort(1)
    best_first = exact.gather(1, by_id).argsort(dim=1, descending=True, stable=True)  # so ties go to the lowest id
    order = by_id.gather(1, best_first[:, :k])
    best = exact.gather(1, order)
    nobody = best.isneginf()
    slots = near.gather(1, order).masked_fill(nobody, -1)
    found = Found(slots, ids.gather(1, order).masked_fill(nobody, -1), best)
    return found, bound.amin(1).double()


def _exact(index: ExactIndex, queries: Tensor, near: Tensor) -> Tensor:
    """Returns the exact similarities (B, width) float64 of queries (B, D) to their candidates (B, width)."""
    if queries.is_cpu and near.shape[1] * index.dim >= LONG:
        owners = numpy.repeat(numpy.arange(len(queries)), near.shape[1])
        with numpy.errstate(all="ignore"):  # slots that were never written hold arbitrary values
            scores = single.scores(index, near.numpy().ravel(), owners, queries.numpy().astype(numpy.float64))
        return torch.from_numpy(scores.reshape(near.shape))
    size = max(1, COORDINATES // (near.shape[1] * index.dim))
    parts = []
    for some, theirs in zip(queries.split(size), near.split(size), strict=True):
        rows = index.rows(theirs)  # (b, width, D)
        parts.append(torch.bmm(rows.double(), some.double()[:, :, None])[:, :, 0])
    return torch.cat(parts)


def _bounds(index: ExactIndex, products: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Returns upper bounds (tiles, B, 64) on similarities and their slack (B,); arbitrary where no row is stored.

    The products, and their errors relative to the length of a row, are those of a scan.
    """
    slack = errors * (1 + index.residual) + 1e-6
    if index.storage != "int8":
        return products, slack
    scale = _column(index, "scale")
    residual = _column(index, "residual")
    return torch.addcmul(residual, products, scale), slack


def _column(index: ExactIndex, name: str) -> Tensor:
    """Returns a column with one number per slot as it lies beside bounds, (tiles, 1, 64)."""
    return torch.cat(index.blocks.used(name, index.padded)).view(-1, 1, TILE)


def _finer_bounds(index: ExactIndex, queries: Tensor, bounds: Bounds, some: Tensor) -> Bounds:
    """Returns upper bounds from both bytes of int8 rows for some queries (b,), given those from one byte for all.

    Where one coordinate of a row dominates, the first byte says little about all the others.
    """
    fine = queries.new_empty(index.padded // TILE, len(some), TILE)
    error = scan(index.blocks.used("fine", index.padded), queries[some], fine)
    residual = _column(index, "residual")[bounds.tiles]
    scale = _column(index, "scale")[bounds.tiles]
    hidden = hidden_from_both(index.dim)
    known = bounds.upper[:, some]
    upper = known - residual + fine[bounds.tiles] * fine_weight(scale)
    upper.masked_fill_(known.isneginf(), -torch.inf)  # slots that were never written hold arbitrary values
    slack = bounds.slack[some] + error * (index.residual + hidden) + hidden + 1e-6
    return Bounds(upper, bounds.tiles, slack)


def _shown(index: ExactIndex, upper: Tensor, slack: Tensor, group: int | None, width: int) -> Bounds:
    """Returns bounds on the rows that may be found in a group, given those on all slots (tiles, B, 64).

    Tiles without such a row are left out, unless less than ``width`` rows would remain.
    """
    tail = index.padded - index.slots
    if tail:
        upper[-1, :, TILE - tail :] = -torch.inf  # slots not in use hold arbitrary values
    every = torch.arange(len(upper), device=upper.device)
    hidden = index.hidden_from(group)
    if hidden is None:
        return Bounds(upper, every, slack)
    hidden = hidden.view(-1, TILE)
    shown = hidden.sum(1) < TILE  # sum is faster than any and all in torch
    tiles = shown.nonzero()[:, 0]
    if len(tiles) * TILE < width:
        tiles = every
    copied = upper[tiles]
    hidden = hidden[tiles]
    holes = hidden.sum(1).nonzero()[:, 0]
    if len(holes):
        copied[holes] = copied[holes].masked_fill(hidden[holes][:, None], -torch.inf)
    return Bounds(copied, tiles, slack)


def _highest(upper: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the ``width`` highest bounds (T, B, 64) of each query and their places, both (B, width), unsorted.

    A place is that of a row among the T * 64. If there are more tiles than that, the highest bounds are all in the
    ``width`` tiles with the highest peaks, so no other tile is searched.
    """
    count = len(upper)
    if count <= width:
        inside = upper.transpose(0, 1).flatten(1)  # (B, T * 64)
        places = _places_of_highest(inside, width)
        return inside.gather(1, places), places
    tiles = _places_of_highest(upper.amax(2).T, width)  # (B, width)
    inside = upper[tiles, torch.arange(len(tiles), device=tiles.device)[:, None]].flatten(1)  # (B, width * 64)
    places = _places_of_highest(inside, width)
    return inside.gather(1, places), tiles.gather(1, places // TILE) * TILE + places % TILE


def _places_of_highest(values: Tensor, count: int) -> Tensor:
    """Returns the columns (B, count) of the highest values (B, n), unsorted; NumPy is faster in main memory."""
    if not values.is_cpu:
        return values.topk(count, sorted=False).indices
    places = numpy.argpartition(values.numpy(), -count, axis=1)[:, -count:]
    return torch.from_numpy(places)
