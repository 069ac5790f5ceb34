"""The interface of every test-time method: batches in, probabilities out, and never a label.

What you write for a method of your own is a subclass of ``Adapter`` with

* ``answer(batch)``, which returns probabilities and may learn from the batch. It is the only method that is required.
* ``moving()``, if parameters or buffers change: their names.
* ``extra()`` and ``take_extra()``, if anything else changes, such as a counter: how to save it and put it back.
* class attributes that state facts about the method, such as ``sees = "features"``.

What you use:

* ``self.model``, a copy of the source model, frozen and in evaluation mode,
* ``self.optimizers`` and ``self.banks``: put yours there, and they are saved and reset with everything else,
* ``Source``, all that is known before the stream begins: the trained model, and perhaps features, labels and images,
* ``descend(loss, optimizer)``, one step of gradient descent.

What you get, without further code: ``step``, ``predict``, ``reset``, ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adanpc.core import MemoryBank, Prediction
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.snapshot import Snapshot
from adanpc.lab.networks.source import SourceModel


class BatchError(AdaNPCError):
    """A batch that a method cannot use, such as a single image where batch statistics are needed."""

    code = "bad-batch"


NOTHING = torch.zeros(0)  # the default for features and labels, which __post_init__ replaces by empty tensors


@dataclass(frozen=True)
class Source:
    """All that is known before the stream begins.

    Only ``model`` is required: it is enough for methods without a bank, such as Tent.

    Args:
        model: the trained model; adapters copy it and never change it.
        features: (n, D) of the source training samples, computed by the model in evaluation mode; none by default.
        labels: (n,) of these samples.
        domains: (n,) the source domain of each sample; by default all samples belong to one domain.
        images: returns these samples by row number, as inputs of the model; for methods that look at source images
            again.
        images_digest: a hash of all that ``images`` returns. Methods of sources with the same hash share what they
            compute from the images; without one they share nothing.
        lr: the learning rate of source training; some methods scale it.
        rotation_head: maps features to four logits, if the model was trained with rotations.
        prototypes: whether the features are not samples but one row per class, such as the rows of the head, because
            no training samples are available.
    """

    model: SourceModel
    features: Tensor = NOTHING
    labels: Tensor = NOTHING
    domains: Tensor | None = None
    images: Callable[[Tensor], Tensor] | None = None
    images_digest: str = ""
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
        """Returns row numbers (n,) in a fixed random order, at most ``count``, for batches typical of the source.

        Data sets are often sorted by class. A batch of a single class would be normalized by statistics of that class,
        which removes what distinguishes it.
        """
        generator = torch.Generator().manual_seed(0)
        return torch.randperm(len(self.labels), generator=generator)[:count]


class Adapter(nn.Module, ABC):
    """A classifier that may change while it is used: ``step`` answers a batch and may learn from it.

    A method is a subclass with an ``answer``. Everything that changes during the stream must be a parameter or buffer
    that ``moving`` names, one of the ``optimizers``, one of the ``banks``, or part of ``extra``. Then ``state_dict``
    saves all of it, ``reset`` restores all of it, and ``predict`` changes none of it.
    ``adanpc.testing.check_adapter`` checks a subclass.

    Args:
        source: all that is known before the stream begins.
    """

    # Facts about the method, which tables and commands use.
    sees: ClassVar[Literal["images", "features"]] = "images"  # what ``step`` takes
    least: ClassVar[int] = 1  # the smallest batch it can use; smaller ones raise BatchError
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {}  # settings that the paper, or the method's own paper, searched
    # How many forward passes an answer costs, where a backward pass counts for two; 1 also for methods that make a few.
    passes: ClassVar[int] = 1
    one_by_one: ClassVar[bool] = False  # each image is answered on its own, so the batch size changes nothing
    needs_rotation_head: ClassVar[bool] = False  # the source model must have been trained with rotations
    in_paper: ClassVar[str] = ""  # its name in the tables of the AdaNPC paper; empty if it is not in them

    def __init__(self, source: Source) -> None:
        super().__init__()
        if torch.is_inference_mode_enabled():
            raise AdaNPCError("an adapter created inside torch.inference_mode() could never learn: create it outside")
        self.model = deepcopy(source.model).eval().requires_grad_(False)
        self.optimizers: dict[str, Optimizer] = {}
        self.banks: dict[str, MemoryBank] = {}
        # Set by methods that answer with the bank called "bank": the latest answer with its neighbors. Not saved.
        self.latest: Prediction | None = None
        self.reset_every: int | None = None  # samples between two automatic resets; None never resets
        self._since_reset = 0  # samples since the last reset
        self._start: Snapshot | None = None  # what ``reset`` returns to

    # What a method implements ----------------------------------------------------------------------------------------

    @abstractmethod
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of a batch that ``step`` has checked; may learn from it."""

    def moving(self) -> set[str]:
        """Returns the names, as in ``state_dict``, of the parameters and buffers that may change."""
        return set()

    def extra(self) -> dict[str, Any]:
        """Returns what changes besides tensors, optimizers and banks, as plain values; ``take_extra`` puts it back.

        Later steps must not change the returned values: copy here whatever a step changes in place.
        """
        return {}

    def take_extra(self, extra: Mapping[str, Any]) -> None:  # not abstract: most methods have nothing extra
        """Puts back what ``extra`` returned."""

    # What users call -------------------------------------------------------------------------------------------------
    # Gradients do not exist inside torch.inference_mode(), and tensors created there can never be trained. So every
    # method that creates or changes tensors leaves that mode, whatever mode the caller is in.

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
            batch = batch.clone()  # autograd cannot save inference tensors; a clone is an ordinary one
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
        """Forgets everything that was learned since the adapter was created, to the bit."""
        if self._start is not None:
            # A method may adopt the very values it is given and then change them, so it gets copies.
            extras = deepcopy(self._start.extras)
            self._return_to(replace(self._start, extras=extras))

    # What torch calls ------------------------------------------------------------------------------------------------

    def forward(self, batch: Tensor) -> Tensor:
        """Does the same as ``step``."""
        return self.step(batch)

    def train(self, mode: bool = True) -> Adapter:
        """Changes nothing: each method decides for itself which of its layers are in training mode."""
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the optimizers, the banks and ``extra``, which ``state_dict`` includes."""
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        banks = {name: bank.state() for name, bank in self.banks.items()}
        return {"optimizers": optimizers, "banks": banks, "extra": self.extra(), "since_reset": self._since_reset}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Puts back what ``get_extra_state`` returned, as part of ``load_state_dict``."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(deepcopy(state["optimizers"][name]))  # without a copy, torch shares the tensors
        for name, bank_state in state["banks"].items():
            bank = self.banks[name]
            bank.revert(MemoryBank.load(bank_state, device=bank.device).contents)
        self._since_reset = state["since_reset"]
        self.take_extra(state["extra"])

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Continues from the moment at which ``state_dict`` was taken."""
        start = self._remember_start()
        # The state may come from another model, so a reset must also restore the tensors that no step changes.
        for name, value in self._tensors().items():
            if name not in start.tensors:
                start.tensors[name] = value.detach().clone()
        return super().load_state_dict(state_dict, strict, assign)

    # How a step is checked, and how predict and reset undo it ---------------------------------------------------------

    def _check(self, batch: Tensor) -> None:
        """Raises BatchError if the batch is too small or has values that are not finite."""
        if len(batch) < self.least:
            name = type(self).__name__
            raise BatchError(
                f"{name} needs batches of at least {self.least} rows, got {len(batch)}: use larger batches"
            )
        not_finite = int((~batch.isfinite()).sum())
        if not_finite:
            raise BatchError(f"the batch holds NaN or infinite values, in {not_finite} places: clean the inputs")

    def _remember_start(self) -> Snapshot:
        """Returns the state that ``reset`` returns to; it is taken just before anything can change for the first time.

        The constructor cannot take it, because it runs before that of the subclass has finished.
        """
        if self._start is None:
            now = self._snapshot()
            self._start = replace(now, extras=deepcopy(now.extras))  # ``extra`` may return the method's own values
        return self._start

    def _snapshot(self) -> Snapshot:
        """Returns all that a step may change, as it is now, without copying the large rest of the model."""
        tensors = {}
        moving = self.moving()
        if moving:  # listing the tensors of a large model takes longer than many an answer
            present = self._tensors()
            tensors = {name: present[name].detach().clone() for name in moving}
        extras = {}
        for name, module in self.named_modules():
            has_extra_state = type(module).get_extra_state is not nn.Module.get_extra_state
            if has_extra_state and module is not self:
                extras[name] = deepcopy(module.get_extra_state())
        # The adapter's own extra state, under the name that torch has for a module itself. Banks are left out: their
        # contents are kept as values below, which costs no copy.
        optimizers = {name: deepcopy(optimizer.state_dict()) for name, optimizer in self.optimizers.items()}
        extras[""] = {"optimizers": optimizers, "banks": {}, "extra": self.extra(), "since_reset": self._since_reset}
        contents = {name: bank.contents for name, bank in self.banks.items()}
        return Snapshot(tensors, extras, contents)

    def _return_to(self, snapshot: Snapshot) -> None:
        """Puts back everything that a snapshot holds."""
        if snapshot.tensors:
            super().load_state_dict(snapshot.tensors, strict=False)  # not strict: only moving tensors are in it
        for name, extra in snapshot.extras.items():
            self.get_submodule(name).set_extra_state(extra)
        for name, bank in self.banks.items():
            if bank.contents is not snapshot.contents[name]:
                bank.revert(snapshot.contents[name])

    def _tensors(self) -> dict[str, Tensor]:
        """Returns all parameters and buffers by name."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


def descend(loss: Tensor, optimizer: Optimizer) -> None:
    """Makes one step of an optimizer with the gradients of this loss alone; refuses a loss that is not finite."""
    if not bool(loss.isfinite()):
        raise AdaNPCError(f"the loss is {float(loss.detach())}: reset the adapter, and use a smaller learning rate")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
