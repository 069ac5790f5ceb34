"""Noise, drawn independently for every pixel and channel."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from adanpc.lab.data.corruptions.pixels import Array


def gaussian_noise(image: Array, rng: Generator, std: float) -> Array:
    """Adds normal noise of this standard deviation."""
    return image + rng.normal(scale=std, size=image.shape)


def shot_noise(image: Array, rng: Generator, photons: float) -> Array:
    """Replaces values by counts of photons. A white pixel sends ``photons`` on average; fewer mean more noise."""
    return rng.poisson(image * photons) / photons


def impulse_noise(image: Array, rng: Generator, share: float) -> Array:
    """Sets this share of all values to 0 or 1, equally often: salt and pepper."""
    hit = rng.random(image.shape) < share
    salt_or_pepper = rng.integers(2, size=image.shape)
    return np.where(hit, salt_or_pepper, image)


def speckle_noise(image: Array, rng: Generator, std: float) -> Array:
    """Adds normal noise in proportion to the value, so black stays black."""
    return image + image * rng.normal(scale=std, size=image.shape)
