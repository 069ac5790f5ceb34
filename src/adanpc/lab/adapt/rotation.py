"""Training goes on at test time, with a task that needs no labels: how far was the image turned?"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, BatchError, Source
from adanpc.lab.adapt.views import at_least_one, descended, finite, shifted
from adanpc.lab.networks.source import SourceModel

TURNS = 4  # by 0, 90, 180 and 270 degrees, counter-clockwise


class RotationTraining(Adapter, ABC):
    """The source model, trained at test time to tell how far views of an image were turned.

    Everything but the class head descends, by plain gradient descent, the loss of the rotation head on randomly turned
    views; the image as it is gets its answer from the model that comes of it. BatchNorm layers keep the source's
    statistics.

    Args:
        copies: how many views.
        lr: of the descent.
        steps: for each image, with new views at each.
        mirror: whether views may be mirrored.
    """

    keeps: ClassVar[bool]  # whether the next image meets the model that the last one left

    def __init__(self, source: Source, *, copies: int, lr: float, steps: int, mirror: bool) -> None:
        super().__init__(source)
        if source.rotation_head is None:
            raise AdaNPCError("the source has no rotation head: train with --algorithm rotation")
        self.rotation_head = deepcopy(source.rotation_head).to(self.model.device).eval().requires_grad_(False)
        self.copies, self.steps = at_least_one("copies", copies), at_least_one("steps", steps)
        self.lr, self.mirror = lr, mirror

    def moving(self) -> set[str]:
        """All but the class head, if it is kept at all."""
        return set(self._trained(self._heads())) if self.keeps else set()

    def answer(self, batch: Tensor) -> Tensor:
        """Probabilities (B, C), image by image."""
        if batch.ndim != 4 or batch.shape[2] != batch.shape[3]:
            raise BatchError(f"a quarter turn needs square images (B, C, H, H), got {tuple(batch.shape)}: crop them")
        return torch.cat([self._answer(image) for image in batch.split(1)])

    def _answer(self, image: Tensor) -> Tensor:
        heads = self._heads()

        def loss(weights: dict[str, Tensor]) -> Tensor:
            views, turns = turned(shifted(image, self.copies, self.mirror))
            return cross_entropy(functional_call(heads, weights, (views,))[1], turns)

        weights = descended(self._trained(heads), loss, self.lr, self.steps)
        with torch.no_grad():
            probs = finite(functional_call(heads, weights, (image,))[0].softmax(1))
            if self.keeps:
                for name, value in self._trained(heads).items():
                    value.copy_(weights[name])
        return probs

    def _heads(self) -> _TwoHeads:
        return _TwoHeads(self.model, self.rotation_head)

    def _trained(self, heads: _TwoHeads) -> dict[str, Tensor]:
        return {name: value for name, value in heads.named_parameters() if not name.startswith("model.head.")}


class TTT(RotationTraining):
    """Test-time training by rotation, anew for each image: the model is itself again after the answer.

    Args:
        copies: how many views.
        lr: of the descent.
        steps: for each image, with new views at each.
        mirror: whether views may be mirrored; not where left and right decide the class, as in digits.

    Paper: Sun et al., Test-Time Training with Self-Supervision for Generalization under Distribution Shifts, ICML 2020.

    Differs from the published code: the rotation head is linear on the features, so all of the encoder is trained, not
    its first two stages; BatchNorm layers keep their statistics (its option fix_bn); every image is trained on, sure
    or not (its default).
    """

    one_by_one: ClassVar[bool] = True
    passes: ClassVar[int] = 160
    needs_rotation_head: ClassVar[bool] = True
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"steps": (1, 3, 10)}
    keeps = False

    def __init__(
        self, source: Source, *, copies: int = 32, lr: float = 1e-3, steps: int = 10, mirror: bool = True
    ) -> None:
        super().__init__(source, copies=copies, lr=lr, steps=steps, mirror=mirror)


class TTTOnline(RotationTraining):
    """Test-time training by rotation that goes on from image to image.

    Args:
        copies: how many views.
        lr: of the descent.
        steps: for each image, with new views at each.
        mirror: whether views may be mirrored; not where left and right decide the class, as in digits.

    Paper and differences: as of ``TTT``.
    """

    one_by_one: ClassVar[bool] = True
    passes: ClassVar[int] = 160
    needs_rotation_head: ClassVar[bool] = True
    keeps = True

    def __init__(
        self, source: Source, *, copies: int = 32, lr: float = 1e-3, steps: int = 1, mirror: bool = True
    ) -> None:
        super().__init__(source, copies=copies, lr=lr, steps=steps, mirror=mirror)


class _TwoHeads(nn.Module):
    """Logits of classes and of rotations; shares the weights of what it is made of, under their names."""

    def __init__(self, model: SourceModel, rotation_head: nn.Module) -> None:
        super().__init__()
        self.model, self.rotation_head = model, rotation_head

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.model.features(images)
        return self.model.head(features), self.rotation_head(features)


def turned(images: Tensor) -> tuple[Tensor, Tensor]:
    """Images (n, C, H, H), each by random quarter turns counter-clockwise, and how many (n,)."""
    turns = torch.randint(TURNS, (len(images),))
    views = [image.rot90(turn, (1, 2)) for image, turn in zip(images, turns.tolist(), strict=True)]
    return torch.stack(views), turns.to(images.device)
