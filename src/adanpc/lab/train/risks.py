"""Algorithms that compare the domains' losses: IRM, VREx, GroupDRO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch, losses
from adanpc.lab.train.penalty import Outputs, Penalized
from adanpc.lab.train.search import Draw, Power


class IRM(Penalized):
    """Penalizes domains whose loss would fall if their logits were scaled: one head should be best for all.

    The penalty is the squared slope of the loss in such a scale, at 1, estimated without bias as the product of the
    slopes over even and odd rows; it can be negative. It is zero for a domain with a single row.

    Args:
        weight: of the penalty from step ``anneal`` on; 1 before. 0 leaves it out at every step.
        anneal: a step of a training of 5,000; ``Spec`` scales its default to trainings of other lengths.

    Paper: Arjovsky, Bottou, Gulrajani and Lopez-Paz, Invariant Risk Minimization, 2019.

    Differs from the published code: weight 0 holds before ``anneal`` too.
    """

    space: ClassVar[Mapping[str, Draw]] = {"weight": Power(-1, 5), "anneal": Power(0, 4, whole=True)}
    paced: ClassVar[tuple[str, ...]] = ("anneal",)

    def __init__(
        self, model: SourceModel, domains: int, *, weight: float = 100.0, anneal: float = 500, **adam: float
    ) -> None:
        super().__init__(model, domains, weight=weight, anneal=anneal, **adam)

    def penalty(self, outputs: Sequence[Outputs]) -> Tensor:
        """The mean squared slope of the domains."""
        squares = [_squared_slope(output.logits, output.labels) for output in outputs]
        return torch.stack(squares).mean()


class VREx(Penalized):
    """Penalizes the variance (population) of the domains' losses.

    Args:
        weight: of the penalty from step ``anneal`` on; 1 before. 0 leaves it out at every step.
        anneal: a step of a training of 5,000; ``Spec`` scales its default to trainings of other lengths.

    Paper: Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, 2021.

    Differs from the published code: weight 0 holds before ``anneal`` too.
    """

    space: ClassVar[Mapping[str, Draw]] = {"weight": Power(-1, 5), "anneal": Power(0, 4, whole=True)}
    paced: ClassVar[tuple[str, ...]] = ("anneal",)
    aligned: ClassVar[bool] = True
    needs: ClassVar[int] = 2

    def __init__(
        self, model: SourceModel, domains: int, *, weight: float = 10.0, anneal: float = 500, **adam: float
    ) -> None:
        super().__init__(model, domains, weight=weight, anneal=anneal, **adam)

    def penalty(self, outputs: Sequence[Outputs]) -> Tensor:
        """The variance of the losses."""
        return torch.stack([output.risk for output in outputs]).var(correction=0)


class GroupDRO(Algorithm):
    """A weighted mean of the domains' losses; the weight of a domain grows with its loss, step after step.

    Args:
        rate: how fast (eta in the paper): each step multiplies a weight by exp(rate * loss); 0 keeps all equal.

    Paper: Sagawa, Koh, Hashimoto and Liang, Distributionally Robust Neural Networks, 2020.

    Differs from the published code: weights are kept as logarithms, so that no loss is too large for them.
    """

    space: ClassVar[Mapping[str, Draw]] = {"rate": Power(-3, -1)}
    erm: ClassVar[Mapping[str, Any] | None] = {"rate": 0.0}
    needs: ClassVar[int] = 2
    scores: Tensor

    def __init__(self, model: SourceModel, domains: int, *, rate: float = 0.01, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        self.rate = rate
        self.register_buffer("scores", torch.zeros(domains, device=model.device))  # logarithms of weights, up to a sum

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted mean of the losses, after the weights have followed them."""
        risks = losses(self.model, batches)
        self.scores += self.rate * risks.detach()
        self.scores -= self.scores.max()
        weights = self.scores.exp()
        loss = (weights / weights.mean() * risks).mean()
        return loss, {"risk": risks.detach().mean(), "worst": risks.detach().max()}


def _squared_slope(logits: Tensor, labels: Tensor) -> Tensor:
    """The squared slope () of the mean cross-entropy in a scale of the logits, from two halves of the rows."""
    if len(labels) < 2:
        return logits.new_zeros(())
    errors = logits.softmax(1) - one_hot(labels, logits.shape[1])  # (B, C)
    slopes = (errors * logits).sum(1)  # (B,)
    return slopes[::2].mean() * slopes[1::2].mean()
