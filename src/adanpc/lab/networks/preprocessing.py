"""How images become the inputs of a model, as a value that can be recorded and compared."""

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
    """Turns images (C, H, W) or (B, C, H, W) in [0, 1] into inputs: resized, cropped at the center, and normalized.

    Gray images become color images if the mean has several channels. Other images whose number of channels is not that
    of the mean, such as those with an alpha channel, are refused. The result is that of timm's evaluation transform on
    PIL images, apart from PIL's rounding to bytes.

    Args:
        size: height and width of the result; None keeps the size of the images.
        crop: the side of the crop, as a share of the side of the resized image.
        squash: whether both sides are resized to size / crop, which distorts the image, or only the shorter one.
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
        """Returns the inputs, with the same number of dimensions as the images."""
        return self.normalize(self.resize(self.colored(images)))

    def for_channels(self, channels: int) -> Preprocessing:
        """Returns the same preprocessing for another number of channels; each gets the average mean and std."""
        if channels == len(self.mean) or not self.mean:
            return self
        mean = sum(self.mean) / len(self.mean)
        std = sum(self.std) / len(self.std)
        return replace(self, mean=(mean,) * channels, std=(std,) * channels)

    def straight(self) -> Preprocessing:
        """Returns the same preprocessing without a crop: the whole image is resized to a square, whatever its shape."""
        return replace(self, crop=1.0, squash=True)

    def colored(self, images: Tensor) -> Tensor:
        """Returns images with as many channels as the mean; a gray channel is repeated, other images are refused."""
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
        """Returns the images at ``size`` x ``size``."""
        if self.size is None:
            return images
        # Sizes and offsets are rounded as in torchvision's Resize and CenterCrop.
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
        """Returns the images with each channel minus its mean, divided by its std."""
        if not self.mean:
            return images
        mean = images.new_tensor(self.mean)[:, None, None]
        std = images.new_tensor(self.std)[:, None, None]
        return (images - mean) / std


def scaled(images: Tensor, shape: tuple[int, int], interpolation: str) -> Tensor:
    """Returns images (..., C, H, W) resized to this height and width, with anti-aliasing, in [0, 1]."""
    if images.shape[-2:] == torch.Size(shape):
        return images
    single = images.ndim == 3
    batch = images[None] if single else images
    batch = interpolate(batch, shape, mode=interpolation, antialias=True, align_corners=False)
    batch = batch.clamp(0, 1)  # bicubic interpolation can overshoot
    return batch[0] if single else batch
