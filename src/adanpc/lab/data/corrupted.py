"""A domain under every corruption; images are generated when they are needed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from torch import Tensor

from adanpc.lab.data.corruptions import CORRUPTIONS, EXTRA, FROST_NOTICE, corrupt
from adanpc.lab.data.domain import Domain, Images
from adanpc.lab.seeds import seed_of
from adanpc.version import __version__

SEVERITIES = (1, 2, 3, 4, 5)
CONDITIONS = tuple((corruption, severity) for corruption in (*CORRUPTIONS, *EXTRA) for severity in SEVERITIES)
STANDARD = len(SEVERITIES) * len(CORRUPTIONS)  # the number of standard conditions; the rest were published for tuning
GENERATION = 2  # raised whenever a corruption gives other bytes, so that cached results of the old ones are not reused
MADE = f"made here, since the published files are missing; {FROST_NOTICE}"


def part_of(conditions: Collection[tuple[str, int]]) -> str:
    """Returns a clause about how many standard domains a published copy has; empty if it has all of them."""
    standard = sum(corruption in CORRUPTIONS for corruption, _ in conditions)
    if standard == STANDARD:
        return ""
    return f"{standard} of the {STANDARD} standard domains are in this copy"


def title(corruption: str, severity: int) -> str:
    """Returns the name of the domain with this condition, such as ``fog-5``."""
    return f"{corruption}-{severity}"


class Corrupted:
    """Images under one corruption, each generated when it is needed.

    Random numbers depend only on the seed, the condition and the row, so an image is the same whenever and wherever it
    is generated.

    Args:
        images: the clean images.
        corruption: one of ``CORRUPTIONS`` or ``EXTRA``.
        severity: 1 to 5.
        seed: decides all random numbers.
    """

    def __init__(self, images: Tensor | Images, corruption: str, severity: int, seed: int) -> None:
        self.images = images
        self.corruption = corruption
        self.severity = severity
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        rng = np.random.default_rng(seed_of(self.seed, self.corruption, self.severity, index))
        return corrupt(self.images[index], self.corruption, self.severity, rng)


def corrupted(domain: Domain, seed: int) -> tuple[Domain, ...]:
    """Returns the domain under each of the ``CONDITIONS``; nothing is computed before an image is needed."""
    clean = domain.digest()
    domains = []
    for corruption, severity in CONDITIONS:
        images = Corrupted(domain.images, corruption, severity, seed)
        # All that decides the bytes: caches of features compare this text instead of the images.
        version = f"{clean} {corruption} {severity} {seed} {GENERATION} {__version__}"
        domains.append(replace(domain, name=title(corruption, severity), images=images, version=version))
    return tuple(domains)
