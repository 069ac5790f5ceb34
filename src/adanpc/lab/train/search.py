"""Distributions of hyperparameters for random search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from adanpc.lab.seeds import seed_of


class Draw(Protocol):
    """A distribution of one hyperparameter."""

    def __call__(self, random: Random) -> Any:
        """Returns one draw."""


@dataclass(frozen=True)
class Uniform:
    """A number drawn uniformly between low and high."""

    low: float
    high: float

    def __call__(self, random: Random) -> float:
        """Returns one draw."""
        return random.uniform(self.low, self.high)


@dataclass(frozen=True)
class Power:
    """``base`` to the power of a uniform number between low and high; rounded down to a whole number if ``whole``."""

    low: float
    high: float
    base: float = 10.0
    whole: bool = False

    def __call__(self, random: Random) -> float:
        """Returns one draw."""
        value: float = self.base ** random.uniform(self.low, self.high)
        if self.whole:
            return int(value)
        return value


@dataclass(frozen=True)
class Choice:
    """One of several values, all equally likely."""

    values: tuple[Any, ...]

    def __call__(self, random: Random) -> Any:
        """Returns one draw."""
        return random.choice(self.values)


def draw(space: Mapping[str, Draw], trial: int, seed: int = 0) -> dict[str, Any]:
    """Returns one value for each name, which depends only on the trial, the seed and that name.

    Trial 0 draws nothing, so it keeps the defaults.
    """
    drawn: dict[str, Any] = {}
    if trial == 0:
        return drawn
    for name, distribution in space.items():
        # A generator for each name, so that a setting is drawn the same whichever others an algorithm has.
        random = Random(seed_of(seed, trial, name))
        drawn[name] = distribution(random)
    return drawn
