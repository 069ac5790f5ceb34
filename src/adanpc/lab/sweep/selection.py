"""Rules to choose among trials: by held-out source images, by held-out target images, or by the answers alone."""

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
MOST = 2000  # answers that are compared with each other; time and memory grow with the square of it
TEMPERATURE = 0.05  # of the softmax over similarities, as published


def density(probs: Tensor) -> float:
    """Soft neighborhood density of answers (n, C): the mean entropy of each answer's similarity to all others.

    It is high if every answer has many others that are about equally similar to it: neighborhoods are kept together.

    Paper: Saito et al. 2021, "Tune it the Right Way: Unsupervised Validation of Domain Adaptation via Soft Neighborhood
    Density".
    """
    if len(probs) < 2:
        return 0.0
    unit = normalize(probs[:MOST].double(), dim=1)
    similarity = unit @ unit.T / TEMPERATURE
    similarity.fill_diagonal_(-torch.inf)  # no answer is its own neighbor
    return entropy(similarity.softmax(1)).mean().item()


def diversity(probs: Tensor) -> float:
    """The entropy of the mean answer minus the mean entropy of answers (n, C), in nats: their mutual information."""
    if not len(probs):
        return 0.0
    probs = probs.double()
    return (entropy(probs.mean(0)) - entropy(probs).mean()).item()


def entropy(probs: Tensor) -> Tensor:
    """The entropy in nats along the last dimension."""
    entropies: Tensor = torch.special.entr(probs).sum(-1)
    return entropies


def best(records: Sequence[Mapping[str, Any]], rule: str) -> Mapping[str, Any]:
    """The record with the highest score under a rule; the first one of equals. A record without a score comes last."""

    def score(record: Mapping[str, Any]) -> float:
        value = record["scores"][rule]
        return -inf if value is None or isnan(value) else value

    return max(records, key=score)
