"""Sources and streams for methods on one direction for each class, whose answers are neither sure nor even."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from adanpc.lab.adapt.adapter import Source
from adanpc.lab.networks.source import SourceModel

DIM = 8
CLASSES = 5
Array = NDArray[np.float64]


def source(encoder: nn.Module | None = None) -> Source:
    """A model whose head has rows that are near to each other, as text embeddings are, and of several lengths."""
    head = nn.Linear(DIM, CLASSES)
    with torch.no_grad():
        head.weight.copy_(directions() * torch.arange(1, CLASSES + 1)[:, None])
    model = SourceModel(encoder or nn.Identity(), DIM, CLASSES, head=head).eval()
    return Source(model, directions(), torch.arange(CLASSES))


def directions() -> Tensor:
    """Unit rows (C, D) with cosines near 1."""
    rows = torch.randn(CLASSES + 1, DIM, generator=torch.Generator().manual_seed(0))
    return normalize(3 * normalize(rows[:1], dim=1) + 0.5 * normalize(rows[1:], dim=1), dim=1)


def stream(count: int, seed: int = 1) -> Tensor:
    """Features (n, D) near to the directions, of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    lengths = 1 + torch.rand(count, 1, generator=generator)
    return lengths * (directions()[labels] + 0.05 * torch.randn(count, DIM, generator=generator))


def unit(rows: Tensor) -> Array:
    """Rows in double precision, scaled to length 1."""
    array = rows.double().numpy()
    return np.asarray(array / np.linalg.norm(array, axis=1, keepdims=True))


def softmax(logits: Array) -> Array:
    """The softmax along the last axis."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def entropy(probs: Array) -> float:
    """Of one row of probabilities, in nats."""
    return float(-sum(p * np.log(p) for p in probs if p > 0))
