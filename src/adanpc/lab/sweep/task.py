"""Tasks: the smallest pieces of work that are recorded, as values with a stable id."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from adanpc.lab.adapt import find
from adanpc.lab.data.streams import STREAMS
from adanpc.lab.sweep.adaptation import adapt
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.scene import Scene
from adanpc.lab.sweep.subjects import ALL, Extent, Subject, Trained, Workspace, subject_of
from adanpc.lab.train.algorithm import Algorithm
from adanpc.lab.train.registry import known
from adanpc.lab.train.search import Choice, draw

STARTING = 2.0  # seconds until anything is seen: data are read, models built
FEATURES = 1e-3  # seconds a sample of methods that see features
UPDATE = 4  # forward passes that a method's update of an image is worth
SHARED = 4  # tasks that use the same features, about


class Task(ABC):
    """Work with one record; the same task gives the same record, up to times."""

    kind: ClassVar[str]

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """All that decides the record, as JSON has it."""

    @abstractmethod
    def run(self, workspace: Workspace) -> dict[str, Any]:
        """The record."""

    @cached_property
    def id(self) -> str:
        """The same for equal tasks, on every machine."""
        text = json.dumps({"kind": self.kind, **self.document()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def data(self) -> tuple[str, ...]:
        """The data sets that it reads, by name."""
        return ()

    def missing(self, workspace: Workspace) -> list[str]:
        """The domains that it needs and that a data set here lacks, with its name."""
        return []

    @abstractmethod
    def effort(self, costs: CostModel) -> float:
        """About how many seconds it takes on one core, without the task that comes first."""

    def prerequisite(self) -> Task | None:
        """A task that must be finished before this one, if any."""
        return None


@dataclass(frozen=True)
class Train(Task):
    """Training of a model; its record has every evaluation on the way."""

    subject: Trained

    kind: ClassVar[str] = "train"

    def document(self) -> dict[str, Any]:
        """The spec."""
        return {"spec": self.subject.spec.complete().document()}

    def data(self) -> tuple[str, ...]:
        """That of the spec."""
        return (self.subject.spec.data,)

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Every evaluation."""
        return {"evaluations": self.subject.run(workspace).records()}

    def effort(self, costs: CostModel) -> float:
        """Steps, and evaluations of held-out parts, for which a vote encodes the source anew."""
        spec = self.subject.spec.complete()
        sizes = costs.sizes(spec.data, spec.seed, spec.images)
        sources = len(sizes) - len(spec.targets)
        learned = spec.steps * spec.batch * sources
        evaluations = math.ceil(spec.steps / spec.every)
        held_out = sum(sizes.values()) / 5
        tested = evaluations * held_out + sum(sizes[name] for name in spec.targets)
        if known(spec.algorithm).source_vote is not Algorithm.source_vote:
            training_images = sum(size for name, size in sizes.items() if name not in spec.targets) * 4 / 5
            tested += evaluations * training_images
        return STARTING + learned * costs.step(spec.encoder) + tested * costs.forward(spec.encoder)


@dataclass(frozen=True)
class Adapt(Task):
    """One method on one stream, see ``adaptation.adapt``.

    Args:
        subject: the source model.
        method: by name.
        batch: samples that arrive together.
        stream: by name.
        settings: of the method.
        extent: of the data.
        seed: of the order of arrival and of what the method draws.
    """

    subject: Subject
    method: str
    batch: int = 32
    stream: str = "iid"
    settings: Mapping[str, Any] = field(default_factory=dict)
    extent: Extent = ALL
    seed: int = 0

    kind: ClassVar[str] = "adapt"

    def document(self) -> dict[str, Any]:
        """Every field."""
        return {
            "subject": self.subject.document(),
            "method": self.method,
            "batch": self.batch,
            "stream": self.stream,
            "settings": dict(self.settings),
            "extent": self.extent.document(),
            "seed": self.seed,
        }

    def data(self) -> tuple[str, ...]:
        """Those of the subject."""
        return self.subject.reads()

    def missing(self, workspace: Workspace) -> list[str]:
        """Those that the subject needs."""
        return self.subject.missing(workspace)

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """What the stream showed."""
        scene = scene_of(self.subject, workspace, self.extent)
        return adapt(scene, self.method, STREAMS[self.stream](seed=self.seed), self.batch, self.settings, self.seed)

    def effort(self, costs: CostModel) -> float:
        """Features of all images, once, and the method on each target image and each recalled one."""
        reading = self.subject.reading()
        method = find(self.method)
        visits = 1 + (len(reading.targets) if self.stream == "successive" else 1)  # before the stream and after
        images = costs.target_images(reading, self.extent) + visits * costs.recalled_images(reading, self.extent)
        each = UPDATE * method.passes * costs.forward(reading.encoder)
        if method.sees == "features":
            each = FEATURES
        return STARTING + costs.features(reading, self.extent) / SHARED + images * each

    def prerequisite(self) -> Task | None:
        """Training, if the model is not published."""
        return Train(self.subject) if isinstance(self.subject, Trained) else None


def scene_of(subject: Subject, workspace: Workspace, extent: Extent) -> Scene:
    """The scene of a subject; that of the last call is kept."""
    return _scene(json.dumps(subject.document()), workspace, extent)


@lru_cache(maxsize=1)  # methods on the same scene come one after another
def _scene(subject: str, workspace: Workspace, extent: Extent) -> Scene:
    return subject_of(json.loads(subject)).scene(workspace, extent)


def drawn(method: str, trial: int, seed: int) -> dict[str, Any]:
    """Settings of a method for one trial of a random search over its grid; trial 0 keeps the defaults."""
    space = {name: Choice(tuple(values)) for name, values in find(method).grid.items()}
    return draw(space, trial, seed)
