"""Streams that differ in the order of domains."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from numpy.random import default_rng
from torch import Tensor

from adanpc.lab.data.domain import DataError, Domain
from adanpc.lab.data.streams.stream import Stream, shuffled
from adanpc.lab.seeds import seed_of


@final
@dataclass(frozen=True, kw_only=True)
class Iid(Stream):
    """One domain after another, shuffled; a method is reset before each."""

    name: ClassVar[str] = "iid"
    resets: ClassVar[bool] = True

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """Returns all samples, domain by domain, shuffled within each domain."""
        return self._one_after_another(domains, shuffled)


@final
@dataclass(frozen=True, kw_only=True)
class Successive(Stream):
    """One domain after another, in the same order as in ``Iid``, but a method keeps what it has learned.

    Paper: Zhang et al., "AdaNPC", ICML 2023, successive adaptation.
    """

    name: ClassVar[str] = "successive"

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """Returns all samples, domain by domain, shuffled within each domain."""
        return self._one_after_another(domains, shuffled)


@final
@dataclass(frozen=True, kw_only=True)
class Mixed(Stream):
    """All domains shuffled together."""

    name: ClassVar[str] = "mixed"
    mixes: ClassVar[bool] = True

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """Returns all samples of all domains, shuffled."""
        order = self._one_after_another(domains, shuffled)
        rng = default_rng(seed_of("mixed", self.seed))
        return order[torch.from_numpy(rng.permutation(len(order)))]


@final
@dataclass(frozen=True, kw_only=True)
class Recurring(Stream):
    """All domains one after another, several times, so that each domain comes back after the others.

    Every sample arrives once: the samples of a domain are divided among its visits, in parts whose sizes differ by at
    most one. A visit without samples is skipped.

    Paper: Hoang, Vo and Do, "Persistent test-time adaptation in recurring testing scenarios" (PeTTA), NeurIPS 2024.
    Differs from the published code: there, all samples of a domain come at every visit, so a bank would be asked about
    images that it already holds.

    Args:
        visits: how often each domain comes.
        seed: decides all random numbers.
    """

    name: ClassVar[str] = "recurring"

    visits: int = 5

    def __post_init__(self) -> None:
        if self.visits < 1:
            raise DataError(f"visits must be at least 1, got {self.visits}")

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """Returns all samples, visit by visit."""
        order = self._one_after_another(domains, shuffled)
        visits_by_domain = []  # for each domain, its samples in each visit
        for samples in order.split([len(domain) for domain in domains]):
            visits_by_domain.append(samples.tensor_split(self.visits))
        pieces = [order[:0]]  # so that there is something to join if there are no domains
        for visit in range(self.visits):
            pieces.extend(visits[visit] for visits in visits_by_domain)
        return torch.cat(pieces)


@final
@dataclass(frozen=True, kw_only=True)
class Gradual(Stream):
    """One corruption after another, with a severity that rises step by step to the highest and falls again.

    Domains are named like ``fog-3``. Every sample arrives once: of each severity but the highest, half of the samples
    (rounded up) come while the severity rises, and the rest while it falls.

    Paper: Wang et al., "Continual test-time domain adaptation" (CoTTA), CVPR 2022.
    Differs from the published code: there, all samples of a severity come both times.
    """

    name: ClassVar[str] = "gradual"

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """Returns all samples, corruption by corruption, in the order of their first domains."""
        order = self._one_after_another(domains, shuffled)
        samples_by_domain = order.split([len(domain) for domain in domains])
        pieces = [order[:0]]  # so that there is something to join if there are no domains
        for positions in _by_severity(domains):
            *lower, highest = positions
            rising = []
            falling = []
            for position in lower:
                samples = samples_by_domain[position]
                half = math.ceil(len(samples) / 2)
                rising.append(samples[:half])
                falling.append(samples[half:])
            pieces.extend(rising)
            pieces.append(samples_by_domain[highest])
            pieces.extend(reversed(falling))
        return torch.cat(pieces)


def _by_severity(domains: Sequence[Domain]) -> list[list[int]]:
    """Returns, for each corruption, the positions of its domains from the lowest severity to the highest."""
    severities: dict[str, list[tuple[int, int]]] = {}  # for each corruption, severities and positions
    for position, domain in enumerate(domains):
        match = re.fullmatch(r"(?P<corruption>.+)-(?P<severity>\d+)", domain.name)
        if match is None:
            raise DataError(f"Gradual needs domains named like 'fog-3', got {domain.name!r}; use Successive")
        steps = severities.setdefault(match["corruption"], [])
        steps.append((int(match["severity"]), position))
    positions_by_corruption = []
    for steps in severities.values():
        positions_by_corruption.append([position for _, position in sorted(steps)])
    return positions_by_corruption
