"""Training on changed inputs: images mixed across domains, or images that carry the context of their batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributions import Beta

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch, risks
from adanpc.lab.train.search import Draw, Power

WIDTH, KERNEL = 64, 5  # of the context net


class Mixup(Algorithm):
    """Each domain is mixed with another: the images, and the losses for the labels of both, in the same shares.

    The domains are put in a random circle, and each is mixed with the next, row by row. Of two batches of unequal size
    the larger is cut. A single domain is mixed with itself in another order of rows.

    Args:
        alpha: shares are drawn from Beta(alpha, alpha), one for each pair of domains; 0 mixes nothing.

    Paper: Yan et al., Improve Unsupervised Domain Adaptation with Mixup Training, 2020 (inter-domain mixup).

    Differs from the published code: a single domain is mixed, where DomainBed would pair every row with itself.
    """

    space: ClassVar[Mapping[str, Draw]] = {"alpha": Power(-1, 1)}
    erm: ClassVar[Mapping[str, Any] | None] = {"alpha": 0.0}

    def __init__(self, model: SourceModel, domains: int, *, alpha: float = 0.2, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        if alpha < 0:
            raise AdaNPCError(f"alpha must be 0 or more, got {alpha}")
        self.alpha = alpha

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean over pairs of domains of the two losses, in the shares of the images."""
        pairs, shares = _pairs(batches), self._shares(len(batches))
        mixed = [a.images * s + b.images * (1 - s) for (a, b), s in zip(pairs, shares, strict=True)]
        logits = self.model(torch.cat(mixed))
        own, other = (risks(logits, [pair[side] for pair in pairs]) for side in (0, 1))
        share = own.new_tensor(shares)
        return (share * own + (1 - share) * other).mean(), {}

    def _shares(self, count: int) -> list[float]:
        """What each pair takes of its first batch."""
        if self.alpha == 0:
            return [1.0] * count
        both = torch.tensor(self.alpha, dtype=torch.float64)  # small alphas underflow in single precision
        return cast(list[float], Beta(both, both).sample(torch.Size([count])).tolist())


class ARM(Algorithm):
    """A context net sees the whole batch, and its mean answer is one more channel of every image.

    In training each domain's batch is its own context; at test the batch that is predicted is, so predictions depend on
    it and a batch should come from one domain. The published batch is 8 rows of each domain.

    Args:
        model: its encoder must begin with a Conv2d, which gets one more input channel; its other weights stay.

    Paper: Zhang et al., Adaptive Risk Minimization: Learning to Adapt to Domain Shift, NeurIPS 2021 (ARM-CML).

    Differs from the published code: at test the context is that of the whole batch, not of groups of 8.
    """

    batch: ClassVar[int | None] = 8

    def __init__(self, model: SourceModel, domains: int, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        model.encoder = Contextual(model.encoder).to(model.device)
        self.optimizers = {"model": self.adam(model)}

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of the domains, each in its own context."""
        images, sizes = torch.cat([batch.images for batch in batches]), [len(batch.labels) for batch in batches]
        logits = self.model(cast(Contextual, self.model.encoder).with_context(images, sizes))
        return risks(logits, batches).mean(), {}


class Contextual(nn.Module):
    """Features of images that see their batch: images (B, C, H, W) get a channel that is the mean context of the batch.

    Images (B, C + 1, H, W) carry a context already (``with_context``) and get none.

    Args:
        encoder: is changed: its first layer takes one more channel.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        first = _first_layer(encoder)
        self.channels, self.encoder = first.in_channels, encoder
        self.context = nn.Sequential(
            *_normalized(self.channels, WIDTH),
            *_normalized(WIDTH, WIDTH),
            nn.Conv2d(WIDTH, 1, KERNEL, padding=KERNEL // 2),
        )
        _widen(first)

    def forward(self, images: Tensor) -> Tensor:
        """Features (B, D), all in the same context, unless the images carry their own."""
        if images.shape[1] == self.channels:
            images = self.with_context(images, [len(images)])
        return cast(Tensor, self.encoder(images))

    def with_context(self, images: Tensor, sizes: Sequence[int]) -> Tensor:
        """Images (n, C + 1, H, W): groups of these sizes, each with the mean context of its group as last channel."""
        groups = self.context(images).split(list(sizes))
        means = [group.mean(0, keepdim=True).expand_as(group) for group in groups]
        return torch.cat([images, torch.cat(means)], 1)


def _pairs(batches: Sequence[Batch]) -> list[tuple[Batch, Batch]]:
    """Each batch with the next in a random circle, both cut to the shorter; in order of the first."""
    if len(batches) == 1:
        return [(batches[0], _rows(batches[0], torch.randperm(len(batches[0].labels))))]
    circle = torch.randperm(len(batches)).tolist()
    following = dict(zip(circle, circle[1:] + circle[:1], strict=True))
    pairs = [(batch, batches[following[place]]) for place, batch in enumerate(batches)]
    sizes = [torch.arange(min(len(a.labels), len(b.labels))) for a, b in pairs]
    return [(_rows(a, rows), _rows(b, rows)) for (a, b), rows in zip(pairs, sizes, strict=True)]


def _rows(batch: Batch, rows: Tensor) -> Batch:
    rows = rows.to(batch.labels.device)
    return Batch(*(column[rows] for column in batch))


def _first_layer(encoder: nn.Module) -> nn.Conv2d:
    """The first layer with weights, which must be a convolution over all channels."""
    layers = (layer for layer in encoder.modules() if not list(layer.children()) and list(layer.parameters()))
    first = next(layers, None)
    if not isinstance(first, nn.Conv2d) or first.groups != 1:
        raise AdaNPCError(f"ARM needs an encoder that begins with an ungrouped Conv2d, got {first}: choose another one")
    return first


def _widen(layer: nn.Conv2d) -> None:
    """Gives a convolution one more input channel, with weights as in a new one of that width; the others stay."""
    new = nn.Conv2d(layer.in_channels + 1, layer.out_channels, cast(tuple[int, int], layer.kernel_size), bias=False)
    layer.weight = nn.Parameter(torch.cat([layer.weight.detach(), new.weight.detach()[:, -1:].to(layer.weight)], 1))
    layer.in_channels += 1


def _normalized(channels: int, out: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, out, KERNEL, padding=KERNEL // 2), nn.BatchNorm2d(out), nn.ReLU()
