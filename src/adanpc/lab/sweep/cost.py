"""Estimates of how long work will take on this machine, from short measurements."""

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

IMAGES = 8  # in the batch on which an encoder is timed
FILE = "rates.json"
RATES = named(lambda rates: listed(positive)(rates) and len(rates) == 2)


class CostModel:
    """Estimates times: seconds per image for an encoder, measured once per folder, and how many images are processed.

    Args:
        workspace: where the data is, and where measured times are kept.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    @cached_property
    def rates(self) -> dict[str, list[float]]:
        """The seconds per image of each encoder: of a forward pass, and of a training step."""
        path = self.workspace.folder / FILE
        return read_checked(path, RATES, "delete it, and the encoders are timed again") or {}

    def forward(self, encoder: str) -> float:
        """Seconds per image from input to logits."""
        forward, _ = self._rate(encoder)
        return forward

    def step(self, encoder: str) -> float:
        """Seconds per image in a training step."""
        _, step = self._rate(encoder)
        return step

    def sizes(self, data: str, seed: int, images: int | None) -> dict[str, int]:
        """The number of images in each domain, where a domain counts for ``images`` at most."""
        sizes = self.workspace.sizes(data, seed)
        return {name: _at_most(images, size) for name, size in sizes.items()}

    def target_images(self, reading: Reading, extent: Extent) -> int:
        """How many target images are answered."""
        sizes = self.sizes(reading.data, reading.seed, reading.images)
        return sum(_at_most(extent.images, sizes[name]) for name in reading.targets)

    def source_images(self, reading: Reading, extent: Extent) -> int:
        """How many source images are encoded; none if the rows of the head replace a domain that is missing here."""
        return sum(self._source_sizes(reading, extent).values())

    def _source_sizes(self, reading: Reading, extent: Extent) -> dict[str, int]:
        """How many images of each source domain are encoded."""
        if reading.known is not None:
            data, name = reading.known
            sizes = {name: self.sizes(data, reading.seed, reading.images).get(name, 0)}
        else:
            all_sizes = self.sizes(reading.data, reading.seed, reading.images)
            sizes = {name: size for name, size in all_sizes.items() if name not in reading.targets}
        return {name: _at_most(extent.rows, size) for name, size in sizes.items()}

    def recalled_images(self, reading: Reading, extent: Extent) -> int:
        """How many held-out source images are answered each time the source is tested."""
        held_out = self.source_images(reading, Extent()) // 5
        # The rest of the source's data set stands in for a source domain that is missing here.
        if held_out == 0 and reading.known is not None:
            held_out = self.workspace.count(reading.known[0]) // 5
        return _at_most(extent.recalled, held_out)

    def encoding(self, reading: Reading, extent: Extent) -> dict[str, float]:
        """The seconds that it takes to encode each domain of source and target, by a text that says what is encoded.

        Features are kept, so what has been encoded for one task costs another one nothing.
        """
        forward = self.forward(reading.encoder)
        source_data = reading.data if reading.known is None else reading.known[0]
        seconds = {}
        for name, count in self._source_sizes(reading, extent).items():
            seconds[f"{count} images of {name} of {source_data} by {reading.model}"] = count * forward
        sizes = self.sizes(reading.data, reading.seed, reading.images)
        for name in reading.targets:
            count = _at_most(extent.images, sizes[name])
            seconds[f"{count} images of the target {name} of {reading.data} by {reading.model}"] = count * forward
        return seconds

    def _rate(self, encoder: str) -> list[float]:
        if encoder not in self.rates:
            self.rates[encoder] = measure_rates(encoder)
            self._save()
        return self.rates[encoder]

    def _save(self) -> None:
        def write(new: Path) -> None:
            new.write_text(json.dumps(self.rates))

        self.workspace.folder.mkdir(parents=True, exist_ok=True)
        replace(self.workspace.folder / FILE, write)


def _at_most(limit: int | None, number: int) -> int:
    return number if limit is None else min(limit, number)


def measure_rates(encoder: str) -> list[float]:
    """Seconds per image of a forward pass and of a training step, on one thread, as each process of a sweep has."""
    channels = 1 if encoder == "convnet" else 3  # digits are gray
    model = build(encoder, 10, channels=channels)
    size = model.preprocessing.size or 28
    images = torch.zeros(IMAGES, channels, size, size)
    labels = torch.zeros(IMAGES, dtype=torch.int64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            forward = _seconds(lambda: model(images))
        step = _seconds(lambda: cross_entropy(model(images), labels).backward())
    finally:
        torch.set_num_threads(threads)
    return [forward / IMAGES, step / IMAGES]


def _seconds(work: Callable[[], Any]) -> float:
    """The time of the faster of two runs, after one run to warm up."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])
