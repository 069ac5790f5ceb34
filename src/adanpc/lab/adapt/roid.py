"""ROID: scales and shifts are trained, and averaged with those of the source after each step."""

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
    """Trains scales and shifts on diverse and certain rows, and averages them with those of the source after each step.

    The loss is a likelihood ratio, plus a symmetric cross-entropy with the answers to random views. BatchNorm layers
    use the statistics of the batch. Rows whose answers are closer than average to the trend, a running mean of recent
    answers, are not learned from. The answers are those before the step, corrected by how often each class occurs in
    the batch.

    Paper:
        Marsden, Döbler and Yang, Universal Test-Time Adaptation through Weight Ensembling, Diversity Weighting, and
        Prior Correction, WACV 2024.

    Differs from the published code:
        The prior multiplies probabilities, as Bayes' rule requires; in the published code it multiplies logits, see
        ``ROIDPublished``. Views are those of ``CoTTA``. If all rows are alike, as in a batch of one, their weights are
        1; in the published code they are NaN. The loss is divided by the number of rows of this batch, not by the
        usual batch size. On ImageNet the published code uses SGD at 2.5e-4.

    Args:
        lr: the learning rate of Adam.
        momentum: the share of the trained weights that stays after each step; the rest comes from the source.
        trend_momentum: the share of the trend that stays with each batch.
        temperature: the smaller it is, the more the weights differ from row to row.
    """

    # No search is published, so the grid spans a factor of ten on each side of the default.
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
        self.momentum = momentum
        self.trend_momentum = trend_momentum
        self.temperature = temperature
        use_batch_statistics(self.model)
        self.trained = trainable_scales(self.model, "ROID")
        # The weights of the source: registered, so that they are saved and follow the model to its device.
        copies = [nn.Parameter(scale.detach().clone(), requires_grad=False) for scale in self.trained]
        self.anchor = nn.ParameterList(copies)
        classes = self.model.classes
        uniform = torch.full((classes,), 1 / classes, device=self.model.device)
        self.register_buffer("trend", uniform)
        self.optimizers["adam"] = Adam(self.trained, lr=lr)

    def moving(self) -> set[str]:
        """Returns the names of the scales and shifts of normalization layers, and of the trend."""
        names = {name for name, value in self.named_parameters(remove_duplicate=False) if value.requires_grad}
        return names | {"trend"}

    @torch.enable_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the corrected probabilities (B, C) as they were before the step."""
        logits = self.model(batch)
        probs = logits.detach().softmax(1)
        weights = diversity_weights(logits.detach(), self.trend, self.temperature)
        self.trend.lerp_(probs.mean(0).to(self.trend), 1 - self.trend_momentum)
        kept = weights > 0  # the rows to learn from
        viewed = kept
        if int(kept.sum()) <= 1:
            viewed = torch.ones_like(kept)  # a single row may have no statistics of its own, so view the whole batch
        view_logits = self.model(view(batch[viewed]))
        view_logits = view_logits[kept[viewed]]  # of the viewed rows, those to learn from
        losses = likelihood_ratio(logits[kept]) + symmetric_cross_entropy(view_logits, logits[kept])
        loss = (weights[kept] * losses).sum() / len(batch)
        descend(loss, self.optimizers["adam"])
        self.average_weights()
        return self.corrected(logits.detach())

    def corrected(self, logits: Tensor) -> Tensor:
        """Returns the answers (B, C) to a batch with these logits, corrected by the prior of its classes."""
        return prior_corrected(logits.softmax(1))

    def average_weights(self) -> None:
        """Moves the trained weights toward those of the source, after a step."""
        approach(self.trained, self.anchor, 1 - self.momentum)


class ROIDPublished(ROID):
    """ROID, but the prior multiplies logits, as in the public code.

    Paper:
        Marsden, Döbler and Yang, Universal Test-Time Adaptation through Weight Ensembling, Diversity Weighting, and
        Prior Correction, WACV 2024.

    Differs from the published code:
        In the same ways as ROID, apart from the prior.

    Args:
        lr, momentum, trend_momentum, temperature: see ``ROID``.
    """

    def corrected(self, logits: Tensor) -> Tensor:
        """Returns the answers (B, C), corrected by a prior on logits."""
        return corrected_by_logits(logits)


def diversity_weights(logits: Tensor, trend: Tensor, temperature: float) -> Tensor:
    """Returns a weight (B,) for each row of logits (B, C): exp(diversity * certainty / temperature), or 0.

    Diversity is the cosine distance of the probabilities to the trend (C,), and certainty is the negative entropy, both
    scaled to 0 … 1 over the batch. Rows below the mean diversity get 0; at least one row is not below it.
    """
    diversity = _scaled(1 - cosine_similarity(trend[None], logits.softmax(1)))
    certainty = _scaled(-entropy(logits))
    weights = (diversity * certainty / temperature).exp()
    return torch.where(diversity < diversity.mean(), 0, weights)


def likelihood_ratio(logits: Tensor) -> Tensor:
    """Returns the soft likelihood ratio loss (B,) of logits (B, C): - sum p log(p / (1 - p)), with p at most 0.99.

    Unlike that of the entropy, its gradient does not vanish for confident rows.
    """
    probs = logits.softmax(1).clamp(max=0.99)
    return -(probs * (probs / (1 - probs) + 1e-5).log()).sum(1)


def symmetric_cross_entropy(one: Tensor, other: Tensor) -> Tensor:
    """Returns the mean (B,) of the cross-entropies of two sets of logits (B, C) with each other; both get gradients."""
    forth = cross_entropy(one, other.softmax(1), reduction="none")
    back = cross_entropy(other, one.softmax(1), reduction="none")
    return (forth + back) / 2


def prior_corrected(probs: Tensor) -> Tensor:
    """Returns answers (B, C) times the smoothed share of each class in the batch, normalized to sum to 1."""
    corrected = probs * smoothed_prior(probs)
    return corrected / corrected.sum(1, keepdim=True)


def corrected_by_logits(logits: Tensor) -> Tensor:
    """Returns the softmax of logits (B, C), each times the smoothed share of its class in the batch."""
    return (logits * smoothed_prior(logits.softmax(1))).softmax(1)


def smoothed_prior(probs: Tensor) -> Tensor:
    """Returns the share (C,) of each class in the answers (B, C) to a batch, pulled toward equal shares."""
    rows, classes = probs.shape
    prior = probs.mean(0)
    # Smoothed more in small batches, whose shares say little, and where no class stands out.
    smooth = max(1 / rows, 1 / classes) / prior.max()
    return (prior + smooth) / (1 + smooth * classes)


def _scaled(values: Tensor) -> Tensor:
    """Returns values (B,) scaled to 0 … 1; all 0 if they are equal."""
    low, high = values.aminmax()
    if high > low:
        return (values - low) / (high - low)
    return torch.zeros_like(values)
