"""A domain under every corruption, made when it is looked at."""

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
STANDARD = len(SEVERITIES) * len(CORRUPTIONS)  # the first of the conditions; the others were published for tuning
GENERATION = 2  # raised whenever a corruption makes other bytes, so that what was computed from them is not reused
MADE = f"made here, since the published files are missing; {FROST_NOTICE}"


def part_of(conditions: Collection[tuple[str, int]]) -> str:
    """A clause that says how many standard domains a published copy has; empty if it has all."""
    standard = sum(corruption in CORRUPTIONS for corruption, _ in conditions)
    if standard == STANDARD:
        return ""
    return f"{standard} of the {STANDARD} standard domains are in this copy"


def title(corruption: str, severity: int) -> str:
    """The name of the domain with this condition, such as ``fog-5``."""
    return f"{corruption}-{severity}"


class Corrupted:
    """Images under one corruption, each made when it is asked for.

    What is random depends on the seed, the condition and the row alone: an image is the same whenever and wherever it
    is made.

    Args:
        images: the clean images.
        corruption: one of ``CORRUPTIONS`` or ``EXTRA``.
        severity: 1 to 5.
        seed: of everything that is drawn.
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
    """The domain under each of the ``CONDITIONS``; nothing is computed before an image is asked for."""
    clean = domain.digest()
    domains = []
    for corruption, severity in CONDITIONS:
        images = Corrupted(domain.images, corruption, severity, seed)
        version = f"{clean} {corruption} {severity} {seed} {GENERATION} {__version__}"
        domains.append(replace(domain, name=title(corruption, severity), images=images, version=version))
    return tuple(domains)
