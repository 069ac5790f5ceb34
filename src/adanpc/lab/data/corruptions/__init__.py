"""The common corruptions of CIFAR-10-C and ImageNet-C, made here."""

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
EXTRA: tuple[str, ...] = tuple(function.__name__ for function in _EXTRA)  # to tune on, so that the others stay unseen
LARGEST_SMALL = 64  # the longest side that gets the constants of CIFAR-10-C
SMALLEST = 8


def corrupt(image: Tensor, name: str, severity: int, rng: Generator) -> Tensor:
    """The image corrupted, (C, H, W) float32, its values whole bytes divided by 255.

    Bytes are rounded down, as in the published files. The constants are those of CIFAR-10-C up to a side of 64, else
    those of ImageNet-C. Nothing is scaled to other sizes except the lengths of ``elastic_transform``.

    Args:
        image: (C, H, W) with 1 or 3 channels, uint8, or floats in [0, 1], which are rounded to bytes first.
        name: one of ``CORRUPTIONS`` or ``EXTRA``.
        severity: 1 to 5.
        rng: the only source of randomness.
    """
    if name not in _BY_NAME:
        known = ", ".join(_BY_NAME)
        raise DataError(f"unknown corruption {name!r}; available: {known}{did_you_mean(name, _BY_NAME)}")
    if severity not in range(1, 6):
        raise DataError(f"severity must be 1, 2, 3, 4 or 5, got {severity}")
    pixels = _to_pixels(image)
    constants = SMALL if max(pixels.shape) <= LARGEST_SMALL else LARGE
    corrupted = cut(_BY_NAME[name](pixels, rng, *constants[name][severity - 1]))  # (H, W, C)
    channels_first = torch.from_numpy(corrupted.astype(np.float32)).permute(2, 0, 1)
    return channels_first.contiguous().to(image.device)


def _to_pixels(image: Tensor) -> Array:
    """The image as an array (H, W, C) of whole bytes divided by 255; refuses what is no image."""
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
