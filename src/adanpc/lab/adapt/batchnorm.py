"""BatchNorm layers that normalize by the statistics of each image (NOTE) or of the stream (RoTTA)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Renormalized(nn.Module, ABC):
    """A wrapper that makes a BatchNorm layer normalize by ``statistics`` instead of its running statistics.

    The wrapped layer still computes the output, in evaluation mode. Its inputs are shifted and scaled beforehand, so
    that normalizing them by the running statistics has the intended effect. Layers that do more than normalize, such
    as those with a built-in activation, therefore keep doing it.

    Args:
        layer: a BatchNorm with running statistics, which ``statistics`` may change while ``learning`` is true.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.layer = layer
        self.learning = False

    @abstractmethod
    def statistics(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and the variance to normalize inputs (B, C, …) by, in shapes that broadcast."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns what the layer would output if its running statistics were those of ``statistics``."""
        mean, variance = self.statistics(inputs)
        # Read after ``statistics``, which may have moved them: the layer below uses the moved ones.
        running_mean, running_variance = self.running(inputs)
        scale = ((running_variance + self.layer.eps) / (variance + self.layer.eps)).sqrt()
        outputs: Tensor = self.layer(running_mean + (inputs - mean) * scale)
        return outputs

    def running(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the layer's running mean and variance (1, C, 1, …), with the same number of axes as the inputs."""
        shape = (1, -1, *[1] * (inputs.ndim - 2))
        assert self.layer.running_mean is not None
        assert self.layer.running_var is not None
        return self.layer.running_mean.view(shape), self.layer.running_var.view(shape)

    def move(self, mean: Tensor, variance: Tensor, share: float) -> None:
        """Moves the running statistics a share of the way toward the given ones (1, C, 1, …)."""
        running_mean, running_variance = self.running(mean)
        # Assign new tensors: a forward pass whose gradient is yet to be computed may hold the old ones.
        self.layer.running_mean = running_mean.lerp(mean.detach(), share).flatten()
        self.layer.running_var = running_variance.lerp(variance.detach(), share).flatten()


class InstanceAware(Renormalized):
    """Normalizes each image by the layer's statistics, corrected where those of the image differ too much from them.

    The difference between a channel's mean in the image and in the layer is shrunk by k standard errors of such a
    mean, and the difference of the variances in the same way. So a difference that chance explains is ignored, and
    the rest is added. While ``learning``, the statistics of the batch take the place of the running ones, which move
    toward them.

    Args:
        layer: a BatchNorm with running statistics.
        k: the number of standard errors.
        share: how far the running statistics move toward those of a batch.
    """

    def __init__(self, layer: _BatchNorm, k: float, share: float) -> None:
        super().__init__(layer)
        self.k = k
        self.share = share

    def statistics(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the corrected statistics of each image (B, C, 1, …).

        If a channel has a single value, they are those of the layer.
        """
        mean, variance = self._of_layer(inputs)
        size = inputs[0, 0].numel()  # values in each channel of an image
        if size == 1:
            return mean, variance
        own_variance, own_mean = torch.var_mean(inputs, tuple(range(2, inputs.ndim)), keepdim=True)
        # The standard errors of the mean and of the variance of ``size`` normal values.
        smoothed = variance + self.layer.eps
        mean_error = (smoothed / size).sqrt()
        relative_error = (2 / (size - 1)) ** 0.5
        mean_shift = shrunk(own_mean - mean, self.k * mean_error)
        variance_shift = shrunk(own_variance - variance, self.k * smoothed * relative_error)
        return mean + mean_shift, (variance + variance_shift).clamp(min=0)  # rounding may give less than 0

    def _of_layer(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the running statistics or, while learning, those of the batch, and moves the running ones to them."""
        if not self.learning or inputs[:, 0].numel() == 1:
            return self.running(inputs)
        variance, mean = torch.var_mean(inputs, _all_but_channels(inputs), keepdim=True)
        self.move(mean, variance, self.share)
        return mean, variance


class Robust(Renormalized):
    """Normalizes by the statistics of the stream: those of the source, moved a little by every batch learned from.

    While ``learning``, gradients flow through the part that the current batch has in these statistics.

    Args:
        layer: a BatchNorm with running statistics.
        share: how far the statistics move toward those of a batch; alpha in the paper.
    """

    def __init__(self, layer: _BatchNorm, share: float) -> None:
        super().__init__(layer)
        self.share = share

    def statistics(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the statistics of the stream (1, C, 1, …), including this batch if it is learned from."""
        running_mean, running_variance = self.running(inputs)
        if not self.learning:
            return running_mean, running_variance
        variance, mean = torch.var_mean(inputs, _all_but_channels(inputs), correction=0, keepdim=True)
        self.move(mean, variance, self.share)
        # The same values as the moved running statistics, but with gradients.
        return running_mean.lerp(mean, self.share), running_variance.lerp(variance, self.share)


def shrunk(values: Tensor, margin: Tensor) -> Tensor:
    """Returns values moved toward zero by a margin that broadcasts to them; zero if they lie within the margin."""
    return values.sign() * (values.abs() - margin).clamp(min=0)


def replace_batchnorm(model: nn.Module, make: Callable[[_BatchNorm], Renormalized]) -> None:
    """Replaces every BatchNorm layer of a model by ``make(layer)``; a model without any stays as it is.

    Layers without running statistics are not replaced: they always use those of the batch.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm) and child.running_mean is not None:
                setattr(parent, name, make(child))


@contextmanager
def learning(model: nn.Module) -> Iterator[None]:
    """Lets the replaced layers of a model learn from their inputs inside a ``with`` block."""
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
