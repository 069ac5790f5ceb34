"""What work will cost on this machine, from short measurements of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from adanpc.files import replace
from adanpc.lab.networks import build
from adanpc.lab.sweep.shape import listed, named, positive, read_checked
from adanpc.lab.sweep.subjects import Extent, Reading, Workspace

IMAGES = 8  # in a measurement
FILE = "rates.json"
RATES = named(lambda rates: listed(positive)(rates) and len(rates) == 2)


class CostModel:
    """What work costs: the time of an image through an encoder, timed once for a folder, and numbers of images.

    Args:
        workspace: where the data is, and where times are kept.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    @cached_property
    def rates(self) -> dict[str, list[float]]:
        """Encoder to seconds per image, forward and in a training step."""
        path = self.workspace.folder / FILE
        return read_checked(path, RATES, "delete it, and the encoders are timed again") or {}

    def forward(self, encoder: str) -> float:
        """Seconds of an image from input to logits."""
        forward, _ = self._rate(encoder)
        return forward

    def step(self, encoder: str) -> float:
        """Seconds of an image in a training step."""
        _, step = self._rate(encoder)
        return step

    def sizes(self, data: str, seed: int, images: int | None) -> dict[str, int]:
        """Domain to the number of its images, at most so many."""
        return {name: _at_most(images, size) for name, size in self.workspace.sizes(data, seed).items()}

    def target_images(self, reading: Reading, extent: Extent) -> int:
        """How many target images are answered."""
        sizes = self.sizes(reading.data, reading.seed, reading.images)
        return sum(_at_most(extent.images, sizes[name]) for name in reading.targets)

    def source_images(self, reading: Reading, extent: Extent) -> int:
        """How many source images are encoded; none if rows of the head stand in for a domain that is not here."""
        if reading.known is not None:
            data, name = reading.known
            counts = [self.sizes(data, reading.seed, reading.images).get(name, 0)]
        else:
            sizes = self.sizes(reading.data, reading.seed, reading.images)
            counts = [size for name, size in sizes.items() if name not in reading.targets]
        return sum(_at_most(extent.rows, size) for size in counts)

    def recalled_images(self, reading: Reading, extent: Extent) -> int:
        """How many held-out source images are answered each time that the source is tested."""
        held_out = self.source_images(reading, Extent()) // 5
        if held_out == 0 and reading.known is not None:
            held_out = self.workspace.count(reading.known[0]) // 5
        return _at_most(extent.recalled, held_out)

    def features(self, reading: Reading, extent: Extent) -> float:
        """Seconds until all images of source and target are encoded."""
        images = self.source_images(reading, extent) + self.target_images(reading, extent)
        return images * self.forward(reading.encoder)

    def _rate(self, encoder: str) -> list[float]:
        if encoder not in self.rates:
            self.rates[encoder] = measured(encoder)
            self._save()
        return self.rates[encoder]

    def _save(self) -> None:
        def write(new: Path) -> None:
            new.write_text(json.dumps(self.rates))

        self.workspace.folder.mkdir(parents=True, exist_ok=True)
        replace(self.workspace.folder / FILE, write)


def _at_most(limit: int | None, number: int) -> int:
    return number if limit is None else min(limit, number)


def measured(encoder: str) -> list[float]:
    """Seconds per image, forward and in a training step, on one thread: sweeps give every process one."""
    channels = 1 if encoder == "convnet" else 3  # digits are gray
    model = build(encoder, 10, channels=channels)
    size = model.preprocessing.size or 28
    images = torch.zeros(IMAGES, channels, size, size)
    labels = torch.zeros(IMAGES, dtype=torch.int64)
    threads = torch.get_num_threads()
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
