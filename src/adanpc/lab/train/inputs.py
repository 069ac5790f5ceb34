"""Algorithms that change inputs: images mixed across domains (Mixup), or with the context of their batch (ARM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributions import Beta

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch, risks
from adanpc.lab.train.search import Choice, Draw, Power

WIDTH = 64  # channels of the context net
KERNEL = 5  # size of its kernels


class Mixup(Algorithm):
    """Mixes each domain with another: the images, and the losses for the labels of both, in the same shares.

    The domains are arranged in a random circle, and each is mixed with the next, row by row. If the batches of a pair
    have different sizes, the larger one is cut. A single domain is mixed with itself in another order of rows.

    Args:
        alpha: shares are drawn from Beta(alpha, alpha), one for each pair of domains; 0 mixes nothing.

    Paper: Yan et al., Improve Unsupervised Domain Adaptation with Mixup Training, 2020 (inter-domain mixup).

    Differs from the published code: a single domain is mixed; DomainBed would pair every row with itself.
    """

    space: ClassVar[Mapping[str, Draw]] = {"alpha": Power(-1, 1)}
    erm: ClassVar[Mapping[str, Any] | None] = {"alpha": 0.0}

    def __init__(self, model: SourceModel, domains: int, *, alpha: float = 0.2, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        if alpha < 0:
            raise AdaNPCError(f"alpha must be 0 or more, got {alpha}")
        self.alpha = alpha

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean over pairs of domains of the two losses, weighted by the shares of the images."""
        pairs = _pairs(batches)
        shares = self._shares(len(batches))
        mixed = []
        for (first, second), share in zip(pairs, shares, strict=True):
            mixed.append(first.images * share + second.images * (1 - share))
        logits = self.model(torch.cat(mixed))
        first_risks = risks(logits, [first for first, _ in pairs])
        second_risks = risks(logits, [second for _, second in pairs])
        weights = first_risks.new_tensor(shares)
        return (weights * first_risks + (1 - weights) * second_risks).mean(), {}

    def _shares(self, count: int) -> list[float]:
        """Returns the share of the first batch in each pair."""
        if self.alpha == 0:
            return [1.0] * count
        alpha = torch.tensor(self.alpha, dtype=torch.float64)  # draws with a small alpha underflow in single precision
        drawn = Beta(alpha, alpha).sample(torch.Size([count]))
        return cast(list[float], drawn.tolist())


class ARM(Algorithm):
    """Adds a channel to every image: the mean output of a context net over the whole batch.

    In training, the batch of each domain is its own context. At test time the context is the batch to predict, so
    predictions depend on the batch, which should come from one domain. The published batch size is 8 rows of each
    domain for photos, and 64 for digits.

    Args:
        model: its encoder must begin with a Conv2d, which gets one more input channel; its other weights stay.

    Paper: Zhang et al., Adaptive Risk Minimization: Learning to Adapt to Domain Shift, NeurIPS 2021 (ARM-CML).

    Differs from the published code: at test time the context is that of the whole batch, not of groups of the training
    batch size. The context net is trained with the rest; in DomainBed no optimizer has its parameters, so it stays
    random.
    """

    photo_settings: ClassVar[Mapping[str, Any]] = {"batch": 8}
    photo_space: ClassVar[Mapping[str, Draw]] = {"batch": Choice((8,))}

    def __init__(self, model: SourceModel, domains: int, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        model.encoder = Contextual(model.encoder).to(model.device)
        self.optimizers = {"model": self.adam(model)}

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of the domains, each in its own context."""
        images = torch.cat([batch.images for batch in batches])
        sizes = [len(batch.labels) for batch in batches]
        encoder = cast(Contextual, self.model.encoder)
        logits = self.model(encoder.with_context(images, sizes))
        return risks(logits, batches).mean(), {}


class Contextual(nn.Module):
    """An encoder that gives images (B, C, H, W) one more channel, the mean context of their batch.

    Images (B, C + 1, H, W) already have a context, by ``with_context``, and are encoded as they are.

    Args:
        encoder: changed in place: its first layer takes one more channel.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        first = _first_layer(encoder)
        self.channels = first.in_channels
        self.encoder = encoder
        self.context = nn.Sequential(
            *_normalized(self.channels, WIDTH),
            *_normalized(WIDTH, WIDTH),
            nn.Conv2d(WIDTH, 1, KERNEL, padding=KERNEL // 2),
        )
        _widen(first)  # after the context net was built for the original channels

    def forward(self, images: Tensor) -> Tensor:
        """Returns features (B, D), all in the same context unless the images already have one."""
        if images.shape[1] == self.channels:
            images = self.with_context(images, [len(images)])
        return cast(Tensor, self.encoder(images))

    def with_context(self, images: Tensor, sizes: Sequence[int]) -> Tensor:
        """Returns images (n, C + 1, H, W), in groups of these sizes, whose last channel is the group's mean context."""
        groups = self.context(images).split(list(sizes))
        means = [group.mean(0, keepdim=True).expand_as(group) for group in groups]
        return torch.cat([images, torch.cat(means)], 1)


def _pairs(batches: Sequence[Batch]) -> list[tuple[Batch, Batch]]:
    """Returns pairs of each batch and the next one in a random circle, cut to equal sizes, in order of the first."""
    if len(batches) == 1:
        (batch,) = batches
        return [(batch, _rows(batch, torch.randperm(len(batch.labels))))]
    circle = torch.randperm(len(batches)).tolist()
    following = {}
    for place, domain in enumerate(circle):
        following[domain] = circle[(place + 1) % len(circle)]
    pairs = []
    for domain, first in enumerate(batches):
        second = batches[following[domain]]
        rows = torch.arange(min(len(first.labels), len(second.labels)))
        pairs.append((_rows(first, rows), _rows(second, rows)))
    return pairs


def _rows(batch: Batch, rows: Tensor) -> Batch:
    """Returns a batch of these rows only."""
    rows = rows.to(batch.labels.device)
    return Batch(*(column[rows] for column in batch))


def _first_layer(encoder: nn.Module) -> nn.Conv2d:
    """Returns the first layer with weights; refuses it if it is not a convolution over all channels."""
    first: nn.Module | None = None
    for module in encoder.modules():
        is_layer = not list(module.children())
        if is_layer and list(module.parameters()):
            first = module
            break
    if not isinstance(first, nn.Conv2d) or first.groups != 1:
        raise AdaNPCError(f"ARM needs an encoder that begins with an ungrouped Conv2d, got {first}: choose another one")
    return first


def _widen(layer: nn.Conv2d) -> None:
    """Gives a convolution one more input channel, with newly drawn weights; its other weights stay."""
    kernel_size = cast(tuple[int, int], layer.kernel_size)
    # The scale of initial weights depends on the number of input channels, so draw those of a whole new layer.
    wider = nn.Conv2d(layer.in_channels + 1, layer.out_channels, kernel_size, bias=False)
    new_channel = wider.weight.detach()[:, -1:].to(layer.weight)
    layer.weight = nn.Parameter(torch.cat([layer.weight.detach(), new_channel], 1))
    layer.in_channels += 1


def _normalized(channels: int, out: int) -> tuple[nn.Module, ...]:
    """Returns a convolution of the context net, with the normalization and activation that follow it."""
    convolution = nn.Conv2d(channels, out, KERNEL, padding=KERNEL // 2)
    return convolution, nn.BatchNorm2d(out), nn.ReLU()
