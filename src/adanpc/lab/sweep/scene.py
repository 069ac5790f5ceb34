"""A scene is all that a test-time method is run on: a source model with its bank rows, targets, and held-out images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adanpc.lab.adapt import ADAPTERS, Adapter, Source
from adanpc.lab.adapt.prototypes import head_rows
from adanpc.lab.adapt.reliable import shuffled_patches
from adanpc.lab.data.domain import DataSet, Domain, join, some, split
from adanpc.lab.networks.features import features
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.seeds import seed_of
from adanpc.lab.train.assemble import load_algorithm, splits
from adanpc.lab.train.run import Run

STRANGERS = 64  # images with shuffled patches, which belong to no class, by which confidence is judged
PATCHES = 4  # along each side of such an image
RECALLED = 1000  # the most held-out source images that are answered before and after the stream


@dataclass(frozen=True)
class Scene:
    """A source model and its bank rows, the targets that it adapts to, and held-out images of both.

    Many methods are run on one scene, one after another, so it keeps what does not depend on the method.

    Args:
        source: what adapters are built from.
        targets: four fifths of each target domain, with the model's transform.
        recalled: held-out images of each source domain; none if no source image is here.
        held: the other fifth of each target, by which settings are selected; may be empty.
        cache: a folder for features, or None.
        times: milliseconds per sample of the encoder, by batch size, as far as measured.
        parts: for each domain that was joined from parts, these parts. Features are cached by part, because other
            scenes use the parts, too.
    """

    source: Source
    targets: tuple[Domain, ...]
    recalled: tuple[Domain, ...]
    held: tuple[Domain, ...] = ()
    cache: Path | None = None
    times: dict[int, float] = field(default_factory=dict)
    parts: Mapping[Domain, Sequence[Domain]] = field(default_factory=dict)
    _encoded: dict[Domain, Domain] = field(default_factory=dict)  # images to features

    def seen(self, domain: Domain, sees: str) -> Domain:
        """A domain of the scene as a method sees it: its images, or its features (n, D), which are computed once."""
        if sees == "images":
            return domain
        encoded = self._encoded.get(domain)
        if encoded is None:
            parts = self.parts.get(domain, (domain,))
            rows = [features(self.source.model, part, cache=self.cache) for part in parts]
            encoded = Domain(domain.name, torch.cat(rows), domain.labels)
            self._encoded[domain] = encoded
        return encoded

    @cached_property
    def strangers(self) -> tuple[Domain, Domain] | None:
        """Some images of the targets, and the same images with their patches in random order.

        The images are held-out ones, since a method with a memory is confident about images that it has met. None if
        none are held out, or if images are too small to be cut into patches.
        """
        if not self.held:
            return None
        count = STRANGERS // len(self.held)
        native = torch.cat([domain.take(range(min(count, len(domain)))) for domain in self.held])
        if native.ndim != 4 or min(native.shape[2:]) < PATCHES:
            return None
        labels = torch.zeros(len(native), dtype=torch.int64)
        with torch.random.fork_rng():
            torch.manual_seed(seed_of(0, "strangers"))
            foreign = shuffled_patches(native, PATCHES)
        return Domain("native", native, labels), Domain("foreign", foreign, labels)

    @cached_property
    def frozen_vote(self) -> Adapter:
        """A vote of the source rows that never learns, to compare the answers of other methods with."""
        return ADAPTERS["knn"](self.source)


class Parts(NamedTuple):
    """A domain in two parts: four fifths to learn from or adapt to, and one fifth that is held out."""

    large: Domain
    small: Domain


@dataclass(frozen=True)
class Builder:
    """Builds scenes in the same way for every kind of source model.

    Args:
        sources: the source domains, with the model's transform.
        targets: the target domains, with the model's transform.
        seed: decides which images are drawn where their number is limited.
        cache: a folder for features.
    """

    sources: Sequence[Parts]
    targets: Sequence[Parts]
    seed: int
    cache: Path

    def known(self, rows: int | None, share: float = 1.0) -> list[Domain]:
        """The images that become bank rows: at most ``rows`` from each source domain, and a share of those."""
        result = []
        for part in self.sources:
            domain = some(part.large, rows, self.seed)
            result.append(some(domain, max(1, round(share * len(domain))), self.seed))
        return result

    def scene(self, source: Source, images: int | None, recalled: int | None, *, whole: bool = False) -> Scene:
        """The scene of a source.

        Args:
            source: what adapters are built from.
            images: the most images of each target, plus a quarter as many to select settings by; None takes all.
            recalled: the most held-out source images, shared equally among the domains; None takes all.
            whole: draw the images from the whole target, and hold none back to select settings by.
        """
        if whole:
            return self._whole_scene(source, images, recalled)
        quarter = None if images is None else math.ceil(images / 4)
        return Scene(
            source,
            targets=tuple(some(part.large, images, self.seed) for part in self.targets),
            recalled=self._recalled(recalled),
            held=tuple(some(part.small, quarter, self.seed) for part in self.targets),
            cache=self.cache,
        )

    def _whole_scene(self, source: Source, images: int | None, recalled: int | None) -> Scene:
        """The scene in which no part of a target is held back."""
        targets = []
        parts = {}
        for part in self.targets:
            whole = join(part.large.name, part)
            parts[whole] = part
            targets.append(some(whole, images, self.seed))
        return Scene(source, tuple(targets), self._recalled(recalled), cache=self.cache, parts=parts)

    def _recalled(self, count: int | None) -> tuple[Domain, ...]:
        """Held-out images of each source domain, about ``count`` in all; None takes all."""
        each: int | None = None
        if count is not None and self.sources:
            each = math.ceil(count / len(self.sources))
        return tuple(some(part.small, each, self.seed) for part in self.sources)


def parts_of(domain: Domain, model: SourceModel, seed: int) -> Parts:
    """A domain with the model's transform, split into two parts by the seed."""
    return Parts(*split(domain.with_transform(model.preprocessing), seed))


