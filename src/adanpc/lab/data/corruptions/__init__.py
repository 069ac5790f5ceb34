"""The common corruptions of CIFAR-10-C and ImageNet-C, as functions of an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from adanpc.lab.data.corruptions.blur import defocus_blur, gaussian_blur, glass_blur, motion_blur, zoom_blur
from adanpc.lab.data.corruptions.digital import (
    brightness,
    contrast,
    elastic_transform,
    jpeg_compression,
    pixelate,
    saturate,
)
from adanpc.lab.data.corruptions.frost import FROST_NOTICE, frost
from adanpc.lab.data.corruptions.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from adanpc.lab.data.corruptions.pixels import Array, cut
from adanpc.lab.data.corruptions.severities import LARGE, SMALL
from adanpc.lab.data.corruptions.weather import fog, snow, spatter
from adanpc.lab.data.domain import DataError
from adanpc.require import did_you_mean

__all__ = ["CORRUPTIONS", "EXTRA", "FROST_NOTICE", "corrupt"]

_STANDARD: tuple[Callable[..., Array], ...] = (
    gaussian_noise,
    shot_noise,
    impulse_noise,
    defocus_blur,
    glass_blur,
    motion_blur,
    zoom_blur,
    snow,
    frost,
    fog,
    brightness,
    contrast,
    elastic_transform,
    pixelate,
    jpeg_compression,
)
_EXTRA: tuple[Callable[..., Array], ...] = (speckle_noise, gaussian_blur, spatter, saturate)
_BY_NAME: Mapping[str, Callable[..., Array]] = {function.__name__: function for function in _STANDARD + _EXTRA}

CORRUPTIONS: tuple[str, ...] = tuple(function.__name__ for function in _STANDARD)  # in the published order
EXTRA: tuple[str, ...] = tuple(function.__name__ for function in _EXTRA)  # for tuning, so that the others stay unseen
LARGEST_SMALL = 64  # the longest side for which the constants of CIFAR-10-C are used
SMALLEST = 8  # the shortest side of an image


def corrupt(image: Tensor, name: str, severity: int, rng: Generator) -> Tensor:
    """Returns the corrupted image (C, H, W) float32, whose values are whole bytes divided by 255.

    Bytes are rounded down, as in the published files. The constants are those of CIFAR-10-C up to a side of 64, and
    those of ImageNet-C beyond. They are not scaled to other sizes, except the lengths of ``elastic_transform``.

    Args:
        image: (C, H, W) with 1 or 3 channels, uint8, or floats in [0, 1], which are rounded to bytes first.
        name: one of ``CORRUPTIONS`` or ``EXTRA``.
        severity: 1 to 5.
        rng: the only source of randomness.
    """
    if name not in _BY_NAME:
        available = ", ".join(_BY_NAME)
        raise DataError(f"unknown corruption {name!r}; available: {available}{did_you_mean(name, _BY_NAME)}")
    if severity not in range(1, 6):
        raise DataError(f"severity must be 1, 2, 3, 4 or 5, got {severity}")
    pixels = _to_pixels(image)
    constants = SMALL if max(pixels.shape) <= LARGEST_SMALL else LARGE
    arguments = constants[name][severity - 1]
    corrupted = cut(_BY_NAME[name](pixels, rng, *arguments))  # (H, W, C)
    channels_first = torch.from_numpy(corrupted.astype(np.float32)).permute(2, 0, 1)
    return channels_first.contiguous().to(image.device)


def _to_pixels(image: Tensor) -> Array:
    """Returns the image as an array (H, W, C) of whole bytes divided by 255; refuses anything but an image."""
    if image.ndim != 3 or image.shape[0] not in (1, 3) or min(image.shape[1:]) < SMALLEST:
        shape = tuple(image.shape)
        raise DataError(f"an image must be (C, H, W), C 1 or 3, H and W at least {SMALLEST}, got {shape}")
    if image.dtype == torch.uint8:
        levels = image.double()
    elif image.is_floating_point() and bool(((image >= 0) & (image <= 1)).all()):
        levels = (image.double() * 255).round()
    else:
        values = f"{image.dtype} from {image.min().item():g} to {image.max().item():g}"
        raise DataError(f"an image must be uint8, or floats in [0, 1] without NaN, got {values}")
    pixels: Array = levels.detach().cpu().permute(1, 2, 0).numpy() / 255
    return pixels
