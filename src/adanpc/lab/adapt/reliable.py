"""Methods that minimize the entropy of answers that pass a test: moved weights (SAR) or shuffled patches (DeYO)."""

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

PIVOT = 0.4  # DeYO: the entropy, as a share of ln C, at which the entropy's part of an answer's weight is 1


@contextmanager
def perturbed(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], radius: float) -> Iterator[None]:
    """Moves parameters by ``radius`` along their joint gradient inside a ``with`` block, and back afterward."""
    before = [parameter.detach().clone() for parameter in parameters]
    length = torch.stack([gradient.norm() for gradient in gradients]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(gradient * (radius / (length + 1e-12)))
    try:
        yield
    finally:
        # Copied back, since subtracting the step would leave rounding errors.
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


class SAR(EntropyDescent):
    """Tent on confident answers, with the gradient taken where the entropy is highest nearby.

    When the average loss signals a collapse, it starts again from the source model.

    Paper:
        Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023.

    Differs from the published code:
        All normalization layers are trained; the published code leaves out the last block. When the model recovers,
        the average loss and the momentum are forgotten, too; in the published code they stay, and make the model
        recover again at the next batches. ``SARPublished`` follows the published code in all this. The margin scales
        with ln C. A batch without a confident answer changes nothing; in the published code its loss is NaN.

    Args:
        margin: the largest entropy of an answer to learn from, as a share of ln C.
        radius: how far the weights are moved in search of a higher entropy.
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
        self.average: float | None = None  # running average of the loss, in nats

    def extra(self) -> dict[str, Any]:
        """Returns the average loss."""
        return {"average": self.average}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts the average loss back."""
        self.average = extra["average"]

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """Makes one step with the gradient at moved weights, if any answer is confident with both sets of weights."""
        uncertainty = self.uncertainty(logits)
        confident = uncertainty < self.margin
        if not confident.any():
            return
        ascent = self.gradients(uncertainty[confident].mean())
        with perturbed(self.trained, ascent, self.radius):
            moved_uncertainty = self.uncertainty(self.classify(batch))
            confident = confident & (moved_uncertainty < self.margin)
            if not confident.any():
                return
            loss = moved_uncertainty[confident].mean()
            gradients = self.gradients(loss)
        # The gradient was taken at the moved weights, but the step starts from the original ones.
        self.apply_gradients(gradients)
        self._recover_if_collapsing(float(loss.detach()))

    def _recover_if_collapsing(self, loss: float) -> None:
        """Updates the average loss, and recovers if it is too low, a sign that all answers are becoming the same."""
        if self.average is None:
            self.average = loss
        else:
            self.average = 0.9 * self.average + 0.1 * loss
        if self.average < self.floor:
            self.start_again()

    def start_again(self) -> None:
        """Recovers the source model, and forgets the average loss."""
        self.recover()
        self.average = None


class SARPublished(SAR):
    """SAR as in its public code: the last block is not trained, and recovering resets only the weights.

    Momentum and average loss stay, so a model that recovers once does so again at the next batches.

    Paper:
        Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023.

    Differs from the published code:
        The margin scales with ln C. In networks other than ResNets and ViTs the last block is the last quarter of the
        normalization layers. A batch without a confident answer changes nothing; in the published code its loss is NaN.

    Args:
        margin, radius, floor, lr, optimizer: see ``SAR``.
    """

    trained_part: ClassVar[str] = "norm but the last block"

    def start_again(self) -> None:
        """Sets the trained parameters back, and nothing else."""
        self.recover_parameters()


def shuffled_patches(images: Tensor, grid: int) -> Tensor:
    """Returns images (B, C, H, W) whose ``grid`` x ``grid`` patches are shuffled, in a random order for each image.

    If the grid does not divide a side, the pixels left over at the right or the bottom stay in their place.
    """
    if images.ndim != 4 or min(images.shape[2:]) < grid:
        shape = list(images.shape)
        raise BatchError(f"patches are cut from images (B, C, H, W) of {grid} pixels or more, got {shape}")
    count, channels, height, width = images.shape
    patch_height = height // grid
    patch_width = width // grid
    covered = images[:, :, : grid * patch_height, : grid * patch_width]
    patches = covered.reshape(count, channels, grid, patch_height, grid, patch_width).permute(0, 2, 4, 1, 3, 5)
    patches = patches.flatten(1, 2)  # (B, grid * grid, C, patch height, patch width)
    order = torch.rand(count, grid * grid).argsort(1).to(images.device)
    image = torch.arange(count, device=images.device)[:, None]
    patches = patches[image, order].unflatten(1, (grid, grid))
    shuffled = images.clone()
    joined = patches.permute(0, 3, 1, 4, 2, 5).reshape(covered.shape)
    shuffled[:, :, : grid * patch_height, : grid * patch_width] = joined
    return shuffled


class DeYO(EntropyDescent):
    """Tent on confident answers that lose probability when the patches of their image are shuffled.

    Such answers depend on the shape of the object, and not only on its color or background.

    Paper:
        Lee et al., Entropy Is Not Enough for Test-Time Adaptation: From the Perspective of Disentangled Factors,
        ICLR 2024.

    Differs from the published code:
        The patches of the whole batch are shuffled, so that batch statistics come from the same number of images; the
        published code shuffles only confident images. All normalization layers are trained; the published code leaves
        out the last block. ``DeYOPublished`` follows the published code in both. A side that the grid does not divide
        is not resized. The margin scales with ln C.

    Args:
        margin: the largest entropy of an answer to learn from, as a share of ln C.
        drop: an answer is learned from if it loses more probability than this by shuffling.
        patches: the number of patches along each side.
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
        drop = self.probability_drops(batch, logits)
        selected = (uncertainty < self.margin) & (drop > self.drop)
        if selected.any():
            # Lower entropy and a larger drop both make an answer count more; the weight itself has no gradient.
            weight = (self.pivot - uncertainty.detach()).exp() + drop.exp()
            self.descend((weight * uncertainty)[selected].mean())

    @torch.no_grad()
    def probability_drops(self, batch: Tensor, logits: Tensor) -> Tensor:
        """Returns how much probability (B,) each answer loses when the patches of its image are shuffled."""
        probs = logits.softmax(1)
        shuffled = self.classify(shuffled_patches(batch, self.patches)).softmax(1)
        answers = probs.argmax(1, keepdim=True)
        return (probs - shuffled).gather(1, answers)[:, 0]


class DeYOPublished(DeYO):
    """DeYO as in its public code: the last block is not trained, and only confident images are shuffled.

    So shuffled images are normalized by the statistics of the confident ones alone.

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
    def probability_drops(self, batch: Tensor, logits: Tensor) -> Tensor:
        """Returns how much probability (B,) each confident answer loses by shuffling; 0 for the others."""
        drop = logits.new_zeros(len(batch))
        confident = entropy(logits) < self.margin
        if confident.any():
            drop[confident] = super().probability_drops(batch[confident], logits[confident])
        return drop
