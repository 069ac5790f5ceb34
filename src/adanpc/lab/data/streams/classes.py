"""Streams that differ in how classes arrive. They use labels, but for the order alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, final

import numpy as np
from numpy.random import Generator
from torch import Tensor

from adanpc.lab.data.domain import DataError, Domain
from adanpc.lab.data.streams.stream import Rows, Stream


@final
@dataclass(frozen=True, kw_only=True)
class LabelShift(Stream):
    """One domain after another, with classes of unequal frequency: a long tail.

    Of the class in place r of 0 … K - 1, ``imbalance ** (-r / (K - 1))`` times as many samples arrive as of the first,
    rounded down, but at least one. Which class has which place is drawn for each domain. As many samples arrive as
    these proportions allow; the others are left out, and ``left_out`` counts them.

    Paper: Cui et al., "Class-balanced loss based on effective number of samples", CVPR 2019, for the exponential tail.

    Args:
        imbalance: how many times as frequent the first class is as the last; at least 1, where all are equal.
        seed: of all that is drawn.
    """

    name: ClassVar[str] = "label_shift"

    imbalance: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.imbalance < inf:
            raise DataError(f"imbalance must be at least 1 and finite, got {self.imbalance}")

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """The samples that are kept, domain by domain, shuffled inside."""
        return self._each(domains, self._tail)

    def _tail(self, labels: Rows, rng: Generator) -> Rows:
        members = _members(labels, rng)
        shares = self.imbalance ** (-rng.permutation(len(members)) / max(len(members) - 1, 1))
        first = min((len(rows) / share for rows, share in zip(members, shares, strict=True)), default=0)
        counts = np.maximum(np.floor(first * shares + 1e-9).astype(int), 1)
        kept = [rows[:count] for rows, count in zip(members, counts, strict=True)]
        return rng.permutation(np.concatenate([labels[:0], *kept]))


@final
@dataclass(frozen=True, kw_only=True)
class Correlated(Stream):
    """One domain after another, inside which samples of a class come together, as frames of a film do.

    Time is divided into slots. Each class is dealt over the slots in proportions drawn from a symmetric Dirichlet
    distribution; within a slot, classes come one after another in random order. At a concentration near 0 each class
    is a single run. At a high one each slot holds an equal share of every class, so with many slots batches look
    independent; with few, each share is still a run.

    Paper: Yuan et al., "Robust test-time adaptation in dynamic scenarios" (RoTTA), CVPR 2023, after Gong et al.,
    "NOTE: robust continual test-time adaptation against temporal correlation", NeurIPS 2022.
    Differs from the published code: the samples of a class are shuffled before they are dealt.

    Args:
        concentration: of the Dirichlet distribution, above 0; 0.1 is RoTTA's and NOTE's.
        slots: how many, or None for as many as the domain has classes, at most 100.
        seed: of all that is drawn.
    """

    name: ClassVar[str] = "correlated"

    concentration: float = 0.1
    slots: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.concentration < inf:
            raise DataError(f"concentration must be above 0 and finite, got {self.concentration}")
        if self.slots is not None and self.slots < 1:
            raise DataError(f"slots must be at least 1, or None for one for each class, got {self.slots}")

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """All samples, domain by domain, slot by slot, class by class."""
        return self._each(domains, self._dealt)

    def _dealt(self, labels: Rows, rng: Generator) -> Rows:
        members = _members(labels, rng)
        slots = self.slots or min(len(members), 100)
        hands = []  # for each class, its rows in each slot
        for rows in members:
            shares = rng.dirichlet(np.full(slots, self.concentration))
            hands.append(np.split(rows, (shares.cumsum()[:-1] * len(rows)).astype(int)))
        turns = [hands[place][slot] for slot in range(slots) for place in rng.permutation(len(hands))]
        return np.concatenate([labels[:0], *turns])


def _members(labels: Rows, rng: Generator) -> list[Rows]:
    """The rows of each class that occurs, shuffled."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
