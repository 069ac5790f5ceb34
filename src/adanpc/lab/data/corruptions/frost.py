"""Frost on a window pane, drawn rather than photographed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from scipy.ndimage import map_coordinates

from adanpc.lab.data.corruptions.blur import smooth
from adanpc.lab.data.corruptions.pixels import Array, paint
from adanpc.lab.data.corruptions.weather import plasma

FROST_NOTICE = "frost is drawn: the six photographs of the published generator are not included"

CRYSTAL = 56  # pixels from one crystal to the next, on a large image
NEEDLE_WIDTH = 2.5  # pixels
NEEDLE_LENGTH = 20
GRAIN_WIDTH = 0.5  # pixels, the sigma of the Gaussian that smooths it
GRAIN_SHARE = 0.275  # of the variance of the ice
FERN_MEAN, FERN_STD = 0.45, 0.19  # of the ferns alone


class Pane(NamedTuple):
    """How one pane of ice looks on average, in bytes.

    Args:
        color: red, green and blue.
        contrast: the standard deviation of its gray.
    """

    color: tuple[float, float, float]
    contrast: float


# Measured on the five photographs that the published script chooses from, in crops of 32 x 32 at a fifth of their size.
PANES = (
    Pane((78, 149, 165), 14),
    Pane((199, 204, 213), 18),
    Pane((196, 200, 209), 19),
    Pane((145, 160, 172), 26),
    Pane((103, 115, 126), 33),
)


def frost(image: Array, rng: Generator, kept: float, strength: float, scale: float) -> Array:
    """The image seen through a pane with ice crystals, ``scale`` times smaller than those on a large image."""
    ice = pane_of_ice(image.shape[0], image.shape[1], scale, rng)
    return kept * image + strength * paint(ice, image)


def pane_of_ice(height: int, width: int, scale: float, rng: Generator) -> Array:
    """A part of a pane (height, width, 3) in [0, 1], one of five with the colors and contrasts of the photographs."""
    pane = PANES[rng.integers(len(PANES))]
    texture = ice_texture(height, width, scale, rng)
    levels = np.array(pane.color) + pane.contrast * texture[..., None]
    ice: Array = np.clip(levels / 255, 0, 1)
    return ice


def ice_texture(height: int, width: int, scale: float, rng: Generator) -> Array:
    """Ferns under a fine grain (height, width), of mean 0 and standard deviation 1 over many panes.

    Neighboring pixels are then as alike as in the photographs, large or reduced to a fifth.
    """
    ferns = (crystals(height, width, scale, rng) - FERN_MEAN) / FERN_STD
    grain = smooth(rng.standard_normal((height, width)), GRAIN_WIDTH / scale)
    grain = grain / grain.std()
    texture: Array = (1 - GRAIN_SHARE) ** 0.5 * ferns + GRAIN_SHARE**0.5 * grain
    return texture


def crystals(height: int, width: int, scale: float, rng: Generator) -> Array:
    """Ferns of ice (height, width) in [0, 1].

    The pane is shared among crystals, each pixel going to the nearest. A crystal has a spine in a direction of its own
    and needles at 60° to both sides of it: noise, drawn long. Plasma bends them and makes them thick or thin.
    """
    bend_down, bend_right, thickness = (plasma(max(height, width), 1.6, rng)[:height, :width] for _ in range(3))
    positions = np.indices((height, width)) * scale + np.stack([bend_down, bend_right]) * CRYSTAL
    place = _locate(positions, rng)
    off_spine = np.abs(place.across)
    # Axes turned by 60°: across the needles, and along them.
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
    """Where pixels are in their crystals, each (H, W).

    Args:
        along: how far along the spine.
        across: how far off the spine.
        seam: how far from the border with the next crystal.
    """

    along: Array
    across: Array
    seam: Array


def _locate(positions: Array, rng: Generator) -> _Place:
    """The place of each position (2, H, W) in the nearest of some random crystals."""
    low = positions.min(axis=(1, 2))
    high = positions.max(axis=(1, 2))
    count = max(4, round(np.prod(high - low) / CRYSTAL**2))
    centers = rng.uniform(low, high, (count, 2))
    down = positions[0] - centers[:, 0, None, None]
    right = positions[1] - centers[:, 1, None, None]
    distances = np.square(down) + np.square(right)  # squared, (count, H, W)
    nearest = distances.argmin(axis=0)  # (H, W)
    distance = distances.min(axis=0)
    np.put_along_axis(distances, nearest[None], np.inf, axis=0)
    next_distance = distances.min(axis=0)
    down, right = positions - centers[nearest].transpose(2, 0, 1)
    angles = rng.uniform(0, 2 * np.pi, count)
    cos = np.cos(angles)[nearest]
    sin = np.sin(angles)[nearest]
    return _Place(
        along=right * cos + down * sin,
        across=down * cos - right * sin,
        seam=np.sqrt(next_distance) - np.sqrt(distance),
    )


def _noise(y: Array, x: Array, rng: Generator) -> Array:
    """Random heights in [0, 1] at whole coordinates, and between them in a straight line."""
    heights: Array = map_coordinates(rng.random((64, 64)), [y, x], order=1, mode="grid-wrap")
    return heights
