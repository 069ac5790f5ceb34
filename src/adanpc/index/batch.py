"""Nearest rows of many queries, in torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from adanpc.index import single
from adanpc.index.blocks import TILE
from adanpc.index.grid import fine_weight, hidden_from_both, to_main_memory
from adanpc.index.protocol import Found, Wanted
from adanpc.index.scan import COORDINATES, scan

LONG = 1 << 13  # from this many coordinates in a query's candidates, NumPy scores them faster, query by query

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex


def nearest(index: ExactIndex, queries: Tensor, wanted: Sequence[Wanted], exclude: Tensor | None) -> list[Found]:
    """Returns the results of a batch of queries (B, D) whose bounds fit into memory.

    Candidates are the rows with the highest bounds. They suffice if no other bound reaches the exact k-th similarity.
    If they do not suffice for a query, int8 rows get tighter bounds from their second byte. If even that does not
    settle a query, because many rows are nearly equal, all rows whose bound reaches the k-th similarity are scored for
    that query.
    """
    all_bounds, slack = _bounds(index, queries)
    found = []
    for number, (k, group) in enumerate(wanted):
        bounds = all_bounds
        if number < len(wanted) - 1:
            bounds = all_bounds.clone()  # the next search needs them unchanged
        _hide(index, bounds, index.hidden_from(group))
        found.append(_nearest_by(index, queries, bounds, slack, k, exclude))
    return found


def _nearest_by(
    index: ExactIndex,
    queries: Tensor,
    bounds: Tensor,
    slack: Tensor,
    k: int,
    exclude: Tensor | None,
    *,
    finer: bool = False,
) -> Found:
    """Returns the k nearest rows, given bounds (tiles, B, 64) and their slack (B,).

    ``finer`` means that the bounds already use both bytes of int8 rows, so that they cannot be tightened further.
    """
    excluded = 0 if exclude is None else exclude.shape[1]
    width = k + excluded + 16
    if index.storage == "int8":
        width += k + 16  # bounds of int8 rows are looser, so more candidates are needed
    width = min(width, index.padded)
    found, others = _best_of(index, queries, bounds, exclude, k, width)
    if width == index.padded:
        return found  # there are no others
    unsettled = (others + slack >= found.similarity[:, -1]) & ~others.isneginf()
    if index.storage == "int8" and not finer and unsettled.any():
        some = unsettled.nonzero()[:, 0]
        finer_bounds, finer_slack = _finer(index, queries[some], bounds[:, some], slack[some])
        excluded_there = None if exclude is None else exclude[some]
        settled = _nearest_by(index, queries[some], finer_bounds, finer_slack, k, excluded_there, finer=True)
        for column, values in zip(found, settled, strict=True):
            column[some] = values
        return found
    for query in unsettled.nonzero()[:, 0].tolist():
        wide = _best_of_all(index, queries, bounds, exclude, found, slack, query)
        for column, value in zip(found, wide, strict=True):
            column[query] = value[0]
    return found


def _best_of_all(
    index: ExactIndex,
    queries: Tensor,
    bounds: Tensor,
    exclude: Tensor | None,
    found: Found,
    slack: Tensor,
    query: int,
) -> Found:
    """Returns the k best for one query among all rows whose bound reaches the k-th similarity found so far."""
    reach = found.similarity[query, -1] - slack[query]
    everyone = bounds[:, query].flatten()
    candidates = ((everyone >= reach) & ~everyone.isneginf()).nonzero()[:, 0]
    excluded = single.NOBODY
    if exclude is not None:
        excluded = to_main_memory(exclude[query])
    slots = to_main_memory(candidates)
    return single.ranked(index, to_main_memory(queries[query]), slots, found.slots.shape[1], excluded)


def _best_of(
    index: ExactIndex, queries: Tensor, bounds: Tensor, exclude: Tensor | None, k: int, width: int
) -> tuple[Found, Tensor]:
    """Returns the k best of the ``width`` candidates with the highest bounds, and a bound (B,) on all other rows."""
    bound, near = _highest(bounds, width)  # (B, width)
    exact = _exact(index, queries, near)
    ids = index.ids(near)
    unusable = bound.isneginf()
    if exclude is not None:
        unusable |= (ids[:, :, None] == exclude[:, None]).any(2)
    exact.masked_fill_(unusable, -torch.inf)
    by_id = ids.argsort(1)
    order = by_id.gather(1, exact.gather(1, by_id).argsort(dim=1, descending=True, stable=True)[:, :k])
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


def _bounds(index: ExactIndex, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Returns upper bounds (tiles, B, 64) on similarities and their slack (B,); arbitrary where no row is stored."""
    bounds = queries.new_empty(index.padded // TILE, len(queries), TILE)
    slack = scan(index.blocks.used("row", index.padded), queries, bounds)
    if index.storage == "int8":
        scales = index.blocks.used("scale", index.padded)
        residuals = index.blocks.used("residual", index.padded)
        done = 0
        for scale, residual in zip(scales, residuals, strict=True):
            part = bounds[done : done + len(scale) // TILE]
            torch.addcmul(residual.view(-1, 1, TILE), part, scale.view(-1, 1, TILE), out=part)
            done += len(scale) // TILE
    return bounds, slack * (1 + index.residual) + 1e-6


def _finer(index: ExactIndex, queries: Tensor, bounds: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
    """Returns upper bounds (tiles, B, 64) from both bytes of int8 rows and their slack (B,), given those from one byte.

    Where one coordinate of a row dominates, the first byte says little about all the others.
    """
    fine = torch.empty_like(bounds)
    error = scan(index.blocks.used("fine", index.padded), queries, fine)
    residual = torch.cat(index.blocks.used("residual", index.padded)).view(-1, 1, TILE)
    scale = torch.cat(index.blocks.used("scale", index.padded)).view(-1, 1, TILE)
    hidden = hidden_from_both(index.dim)
    finer = bounds - residual + fine * fine_weight(scale)
    finer.masked_fill_(bounds.isneginf(), -torch.inf)  # slots that were never written hold arbitrary values
    return finer, slack + error * (index.residual + hidden) + hidden + 1e-6


def _hide(index: ExactIndex, bounds: Tensor, hidden: Tensor | None) -> None:
    """Sets the bounds (tiles, B, 64) of hidden slots (padded,) and of slots not in use to -inf."""
    tail = index.padded - index.slots
    if tail:
        bounds[-1, :, TILE - tail :] = -torch.inf
    if hidden is None:
        return
    hidden = hidden.view(-1, 1, TILE)
    holes = hidden.sum((1, 2)).nonzero()[:, 0]  # sum is faster than any in torch
    if len(holes):
        bounds[holes] = bounds[holes].masked_fill(hidden[holes], -torch.inf)


def _highest(bounds: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the ``width`` highest bounds (tiles, B, 64) of each query and their slots, both (B, width), unsorted.

    They are all in the ``width`` tiles with the highest peaks, so no other tile is searched.
    """
    peaks = bounds.amax(2).T  # (B, tiles)
    tiles = _places_of_highest(peaks, min(width, peaks.shape[1]))  # (B, tiles)
    inside = bounds[tiles, torch.arange(len(tiles), device=tiles.device)[:, None]].flatten(1)  # (B, tiles * 64)
    places = _places_of_highest(inside, width)
    return inside.gather(1, places), tiles.gather(1, places // TILE) * TILE + places % TILE


def _places_of_highest(values: Tensor, count: int) -> Tensor:
    """Returns the columns (B, count) of the highest values (B, n), unsorted; NumPy is faster in main memory."""
    if not values.is_cpu:
        return values.topk(count, sorted=False).indices
    places = numpy.argpartition(values.numpy(), -count, axis=1)[:, -count:]
    return torch.from_numpy(places)
