"""Algorithms that compare the losses of domains: IRM, VREx, GroupDRO."""

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
    """Penalizes domains whose loss would change if their logits were scaled, so that one head is best for all domains.

    The penalty is the squared derivative of the loss with respect to such a scale, at 1. It is estimated without bias
    as the product of the derivatives over even and over odd rows, so it can be negative. It is zero for a domain with a
    single row.

    Args:
        weight: of the penalty from step ``anneal`` on; before, it is 1. 0 leaves the penalty out at every step.
        anneal: a step in a training of 5,000 steps; ``Spec`` scales the default to trainings of other lengths.

    Paper: Arjovsky, Bottou, Gulrajani and Lopez-Paz, Invariant Risk Minimization, 2019.

    Differs from the published code: a weight of 0 holds before ``anneal``, too.
    """

    space: ClassVar[Mapping[str, Draw]] = {"weight": Power(-1, 5), "anneal": Power(0, 4, whole=True)}
    paced: ClassVar[tuple[str, ...]] = ("anneal",)

    def __init__(
        self, model: SourceModel, domains: int, *, weight: float = 100.0, anneal: float = 500, **adam: float
    ) -> None:
        super().__init__(model, domains, weight=weight, anneal=anneal, **adam)

    def penalty(self, outputs: Sequence[Outputs]) -> Tensor:
        """Returns the mean squared derivative over the domains."""
        squares = [_squared_derivative(output.logits, output.labels) for output in outputs]
        return torch.stack(squares).mean()


class VREx(Penalized):
    """Penalizes the population variance of the domains' losses.

    Args:
        weight: of the penalty from step ``anneal`` on; before, it is 1. 0 leaves the penalty out at every step.
        anneal: a step in a training of 5,000 steps; ``Spec`` scales the default to trainings of other lengths.

    Paper: Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, 2021.

    Differs from the published code: a weight of 0 holds before ``anneal``, too.
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
        """Returns the variance of the losses."""
        return torch.stack([output.risk for output in outputs]).var(correction=0)


class GroupDRO(Algorithm):
    """Minimizes a weighted mean of the domains' losses; step by step, the weight of a domain grows with its loss.

    Args:
        rate: how fast weights grow (eta in the paper): each step multiplies a weight by exp(rate * loss); with 0 all
            weights stay equal.

    Paper: Sagawa, Koh, Hashimoto and Liang, Distributionally Robust Neural Networks, 2020.

    Differs from the published code: weights are stored as logarithms, so that large losses do not overflow.
    """

    space: ClassVar[Mapping[str, Draw]] = {"rate": Power(-3, -1)}
    erm: ClassVar[Mapping[str, Any] | None] = {"rate": 0.0}
    needs: ClassVar[int] = 2
    scores: Tensor

    def __init__(self, model: SourceModel, domains: int, *, rate: float = 0.01, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        self.rate = rate
        # The logarithms of the weights, up to a constant.
        self.register_buffer("scores", torch.zeros(domains, device=model.device))

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Updates the weights, and returns the weighted mean of the losses."""
        risks = losses(self.model, batches)
        self.scores += self.rate * risks.detach()
        self.scores -= self.scores.max()  # the largest weight is 1, so exp() cannot overflow
        weights = self.scores.exp()
        loss = (weights / weights.mean() * risks).mean()
        return loss, {"risk": risks.detach().mean(), "worst": risks.detach().max()}


def _squared_derivative(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the squared derivative () of the mean cross-entropy by a scale of the logits, from halves of the rows."""
    if len(labels) < 2:
        return logits.new_zeros(())
    errors = logits.softmax(1) - one_hot(labels, logits.shape[1])  # (B, C)
    derivatives = (errors * logits).sum(1)  # (B,), of each row's loss by the scale
    even_rows = derivatives[::2]
    odd_rows = derivatives[1::2]
    return even_rows.mean() * odd_rows.mean()
