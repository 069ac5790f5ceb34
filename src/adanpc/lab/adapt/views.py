"""Each image on its own, by many views of it: whatever else is in the batch, the answer is the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.augment import augmix, flip, shift
from adanpc.lab.adapt.entropy import entropy
from adanpc.lab.adapt.statistics import use_batch_statistics
from adanpc.lab.networks.source import SourceModel


class TTAug(Adapter):
    """The mean of the source model's probabilities over random views of an image; nothing moves.

    Args:
        copies: how many views.
        mirror: whether views may be mirrored; not where left and right decide the class, as in digits.

    Paper: test-time augmentation, as long known; the views are those of ``MEMO``, of which this is the first half.
    """

    one_by_one: ClassVar[bool] = True
    passes: ClassVar[int] = 32

    def __init__(self, source: Source, *, copies: int = 32, mirror: bool = True) -> None:
        super().__init__(source)
        self.copies, self.mirror = at_least_one("copies", copies), mirror

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Mean probabilities (B, C) of the views of each image."""
        views = (_views(image, self.copies, self.mirror) for image in batch.split(1))
        return torch.cat([self.model(each).softmax(1).mean(0, keepdim=True) for each in views])


class MEMO(Adapter):
    """The source model after a step toward one sure answer for all views of an image; then it is itself again.

    The loss is the entropy of the mean probabilities over the views: all parameters descend it, by plain gradient
    descent, and the image as it is gets its answer from the model that comes of it. Nothing is kept. BatchNorm layers
    mix the source's statistics, which count for ``prior`` images, with those of the views, which count for one.

    Args:
        copies: how many views.
        lr: of the descent.
        steps: with new views at each.
        prior: infinity is the source's statistics alone.
        mirror: whether views may be mirrored; not where left and right decide the class, as in digits.

    Paper: Zhang et al., MEMO: Test Time Robustness via Adaptation and Augmentation, NeurIPS 2022. The defaults are
    those of a ResNet-50 on ImageNet; a small one with GroupNorm on CIFAR-10 has 32 copies and a rate of 0.005.

    Differs from the published code: the views (see ``augmix``) are made of inputs, after crop and normalization, and by
    shifts instead of crops of other sizes; there is no AdamW.
    """

    one_by_one: ClassVar[bool] = True
    passes: ClassVar[int] = 160
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"lr": (2.5e-4, 5e-3)}  # of its two published settings

    def __init__(
        self,
        source: Source,
        *,
        copies: int = 64,
        lr: float = 2.5e-4,
        steps: int = 1,
        prior: float = 16.0,
        mirror: bool = True,
    ) -> None:
        super().__init__(source)
        if not prior > 0:
            raise AdaNPCError(f"prior must be above 0 images, got {prior}")
        self.copies, self.steps = at_least_one("copies", copies), at_least_one("steps", steps)
        self.lr, self.prior, self.mirror = lr, prior, mirror

    def answer(self, batch: Tensor) -> Tensor:
        """Probabilities (B, C) of each image under a model of its own."""
        many, one = (_with_prior(self.model, self.prior * rows) for rows in (self.copies, 1))
        return torch.cat([self._answer(many, one, image) for image in batch.split(1)])

    def _answer(self, many: SourceModel, one: SourceModel, image: Tensor) -> Tensor:
        """Probabilities (1, C) by two models of the same weights: one for batches of views, one for an image."""

        def loss(weights: dict[str, Tensor]) -> Tensor:
            logits = functional_call(many, weights, (_views(image, self.copies, self.mirror),))
            return entropy(log_mean(logits)).sum()

        weights = descended(dict(many.named_parameters()), loss, self.lr, self.steps)
        with torch.no_grad():
            return finite(functional_call(one, weights, (image,)).softmax(1))


def descended(
    weights: Mapping[str, Tensor], loss: Callable[[dict[str, Tensor]], Tensor], lr: float, steps: int
) -> dict[str, Tensor]:
    """Weights by name after so many steps of gradient descent on a loss of them; those given stay as they are."""
    now = {name: value.detach() for name, value in weights.items()}
    for _ in range(steps):
        with torch.enable_grad():
            value = loss({name: weight.requires_grad_() for name, weight in now.items()})
            slopes = torch.autograd.grad(value, list(now.values()), materialize_grads=True)
        now = {name: weight.detach() - lr * slope for (name, weight), slope in zip(now.items(), slopes, strict=True)}
    return now


def finite(probs: Tensor) -> Tensor:
    """The probabilities, if the descent has not left all bounds."""
    if not bool(probs.isfinite().all()):
        raise AdaNPCError(
            "after the descent on an image, its probabilities are not finite: reset, and take a smaller lr"
        )
    return probs


def log_mean(logits: Tensor) -> Tensor:
    """The logarithm (1, C) of the mean of the probabilities of logits (n, C)."""
    return logits.log_softmax(1).logsumexp(0, keepdim=True) - math.log(len(logits))


def shifted(image: Tensor, copies: int, mirror: bool) -> Tensor:
    """Views of an image (1, C, H, W): a little to the side, perhaps mirrored."""
    views = shift(image.expand(copies, *image.shape[1:]))
    return flip(views) if mirror else views


def _views(image: Tensor, copies: int, mirror: bool) -> Tensor:
    """Views of an image (1, C, H, W): a little to the side, perhaps mirrored, mixed with changes of themselves."""
    return augmix(shifted(image, copies, mirror))


def _with_prior(model: SourceModel, prior: float) -> SourceModel:
    """A copy of a model, whose BatchNorm layers mix their statistics with those of a batch."""
    model = deepcopy(model)
    use_batch_statistics(model, prior)
    return model


def at_least_one(name: str, value: int) -> int:
    """The value, if it is positive."""
    if value < 1:
        raise AdaNPCError(f"{name} must be at least 1, got {value}")
    return value
