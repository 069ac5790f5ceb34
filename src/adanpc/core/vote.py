"""The vote rules, which turn neighbors into class probabilities. They are pure and differentiable functions."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from adanpc import require
from adanpc.core.types import Neighbors
from adanpc.errors import AdaNPCError

RULES = ("share", "paper", "published", "uniform", "classwise", "rank")
FLOOR = 1e-5  # what the published code adds to every class
PER_CLASS = 15  # how many neighbors of each class the class-wise rule compares


def check_vote_settings(rule: str, temperature: float) -> None:
    """Raises an error if the rule is unknown or the temperature is not positive or too small to divide by."""
    require.one_of("rule", rule, RULES)
    require.positive("temperature", temperature)
    if not isfinite(1 / temperature):
        raise AdaNPCError(f"temperature {temperature} is too small to divide by: give a larger one, such as 0.1")


def vote(
    neighbors: Neighbors, classes: int, rule: str = "share", temperature: float = 0.1, *, per_class: int = PER_CLASS
) -> tuple[Tensor, Tensor]:
    """Class probabilities (B, C) and each neighbor's weight in them (B, K), both float64.

    Rules:
        share: a neighbor's weight is softmax(similarity / temperature), and a class gets the sum of its neighbors'
            weights. So confidence is a share of the vote and does not saturate as k grows. The default.
        paper: softmax over classes of the summed similarities (eq. 4). It approaches certainty as k grows.
        published: like share, plus 1e-5 for every class, scaled to sum to 1, as in the public code and its training
            loss.
        uniform: every neighbor counts 1/k, as in the paper's theory.
        classwise: softmax over classes of the mean similarity of the ``per_class`` nearest rows of each class, so that
            a class does not win by having more rows. Rows beyond the k nearest are unknown, so each row that a class
            lacks among them counts as being as similar as the k-th. Choose k several times ``per_class``, and
            ``per_class`` no larger than the smallest class. Soft labels are ignored.
        rank: the nearest neighbor counts 1/2, the next 1/3, and so on, divided by their sum, so that it does not matter
            how much nearer one is than another (Geirhos et al., Towards flexible perception with visual memory, 2024).
    """
    check_vote_settings(rule, temperature)
    if rule == "classwise":
        return _classwise(neighbors, classes, temperature, per_class)
    if rule == "paper":
        return _summed(neighbors, classes)
    similarity = neighbors.similarity.double()
    if rule == "uniform":
        weights = _equal(similarity)
    elif rule == "rank":
        weights = _by_rank(similarity)
    else:
        weights = (similarity / temperature).softmax(1)
    probs = tally(neighbors, weights, classes)
    if rule == "published":
        probs = (probs + FLOOR) / (1 + classes * FLOOR)
    return probs, weights


def tally(neighbors: Neighbors, votes: Tensor, classes: int) -> Tensor:
    """The sum of votes (B, K) for each class, (B, C)."""
    if neighbors.soft is not None:
        return (votes[:, :, None] * neighbors.soft).sum(1)
    labels = neighbors.labels.clamp(min=0)  # a missing neighbor, label -1, adds its vote of 0 to class 0
    return votes.new_zeros(len(votes), classes).scatter_add(1, labels, votes)


def _summed(neighbors: Neighbors, classes: int) -> tuple[Tensor, Tensor]:
    """The rule ``paper``: equation 4."""
    similarity = neighbors.similarity.double()
    votes = similarity.masked_fill(similarity.isneginf(), 0)
    total = votes.abs().sum(1, keepdim=True)  # (B, 1)
    weights = votes / total.clamp(min=1e-12)  # a weight is negative where the similarity is
    probs = tally(neighbors, votes, classes).softmax(1)
    return probs, weights


def _equal(similarity: Tensor) -> Tensor:
    """Weights (B, K) that sum to 1 and are equal for all neighbors that are not missing."""
    present = (similarity > -torch.inf).double()
    return present / present.sum(1, keepdim=True)


def _by_rank(similarity: Tensor) -> Tensor:
    """Weights (B, K) that sum to 1 and depend on the rank alone; among equals, the earlier column ranks first."""
    nearest_first = similarity.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(similarity.shape[1], device=similarity.device).expand_as(nearest_first)
    ranks = torch.empty_like(nearest_first).scatter_(1, nearest_first, places)
    present = (similarity > -torch.inf).double()
    votes = present / (2 + ranks)
    return votes / votes.sum(1, keepdim=True)


def _classwise(neighbors: Neighbors, classes: int, temperature: float, per_class: int) -> tuple[Tensor, Tensor]:
    """The rule ``classwise``. Sums of exact similarities are exact, so no answer depends on their order."""
    similarity = neighbors.similarity.double()
    present = similarity > -torch.inf
    labels = neighbors.labels.masked_fill(
        ~present, classes
    )  # missing neighbors get a class of their own, dropped below
    rank = _rank_in_class(similarity, labels)
    counted = (rank < per_class) & present  # (B, K)
    no_votes = similarity.new_zeros(len(similarity), classes + 1)
    sums = no_votes.scatter_add(1, labels, similarity.masked_fill(~counted, 0))[:, :classes]
    counts = no_votes.scatter_add(1, labels, counted.double())[:, :classes]
    # Rows that were not found are at most as similar as the farthest one that was.
    farthest = similarity.masked_fill(~present, torch.inf).amin(1, keepdim=True)  # (B, 1)
    missing = per_class - counts  # (B, C)
    evidence = (sums + missing * farthest) / per_class
    probs = (evidence / temperature).softmax(1)
    # The probability of a class is divided equally among those of its neighbors that were counted.
    shares = probs / counts.clamp(min=1)
    nothing = shares.new_zeros(len(shares), 1)  # the share of missing neighbors
    share_of_label = torch.cat([shares, nothing], 1).gather(1, labels)  # (B, K)
    return probs, share_of_label.masked_fill(~counted, 0)


def _rank_in_class(similarity: Tensor, labels: Tensor) -> Tensor:
    """For each neighbor (B, K), how many of its class are more similar; ties are ordered by column."""
    # Two stable sorts put neighbors in the order of classes and, within a class, of falling similarity.
    nearest_first = similarity.argsort(dim=1, descending=True, stable=True)
    labels_in_turn = labels.gather(1, nearest_first)
    by_label = labels_in_turn.argsort(dim=1, stable=True)
    order = nearest_first.gather(1, by_label)
    ordered = labels.gather(1, order)
    # A rank is a place minus the place at which the run of its class begins.
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    columns = torch.arange(labels.shape[1], device=labels.device)
    places = columns.expand_as(labels)
    # A running maximum carries the start of a run to all of its members: for classes 3 3 5 5, the starts 0 0 2 0 become
    # 0 0 2 2.
    run_start = torch.where(begins, places, 0).cummax(1).values
    ranks = torch.empty_like(places)
    return ranks.scatter_(1, order, places - run_start)
