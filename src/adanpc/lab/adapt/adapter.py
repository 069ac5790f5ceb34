"""What every test-time method is: batches in, probabilities out, and never a label."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel


class BatchError(AdaNPCError):
    """A batch that a method cannot use, such as a single image where statistics of a batch are needed."""


@dataclass(frozen=True)
class Source:
    """What is known before the stream begins.

    Args:
        model: the trained model; adapters copy it and leave it as it is.
        features: (n, D) of the source training samples, made by the model in evaluation mode.
        labels: (n,) of these samples.
        domains: (n,) which source domain each is from; by default all are from one.
        images: the same samples by row, as inputs of the model; for methods that look at source images again.
        lr: the learning rate of source training; the paper's methods scale it.
        rotation_head: features to four logits, if the model was trained with rotations.
    """

    model: SourceModel
    features: Tensor
    labels: Tensor
    domains: Tensor | None = None
    images: Callable[[Tensor], Tensor] | None = None
    lr: float = 1e-3
    rotation_head: nn.Module | None = None

    def mixed(self, count: int | None = None) -> Tensor:
        """Rows (n,) in a fixed random order, at most ``count``: for batches whose statistics are those of the source.

        Data sets are often sorted by class; a batch of one class, normalized by itself, looks like any other.
        """
        return torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(0))[:count]


class Adapter(nn.Module, ABC):
    """A classifier that may change while it is used; ``step`` answers a batch, in order, and may learn from it.

    All that changes on the way is a parameter, a buffer, an entry of ``optimizers``, or part of ``extra``:
    ``state_dict`` has it all, ``reset`` puts it all back.

    Args:
        source: what is known before the stream begins.
    """

    sees: ClassVar[Literal["images", "features"]] = "images"  # what ``step`` takes
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {}  # what the paper, or the method's own, searched
    least: ClassVar[int] = 1  # rows that a batch needs; fewer raise BatchError
    in_paper: ClassVar[str] = ""  # the method's name in the tables of the AdaNPC paper; empty if it is not there
    one_by_one: ClassVar[bool] = False  # each image is answered by itself, so that the batch size changes nothing
    passes: ClassVar[int] = 1  # about how many forward passes an answer costs
    needs_rotation_head: ClassVar[bool] = False  # the source model must have been trained with rotations

    def __init__(self, source: Source) -> None:
        super().__init__()
        if torch.is_inference_mode_enabled():
            raise AdaNPCError("an adapter must be made outside of torch.inference_mode(): it could never learn in it")
        self.model = deepcopy(source.model).eval().requires_grad_(False)
        self.optimizers: dict[str, Optimizer] = {}
        self._start: dict[str, Any] | None = None

    @abstractmethod
    def answer(self, batch: Tensor) -> Tensor:
        """Probabilities (B, C) of a batch that was checked; may learn from it."""

    def moving(self) -> set[str]:
        """The names in ``state_dict`` of the tensors that may change."""
        return set()

    @torch.inference_mode(False)  # methods that learn by gradients could not, within it
    def step(self, batch: Tensor) -> Tensor:
        """Probabilities (B, C) of a batch of images (B, …) or features (B, D); rows sum to 1."""
        self._remember()
        if not len(batch):
            return torch.zeros(0, self.model.classes, device=self.model.device)
        if len(batch) < self.least:
            name = type(self).__name__
            raise BatchError(f"{name} needs batches of at least {self.least} rows, got {len(batch)}: wait for more")
        if not bool(batch.isfinite().all()):
            raise BatchError(f"the batch holds NaN or infinite values, in {int((~batch.isfinite()).sum())} places")
        batch = batch.detach().to(self.model.device)
        with torch.no_grad():
            return self.answer(batch.clone() if batch.is_inference() else batch)

    def predict(self, batch: Tensor) -> Tensor:
        """What ``step`` would answer now; changes nothing."""
        before = deepcopy(self.state_dict())
        try:
            return self.step(batch)
        finally:
            self.load_state_dict(before)

    def reset(self) -> None:
        """Forgets all that was learned since the adapter was made, to the bit."""
        if self._start is not None:
            self.load_state_dict(deepcopy(self._start))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Goes on where ``state_dict`` was taken."""
        self._remember()
        return super().load_state_dict(state_dict, strict, assign)

    def _remember(self) -> None:
        """Keeps how it all began, before anything changes."""
        if self._start is None:
            self._start = deepcopy(self.state_dict())

    def extra(self) -> dict[str, Any]:
        """What changes beside tensors and optimizers, as plain values; ``take_extra`` puts it back."""
        return {}

    def take_extra(self, extra: Mapping[str, Any]) -> None:  # most have none
        """Puts back what ``extra`` gave."""

    def get_extra_state(self) -> dict[str, Any]:
        """For ``state_dict``: optimizers and what the method adds."""
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {"optimizers": optimizers, "extra": self.extra()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """For ``load_state_dict``."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(deepcopy(state["optimizers"][name]))  # torch would share its tensors
        self.take_extra(state["extra"])

    def forward(self, batch: Tensor) -> Tensor:
        """As ``step``."""
        return self.step(batch)

    def train(self, mode: bool = True) -> Adapter:
        """Changes nothing: layers that must train are set so by the method itself."""
        return self


def descend(loss: Tensor, optimizer: Optimizer) -> None:
    """One step of an optimizer, with gradients of this loss alone; refuses a loss that is not finite."""
    if not bool(loss.isfinite()):
        raise AdaNPCError(f"the loss is {float(loss.detach())}: reset the adapter, and take a smaller learning rate")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
