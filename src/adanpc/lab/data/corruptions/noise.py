"""Noise, drawn for every pixel and channel by itself."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from adanpc.lab.data.corruptions.pixels import Array


def gaussian_noise(image: Array, rng: Generator, std: float) -> Array:
    """Normal noise of this standard deviation, added."""
    return image + rng.normal(scale=std, size=image.shape)


def shot_noise(image: Array, rng: Generator, photons: float) -> Array:
    """Counted photons; a white pixel sends ``photons`` on average, and the fewer there are, the noisier the image."""
    return rng.poisson(image * photons) / photons


def impulse_noise(image: Array, rng: Generator, share: float) -> Array:
    """Salt and pepper: this share of all values becomes 0 or 1, equally often."""
    hit = rng.random(image.shape) < share
    salt_or_pepper = rng.integers(2, size=image.shape)
    return np.where(hit, salt_or_pepper, image)


def speckle_noise(image: Array, rng: Generator, std: float) -> Array:
    """Normal noise in proportion to the pixel: black stays black."""
    return image + image * rng.normal(scale=std, size=image.shape)
