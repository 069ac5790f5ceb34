"""Frost on a window pane, drawn rather than photographed."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from scipy.ndimage import map_coordinates

from adanpc.lab.data.corruptions.pixels import Array, paint
from adanpc.lab.data.corruptions.weather import plasma

FROST_NOTICE = "frost is drawn: the six photographs of the published generator are not included"

CRYSTAL = 56  # pixels from one crystal to the next, on a large image
NEEDLE = (2.5, 20)  # pixels, how wide and how long the needles of a crystal are
ICE = np.array([0.86, 0.95, 1.0])


def frost(image: Array, rng: Generator, kept: float, strength: float, scale: float) -> Array:
    """The image seen through a pane with ice crystals, ``scale`` times smaller than those on a large image."""
    ice = crystals(image.shape[0], image.shape[1], scale, rng)[..., None] * ICE
    return kept * image + strength * paint(ice, image)


def crystals(height: int, width: int, scale: float, rng: Generator) -> Array:
    """Ferns of ice (height, width) in [0, 1].

    The pane is shared among crystals, each pixel going to the nearest. A crystal has a spine in a direction of its own
    and needles at 60° to both sides of it: noise, drawn long. Plasma bends them and makes them thick or thin.
    """
    clouds = [plasma(max(height, width), 1.6, rng)[:height, :width] for _ in range(3)]
    places = np.indices((height, width)) * scale + np.stack(clouds[:2]) * CRYSTAL
    along, across, seam = _crystal(places, rng)
    side = np.abs(across)
    # Axes turned by 60°: over the needles, and along them.
    over, length = (along * 3**0.5 - side) / 2, (along + side * 3**0.5) / 2
    needles = _noise(over / NEEDLE[0], length / NEEDLE[1], rng) * _noise(over / NEEDLE[0] / 3, length / NEEDLE[1], rng)
    made: Array = 0.1 + (0.3 + clouds[2]) * (1.5 * needles + 0.4 * np.exp(-side / 2) + 0.3 * np.exp(-seam / 3))
    return np.clip(made, 0, 1)


def _crystal(places: Array, rng: Generator) -> tuple[Array, Array, Array]:
    """Of each place (2, H, W): how far along its crystal's spine, how far off it, and how near the next crystal is."""
    low, high = places.min(axis=(1, 2)), places.max(axis=(1, 2))
    count = max(4, round(np.prod(high - low) / CRYSTAL**2))
    centers = rng.uniform(low, high, (count, 2))
    squares = np.square(places[0] - centers[:, 0, None, None]) + np.square(places[1] - centers[:, 1, None, None])
    mine = squares.argmin(axis=0)  # (H, W)
    nearest = squares.min(axis=0)
    np.put_along_axis(squares, mine[None], np.inf, axis=0)
    down, right = places - centers[mine].transpose(2, 0, 1)
    turn = rng.uniform(0, 2 * np.pi, count)
    cos, sin = np.cos(turn)[mine], np.sin(turn)[mine]
    return right * cos + down * sin, down * cos - right * sin, np.sqrt(squares.min(axis=0)) - np.sqrt(nearest)


def _noise(y: Array, x: Array, rng: Generator) -> Array:
    """Random heights in [0, 1] at whole coordinates, and between them in a straight line."""
    made: Array = map_coordinates(rng.random((64, 64)), [y, x], order=1, mode="grid-wrap")
    return made
