"""Blurs: out of focus, through glass, moving, nearing."""

from __future__ import annotations

from math import ceil, cos, radians, sin

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from scipy.signal import fftconvolve

from adanpc.lab.data.corruptions.pixels import Array, cut


def gaussian_blur(image: Array, rng: Generator, sigma: float) -> Array:
    """Each channel under a Gaussian of this width."""
    return smooth(image, sigma)


def defocus_blur(image: Array, rng: Generator, radius: float, softness: float) -> Array:
    """Each pixel spread over a disc with a soft rim; the image is mirrored at its edge."""
    kernel = _disc(radius, softness)
    half = len(kernel) // 2
    padded = np.pad(image, ((half, half), (half, half), (0, 0)), mode="reflect")
    made: Array = fftconvolve(padded, kernel[..., None], mode="valid", axes=(0, 1))
    return made


def glass_blur(image: Array, rng: Generator, sigma: float, reach: float, rounds: float) -> Array:
    """Each pixel takes the value of one nearby, in turn from the last to the first; blurred before and after.

    A rim of ``reach`` pixels keeps its values. The published code means to swap two pixels, but copies one over the
    other, since what it holds of them are views; so do we.
    """
    height, width, channels = image.shape
    made = cut(smooth(image, sigma)).reshape(-1, channels)
    for _ in range(int(rounds)):
        made = made[_lenders(height, width, int(reach), rng)]
    return smooth(made.reshape(image.shape), sigma)


def motion_blur(image: Array, rng: Generator, radius: float, sigma: float) -> Array:
    """The image smeared along a line, at most 45° from level."""
    return streak(image, radius, sigma, rng.uniform(-45, 45))


def zoom_blur(image: Array, rng: Generator, stop: float, step: float) -> Array:
    """The mean of the image and of its enlargements by 1, 1 + step, … below stop."""
    factors = np.arange(1, stop, step)
    made: Array = np.mean([image, *(zoom(image, factor) for factor in factors)], axis=0)
    return made


def smooth(image: Array, sigma: float) -> Array:
    """The image (H, W, …) under a Gaussian, cut at four sigmas; the pixels of the edge go on outside."""
    made: Array = gaussian_filter(image, sigma, axes=(0, 1), mode="nearest")
    return made


def streak(image: Array, radius: float, sigma: float, degrees: float) -> Array:
    """The image (H, W, …) smeared to one side by half a Gaussian of 2 radius + 1 pixels, rounded to bytes.

    This is ImageMagick's motion blur, by which the published images were made. At 0° each pixel takes from those to
    its right, at 90° from those below.
    """
    steps = np.arange(2 * ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    down, right = (np.ceil(steps * part - 0.5).astype(int) for part in (sin(radians(degrees)), cos(radians(degrees))))
    rows, columns = (np.arange(side) for side in image.shape[:2])
    made = np.zeros_like(image)
    for weight, dy, dx in zip(weights / weights.sum(), down, right, strict=True):
        made += weight * image.take(rows + dy, axis=0, mode="clip").take(columns + dx, axis=1, mode="clip")
    return np.rint(made * 255) / 255


def zoom(image: Array, factor: float) -> Array:
    """The middle of the image (H, W, …), enlarged to its size; bilinear."""
    for axis in (0, 1):
        places = _places(image.shape[axis], factor)
        low = np.minimum(places.astype(int), image.shape[axis] - 2)
        share = np.expand_dims(places - low, tuple(other for other in range(image.ndim) if other != axis))
        image = image.take(low, axis) * (1 - share) + image.take(low + 1, axis) * share
    return image


def _places(side: int, factor: float) -> Array:
    """Where along one axis of the image the pixels of its enlarged middle lie (side,).

    The middle is a whole number of pixels, its enlargement is too, and the ends of both coincide.
    """
    middle = ceil(side / factor)
    grown = round(middle * factor)
    inside = np.linspace(0, middle - 1, grown)[(grown - side) // 2 :][:side]
    return inside + (side - middle) // 2


def _disc(radius: float, softness: float) -> Array:
    """A disc that sums to about 1, its rim softened by a narrow Gaussian."""
    half, reach = (8, 1) if radius <= 8 else (int(radius), 2)
    squares = np.arange(-half, half + 1) ** 2
    disc = (squares[:, None] + squares <= radius**2).astype(float)
    made: Array = gaussian_filter(disc / disc.sum(), softness, mode="mirror", radius=reach)
    return made


def _lenders(height: int, width: int, reach: int, rng: Generator) -> NDArray[np.int64]:
    """Whose value each pixel has in the end (height * width,), if in turn from the last to the first each borrows one.

    Chains are followed for all pixels at once, with the result of the loop: a lender whose turn was earlier hands on
    what it borrowed itself, any other what it had at first.
    """
    pixel = np.arange(height * width)
    inner = pixel.reshape(height, width)[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1]
    down, right = rng.integers(-reach, reach, size=(2, *inner.shape))
    lender, borrows = pixel.copy(), np.zeros(len(pixel), dtype=bool)
    lender[inner] += down * width + right
    borrows[inner] = True
    chain = np.where((lender > pixel) & borrows[lender], lender, pixel)
    while (chain[chain] != chain).any():
        chain = chain[chain]
    return lender[chain]
