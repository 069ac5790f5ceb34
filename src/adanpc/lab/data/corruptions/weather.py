"""Weather: snow, fog, and splashes on the lens. Frost has its own file."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import binary_erosion, correlate, distance_transform_edt, uniform_filter

from adanpc.lab.data.corruptions.blur import smooth, streak, zoom
from adanpc.lab.data.corruptions.pixels import Array, cut, gray, paint

WATER = np.array([175, 238, 238]) / 255
MUD = np.array([63, 42, 20]) / 255
LIGHT = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])  # a kernel that lights a relief from one corner
FARTHEST = 20  # pixels from its outline beyond which a drop is flat


def snow(
    image: Array,
    rng: Generator,
    mean: float,
    std: float,
    size: float,
    threshold: float,
    radius: float,
    sigma: float,
    kept: float,
) -> Array:
    """Returns a whitened image under flakes that are blown along a steep line, and the same flakes turned around."""
    noise = rng.normal(mean, std, image.shape[:2])
    flakes = zoom(noise, size)
    flakes = cut(np.where(flakes < threshold, 0, flakes))
    angle = rng.uniform(-135, -45)
    blown = streak(flakes, radius, sigma, angle)[..., None]
    turned = blown[::-1, ::-1]
    bright = gray(image) * 1.5 + 0.5  # the constants of the published scripts
    whitened = np.maximum(image, bright)
    ground = kept * image + (1 - kept) * whitened
    return ground + blown + turned


def fog(image: Array, rng: Generator, density: float, decay: float) -> Array:
    """Returns the image with clouds of light added, darkened so that nothing exceeds the brightest pixel."""
    height, width = image.shape[:2]
    clouds = plasma(max(height, width), decay, rng)[:height, :width, None]
    brightest = image.max()
    foggy: Array = (image + density * clouds) * brightest / (brightest + density)
    return foggy


def spatter(
    image: Array, rng: Generator, mean: float, std: float, size: float, threshold: float, strength: float, mud: float
) -> Array:
    """Returns the image with drops where smoothed noise exceeds the threshold: of water, which shines, or of mud."""
    liquid = smooth(rng.normal(mean, std, image.shape[:2]), size)
    if mud:
        return _cover_with_mud(image, liquid > threshold, strength)
    liquid = np.where(liquid < threshold, 0, liquid)
    shine = cut(liquid) * _relief(liquid > 0)
    brightest = shine.max() or 1  # 0 if there are no drops, and then any divisor will do
    return image + strength * (shine / brightest)[..., None] * paint(WATER, image)


def _cover_with_mud(image: Array, wet: NDArray[np.bool_], blur: float) -> Array:
    """Returns the image covered with mud where it is wet (H, W)."""
    cover = smooth(wet.astype(float), blur)[..., None]
    cover = np.where(cover < 0.8, 0, cover)
    muddy: Array = image * (1 - cover) + cover * paint(MUD, image)
    return muddy


def plasma(side: int, decay: float, rng: Generator) -> Array:
    """Returns a fractal of clouds in [0, 1] that can be tiled; its side is the next power of two.

    It uses the diamond-square algorithm: each new point is the mean of the four around it plus noise, whose width falls
    by a factor of decay² from one scale to the next.
    """
    side = 1 << (side - 1).bit_length()  # the next power of two
    heights = np.zeros((side, side))
    step = side
    width = 1.0
    while step > 1:
        old = slice(None, None, step)  # the points that have heights
        new = slice(step // 2, None, step)  # the points halfway between them
        corners = heights[old, old]
        # The center of each square, from its four corners.
        corner_pairs = corners + np.roll(corners, -1, axis=1)
        heights[new, new] = (corner_pairs + np.roll(corner_pairs, -1, axis=0)) / 4
        heights[new, new] += rng.uniform(-width, width, corners.shape)
        centers = heights[new, new]
        # The middle of each horizontal edge, from its two corners and the centers above and below.
        heights[old, new] = (corner_pairs + centers + np.roll(centers, 1, axis=0)) / 4
        heights[old, new] += rng.uniform(-width, width, corners.shape)
        # The middle of each vertical edge, from its two corners and the centers to its left and right.
        vertical_pairs = corners + np.roll(corners, -1, axis=0)
        heights[new, old] = (vertical_pairs + centers + np.roll(centers, 1, axis=1)) / 4
        heights[new, old] += rng.uniform(-width, width, corners.shape)
        step = step // 2
        width = width / decay**2
    heights -= heights.min()
    clouds: Array = heights / heights.max()
    return clouds


def _relief(wet: NDArray[np.bool_]) -> Array:
    """Returns how much light drops reflect (H, W), 0 to 255, if it comes from a corner and outlines are ridges."""
    outline = wet & ~binary_erosion(wet, border_value=1)
    if not outline.any():
        return np.zeros(wet.shape)
    distance = np.minimum(distance_transform_edt(~outline), FARTHEST)
    means = uniform_filter(distance, 3, mode="mirror")
    levels = np.floor(means + 1e-6).astype(int)  # a rounding error must not cost a whole level
    lit = np.clip(correlate(_equalize(levels), LIGHT, mode="mirror"), 0, 255)
    relief: Array = np.rint(uniform_filter(lit, 3, mode="mirror"))
    return relief


def _equalize(levels: NDArray[np.int64]) -> Array:
    """Returns the levels on a scale from 0 to 255 on which equal ranges hold about equal numbers of pixels."""
    pixels_up_to = np.bincount(levels.ravel()).cumsum()  # how many pixels have each level or a lower one
    lowest = pixels_up_to[levels.min()]
    scale: Array = np.rint((pixels_up_to - lowest) * 255 / max(levels.size - lowest, 1))
    return scale[levels]
