"""From neighbors to class probabilities: the named vote rules. Pure and differentiable."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from adanpc import require
from adanpc.core.types import Neighbors
from adanpc.errors import AdaNPCError

RULES = ("share", "paper", "published", "uniform")
FLOOR = 1e-5  # what the published code adds to every class


def check_vote_settings(rule: str, temperature: float) -> None:
    """Refuses a rule that there is not, and a temperature by which nothing can be divided."""
    require.one_of("rule", rule, RULES)
    require.positive("temperature", temperature)
    if not isfinite(1 / temperature):
        raise AdaNPCError(f"temperature must be a finite number greater than 0, got {temperature}: it is too small")


def vote(neighbors: Neighbors, classes: int, rule: str = "share", temperature: float = 0.1) -> tuple[Tensor, Tensor]:
    """Probabilities (B, C) and each neighbor's weight in them (B, K), both float64.

    Rules:
        share: weights softmax(similarity / temperature); a class gets the sum of its neighbors' weights, so
            confidence is a share of the vote and does not saturate with k. The default.
        paper: softmax over classes of the summed similarities (eq. 4); approaches certainty as k grows.
        published: as share, plus 1e-5 for every class (the public code and its training loss), scaled to sum to 1.
        uniform: every neighbor counts 1/k, as in the paper's theory.
    """
    check_vote_settings(rule, temperature)
    similarity = neighbors.similarity.double()
    if rule == "paper":
        votes = similarity.masked_fill(similarity.isneginf(), 0)
        weights = votes / votes.abs().sum(1, keepdim=True).clamp(min=1e-12)
        return tally(neighbors, votes, classes).softmax(1), weights
    if rule == "uniform":
        present = (similarity > -torch.inf).double()
        weights = present / present.sum(1, keepdim=True)
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
    return votes.new_zeros(len(votes), classes).scatter_add(1, neighbors.labels.clamp(min=0), votes)
