"""Choosing among trials: by held-out source, by held-out target, or by answers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

LABELED = "target"  # the only rule that looks at target labels
RULES: Mapping[str, str] = {
    "source": "training-domain validation: accuracy on held-out source images after the stream",
    LABELED: "test-domain validation: accuracy on a held-out fifth of the target, so it uses target labels",
    "snd": "label-free: soft neighborhood density of the answers",
    "diversity": "label-free: sure answers, spread over classes (entropy of the mean less the mean entropy)",
    "agreement": "label-free: agreement with the frozen vote of source rows",
}
MANY = 2000  # answers that are compared with each other
SHARPNESS = 0.05


def density(probs: Tensor) -> float:
    """Soft neighborhood density of answers (n, C): the mean entropy of each one's likeness to all others.

    Paper: Saito et al. 2021, "Tune it the Right Way: Unsupervised Validation of Domain Adaptation via Soft Neighborhood
    Density". High where every answer has many that are as like it: neighborhoods are kept together.
    """
    if len(probs) < 2:
        return 0.0
    unit = normalize(probs[:MANY].double(), dim=1)
    likeness = unit @ unit.T / SHARPNESS
    likeness.fill_diagonal_(-torch.inf)
    return entropy(likeness.softmax(1)).mean().item()


def diversity(probs: Tensor) -> float:
    """The entropy of the mean answer less the mean entropy of answers (n, C), in nats: their mutual information."""
    return (entropy(probs.double().mean(0)) - entropy(probs.double()).mean()).item() if len(probs) else 0.0


def entropy(probs: Tensor) -> Tensor:
    """In nats, along the last dimension."""
    found: Tensor = torch.special.entr(probs).sum(-1)
    return found


def best(records: Sequence[Mapping[str, Any]], rule: str) -> Mapping[str, Any]:
    """The record with the highest score under a rule, the earliest of equals; a score that is no number is lowest."""

    def score(record: Mapping[str, Any]) -> float:
        found = float(record["scores"][rule])
        return -inf if isnan(found) else found

    return max(records, key=score)