def source_of(
    model: SourceModel, known: Sequence[Domain], rows: Tensor, lr: float, rotation_head: nn.Module | None = None
) -> Source:
    """What adapters are built from: a model and its source samples.

    Args:
        model: a trained model.
        known: the samples of each source domain.
        rows: (n, D) the features of all of them, one domain after another.
        lr: the learning rate with which the model was trained.
        rotation_head: the head that predicts rotations, if the model was trained with one.
    """
    joined = join("source", known)
    places = [torch.full((len(domain),), place) for place, domain in enumerate(known)]
    return Source(
        model,
        features=rows,
        labels=joined.labels,
        domains=torch.cat(places),
        images=joined.take,
        images_digest=joined.digest(),
        lr=lr,
        rotation_head=rotation_head,
    )


def prototypes_of(model: SourceModel, lr: float) -> Source:
    """What adapters are built from without any source sample: the weight rows of the model's head, one per class."""
    return Source(model, head_rows(model), torch.arange(model.classes), lr=lr, prototypes=True)


def scene_of(
    run: Run,
    *,
    which: str = "best",
    images: int | None = None,
    rows: int | None = None,
    recalled: int | None = RECALLED,
    whole: bool = False,
    device: str = "cpu",
    data: DataSet | None = None,
    others: DataSet | None = None,
) -> Scene:
    """The scene of a trained run.

    Args:
        run: made by ``adanpc train``.
        which: "best" or "last", the model to use.
        images: the most images of each target, drawn by the run's seed, plus a quarter as many to select settings by;
            None takes all.
        rows: the most bank rows from each source domain, drawn by the run's seed; None takes all.
        recalled: the most held-out source images, shared equally among the domains; None takes all.
        whole: hold no part of a target back, see ``Builder.scene``.
        device: where the model computes.
        data: the run's data set, if it has been read already.
        others: images to use instead of the run's targets, labeled by the run's classes.
    """
    algorithm = load_algorithm(run, which).to(device)
    model = algorithm.model
    by_domain = splits(run, model.preprocessing, data)
    parts = {name: Parts(part.large, part.small) for name, part in by_domain.items()}
    if others is None:
        targets = [parts[name] for name in run.spec.targets]
    else:
        targets = [parts_of(domain, model, run.spec.seed) for domain in others.domains]
    builder = Builder(
        sources=[part for name, part in parts.items() if name not in run.spec.targets],
        targets=targets,
        seed=run.spec.seed,
        cache=run.folder / "features",
    )
    known = builder.known(rows)
    encoded = features(model, join("source", known), cache=builder.cache)
    rotation_head = getattr(algorithm, "rotation_head", None)
    source = source_of(model, known, encoded, float(run.spec.hyper["lr"]), rotation_head)
    return builder.scene(source, images, recalled, whole=whole)
