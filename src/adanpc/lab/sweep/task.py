"""Tasks: the smallest pieces of work that get a record, as values with a stable id."""

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

MISSING = "missing"  # the field that says why a task could not be done now, instead of a record

# Rough costs, for estimates. They need only be of the right size: a forecast corrects them by the times of finished
# tasks.
STARTING = 2.0  # seconds to read data and build models
FEATURES = 1e-3  # seconds per sample of methods that see features
UPDATE = 4  # forward passes that an answer of a method costs that sees images and does not declare more


class Task(ABC):
    """A piece of work with one record; the same task always gives the same record, except for times."""

    kind: ClassVar[str]

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Everything that decides the record, as JSON."""

    @abstractmethod
    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Does the work and returns the record."""

    @cached_property
    def id(self) -> str:
        """A hash that is the same for equal tasks on every machine."""
        text = json.dumps({"kind": self.kind, **self.document()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def data(self) -> tuple[str, ...]:
        """The names of the data sets that the task reads."""
        return ()

    def needs(self) -> tuple[str, ...]:
        """The names of those of them that the task cannot do without."""
        return self.data()

    def missing(self, workspace: Workspace) -> list[str]:
        """The domains that the task needs but that are missing here, each with its data set."""
        return []

    @property
    def like(self) -> str:
        """What the task is called together with those whose times foretell its own."""
        return self.kind

    @abstractmethod
    def effort(self, costs: CostModel) -> float:
        """About how many seconds the task takes on one core, without its prerequisite and without what it shares."""

    def shared(self, costs: CostModel) -> Mapping[str, float]:
        """The seconds of work that is done once for all tasks that need it, by what the work is."""
        return {}

    def prerequisite(self) -> Task | None:
        """A task that must be finished before this one, if any."""
        return None


@dataclass(frozen=True)
class Train(Task):
    """Train a model; the record has every evaluation along the way."""

    subject: Trained

    kind: ClassVar[str] = "train"

    def document(self) -> dict[str, Any]:
        """The spec."""
        return {"spec": self.subject.spec.complete().document()}

    def data(self) -> tuple[str, ...]:
        """The data set of the spec."""
        return (self.subject.spec.data,)

    @property
    def like(self) -> str:
        """The same algorithm."""
        return f"{self.kind} {self.subject.spec.algorithm}"

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Every evaluation."""
        return {"evaluations": self.subject.run(workspace).records()}

    def effort(self, costs: CostModel) -> float:
        """Training steps, and evaluations on held-out images."""
        spec = self.subject.spec.complete()
        sizes = costs.sizes(spec.data, spec.seed, spec.images)
        sources = len(sizes) - len(spec.targets)
        learned = spec.steps * spec.batch * sources
        evaluations = math.ceil(spec.steps / spec.every)
        held_out = sum(sizes.values()) / 5
        tested = evaluations * held_out + sum(sizes[name] for name in spec.targets)
        # An algorithm that answers by a vote encodes its training images again for each evaluation.
        if known(spec.algorithm).source_vote is not Algorithm.source_vote:
            source_images = sum(size for name, size in sizes.items() if name not in spec.targets)
            training_images = source_images * 4 / 5
            tested += evaluations * training_images
        return STARTING + learned * costs.step(spec.encoder) + tested * costs.forward(spec.encoder)


@dataclass(frozen=True)
class Adapt(Task):
    """Run one method on one stream, see ``adaptation.adapt``.

    Args:
        subject: the source model.
        method: the name of the method.
        batch: samples that arrive together.
        stream: the name of the order of arrival.
        settings: hyper-parameters of the method.
        extent: how much of the data is used.
        seed: seeds the order of arrival and what the method draws.
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
        """The data sets of the subject."""
        return self.subject.reads()

    def needs(self) -> tuple[str, ...]:
        """Those that the subject cannot do without."""
        return self.subject.needs()

    def missing(self, workspace: Workspace) -> list[str]:
        """The domains that the subject needs but that are missing here."""
        return self.subject.missing(workspace)

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """The record of ``adaptation.adapt``."""
        scene = scene_of(self.subject, workspace, self.extent)
        stream = STREAMS[self.stream](seed=self.seed)
        return adapt(scene, self.method, stream, self.batch, self.settings, self.seed)

    @property
    def like(self) -> str:
        """The same method in batches of the same size."""
        return f"{self.kind} {self.method} {self.batch}"

    def effort(self, costs: CostModel) -> float:
        """Runs the method on each target image and on the held-out source images."""
        reading = self.subject.reading()
        method = find(self.method)
        # The source is tested before the stream and after it, or after each domain of a successive stream.
        source_tests = 2
        if self.stream == "successive":
            source_tests = 1 + len(reading.targets)
        recalled = source_tests * costs.recalled_images(reading, self.extent)
        images = costs.target_images(reading, self.extent) + recalled
        each = FEATURES
        if method.sees == "images":
            each = max(UPDATE, method.passes) * costs.forward(reading.encoder)
        return images * each

    def shared(self, costs: CostModel) -> Mapping[str, float]:
        """The scene, and the features of its images."""
        scene = json.dumps([self.subject.document(), self.extent.document()], sort_keys=True)
        return {scene: STARTING, **costs.encoding(self.subject.reading(), self.extent)}

    def prerequisite(self) -> Task | None:
        """The training of the model; None for a published one."""
        return Train(self.subject) if isinstance(self.subject, Trained) else None


def scene_of(subject: Subject, workspace: Workspace, extent: Extent) -> Scene:
    """The scene of a subject; the scene of the last call is kept."""
    return _scene(json.dumps(subject.document()), workspace, extent)


@lru_cache(maxsize=1)  # one is enough: methods on the same scene are run one after another
def _scene(subject: str, workspace: Workspace, extent: Extent) -> Scene:
    return subject_of(json.loads(subject)).scene(workspace, extent)


def drawn(method: str, trial: int, seed: int) -> dict[str, Any]:
    """The settings of a method in one trial of a random search over its grid; trial 0 keeps the defaults."""
    space = {name: Choice(tuple(values)) for name, values in find(method).grid.items()}
    return draw(space, trial, seed)
