"""The base of algorithms that add a penalty to the mean loss of the domains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch


class Outputs(NamedTuple):
    """A model's outputs for the batch of one domain."""

    features: Tensor  # (B, D)
    logits: Tensor  # (B, C)
    labels: Tensor  # (B,)
    risk: Tensor  # ()


class Penalized(Algorithm, ABC):
    """Minimizes the mean loss of the domains plus a weighted penalty; the penalty is reported without its weight.

    Features and logits come from one pass over the images of all domains, so a BatchNorm in training sees them
    together.

    Args:
        weight: of the penalty; 0 leaves it out at every step.
        anneal: before this step the weight is ``before`` instead. When the weight changes, Adam starts again, since its
            averages are those of gradients of another size.
    """

    erm: ClassVar[Mapping[str, Any] | None] = {"weight": 0.0}
    before: ClassVar[float] = 1.0

    def __init__(self, model: SourceModel, domains: int, *, weight: float, anneal: float = 0, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        for name, value in (("weight", weight), ("anneal", anneal)):
            if not value >= 0:
                raise AdaNPCError(f"{name} must be 0 or more, got {value}")
        self.weight = weight
        self.anneal = anneal

    @abstractmethod
    def penalty(self, outputs: Sequence[Outputs]) -> Tensor:
        """Returns the penalty () for the outputs of each domain; it must be finite for batches of one row, too."""

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of the domains plus the penalty with its weight at this step."""
        outputs = self._outputs(batches)
        risk = torch.stack([output.risk for output in outputs]).mean()
        penalty = self.penalty(outputs)
        weight = self.weight_at(self.step)
        loss = risk
        if weight:  # 0 times an infinite penalty would still be NaN
            loss = risk + weight * penalty
        return loss, {"risk": risk.detach(), "penalty": penalty.detach()}

    def descend(self, loss: Tensor, optimizer: str = "model") -> None:
        """Makes one step, with a new Adam if the weight has just changed."""
        if self.step and self.weight_at(self.step) != self.weight_at(self.step - 1):
            self.optimizers[optimizer] = self.adam(self.model)
        super().descend(loss, optimizer)

    def weight_at(self, step: int) -> float:
        """Returns the weight of the penalty at a step."""
        if self.weight and step < self.anneal:
            return self.before
        return self.weight

    def _outputs(self, batches: Sequence[Batch]) -> list[Outputs]:
        """Returns the model's outputs for the batch of each domain."""
        features = self.model.features(torch.cat([batch.images for batch in batches]))
        logits: Tensor = self.model.head(features)
        sizes = [len(batch.labels) for batch in batches]
        outputs = []
        for rows, scores, batch in zip(features.split(sizes), logits.split(sizes), batches, strict=True):
            outputs.append(Outputs(rows, scores, batch.labels, cross_entropy(scores, batch.labels)))
        return outputs
