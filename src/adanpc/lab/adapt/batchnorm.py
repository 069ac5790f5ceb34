"""BatchNorm layers with other statistics than those of a batch: of each image (NOTE), or of the stream (RoTTA)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Renormalized(nn.Module, ABC):
    """A BatchNorm layer that normalizes by ``statistics`` of its inputs, and else does what it did.

    The layer stays inside, in evaluation mode: its inputs are shifted and scaled so that its running statistics give
    the result. So kinds that do more than normalize, as those with an activation, keep doing it.

    Args:
        layer: with running statistics, which ``statistics`` may move while ``learning``.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.layer = layer
        self.learning = False

    @abstractmethod
    def statistics(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance to normalize inputs (B, C, …) by, in shapes that broadcast."""

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's outputs, as if its statistics were ``statistics``."""
        mean, variance = self.statistics(inputs)
        running_mean, running_variance = self.running(inputs)
        scale = ((running_variance + self.layer.eps) / (variance + self.layer.eps)).sqrt()
        outputs: Tensor = self.layer(running_mean + (inputs - mean) * scale)
        return outputs

    def running(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's running mean and variance (1, C, 1, …), with as many axes as the inputs."""
        shape = (1, -1, *[1] * (inputs.ndim - 2))
        assert self.layer.running_mean is not None
        assert self.layer.running_var is not None
        return self.layer.running_mean.view(shape), self.layer.running_var.view(shape)

    def move(self, mean: Tensor, variance: Tensor, share: float) -> None:
        """Moves the running statistics a share of the way to others (1, C, 1, …)."""
        running_mean, running_variance = self.running(mean)
        # New tensors, since a forward that waits for its gradient may hold the old ones.
        self.layer.running_mean = running_mean.lerp(mean.detach(), share).flatten()
        self.layer.running_var = running_variance.lerp(variance.detach(), share).flatten()


class InstanceAware(Renormalized):
    """Normalizes each image by the layer's statistics, unless its own lie too far from them: then by values between.

    The difference of a channel's mean from the layer's is shrunk by k standard errors of such a mean, that of the
    variance by k standard errors of a variance: what chance explains is ignored, and the rest is followed.
    While ``learning``, the layer's statistics are those of the batch, and the running ones follow.

    Args:
        layer: with running statistics.
        k: how many standard errors.
        share: how far the running statistics move toward those of a batch.
    """

    def __init__(self, layer: _BatchNorm, k: float, share: float) -> None:
        super().__init__(layer)
        self.k, self.share = k, share

    def statistics(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Of each image (B, C, 1, …); inputs with a single value in each channel have none of their own."""
        mean, variance = self._of_layer(inputs)
        size = inputs[0, 0].numel()
        if size == 1:
            return mean, variance
        own_variance, own_mean = torch.var_mean(inputs, tuple(range(2, inputs.ndim)), keepdim=True)
        error = variance + self.layer.eps
        mean_shift = shrunk(own_mean - mean, self.k * (error / size).sqrt())
        variance_shift = shrunk(own_variance - variance, self.k * error * (2 / (size - 1)) ** 0.5)
        return mean + mean_shift, (variance + variance_shift).clamp(min=0)  # rounding may lead below

    def _of_layer(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        if not self.learning or inputs[:, 0].numel() == 1:
            return self.running(inputs)
        variance, mean = torch.var_mean(inputs, _all_but_channels(inputs), keepdim=True)
        self.move(mean, variance, self.share)
        return mean, variance


class Robust(Renormalized):
    """Normalizes by the statistics of the stream: those of the source, moved a little by every batch learned from.

    While ``learning``, gradients flow through the batch's share in them.

    Args:
        layer: with running statistics.
        share: of a batch; alpha in the paper.
    """

    def __init__(self, layer: _BatchNorm, share: float) -> None:
        super().__init__(layer)
        self.share = share

    def statistics(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Of the stream (1, C, 1, …), this batch included if it is learned from."""
        before = self.running(inputs)
        if not self.learning:
            return before
        variance, mean = torch.var_mean(inputs, _all_but_channels(inputs), correction=0, keepdim=True)
        self.move(mean, variance, self.share)
        return before[0].lerp(mean, self.share), before[1].lerp(variance, self.share)


def shrunk(values: Tensor, margin: Tensor) -> Tensor:
    """Values moved toward zero by a margin of the same or a smaller shape, zero if they do not reach it."""
    return values.sign() * (values.abs() - margin).clamp(min=0)


def replace_batchnorm(model: nn.Module, make: Callable[[_BatchNorm], Renormalized]) -> None:
    """Puts ``make(layer)`` in the place of every BatchNorm layer in the model; it may have none.

    Layers without running statistics stay: they always take those of the batch.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm) and child.running_mean is not None:
                setattr(parent, name, make(child))


@contextmanager
def learning(model: nn.Module) -> Iterator[None]:
    """Lets the replaced layers of a model follow what it sees, inside a ``with``."""
    layers = [module for module in model.modules() if isinstance(module, Renormalized)]
    for layer in layers:
        layer.learning = True
    try:
        yield
    finally:
        for layer in layers:
            layer.learning = False


def _all_but_channels(inputs: Tensor) -> tuple[int, ...]:
    return (0, *range(2, inputs.ndim))
