"""Blurs: out of focus, through glass, moving, approaching."""

from __future__ import annotations

from math import ceil, cos, radians, sin

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.fft import irfftn, next_fast_len, rfftn
from scipy.ndimage import gaussian_filter

from adanpc.lab.data.corruptions.pixels import Array, cut


def gaussian_blur(image: Array, rng: Generator, sigma: float) -> Array:
    """Each channel under a Gaussian of this width."""
    return smooth(image, sigma)


def defocus_blur(image: Array, rng: Generator, radius: float, softness: float) -> Array:
    """Each pixel spread over a disc with a soft rim; the image is mirrored at its edge."""
    kernel = _disc(radius, softness)
    half = len(kernel) // 2
    padded = np.pad(image, ((half, half), (half, half), (0, 0)), mode="reflect")
    return _convolved(padded, kernel)


def _convolved(image: Array, kernel: Array) -> Array:
    """Each channel convolved with a square kernel, wherever that lies inside the image.

    It is what ``scipy.signal.fftconvolve`` does, to the bit, without ``scipy.signal``, whose import takes a second.
    """
    height, width, _ = image.shape
    side = len(kernel)
    shape = (next_fast_len(height + side - 1, real=True), next_fast_len(width + side - 1, real=True))
    spectrum = rfftn(image, shape, axes=(0, 1)) * rfftn(kernel[..., None], shape, axes=(0, 1))
    whole: Array = irfftn(spectrum, shape, axes=(0, 1))
    return whole[side - 1 : height, side - 1 : width]


def glass_blur(image: Array, rng: Generator, sigma: float, reach: float, rounds: float) -> Array:
    """Each pixel takes the value of one nearby, in turn from the last to the first; blurred before and after.

    A rim of ``reach`` pixels keeps its values. The published code means to swap two pixels, but copies one over the
    other, because it holds views of them. This one copies too.
    """
    height, width, channels = image.shape
    pixels = cut(smooth(image, sigma)).reshape(-1, channels)
    for _ in range(int(rounds)):
        pixels = pixels[_lenders(height, width, int(reach), rng)]
    return smooth(pixels.reshape(image.shape), sigma)


def motion_blur(image: Array, rng: Generator, radius: float, sigma: float) -> Array:
    """The image smeared along a line that is at most 45° off horizontal."""
    return streak(image, radius, sigma, rng.uniform(-45, 45))


def zoom_blur(image: Array, rng: Generator, stop: float, step: float) -> Array:
    """The mean of the image and of its enlargements by 1, 1 + step, … below stop."""
    layers = [image]
    for factor in np.arange(1, stop, step):
        layers.append(zoom(image, factor))
    mean: Array = np.mean(layers, axis=0)
    return mean


def smooth(image: Array, sigma: float) -> Array:
    """The image (H, W, …) under a Gaussian, cut at four sigmas; the pixels of the edge are repeated outside."""
    smoothed: Array = gaussian_filter(image, sigma, axes=(0, 1), mode="nearest")
    return smoothed


def streak(image: Array, radius: float, sigma: float, degrees: float) -> Array:
    """The image (H, W, …) smeared to one side by half a Gaussian of 2 radius + 1 pixels, cut to bytes.

    This is ImageMagick's motion blur, by which the published images were made. At 0° each pixel takes from those to
    its right, at 90° from those below.
    """
    steps = np.arange(2 * ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights = weights / weights.sum()
    angle = radians(degrees)
    # Whole pixels, rounded as ImageMagick rounds them: a half goes down.
    down = np.ceil(steps * sin(angle) - 0.5).astype(int)
    right = np.ceil(steps * cos(angle) - 0.5).astype(int)
    rows = np.arange(image.shape[0])
    columns = np.arange(image.shape[1])
    smeared = np.zeros_like(image)
    for weight, dy, dx in zip(weights, down, right, strict=True):
        shifted = image.take(rows + dy, axis=0, mode="clip").take(columns + dx, axis=1, mode="clip")
        smeared += weight * shifted
    quanta = np.rint(smeared * 65535)  # ImageMagick computes in 16 bits, and cuts them to 8
    levels: Array = np.floor(quanta / 257)
    return levels / 255


def zoom(image: Array, factor: float) -> Array:
    """The middle of the image (H, W, …), enlarged to its size; bilinear."""
    for axis in (0, 1):
        image = _zoom_axis(image, axis, factor)
    return image


def _zoom_axis(image: Array, axis: int, factor: float) -> Array:
    """The middle of the image along one axis, enlarged to its length; linear."""
    side = image.shape[axis]
    positions = _zoomed_positions(side, factor)
    before = np.minimum(positions.astype(int), side - 2)
    other_axes = tuple(other for other in range(image.ndim) if other != axis)
    share = np.expand_dims(positions - before, other_axes)  # of the pixel after; the rest is that of the one before
    zoomed: Array = image.take(before, axis) * (1 - share) + image.take(before + 1, axis) * share
    return zoomed


def _zoomed_positions(side: int, factor: float) -> Array:
    """Where along one axis of the image the pixels of its enlarged middle are (side,).

    The middle is a whole number of pixels, so is its enlargement, and the ends of both coincide.
    """
    middle = ceil(side / factor)
    enlarged = round(middle * factor)
    trim = (enlarged - side) // 2
    positions = np.linspace(0, middle - 1, enlarged)[trim : trim + side]
    return positions + (side - middle) // 2


def _disc(radius: float, softness: float) -> Array:
    """A disc that sums to about 1, its rim softened by a narrow Gaussian."""
    # As in the published code: small discs are in a square of 17 and get a Gaussian of 3 pixels, large ones of 5.
    if radius <= 8:
        half = 8
        gaussian_radius = 1
    else:
        half = int(radius)
        gaussian_radius = 2
    squares = np.arange(-half, half + 1) ** 2
    disc = (squares[:, None] + squares <= radius**2).astype(float)
    softened: Array = gaussian_filter(disc / disc.sum(), softness, mode="mirror", radius=gaussian_radius)
    return softened


def _lenders(height: int, width: int, reach: int, rng: Generator) -> NDArray[np.int64]:
    """Whose value each pixel has in the end (height * width,), if in turn from the last to the first each borrows one.

    Chains are followed for all pixels at once, with the result of the loop: a lender whose turn was earlier hands on
    what it borrowed itself, any other what it had at first.
    """
    pixel = np.arange(height * width)
    inner = pixel.reshape(height, width)[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1]
    down, right = rng.integers(-reach, reach, size=(2, *inner.shape))
    lender = pixel.copy()
    lender[inner] += down * width + right
    borrows = np.zeros(len(pixel), dtype=bool)
    borrows[inner] = True
    lender_was_earlier = (lender > pixel) & borrows[lender]
    # The pixel at the other end of one step of the chain; then of two, of four, … until all chains have ended.
    chain = np.where(lender_was_earlier, lender, pixel)
    while (chain[chain] != chain).any():
        chain = chain[chain]
    return lender[chain]
