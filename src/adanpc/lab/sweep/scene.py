"""What a test-time method meets: a source model with what it knows, targets, and the source to come back to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from adanpc.lab.adapt import Source
from adanpc.lab.data.domain import Domain, join, some
from adanpc.lab.networks.features import features
from adanpc.lab.train.assemble import load_algorithm, splits
from adanpc.lab.train.run import Run

RECALLED = 1000  # held-out source images at most that are answered before and after the stream


@dataclass(frozen=True)
class Scene:
    """A source model and what it knows, the targets that it meets, and held-out images of both.

    Args:
        source: what adapters are made of.
        targets: four fifths of each target domain, with the model's transform.
        recalled: held-out images of each source domain.
        held: the other fifth of each target, to select by; or none.
        cache: a folder for features, or None.
        times: milliseconds of the encoder by batch size, once they were measured.
    """

    source: Source
    targets: tuple[Domain, ...]
    recalled: tuple[Domain, ...]
    held: tuple[Domain, ...] = ()
    cache: Path | None = None
    times: dict[int, float] = field(default_factory=dict)

    def seen(self, domain: Domain, sees: str) -> Domain:
        """The domain as a method sees it: its images, or its features (n, D), which are computed once if cached."""
        if sees == "images":
            return domain
        return Domain(domain.name, features(self.source.model, domain, cache=self.cache), domain.labels)


def evenly(domains: Sequence[Domain], count: int | None, seed: int) -> tuple[Domain, ...]:
    """About so many samples in all, as many of each domain; None takes all."""
    return tuple(some(domain, None if count is None else -(-count // len(domains)), seed) for domain in domains)


def scene_of(
    run: Run,
    *,
    which: str = "best",
    images: int | None = None,
    rows: int | None = None,
    recalled: int | None = RECALLED,
    device: str = "cpu",
) -> Scene:
    """The scene of a trained run.

    Args:
        run: made by ``adanpc train``.
        which: the best or the last model.
        images: of each target at most, drawn by the run's seed, and a quarter as many to select by; None takes all.
        rows: of each source domain in the bank at most, drawn likewise.
        recalled: held-out source images at most, as many of each domain; None takes all.
        device: where the model computes.
    """
    algorithm, cache, seed = load_algorithm(run, which).to(device), run.folder / "features", run.spec.seed
    parts = splits(run, algorithm.model.preprocessing)
    sources = [part for name, part in parts.items() if name not in run.spec.targets]
    learned = [some(part.large, rows, seed) for part in sources]
    known = join("source", learned)
    source = Source(
        algorithm.model,
        features(algorithm.model, known, cache=cache),
        known.labels,
        torch.cat([torch.full((len(part),), place) for place, part in enumerate(learned)]),
        known.take,
        float(run.spec.hyper["lr"]),
        getattr(algorithm, "rotation_head", None),
    )
    targets = [parts[name] for name in run.spec.targets]
    return Scene(
        source,
        tuple(some(part.large, images, seed) for part in targets),
        evenly([part.small for part in sources], recalled, seed),
        tuple(some(part.small, None if images is None else -(-images // 4), seed) for part in targets),
        cache,
    )
