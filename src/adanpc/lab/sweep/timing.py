"""Time test-time methods against each other, in turns within one run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import torch

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt import Adapter, find
from adanpc.lab.sweep.adaptation import encoder_ms, extra_bytes
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.scene import Scene
from adanpc.lab.sweep.subjects import Extent, Trained, Workspace
from adanpc.lab.sweep.task import Task, Train
from adanpc.progress import track

ROUNDS = 5
FEW = 2  # images for methods that make many passes per image


@dataclass(frozen=True)
class Timing(Task):
    """Time each method on the same images, in rounds, so that a busy moment of the machine affects all of them.

    Args:
        subject: the source model.
        methods: the names of the methods.
        batch: images that arrive together.
        images: images per round.
        settings: hyper-parameters of some methods, as pairs of a method's name and its settings.
    """

    subject: Trained
    methods: tuple[str, ...]
    batch: int
    images: int
    settings: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    kind: ClassVar[str] = "time"

    def document(self) -> dict[str, Any]:
        """Every field."""
        return {
            "subject": self.subject.document(),
            "methods": list(self.methods),
            "batch": self.batch,
            "images": self.images,
            "settings": {name: dict(values) for name, values in self.settings},
        }

    def data(self) -> tuple[str, ...]:
        """The data sets of the subject."""
        return self.subject.reads()

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """For each method that accepts the model: milliseconds per image without and with the encoder, and memory."""
        scene = self.subject.scene(workspace, Extent(images=self.images, recalled=self.images))
        adapters, refused = self._adapters(scene)
        rounds: dict[str, list[float]] = {method: [] for method in adapters}
        encoder = []
        for _ in track(range(ROUNDS), f"timing in batches of {self.batch}"):
            encoder.append(encoder_ms(scene, self.batch))
            for method, adapter in adapters.items():
                rounds[method].append(self._round(scene, adapter))
        base = median(encoder)
        return {
            "methods": {method: _entry(adapters[method], each, base) for method, each in rounds.items()},
            "encoder_ms": base,
            "rows": len(scene.source.labels),
            "dim": scene.source.model.dim,
            "threads": torch.get_num_threads(),
            "refused": refused,
        }

    def _adapters(self, scene: Scene) -> tuple[dict[str, Adapter], dict[str, str]]:
        """The methods that accept the model, warmed up, and why the others refuse it."""
        adapters = {}
        refused = {}
        settings = dict(self.settings)
        for method in self.methods:
            try:
                adapter = find(method)(scene.source, **settings.get(method, {}))
                self._round(scene, adapter)
            except AdaNPCError as error:
                refused[method] = str(error)
            else:
                adapters[method] = adapter
        return adapters, refused

    def _round(self, scene: Scene, adapter: Adapter) -> float:
        """Milliseconds per image, from a fresh start."""
        adapter.reset()
        domain = scene.seen(scene.targets[0], adapter.sees)
        images = len(domain)
        if adapter.passes > 1:
            images = min(images, FEW)
        rows = torch.arange(images)
        batches = [domain.take(part) for part in rows.split(self.batch)]
        start = time.perf_counter()
        for batch in batches:
            adapter.step(batch)
        return 1000 * (time.perf_counter() - start) / images

    def effort(self, costs: CostModel) -> float:
        """A guess: most of the time goes to methods that make many passes per image."""
        encoder = self.subject.spec.complete().encoder
        answers = (ROUNDS + 1) * self.images * len(self.methods)  # one more round to warm up
        return 60 + answers * 8 * costs.forward(encoder)

    def prerequisite(self) -> Task:
        """The training of the model."""
        return Train(self.subject)


def _entry(adapter: Adapter, rounds: list[float], encoder: float) -> dict[str, Any]:
    """The entry of one method in the record: the median time of its rounds, without and with the encoder."""
    each = median(rounds)
    if adapter.sees == "images":  # it runs the encoder itself, so one pass is subtracted to get its own share
        beside = max(0.0, each - encoder)
        total = each
    else:
        beside = each
        total = each + encoder
    return {"ms": beside, "total_ms": total, "rounds": rounds, "mb": extra_bytes(adapter) / 1e6}
