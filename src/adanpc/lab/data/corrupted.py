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

CONDITIONS = tuple((name, severity) for name in (*CORRUPTIONS, *EXTRA) for severity in range(1, 6))
STANDARD = 5 * len(CORRUPTIONS)  # the first of the conditions; the others were published for tuning
MADE = f"made here, since the published files are missing; {FROST_NOTICE}"


def part_of(conditions: Collection[tuple[str, int]]) -> str:
    """A clause that says how many standard domains a published copy has; nothing if it has all."""
    here = sum(corruption in CORRUPTIONS for corruption, _ in conditions)
    return "" if here == STANDARD else f"{here} of the {STANDARD} standard domains are in this copy"


def title(corruption: str, severity: int) -> str:
    """The name of the domain with this condition, such as ``fog-5``."""
    return f"{corruption}-{severity}"


class Corrupted:
    """Images under one corruption, each made when it is asked for.

    Chance depends on the seed, the condition and the row alone: an image is the same whenever and wherever it is made.

    Args:
        images: the clean ones.
        corruption, severity: as ``corrupt`` takes them.
        seed: of all chance.
    """

    def __init__(self, images: Tensor | Images, corruption: str, severity: int, seed: int) -> None:
        self.images, self.corruption, self.severity, self.seed = images, corruption, severity, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        rng = np.random.default_rng(seed_of(self.seed, self.corruption, self.severity, index))
        return corrupt(self.images[index], self.corruption, self.severity, rng)


def corrupted(domain: Domain, seed: int) -> tuple[Domain, ...]:
    """The domain under each of the ``CONDITIONS``; nothing is computed before an image is asked for."""
    clean = domain.digest()
    return tuple(
        replace(
            domain,
            name=title(corruption, severity),
            images=Corrupted(domain.images, corruption, severity, seed),
            source=f"{clean} {corruption} {severity} {seed} {__version__}",
        )
        for corruption, severity in CONDITIONS
    )
