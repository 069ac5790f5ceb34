"""CoTTA: a student is trained to answer like its teacher, which is a slow moving average of the student."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source, descend
from adanpc.lab.adapt.augment import flip, jitter, warp
from adanpc.lab.adapt.statistics import affine, use_batch_statistics


class CoTTA(Adapter):
    """Trains a student to answer like its teacher, and lets random weights fall back to those of the source.

    The teacher is a slow moving average of the student. All weights are trained. BatchNorm layers use the statistics of
    the batch. The teacher answers, as it was before the step; if the source model is not confident about the batch, the
    teacher's logits are averaged over many random views. Without views, a student that equals its teacher has nothing
    to learn: its gradient is rounding noise, which Adam turns into steps.

    Paper:
        Wang, Fink, Van Gool and Dai, Continual Test-Time Domain Adaptation, CVPR 2022.

    Differs from the published code:
        Views are jittered, turned, moved, zoomed and mirrored, each image in its own way; blur, noise, hue and gamma
        are left out. Dropout is off. Every weight may fall back, not only those called weight or bias. The loss is the
        published one for CIFAR; for ImageNet the published one is symmetric.

    Args:
        lr: the learning rate of Adam.
        momentum: the share of itself that the teacher keeps in each step.
        restore: the probability that a weight of the student falls back after a step.
        threshold: views are used if the mean confidence of the source model is below this. The published values are
            0.92 for CIFAR-10, 0.72 for CIFAR-100 and 0.1 for ImageNet. The default, None, is 0.05 less than the
            confidence that 95 % of the source training samples reach.
        views: the number of views.
    """

    passes: ClassVar[int] = 32  # for a batch that the source model doubts
    # No search is published, so the grid spans a factor of ten on each side of the default.
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
        if threshold is None:
            threshold = usual_confidence(source) - 0.05
        self.momentum = momentum
        self.restore = restore
        self.threshold = threshold
        self.views = require.whole("views", views, least=1)
        use_batch_statistics(self.model)
        self.teacher = deepcopy(self.model)
        self.anchor = deepcopy(self.model)  # the source model, which never changes
        self.model.requires_grad_(True)
        self.optimizers["adam"] = Adam(self.model.parameters(), lr=lr)

    def moving(self) -> set[str]:
        """Returns the names of the weights of student and teacher."""
        weights = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        student = {f"model.{name}" for name in weights}
        teacher = {f"teacher.{name}" for name in weights}
        return student | teacher

    @torch.enable_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the teacher's probabilities (B, C) as they were before the step."""
        probs = self.teacher_logits(batch).softmax(1)
        loss = cross_entropy(self.model(batch), probs)
        descend(loss, self.optimizers["adam"])
        approach(self.teacher.parameters(), self.model.parameters(), 1 - self.momentum)
        self._fall_back()
        return probs

    @torch.no_grad()
    def teacher_logits(self, batch: Tensor) -> Tensor:
        """Returns the teacher's logits (B, C), averaged over views if the source model is not confident."""
        confidence = self.anchor(batch).softmax(1).amax(1).mean()
        if confidence >= self.threshold:
            logits: Tensor = self.teacher(batch)
            return logits
        total = torch.zeros(len(batch), self.model.classes, device=batch.device)
        for _ in range(self.views):
            total = total + self.teacher(view(batch))
        return total / self.views

    @torch.no_grad()
    def _fall_back(self) -> None:
        """Sets random weights of the student back to those of the source."""
        for weight, start in zip(self.model.parameters(), self.anchor.parameters(), strict=True):
            # Drawn on the CPU, so that a seed gives the same weights on every device.
            chosen = (torch.rand(weight.shape) < self.restore).to(weight.device)
            weight.copy_(torch.where(chosen, start, weight))


def usual_confidence(source: Source) -> float:
    """Returns the confidence that the source model reaches on 95 % of its training samples."""
    if len(source.features) == 0:
        raise AdaNPCError("there are no source features to derive the threshold from: give a threshold")
    confidences = []
    with torch.no_grad():
        for rows in source.features.split(4096):  # in parts, since all logits of many classes might not fit
            logits = source.model.head(rows.to(source.model.device))
            confidences.append(logits.softmax(1).amax(1))
    return float(torch.cat(confidences).quantile(0.05))


def view(images: Tensor) -> Tensor:
    """Returns images (B, C, H, W) with random changes of light, color, position, angle, size and side."""
    return flip(warp(jitter(images)))


@torch.no_grad()
def approach(weights: Iterable[Tensor], goals: Iterable[Tensor], share: float) -> None:
    """Moves weights a share of the way to their goals, in place."""
    for weight, goal in zip(weights, goals, strict=True):
        weight.lerp_(goal, share)


def trainable_scales(model: nn.Module, method: str) -> list[nn.Parameter]:
    """Returns the scales and shifts of a model's normalization layers, with gradients switched on.

    Args:
        model: changed in place; a model without normalization layers is refused.
        method: the name of the method, for the message of that error.
    """
    scales = affine(model)
    if not scales:
        raise AdaNPCError(
            f"{method} trains the scales and shifts of normalization layers, and the model has none: "
            "use PLFull or CoTTA, which train all weights, or T3A, which trains none"
        )
    for scale in scales:
        scale.requires_grad_(True)
    return scales
