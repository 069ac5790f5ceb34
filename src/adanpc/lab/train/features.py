"""Training on changed features: with the domain's mean beside them, restyled, or with the strongest ones muted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch, risks
from adanpc.lab.train.search import Choice, Draw, Power, Uniform

EPS = 1e-5  # added to a variance, as published


class MTL(Algorithm):
    """The head sees each feature vector beside the mean of its domain; features have twice the encoder's dimension.

    In training the mean of a domain is a moving one, and gradients flow through the part that the batch brings. At test
    it is the mean of the batch that is predicted, so predictions depend on it and a batch should come from one domain.

    Args:
        model: gets a new head, a new norm if it has one, and twice the ``dim``.
        ema: what a batch contributes to its domain's mean: new = ema * batch + (1 - ema) * old, from zero on.

    Paper: Blanchard et al., Domain Generalization by Marginal Transfer Learning, JMLR 2021.

    Differs from the published code: the head sees the mean; DomainBed overwrites it with noise.
    """

    space: ClassVar[Mapping[str, Draw]] = {"ema": Choice((0.5, 0.9, 0.99, 1.0))}
    means: Tensor

    def __init__(self, model: SourceModel, domains: int, *, ema: float = 0.99, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        if not 0 <= ema <= 1:
            raise AdaNPCError(f"ema must lie between 0 and 1, got {ema}")
        self.ema = ema
        self.register_buffer("means", torch.zeros(domains, model.dim, device=model.device))
        model.encoder = WithMean(model.encoder)
        model.dim = 2 * model.dim
        model.head = nn.Linear(model.dim, model.classes).to(model.device)
        if isinstance(model.norm, nn.BatchNorm1d):
            model.norm = nn.BatchNorm1d(model.dim).to(model.device)
        self.optimizers = {"model": self.adam(model)}

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses of the domains, summed, as published."""
        model = self.model
        encoder = cast(WithMean, model.encoder).encoder
        encoded = encoder(torch.cat([batch.images for batch in batches]))  # (n, D)
        sizes = [len(batch.labels) for batch in batches]
        joined = []
        for domain, rows in enumerate(encoded.split(sizes)):
            joined.append(joint(rows, self._update_mean(domain, rows)))
        logits = model.head(model.norm(model.dropout(torch.cat(joined))))
        return risks(logits, batches).sum(), {}

    def _update_mean(self, domain: int, rows: Tensor) -> Tensor:
        """The domain's mean (D,) after these rows."""
        mean = self.ema * rows.mean(0) + (1 - self.ema) * self.means[domain]
        self.means[domain] = mean.detach()
        return mean


