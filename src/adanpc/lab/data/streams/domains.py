"""Streams that differ in how domains follow each other."""

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
    """Each domain by itself, shuffled; a method starts afresh at each."""

    name: ClassVar[str] = "iid"
    resets: ClassVar[bool] = True

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """All samples, domain by domain, shuffled inside."""
        return self._one_after_another(domains, shuffled)


@final
@dataclass(frozen=True, kw_only=True)
class Successive(Stream):
    """One domain after another, in the order of ``Iid``, but a method keeps what it has learned.

    Paper: Zhang et al., "AdaNPC", ICML 2023, successive adaptation.
    """

    name: ClassVar[str] = "successive"

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """All samples, domain by domain, shuffled inside."""
        return self._one_after_another(domains, shuffled)


@final
@dataclass(frozen=True, kw_only=True)
class Mixed(Stream):
    """All domains shuffled together."""

    name: ClassVar[str] = "mixed"
    mixes: ClassVar[bool] = True

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """All samples in one shuffle."""
        order = self._one_after_another(domains, shuffled)
        rng = default_rng(seed_of("mixed", self.seed))
        return order[torch.from_numpy(rng.permutation(len(order)))]


@final
@dataclass(frozen=True, kw_only=True)
class Recurring(Stream):
    """All domains one after another, again and again, so that each comes back after the others.

    Every sample arrives once: the samples of a domain are dealt over its visits, in parts whose sizes differ by one at
    most. A visit for which nothing is left is skipped.

    Paper: Hoang, Vo and Do, "Persistent test-time adaptation in recurring testing scenarios" (PeTTA), NeurIPS 2024.
    Differs from the published code: there, all samples of a domain come at every visit, which makes a bank meet images
    that it holds already.

    Args:
        visits: how often each domain comes.
        seed: of everything that is drawn.
    """

    name: ClassVar[str] = "recurring"

    visits: int = 5

    def __post_init__(self) -> None:
        if self.visits < 1:
            raise DataError(f"visits must be at least 1, got {self.visits}")

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """All samples, visit by visit."""
        order = self._one_after_another(domains, shuffled)
        parts_of = []  # for each domain, its samples in each visit
        for samples in order.split([len(domain) for domain in domains]):
            parts_of.append(samples.tensor_split(self.visits))
        pieces = [order[:0]]
        for visit in range(self.visits):
            pieces.extend(parts[visit] for parts in parts_of)
        return torch.cat(pieces)


@final
@dataclass(frozen=True, kw_only=True)
class Gradual(Stream):
    """One corruption after another, its severity rising step by step to the highest and falling again.

    Domains are named like ``fog-3``. Every sample arrives once: of each severity but the highest, half of the samples
    (rounded up) come on the way up and the rest on the way down.

    Paper: Wang et al., "Continual test-time domain adaptation" (CoTTA), CVPR 2022.
    Differs from the published code: there, all samples of a severity come on both ways.
    """

    name: ClassVar[str] = "gradual"

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """All samples, corruption by corruption in the sequence of their first domains."""
        order = self._one_after_another(domains, shuffled)
        samples_of = order.split([len(domain) for domain in domains])
        pieces = [order[:0]]
        for positions in _by_severity(domains):
            *lower, highest = positions
            way_up = []
            way_down = []
            for position in lower:
                samples = samples_of[position]
                half = math.ceil(len(samples) / 2)
                way_up.append(samples[:half])
                way_down.append(samples[half:])
            pieces.extend(way_up)
            pieces.append(samples_of[highest])
            pieces.extend(reversed(way_down))
        return torch.cat(pieces)


def _by_severity(domains: Sequence[Domain]) -> list[list[int]]:
    """For each corruption, the positions of its domains from the lowest severity to the highest."""
    steps_of: dict[str, list[tuple[int, int]]] = {}  # severity and position
    for position, domain in enumerate(domains):
        match = re.fullmatch(r"(?P<corruption>.+)-(?P<severity>\d+)", domain.name)
        if match is None:
            raise DataError(f"Gradual needs domains named like 'fog-3', got {domain.name!r}; use Successive")
        steps = steps_of.setdefault(match["corruption"], [])
        steps.append((int(match["severity"]), position))
    return [[position for _, position in sorted(steps)] for steps in steps_of.values()]
