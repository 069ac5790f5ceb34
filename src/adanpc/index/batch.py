"""The nearest rows of many queries, in torch, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adanpc.index.scan import COORDINATES, TILE, scan

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex


def nearest(
    index: ExactIndex, queries: Tensor, k: int, usable: Tensor, ids: Tensor, exclude: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The search of as many queries as the bounds have room for.

    Candidates are the rows with the highest bounds. They are enough once no other bound reaches the exact k-th
    similarity; queries for which they are not are asked again with twice as many.
    """
    bounds, slack = _bounds(index, queries)
    _hide(bounds, ~usable)
    peaks = bounds.amax(2).T  # (B, tiles)
    k, hidden = min(k, index.slots), 0 if exclude is None else exclude.shape[1]
    width = min(k + hidden + (k + 32 if index.storage == "int8" else 16), index.slots)
    slots, similarity, rest = _ranked(index, queries, bounds, peaks, ids, exclude, k, width)
    while width < index.slots:
        again = ((rest + slack >= similarity[:, -1]) & ~rest.isneginf()).nonzero()[:, 0]
        if not len(again):
            break
        width = min(2 * width, index.slots)
        some = None if exclude is None else exclude[again]
        wider = _ranked(index, queries[again], bounds[:, again], peaks[again], ids, some, k, width)
        slots[again], similarity[again], rest[again] = wider
    return slots, similarity


def _ranked(
    index: ExactIndex,
    queries: Tensor,
    bounds: Tensor,
    peaks: Tensor,
    ids: Tensor,
    exclude: Tensor | None,
    k: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots and exact similarities (B, k) of the best of ``width`` candidates, and the bound of all others (B,)."""
    ranked = []
    size = max(1, COORDINATES // (width * index.dim))
    for start in range(0, len(queries), size):
        part = slice(start, start + size)
        bound, near = _highest(bounds[:, part], peaks[part], width)
        rows = index.rows(near.flatten()).view(*near.shape, index.dim)
        exact = torch.bmm(rows.double(), queries[part].double()[:, :, None])[:, :, 0]
        hidden, numbers = bound.isneginf(), ids[near]
        if exclude is not None:
            hidden |= (numbers[:, :, None] == exclude[part][:, None]).any(2)
        exact.masked_fill_(hidden, -torch.inf)
        by_id = numbers.argsort(1)
        order = by_id.gather(1, exact.gather(1, by_id).argsort(dim=1, descending=True, stable=True)[:, :k])
        best = exact.gather(1, order)
        ranked.append((near.gather(1, order).masked_fill(best.isneginf(), -1), best, bound[:, -1].double()))
    if len(ranked) == 1:
        return ranked[0]
    slots, similarity, rest = (torch.cat(column) for column in zip(*ranked, strict=True))
    return slots, similarity, rest


def _bounds(index: ExactIndex, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Upper bounds of all similarities (tiles, B, 64) and their slack (B,); any number where no row is."""
    bounds = queries.new_empty(index.slots // TILE, len(queries), TILE)
    slack = scan(index.used("row"), queries, bounds)
    if index.storage == "int8":
        for block, (scale, residual) in enumerate(zip(index.used("scale"), index.used("residual"), strict=True)):
            start = block * index.block // TILE
            part = bounds[start : start + len(scale) // TILE]
            torch.addcmul(residual.view(-1, 1, TILE), part, scale.view(-1, 1, TILE), out=part)
    return bounds, slack * (1 + index.residual) + 1e-6


def _hide(bounds: Tensor, hidden: Tensor) -> None:
    """Makes the bounds (tiles, B, 64) of hidden slots (slots,) -inf."""
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
