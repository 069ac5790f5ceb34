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

    Gray images become color images if there is a mean for each of several channels. Images with any other number of
    channels than the mean, such as an alpha channel, are refused. Agrees with timm's evaluation transform on PIL
    images up to PIL's rounding to bytes.

    Args:
        size: height and width of the result; None leaves images as they are.
        crop: the side of the crop as a share of the side of the resized image.
        squash: whether both sides are resized to size / crop, which distorts, or the shorter one only.
        interpolation: bilinear or bicubic, with anti-aliasing.
        mean, std: of each channel, to normalize by; if empty, images are not normalized.
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
        mean = sum(self.mean) / len(self.mean)
        std = sum(self.std) / len(self.std)
        return replace(self, mean=(mean,) * channels, std=(std,) * channels)

    def straight(self) -> Preprocessing:
        """The same, but nothing is cropped: the whole image becomes the square, whatever its shape was."""
        return replace(self, crop=1.0, squash=True)

    def colored(self, images: Tensor) -> Tensor:
        """The images with as many channels as the mean has, gray ones repeated; others are refused."""
        if images.ndim not in (3, 4) or not images.is_floating_point():
            shape = tuple(images.shape)
            raise AdaNPCError(f"images must be floats (C, H, W) or (B, C, H, W) in [0, 1], got {images.dtype} {shape}")
        channels = images.shape[-3]
        expected = len(self.mean) or channels
        if channels == expected:
            return images
        if channels != 1:
            raise AdaNPCError(
                f"images must have {expected} channels, got {channels}; convert them first, without alpha"
            )
        return images.expand(*images.shape[:-3], expected, -1, -1)

    def resize(self, images: Tensor) -> Tensor:
        """The images at ``size`` x ``size``."""
        if self.size is None:
            return images
        height, width = images.shape[-2:]
        shorter = min(height, width)
        side = floor(self.size / self.crop)
        shape = (side * height // shorter, side * width // shorter)
        if self.squash:
            shape = (side, side)
        images = scaled(images, shape, self.interpolation)
        top = round((shape[0] - self.size) / 2)
        left = round((shape[1] - self.size) / 2)
        return images[..., top : top + self.size, left : left + self.size]

    def normalize(self, images: Tensor) -> Tensor:
        """The images with each channel less its mean, over its std."""
        if not self.mean:
            return images
        mean = images.new_tensor(self.mean)[:, None, None]
        std = images.new_tensor(self.std)[:, None, None]
        return (images - mean) / std


def scaled(images: Tensor, shape: tuple[int, int], interpolation: str) -> Tensor:
    """Images (..., C, H, W) at another height and width, anti-aliased, in [0, 1]."""
    if images.shape[-2:] == torch.Size(shape):
        return images
    single = images.ndim == 3
    batch = images[None] if single else images
    batch = interpolate(batch, shape, mode=interpolation, antialias=True, align_corners=False)
    batch = batch.clamp(0, 1)  # bicubic interpolation overshoots
    return batch[0] if single else batch
