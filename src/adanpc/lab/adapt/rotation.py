"""TTT: training continues at test time with a task that needs no labels, to tell how far an image was turned."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, BatchError, Source
from adanpc.lab.adapt.views import descended, finite, shifted
from adanpc.lab.networks.source import SourceModel

TURNS = 4  # by 0, 90, 180 and 270 degrees, counter-clockwise


class RotationTraining(Adapter, ABC):
    """Trains the model at test time to tell how far views of an image were turned.

    Everything but the class head is trained by plain gradient descent, to minimize the loss of the rotation head on
    randomly turned views. Then the trained model answers the image itself. BatchNorm layers keep the statistics of the
    source.

    Args:
        copies: the number of views.
        lr: the learning rate of the gradient descent.
        steps: the number of steps for each image, each with new views.
        mirror: whether views may be mirrored.
    """

    keeps: ClassVar[bool]  # whether training for the next image continues from the weights trained for this one

    def __init__(self, source: Source, *, copies: int, lr: float, steps: int, mirror: bool) -> None:
        super().__init__(source)
        if source.rotation_head is None:
            raise AdaNPCError("the source has no rotation head: train its model with the algorithm 'rotation'")
        self.rotation_head = deepcopy(source.rotation_head).to(self.model.device).eval().requires_grad_(False)
        self.copies = require.whole("copies", copies, least=1)
        self.steps = require.whole("steps", steps, least=1)
        self.lr = lr
        self.mirror = mirror

    def moving(self) -> set[str]:
        """Returns the names of all weights but those of the class head; none if what was learned is not kept."""
        if not self.keeps:
            return set()
        return set(_trained(self._two_heads()))

    def answer(self, batch: Tensor) -> Tensor:
        """Returns probabilities (B, C), image by image."""
        if batch.ndim != 4 or batch.shape[2] != batch.shape[3]:
            raise BatchError(f"a quarter turn needs square images (B, C, H, H), got {tuple(batch.shape)}: crop them")
        return torch.cat([self._answer(image) for image in batch.split(1)])

    def _answer(self, image: Tensor) -> Tensor:
        """Returns the probabilities (1, C) of an image (1, C, H, H) after training on views of it."""
        two_heads = self._two_heads()

        def rotation_loss(weights: dict[str, Tensor]) -> Tensor:
            views, turns = turned(shifted(image, self.copies, self.mirror))
            _, logits = functional_call(two_heads, weights, (views,))
            return cross_entropy(logits, turns)

        # The model keeps its own weights; ``functional_call`` runs it with these instead.
        weights = descended(_trained(two_heads), rotation_loss, self.lr, self.steps)
        with torch.no_grad():
            logits, _ = functional_call(two_heads, weights, (image,))
            probs = finite(logits.softmax(1))
            if self.keeps:
                for name, value in _trained(two_heads).items():
                    value.copy_(weights[name])
        return probs

    def _two_heads(self) -> _TwoHeads:
        """Returns the model and the rotation head as one module."""
        return _TwoHeads(self.model, self.rotation_head)


class TTT(RotationTraining):
    """Trains on turned views of each image, answers it, and forgets what was learned.

    Paper:
        Sun et al., Test-Time Training with Self-Supervision for Generalization under Distribution Shifts, ICML 2020.

    Differs from the published code:
        The rotation head is linear on the features, so the whole encoder is trained, not only its first two stages.
        BatchNorm layers keep their statistics (the option fix_bn of the published code). Every image is trained on,
        whether its answer is confident or not (the published default).

    Args:
        copies: the number of views.
        lr: the learning rate of the gradient descent.
        steps: the number of steps for each image, each with new views.
        mirror: whether views may be mirrored; switch it off where left and right decide the class, as in digits.
    """

    one_by_one: ClassVar[bool] = True
    passes: ClassVar[int] = 961  # ten updates on 32 views
    needs_rotation_head: ClassVar[bool] = True
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"steps": (1, 3, 10)}
    keeps = False

    def __init__(
        self, source: Source, *, copies: int = 32, lr: float = 1e-3, steps: int = 10, mirror: bool = True
    ) -> None:
        super().__init__(source, copies=copies, lr=lr, steps=steps, mirror=mirror)


class TTTOnline(RotationTraining):
    """Trains on turned views of each image, answers it, and continues from there with the next one.

    Paper:
        Sun et al., Test-Time Training with Self-Supervision for Generalization under Distribution Shifts, ICML 2020.

    Differs from the published code:
        In the same ways as ``TTT``.

    Args:
        copies: the number of views.
        lr: the learning rate of the gradient descent.
        steps: the number of steps for each image, each with new views.
        mirror: whether views may be mirrored; switch it off where left and right decide the class, as in digits.
    """

    one_by_one: ClassVar[bool] = True
    passes: ClassVar[int] = 97  # an update on 32 views
    needs_rotation_head: ClassVar[bool] = True
    keeps = True

    def __init__(
        self, source: Source, *, copies: int = 32, lr: float = 1e-3, steps: int = 1, mirror: bool = True
    ) -> None:
        super().__init__(source, copies=copies, lr=lr, steps=steps, mirror=mirror)


class _TwoHeads(nn.Module):
    """Computes the logits of classes and of rotations, with the weights of both heads under the adapter's names.

    ``functional_call`` runs one module with given weights, so the model and the rotation head must be parts of one.
    """

    def __init__(self, model: SourceModel, rotation_head: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.rotation_head = rotation_head

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of classes (B, C) and of rotations (B, 4)."""
        features = self.model.features(images)
        return self.model.head(features), self.rotation_head(features)


def _trained(two_heads: _TwoHeads) -> dict[str, Tensor]:
    """Returns by name all weights but those of the class head."""
    return {name: value for name, value in two_heads.named_parameters() if not name.startswith("model.head.")}


def turned(images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns images (n, C, H, H) after random counter-clockwise quarter turns, and their numbers of turns (n,)."""
    turns = torch.randint(TURNS, (len(images),))
    views = [image.rot90(turn, (1, 2)) for image, turn in zip(images, turns.tolist(), strict=True)]
    return torch.stack(views), turns.to(images.device)
