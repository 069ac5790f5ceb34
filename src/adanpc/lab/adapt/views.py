"""Methods that answer each image on its own, from many views of it: TTAug, MEMO."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.augment import augmix, flip, shift
from adanpc.lab.adapt.entropy import entropy
from adanpc.lab.adapt.statistics import use_batch_statistics
from adanpc.lab.networks.source import SourceModel


class TTAug(Adapter):
    """Averages the source model's probabilities over random views of each image; it learns nothing.

    Paper:
        None in particular: test-time augmentation is common knowledge. The views are those of ``MEMO``.

    Args:
        copies: the number of views.
        mirror: whether views may be mirrored; switch it off where left and right decide the class, as in digits.
    """

    one_by_one: ClassVar[bool] = True
    passes: ClassVar[int] = 32

    def __init__(self, source: Source, *, copies: int = 32, mirror: bool = True) -> None:
        super().__init__(source)
        self.copies = require.whole("copies", copies, least=1)
        self.mirror = mirror

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the mean probabilities (B, C) of the views of each image."""
        answers = []
        for image in batch.split(1):
            views = _views(image, self.copies, self.mirror)
            answers.append(self.model(views).softmax(1).mean(0, keepdim=True))
        return torch.cat(answers)


class MEMO(Adapter):
    """Trains the model to give one confident answer for all views of an image, answers it, and forgets what it learned.

    The loss is the entropy of the mean probabilities over the views. All parameters are trained by plain gradient
    descent; then the trained model answers the image itself. BatchNorm layers mix the statistics of the source, which
    count for ``prior`` images, with those of the views, which together count for one.

    Paper:
        Zhang et al., MEMO: Test Time Robustness via Adaptation and Augmentation, NeurIPS 2022. The defaults are those
        for a ResNet-50 on ImageNet; for a small one with GroupNorm on CIFAR-10 it uses 32 copies and a rate of 0.005.

    Differs from the published code:
        The views (see ``augmix``) are made from inputs that have already been cropped and normalized, by shifts instead
        of crops of other sizes. There is no AdamW.

    Args:
        copies: the number of views.
        lr: the learning rate of the gradient descent.
        steps: the number of steps, each with new views.
        prior: how many images the statistics of the source count for; with infinity, only they count.
        mirror: whether views may be mirrored; switch it off where left and right decide the class, as in digits.
    """

    one_by_one: ClassVar[bool] = True
    passes: ClassVar[int] = 193  # an update on 64 views
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"lr": (2.5e-4, 5e-3)}  # its two published settings

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
            raise AdaNPCError(f"prior must be greater than 0, got {prior}")
        self.copies = require.whole("copies", copies, least=1)
        self.lr = lr
        self.steps = require.whole("steps", steps, least=1)
        self.prior = prior
        self.mirror = mirror

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of images, each by a model trained for it alone."""
        # All views together count for one image, so the prior counts ``copies`` times as much beside them.
        for_views = _with_prior(self.model, self.prior * self.copies)
        for_image = _with_prior(self.model, self.prior)
        return torch.cat([self._answer(image, for_views, for_image) for image in batch.split(1)])

    def _answer(self, image: Tensor, for_views: SourceModel, for_image: SourceModel) -> Tensor:
        """Returns the probabilities (1, C) of an image (1, C, H, W).

        Args:
            image: (1, C, H, W).
            for_views: the model as it normalizes views.
            for_image: the same model as it normalizes the single image.
        """

        def entropy_of_mean(weights: dict[str, Tensor]) -> Tensor:
            views = _views(image, self.copies, self.mirror)
            logits = functional_call(for_views, weights, (views,))
            return entropy(log_mean(logits)).sum()

        weights = descended(dict(for_views.named_parameters()), entropy_of_mean, self.lr, self.steps)
        with torch.no_grad():
            logits = functional_call(for_image, weights, (image,))
            return finite(logits.softmax(1))


def descended(
    weights: Mapping[str, Tensor], loss: Callable[[dict[str, Tensor]], Tensor], lr: float, steps: int
) -> dict[str, Tensor]:
    """Returns weights by name after some steps of plain gradient descent, without changing those it is given.

    Args:
        weights: the weights to start from.
        loss: computes the loss for given weights.
        lr: the learning rate.
        steps: the number of steps.
    """
    # Each step makes new tensors, so the model keeps its weights and the next image starts from them again.
    current = {name: weight.detach() for name, weight in weights.items()}
    for _ in range(steps):
        with torch.enable_grad():
            for weight in current.values():
                weight.requires_grad_()
            gradients = torch.autograd.grad(loss(current), list(current.values()), materialize_grads=True)
        moved = {}
        for (name, weight), gradient in zip(current.items(), gradients, strict=True):
            moved[name] = weight.detach() - lr * gradient
        current = moved
    return current


def finite(probs: Tensor) -> Tensor:
    """Returns the probabilities as they are, or raises an error if the gradient descent has diverged."""
    if not bool(probs.isfinite().all()):
        raise AdaNPCError("after training on an image, its probabilities are not finite: reset, and use a smaller lr")
    return probs


def log_mean(logits: Tensor) -> Tensor:
    """Returns the logarithm (1, C) of the mean over n of the probabilities of logits (n, C)."""
    return logits.log_softmax(1).logsumexp(0, keepdim=True) - math.log(len(logits))


def shifted(image: Tensor, copies: int, mirror: bool) -> Tensor:
    """Returns views (copies, C, H, W) of an image (1, C, H, W), each shifted a little and perhaps mirrored."""
    views = shift(image.expand(copies, *image.shape[1:]))
    if mirror:
        views = flip(views)
    return views


def _views(image: Tensor, copies: int, mirror: bool) -> Tensor:
    """Returns views of an image like those of ``shifted``, then changed by ``augmix``."""
    return augmix(shifted(image, copies, mirror))


def _with_prior(model: SourceModel, prior: float) -> SourceModel:
    """Returns a copy of a model whose BatchNorm layers count their own statistics as ``prior`` rows of the batch."""
    model = deepcopy(model)
    use_batch_statistics(model, prior)
    return model
