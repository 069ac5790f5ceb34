"""How many neighbors of each kind Proposition 3 would ask for, from the rows of a bank."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from adanpc.core import MemoryBank, Neighbors, Origin
from adanpc.core.bank import ACTIVE
from adanpc.errors import AdaNPCError
from adanpc.lab.show.exhibit import Chart, Series
from adanpc.lab.theory.bounds import Assumptions, best_split, unit_ball, vote_error

FINEST = 1e-6  # rows that are closer are the same row twice
LARGEST = 100  # dimensions, beyond which volumes leave the range of numbers


@dataclass(frozen=True)
class Split:
    """What a bank says about its own vote.

    Args:
        k_s: source neighbors with the least bound.
        k_u: target neighbors.
        n_s: source rows that may vote.
        n_u: all others.
        joint: how many of the k nearest of all rows are target rows, on average: the split that no one has to choose.
        known: the estimated constants; margin and its constant are left at 1, as they do not move the least bound.
    """

    k_s: int
    k_u: int
    n_s: int
    n_u: int
    joint: float
    known: Assumptions


def split_of_bank(bank: MemoryBank, k: int, probes: int = 1000, seed: int = 0) -> Split:
    """The k_s and k_u with the least bound of Proposition 3, its constants estimated from the rows of a bank.

    At most ``probes`` target rows are drawn. Each is asked for its j = min(k, n_s, n_u - 1) nearest source rows and its
    j nearest target rows, itself excluded; r_i is the distance to the i-th on the unit sphere. Then

    * d: the maximum of the likelihood (Levina and Bickel, averaged as MacKay and Ghahramani do), from target rows:
      1/d is the mean over probes and i < j of ln(r_j / r_i), without rows that repeat the probe.
    * c_mu mu_- and c_mu* mu_-: j / (n pi_d r^d), with r the median of r_j over probes, among source rows and among
      target rows. Assumption 1 means the least over all points; the median is what a typical target row sees. The
      larger is reported as the density and the overlaps are relative to it; the bound has products alone.
    * C_ada: the root of the mean squared distance between the vote shares of the j source rows and of the j target
      rows. C: the same between the source shares of two random probes, over their squared distance. Of each square
      the variance that comes from j votes is subtracted, and what is then negative is 0. The paper's constants are
      suprema, but the supremum of a noisy estimate measures its noise.

    Labels of target rows are taken as they are. Where they are answers of the bank itself, C_ada says how much more
    certain those are than the source rows around them, and nothing about the true labels.
    """
    ids, n_s = _targets(bank)
    n_u, j = len(ids), min(k, n_s, len(ids) - 1)
    if j < 2:
        raise AdaNPCError(f"k, source rows and other target rows must be at least 2, got {k}, {n_s} and {n_u - 1}")
    draw = torch.Generator().manual_seed(seed)
    ids = ids[torch.randperm(n_u, generator=draw)[:probes]]
    points = bank.rows(ids)
    source = bank.search(points, j, source=True)
    target = bank.search(points, j, source=False, exclude=ids[:, None])
    near = bank.search(points, k, exclude=ids[:, None]).ids
    known = _estimate(source, target, points, (n_s, n_u - 1), bank.classes)
    k_s, k_u = best_split(k, n_s, n_u, known)
    others = (near >= 0) & ~_is_source(bank, near)
    return Split(k_s, k_u, n_s, n_u, float(others.sum(1).double().mean()), known)


def split_chart(split: Split) -> Chart:
    """The bound on the error of a vote share over k_u, with the best k_u and the joint vote's marked."""
    k, most = split.k_s + split.k_u, min(split.k_s + split.k_u, split.n_u)

    def at(k_u: int) -> float:
        return vote_error(k - k_u, k_u, split.n_s, split.n_u, split.known)

    choices = tuple(range(max(0, k - split.n_s), most + 1))
    near = min(choices, key=lambda k_u: abs(k_u - split.joint))
    series = (
        Series("bound", choices, tuple(map(at, choices)), bound=True),
        Series("least", (split.k_u,), (at(split.k_u),)),
        Series("k nearest of all rows", (near,), (at(near),)),
    )
    title = f"Proposition 3 on a bank of {split.n_s} source and {split.n_u} target rows, k = {k}"
    return Chart(title, "k_u", "bound on the error of a vote share", series)


def _targets(bank: MemoryBank) -> tuple[Tensor, int]:
    """The ids of target rows that may vote, and the number of such source rows."""
    table = bank.table("id", "origin", "state")
    active, source = table["state"] == ACTIVE, table["origin"] == Origin.SOURCE
    return table["id"][active & ~source], int((active & source).sum())


def _is_source(bank: MemoryBank, ids: Tensor) -> Tensor:
    table = bank.table("id", "origin")
    return torch.isin(ids, table["id"][table["origin"] == Origin.SOURCE])


def _estimate(source: Neighbors, target: Neighbors, points: Tensor, rows: tuple[int, int], classes: int) -> Assumptions:
    dim = _dimension(target)
    reach = [_density(near, count, dim) for near, count in zip((source, target), rows, strict=True)]
    shares, j = _shares(source, classes), source.labels.shape[1]
    apart = (points - points.roll(1, 0)).double().square().sum(1).clamp(min=FINEST**2)  # probes are in random order
    slope = (_squared_gap(shares, shares.roll(1, 0), j) / apart).mean().clamp(min=0)
    gap = _squared_gap(shares, _shares(target, classes), j).mean().clamp(min=0)
    return Assumptions(
        dim=dim,
        source_overlap=reach[0] / max(reach),
        target_overlap=reach[1] / max(reach),
        density=max(reach),
        smoothness=sqrt(float(slope)),
        gap=sqrt(float(gap)),
    )


def _distances(near: Neighbors) -> Tensor:
    return (2 - 2 * near.similarity).clamp(min=0).sqrt()  # (B, J)


def _dimension(near: Neighbors) -> float:
    distance = _distances(near)
    ratios = (distance[:, -1:] / distance[:, :-1])[distance[:, :-1] > FINEST]
    inverse = float(ratios.log().sum()) / max(len(ratios), 1)
    if inverse * LARGEST < 1:
        raise AdaNPCError(f"target rows must have a dimension of at most {LARGEST}, but all their neighbors are as far")
    return 1 / inverse


def _density(near: Neighbors, rows: int, dim: float) -> float:
    distance, count = float(_distances(near)[:, -1].median()), near.ids.shape[1]
    if distance < FINEST:
        raise AdaNPCError(
            f"k must exceed the number of equal rows, but most target rows have {count} rows equal to them"
        )
    return float(count / (rows * unit_ball(dim) * distance**dim))


def _shares(near: Neighbors, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(near.labels, classes).double().mean(1)  # (B, C)


def _squared_gap(one: Tensor, other: Tensor, count: int) -> Tensor:
    """Half the squared distance of two shares (B, C) of so many votes, without what chance adds to it, (B,)."""
    chance = sum(((share * (1 - share)).sum(1) / (count - 1) for share in (one, other)), torch.zeros(len(one)))
    return ((one - other).square().sum(1) - chance) / 2
