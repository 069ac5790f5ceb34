"""A teacher that is the slow average of its student: CoTTA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source, descend
from adanpc.lab.adapt.augment import flip, jitter, warp
from adanpc.lab.adapt.statistics import affine, use_batch_statistics


class CoTTA(Adapter):
    """A student learns from a teacher, which is the slow average of the student; weights fall back to the source's.

    All weights are trained. BatchNorm layers take the statistics of the batch. The teacher answers, from before its
    step; if the source model is unsure of the batch, it answers by the mean logits of many changed views. Without
    views, a student that equals its teacher has nothing to learn: its gradient is rounding, which Adam makes steps of.

    Args:
        lr: of Adam.
        momentum: of the teacher: this share of it stays in each step.
        restore: the probability with which a weight of the student falls back, after each step.
        threshold: views are made if the source model's mean confidence is below this; the published values are 0.92
            for CIFAR-10, 0.72 for CIFAR-100 and 0.1 for ImageNet. None: 0.05 less than what 95 % of the source's
            training samples reach.
        views: how many.

    Paper: Wang, Fink, Van Gool and Dai, Continual Test-Time Domain Adaptation, CVPR 2022.

    Differs from the published code: views are jittered, turned, moved, zoomed and mirrored, each image in its own way,
    without blur, noise, hue and gamma; dropout is off; every weight may fall back, not only those called weight or
    bias. The loss is that for CIFAR; for ImageNet it is symmetric there.
    """

    # No search is published: a decade to each side of the default.
    passes: ClassVar[int] = 32
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"lr": (1e-4, 1e-3, 1e-2)}

    def __init__(
        self,
        source: Source,
        *,
        lr: float = 1e-3,
        momentum: float = 0.999,
        restore: float = 0.01,
        threshold: float | None = None,
        views: int = 32,
    ) -> None:
        super().__init__(source)
        if views < 1:
            raise AdaNPCError(f"views must be at least 1, got {views}")
        self.momentum, self.restore, self.views = momentum, restore, views
        self.threshold = usual_confidence(source) - 0.05 if threshold is None else threshold
        use_batch_statistics(self.model)
        self.teacher, self.anchor = deepcopy(self.model), deepcopy(self.model)
        self.model.requires_grad_(True)
        self.optimizers["adam"] = Adam(self.model.parameters(), lr=lr)

    def moving(self) -> set[str]:
        """The weights of student and teacher."""
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {f"{part}.{name}" for part in ("model", "teacher") for name in names}

    @torch.enable_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """The teacher's probabilities (B, C), from before it follows the student's step."""
        probs = self.teach(batch).softmax(1)
        descend(cross_entropy(self.model(batch), probs), self.optimizers["adam"])
        approach(self.teacher.parameters(), self.model.parameters(), 1 - self.momentum)
        self._fall_back()
        return probs

    @torch.no_grad()
    def teach(self, batch: Tensor) -> Tensor:
        """The teacher's logits (B, C) of a batch, or the mean of those of its views."""
        if self.anchor(batch).softmax(1).amax(1).mean() >= self.threshold:
            logits: Tensor = self.teacher(batch)
            return logits
        total = torch.zeros(len(batch), self.model.classes, device=batch.device)
        for _ in range(self.views):
            total = total + self.teacher(view(batch))
        return total / self.views

    @torch.no_grad()
    def _fall_back(self) -> None:
        for weight, start in zip(self.model.parameters(), self.anchor.parameters(), strict=True):
            chosen = (torch.rand(weight.shape) < self.restore).to(weight.device)
            weight.copy_(torch.where(chosen, start, weight))


def usual_confidence(source: Source) -> float:
    """The confidence that the source model has on 95 % of its training samples."""
    if not len(source.features):
        raise AdaNPCError("there are no source features to take the threshold from: give a threshold")
    head, device = source.model.head, source.model.device
    with torch.no_grad():
        parts = [head(rows.to(device)).softmax(1).amax(1) for rows in source.features.split(4096)]
    return float(torch.cat(parts).quantile(0.05))


def view(images: Tensor) -> Tensor:
    """Images (B, C, H, W) with other light and color, turned, moved, zoomed and mirrored, each in its own way."""
    return flip(warp(jitter(images)))


@torch.no_grad()
def approach(weights: Iterable[Tensor], goals: Iterable[Tensor], share: float) -> None:
    """Moves weights this share of the way to their goals, in place."""
    for weight, goal in zip(weights, goals, strict=True):
        weight.lerp_(goal, share)


def trainable_scales(model: nn.Module, method: str) -> list[nn.Parameter]:
    """The scales and shifts of a model's normalization layers, with gradients switched on; there must be some."""
    scales = affine(model)
    if not scales:
        raise AdaNPCError(
            f"{method} trains scale and shift of normalization layers, and the model has none: take PLFull or CoTTA, "
            "which train all weights, or T3A, which trains none"
        )
    for scale in scales:
        scale.requires_grad_(True)
    return scales
