"""The training loop: from a run's first step to its last, through any number of interruptions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.lab.data.domain import Domain
from adanpc.lab.data.loading import ahead, chunks
from adanpc.lab.networks.augmentation import Augmented
from adanpc.lab.networks.features import features
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.seeds import seed_of
from adanpc.lab.train.algorithm import Batch
from adanpc.lab.train.assemble import assemble, splits
from adanpc.lab.train.batches import Steps
from adanpc.lab.train.interrupt import Interrupt
from adanpc.lab.train.run import BEST, CHECKPOINT, Run
from adanpc.lab.train.team import ALONE, Team
from adanpc.progress import track

SIZE = 64  # images evaluated at once


def train(run: Run, place: Team = ALONE, *, workers: int | None = None, tensorboard: bool = False) -> dict[str, Any]:
    """Trains to the last step, from the checkpoint if there is one; the last record.

    Ctrl-C saves after the step at hand and raises KeyboardInterrupt; calling again continues as if nothing had been.

    Args:
        run: made by ``start``.
        place: this process among those that train together, and its device.
        workers: processes that read images, see ``data.loading.ahead``.
        tensorboard: also writes scalars for TensorBoard into the run's folder.
    """
    with Interrupt() as interrupt:
        trainer = Trainer(run, place, workers)
        board = _board(run.folder) if tensorboard and place.rank == 0 else None
        try:
            trainer.fit(interrupt, board)
        finally:
            trainer.algorithm.parallel = None  # nothing of it may outlive the group of processes
        place.wait()  # for the one that evaluates and writes
        return run.records()[-1]


class Trainer:
    """One run in one process."""

    def __init__(self, run: Run, place: Team, workers: int | None = None) -> None:
        self.run, self.spec, self.place, self.workers = run, run.spec, place, workers
        self.algorithm = assemble(run, place.device, fresh=True)
        preprocessing = self.algorithm.model.preprocessing
        self.parts = splits(run, preprocessing)
        self.sources = [parts.large for name, parts in self.parts.items() if name not in self.spec.targets]
        transform = Augmented(preprocessing) if self.spec.augment else preprocessing
        seen = [domain.with_transform(transform) for domain in self.sources]
        self.steps = Steps(seen, self.spec.batch, self.spec.seed, rank=place.rank, world=place.world)
        self.sums: dict[str, float] = {}  # of the numbers reported since the last record
        self.best, self.seconds, self.note = -1.0, 0.0, ""
        torch.manual_seed(seed_of(self.spec.seed, "training", place.rank))
        if (state := run.state(CHECKPOINT)) is not None:
            self._restore(state)
        if place.world > 1:
            self.algorithm.distribute()

    def fit(self, interrupt: Interrupt, board: Any = None) -> None:
        """Every step that is left."""
        first, last = self.algorithm.step, self.spec.steps
        batches = ahead(self.steps, range(first, last), self.steps.domains, self.workers)
        self.algorithm.train()
        for batch in (bar := track(batches, f"training {self.spec.algorithm}", last - first)):
            since = time.perf_counter()
            loss = self._step(batch)
            self.seconds += time.perf_counter() - since
            bar.note(f"loss {loss:.3f}{self.note}")
            stop = self.place.any(interrupt.asked)
            if due := self.algorithm.step % self.spec.every == 0 or self.algorithm.step == last:
                self._record(board)
            if due or stop:
                self._save()
            if stop and self.algorithm.step < last:
                raise KeyboardInterrupt

    def _step(self, batches: Sequence[Batch]) -> float:
        """One update; its loss."""
        self.algorithm.prepare(self._source)
        made = self.algorithm.update([Batch(*(part.to(self.place.device) for part in batch)) for batch in batches])
        for name, value in (*made.items(), ("steps", 1.0)):
            self.sums[name] = self.sums.get(name, 0.0) + value
        return made["loss"]

    def _source(self, count: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Features, labels and keys of source samples, for ``Algorithm.prepare``."""
        sizes = [len(domain) for domain in self.sources]
        chosen = torch.arange(sum(sizes)) if count is None else torch.randperm(sum(sizes))[:count].sort().values
        rows = [
            chosen[(chosen >= end - size) & (chosen < end)] - (end - size)
            for size, end in zip(sizes, accumulate(sizes), strict=True)
        ]
        parts = [domain.subset(part) for domain, part in zip(self.sources, rows, strict=True) if len(part)]
        made = torch.cat([features(self.algorithm.model, part, workers=self.workers) for part in parts])
        return made, torch.cat([part.labels for part in parts]), chosen

    def _record(self, board: Any) -> None:
        """Evaluates, writes down what was seen, and keeps the model if it is the best so far on held-out source."""
        steps = self.sums.pop("steps")
        means = self.place.mean({name: value / steps for name, value in self.sums.items()})
        self.sums = {}
        if self.place.rank:
            return
        last = self.algorithm.step == self.spec.steps
        measured = {
            name: accuracy(self.algorithm.model, parts.small, self.workers) for name, parts in self.parts.items()
        }
        tested = {
            name: accuracy(self.algorithm.model, self.parts[name].large, self.workers)
            for name in self.spec.targets
            if last
        }
        source = [value for name, value in measured.items() if name not in self.spec.targets]
        score = sum(source) / len(source)
        self.note = f", accuracy on held-out source {score:.1f} %"
        entry = {"step": self.algorithm.step, **means, "held_out": measured, "source": score}
        entry |= {"seconds": round(self.seconds, 3)} | ({"target": tested} if last else {})
        self.run.record(entry)
        if score > self.best:
            self.best = score
            self.run.save(BEST, {"algorithm": self.algorithm.checkpoint()})
        if board is not None:
            for name, value in {**means, **{f"held_out/{key}": value for key, value in measured.items()}}.items():
                board.add_scalar(name, value, self.algorithm.step)
            board.flush()

    def _save(self) -> None:
        if self.place.rank == 0:
            self.run.save(
                CHECKPOINT,
                {
                    "algorithm": self.algorithm.checkpoint(),
                    "sums": self.sums,
                    "best": self.best,
                    "seconds": self.seconds,
                    "rng": torch.get_rng_state(),
                    "accelerators": torch.cuda.get_rng_state_all(),
                },
            )

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.algorithm.restore(state["algorithm"])
        self.sums, self.best, self.seconds = state["sums"], state["best"], state["seconds"]
        if self.place.world == 1:
            torch.set_rng_state(state["rng"])
            torch.cuda.set_rng_state_all(state["accelerators"])


def accuracy(model: SourceModel, domain: Domain, workers: int | None = None) -> float:
    """The share of a domain that the model's head gets right, in percent; NaN if the domain is empty."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            batches = chunks(domain, SIZE, workers)
            right = [(model(images.to(model.device)).argmax(1).cpu() == labels).float() for images, labels in batches]
    finally:
        model.train(training)
    return 100 * torch.cat([*right, torch.zeros(0)]).mean().item()


def _board(folder: Path) -> Any:
    """A writer of TensorBoard scalars."""
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
    except ImportError:
        raise AdaNPCError("TensorBoard is not installed: pip install tensorboard") from None
