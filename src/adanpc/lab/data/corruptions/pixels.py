"""What all corruptions share: images (H, W, C) in [0, 1], whole bytes, and gray."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LUMINANCE = np.array([0.299, 0.587, 0.114])


def cut(image: Array) -> Array:
    """The image in whole bytes divided by 255; rounded down, but no byte is lost to a rounding error."""
    made: Array = np.floor(np.clip(image, 0, 1) * 255 + 1e-6) / 255
    return made


def gray(image: Array) -> Array:
    """The luminance of each pixel (…, 1) of an image or a color (…, C)."""
    return image if image.shape[-1] == 1 else (image @ LUMINANCE)[..., None]


def paint(color: Array, image: Array) -> Array:
    """The color, or colors (…, 3), in as many channels as the image has."""
    return color if image.shape[-1] == 3 else gray(color)
