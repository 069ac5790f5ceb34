"""What corruptions share: images (H, W, C) in [0, 1], rounding to bytes, and gray."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LUMINANCE = np.array([0.299, 0.587, 0.114])


def cut(image: Array) -> Array:
    """Returns the image in whole bytes divided by 255, rounded down as in the published scripts.

    A millionth of a level is added first, so that a rounding error does not cost a whole level.
    """
    levels: Array = np.floor(np.clip(image, 0, 1) * 255 + 1e-6)
    return levels / 255


def gray(image: Array) -> Array:
    """Returns the luminance (…, 1) of each pixel of an image, or of a color (…, C)."""
    if image.shape[-1] == 1:
        return image
    luminance: Array = image @ LUMINANCE
    return luminance[..., None]


def paint(color: Array, image: Array) -> Array:
    """Returns a color, or colors (…, 3), with the number of channels of the image."""
    if image.shape[-1] == 3:
        return color
    return gray(color)
