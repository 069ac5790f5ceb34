"""Services as tests start them: a small bank, images that need no network, and a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import adanpc
from adanpc.lab.data.drawn import draw_thing

CLASSES = ("cat", "dog")
ROWS = 40
PATIENCE = 300  # seconds until a process that does not answer is given up


def filled() -> adanpc.AdaNPC:
    """A classifier of the preset "safe" with forty rows of two classes, always the same."""
    classifier = adanpc.AdaNPC(adanpc.MemoryBank(4, CLASSES, soft=True), preset="safe")
    noise = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(0))
    features = torch.eye(4)[[0, 1] * (ROWS // 2)] + 0.1 * noise
    classifier.learn(features, torch.tensor([0, 1] * (ROWS // 2)))
    return classifier


def shifted(more: Sequence[str] = ()) -> tuple[adanpc.AdaNPC, Tensor]:
    """A classifier that has learned from a shifted stream, and queries on some of which that changes the answer.

    Args:
        more: the names of more classes, of which there are no rows.
    """
    generator = torch.Generator().manual_seed(0)
    shift = torch.tensor([0.4, -0.4, 0.4, 0.4])

    def sampled(labels: Tensor) -> Tensor:
        return torch.eye(4)[labels] + 0.25 * torch.randn(len(labels), 4, generator=generator)

    classifier = adanpc.AdaNPC(adanpc.MemoryBank(4, (*CLASSES, *more), soft=True), preset="safe")
    source = torch.tensor([0, 1] * 60)
    classifier.learn(sampled(source), source)
    classifier.step(sampled(torch.randint(2, (120,), generator=generator)) + shift)
    return classifier, sampled(torch.randint(2, (60,), generator=generator)) + shift


def queries(count: int, seed: int = 0) -> Any:
    """Features (count, 4) of both classes."""
    random = np.random.default_rng(seed)
    noise = random.random((count, 4), dtype=np.float32)
    classes: Any = np.eye(4, dtype=np.float32)[random.integers(0, 2, count)]
    return classes + 0.2 * noise


def encode(images: Sequence[Any]) -> Tensor:
    """The mean of each color, and a constant: it does not depend on what else is in the batch."""
    return torch.tensor([[*pixels.mean((0, 1)), 50.0] for pixels in images], dtype=torch.float32)


def png(seed: int, side: int = 5) -> bytes:
    """A file with an image of colored noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3)).astype(np.uint8)
    written = BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def drawn_png(thing: str, number: int) -> bytes:
    """A file with a cartoon of a thing."""
    written = BytesIO()
    draw_thing(thing, "cartoon", number).save(written, "PNG")
    return written.getvalue()


@dataclass
class Started:
    """A service in a process of its own."""

    url: str
    process: subprocess.Popen[str]
    errors: Path  # what it wrote to the standard error stream

    def end(self) -> int:
        """Ends it as a service manager does, and gives its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def log(self) -> list[dict[str, Any]]:
        """The lines that it logged."""
        return [json.loads(line) for line in self.errors.read_text().splitlines()]


@contextmanager
def started(bank: Path, *options: object) -> Iterator[Started]:
    """``adanpc serve`` on a free port of loopback while the block runs."""
    errors = bank.parent / f"{bank.name}-errors"
    command = [sys.executable, "-c", "from adanpc.cli import main; main()", "serve", str(bank), "--port", "0"]
    command += [str(option) for option in options]
    with errors.open("w") as stream:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True, env=dict(os.environ))
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert " at http://" in first, errors.read_text()
        yield Started(first.split(" at ")[1].strip(), process, errors)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE)
        process.stdout.close()
