"""Streams that differ in the order and frequency of classes. They use labels only for the order of arrival."""

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

MOST_SLOTS = 100  # unless the user sets a number


@final
@dataclass(frozen=True, kw_only=True)
class LabelShift(Stream):
    """One domain after another, with classes of unequal frequency: a long tail.

    Classes are ranked from 0 to K - 1, at random for each domain. Of the class with rank r arrive
    ``imbalance ** (-r / (K - 1))`` times as many samples as of the first class, rounded down, but at least one. As many
    samples arrive as these proportions allow; the others are left out, and ``left_out`` counts them.

    Paper: Cui et al., "Class-balanced loss based on effective number of samples", CVPR 2019, for the exponential tail.

    Args:
        imbalance: how many times as frequent the first class is as the last, at least 1; with 1, all are equal.
        seed: decides all random numbers.
    """

    name: ClassVar[str] = "label_shift"

    imbalance: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.imbalance < inf:
            raise DataError(f"imbalance must be at least 1 and finite, got {self.imbalance}")

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """Returns the samples that are kept, domain by domain, shuffled within each domain."""
        return self._one_after_another(domains, self._keep_tail)

    def _keep_tail(self, labels: Labels, rng: Generator) -> Rows:
        """Returns the rows of one domain that are kept, shuffled."""
        if len(labels) == 0:
            return labels
        rows_by_class = _rows_by_class(labels, rng)
        ranks = rng.permutation(len(rows_by_class))
        last_rank = max(len(rows_by_class) - 1, 1)  # 1 for a single class, so as not to divide by 0
        shares = self.imbalance ** (-ranks / last_rank)  # relative to the size of the first class
        # No class may need more samples than it has, so the scarcest one, relative to its share, limits the first.
        first_size = min(len(rows) / share for rows, share in zip(rows_by_class, shares, strict=True))
        counts = np.floor(first_size * shares + 1e-9).astype(int)  # a rounding error must not cost a sample
        counts = np.maximum(counts, 1)
        kept = [rows[:count] for rows, count in zip(rows_by_class, counts, strict=True)]
        return rng.permutation(np.concatenate(kept))


@final
@dataclass(frozen=True, kw_only=True)
class Correlated(Stream):
    """One domain after another, in which samples of the same class come together, like the frames of a film.

    Time is divided into slots. Each class is divided among the slots in proportions drawn from a symmetric Dirichlet
    distribution; within a slot, classes come one after another in random order. With a concentration near 0, each class
    is a single run. With a high one, each slot has an equal share of every class. Then batches look independent if
    there are many slots; if there are few, each share is still a run.

    Paper: Yuan et al., "Robust test-time adaptation in dynamic scenarios" (RoTTA), CVPR 2023, after Gong et al.,
    "NOTE: robust continual test-time adaptation against temporal correlation", NeurIPS 2022.
    Differs from the published code: the samples of a class are shuffled before they are divided.

    Args:
        concentration: of the Dirichlet distribution, above 0; RoTTA and NOTE use 0.1.
        slots: the number of slots; by default the number of classes in the domain, at most 100.
        seed: decides all random numbers.
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
        """Returns all samples, domain by domain, slot by slot, class by class."""
        return self._one_after_another(domains, self._slot_by_slot)

    def _slot_by_slot(self, labels: Labels, rng: Generator) -> Rows:
        """Returns the rows of one domain, slot by slot."""
        if len(labels) == 0:
            return labels
        rows_by_class = _rows_by_class(labels, rng)
        slots = self.slots or min(len(rows_by_class), MOST_SLOTS)
        slots_by_class = []  # for each class, its rows in each slot
        for rows in rows_by_class:
            proportions = rng.dirichlet(np.full(slots, self.concentration))
            cuts = (proportions.cumsum()[:-1] * len(rows)).astype(int)
            slots_by_class.append(np.split(rows, cuts))
        runs = []
        for slot in range(slots):
            for position in rng.permutation(len(slots_by_class)):
                runs.append(slots_by_class[position][slot])
        return np.concatenate(runs)


@final
@dataclass(frozen=True, kw_only=True)
class Sorted(Stream):
    """One domain after another, in which all samples of a class come together.

    The order of classes, and of the samples within a class, is random for each domain.
    """

    name: ClassVar[str] = "sorted"

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """Returns all samples, domain by domain, class by class."""
        return self._one_after_another(domains, _class_by_class)


def _class_by_class(labels: Labels, rng: Generator) -> Rows:
    """Returns the rows of one domain, all of a class together."""
    if len(labels) == 0:
        return labels
    rows_by_class = _rows_by_class(labels, rng)
    order = rng.permutation(len(rows_by_class))
    return np.concatenate([rows_by_class[position] for position in order])


@final
@dataclass(frozen=True, kw_only=True)
class OneClass(Stream):
    """One domain after another, with the samples of only a single class.

    The class is number ``seed`` of those in the domain, modulo their number. So with as many consecutive seeds as there
    are classes, each class is used once.

    Args:
        seed: decides the class and the order.
    """

    name: ClassVar[str] = "one_class"

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """Returns the samples of the class, domain by domain, shuffled within each domain."""
        return self._one_after_another(domains, self._keep_class)

    def _keep_class(self, labels: Labels, rng: Generator) -> Rows:
        """Returns the rows of one domain that have the class, shuffled."""
        if len(labels) == 0:
            return labels
        rows_by_class = _rows_by_class(labels, rng)
        return rows_by_class[self.seed % len(rows_by_class)]


def _rows_by_class(labels: Labels, rng: Generator) -> list[Rows]:
    """Returns the rows of each class that occurs, shuffled."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
