"""Algorithms that change features: they append the domain's mean (MTL), mix styles (SagNet), or mute some (RSC)."""

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

EPS = 1e-5  # added to a variance, as in the published code


class MTL(Algorithm):
    """Appends the mean feature of the domain to each feature vector, so features have twice the encoder's dimension.

    In training, the mean of a domain is a moving average, and gradients flow through the part that the current batch
    contributes. At test time it is the mean of the batch to predict, so predictions depend on the batch, which should
    come from one domain.

    Args:
        model: gets a new head, a new norm if it has one, and twice the ``dim``.
        ema: the share of a batch in its domain's mean: new = ema * batch + (1 - ema) * old, starting from zero.

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
        """Returns the sum of the domains' losses, as in the published code."""
        model = self.model
        # Not model.features(), which would append the mean over all domains of the batch.
        encoder = cast(WithMean, model.encoder).encoder
        encoded = encoder(torch.cat([batch.images for batch in batches]))  # (n, D)
        sizes = [len(batch.labels) for batch in batches]
        joined = []
        for domain, rows in enumerate(encoded.split(sizes)):
            joined.append(joint(rows, self._update_mean(domain, rows)))
        logits = model.head(model.norm(model.dropout(torch.cat(joined))))
        return risks(logits, batches).sum(), {}

    def _update_mean(self, domain: int, rows: Tensor) -> Tensor:
        """Updates a domain's mean with these rows, and returns it (D,)."""
        mean = self.ema * rows.mean(0) + (1 - self.ema) * self.means[domain]
        self.means[domain] = mean.detach()
        return mean


class WithMean(nn.Module):
    """An encoder whose features (B, 2 D) are those of another encoder (B, D), each followed by their mean."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        """Returns the features (B, 2 D) of images."""
        rows = self.encoder(images)
        return joint(rows, rows.mean(0))


def joint(rows: Tensor, mean: Tensor) -> Tensor:
    """Returns rows (B, D), each followed by the mean (D,), as (B, 2 D)."""
    return torch.cat([rows, mean.expand_as(rows)], 1)


class SagNet(Algorithm):
    """Trains the head on features with mixed styles, and the encoder to make styles useless for classification.

    The style of a feature vector is its mean and variance over the feature axis; its content is what remains after
    normalizing by them. Each update makes three steps: one of the model, on features whose style is mixed with that of
    another sample; one of a style head, which classifies a sample by its own style with another sample's content; and
    one of the encoder, so that the style head finds all classes equally likely.

    Args:
        weight: of the loss in the third step.

    Paper: Nam et al., Reducing Domain Gap by Reducing Style Bias, CVPR 2021.

    Differs from the published code: the second and the third step share one forward pass of the encoder.
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
        """Returns the mean loss of the domains on features of mixed style."""
        features = self.model.features(torch.cat([batch.images for batch in batches]))
        share = torch.rand(len(features), 1).to(features)
        mixed = restyled(features, torch.randperm(len(features)), share)
        return risks(self.model.head(mixed), batches).mean(), {}

    def update(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Makes the three steps; the reported ``loss`` is that of the first."""
        report = super().update(batches)
        features = self.model.features(torch.cat([batch.images for batch in batches]))
        style = risks(self._read_style(features.detach()), batches).mean()
        self.descend(style, "style")
        adversary = -log_softmax(self._read_style(features), 1).mean()
        self.descend(self.weight * adversary)  # the model's head stays: Adam skips parameters without a gradient
        return {**report, "style": style.item(), "adversary": adversary.item()}

    def _read_style(self, features: Tensor) -> Tensor:
        """Returns the style head's logits (n, C) for the style of features (n, D) with random content."""
        order = torch.randperm(len(features))
        return cast(Tensor, self.style_head(refilled(features, order)))


def restyled(features: Tensor, order: Tensor, share: Tensor) -> Tensor:
    """Returns features (n, D) with a mixed style: a share (n, 1) of their own, the rest that of rows ``order`` (n,)."""
    content, mean, variance = _parts(features)
    mixed_mean = share * mean + (1 - share) * mean[order]
    mixed_variance = share * variance + (1 - share) * variance[order]
    return content * (mixed_variance + EPS).sqrt() + mixed_mean


def refilled(features: Tensor, order: Tensor) -> Tensor:
    """Returns features with their own style and the content of rows ``order`` (n,), which gets no gradient (n, D)."""
    content, mean, variance = _parts(features)
    return content[order].detach() * (variance + EPS).sqrt() + mean


def _parts(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the content (n, D), the mean (n, 1), and the unbiased variance (n, 1) of features (n, D)."""
    mean = features.mean(1, keepdim=True)
    variance = features.var(1, keepdim=True)
    content = (features - mean) / (variance + EPS).sqrt()
    return content, mean, variance


class RSC(Algorithm):
    """Mutes the features that contribute most to the true class, in the samples that rely on them most.

    An entry is muted if the gradient of the true class's logit with respect to it lies above the (1 - drop_features)
    quantile of its row, and only in rows where muting costs the true class more probability than the (1 - drop_rows)
    quantile of all rows.

    A value at a quantile is not above it. So if all values are equal none is muted, and nothing is muted in a batch of
    one row.

    Args:
        drop_features, drop_rows: shares from 0 to 1.

    Paper: Huang et al., Self-Challenging Improves Cross-Domain Generalization, ECCV 2020.

    Differs from the published code: there, values at a quantile are muted, too, so a share of 0 mutes something.
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
        """Returns the mean loss of the domains on the features that are not muted."""
        images = torch.cat([batch.images for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        features = self.model.features(images)
        kept = self.kept(features, labels)
        return risks(self.model.head(features * kept), batches).mean(), {}

    def kept(self, features: Tensor, labels: Tensor) -> Tensor:
        """Returns which entries of features (n, D) are not muted, bool (n, D)."""
        features = features.detach().requires_grad_()
        true_class = labels[:, None]
        with torch.enable_grad():
            logits = self.model.head(features)
            (gradients,) = torch.autograd.grad(logits.gather(1, true_class).sum(), features)  # (n, D)
        kept = ~_above(gradients, self.drop_features, 1)
        with torch.no_grad():
            before = logits.softmax(1).gather(1, true_class)  # (n, 1)
            after = self.model.head(features * kept).softmax(1).gather(1, true_class)
        return kept | ~_above(before - after, self.drop_rows, 0)


def _above(values: Tensor, share: float, dim: int) -> Tensor:
    """Returns which values lie above the (1 - share) quantile along a dimension, bool."""
    last = values.shape[dim] - 1
    rank = last - ceil(last * share)  # of the quantile among the sorted values; not interpolated between two
    quantile = values.sort(dim).values.narrow(dim, rank, 1)
    return values > quantile
