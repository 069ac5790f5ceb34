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
from adanpc.lab.train.search import Choice, Draw, Power

# Of the context net.
WIDTH = 64
KERNEL = 5


class Mixup(Algorithm):
    """Each domain is mixed with another: the images, and the losses for the labels of both, in the same shares.

    The domains are put in a random circle, and each is mixed with the next, row by row. If the batches of a pair have
    different sizes, the larger one is cut. A single domain is mixed with itself in another order of rows.

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
        """The share that each pair takes of its first batch."""
        if self.alpha == 0:
            return [1.0] * count
        alpha = torch.tensor(self.alpha, dtype=torch.float64)  # small ones underflow in single precision
        drawn = Beta(alpha, alpha).sample(torch.Size([count]))
        return cast(list[float], drawn.tolist())


class ARM(Algorithm):
    """A context net sees the whole batch, and its mean answer is one more channel of every image.

    In training each domain's batch is its own context; at test the batch that is predicted is, so predictions depend on
    it and a batch should come from one domain. The published batch is 8 rows of each domain for photos, 64 for digits.

    Args:
        model: its encoder must begin with a Conv2d, which gets one more input channel; its other weights stay.

    Paper: Zhang et al., Adaptive Risk Minimization: Learning to Adapt to Domain Shift, NeurIPS 2021 (ARM-CML).

    Differs from the published code: at test the context is that of the whole batch, not of groups of the training size.
    The context net is trained with the rest; in DomainBed no optimizer has its parameters, and it stays random.
    """

    photo_settings: ClassVar[Mapping[str, Any]] = {"batch": 8}
    photo_space: ClassVar[Mapping[str, Draw]] = {"batch": Choice((8,))}

    def __init__(self, model: SourceModel, domains: int, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        model.encoder = Contextual(model.encoder).to(model.device)
        self.optimizers = {"model": self.adam(model)}

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of the domains, each in its own context."""
        images = torch.cat([batch.images for batch in batches])
        sizes = [len(batch.labels) for batch in batches]
        encoder = cast(Contextual, self.model.encoder)
        logits = self.model(encoder.with_context(images, sizes))
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
        self.channels = first.in_channels
        self.encoder = encoder
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
    """The batch with these rows alone."""
    rows = rows.to(batch.labels.device)
    return Batch(*(column[rows] for column in batch))


def _first_layer(encoder: nn.Module) -> nn.Conv2d:
    """The first layer with weights, which must be a convolution over all channels."""
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
    """Gives a convolution one more input channel, with weights as in a new one of that width; the others stay."""
    kernel_size = cast(tuple[int, int], layer.kernel_size)
    wider = nn.Conv2d(layer.in_channels + 1, layer.out_channels, kernel_size, bias=False)
    new_channel = wider.weight.detach()[:, -1:].to(layer.weight)
    layer.weight = nn.Parameter(torch.cat([layer.weight.detach(), new_channel], 1))
    layer.in_channels += 1


def _normalized(channels: int, out: int) -> tuple[nn.Module, ...]:
    """A convolution of the context net with what follows it."""
    return nn.Conv2d(channels, out, KERNEL, padding=KERNEL // 2), nn.BatchNorm2d(out), nn.ReLU()
