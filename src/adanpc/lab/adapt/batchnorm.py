"""BatchNorm layers that normalize by other statistics: those of each image (NOTE), or of the stream (RoTTA)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Renormalized(nn.Module, ABC):
    """A BatchNorm layer that normalizes by ``statistics`` of its inputs, and is otherwise unchanged.

    The layer stays inside, in evaluation mode: its inputs are shifted and scaled so that its running statistics give
    the result. So layers that do more than normalize, such as those with an activation, keep doing it.

    Args:
        layer: has running statistics, which ``statistics`` may move while ``learning``.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.layer = layer
        self.learning = False

    @abstractmethod
    def statistics(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and the variance to normalize inputs (B, C, …) by, in shapes that broadcast."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the outputs of the layer, as if its statistics were ``statistics``."""
        mean, variance = self.statistics(inputs)
        running_mean, running_variance = self.running(inputs)
        scale = ((running_variance + self.layer.eps) / (variance + self.layer.eps)).sqrt()
        outputs: Tensor = self.layer(running_mean + (inputs - mean) * scale)
        return outputs

    def running(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the layer's running mean and variance (1, C, 1, …), with as many axes as the inputs."""
        shape = (1, -1, *[1] * (inputs.ndim - 2))
        assert self.layer.running_mean is not None
        assert self.layer.running_var is not None
        return self.layer.running_mean.view(shape), self.layer.running_var.view(shape)

    def move(self, mean: Tensor, variance: Tensor, share: float) -> None:
        """Moves the running statistics a share of the way to others (1, C, 1, …)."""
        running_mean, running_variance = self.running(mean)
        # New tensors: a forward pass whose gradient is still to come may hold the old ones.
        self.layer.running_mean = running_mean.lerp(mean.detach(), share).flatten()
        self.layer.running_var = running_variance.lerp(variance.detach(), share).flatten()


class InstanceAware(Renormalized):
    """Normalizes each image by the layer's statistics, or by values between those and its own if they differ too much.

    The difference between the mean of a channel and that of the layer is shrunk by k standard errors of such a mean,
    and likewise for the variance: what chance explains is ignored, and the rest is followed. While ``learning``, the
    layer's statistics are those of the batch, and the running ones follow them.

    Args:
        layer: has running statistics.
        k: how many standard errors.
        share: how far the running statistics move toward those of a batch.
    """

    def __init__(self, layer: _BatchNorm, k: float, share: float) -> None:
        super().__init__(layer)
        self.k = k
        self.share = share

    def statistics(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns those of each image (B, C, 1, …); with a single value in each channel, those of the layer."""
        mean, variance = self._of_layer(inputs)
        size = inputs[0, 0].numel()
        if size == 1:
            return mean, variance
        own_variance, own_mean = torch.var_mean(inputs, tuple(range(2, inputs.ndim)), keepdim=True)
        error = variance + self.layer.eps
        mean_shift = shrunk(own_mean - mean, self.k * (error / size).sqrt())
        variance_shift = shrunk(own_variance - variance, self.k * error * (2 / (size - 1)) ** 0.5)
        return mean + mean_shift, (variance + variance_shift).clamp(min=0)  # rounding may lead below 0

    def _of_layer(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the running statistics, or while learning those of the batch, which the running ones follow."""
        if not self.learning or inputs[:, 0].numel() == 1:
            return self.running(inputs)
        variance, mean = torch.var_mean(inputs, _all_but_channels(inputs), keepdim=True)
        self.move(mean, variance, self.share)
        return mean, variance


class Robust(Renormalized):
    """Normalizes by the statistics of the stream: those of the source, moved a little by every batch learned from.

    While ``learning``, gradients flow through the share that the batch has in them.

    Args:
        layer: has running statistics.
        share: of a batch; alpha in the paper.
    """

    def __init__(self, layer: _BatchNorm, share: float) -> None:
        super().__init__(layer)
        self.share = share

    def statistics(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns those of the stream (1, C, 1, …), this batch included if it is learned from."""
        running_mean, running_variance = self.running(inputs)
        if not self.learning:
            return running_mean, running_variance
        variance, mean = torch.var_mean(inputs, _all_but_channels(inputs), correction=0, keepdim=True)
        self.move(mean, variance, self.share)
        return running_mean.lerp(mean, self.share), running_variance.lerp(variance, self.share)


def shrunk(values: Tensor, margin: Tensor) -> Tensor:
    """Returns values moved toward zero by a margin that broadcasts to them; zero if they lie within the margin."""
    return values.sign() * (values.abs() - margin).clamp(min=0)


def replace_batchnorm(model: nn.Module, make: Callable[[_BatchNorm], Renormalized]) -> None:
    """Replaces every BatchNorm layer in the model, if there are any, by ``make(layer)``.

    Layers without running statistics stay: they always use those of the batch.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm) and child.running_mean is not None:
                setattr(parent, name, make(child))


@contextmanager
def learning(model: nn.Module) -> Iterator[None]:
    """Lets the replaced layers of a model learn from what passes through them, inside a ``with``."""
    layers = [module for module in model.modules() if isinstance(module, Renormalized)]
    for layer in layers:
        layer.learning = True
    try:
        yield
    finally:
        for layer in layers:
            layer.learning = False


def _all_but_channels(inputs: Tensor) -> tuple[int, ...]:
    """Returns the axes of inputs (B, C, …) over which the statistics of a channel are taken."""
    return (0, *range(2, inputs.ndim))
