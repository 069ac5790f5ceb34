"""What turns an image into a model's input: a value that is recorded and compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from adanpc.errors import AdaNPCError

INTERPOLATIONS = ("bilinear", "bicubic")


@dataclass(frozen=True)
class Preprocessing:
    """Images (C, H, W) or (B, C, H, W) in [0, 1] to a model's inputs: resized, cropped about the center, normalized.

    Gray images become color images if there is a mean for each of several channels; any other number of channels
    than that of the mean, an alpha channel say, is refused. Agrees with timm's evaluation transform on PIL images up
    to the rounding to bytes that PIL does.

    Args:
        size: height and width of the result; None leaves images as they are.
        crop: the side of the crop as a share of the side of the resized image.
        squash: whether both sides are resized to size / crop, which distorts, or the shorter one only.
        interpolation: bilinear or bicubic, with anti-aliasing.
        mean, std: of each channel, subtracted and divided by; empty: nothing is.
    """

    size: int | None = None
    crop: float = 1.0
    squash: bool = True
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise AdaNPCError(f"size must be at least 1, got {self.size}")
        if not 0 < self.crop <= 1:
            raise AdaNPCError(f"crop must be above 0 and at most 1, got {self.crop}")
        if self.interpolation not in INTERPOLATIONS:
            raise AdaNPCError(f"interpolation must be one of {', '.join(INTERPOLATIONS)}, got {self.interpolation!r}")
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise AdaNPCError(f"mean and std must be of the same channels, std above 0, got {self.mean} and {self.std}")

    def __call__(self, images: Tensor) -> Tensor:
        """The inputs, of the same number of dimensions as the images."""
        return self.normalize(self.resize(self.colored(images)))

    def for_channels(self, channels: int) -> Preprocessing:
        """The same for images of another number of channels: each gets the average mean and std."""
        if channels == len(self.mean) or not self.mean:
            return self
        mean, std = (sum(values) / len(values) for values in (self.mean, self.std))
        return replace(self, mean=(mean,) * channels, std=(std,) * channels)

    def colored(self, images: Tensor) -> Tensor:
        """The images with as many channels as the mean has, gray ones repeated; others are refused."""
        if images.ndim not in (3, 4) or not images.is_floating_point():
            shape = tuple(images.shape)
            raise AdaNPCError(f"images must be floats (C, H, W) or (B, C, H, W) in [0, 1], got {images.dtype} {shape}")
        given, wanted = images.shape[-3], len(self.mean) or images.shape[-3]
        if given not in (1, wanted):
            raise AdaNPCError(f"images must have {wanted} channels, got {given}; convert them first, without alpha")
        return images if given == wanted else images.expand(*images.shape[:-3], wanted, -1, -1)

    def resize(self, images: Tensor) -> Tensor:
        """The images at ``size`` x ``size``."""
        if self.size is None:
            return images
        side, (height, width) = floor(self.size / self.crop), images.shape[-2:]
        short = min(height, width)
        shape = (side, side) if self.squash else (side * height // short, side * width // short)
        images = scaled(images, shape, self.interpolation)
        top, left = (round((length - self.size) / 2) for length in shape)
        return images[..., top : top + self.size, left : left + self.size]

    def normalize(self, images: Tensor) -> Tensor:
        """The images with each channel's mean and std taken out."""
        if not self.mean:
            return images
        mean, std = (images.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (images - mean) / std


def scaled(images: Tensor, shape: tuple[int, int], interpolation: str) -> Tensor:
    """Images (..., C, H, W) at another height and width, anti-aliased, in [0, 1]."""
    if images.shape[-2:] == torch.Size(shape):
        return images
    batch = images if images.ndim == 4 else images[None]
    batch = interpolate(batch, shape, mode=interpolation, antialias=True, align_corners=False).clamp(0, 1)
    return batch if images.ndim == 4 else batch[0]
