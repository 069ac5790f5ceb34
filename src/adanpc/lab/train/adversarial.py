"""Features that do not tell which domain they come from: a discriminator tries to, and the encoder works against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch, risks
from adanpc.lab.train.search import Choice, Draw, Power


class Adversarial(Algorithm):
    """What DANN and CDANN share: ``d_steps`` updates of the discriminator, then one of the model, and again.

    The discriminator learns to name the domain of features; the model learns its classes and to make the
    discriminator fail. Every domain counts the same in the model's risk.

    Args:
        weight: of the discriminator's loss, which the model ascends.
        gradient_penalty: weight of the mean squared length of the slope of the discriminator's loss in feature space.
        d_steps: updates of the discriminator for each update of the model.
        beta1, beta2: of both Adams.
        lr_d, weight_decay_d: of the discriminator's Adam; ``lr_d`` is ``lr`` if not given.
        mlp_width, mlp_depth, mlp_dropout: of the discriminator; the depth counts its linear layers.
    """

    conditional: ClassVar[bool]  # whether the discriminator is told the class, and all classes count the same
    space: ClassVar[Mapping[str, Draw]] = {
        "weight": Power(-2, 2),
        "gradient_penalty": Power(-2, 1),
        "d_steps": Power(0, 3, base=2, whole=True),
        "beta1": Choice((0.0, 0.5)),
        "weight_decay_d": Power(-6, -2),
        "mlp_width": Power(6, 10, base=2, whole=True),
        "mlp_depth": Choice((3, 4, 5)),
        "mlp_dropout": Choice((0.0, 0.1, 0.5)),
    }
    erm: ClassVar[Mapping[str, Any] | None] = {"weight": 0.0, "d_steps": 0, "beta1": 0.9, "beta2": 0.999}
    needs: ClassVar[int] = 2

    def __init__(
        self,
        model: SourceModel,
        domains: int,
        *,
        weight: float = 1.0,
        gradient_penalty: float = 0.0,
        d_steps: int = 1,
        beta1: float = 0.5,
        beta2: float = 0.9,
        lr_d: float | None = None,
        weight_decay_d: float = 0.0,
        mlp_width: int = 256,
        mlp_depth: int = 3,
        mlp_dropout: float = 0.0,
        **adam: float,
    ) -> None:
        super().__init__(model, domains, **adam)
        for name, value, least in (("d_steps", d_steps, 0), ("mlp_depth", mlp_depth, 1), ("mlp_width", mlp_width, 1)):
            if value < least:
                raise AdaNPCError(f"{name} must be at least {least}, got {value}")
        self.weight, self.gradient_penalty, self.d_steps = weight, gradient_penalty, d_steps
        widths = [model.dim, *[mlp_width] * (mlp_depth - 1), domains]
        self.discriminator = _mlp(widths, mlp_dropout).to(model.device)
        embedding = nn.Embedding(model.classes, model.dim) if self.conditional else nn.Identity()
        self.embedding = embedding.to(model.device)
        judges = [*self.discriminator.parameters(), *self.embedding.parameters()]
        lr_d = self.lr if lr_d is None else lr_d
        self.optimizers = {
            "model": Adam(model.parameters(), self.lr, (beta1, beta2), weight_decay=self.weight_decay),
            "discriminator": Adam(judges, lr_d, (beta1, beta2), weight_decay=weight_decay_d),
        }

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The model's loss: its risk, less the weighted loss of the discriminator."""
        features = self.model.features(torch.cat([batch.images for batch in batches]))
        risk, judged = self._both(features, batches)
        return risk - self.weight * judged, {"risk": risk.detach(), "discriminator": judged.detach()}

    def update(self, batches: Sequence[Batch]) -> dict[str, float]:
        """A step of the discriminator or, after ``d_steps`` of those, a step of the model; ``loss`` is its own."""
        if self.step % (self.d_steps + 1) == self.d_steps:
            return super().update(batches)
        self._check(batches)
        with torch.no_grad():
            features = self.model.features(torch.cat([batch.images for batch in batches]))
        risk, judged = self._both(features.detach().requires_grad_(), batches)
        self.descend(judged, "discriminator")
        self.step += 1
        return {"loss": judged.item(), "risk": risk.item(), "discriminator": judged.item()}

    def _both(self, features: Tensor, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        return risks(self.model.head(features), batches).mean(), self.judged(features, batches)

    def judged(self, features: Tensor, batches: Sequence[Batch]) -> Tensor:
        """The discriminator's loss on features (n, D) of all batches, with its gradient penalty."""
        labels = torch.cat([batch.labels for batch in batches])
        domains = torch.cat([torch.full_like(batch.labels, place) for place, batch in enumerate(batches)])
        shown = features + self.embedding(labels) if self.conditional else features
        each = cross_entropy(self.discriminator(shown), domains, reduction="none")  # (n,)
        loss = (each * _balance(labels).to(each)).sum() if self.conditional else each.mean()
        if not self.gradient_penalty:
            return loss
        (slope,) = torch.autograd.grad(each.sum(), features, create_graph=True)  # (n, D)
        return loss + self.gradient_penalty * slope.square().sum(1).mean()


class DANN(Adversarial):
    """Domain-adversarial training; see ``Adversarial``.

    Paper: Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016.

    Differs from the published code: in DomainBed the cycle starts one update later, so that with one step of the
    discriminator the model moves first.
    """

    conditional: ClassVar[bool] = False


class CDANN(Adversarial):
    """DANN whose discriminator is told the class, by an embedding added to the features, and weighs classes equally.

    Paper: Li et al., Deep Domain Generalization via Conditional Invariant Adversarial Networks, ECCV 2018.

    Differs from the published code: as DANN; and classes that a batch lacks do not count, where DomainBed counts all up
    to the highest label of the batch, which scales the loss by what happens to be drawn.
    """

    conditional: ClassVar[bool] = True


def _mlp(widths: Sequence[int], dropout: float) -> nn.Sequential:
    """Linear layers of these widths, with ReLU and dropout between them."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU(), nn.Dropout(dropout))]
    return nn.Sequential(*layers[:-2])


def _balance(labels: Tensor) -> Tensor:
    """Weights (n,) that sum to one, and to the same number for each class that is there."""
    _, places, counts = labels.unique(return_inverse=True, return_counts=True)
    return torch.reciprocal(counts[places] * len(counts))
