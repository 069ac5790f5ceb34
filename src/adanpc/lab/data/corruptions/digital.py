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
    """So much added to the value (the largest channel) of each pixel, at most up to 1; hue and saturation stay."""
    value = image.max(axis=2, keepdims=True)
    brighter = np.minimum(value + more, 1)
    made: Array = np.where(value > 0, image / np.where(value > 0, value, 1), 1) * brighter
    return made


def contrast(image: Array, rng: Generator, kept: float) -> Array:
    """Each channel drawn toward its mean, so that this share of the difference is left."""
    mean = image.mean(axis=(0, 1))
    made: Array = mean + kept * (image - mean)
    return made


def saturate(image: Array, rng: Generator, factor: float, more: float) -> Array:
    """The saturation of each pixel times the factor, plus so much, at most 1; gray counts as red."""
    if image.shape[2] != 3:
        raise DataError(f"saturate needs 3 channels, got {image.shape[2]}: a gray image has no color to change")
    value = image.max(axis=2, keepdims=True)
    below = value - image
    spread = below.max(axis=2, keepdims=True)
    saturation = np.clip(factor * spread / np.where(value > 0, value, 1) + more, 0, 1)
    # A hue is how far each channel lies below the value, as a share of the farthest.
    hue = np.where(spread > 0, below / np.where(spread > 0, spread, 1), np.array([0, 1, 1]))
    made: Array = value * (1 - saturation * hue)
    return made


def elastic_transform(image: Array, rng: Generator, bend: float, width: float, shift: float) -> Array:
    """Three corners moved at random and the image with them, then every pixel by a smooth random field.

    All lengths are shares of the shorter side: by how much the field moves before it is smoothed, how far it is
    smoothed, and by how much the corners move at most.
    """
    height, across, channels = image.shape
    side = min(height, across)
    image = _affine(image, rng.uniform(-shift * side, shift * side, (3, 2)))
    moves = rng.uniform(-1, 1, (2, height, across))
    if width:
        moves = gaussian_filter(moves, width * side, axes=(1, 2), mode="reflect", truncate=3)
    places = np.indices((height, across)) + bend * side * moves
    return np.stack([map_coordinates(image[..., c], places, order=1, mode="reflect") for c in range(channels)], axis=2)


def pixelate(image: Array, rng: Generator, share: float) -> Array:
    """The image at this share of its size and back, each pixel the mean of those it covers."""
    picture = _picture(image)
    small = picture.resize((int(picture.width * share), int(picture.height * share)), Image.Resampling.BOX)
    return _array(small.resize(picture.size, Image.Resampling.BOX))


def jpeg_compression(image: Array, rng: Generator, quality: float) -> Array:
    """The image after a JPEG file of this quality."""
    file = BytesIO()
    _picture(image).save(file, "JPEG", quality=int(quality))
    return _array(Image.open(file))


def _affine(image: Array, moves: Array) -> Array:
    """The image under the affine map that moves three corners of its middle, (row, column), by so much; mirrored."""
    height, width, channels = image.shape
    middle, reach = np.array([height // 2, width // 2]), min(height, width) // 3
    corners = middle + reach * np.array([[1, 1], [-1, 1], [-1, -1]])
    back = np.linalg.solve(np.c_[corners + moves, np.ones(3)], corners).T  # (2, 3): whence a pixel comes
    return np.stack(
        [affine_transform(image[..., c], back[:, :2], back[:, 2], order=1, mode="mirror") for c in range(channels)],
        axis=2,
    )


def _picture(image: Array) -> Image.Image:
    if Image is None:
        raise DataError("this corruption needs Pillow, which is not installed: pip install 'adanpc[vision]'")
    pixels = np.rint(image * 255).astype(np.uint8)
    return Image.fromarray(pixels if image.shape[2] == 3 else pixels[..., 0])


def _array(picture: Image.Image) -> Array:
    pixels = np.asarray(picture) / 255
    return pixels.reshape(picture.height, picture.width, -1)
