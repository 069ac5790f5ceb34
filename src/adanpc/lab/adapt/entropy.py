"""What all methods share that descend the entropy of the model's own answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.statistics import affine, use_batch_statistics
from adanpc.lab.networks.source import SourceModel

Option = TypeVar("Option")
OPTIMISERS: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "sgd": partial(SGD, momentum=0.9)}


def entropy(logits: Tensor) -> Tensor:
    """The entropy (B,) of the softmax of logits (B, C), in nats.

    Logarithms of probabilities are logits, too, if none is zero.
    """
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def norm_part(model: SourceModel) -> list[nn.Parameter]:
    """The scales and shifts of all normalization layers, which take the statistics of the batch from now on."""
    use_batch_statistics(model)
    return affine(model)


def head_part(model: SourceModel) -> list[nn.Parameter]:
    """The head's parameters; statistics stay those of the source."""
    return list(model.head.parameters())


def new_norm_part(model: SourceModel) -> list[nn.Parameter]:
    """The scale and shift of a new BatchNorm in front of the head, with the statistics of the batch."""
    like = next(model.head.parameters())
    norm = nn.BatchNorm1d(model.dim, track_running_stats=False, device=like.device, dtype=like.dtype)
    model.head = nn.Sequential(norm, model.head)
    return list(norm.parameters())


PARTS: dict[str, Callable[[SourceModel], list[nn.Parameter]]] = {
    "norm": norm_part,
    "head": head_part,
    "new norm": new_norm_part,
}


def chosen(name: str, key: str, options: Mapping[str, Option]) -> Option:
    """The option of this name, or an error that lists them."""
    if key not in options:
        raise AdaNPCError(f"{name} must be one of {', '.join(options)}, got {key!r}")
    return options[key]


class EntropyDescent(Adapter, ABC):
    """Descends a loss of its own answers, on a small part of the model.

    Another method may use one for its encoder: ``learn`` takes logits, or the logarithms of probabilities, that
    anyone made with ``model``, and moves it; ``model`` then makes features as moved.

    Args:
        trains: the part of the model that moves: norm, or head.
        alpha: the learning rate, as a multiple of the source's.
        optimizer: adam, or sgd with momentum 0.9.
        steps: made on each batch.
    """

    def __init__(self, source: Source, *, trains: str, alpha: float, optimizer: str, steps: int) -> None:
        if not alpha > 0:
            raise AdaNPCError(f"alpha must be positive, got {alpha}")
        if steps < 1:
            raise AdaNPCError(f"steps must be at least 1, got {steps}")
        super().__init__(source)
        self.steps = steps
        self.trained = chosen("trains", trains, PARTS)(self.model)
        if not self.trained:
            raise AdaNPCError(
                f"{type(self).__name__} trains scale and shift of normalization layers, and the model has none: take "
                "a method that trains the head, such as TentClf, or one without gradients, such as T3A"
            )
        for parameter in self.trained:
            parameter.requires_grad_(True)
        self.optimizers["entropy"] = chosen("optimizer", optimizer, OPTIMISERS)(self.trained, lr=source.lr * alpha)
        self.start = [parameter.detach().clone() for parameter in self.trained]
        self._fresh = deepcopy(self.optimizers["entropy"].state_dict())

    @abstractmethod
    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """One step on a batch, given its logits (B, C) with gradients; none if there is nothing to learn from."""

    def moving(self) -> set[str]:
        """The names of what is trained."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def answer(self, batch: Tensor) -> Tensor:
        """The probabilities (B, C) before the last step on the batch."""
        for _ in range(self.steps):
            with torch.enable_grad():
                logits = self.look(batch)
                self.learn(batch, logits)
        return logits.detach().softmax(1)

    def look(self, batch: Tensor) -> Tensor:
        """Logits (B, C) of the model as it is now, of images or features."""
        logits: Tensor = self.model(batch) if self.sees == "images" else self.model.head(batch)
        return logits

    def descend(self, loss: Tensor) -> None:
        """One step of the optimizer on a loss ()."""
        self.move(self.gradients(loss))

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        """The gradient of a loss () for each trained parameter; zero where it plays no part."""
        if not bool(loss.isfinite()):
            raise AdaNPCError(
                f"{type(self).__name__}: the loss is {float(loss.detach())}: reset, and take a smaller alpha"
            )
        return torch.autograd.grad(loss, self.trained, allow_unused=True, materialize_grads=True)

    def move(self, gradients: Sequence[Tensor]) -> None:
        """One step of the optimizer by these gradients of the trained parameters."""
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        self.optimizers["entropy"].step()
        self.optimizers["entropy"].zero_grad()

    @torch.no_grad()
    def recover(self) -> None:
        """Puts what is trained back to the source model, and starts the optimizer anew."""
        for parameter, start in zip(self.trained, self.start, strict=True):
            parameter.copy_(start)
        self.optimizers["entropy"].load_state_dict(deepcopy(self._fresh))
