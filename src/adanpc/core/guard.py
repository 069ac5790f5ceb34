"""Signs that need no labels: how a stream arrives, and whether what was learned from it can be trusted.

Two questions are answered while a stream goes by, from running averages over its last hundred queries or so.

* Do classes arrive mixed? If answers repeat more often than their shares explain, or one class has most of them,
  probably not. Then the stream's mean says as much about the classes that happened to come as about the shift.
* Do neighbors agree? Queries that are near each other should get the same answer more often than chance, if the
  answers mean anything. Where a class is spread over several answers at random, as it is once centering has removed
  what made it that class, they do not.

Both are values: a query makes the next one of them. So they replay, and do not depend on how a stream is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

PRIOR = 16  # queries that the values before the stream count for
RATE = 1 / 100  # of the running averages of signs
HORIZON = 1000  # queries that the running mean of features remembers
WARM_UP = 32  # queries before which no sign is believed

# From no trust to full trust. The first three were fixed by a study of PACS features; the last by which streams of
# single classes lost and which others gained, see docs/safety.md.
REPETITION = (0.16, 0.08)
LARGEST_SHARE = (0.8, 0.6)
COHERENCE = (0.35, 0.45)


@dataclass(frozen=True, eq=False)
class Arrivals:
    """What is known of the queries themselves, from their features and the frozen bank's answers to them."""

    count: int
    mean: Tensor  # (D,) float64, the running mean of transformed features
    shares: Tensor  # (C,) float64, of each class among the frozen answers
    repeats: float  # how often an answer is the same as the one before
    last: int  # the latest frozen answer, -1 before the first

    @classmethod
    def none(cls, origin: Tensor, classes: int) -> Arrivals:
        """Before the first query."""
        shares = torch.full((classes,), 1 / classes, dtype=torch.float64, device=origin.device)
        return cls(0, origin, shares, 1 / classes, -1)

    def after(self, transformed: Tensor, answer: int) -> Arrivals:
        """Once a query (D,) has come that the frozen bank answers so."""
        rate = _rate(self.count, RATE)
        shares = self.shares * (1 - rate)
        shares[answer] += rate
        repeats = self.repeats
        if self.last >= 0:
            repeats = (1 - rate) * repeats + rate * float(answer == self.last)
        rate = _rate(self.count, 1 / HORIZON)
        mean = (1 - rate) * self.mean + rate * transformed
        return Arrivals(self.count + 1, mean, shares, repeats, answer)

    def mixed(self) -> float:
        """How far the classes seem to arrive mixed, from 0 to 1."""
        if self.count <= WARM_UP:
            return 0.0
        by_chance = float(self.shares.square().sum())
        return _ramp(self.repeats - by_chance, *REPETITION) * _ramp(float(self.shares.max()), *LARGEST_SHARE)


@dataclass(frozen=True, eq=False)
class Beliefs:
    """What is known of the adapted answers to a stream."""

    masses: Tensor  # (C,) float64, the sum of all beliefs
    shares: Tensor  # (C,) float64, of each class among the source rows' answers, lately
    coherence: float  # how much of a query's neighbors in the stream was answered as it is, lately

    @classmethod
    def none(cls, classes: int, device: torch.device) -> Beliefs:
        """Before the first query."""
        nothing = torch.zeros(classes, dtype=torch.float64, device=device)
        return cls(nothing, nothing + 1 / classes, 0.0)

    def compared(self, count: int, answer: int, agreement: float | None) -> Beliefs:
        """Once a query, one after ``count`` others, has been compared with its neighbors in the stream, if any."""
        rate = _rate(count, RATE)
        shares = self.shares * (1 - rate)
        shares[answer] += rate
        coherence = self.coherence
        if agreement is not None:
            coherence = (1 - rate) * coherence + rate * agreement
        return replace(self, shares=shares, coherence=coherence)

    def with_belief(self, belief: Tensor) -> Beliefs:
        """Once a query has been believed to be of these classes (C,)."""
        return replace(self, masses=self.masses + belief)

    def trust(self, count: int) -> float:
        """How far adapted answers can be trusted after so many queries, from 0 to 1."""
        if count <= WARM_UP:
            return 0.0
        by_chance = float(self.shares.square().sum())
        beyond_chance = (self.coherence - by_chance) / max(1 - by_chance, 1e-9)
        return _ramp(beyond_chance, *COHERENCE)


@dataclass(frozen=True, eq=False)
class Stream:
    """All that is known of a stream beside its rows."""

    arrivals: Arrivals
    beliefs: Beliefs

    def packed(self) -> Tensor:
        """All of it as one vector (4 + D + 3 C,) float64, for changes and files."""
        arrivals = self.arrivals
        beliefs = self.beliefs
        numbers = [arrivals.count, arrivals.repeats, arrivals.last, beliefs.coherence]
        head = torch.tensor(numbers, dtype=torch.float64, device=arrivals.mean.device)
        return torch.cat([head, arrivals.mean, arrivals.shares, beliefs.masses, beliefs.shares])

    @classmethod
    def unpacked(cls, vector: Tensor, dim: int, classes: int) -> Stream:
        """What ``packed`` wrote."""
        head, mean, shares, masses, lately = vector.split([4, dim, classes, classes, classes])
        count, repeats, last, coherence = head.tolist()
        return cls(Arrivals(int(count), mean, shares, repeats, int(last)), Beliefs(masses, lately, coherence))


def packed_length(dim: int, classes: int) -> int:
    """How many numbers a packed stream has."""
    return 4 + dim + 3 * classes


def with_more_classes(vector: Tensor, dim: int, classes: int, count: int) -> Tensor:
    """A packed stream of so many classes, with ``count`` of them; the new ones have not been met."""
    head, *by_class = vector.split([4 + dim, classes, classes, classes])
    return torch.cat([head, *(pad(column, (0, count - classes)) for column in by_class)])


def _rate(count: int, least: float) -> float:
    """The weight of a query that comes after so many others."""
    return max(1 / (count + 1 + PRIOR), least)


def _ramp(value: float, none: float, full: float) -> float:
    """0 at ``none`` or beyond it, 1 at ``full`` or beyond it, straight between them."""
    return min(1.0, max(0.0, (value - none) / (full - none)))
