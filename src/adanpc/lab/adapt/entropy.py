"""What methods share that minimize the entropy of the model's own answers."""

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
# Learning rates of ETA, EATA, SAR and DeYO: SGD as their authors use it on ImageNet, Adam as in later comparisons on
# CIFAR.
RATES: dict[str, float] = {"sgd": 2.5e-4, "adam": 1e-3}
# Parts of layer names by which the code of SAR and DeYO recognizes the last blocks of ResNets and of ViT-B.
LAST_BLOCKS = ("layer4", "blocks.9", "blocks.10", "blocks.11", "norm.")


def entropy(logits: Tensor) -> Tensor:
    """Returns the entropy (B,) of the softmax of logits (B, C), in nats.

    Logarithms of probabilities may be given instead of logits if no probability is zero.
    """
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def train_norms(model: SourceModel) -> list[nn.Parameter]:
    """Returns the scales and shifts of all normalization layers, and makes BatchNorm use batch statistics."""
    use_batch_statistics(model)
    return affine(model)


def train_norms_but_last_block(model: SourceModel) -> list[nn.Parameter]:
    """Does the same as ``train_norms``, but leaves out the last block, where features are most easily spoiled.

    In a ResNet or a ViT it is the block that the authors of SAR leave out; in other networks it is the last quarter of
    the normalization layers.
    """
    use_batch_statistics(model)
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, NORMS)]
    earlier = [layer for name, layer in layers if not _is_in_last_block(name)]
    if len(earlier) == len(layers):  # the network is neither a ResNet nor a ViT
        kept = len(layers) - len(layers) // 4
        earlier = [layer for _, layer in layers[:kept]]
    parameters: list[nn.Parameter] = []
    for layer in earlier:
        parameters.extend(layer.parameters(recurse=False))
    return parameters


def _is_in_last_block(name: str) -> bool:
    """Returns whether the authors of SAR leave out the layer of this name."""
    return any(part in f"{name}." for part in LAST_BLOCKS)  # the final dot lets "norm." match a layer called "norm"


def train_head(model: SourceModel) -> list[nn.Parameter]:
    """Returns the parameters of the head; BatchNorm layers keep the statistics of the source."""
    return list(model.head.parameters())


def train_new_norm(model: SourceModel) -> list[nn.Parameter]:
    """Puts a new BatchNorm, which uses batch statistics, in front of the head, and returns its scale and shift."""
    like = next(model.head.parameters())
    norm = nn.BatchNorm1d(model.dim, track_running_stats=False, device=like.device, dtype=like.dtype)
    model.head = nn.Sequential(norm, model.head)
    return list(norm.parameters())


# Each function prepares a model in place and returns the parameters to train.
PARTS: dict[str, Callable[[SourceModel], list[nn.Parameter]]] = {
    "norm": train_norms,
    "norm but the last block": train_norms_but_last_block,
    "head": train_head,
    "new norm": train_new_norm,
}


class EntropyDescent(Adapter, ABC):
    """Minimizes a loss of its own answers by training a small part of the model.

    Another method may use an instance to train its encoder: ``learn`` takes any logits, or logarithms of
    probabilities, that were computed with ``model``, and updates the model.

    Args:
        trains: the part of the model that is trained, one of ``PARTS``.
        lr: the learning rate; by default that of ``RATES`` for the optimizer.
        optimizer: adam, or sgd with momentum 0.9.
        steps: the number of steps on each batch.
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
        # What recover() goes back to.
        self.start = [parameter.detach().clone() for parameter in self.trained]
        self._new_optimizer_state = deepcopy(self.optimizers["entropy"].state_dict())

    @abstractmethod
    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """Makes one step on a batch, given its logits (B, C) with gradients; no step if there is nothing to learn."""

    def moving(self) -> set[str]:
        """Returns the names of the trained parameters."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) as they were before the last step on the batch."""
        for _ in range(self.steps):
            with torch.enable_grad():
                logits = self.classify(batch)
                self.learn(batch, logits)
        return logits.detach().softmax(1)

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Returns the value (B,) to minimize for logits (B, C): by default the entropy of their softmax."""
        return entropy(logits)

    def classify(self, batch: Tensor) -> Tensor:
        """Returns the current model's logits (B, C) for images or features, whichever the method sees."""
        module = self.model if self.sees == "images" else self.model.head
        logits: Tensor = module(batch)
        return logits

    def descend(self, loss: Tensor) -> None:
        """Makes one step of the optimizer on a loss ()."""
        self.apply_gradients(self.gradients(loss))

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradient of a loss () for each trained parameter; zero where the loss does not depend on it."""
        if not bool(loss.isfinite()):
            value = float(loss.detach())
            raise AdaNPCError(f"{type(self).__name__}: the loss is {value}: reset, and use a smaller learning rate")
        return torch.autograd.grad(loss, self.trained, allow_unused=True, materialize_grads=True)

    def apply_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Makes one step of the optimizer with these gradients of the trained parameters."""
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        self.optimizers["entropy"].step()
        self.optimizers["entropy"].zero_grad()

    @torch.no_grad()
    def recover(self) -> None:
        """Sets the trained parameters back to those of the source model, and resets the optimizer."""
        self.recover_parameters()
        self.optimizers["entropy"].load_state_dict(deepcopy(self._new_optimizer_state))

    @torch.no_grad()
    def recover_parameters(self) -> None:
        """Sets the trained parameters back to those of the source model; the optimizer keeps its momentum."""
        for parameter, start in zip(self.trained, self.start, strict=True):
            parameter.copy_(start)
