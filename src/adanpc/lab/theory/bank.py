"""How many source and target neighbors Proposition 3 recommends, estimated from the rows of a bank."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from adanpc.core import MemoryBank, Neighbors, Origin
from adanpc.core.table import ACTIVE
from adanpc.errors import AdaNPCError
from adanpc.lab.show.exhibit import Chart, Series
from adanpc.lab.theory.bounds import Assumptions, best_split, unit_ball, vote_error

SAME_ROW = 1e-6  # rows closer than this count as copies of one row
LARGEST_DIM = 100  # beyond this, volumes leave the range of floating-point numbers


@dataclass(frozen=True)
class Split:
    """How to split the neighbors of a bank between source and target rows.

    Args:
        k_s: the number of source neighbors with the smallest bound.
        k_u: the number of target neighbors with the smallest bound.
        n_s: the number of source rows that may vote.
        n_u: the number of target rows that may vote.
        joint: the mean number of target rows among the k nearest of all rows: the split of the ordinary vote.
        known: the estimated constants; the margin and its constant are left at 1, since they do not affect which split
            has the smallest bound.
    """

    k_s: int
    k_u: int
    n_s: int
    n_u: int
    joint: float
    known: Assumptions


def split_of_bank(bank: MemoryBank, k: int, probes: int = 1000, seed: int = 0) -> Split:
    """Returns the k_s and k_u with the smallest bound of Proposition 3, with constants estimated from a bank.

    At most ``probes`` target rows are drawn. For each, its j = min(k, n_s, n_u - 1) nearest source rows and its j
    nearest target rows, without itself, are searched; r_i is the distance to the i-th of them on the unit sphere. Then
    the constants are estimated as follows:

    * d: the maximum-likelihood estimate (Levina and Bickel, averaged as MacKay and Ghahramani do) from target rows.
      1/d is the mean over probes and i < j of ln(r_j / r_i), without rows that repeat the probe.
    * c_mu mu_- and c_mu* mu_-: j / (n pi_d r^d), where r is the median of r_j over probes, among source rows and among
      target rows. Assumption 1 takes the minimum over all points; the median is what a typical target row sees. The
      larger value is reported as the density, and the overlaps are relative to it; the bound uses only their products.
    * C_ada: the root of the mean squared distance between the vote shares of the j source rows and those of the j
      target rows. C: the same between the source shares of two random probes, divided by their squared distance. The
      variance due to only j votes is subtracted from each square, and a negative mean counts as 0. The paper's
      constants are suprema, but the supremum of a noisy estimate measures its noise.

    Labels of target rows are taken as they are. If they are answers of the bank itself, C_ada tells how much more
    certain these answers are than the source rows around them, and nothing about the true labels.

    Args:
        bank: has source rows and others, which count as target rows.
        k: the number of neighbors that vote, source and target together.
        probes: the largest number of target rows to estimate from.
        seed: decides which target rows these are.
    """
    target_ids, n_s = _voting_rows(bank)
    n_u = len(target_ids)
    neighbors = min(k, n_s, n_u - 1)
    if neighbors < 2:
        raise AdaNPCError(f"k, source rows and other target rows must be at least 2, got {k}, {n_s} and {n_u - 1}")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n_u, generator=generator)
    probe_ids = target_ids[order[:probes]]
    itself = probe_ids[:, None]  # (B, 1)
    points = bank.rows(probe_ids)
    source = bank.search(points, neighbors, source=True)
    target = bank.search(points, neighbors, source=False, exclude=itself)
    nearest_of_all = bank.search(points, k, exclude=itself).ids
    known = _estimate(source, target, points, n_s, n_u - 1, bank.classes)  # n_u - 1, since a probe excludes itself
    k_s, k_u = best_split(k, n_s, n_u, known)
    are_target = (nearest_of_all >= 0) & ~_is_source(bank, nearest_of_all)
    joint = float(are_target.sum(1).double().mean())
    return Split(k_s, k_u, n_s, n_u, joint, known)


def split_chart(split: Split) -> Chart:
    """Returns a chart of the bound on the error of a vote share over k_u, with the best and the joint vote marked."""
    k = split.k_s + split.k_u

    def bound_at(k_u: int) -> float:
        return vote_error(k - k_u, k_u, split.n_s, split.n_u, split.known)

    least = max(0, k - split.n_s)
    most = min(k, split.n_u)
    choices = tuple(range(least, most + 1))
    nearest_to_joint = min(choices, key=lambda k_u: abs(k_u - split.joint))
    series = (
        Series("bound", choices, tuple(bound_at(k_u) for k_u in choices), bound=True),
        Series("least", (split.k_u,), (bound_at(split.k_u),)),
        Series("k nearest of all rows", (nearest_to_joint,), (bound_at(nearest_to_joint),)),
    )
    title = f"Proposition 3 on a bank of {split.n_s} source and {split.n_u} target rows, k = {k}"
    return Chart(title, "k_u", "bound on the error of a vote share", series)


def _voting_rows(bank: MemoryBank) -> tuple[Tensor, int]:
    """Returns the ids of the target rows that may vote, and the number of source rows that may."""
    table = bank.table("id", "origin", "state")
    is_active = table["state"] == ACTIVE
    is_source = table["origin"] == Origin.SOURCE
    target_ids = table["id"][is_active & ~is_source]
    return target_ids, int((is_active & is_source).sum())


def _is_source(bank: MemoryBank, ids: Tensor) -> Tensor:
    """Returns which of these ids are those of source rows, in the same shape."""
    table = bank.table("id", "origin")
    source_ids = table["id"][table["origin"] == Origin.SOURCE]
    return torch.isin(ids, source_ids)


def _estimate(
    source: Neighbors, target: Neighbors, points: Tensor, source_rows: int, target_rows: int, classes: int
) -> Assumptions:
    """Returns the constants of the assumptions, estimated from the neighbors of probes; see ``split_of_bank``.

    Args:
        source: the source neighbors of each probe.
        target: the target neighbors of each probe, of the same number.
        points: the probes (B, D), in random order.
        source_rows: the number of rows among which the source neighbors were searched.
        target_rows: the number of rows among which the target neighbors were searched.
        classes: the number of classes.
    """
    dim = _dimension(target)
    source_density = _density(source, source_rows, dim)
    target_density = _density(target, target_rows, dim)
    density = max(source_density, target_density)  # only its products with the overlaps matter
    votes = source.labels.shape[1]
    source_shares = _shares(source, classes)
    target_shares = _shares(target, classes)
    return Assumptions(
        dim=dim,
        source_overlap=source_density / density,
        target_overlap=target_density / density,
        density=density,
        smoothness=_smoothness(source_shares, points, votes),
        gap=_root_of_mean(_squared_gap(source_shares, target_shares, votes)),
    )


def _smoothness(shares: Tensor, points: Tensor, votes: int) -> float:
    """Returns how fast the shares (B, C) of source labels change between two probes."""
    # Probes are in random order, so comparing each with the one before compares random pairs.
    squared_gap = _squared_gap(shares, shares.roll(1, 0), votes)
    squared_distance = (points - points.roll(1, 0)).double().square().sum(1)  # (B,)
    return _root_of_mean(squared_gap / squared_distance.clamp(min=SAME_ROW**2))


def _root_of_mean(squares: Tensor) -> float:
    """Returns the root of the mean, or 0 if noise made the mean negative."""
    return sqrt(float(squares.mean().clamp(min=0)))


def _distances(near: Neighbors) -> Tensor:
    """Returns the Euclidean distances (B, J) between unit vectors with these cosines."""
    return (2 - 2 * near.similarity).clamp(min=0).sqrt()


def _dimension(near: Neighbors) -> float:
    """Returns the maximum-likelihood estimate of the dimension d; see ``split_of_bank``."""
    distances = _distances(near)
    inner = distances[:, :-1]
    outermost = distances[:, -1:]
    ratios = (outermost / inner)[inner > SAME_ROW]  # a row that repeats the probe is at distance 0
    inverse = float(ratios.log().sum()) / max(len(ratios), 1)
    # In high dimensions all neighbors are about equally far away, and the estimate of 1 / d comes close to 0.
    if inverse * LARGEST_DIM < 1:
        raise AdaNPCError(
            f"target rows must have a dimension of at most {LARGEST_DIM}, but all their neighbors are equally far away"
        )
    return 1 / inverse


def _density(near: Neighbors, rows: int, dim: float) -> float:
    """Returns the density of rows around a typical probe: the share of rows in a ball, over the volume of the ball."""
    count = near.ids.shape[1]
    distance = float(_distances(near)[:, -1].median())
    if distance < SAME_ROW:
        raise AdaNPCError(
            f"k must exceed the number of equal rows, but most target rows have {count} rows equal to them"
        )
    return float(count / (rows * unit_ball(dim) * distance**dim))


def _shares(near: Neighbors, classes: int) -> Tensor:
    """Returns the share (B, C) of each class among the neighbors of each probe."""
    return one_hot(near.labels, classes).double().mean(1)


def _squared_gap(one: Tensor, other: Tensor, votes: int) -> Tensor:
    """Returns half the squared distance (B,) between two shares (B, C), minus its expectation by chance.

    Args:
        one, other: (B, C) shares of votes.
        votes: the number of votes behind each share.
    """
    by_chance = _variance(one, votes) + _variance(other, votes)
    # Half of it: with two classes the shares of both differ by the same amount, which should count once.
    return ((one - other).square().sum(1) - by_chance) / 2


def _variance(shares: Tensor, votes: int) -> Tensor:
    """Returns the variance of shares (B, C) of this many votes, summed over classes (B,)."""
    return (shares * (1 - shares)).sum(1) / (votes - 1)
