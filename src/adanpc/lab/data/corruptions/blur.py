"""Blurs: Gaussian, out of focus, through glass, by motion, and by zooming."""

from __future__ import annotations

from math import ceil, cos, radians, sin

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.fft import irfftn, next_fast_len, rfftn
from scipy.ndimage import gaussian_filter

from adanpc.lab.data.corruptions.pixels import Array, cut


def gaussian_blur(image: Array, rng: Generator, sigma: float) -> Array:
    """Returns the image with each channel smoothed by a Gaussian of this width."""
    return smooth(image, sigma)


def defocus_blur(image: Array, rng: Generator, radius: float, softness: float) -> Array:
    """Returns the image with each pixel spread over a disc with a soft rim; the image is mirrored at its edge."""
    kernel = _disc(radius, softness)
    half = len(kernel) // 2
    padded = np.pad(image, ((half, half), (half, half), (0, 0)), mode="reflect")
    return _convolved(padded, kernel)


def _convolved(image: Array, kernel: Array) -> Array:
    """Returns each channel convolved with a square kernel, at all positions where the kernel lies inside the image.

    This does the same as ``scipy.signal.fftconvolve``, to the bit, but without ``scipy.signal``, whose import takes a
    second.
    """
    height, width, _ = image.shape
    side = len(kernel)
    shape = (next_fast_len(height + side - 1, real=True), next_fast_len(width + side - 1, real=True))
    spectrum = rfftn(image, shape, axes=(0, 1)) * rfftn(kernel[..., None], shape, axes=(0, 1))
    whole: Array = irfftn(spectrum, shape, axes=(0, 1))
    return whole[side - 1 : height, side - 1 : width]


def glass_blur(image: Array, rng: Generator, sigma: float, reach: float, rounds: float) -> Array:
    """Returns the image with each pixel replaced by one nearby, from the last to the first; blurred before and after.

    A rim of ``reach`` pixels keeps its values. The published code is meant to swap two pixels, but copies one over the
    other, because it holds views of them. This function copies, too.
    """
    height, width, channels = image.shape
    pixels = cut(smooth(image, sigma)).reshape(-1, channels)
    for _ in range(int(rounds)):
        pixels = pixels[_lenders(height, width, int(reach), rng)]
    return smooth(pixels.reshape(image.shape), sigma)


def motion_blur(image: Array, rng: Generator, radius: float, sigma: float) -> Array:
    """Returns the image smeared along a line that is at most 45° off horizontal."""
    return streak(image, radius, sigma, rng.uniform(-45, 45))


def zoom_blur(image: Array, rng: Generator, stop: float, step: float) -> Array:
    """Returns the mean of the image and of its enlargements by 1, 1 + step, … below stop."""
    layers = [image]
    for factor in np.arange(1, stop, step):
        layers.append(zoom(image, factor))
    mean: Array = np.mean(layers, axis=0)
    return mean


def smooth(image: Array, sigma: float) -> Array:
    """Returns the image (H, W, …) under a Gaussian that ends at four sigmas; edge pixels are repeated outside."""
    smoothed: Array = gaussian_filter(image, sigma, axes=(0, 1), mode="nearest")
    return smoothed


def streak(image: Array, radius: float, sigma: float, degrees: float) -> Array:
    """Returns the image (H, W, …) smeared to one side by half a Gaussian of 2 radius + 1 pixels, cut to bytes.

    This is ImageMagick's motion blur, with which the published images were made. At 0° each pixel takes from those to
    its right, at 90° from those below.
    """
    steps = np.arange(2 * ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights = weights / weights.sum()
    angle = radians(degrees)
    # Round to whole pixels as ImageMagick does: a half goes down.
    down = np.ceil(steps * sin(angle) - 0.5).astype(int)
    right = np.ceil(steps * cos(angle) - 0.5).astype(int)
    rows = np.arange(image.shape[0])
    columns = np.arange(image.shape[1])
    smeared = np.zeros_like(image)
    for weight, dy, dx in zip(weights, down, right, strict=True):
        shifted = image.take(rows + dy, axis=0, mode="clip").take(columns + dx, axis=1, mode="clip")
        smeared += weight * shifted
    quanta = np.rint(smeared * 65535)  # ImageMagick computes in 16 bits, and truncates them to 8
    levels: Array = np.floor(quanta / 257)
    return levels / 255


def zoom(image: Array, factor: float) -> Array:
    """Returns the middle of the image (H, W, …), enlarged to the size of the image; bilinear."""
    for axis in (0, 1):
        image = _zoom_axis(image, axis, factor)
    return image


def _zoom_axis(image: Array, axis: int, factor: float) -> Array:
    """Returns the middle of the image along one axis, enlarged to the length of that axis; linear."""
    side = image.shape[axis]
    positions = _zoomed_positions(side, factor)
    before = np.minimum(positions.astype(int), side - 2)
    other_axes = tuple(other for other in range(image.ndim) if other != axis)
    share = np.expand_dims(positions - before, other_axes)  # of the next pixel; the rest is the share of ``before``
    zoomed: Array = image.take(before, axis) * (1 - share) + image.take(before + 1, axis) * share
    return zoomed


def _zoomed_positions(side: int, factor: float) -> Array:
    """Returns the positions (side,), along one axis of the image, of the pixels of its enlarged middle.

    The middle and its enlargement are whole numbers of pixels, and their ends coincide.
    """
    middle = ceil(side / factor)
    enlarged = round(middle * factor)
    trim = (enlarged - side) // 2
    positions = np.linspace(0, middle - 1, enlarged)[trim : trim + side]
    return positions + (side - middle) // 2


def _disc(radius: float, softness: float) -> Array:
    """Returns a disc that sums to about 1, with its rim softened by a narrow Gaussian."""
    # As in the published code, small discs are in a square of 17 and get a Gaussian of 3 pixels, large ones one of 5.
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
    """Returns the pixel (height * width,) whose value each pixel has in the end, if each in turn copies one nearby.

    The turns go from the last pixel to the first. The result is that of a loop over the pixels, but chains are followed
    for all of them at once: a lender whose turn was earlier passes on the value that it has copied itself, and any
    other its original value.
    """
    pixel = np.arange(height * width)
    # As in the published loops, which leave out two rows and columns more at the start than at the end.
    rows = slice(reach + 1, height - reach + 1)
    columns = slice(reach + 1, width - reach + 1)
    inner = pixel.reshape(height, width)[rows, columns]
    down, right = rng.integers(-reach, reach, size=(2, *inner.shape))
    lender = pixel.copy()
    lender[inner] += down * width + right
    borrows = np.zeros(len(pixel), dtype=bool)
    borrows[inner] = True
    lender_was_earlier = (lender > pixel) & borrows[lender]
    # The pixel at the other end of one step of the chain, then of two, of four, … until all chains have ended.
    chain = np.where(lender_was_earlier, lender, pixel)
    while (chain[chain] != chain).any():
        chain = chain[chain]
    return lender[chain]
