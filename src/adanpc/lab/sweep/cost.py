"""What work will cost on this machine, from short measurements of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from adanpc.files import replace
from adanpc.lab.networks import build
from adanpc.lab.sweep.subjects import Extent, Reading, Workspace

IMAGES = 8  # in a measurement
FILE = "rates.json"


class CostModel:
    """Seconds that an image takes through an encoder, measured once for a folder; and how many images there are.

    Args:
        workspace: where data lie and measurements are kept.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    @cached_property
    def rates(self) -> dict[str, list[float]]:
        """Encoder to seconds an image, forward and in a training step."""
        path = self.workspace.folder / FILE
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def forward(self, encoder: str) -> float:
        """Seconds of an image from input to logits."""
        return self._rate(encoder)[0]

    def step(self, encoder: str) -> float:
        """Seconds of an image in a training step."""
        return self._rate(encoder)[1]

    def sizes(self, data: str, seed: int, images: int | None) -> dict[str, int]:
        """Domain to the number of its images, at most so many."""
        found = self.workspace.data(data, seed).domains
        return {domain.name: min(len(domain), images or len(domain)) for domain in found}

    def met(self, reading: Reading, extent: Extent) -> int:
        """How many target images are met."""
        sizes = self.sizes(reading.data, reading.seed, reading.images)
        return sum(min(sizes[name], extent.images or sizes[name]) for name in reading.targets)

    def known(self, reading: Reading, extent: Extent) -> int:
        """How many source images are encoded."""
        if reading.known is not None:
            data, name = reading.known
            counts = [self.sizes(data, reading.seed, reading.images)[name]]
        else:
            sizes = self.sizes(reading.data, reading.seed, reading.images)
            counts = [size for name, size in sizes.items() if name not in reading.targets]
        return sum(min(size, extent.rows or size) for size in counts)

    def recalled(self, reading: Reading, extent: Extent) -> int:
        """How many held-out source images are answered whenever the source is come back to."""
        held = self.known(reading, Extent()) // 5
        return held if extent.recalled is None else min(held, extent.recalled)

    def features(self, reading: Reading, extent: Extent) -> float:
        """Seconds until all images of source and target are encoded."""
        return (self.known(reading, extent) + self.met(reading, extent)) * self.forward(reading.encoder)

    def _rate(self, encoder: str) -> list[float]:
        if encoder not in self.rates:
            self.rates[encoder] = measured(encoder)
            self.workspace.folder.mkdir(parents=True, exist_ok=True)
            replace(self.workspace.folder / FILE, lambda new: _write(new, self.rates))
        return self.rates[encoder]


def measured(encoder: str) -> list[float]:
    """Seconds an image, forward and in a training step, on one thread: sweeps give every process one."""
    channels, threads = (1 if encoder == "convnet" else 3), torch.get_num_threads()
    model = build(encoder, 10, channels=channels)
    size = model.preprocessing.size or 28
    images, labels = torch.zeros(IMAGES, channels, size, size), torch.zeros(IMAGES, dtype=torch.int64)
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            forward = _clock(lambda: model(images))
        step = _clock(lambda: cross_entropy(model(images), labels).backward())
    finally:
        torch.set_num_threads(threads)
    return [forward / IMAGES, step / IMAGES]


def _clock(work: Callable[[], Any]) -> float:
    """The faster of two runs, after one that warms up."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _write(path: Any, rates: dict[str, list[float]]) -> None:
    path.write_text(json.dumps(rates))
