"""Streams that differ in how classes arrive. They use labels, but only for the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, final

import numpy as np
from numpy.random import Generator
from torch import Tensor

from adanpc.lab.data.domain import DataError, Domain
from adanpc.lab.data.streams.stream import Labels, Rows, Stream

MOST_SLOTS = 100  # unless a user asks for more


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
        seed: of everything that is drawn.
    """

    name: ClassVar[str] = "label_shift"

    imbalance: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.imbalance < inf:
            raise DataError(f"imbalance must be at least 1 and finite, got {self.imbalance}")

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """The samples that are kept, domain by domain, shuffled inside."""
        return self._one_after_another(domains, self._keep_tail)

    def _keep_tail(self, labels: Labels, rng: Generator) -> Rows:
        """The rows of one domain that are kept, shuffled."""
        if len(labels) == 0:
            return labels
        rows_of = _rows_by_class(labels, rng)
        places = rng.permutation(len(rows_of))
        last_place = max(len(rows_of) - 1, 1)  # a single class has place 0
        shares = self.imbalance ** (-places / last_place)  # of the first class's size
        # The first class can be as large as the scarcest class allows, measured by its share.
        first_size = min(len(rows) / share for rows, share in zip(rows_of, shares, strict=True))
        counts = np.floor(first_size * shares + 1e-9).astype(int)  # a rounding error must not cost a sample
        counts = np.maximum(counts, 1)
        kept = [rows[:count] for rows, count in zip(rows_of, counts, strict=True)]
        return rng.permutation(np.concatenate(kept))


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
        seed: of everything that is drawn.
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
        return self._one_after_another(domains, self._deal)

    def _deal(self, labels: Labels, rng: Generator) -> Rows:
        """The rows of one domain, slot by slot."""
        if len(labels) == 0:
            return labels
        rows_of = _rows_by_class(labels, rng)
        slots = self.slots or min(len(rows_of), MOST_SLOTS)
        shares_of = []  # for each class, its rows in each slot
        for rows in rows_of:
            proportions = rng.dirichlet(np.full(slots, self.concentration))
            cuts = (proportions.cumsum()[:-1] * len(rows)).astype(int)
            shares_of.append(np.split(rows, cuts))
        runs = []
        for slot in range(slots):
            for position in rng.permutation(len(shares_of)):
                runs.append(shares_of[position][slot])
        return np.concatenate(runs)


@final
@dataclass(frozen=True, kw_only=True)
class Sorted(Stream):
    """One domain after another, inside which each class comes once, as a whole.

    The order of classes, and that of the samples of a class, are drawn for each domain.
    """

    name: ClassVar[str] = "sorted"

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """All samples, domain by domain, class by class."""
        return self._one_after_another(domains, _class_by_class)


def _class_by_class(labels: Labels, rng: Generator) -> Rows:
    """The rows of one domain, all of a class together."""
    if len(labels) == 0:
        return labels
    rows_of = _rows_by_class(labels, rng)
    return np.concatenate([rows_of[position] for position in rng.permutation(len(rows_of))])


@final
@dataclass(frozen=True, kw_only=True)
class OneClass(Stream):
    """One domain after another, of which only the samples of a single class arrive.

    The seed says which class: that in place ``seed`` among the classes that the domain has, counted round. So as many
    seeds as there are classes meet each of them once.

    Args:
        seed: of the class and of the order.
    """

    name: ClassVar[str] = "one_class"

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """The samples of the class, domain by domain, shuffled inside."""
        return self._one_after_another(domains, self._keep_class)

    def _keep_class(self, labels: Labels, rng: Generator) -> Rows:
        """The rows of one domain that have the class, shuffled."""
        if len(labels) == 0:
            return labels
        rows_of = _rows_by_class(labels, rng)
        return rows_of[self.seed % len(rows_of)]


def _rows_by_class(labels: Labels, rng: Generator) -> list[Rows]:
    """The rows of each class that occurs, shuffled."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
