"""Joint training with a second task that needs no labels: to tell how far an image was turned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch, losses

TURNS = 4  # by 0, 90, 180 and 270 degrees


class Rotation(Algorithm):
    """Minimizes the mean cross-entropy over domains, plus that of predicting which of four rotations an image has.

    ``rotation_head`` predicts the rotation from the model's features. Test-time training continues with this task,
    which needs no labels.

    Args:
        weight: of the second task's loss.

    Paper: Sun et al., Test-Time Training with Self-Supervision for Generalization under Distribution Shifts, ICML 2020.

    Differs from the published code: the second head is linear and branches off at the features, which every encoder
    has; the original branches off after the second stage of a ResNet-26, with a copy of the layers that follow.
    """

    erm: ClassVar[Mapping[str, Any] | None] = {"weight": 0.0}

    def __init__(self, model: SourceModel, domains: int, *, weight: float = 1.0, **adam: float) -> None:
        super().__init__(model, domains, **adam)
        self.weight = weight
        self.rotation_head = nn.Linear(model.dim, TURNS).to(model.device)
        self.optimizers = {"model": self.adam(model, self.rotation_head)}

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of the domains plus the weighted loss of the rotations."""
        risk = losses(self.model, batches).mean()
        images, turns = turned(torch.cat([batch.images for batch in batches]))
        features = self.model.features(images)
        rotation = cross_entropy(self.rotation_head(features), turns)
        reported = {"risk": risk.detach(), "rotation": rotation.detach()}
        return risk + self.weight * rotation, reported


def turned(images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns all images (n, C, H, H) in four rotations (4 n, C, H, H), and the number of quarter turns of each (4 n,).

    All images come first unturned, then turned once counter-clockwise, and so on.
    """
    if images.shape[2] != images.shape[3]:
        raise AdaNPCError(f"a quarter turn needs square images, got {images.shape[2]} x {images.shape[3]}: crop them")
    rotated = torch.cat([images.rot90(turn, (2, 3)) for turn in range(TURNS)])
    turns = torch.arange(TURNS, device=images.device).repeat_interleave(len(images))
    return rotated, turns
