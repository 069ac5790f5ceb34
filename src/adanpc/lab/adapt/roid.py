"""Scales and shifts move, and are averaged with the source's: ROID."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy
from torch.optim import Adam

from adanpc.lab.adapt.adapter import Adapter, Source, descend
from adanpc.lab.adapt.entropy import entropy
from adanpc.lab.adapt.statistics import use_batch_statistics
from adanpc.lab.adapt.teacher import approach, trainable_scales, view


class ROID(Adapter):
    """Scales and shifts descend a likelihood ratio, on varied and certain rows, and are averaged with the source's.

    BatchNorm layers take the statistics of the batch. A row whose answer is closer than the average to the trend of
    recent answers is not learned from. The answers, from before the step, are corrected by the classes of the batch.

    Args:
        lr: of Adam.
        momentum: this share of the trained weights stays in each step, the rest is the source's.
        trend_momentum: this share of the trend stays with each batch.
        temperature: the smaller, the more weights differ from row to row.

    Paper: Marsden, Döbler and Yang, Universal Test-Time Adaptation through Weight Ensembling, Diversity Weighting, and
    Prior Correction, WACV 2024.

    Differs from the published code: the prior multiplies probabilities, as Bayes' rule has it, there it multiplies
    logits; views are those of ``CoTTA``; where all rows are alike, as in a batch of one, they weigh 1, there NaN; the
    loss is divided by the rows of this batch, not by the usual number. On ImageNet it steps by SGD at 2.5e-4.
    """

    # No search is published: a decade to each side of the default.
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"lr": (1e-4, 1e-3, 1e-2)}
    trend: Tensor  # (C,) the running mean of answers

    def __init__(
        self,
        source: Source,
        *,
        lr: float = 1e-3,
        momentum: float = 0.99,
        trend_momentum: float = 0.9,
        temperature: float = 1 / 3,
    ) -> None:
        super().__init__(source)
        self.momentum, self.trend_momentum, self.temperature = momentum, trend_momentum, temperature
        use_batch_statistics(self.model)
        self.trained = trainable_scales(self.model, "ROID")
        self.anchor = nn.ParameterList([nn.Parameter(scale.detach().clone(), False) for scale in self.trained])
        classes = self.model.classes
        self.register_buffer("trend", torch.full((classes,), 1 / classes, device=self.model.device))
        self.optimizers["adam"] = Adam(self.trained, lr=lr)

    def moving(self) -> set[str]:
        """The scales and shifts of normalization layers, and the trend."""
        names = {name for name, value in self.named_parameters(remove_duplicate=False) if value.requires_grad}
        return names | {"trend"}

    @torch.enable_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Corrected probabilities (B, C), from before the step."""
        logits = self.model(batch)
        probs = logits.detach().softmax(1)
        weights = diversity_weights(logits.detach(), self.trend, self.temperature)
        self.trend.lerp_(probs.mean(0).to(self.trend), 1 - self.trend_momentum)
        kept = weights > 0
        # A single row may have no statistics of its own: it is viewed with its batch.
        viewed = kept if int(kept.sum()) > 1 else torch.ones_like(kept)
        views = self.model(view(batch[viewed]))[kept[viewed]]
        losses = likelihood_ratio(logits[kept]) + symmetric_cross_entropy(views, logits[kept])
        descend((weights[kept] * losses).sum() / len(batch), self.optimizers["adam"])
        approach(self.trained, self.anchor, 1 - self.momentum)
        return prior_corrected(probs)


def diversity_weights(logits: Tensor, trend: Tensor, temperature: float) -> Tensor:
    """Weights (B,) of logits (B, C): exp(diversity * certainty / temperature), or 0 for the less diverse.

    Diversity is the cosine distance of probabilities to the trend (C,), certainty is negative entropy, both scaled to
    0 … 1 over the batch. Rows below the mean diversity weigh 0; at least one row does not.
    """
    diversity = _scaled(1 - cosine_similarity(trend[None], logits.softmax(1)))
    certainty = _scaled(-entropy(logits))
    return torch.where(diversity < diversity.mean(), 0, (diversity * certainty / temperature).exp())


def likelihood_ratio(logits: Tensor) -> Tensor:
    """The soft likelihood ratio loss (B,) of logits (B, C): - sum p log(p / (1 - p)), with p at most 0.99.

    Unlike that of entropy, its gradient does not vanish for sure rows.
    """
    probs = logits.softmax(1).clamp(max=0.99)
    return -(probs * (probs / (1 - probs) + 1e-5).log()).sum(1)


def symmetric_cross_entropy(one: Tensor, other: Tensor) -> Tensor:
    """The mean (B,) of the cross-entropies of two sets of logits (B, C) with each other; gradients flow to both."""
    forth = cross_entropy(one, other.softmax(1), reduction="none")
    return (forth + cross_entropy(other, one.softmax(1), reduction="none")) / 2


def prior_corrected(probs: Tensor) -> Tensor:
    """Answers (B, C) times the share that each class has in the batch, smoothed, at sums of 1."""
    rows, classes = probs.shape
    prior = probs.mean(0)
    smooth = max(1 / rows, 1 / classes) / prior.max()
    corrected = probs * (prior + smooth) / (1 + smooth * classes)
    return corrected / corrected.sum(1, keepdim=True)


def _scaled(values: Tensor) -> Tensor:
    """Values (B,) at 0 … 1; all 0 if they are equal."""
    low, high = values.aminmax()
    return (values - low) / (high - low) if high > low else torch.zeros_like(values)
