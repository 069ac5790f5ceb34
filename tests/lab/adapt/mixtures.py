"""Images on which the toy model is sure at times and in doubt at others."""

from __future__ import annotations

from torch import Tensor

from adanpc.testing.adapters import toy_images


def mixtures(rows: int, seed: int) -> Tensor:
    """Each image (rows, 1, 8, 8) is the mean of two, of the same class or not, one of them brighter."""
    return (toy_images(rows, seed=seed, shift=0.3)[0] + toy_images(rows, seed=seed + 1000)[0]) / 2


def stream(count: int = 4, rows: int = 12) -> list[Tensor]:
    """Batches of them."""
    return [mixtures(rows, seed=70 + number) for number in range(count)]
