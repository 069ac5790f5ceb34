"""Streams that differ in how domains follow each other."""

from __future__ import annotations

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
        return self._each(domains, shuffled)


@final
@dataclass(frozen=True, kw_only=True)
class Successive(Stream):
    """One domain after another, in the order of ``Iid``; but a method goes on with what it has become.

    Paper: Zhang et al., "AdaNPC", ICML 2023, successive adaptation.
    """

    name: ClassVar[str] = "successive"

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """All samples, domain by domain, shuffled inside."""
        return self._each(domains, shuffled)


@final
@dataclass(frozen=True, kw_only=True)
class Mixed(Stream):
    """All domains shuffled together."""

    name: ClassVar[str] = "mixed"
    mixes: ClassVar[bool] = True

    def order(self, domains: Sequence[Domain]) -> Tensor:
        """All samples in one shuffle."""
        order = self._each(domains, shuffled)
        return order[torch.from_numpy(default_rng(seed_of("mixed", self.seed)).permutation(len(order)))]


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
        order = self._each(domains, shuffled)
        parts = order.split([len(domain) for domain in domains])
        pieces = [order[:0]]
        for *climb, top in _climbs(domains):
            up, down = [], []
            for step in climb:
                half = (len(parts[step]) + 1) // 2
                up.append(parts[step][:half])
                down.append(parts[step][half:])
            pieces += [*up, parts[top], *reversed(down)]
        return torch.cat(pieces)


def _climbs(domains: Sequence[Domain]) -> list[list[int]]:
    """For each corruption, the positions of its domains from the lowest severity to the highest."""
    found: dict[str, list[tuple[int, int]]] = {}
    for position, domain in enumerate(domains):
        parts = re.fullmatch(r"(.+)-(\d+)", domain.name)
        if parts is None:
            raise DataError(f"Gradual needs domains named like 'fog-3', got {domain.name!r}; use Successive")
        found.setdefault(parts[1], []).append((int(parts[2]), position))
    return [[position for _, position in sorted(steps)] for steps in found.values()]
