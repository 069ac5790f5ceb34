"""What all corruptions share: images (H, W, C) in [0, 1], whole bytes, and gray."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LUMINANCE = np.array([0.299, 0.587, 0.114])


def cut(image: Array) -> Array:
    """The image in whole bytes divided by 255, rounded down as in the published scripts.

    A millionth of a byte is added first, so that a rounding error does not cost a whole one.
    """
    levels: Array = np.floor(np.clip(image, 0, 1) * 255 + 1e-6)
    return levels / 255


def gray(image: Array) -> Array:
    """The luminance of each pixel (…, 1) of an image or a color (…, C)."""
    if image.shape[-1] == 1:
        return image
    luminance: Array = image @ LUMINANCE
    return luminance[..., None]


def paint(color: Array, image: Array) -> Array:
    """The color, or colors (…, 3), in as many channels as the image has."""
    if image.shape[-1] == 3:
        return color
    return gray(color)
