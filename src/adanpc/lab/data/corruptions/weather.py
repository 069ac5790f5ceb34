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
LIGHT = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])  # from one corner


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
    """Flakes blown along a steep line, twice, the second time turned about, over a whitened image."""
    flakes = zoom(rng.normal(mean, std, image.shape[:2]), size)
    flakes = cut(np.where(flakes < threshold, 0, flakes))
    blown = streak(flakes, radius, sigma, rng.uniform(-135, -45))[..., None]
    whitened = np.maximum(image, gray(image) * 1.5 + 0.5)
    return kept * image + (1 - kept) * whitened + blown + blown[::-1, ::-1]


def fog(image: Array, rng: Generator, density: float, decay: float) -> Array:
    """Clouds of light added, then all of it darkened so that nothing exceeds the brightest pixel."""
    height, width = image.shape[:2]
    clouds = plasma(max(height, width), decay, rng)[:height, :width, None]
    brightest = image.max()
    made: Array = (image + density * clouds) * brightest / (brightest + density)
    return made


def spatter(
    image: Array, rng: Generator, mean: float, std: float, size: float, threshold: float, strength: float, mud: float
) -> Array:
    """Drops of water that shine, or of mud that hide, where smoothed noise exceeds the threshold."""
    liquid = smooth(rng.normal(mean, std, image.shape[:2]), size)
    if mud:
        cover = smooth((liquid > threshold).astype(float), strength)[..., None]
        cover = np.where(cover < 0.8, 0, cover)
        muddy: Array = image * (1 - cover) + cover * paint(MUD, image)
        return muddy
    liquid = np.where(liquid < threshold, 0, liquid)
    shine = cut(liquid) * _relief(liquid > 0)
    return image + strength * (shine / (shine.max() or 1))[..., None] * paint(WATER, image)


def plasma(side: int, decay: float, rng: Generator) -> Array:
    """A fractal of clouds in [0, 1], its side the next power of two; opposite edges fit.

    Squares, then diamonds: each new point is the mean of the four around it plus noise, whose width falls by decay²
    from one scale to the next.
    """
    side = 1 << (side - 1).bit_length()
    heights, step, width = np.zeros((side, side)), side, 1.0
    while step > 1:
        old, new = slice(None, None, step), slice(step // 2, None, step)
        corners = heights[old, old]
        beside = corners + np.roll(corners, -1, axis=1)
        heights[new, new] = (beside + np.roll(beside, -1, axis=0)) / 4
        heights[new, new] += rng.uniform(-width, width, corners.shape)
        centers = heights[new, new]
        heights[old, new] = (beside + centers + np.roll(centers, 1, axis=0)) / 4
        heights[old, new] += rng.uniform(-width, width, corners.shape)
        heights[new, old] = (corners + np.roll(corners, -1, axis=0) + centers + np.roll(centers, 1, axis=1)) / 4
        heights[new, old] += rng.uniform(-width, width, corners.shape)
        step, width = step // 2, width / decay**2
    heights -= heights.min()
    made: Array = heights / heights.max()
    return made


def _relief(wet: NDArray[np.bool_]) -> Array:
    """How much light drops send back (H, W), 0 to 255, if it falls from one corner and their outlines are ridges."""
    outline = wet & ~binary_erosion(wet, border_value=1)
    if not outline.any():
        return np.zeros(wet.shape)
    distance = np.minimum(distance_transform_edt(~outline), 20)
    levels = np.floor(uniform_filter(distance, 3, mode="mirror") + 1e-6).astype(int)
    lit = np.clip(correlate(_equalized(levels), LIGHT, mode="mirror"), 0, 255)
    made: Array = np.rint(uniform_filter(lit, 3, mode="mirror"))
    return made


def _equalized(levels: NDArray[np.int64]) -> Array:
    """The levels on a scale from 0 to 255 whose ranges hold about as many pixels each."""
    upto = np.bincount(levels.ravel()).cumsum()
    lowest = upto[levels.min()]
    made: Array = np.rint((upto - lowest) * 255 / max(levels.size - lowest, 1))[levels]
    return made