class WithMean(nn.Module):
    """Features (B, 2 D): those of an encoder (B, D), each beside their mean over the batch."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        """Features (B, 2 D) of images."""
        rows = self.encoder(images)
        return joint(rows, rows.mean(0))


def joint(rows: Tensor, mean: Tensor) -> Tensor:
    """Rows (B, D), each followed by the mean (D,): (B, 2 D)."""
    return torch.cat([rows, mean.expand_as(rows)], 1)


class SagNet(Algorithm):
    """The head learns from features with mixed style; the encoder unlearns what a style head reads from style alone.

    The style of a feature vector is its mean and variance over the feature axis, the content what is left. Each update
    has three steps: of the model, on features whose style is mixed with another sample's; of the style head, on its own
    style with another's content; and of the encoder, toward a style head that finds all classes equally likely.

    Args:
        weight: of the last step.

    Paper: Nam et al., Reducing Domain Gap by Reducing Style Bias, CVPR 2021.

    Differs from the published code: the second and the third step share one pass of the encoder.
    """

    space: ClassVar[Mapping[str, Draw]] = {"weight": Power(-2, 1)}

    def __init__(self, model: SourceModel, domains: int, *, weight: float = 0.1, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        if model.dim < 2:
            raise AdaNPCError(f"SagNet needs features of dimension 2 or more, got {model.dim}: one number has no style")
        self.weight = weight
        self.style_head = nn.Linear(model.dim, model.classes).to(model.device)
        self.optimizers["style"] = self.adam(self.style_head)

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of the domains on features of mixed style."""
        features = self.model.features(torch.cat([batch.images for batch in batches]))
        share = torch.rand(len(features), 1).to(features)
        mixed = restyled(features, torch.randperm(len(features)), share)
        return risks(self.model.head(mixed), batches).mean(), {}

    def update(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Makes the three steps; ``loss`` is that of the first."""
        report = super().update(batches)
        features = self.model.features(torch.cat([batch.images for batch in batches]))
        style = risks(self._read_style(features.detach()), batches).mean()
        self.descend(style, "style")
        adversary = -log_softmax(self._read_style(features), 1).mean()
        self.descend(self.weight * adversary)  # leaves the model's head alone: Adam skips what has no gradient
        return {**report, "style": style.item(), "adversary": adversary.item()}

    def _read_style(self, features: Tensor) -> Tensor:
        """Logits (n, C) that the style head makes of the style of features (n, D) around random content."""
        order = torch.randperm(len(features))
        return cast(Tensor, self.style_head(refilled(features, order)))


def restyled(features: Tensor, order: Tensor, share: Tensor) -> Tensor:
    """Features (n, D) with a mixed style: a share (n, 1) of their own, the rest that of the rows in this order (n,)."""
    content, mean, variance = _parts(features)
    mixed_mean = share * mean + (1 - share) * mean[order]
    mixed_variance = share * variance + (1 - share) * variance[order]
    return content * (mixed_variance + EPS).sqrt() + mixed_mean


def refilled(features: Tensor, order: Tensor) -> Tensor:
    """Features (n, D) of their own style around the content of the rows in this order (n,), which gets no gradient."""
    content, mean, variance = _parts(features)
    return content[order].detach() * (variance + EPS).sqrt() + mean


def _parts(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Content (n, D), mean (n, 1) and variance (n, 1), which divides by D - 1."""
    mean = features.mean(1, keepdim=True)
    variance = features.var(1, keepdim=True)
    content = (features - mean) / (variance + EPS).sqrt()
    return content, mean, variance


class RSC(Algorithm):
    """The features that speak loudest for the true class are muted, in the samples that rely on them most.

    An entry is muted if the slope of the true logit in it lies above the (1 - drop_features) quantile of its row; and
    only in rows where this costs the true class more probability than the (1 - drop_rows) quantile of all rows.

    What lies at a quantile is not above it: of equal values none is muted, and neither is a batch of a single row.

    Args:
        drop_features, drop_rows: shares in 0 … 1.

    Paper: Huang et al., Self-Challenging Improves Cross-Domain Generalization, ECCV 2020.

    Differs from the published code: there, what lies at a quantile is muted too, so that a share of 0 mutes something.
    """

    space: ClassVar[Mapping[str, Draw]] = {"drop_features": Uniform(0, 0.5), "drop_rows": Uniform(0, 0.5)}
    erm: ClassVar[Mapping[str, Any] | None] = {"drop_features": 0.0}

    def __init__(
        self, model: SourceModel, domains: int, *, drop_features: float = 1 / 3, drop_rows: float = 1 / 3, **adam: float
    ) -> None:
        super().__init__(model, domains, **adam)
        for name, share in (("drop_features", drop_features), ("drop_rows", drop_rows)):
            if not 0 <= share <= 1:
                raise AdaNPCError(f"{name} must lie between 0 and 1, got {share}")
        self.drop_features = drop_features
        self.drop_rows = drop_rows

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of the domains on what is left of the features."""
        features = self.model.features(torch.cat([batch.images for batch in batches]))
        kept = self.kept(features, torch.cat([batch.labels for batch in batches]))
        return risks(self.model.head(features * kept), batches).mean(), {}

    def kept(self, features: Tensor, labels: Tensor) -> Tensor:
        """Which entries of features (n, D) stay, bool (n, D)."""
        features = features.detach().requires_grad_()
        true_class = labels[:, None]
        with torch.enable_grad():
            logits = self.model.head(features)
            (slopes,) = torch.autograd.grad(logits.gather(1, true_class).sum(), features)  # (n, D)
        kept = ~_above(slopes, self.drop_features, 1)
        with torch.no_grad():
            before = logits.softmax(1).gather(1, true_class)  # (n, 1)
            after = self.model.head(features * kept).softmax(1).gather(1, true_class)
        return kept | ~_above(before - after, self.drop_rows, 0)


def _above(values: Tensor, share: float, dim: int) -> Tensor:
    """Which values lie above the (1 - share) quantile along a dimension, bool."""
    last = values.shape[dim] - 1
    rank = last - ceil(last * share)
    quantile = values.sort(dim).values.narrow(dim, rank, 1)
    return values > quantile
