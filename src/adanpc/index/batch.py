"""The nearest rows of many queries, in torch, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from adanpc.index import single
from adanpc.index.blocks import TILE
from adanpc.index.protocol import Found
from adanpc.index.scan import COORDINATES, scan

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex


def nearest(index: ExactIndex, queries: Tensor, k: int, hidden: Tensor | None, exclude: Tensor | None) -> Found:
    """The search of as many queries as the bounds have room for.

    Candidates are the rows with the highest bounds. They are enough once no other bound reaches the exact k-th
    similarity. Queries for which they are not, because many rows are nearly equal, are finished one by one with all
    rows whose bound does.
    """
    bounds, slack = _bounds(index, queries)
    _hide(index, bounds, hidden)
    excluded = 0 if exclude is None else exclude.shape[1]
    width = k + excluded + 16
    if index.storage == "int8":
        width += k + 16  # its bounds are wider, so more candidates are needed
    width = min(width, index.padded)
    found, others = _best_of(index, queries, bounds, exclude, k, width)
    if width == index.padded:
        return found  # there are no others
    unsettled = (others + slack >= found.similarity[:, -1]) & ~others.isneginf()
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
    """The k best for one query, among all rows whose bound reaches the k-th similarity found so far."""
    reach = found.similarity[query, -1] - slack[query]
    everyone = bounds[:, query].flatten()
    candidates = ((everyone >= reach) & ~everyone.isneginf()).nonzero()[:, 0]
    excluded = numpy.zeros(0, numpy.int64)
    if exclude is not None:
        excluded = exclude[query].cpu().numpy()
    return single.ranked(index, queries[query : query + 1], candidates, found.slots.shape[1], excluded)


def _best_of(
    index: ExactIndex, queries: Tensor, bounds: Tensor, exclude: Tensor | None, k: int, width: int
) -> tuple[Found, Tensor]:
    """The k best of the ``width`` candidates with the highest bounds, and the bound of all other rows (B,)."""
    peaks = bounds.amax(2).T  # (B, tiles)
    parts = []
    others = []
    size = max(1, COORDINATES // (width * index.dim))
    for start in range(0, len(queries), size):
        part = slice(start, start + size)
        bound, near = _highest(bounds[:, part], peaks[part], width)  # (b, width)
        rows = index.rows(near.flatten()).view(*near.shape, index.dim)
        exact = torch.bmm(rows.double(), queries[part].double()[:, :, None])[:, :, 0]
        ids = index.ids(near.flatten()).view(near.shape)
        unusable = bound.isneginf()
        if exclude is not None:
            unusable |= (ids[:, :, None] == exclude[part][:, None]).any(2)
        exact.masked_fill_(unusable, -torch.inf)
        by_id = ids.argsort(1)
        order = by_id.gather(1, exact.gather(1, by_id).argsort(dim=1, descending=True, stable=True)[:, :k])
        best = exact.gather(1, order)
        nobody = best.isneginf()
        slots = near.gather(1, order).masked_fill(nobody, -1)
        parts.append(Found(slots, ids.gather(1, order).masked_fill(nobody, -1), best))
        others.append(bound[:, -1].double())
    if len(parts) == 1:
        return parts[0], others[0]
    found = Found(
        torch.cat([part.slots for part in parts]),
        torch.cat([part.ids for part in parts]),
        torch.cat([part.similarity for part in parts]),
    )
    return found, torch.cat(others)


def _bounds(index: ExactIndex, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Upper bounds of all similarities (tiles, B, 64) and their slack (B,); any number where no row is."""
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


def _hide(index: ExactIndex, bounds: Tensor, hidden: Tensor | None) -> None:
    """Makes the bounds (tiles, B, 64) of hidden slots (padded,), and of those not in use, -inf."""
    tail = index.padded - index.slots
    if tail:
        bounds[-1, :, TILE - tail :] = -torch.inf
    if hidden is None:
        return
    hidden = hidden.view(-1, 1, TILE)
    holes = hidden.sum((1, 2)).nonzero()[:, 0]  # torch sums faster than it asks for any
    if len(holes):
        bounds[holes] = bounds[holes].masked_fill(hidden[holes], -torch.inf)


def _highest(bounds: Tensor, peaks: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` highest of bounds (tiles, B, 64) for each query and their slots, (B, width), highest first.

    They lie in the ``width`` tiles with the highest peaks (B, tiles), so only those are looked into.
    """
    tiles = peaks.topk(min(width, peaks.shape[1]), sorted=False).indices  # (B, tiles)
    inside = bounds[tiles, torch.arange(len(tiles), device=tiles.device)[:, None]].flatten(1)  # (B, tiles * 64)
    best = inside.topk(width)
    return best.values, tiles.gather(1, best.indices // TILE) * TILE + best.indices % TILE
