"""Frost on a window pane, drawn instead of photographed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from scipy.ndimage import map_coordinates

from adanpc.lab.data.corruptions.blur import smooth
from adanpc.lab.data.corruptions.pixels import Array, paint
from adanpc.lab.data.corruptions.weather import plasma

FROST_NOTICE = "frost is drawn: the six photographs of the published generator are not included"

# Lengths are in pixels of a large image.
CRYSTAL = 56  # from one crystal to the next
NEEDLE_WIDTH = 2.5
NEEDLE_LENGTH = 20
GRAIN_WIDTH = 0.5  # the sigma of the Gaussian that smooths the grain
GRAIN_SHARE = 0.275  # of the variance of the ice
FERN_MEAN = 0.45  # of the ferns alone
FERN_STD = 0.19


class Pane(NamedTuple):
    """The average look of one pane of ice, in levels from 0 to 255.

    Args:
        color: red, green and blue.
        contrast: the standard deviation of its brightness.
    """

    color: tuple[float, float, float]
    contrast: float


# Measured in crops of 32 x 32 of the five photographs that the published script chooses from, at a fifth of their size.
PANES = (
    Pane((78, 149, 165), 14),
    Pane((199, 204, 213), 18),
    Pane((196, 200, 209), 19),
    Pane((145, 160, 172), 26),
    Pane((103, 115, 126), 33),
)


def frost(image: Array, rng: Generator, kept: float, strength: float, scale: float) -> Array:
    """Returns the image seen through a pane with ice crystals ``scale`` times smaller than those on a large image."""
    ice = pane_of_ice(image.shape[0], image.shape[1], scale, rng)
    return kept * image + strength * paint(ice, image)


def pane_of_ice(height: int, width: int, scale: float, rng: Generator) -> Array:
    """Returns a part of a random pane (height, width, 3) in [0, 1], with the color and contrast of a photograph."""
    pane = PANES[rng.integers(len(PANES))]
    texture = ice_texture(height, width, scale, rng)
    levels = np.array(pane.color) + pane.contrast * texture[..., None]
    ice: Array = np.clip(levels / 255, 0, 1)
    return ice


def ice_texture(height: int, width: int, scale: float, rng: Generator) -> Array:
    """Returns ferns under a fine grain (height, width), with mean 0 and standard deviation 1 over many panes.

    Neighboring pixels are as similar as in the photographs, both at full size and at a fifth.
    """
    ferns = (crystals(height, width, scale, rng) - FERN_MEAN) / FERN_STD
    grain = smooth(rng.standard_normal((height, width)), GRAIN_WIDTH / scale)
    grain = grain / grain.std()
    texture: Array = (1 - GRAIN_SHARE) ** 0.5 * ferns + GRAIN_SHARE**0.5 * grain
    return texture


def crystals(height: int, width: int, scale: float, rng: Generator) -> Array:
    """Returns ferns of ice (height, width) in [0, 1].

    Each pixel of the pane belongs to the nearest crystal. A crystal has a spine in a random direction, and needles of
    stretched noise at 60° on both sides of it. Plasma bends them and makes them thicker or thinner.
    """
    side = max(height, width)
    bend_down = plasma(side, 1.6, rng)[:height, :width]
    bend_right = plasma(side, 1.6, rng)[:height, :width]
    thickness = plasma(side, 1.6, rng)[:height, :width]
    positions = np.indices((height, width)) * scale + np.stack([bend_down, bend_right]) * CRYSTAL
    place = _locate(positions, rng)
    off_spine = np.abs(place.across)
    # Coordinates on axes turned by 60°: across the needles, and along them.
    across_needle = (place.along * 3**0.5 - off_spine) / 2
    along_needle = (place.along + off_spine * 3**0.5) / 2
    fine = _noise(across_needle / NEEDLE_WIDTH, along_needle / NEEDLE_LENGTH, rng)
    coarse = _noise(across_needle / NEEDLE_WIDTH / 3, along_needle / NEEDLE_LENGTH, rng)
    needles = fine * coarse
    spine = np.exp(-off_spine / 2)
    seam = np.exp(-place.seam / 3)
    ice: Array = 0.1 + (0.3 + thickness) * (1.5 * needles + 0.4 * spine + 0.3 * seam)
    return np.clip(ice, 0, 1)


class _Place(NamedTuple):
    """Where each pixel is in its crystal; all arrays are (H, W).

    Args:
        along: the position along the spine.
        across: the distance from the spine, with a sign for the side.
        seam: a measure of the distance from the border with the next crystal.
    """

    along: Array
    across: Array
    seam: Array


def _locate(positions: Array, rng: Generator) -> _Place:
    """Returns the place of each position (2, H, W) in the nearest of several random crystals."""
    low = positions.min(axis=(1, 2))
    high = positions.max(axis=(1, 2))
    count = max(4, round(np.prod(high - low) / CRYSTAL**2))
    centers = rng.uniform(low, high, (count, 2))
    down = positions[0] - centers[:, 0, None, None]
    right = positions[1] - centers[:, 1, None, None]
    squares = np.square(down) + np.square(right)  # squared distances (count, H, W)
    nearest = squares.argmin(axis=0)  # (H, W)
    square = squares.min(axis=0)
    np.put_along_axis(squares, nearest[None], np.inf, axis=0)  # the smallest of the others is the next crystal's
    next_square = squares.min(axis=0)
    down, right = positions - centers[nearest].transpose(2, 0, 1)
    angles = rng.uniform(0, 2 * np.pi, count)
    cos = np.cos(angles)[nearest]
    sin = np.sin(angles)[nearest]
    return _Place(
        along=right * cos + down * sin,
        across=down * cos - right * sin,
        seam=np.sqrt(next_square) - np.sqrt(square),
    )


def _noise(y: Array, x: Array, rng: Generator) -> Array:
    """Returns random heights in [0, 1], drawn at whole coordinates and interpolated linearly between them."""
    heights: Array = map_coordinates(rng.random((64, 64)), [y, x], order=1, mode="grid-wrap")
    return heights
