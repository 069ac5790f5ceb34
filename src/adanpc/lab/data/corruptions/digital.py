"""Corruptions of light, color, shape and resolution, and by compression."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.random import Generator
from scipy.ndimage import affine_transform, gaussian_filter, map_coordinates

from adanpc.lab.data.corruptions.pixels import Array
from adanpc.lab.data.domain import DataError

try:
    from PIL import Image
except ImportError:
    Image = None  # type: ignore[assignment]


def brightness(image: Array, rng: Generator, more: float) -> Array:
    """Returns the image with ``more`` added to the value (the largest channel) of each pixel, up to 1.

    Hue and saturation stay.
    """
    value = image.max(axis=2, keepdims=True)
    brighter = np.minimum(value + more, 1)
    color = np.where(value > 0, image / _nonzero(value), 1)  # black has no color, and becomes gray
    bright: Array = color * brighter
    return bright


def contrast(image: Array, rng: Generator, kept: float) -> Array:
    """Returns the image with each channel pulled toward its mean; a share ``kept`` of the differences is left."""
    mean = image.mean(axis=(0, 1))
    pale: Array = mean + kept * (image - mean)
    return pale


def saturate(image: Array, rng: Generator, factor: float, more: float) -> Array:
    """Returns the image with the saturation of each pixel times ``factor`` plus ``more``, at most 1.

    The hue of gray counts as red.
    """
    if image.shape[2] != 3:
        raise DataError(f"saturate needs 3 channels, got {image.shape[2]}: a gray image has no color to change")
    value = image.max(axis=2, keepdims=True)
    below = value - image
    spread = below.max(axis=2, keepdims=True)
    saturation = np.clip(factor * spread / _nonzero(value) + more, 0, 1)
    # The hue is expressed as how far each channel is below the value, as a share of the farthest.
    red = np.array([0, 1, 1])
    hue = np.where(spread > 0, below / _nonzero(spread), red)
    saturated: Array = value * (1 - saturation * hue)
    return saturated


def elastic_transform(image: Array, rng: Generator, bend: float, width: float, shift: float) -> Array:
    """Returns the image with three corners moved at random, then with every pixel moved by a smooth random field.

    Args:
        image: (H, W, C).
        rng: the source of randomness.
        bend: how far the field moves pixels before it is smoothed; like all lengths, a share of the shorter side.
        width: the width of the Gaussian that smooths the field.
        shift: the largest move of a corner.
    """
    rows, columns, channels = image.shape
    side = min(rows, columns)
    corner_moves = rng.uniform(-shift * side, shift * side, (3, 2))
    image = _affine(image, corner_moves)
    field = rng.uniform(-1, 1, (2, rows, columns))
    if width:
        field = gaussian_filter(field, width * side, axes=(1, 2), mode="reflect", truncate=3)
    positions = np.indices((rows, columns)) + bend * side * field
    bent = [map_coordinates(image[..., channel], positions, order=1, mode="reflect") for channel in range(channels)]
    return np.stack(bent, axis=2)


def pixelate(image: Array, rng: Generator, share: float) -> Array:
    """Returns the image reduced to this share of its size and enlarged again, by means over the pixels covered."""
    picture = _to_picture(image)
    size = (int(picture.width * share), int(picture.height * share))
    small = picture.resize(size, Image.Resampling.BOX)
    return _to_array(small.resize(picture.size, Image.Resampling.BOX))


def jpeg_compression(image: Array, rng: Generator, quality: float) -> Array:
    """Returns the image after it was saved as a JPEG file of this quality."""
    file = BytesIO()
    _to_picture(image).save(file, "JPEG", quality=int(quality))
    return _to_array(Image.open(file, formats=["JPEG"]))


def _nonzero(values: Array) -> Array:
    """Returns the values to divide by, with 1 in place of 0; the quotients at these places are not used."""
    return np.where(values > 0, values, 1)


def _affine(image: Array, moves: Array) -> Array:
    """Returns the image under the affine map that moves three corners of its middle; the image is mirrored outside.

    Args:
        image: (H, W, C).
        moves: (3, 2), how far each corner moves, in rows and columns.
    """
    height, width, channels = image.shape
    middle = np.array([height // 2, width // 2])
    reach = min(height, width) // 3
    corners = middle + reach * np.array([[1, 1], [-1, 1], [-1, -1]])
    moved = np.c_[corners + moves, np.ones(3)]
    # scipy needs the inverse map: from where a pixel is to where it comes from.
    back = np.linalg.solve(moved, corners).T  # (2, 3)
    matrix = back[:, :2]
    offset = back[:, 2]
    mapped = []
    for channel in range(channels):
        mapped.append(affine_transform(image[..., channel], matrix, offset, order=1, mode="mirror"))
    return np.stack(mapped, axis=2)


def _to_picture(image: Array) -> Image.Image:
    """Returns the image as a picture of Pillow."""
    if Image is None:
        raise DataError("this corruption needs Pillow, which is not installed: pip install 'adanpc[vision]'")
    pixels = np.rint(image * 255).astype(np.uint8)
    if image.shape[2] == 1:
        pixels = pixels[..., 0]  # gray pictures have no axis of channels in Pillow
    return Image.fromarray(pixels)


def _to_array(picture: Image.Image) -> Array:
    """Returns a picture of Pillow as an array (H, W, C) in [0, 1]."""
    pixels = np.asarray(picture) / 255
    return pixels.reshape(picture.height, picture.width, -1)
