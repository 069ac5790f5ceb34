"""DANN and CDANN: an encoder learns features from which a discriminator cannot tell the domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch, risks
from adanpc.lab.train.search import Choice, Draw, Power
from adanpc.require import whole


class Adversarial(Algorithm):
    """What DANN and CDANN share: cycles of ``d_steps`` updates of a discriminator and one update of the model.

    The discriminator learns to predict the domain from the features. The model learns to predict the class, and to make
    the discriminator fail. Every domain counts the same in the model's risk.

    Args:
        weight: of the discriminator's loss, which the model maximizes.
        gradient_penalty: the weight of the mean squared norm of the gradient of the discriminator's loss with respect
            to the features.
        d_steps: updates of the discriminator for each update of the model.
        beta1, beta2: of both Adam optimizers.
        lr_d, weight_decay_d: of the discriminator's Adam; ``lr_d`` defaults to ``lr``.
        mlp_width, mlp_depth, mlp_dropout: of the discriminator; the depth counts its linear layers.
    """

    conditional: ClassVar[bool]  # whether the discriminator sees the class, and its loss weights all classes equally
    space: ClassVar[Mapping[str, Draw]] = {
        "weight": Power(-2, 2),
        "gradient_penalty": Power(-2, 1),
        "d_steps": Power(0, 3, base=2, whole=True),
        "beta1": Choice((0.0, 0.5)),
        "lr_d": Power(-4.5, -2.5),
        "weight_decay_d": Power(-6, -2),
        "mlp_width": Power(6, 10, base=2, whole=True),
        "mlp_depth": Choice((3, 4, 5)),
        "mlp_dropout": Choice((0.0, 0.1, 0.5)),
    }
    photo_space: ClassVar[Mapping[str, Draw]] = {"lr_d": Power(-5, -3.5)}
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
        whole("d_steps", d_steps, least=0)
        whole("mlp_depth", mlp_depth, least=1)
        whole("mlp_width", mlp_width, least=1)
        self.weight = weight
        self.gradient_penalty = gradient_penalty
        self.d_steps = d_steps
        hidden = [mlp_width] * (mlp_depth - 1)
        self.discriminator = _mlp([model.dim, *hidden, domains], mlp_dropout).to(model.device)
        embedding: nn.Module = nn.Identity()  # has no parameters, and is not used
        if self.conditional:
            embedding = nn.Embedding(model.classes, model.dim)
        self.embedding = embedding.to(model.device)
        betas = (beta1, beta2)
        if lr_d is None:
            lr_d = self.lr
        adversary = [*self.discriminator.parameters(), *self.embedding.parameters()]
        self.optimizers = {
            "model": Adam(model.parameters(), self.lr, betas, weight_decay=self.weight_decay),
            "discriminator": Adam(adversary, lr_d, betas, weight_decay=weight_decay_d),
        }

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the model's loss: its risk minus the weighted loss of the discriminator."""
        features = self.model.features(torch.cat([batch.images for batch in batches]))
        risk = risks(self.model.head(features), batches).mean()
        discriminator = self.discriminator_loss(features, batches)
        return risk - self.weight * discriminator, {"risk": risk.detach(), "discriminator": discriminator.detach()}

    def update(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Makes a step of the discriminator or, after ``d_steps`` of those, of the model.

        The reported ``loss`` is that of whichever made the step.
        """
        if self.step % (self.d_steps + 1) == self.d_steps:
            return super().update(batches)
        self._check(batches)
        with torch.no_grad():  # a step of the discriminator does not train the encoder
            features = self.model.features(torch.cat([batch.images for batch in batches]))
        features = features.detach().requires_grad_()  # the gradient penalty needs gradients with respect to them
        risk = risks(self.model.head(features), batches).mean()
        discriminator = self.discriminator_loss(features, batches)
        self.descend(discriminator, "discriminator")
        self.step += 1
        return {"loss": discriminator.item(), "risk": risk.item(), "discriminator": discriminator.item()}

    def discriminator_loss(self, features: Tensor, batches: Sequence[Batch]) -> Tensor:
        """Returns the discriminator's loss on features (n, D) of all batches, with its gradient penalty."""
        labels = torch.cat([batch.labels for batch in batches])
        domains = torch.cat([torch.full_like(batch.labels, domain) for domain, batch in enumerate(batches)])
        if self.conditional:
            logits = self.discriminator(features + self.embedding(labels))
            row_losses = cross_entropy(logits, domains, reduction="none")  # (n,)
            loss = (row_losses * _balance(labels).to(row_losses)).sum()
        else:
            row_losses = cross_entropy(self.discriminator(features), domains, reduction="none")  # (n,)
            loss = row_losses.mean()
        if not self.gradient_penalty:
            return loss
        # A row's loss depends on its own features alone, so the gradient of the sum has each row's gradient.
        (gradients,) = torch.autograd.grad(row_losses.sum(), features, create_graph=True)  # (n, D)
        return loss + self.gradient_penalty * gradients.square().sum(1).mean()


class DANN(Adversarial):
    """Domain-adversarial training; see ``Adversarial``.

    Paper: Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016.

    Differs from the published code: in DomainBed the cycle starts one update later, so with one discriminator step
    per cycle the model is updated first.
    """

    conditional: ClassVar[bool] = False


class CDANN(Adversarial):
    """DANN whose discriminator sees the class, as an embedding added to the features, and weights classes equally.

    Paper: Li et al., Deep Domain Generalization via Conditional Invariant Adversarial Networks, ECCV 2018.

    Differs from the published code: in the same way as DANN. Also, classes missing from a batch do not count; DomainBed
    counts all classes up to the highest label in the batch, so the scale of the loss depends on which labels were
    drawn.
    """

    conditional: ClassVar[bool] = True


def _mlp(widths: Sequence[int], dropout: float) -> nn.Sequential:
    """Returns linear layers of these widths, with ReLU and dropout between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        if layers:
            layers += [nn.ReLU(), nn.Dropout(dropout)]
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)


def _balance(labels: Tensor) -> Tensor:
    """Returns weights (n,) that sum to 1 in all, and to the same number over the rows of each class that occurs."""
    _, class_of_row, counts = labels.unique(return_inverse=True, return_counts=True)
    return torch.reciprocal(counts[class_of_row] * len(counts))
