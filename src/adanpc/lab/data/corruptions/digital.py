"""Light, color, shape, and what files do to images."""

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
    """``more`` added to the value (the largest channel) of each pixel, up to 1; hue and saturation stay."""
    value = image.max(axis=2, keepdims=True)
    brighter = np.minimum(value + more, 1)
    color = np.where(value > 0, image / _nonzero(value), 1)  # black has none, and becomes gray
    bright: Array = color * brighter
    return bright


def contrast(image: Array, rng: Generator, kept: float) -> Array:
    """Each channel drawn toward its mean, so that this share of the difference is left."""
    mean = image.mean(axis=(0, 1))
    pale: Array = mean + kept * (image - mean)
    return pale


def saturate(image: Array, rng: Generator, factor: float, more: float) -> Array:
    """The saturation of each pixel times ``factor`` plus ``more``, at most 1; gray counts as red."""
    if image.shape[2] != 3:
        raise DataError(f"saturate needs 3 channels, got {image.shape[2]}: a gray image has no color to change")
    value = image.max(axis=2, keepdims=True)
    below = value - image
    spread = below.max(axis=2, keepdims=True)
    saturation = np.clip(factor * spread / _nonzero(value) + more, 0, 1)
    # A hue is how far each channel is below the value, as a share of the farthest.
    red = np.array([0, 1, 1])
    hue = np.where(spread > 0, below / _nonzero(spread), red)
    saturated: Array = value * (1 - saturation * hue)
    return saturated


def elastic_transform(image: Array, rng: Generator, bend: float, width: float, shift: float) -> Array:
    """Three corners moved at random and the image with them, then every pixel by a smooth random field.

    All lengths are shares of the shorter side: by how much the field moves before it is smoothed, how far it is
    smoothed, and by how much the corners move at most.
    """
    rows, columns, channels = image.shape
    side = min(rows, columns)
    corner_moves = rng.uniform(-shift * side, shift * side, (3, 2))
    image = _affine(image, corner_moves)
    field = rng.uniform(-1, 1, (2, rows, columns))
    if width:
        field = gaussian_filter(field, width * side, axes=(1, 2), mode="reflect", truncate=3)
    positions = np.indices((rows, columns)) + bend * side * field
    bent = [map_coordinates(image[..., c], positions, order=1, mode="reflect") for c in range(channels)]
    return np.stack(bent, axis=2)


def pixelate(image: Array, rng: Generator, share: float) -> Array:
    """The image at this share of its size and back, each pixel the mean of those it covers."""
    picture = _to_picture(image)
    size = (int(picture.width * share), int(picture.height * share))
    small = picture.resize(size, Image.Resampling.BOX)
    return _to_array(small.resize(picture.size, Image.Resampling.BOX))


def jpeg_compression(image: Array, rng: Generator, quality: float) -> Array:
    """The image after a JPEG file of this quality."""
    file = BytesIO()
    _to_picture(image).save(file, "JPEG", quality=int(quality))
    return _to_array(Image.open(file, formats=["JPEG"]))


def _nonzero(values: Array) -> Array:
    """The values with 1 in place of 0, to divide by; what is divided by that 1 is not used."""
    return np.where(values > 0, values, 1)


def _affine(image: Array, moves: Array) -> Array:
    """The image under the affine map that moves three corners of its middle, (row, column), by these; mirrored."""
    height, width, channels = image.shape
    middle = np.array([height // 2, width // 2])
    reach = min(height, width) // 3
    corners = middle + reach * np.array([[1, 1], [-1, 1], [-1, -1]])
    moved = np.c_[corners + moves, np.ones(3)]
    back = np.linalg.solve(moved, corners).T  # (2, 3): where a pixel comes from
    matrix = back[:, :2]
    offset = back[:, 2]
    mapped = [affine_transform(image[..., c], matrix, offset, order=1, mode="mirror") for c in range(channels)]
    return np.stack(mapped, axis=2)


def _to_picture(image: Array) -> Image.Image:
    if Image is None:
        raise DataError("this corruption needs Pillow, which is not installed: pip install 'adanpc[vision]'")
    pixels = np.rint(image * 255).astype(np.uint8)
    if image.shape[2] == 1:
        pixels = pixels[..., 0]  # Pillow has no channel axis for gray
    return Image.fromarray(pixels)


def _to_array(picture: Image.Image) -> Array:
    pixels = np.asarray(picture) / 255
    return pixels.reshape(picture.height, picture.width, -1)
