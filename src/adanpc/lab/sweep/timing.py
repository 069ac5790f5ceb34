"""Times of test-time methods, measured in turns within one run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import torch

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt import ADAPTERS, Adapter
from adanpc.lab.sweep.adaptation import encoder_ms, extra_bytes
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.scene import Scene
from adanpc.lab.sweep.subjects import Extent, Trained, Workspace
from adanpc.lab.sweep.task import BY_COPIES, Task, Train
from adanpc.progress import track

ROUNDS = 5
FEW = 2  # images for methods that look at many copies of each


@dataclass(frozen=True)
class Timing(Task):
    """The time of each method for the same images, round after round, so that all meet the same machine.

    Args:
        subject: the source model.
        methods: by name.
        batch: images that arrive together.
        images: of each round.
        settings: of some methods: pairs of a name and its settings.
    """

    subject: Trained
    methods: tuple[str, ...]
    batch: int
    images: int
    settings: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    kind: ClassVar[str] = "time"

    def document(self) -> dict[str, Any]:
        """Every field."""
        own = {name: dict(values) for name, values in self.settings}
        fields = {"methods": list(self.methods), "batch": self.batch, "images": self.images, "settings": own}
        return {"subject": self.subject.document(), **fields}

    def data(self) -> tuple[str, ...]:
        """Those of the subject."""
        return self.subject.reads()

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Milliseconds an image beside the encoder, in all, and megabytes, of each method that takes the model."""
        scene = self.subject.scene(workspace, Extent(images=self.images, recalled=self.images))
        adapters, refused = {}, {}
        for method in self.methods:
            try:
                adapters[method] = ADAPTERS[method](scene.source, **dict(self.settings).get(method, {}))
                self._round(scene, method, adapters[method])  # warms up
            except AdaNPCError as error:
                adapters.pop(method, None)
                refused[method] = str(error)
        rounds: dict[str, list[float]] = {method: [] for method in adapters}
        encoder = []
        for _ in track(range(ROUNDS), f"timing in batches of {self.batch}"):
            encoder.append(encoder_ms(scene, self.batch))
            for method, adapter in adapters.items():
                rounds[method].append(self._round(scene, method, adapter))
        base = median(encoder)
        return {
            "methods": {method: _entry(adapters[method], each, base) for method, each in rounds.items()},
            "encoder_ms": base,
            "rows": len(scene.source.labels),
            "dim": scene.source.model.dim,
            "threads": torch.get_num_threads(),
            "refused": refused,
        }

    def _round(self, scene: Scene, method: str, adapter: Adapter) -> float:
        """Milliseconds an image, from a fresh start."""
        adapter.reset()
        domain = scene.seen(scene.targets[0], adapter.sees)
        rows = torch.arange(min(len(domain), FEW) if method in BY_COPIES else len(domain))
        batches = [domain.take(part) for part in rows.split(self.batch)]
        start = time.perf_counter()
        for batch in batches:
            adapter.step(batch)
        return 1000 * (time.perf_counter() - start) / len(rows)

    def effort(self, costs: CostModel) -> float:
        """A guess: most time goes into methods that look at copies."""
        encoder = self.subject.spec.complete().encoder
        return 60 + (ROUNDS + 1) * self.images * len(self.methods) * 8 * costs.forward(encoder)

    def first(self) -> Task:
        """Training."""
        return Train(self.subject)


def _entry(adapter: Adapter, rounds: list[float], encoder: float) -> dict[str, Any]:
    """Methods that see images run the encoder themselves: their own share is what is left without one pass."""
    each = median(rounds)
    total = each if adapter.sees == "images" else each + encoder
    beside = each if adapter.sees == "features" else max(0.0, each - encoder)
    return {"ms": beside, "total_ms": total, "rounds": rounds, "mb": extra_bytes(adapter) / 1e6}
