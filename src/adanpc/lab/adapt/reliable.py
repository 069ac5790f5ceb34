"""Entropy is lowered on answers that pass a test: with moved weights (SAR), or with shuffled patches (DeYO)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import log
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adanpc import require
from adanpc.lab.adapt.adapter import BatchError, Source
from adanpc.lab.adapt.entropy import EntropyDescent, entropy
from adanpc.lab.adapt.filtered import GRID

PIVOT = 0.4  # DeYO: an answer of this entropy, as a share of ln C, gets a weight of 1 for its entropy


@contextmanager
def climbed(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], radius: float) -> Iterator[None]:
    """Moves parameters by ``radius`` along their joint gradient, inside a ``with``."""
    before = [parameter.detach().clone() for parameter in parameters]
    length = torch.stack([gradient.norm() for gradient in gradients]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(gradient * (radius / (length + 1e-12)))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


class SAR(EntropyDescent):
    """Does what Tent does on sure answers, with the gradient from where entropy is highest nearby.

    When the average loss announces a collapse, it starts anew from the source model.

    Paper:
        Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023.

    Differs from the published code:
        All normalization layers are trained, there not those of the last block. The average loss and the momentum are
        forgotten with all else when the model recovers; there they stay, and make the model recover again at the next
        batches. ``SARPublished`` does all that as there. The margin scales with ln C. A batch without a sure answer
        changes nothing; there its loss is NaN.

    Args:
        margin: the largest entropy of an answer to learn from, as a share of ln C.
        radius: how far the weights are moved to look for a higher entropy.
        floor: the model recovers when the average loss falls below this, in nats.
        lr: the learning rate; by default 2.5e-4 with sgd and 1e-3 with adam.
        optimizer: sgd with momentum 0.9, or adam.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = GRID
    trained_part: ClassVar[str] = "norm"

    def __init__(
        self,
        source: Source,
        *,
        margin: float = 0.4,
        radius: float = 0.05,
        floor: float = 0.2,
        lr: float | None = None,
        optimizer: str = "sgd",
    ) -> None:
        require.positive("margin", margin)
        require.positive("radius", radius)
        super().__init__(source, trains=self.trained_part, lr=lr, optimizer=optimizer, steps=1)
        self.margin = margin * log(self.model.classes)
        self.radius = radius
        self.floor = floor
        self.average: float | None = None  # of the losses

    def extra(self) -> dict[str, Any]:
        """Returns the average loss."""
        return {"average": self.average}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts the average loss back."""
        self.average = extra["average"]

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """Makes one step with the gradient at the moved weights, if any answer is sure both before and after."""
        here = self.uncertainty(logits)
        sure = here < self.margin
        if not sure.any():
            return
        with climbed(self.trained, self.gradients(here[sure].mean()), self.radius):
            there = self.uncertainty(self.look(batch))
            sure = sure & (there < self.margin)
            if not sure.any():
                return
            loss = there[sure].mean()
            gradients = self.gradients(loss)
        self.move(gradients)
        self._recover_if_collapsing(float(loss.detach()))

    def _recover_if_collapsing(self, loss: float) -> None:
        """Follows the average loss; one that is too low announces that all answers become the same."""
        if self.average is None:
            self.average = loss
        else:
            self.average = 0.9 * self.average + 0.1 * loss
        if self.average < self.floor:
            self.start_anew()

    def start_anew(self) -> None:
        """Recovers, and forgets the average loss."""
        self.recover()
        self.average = None


class SARPublished(SAR):
    """Does what the public code of SAR does: the last block is not trained, and recovering forgets weights alone.

    Momentum and average loss stay, so that a model that recovers once does so again at the next batches.

    Paper:
        Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023.

    Differs from the published code:
        The margin scales with ln C. In networks other than ResNets and ViTs the last block is the last quarter of the
        normalization layers. A batch without a sure answer changes nothing; there its loss is NaN.

    Args:
        margin, radius, floor, lr, optimizer: see ``SAR``.
    """

    trained_part: ClassVar[str] = "norm but the last block"

    def start_anew(self) -> None:
        """Sets the trained parameters back, and nothing else."""
        self.recover_parameters()


def shuffled_patches(images: Tensor, grid: int) -> Tensor:
    """Returns images (B, C, H, W) cut into ``grid`` x ``grid`` patches, in an order that is random for each image.

    Where the grid does not divide a side, what is left over at the right and the bottom stays in its place.
    """
    if images.ndim != 4 or min(images.shape[2:]) < grid:
        shape = list(images.shape)
        raise BatchError(f"patches are cut from images (B, C, H, W) of {grid} pixels or more, got {shape}")
    count, channels, height, width = images.shape
    high = height // grid  # of a patch
    wide = width // grid
    whole = images[:, :, : grid * high, : grid * wide]
    patches = whole.reshape(count, channels, grid, high, grid, wide).permute(0, 2, 4, 1, 3, 5)
    patches = patches.flatten(1, 2)  # (B, grid * grid, C, high, wide)
    order = torch.rand(count, grid * grid).argsort(1).to(images.device)
    image = torch.arange(count, device=images.device)[:, None]
    patches = patches[image, order].unflatten(1, (grid, grid))
    shuffled = images.clone()
    shuffled[:, :, : grid * high, : grid * wide] = patches.permute(0, 3, 1, 4, 2, 5).reshape(whole.shape)
    return shuffled


class DeYO(EntropyDescent):
    """Does what Tent does, on sure answers that lose probability when the patches of their image are shuffled.

    Those answers need the shape of the object, and not only its color or background.

    Paper:
        Lee et al., Entropy Is Not Enough for Test-Time Adaptation: From the Perspective of Disentangled Factors,
        ICLR 2024.

    Differs from the published code:
        The whole batch is shuffled, there only the sure images, so that the statistics are those of as many images. A
        side that the grid does not divide is not resized. All normalization layers are trained, there not those of the
        last block, and not by ``DeYOPublished``. The margin scales with ln C.

    Args:
        margin: the largest entropy of an answer to learn from, as a share of ln C.
        drop: how much probability an answer must lose by shuffling, at least.
        patches: how many along each side.
        lr: the learning rate; by default 2.5e-4 with sgd and 1e-3 with adam.
        optimizer: sgd with momentum 0.9, or adam.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = GRID
    trained_part: ClassVar[str] = "norm"

    def __init__(
        self,
        source: Source,
        *,
        margin: float = 0.5,
        drop: float = 0.2,
        patches: int = 4,
        lr: float | None = None,
        optimizer: str = "sgd",
    ) -> None:
        require.positive("margin", margin)
        require.whole("patches", patches, least=2)
        super().__init__(source, trains=self.trained_part, lr=lr, optimizer=optimizer, steps=1)
        self.margin = margin * log(self.model.classes)
        self.pivot = PIVOT * log(self.model.classes)
        self.drop = drop
        self.patches = patches

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """Makes one step on the weighted mean entropy of the selected answers, if there are any."""
        uncertainty = entropy(logits)
        drop = self.falls(batch, logits)
        selected = (uncertainty < self.margin) & (drop > self.drop)
        if selected.any():
            weight = (self.pivot - uncertainty.detach()).exp() + drop.exp()
            self.descend((weight * uncertainty)[selected].mean())

    @torch.no_grad()
    def falls(self, batch: Tensor, logits: Tensor) -> Tensor:
        """Returns how much probability (B,) each answer loses when the patches of its image are shuffled."""
        probs = logits.softmax(1)
        shuffled = self.look(shuffled_patches(batch, self.patches)).softmax(1)
        answers = probs.argmax(1, keepdim=True)
        return (probs - shuffled).gather(1, answers)[:, 0]


class DeYOPublished(DeYO):
    """Does what DeYO does as its public code does: the last block is not trained, and only sure images are shuffled.

    So the statistics that shuffled images are seen with are those of the sure ones alone.

    Paper:
        Lee et al., Entropy Is Not Enough for Test-Time Adaptation: From the Perspective of Disentangled Factors,
        ICLR 2024.

    Differs from the published code:
        A side that the grid does not divide is not resized. The margin scales with ln C. In networks other than ResNets
        and ViTs the last block is the last quarter of the normalization layers.

    Args:
        margin, drop, patches, lr, optimizer: see ``DeYO``.
    """

    trained_part: ClassVar[str] = "norm but the last block"

    @torch.no_grad()
    def falls(self, batch: Tensor, logits: Tensor) -> Tensor:
        """Returns how much probability (B,) each sure answer loses by shuffling; 0 for the others."""
        drop = logits.new_zeros(len(batch))
        sure = entropy(logits) < self.margin
        if sure.any():
            drop[sure] = super().falls(batch[sure], logits[sure])
        return drop
