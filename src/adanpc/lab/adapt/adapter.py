"""The interface of every test-time method: batches in, probabilities out, and never a label."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adanpc.core import Contents, MemoryBank, Prediction
from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel


class BatchError(AdaNPCError):
    """A batch that a method cannot use, such as a single image where the statistics of a batch are needed."""

    code = "bad-batch"


NOTHING = torch.zeros(0)  # stands for features and labels that are not given


@dataclass(frozen=True)
class Source:
    """What is known before the stream begins.

    Args:
        model: the trained model; adapters copy it and never change it.
        features: (n, D) of the source training samples, made by the model in evaluation mode; by default none are
            known, which is enough for methods without a bank, such as Tent.
        labels: (n,) of these samples.
        domains: (n,) which source domain each sample is from; by default all are from one.
        images: returns these samples by row, as inputs of the model; for methods that look at source images again.
        lr: the learning rate of source training; some methods scale it.
        rotation_head: maps features to four logits, if the model was trained with rotations.
        prototypes: the features are no samples but one row for each class, such as the rows of the head: what is known
            where there are no training samples.
    """

    model: SourceModel
    features: Tensor = NOTHING
    labels: Tensor = NOTHING
    domains: Tensor | None = None
    images: Callable[[Tensor], Tensor] | None = None
    lr: float = 1e-3
    rotation_head: nn.Module | None = None
    prototypes: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, SourceModel):
            name = type(self.model).__name__
            raise AdaNPCError(
                f"model must be a SourceModel, which knows its encoder and its head, got a {name}: "
                "use SourceModel.of(model, a_batch_of_inputs)"
            )
        if self.features is NOTHING:
            object.__setattr__(self, "features", torch.zeros(0, self.model.dim))
            object.__setattr__(self, "labels", torch.zeros(0, dtype=torch.int64))

    def mixed(self, count: int | None = None) -> Tensor:
        """Row numbers (n,) in a fixed random order, at most ``count``: for batches with the statistics of the source.

        Data sets are often sorted by class, and a batch of one class, normalized by itself, looks like any other.
        """
        generator = torch.Generator().manual_seed(0)
        return torch.randperm(len(self.labels), generator=generator)[:count]


class Adapter(nn.Module, ABC):
    """A classifier that may change while it is used: ``step`` answers a batch and may learn from it.

    Everything that changes along the way is a parameter or buffer named by ``moving``, one of the ``optimizers``, one
    of the ``banks``, or part of ``extra``. So ``state_dict`` holds all of it, ``reset`` puts all of it back, and
    ``predict`` answers without changing any of it.

    A method of your own is a subclass with an ``answer``; ``adanpc.testing.check_adapter`` checks it.

    Args:
        source: what is known before the stream begins.
    """

    sees: ClassVar[Literal["images", "features"]] = "images"  # what ``step`` takes
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {}  # settings that the paper, or the method's own paper, searched
    least: ClassVar[int] = 1  # how many rows a batch needs; fewer raise BatchError
    in_paper: ClassVar[str] = ""  # the method's name in the tables of the AdaNPC paper; empty if it is not there
    one_by_one: ClassVar[bool] = False  # each image is answered by itself, so that the batch size changes nothing
    passes: ClassVar[int] = 1  # about how many forward passes an answer costs
    needs_rotation_head: ClassVar[bool] = False  # the source model must have been trained with rotations

    def __init__(self, source: Source) -> None:
        super().__init__()
        if torch.is_inference_mode_enabled():
            raise AdaNPCError("an adapter made inside torch.inference_mode() could never learn: create it outside")
        self.model = deepcopy(source.model).eval().requires_grad_(False)
        self.optimizers: dict[str, Optimizer] = {}
        self.banks: dict[str, MemoryBank] = {}
        # The latest answer in full, of methods that answer by the bank called "bank"; it is no part of the state.
        self.latest: Prediction | None = None
        self.reset_every: int | None = None  # samples, after which the next batch starts afresh; by default never
        self._since_reset = 0  # samples
        self._start: _Snapshot | None = None

    @abstractmethod
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of a batch that was checked by ``step``; may learn from it."""

    def moving(self) -> set[str]:
        """Returns the names, as in ``state_dict``, of the tensors that may change."""
        return set()

    def extra(self) -> dict[str, Any]:
        """Returns what changes besides tensors, optimizers and banks, as plain values; ``take_extra`` puts it back.

        Later steps must not change the returned values: copy here whatever a step changes in place.
        """
        return {}

    def take_extra(self, extra: Mapping[str, Any]) -> None:  # not abstract: most methods have nothing extra
        """Puts back what ``extra`` returned."""

    # Gradients do not exist inside torch.inference_mode(), and tensors made there can never be trained. So the methods
    # that make or change tensors leave that mode, whatever the caller does.

    @torch.inference_mode(False)
    def step(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of a batch of images (B, …) or features (B, D), and may learn from it."""
        self._remember_start()
        if len(batch) == 0:
            return torch.zeros(0, self.model.classes, device=self.model.device)
        self._check(batch)
        if self.reset_every is not None and self._since_reset >= self.reset_every:
            self.reset()
        self._since_reset += len(batch)
        batch = batch.detach().to(self.model.device)
        if batch.is_inference():
            batch = batch.clone()
        with torch.no_grad():
            return self.answer(batch)

    @torch.inference_mode(False)
    def predict(self, batch: Tensor) -> Tensor:
        """Returns what ``step`` would answer now, and changes nothing."""
        before = self._snapshot()
        try:
            return self.step(batch)
        finally:
            self._return_to(before)

    @torch.inference_mode(False)
    def reset(self) -> None:
        """Forgets everything that was learned since the adapter was made, to the bit."""
        if self._start is not None:
            extras = deepcopy(self._start.extras)  # a method may take up these very values, and change them
            self._return_to(replace(self._start, extras=extras))

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Continues from where ``state_dict`` was taken."""
        start = self._remember_start()
        # What is loaded may be of another model, so that even tensors which no step moves have to come back at a reset.
        for name, value in self._tensors().items():
            if name not in start.tensors:
                start.tensors[name] = value.detach().clone()
        return super().load_state_dict(state_dict, strict, assign)

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the optimizers, the banks and what the method adds, for ``state_dict``."""
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        banks = {name: bank.state() for name, bank in self.banks.items()}
        return {"optimizers": optimizers, "banks": banks, "extra": self.extra(), "since_reset": self._since_reset}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Puts back what ``get_extra_state`` returned, for ``load_state_dict``."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(deepcopy(state["optimizers"][name]))  # torch would share its tensors
        for name, bank_state in state["banks"].items():
            bank = self.banks[name]
            bank.revert(MemoryBank.load(bank_state, device=bank.device).contents)
        self._since_reset = state["since_reset"]
        self.take_extra(state["extra"])

    def forward(self, batch: Tensor) -> Tensor:
        """Does what ``step`` does."""
        return self.step(batch)

    def train(self, mode: bool = True) -> Adapter:
        """Changes nothing: a method itself decides which of its layers are in training mode."""
        return self

    def _check(self, batch: Tensor) -> None:
        """Raises BatchError if the batch is too small, or not finite."""
        if len(batch) < self.least:
            name = type(self).__name__
            raise BatchError(
                f"{name} needs batches of at least {self.least} rows, got {len(batch)}: use larger batches"
            )
        wrong = int((~batch.isfinite()).sum())
        if wrong:
            raise BatchError(f"the batch holds NaN or infinite values, in {wrong} places")

    def _remember_start(self) -> _Snapshot:
        """Returns the state to which ``reset`` returns; taken the first time that anything may change."""
        if self._start is None:
            now = self._snapshot()
            self._start = replace(now, extras=deepcopy(now.extras))  # which are a method's own values
        return self._start

    def _snapshot(self) -> _Snapshot:
        """Returns what a step may change, as it is now; the large rest is not copied."""
        tensors = {}
        moving = self.moving()
        if moving:  # to list the tensors of a large model takes longer than many an answer
            present = self._tensors()
            tensors = {name: present[name].detach().clone() for name in moving}
        extras = {}
        for name, module in self.named_modules():
            if module is not self and type(module).get_extra_state is not nn.Module.get_extra_state:
                extras[name] = deepcopy(module.get_extra_state())
        optimizers = {name: deepcopy(optimizer.state_dict()) for name, optimizer in self.optimizers.items()}
        extras[""] = {"optimizers": optimizers, "banks": {}, "extra": self.extra(), "since_reset": self._since_reset}
        return _Snapshot(tensors, extras, {name: bank.contents for name, bank in self.banks.items()})

    def _return_to(self, snapshot: _Snapshot) -> None:
        """Puts back what a snapshot holds."""
        if snapshot.tensors:
            super().load_state_dict(snapshot.tensors, strict=False)  # those that do not move are not in it
        for name, extra in snapshot.extras.items():
            self.get_submodule(name).set_extra_state(extra)
        for name, bank in self.banks.items():
            if bank.contents is not snapshot.contents[name]:
                bank.revert(snapshot.contents[name])

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


@dataclass(frozen=True)
class _Snapshot:
    """What an adapter may change, at one moment."""

    tensors: dict[str, Tensor]  # parameters and buffers, copied
    extras: dict[str, Any]  # what get_extra_state returned, by the name of the module, copied
    contents: dict[str, Contents]  # of the banks: values, so that nothing is copied

    def __reduce__(self) -> tuple[Callable[..., _Snapshot], tuple[Any, ...]]:
        # Contents share memory with their bank, in blocks with room for more rows; a bank is pickled without that room.
        banks = {}
        for name, contents in self.contents.items():
            banks[name] = MemoryBank.load(contents.state(), device=contents.index.device)
        return _snapshot_with, (self.tensors, self.extras, banks)


def _snapshot_with(tensors: dict[str, Tensor], extras: dict[str, Any], banks: Mapping[str, MemoryBank]) -> _Snapshot:
    return _Snapshot(tensors, extras, {name: bank.contents for name, bank in banks.items()})


def descend(loss: Tensor, optimizer: Optimizer) -> None:
    """Makes one step of an optimizer, with the gradients of this loss alone; refuses a loss that is not finite."""
    if not bool(loss.isfinite()):
        raise AdaNPCError(f"the loss is {float(loss.detach())}: reset the adapter, and use a smaller learning rate")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
