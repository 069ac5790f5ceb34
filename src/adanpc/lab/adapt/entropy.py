"""What all methods share that minimize the entropy of the model's own answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.statistics import NORMS, affine, use_batch_statistics
from adanpc.lab.networks.source import SourceModel

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "sgd": partial(SGD, momentum=0.9)}
# Learning rates of ETA, EATA, SAR and DeYO: those of their authors on ImageNet, and of later comparisons on CIFAR.
RATES: dict[str, float] = {"sgd": 2.5e-4, "adam": 1e-3}
# The last blocks of ResNets and of ViT-B in the code of SAR and DeYO, by parts of the names of their layers.
LAST_BLOCKS = ("layer4", "blocks.9", "blocks.10", "blocks.11", "norm.")


def entropy(logits: Tensor) -> Tensor:
    """Returns the entropy (B,) of the softmax of logits (B, C), in nats.

    The logarithms of probabilities may be given for logits if no probability is zero.
    """
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def train_norms(model: SourceModel) -> list[nn.Parameter]:
    """Returns the scales and shifts of all normalization layers, which use the statistics of the batch from now on."""
    use_batch_statistics(model)
    return affine(model)


def train_norms_but_last_block(model: SourceModel) -> list[nn.Parameter]:
    """Returns what ``train_norms`` does, without the last block, where features are most easily spoiled.

    It is the block that the authors of SAR leave out in a ResNet or a ViT; in other networks, the last quarter of the
    normalization layers.
    """
    use_batch_statistics(model)
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, NORMS)]
    earlier = [layer for name, layer in layers if not _is_in_last_block(name)]
    if len(earlier) == len(layers):
        earlier = [layer for _, layer in layers[: len(layers) - len(layers) // 4]]
    parameters: list[nn.Parameter] = []
    for layer in earlier:
        parameters.extend(layer.parameters(recurse=False))
    return parameters


def _is_in_last_block(name: str) -> bool:
    """Returns whether the layer of this name is one that the authors of SAR leave out."""
    return any(part in f"{name}." for part in LAST_BLOCKS)


def train_head(model: SourceModel) -> list[nn.Parameter]:
    """Returns the parameters of the head; all statistics remain those of the source."""
    return list(model.head.parameters())


def train_new_norm(model: SourceModel) -> list[nn.Parameter]:
    """Returns the scale and shift of a new BatchNorm in front of the head, which uses the statistics of the batch."""
    like = next(model.head.parameters())
    norm = nn.BatchNorm1d(model.dim, track_running_stats=False, device=like.device, dtype=like.dtype)
    model.head = nn.Sequential(norm, model.head)
    return list(norm.parameters())


# Each prepares a model, in place, and returns the parameters to train.
PARTS: dict[str, Callable[[SourceModel], list[nn.Parameter]]] = {
    "norm": train_norms,
    "norm but the last block": train_norms_but_last_block,
    "head": train_head,
    "new norm": train_new_norm,
}


class EntropyDescent(Adapter, ABC):
    """Minimizes a loss of its own answers by training a small part of the model.

    Other methods may use one to train their encoder: ``learn`` takes any logits, or logarithms of probabilities, that
    were computed with ``model``, and updates it.

    Args:
        trains: the part of the model that is trained: norm, norm but the last block, or head.
        lr: the learning rate; by default that of ``RATES`` for the optimizer.
        optimizer: adam, or sgd with momentum 0.9.
        steps: how many are made on each batch.
    """

    def __init__(self, source: Source, *, trains: str, lr: float | None, optimizer: str, steps: int) -> None:
        require.whole("steps", steps, least=1)
        prepare = PARTS[require.one_of("trains", trains, PARTS)]
        make_optimizer = OPTIMIZERS[require.one_of("optimizer", optimizer, OPTIMIZERS)]
        if lr is None:
            lr = RATES[optimizer]
        require.positive("lr", lr)
        super().__init__(source)
        self.steps = steps
        self.trained = prepare(self.model)
        if not self.trained:
            raise AdaNPCError(
                f"{type(self).__name__} trains the scales and shifts of normalization layers, and the model has none: "
                "use a method that trains the head, such as TentClf, or one without gradients, such as T3A"
            )
        for parameter in self.trained:
            parameter.requires_grad_(True)
        self.optimizers["entropy"] = make_optimizer(self.trained, lr=lr)
        # For recover(), which starts anew from here.
        self.start = [parameter.detach().clone() for parameter in self.trained]
        self._new_optimizer_state = deepcopy(self.optimizers["entropy"].state_dict())

    @abstractmethod
    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """Makes one step on a batch, given its logits (B, C) with gradients; none if there is nothing to learn from."""

    def moving(self) -> set[str]:
        """Returns the names of what is trained."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) from before the last step on the batch."""
        for _ in range(self.steps):
            with torch.enable_grad():
                logits = self.look(batch)
                self.learn(batch, logits)
        return logits.detach().softmax(1)

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Returns what is minimized (B,) for logits (B, C): the entropy of their softmax, or a measure of its own."""
        return entropy(logits)

    def look(self, batch: Tensor) -> Tensor:
        """Returns the logits (B, C) of images or features, by the model as it is now."""
        classify = self.model if self.sees == "images" else self.model.head
        logits: Tensor = classify(batch)
        return logits

    def descend(self, loss: Tensor) -> None:
        """Makes one step of the optimizer on a loss ()."""
        self.move(self.gradients(loss))

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradient of a loss () for each trained parameter; zero where the loss does not depend on it."""
        if not bool(loss.isfinite()):
            value = float(loss.detach())
            raise AdaNPCError(f"{type(self).__name__}: the loss is {value}: reset, and use a smaller learning rate")
        return torch.autograd.grad(loss, self.trained, allow_unused=True, materialize_grads=True)

    def move(self, gradients: Sequence[Tensor]) -> None:
        """Makes one step of the optimizer by these gradients of the trained parameters."""
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        self.optimizers["entropy"].step()
        self.optimizers["entropy"].zero_grad()

    @torch.no_grad()
    def recover(self) -> None:
        """Sets the trained parameters back to those of the source model, and starts the optimizer anew."""
        self.recover_parameters()
        self.optimizers["entropy"].load_state_dict(deepcopy(self._new_optimizer_state))

    @torch.no_grad()
    def recover_parameters(self) -> None:
        """Sets the trained parameters back to those of the source model; the optimizer keeps its momentum."""
        for parameter, start in zip(self.trained, self.start, strict=True):
            parameter.copy_(start)
