"""Entropy is descended on answers that stand a test: of moved weights (SAR), or of shuffled patches (DeYO)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import log
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import BatchError, Source
from adanpc.lab.adapt.entropy import EntropyDescent, entropy
from adanpc.lab.adapt.filtered import GRID

PIVOT = 0.4  # DeYO: an answer of this entropy, as a share of ln C, has the weight 1 for its entropy


@contextmanager
def climbed(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], radius: float) -> Iterator[None]:
    """Moves parameters by ``radius`` along the gradient, all together, for the time of the block."""
    kept = [parameter.detach().clone() for parameter in parameters]
    length = torch.stack([gradient.norm() for gradient in gradients]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(gradient * (radius / (length + 1e-12)))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


class SAR(EntropyDescent):
    """Tent on sure answers, by the gradient where the entropy is highest nearby; starts anew before it collapses.

    Paper: Niu et al. 2023, Toward stable test-time adaptation in dynamic wild world.

    Differs from the published code: all normalization layers are trained, there not the last block's; the average loss
    is forgotten with all else when the model recovers, there it makes the model recover again at the next batches; the
    margin scales with ln C; the learning rate is the source's times alpha, 2.5e-4 there.

    Args:
        margin: the largest entropy of an answer to learn from, as a share of ln C.
        radius: how far the weights are moved to look for a higher entropy.
        floor: the model recovers when the average loss falls below this, in nats.
        alpha: the learning rate, as a multiple of the source's.
        optimizer: sgd with momentum 0.9, or adam.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = GRID

    def __init__(
        self,
        source: Source,
        *,
        margin: float = 0.4,
        radius: float = 0.05,
        floor: float = 0.2,
        alpha: float = 1.0,
        optimizer: str = "sgd",
    ) -> None:
        for name, value in (("margin", margin), ("radius", radius)):
            if not value > 0:
                raise AdaNPCError(f"{name} must be positive, got {value}")
        super().__init__(source, trains="norm", alpha=alpha, optimizer=optimizer, steps=1)
        self.margin, self.radius, self.floor = margin * log(self.model.classes), radius, floor
        self.average: float | None = None  # of the losses

    def extra(self) -> dict[str, Any]:
        """The average loss."""
        return {"average": self.average}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts the average loss back."""
        self.average = extra["average"]

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """One step by the gradient at the moved weights, if any answer is sure here and there."""
        here = entropy(logits)
        sure = here < self.margin
        if not sure.any():
            return
        with climbed(self.trained, self.gradients(here[sure].mean()), self.radius):
            there = entropy(self.look(batch))
            sure = sure & (there < self.margin)
            if not sure.any():
                return
            loss = there[sure].mean()
            gradients = self.gradients(loss)
        self.move(gradients)
        self._watch(float(loss.detach()))

    def _watch(self, loss: float) -> None:
        self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
        if self.average < self.floor:
            self.recover()
            self.average = None


def shuffled_patches(images: Tensor, grid: int) -> Tensor:
    """Images (B, C, H, W) cut into ``grid`` x ``grid`` patches, which change places, in each image otherwise.

    What is left over at the right and the bottom where the grid does not divide a side stays in its place.
    """
    if images.ndim != 4 or min(images.shape[2:]) < grid:
        raise BatchError(f"patches are cut from images (B, C, H, W) of {grid} pixels or more, got {list(images.shape)}")
    (rows, channels), (high, wide) = images.shape[:2], (side // grid for side in images.shape[2:])
    whole = images[:, :, : grid * high, : grid * wide]
    patches = whole.reshape(rows, channels, grid, high, grid, wide).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = torch.rand(rows, grid * grid).argsort(1).to(images.device)
    patches = patches[torch.arange(rows, device=images.device)[:, None], order].unflatten(1, (grid, grid))
    shuffled = images.clone()
    shuffled[:, :, : grid * high, : grid * wide] = patches.permute(0, 3, 1, 4, 2, 5).reshape(whole.shape)
    return shuffled


class DeYO(EntropyDescent):
    """Tent on sure answers that need the shape of the object: those that lose probability when patches are shuffled.

    Paper: Lee et al. 2024, Entropy is not enough for test-time adaptation.

    Differs from the published code: the whole batch is shuffled, so that its statistics are those of as many images,
    there only the sure ones; a side that the grid does not divide is not resized; all normalization layers are trained,
    there not the last block's; the learning rate is the source's times alpha, 2.5e-4 there.

    Args:
        margin: the largest entropy of an answer to learn from, as a share of ln C.
        drop: the least fall of the answer's probability under shuffling.
        patches: along each side.
        alpha: the learning rate, as a multiple of the source's.
        optimizer: sgd with momentum 0.9, or adam.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = GRID

    def __init__(
        self,
        source: Source,
        *,
        margin: float = 0.5,
        drop: float = 0.2,
        patches: int = 4,
        alpha: float = 1.0,
        optimizer: str = "sgd",
    ) -> None:
        if not margin > 0:
            raise AdaNPCError(f"margin must be positive, got {margin}")
        if patches < 2:
            raise AdaNPCError(f"patches must be at least 2 along each side, got {patches}")
        super().__init__(source, trains="norm", alpha=alpha, optimizer=optimizer, steps=1)
        self.margin, self.pivot = margin * log(self.model.classes), PIVOT * log(self.model.classes)
        self.drop, self.patches = drop, patches

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """One step on the weighted mean entropy of the chosen, if there are any."""
        uncertainty, drop = entropy(logits), self.falls(batch, logits)
        chosen = (uncertainty < self.margin) & (drop > self.drop)
        if chosen.any():
            weight = (self.pivot - uncertainty.detach()).exp() + drop.exp()
            self.descend((weight * uncertainty)[chosen].mean())

    @torch.no_grad()
    def falls(self, batch: Tensor, logits: Tensor) -> Tensor:
        """How much probability (B,) each answer loses when the patches of its image are shuffled."""
        probs = logits.softmax(1)
        shuffled = self.look(shuffled_patches(batch, self.patches)).softmax(1)
        return (probs - shuffled).gather(1, probs.argmax(1, keepdim=True))[:, 0]
