"""The training loop: from a run's first step to its last, through any number of interruptions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from adanpc.core import AdaNPC
from adanpc.errors import AdaNPCError
from adanpc.lab.data.domain import Domain
from adanpc.lab.data.loading import ahead, chunks
from adanpc.lab.networks.augmentation import Augmented
from adanpc.lab.networks.features import features
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.seeds import seed_of
from adanpc.lab.train.algorithm import Batch
from adanpc.lab.train.assemble import Prepared, assemble, splits
from adanpc.lab.train.batches import Steps
from adanpc.lab.train.interrupt import Interrupt
from adanpc.lab.train.process_group import SINGLE_PROCESS, ProcessGroup
from adanpc.lab.train.run import BEST, CHECKPOINT, Run, writing
from adanpc.progress import track

EVALUATION_BATCH = 64  # images evaluated at once; it matters for speed only


class SavedInterrupt(KeyboardInterrupt):
    """Training was stopped by the user, and the run was saved."""


def train(
    run: Run,
    group: ProcessGroup = SINGLE_PROCESS,
    *,
    prepared: Prepared | None = None,
    workers: int | None = None,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """Trains to the last step, starting from the checkpoint if there is one; returns the last record.

    Ctrl-C saves after the current step, or in the middle of an evaluation, and raises SavedInterrupt. Calling ``train``
    again continues as if nothing had happened. A run has one writer: while one process trains it, another is refused.

    Args:
        run: a run created by ``start``.
        group: the processes that train together, and this one's device.
        prepared: the run's data and untrained algorithm, on this process's device, if they are available; otherwise
            they are read and built here. The algorithm is trained in place.
        workers: the number of processes that read images; see ``data.loading.ahead``.
        tensorboard: whether to also write scalars for TensorBoard into the run's folder.
    """
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        if group.rank == 0:
            stack.enter_context(writing(run.folder))
        trainer = Trainer(run, group, workers, prepared)
        board = None
        if tensorboard and group.rank == 0:
            board = _tensorboard_writer(run.folder)
        try:
            trainer.fit(interrupt, board)
        finally:
            trainer.algorithm.parallel = None  # it must not outlive the process group
        group.wait()  # until process 0 has evaluated and written the last record
        return run.last_record()


class Trainer:
    """Trains one run in one process; see ``train`` for the arguments."""

    def __init__(
        self, run: Run, group: ProcessGroup, workers: int | None = None, prepared: Prepared | None = None
    ) -> None:
        self.run = run
        self.spec = run.spec
        self.group = group
        self.workers = workers
        if prepared is None:
            self.algorithm = assemble(run, group.device, fresh=True)
            data = None
        else:
            self.algorithm = prepared.algorithm
            data = prepared.data
        preprocessing = self.algorithm.model.preprocessing
        self.parts = splits(run, preprocessing, data)
        self.sources = [parts.large for name, parts in self.parts.items() if name not in self.spec.targets]
        transform = Augmented(preprocessing) if self.spec.augment else preprocessing
        training_domains = [domain.with_transform(transform) for domain in self.sources]
        self.steps = Steps(training_domains, self.spec.batch, self.spec.seed, rank=group.rank, world=group.world)
        self.sums: dict[str, float] = {}  # sums of the reported numbers, and the number of steps, since the last record
        self.best_accuracy = -1.0
        self.seconds = 0.0
        self.progress_note = ""
        # Decides what is random in the steps, such as dropout. A checkpoint, if there is one, replaces it below.
        torch.manual_seed(seed_of(self.spec.seed, "training", group.rank))
        state = run.state(CHECKPOINT)
        if state is not None:
            with run.restoring(CHECKPOINT):
                self._restore(state)
        if group.world > 1:
            self.algorithm.distribute()

    def fit(self, interrupt: Interrupt, board: Any = None) -> None:
        """Trains all remaining steps.

        Args:
            interrupt: tells when to stop early.
            board: a TensorBoard writer, or None.
        """
        first = self.algorithm.step
        last = self.spec.steps
        if self._is_due() and self.sums:  # the run was stopped during this evaluation, so repeat it
            self._evaluate(interrupt, board)
            self._save()
        batches = ahead(self.steps, range(first, last), self.steps.domains, self.workers)
        bar = track(batches, f"training {self.spec.algorithm}", last - first)
        self.algorithm.train()
        for batch in bar:
            started = time.perf_counter()
            loss = self._step(batch)
            self.seconds += time.perf_counter() - started
            bar.note(f"loss {loss:.3f}{self.progress_note}")
            stop = self.group.any(interrupt.requested)  # all processes must stop after the same step
            due = self._is_due()
            if due and not stop:
                self._evaluate(interrupt, board)
            if due or stop:
                self._save()
            if stop:
                self._leave()

    def _is_due(self) -> bool:
        """Returns whether an evaluation is due after the step made last."""
        step = self.algorithm.step
        return step > 0 and (step % self.spec.every == 0 or step == self.spec.steps)

    def _evaluate(self, interrupt: Interrupt, board: Any) -> None:
        """Evaluates and writes a record; if Ctrl-C interrupts it, it is repeated when training continues."""
        # Only process 0 saves its sums, so replace them by the means over all processes.
        self.sums = {**self._means(), "steps": 1.0}
        interrupted = False
        if self.group.rank == 0:
            try:
                with interrupt.at_once():
                    self._record(board)
            except KeyboardInterrupt:
                interrupted = True
        if self.group.any(interrupted):  # here the other processes wait for process 0
            self._save()
            self._leave()
        self.sums = {}

    def _leave(self) -> NoReturn:
        """Stops all processes together: once one has exited, torchrun would kill those that are still saving."""
        self.group.wait()
        raise SavedInterrupt

    def _step(self, batches: Sequence[Batch]) -> float:
        """Makes one update and returns its loss."""
        self.algorithm.prepare(self._source_samples)
        device = self.group.device
        on_device = []
        for batch in batches:
            on_device.append(Batch(batch.images.to(device), batch.labels.to(device), batch.keys.to(device)))
        reported = self.algorithm.update(on_device)
        for name, value in (*reported.items(), ("steps", 1.0)):
            self.sums[name] = self.sums.get(name, 0.0) + value
        return reported["loss"]

    def _source_samples(self, count: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns features, labels and keys of ``count`` random source samples, or of all; a ``Sampler``."""
        total = sum(len(domain) for domain in self.sources)
        keys = torch.arange(total)
        if count is not None:
            keys = torch.randperm(total)[:count].sort().values  # in order, so that domains can be read one by one
        # The key of a sample is its row number among the rows of all domains, one domain after another.
        chosen: list[Domain] = []
        first = 0
        for domain in self.sources:
            end = first + len(domain)
            rows = keys[(keys >= first) & (keys < end)] - first
            if len(rows):
                chosen.append(domain.subset(rows))
            first = end
        encoded = torch.cat([features(self.algorithm.model, domain, workers=self.workers) for domain in chosen])
        labels = torch.cat([domain.labels for domain in chosen])
        return encoded, labels, keys

    def _means(self) -> dict[str, float]:
        """Returns the means of the reported numbers since the last record, over all processes."""
        steps = self.sums["steps"]
        own_means = {name: value / steps for name, value in self.sums.items() if name != "steps"}
        return self.group.mean(own_means)

    def _record(self, board: Any) -> None:
        """Evaluates, writes a record, and saves the model if it is the best so far on held-out source data."""
        means = {name: value for name, value in self.sums.items() if name != "steps"}
        vote = self.algorithm.source_vote(self._source_samples)
        held_out_parts = {name: parts.small for name, parts in self.parts.items()}
        held_out, held_out_by_head = self._accuracies(held_out_parts, vote)
        source = [value for name, value in held_out.items() if name not in self.spec.targets]
        source_accuracy = sum(source) / len(source)
        self.progress_note = f", accuracy on held-out source {source_accuracy:.1f} %"
        entry = {
            "step": self.algorithm.step,
            **means,
            "held_out": held_out,
            "source": source_accuracy,
            "seconds": round(self.seconds, 3),
        }
        if vote is not None:
            entry["held_out_by_head"] = held_out_by_head
        if self.algorithm.step == self.spec.steps:
            entry.update(self._on_targets(vote))
        self.run.record(entry)
        if source_accuracy > self.best_accuracy:
            self.run.save(BEST, {"algorithm": self.algorithm.checkpoint()})
            self.best_accuracy = source_accuracy
        self.sums = {}  # if training is saved from here on, this evaluation will not be repeated
        if board is not None:
            self._show(board, means, held_out)

    def _on_targets(self, vote: AdaNPC | None) -> dict[str, dict[str, float]]:
        """Returns what only the last record has: the accuracies on the larger part of each target."""
        rest = {name: self.parts[name].large for name in self.spec.targets}
        target, target_by_head = self._accuracies(rest, vote)
        if vote is None:
            return {"target": target}
        return {"target": target, "target_by_head": target_by_head}

    def _accuracies(
        self, domains: Mapping[str, Domain], vote: AdaNPC | None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Returns accuracies by the name of the domain: of what will answer (the vote, if any), and of the head."""
        answered = {}
        by_head = {}
        for name, domain in domains.items():
            accuracy = accuracy_of(self.algorithm.model, domain, vote, self.workers)
            answered[name] = accuracy.answered
            by_head[name] = accuracy.by_head
        return answered, by_head

    def _show(self, board: Any, means: Mapping[str, float], held_out: Mapping[str, float]) -> None:
        """Adds the numbers of a record to TensorBoard."""
        for name, value in means.items():
            board.add_scalar(name, value, self.algorithm.step)
        for name, value in held_out.items():
            board.add_scalar(f"held_out/{name}", value, self.algorithm.step)
        board.flush()

    def _save(self) -> None:
        """Saves the checkpoint, in process 0 only."""
        if self.group.rank != 0:
            return
        state = {
            "algorithm": self.algorithm.checkpoint(),
            "sums": self.sums,
            "best": self.best_accuracy,
            "seconds": self.seconds,
            "rng": torch.get_rng_state(),
            "accelerators": torch.cuda.get_rng_state_all(),
        }
        self.run.save(CHECKPOINT, state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint that ``_save`` wrote."""
        self.algorithm.restore(state["algorithm"])
        self.sums = dict(state["sums"])
        self.best_accuracy = float(state["best"])
        self.seconds = float(state["seconds"])
        if self.group.world == 1:  # with several processes, only the random state of process 0 was saved
            torch.set_rng_state(state["rng"])
            torch.cuda.set_rng_state_all(state["accelerators"])


class Accuracy(NamedTuple):
    """Percentages of correct answers; NaN for an empty domain.

    Args:
        answered: by what will answer: the vote if there is one, else the head.
        by_head: by the head.
    """

    answered: float
    by_head: float


def accuracy_of(model: SourceModel, domain: Domain, vote: AdaNPC | None = None, workers: int | None = None) -> Accuracy:
    """Returns how much of a domain is answered correctly.

    Args:
        model: evaluated in evaluation mode, and put back into its own mode afterward.
        domain: with the transform that the model expects.
        vote: answers in place of the head, if given.
        workers: the number of processes that read images.
    """
    was_training = model.training
    model.eval()
    answered = [torch.zeros(0)]  # so that an empty domain has a mean, NaN
    by_head = [torch.zeros(0)]
    try:
        with torch.no_grad():
            for images, labels in chunks(domain, EVALUATION_BATCH, workers):
                encoded = model.features(images.to(model.device))
                predicted = model.head(encoded).argmax(1).cpu()
                by_head.append((predicted == labels).float())
                if vote is not None:
                    predicted = vote.predict(encoded.float().cpu()).labels
                answered.append((predicted == labels).float())
    finally:
        model.train(was_training)
    return Accuracy(_percentage(answered), _percentage(by_head))


def _percentage(correct: Sequence[Tensor]) -> float:
    """Returns the mean of all these numbers, times 100."""
    return 100 * torch.cat(list(correct)).mean().item()


def _tensorboard_writer(folder: Path) -> Any:
    """Returns a writer of scalars into a folder below this one."""
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
    except ImportError:
        raise AdaNPCError("TensorBoard is not installed: pip install tensorboard") from None
