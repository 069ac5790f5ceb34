"""Only statistics move: of the batch inside BatchNorm layers, or of the stream before the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, BatchError, Source

NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


def norm_layers(module: nn.Module) -> list[nn.Module]:
    """The normalization layers inside a module, in its own order: BatchNorm, GroupNorm, LayerNorm and their kinds."""
    return [layer for layer in module.modules() if isinstance(layer, NORMS)]


def affine(module: nn.Module) -> list[nn.Parameter]:
    """The scales and shifts of the normalization layers inside a module; layers without them add nothing."""
    return [parameter for layer in norm_layers(module) for parameter in layer.parameters(recurse=False)]


def use_batch_statistics(module: nn.Module, prior: float = 0.0) -> int:
    """Lets every BatchNorm inside a module normalize by its batch from now on, in place; returns how many there are.

    The running statistics are never written: the module keeps the names and values of its ``state_dict``, and copies of
    it do as it does. It must stay in evaluation mode. With ``prior`` 0 gradients flow through the statistics, as in
    training; a mixture is a constant for them. Another call changes the prior.

    Args:
        module: a model, or a part of one.
        prior: the weight of the running statistics, as a number of images; 0 leaves them out.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]
    for layer in layers:
        if not isinstance(layer.__dict__.get("exchange"), _Exchange):
            exchange = layer.__dict__["exchange"] = _Exchange()
            layer.register_forward_pre_hook(exchange.before)
            layer.register_forward_hook(exchange.after, always_call=True)
        layer.__dict__["exchange"].prior = prior
    return len(layers)


def mixed_statistics(inputs: Tensor, mean: Tensor, variance: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    """Mean and variance (C,) of inputs (n, C, …), mixed with given ones that weigh as much as ``prior`` rows.

    The variance of the batch is that by which BatchNorm divides in training: the mean square, not corrected for n.
    """
    axes = [axis for axis in range(inputs.ndim) if axis != 1]
    of_batch = torch.var_mean(inputs.detach().to(mean.dtype), axes, correction=0)
    share = len(inputs) / (prior + len(inputs))
    return mean.lerp(of_batch[1], share), variance.lerp(of_batch[0], share)


class _Exchange:
    """Hooks that exchange the running statistics of one BatchNorm for the time of its forward.

    Hooks rather than another layer, since subclasses do more in their forward, such as an activation.
    """

    def __init__(self) -> None:
        self.prior = 0.0
        self.kept: tuple[Tensor | None, Tensor | None] | None = None

    def before(self, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        batch, (mean, variance) = inputs[0], self.kept or (layer.running_mean, layer.running_var)
        assert mean is not None
        assert variance is not None
        if self.prior:
            exchanged: tuple[Tensor | None, Tensor | None] = mixed_statistics(batch, mean, variance, self.prior)
        elif batch.numel() == batch.shape[1]:
            raise BatchError(
                f"{type(layer).__name__} has one value for each channel, which has no statistics: wait for more rows"
            )
        else:
            exchanged = None, None  # what makes the layer take those of the batch
        self.kept = mean, variance
        layer.running_mean, layer.running_var = exchanged

    def after(self, layer: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor | None) -> None:
        if self.kept is not None:
            layer.running_mean, layer.running_var = self.kept
            self.kept = None


class BNAdapt(Adapter):
    """The source model, with the statistics of its BatchNorm layers mixed with those of the batch.

    Nothing is kept from one batch to the next. ``prior`` 0 takes the batch alone, which others call Tent-Norm or
    prediction-time BN.

    Paper: Schneider et al. 2020, Improving robustness against common corruptions by covariate shift adaptation.

    Args:
        prior: N of the paper: how many images the source statistics count for, beside those of the batch.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"prior": (0, 1, 4, 16, 64, 256)}

    def __init__(self, source: Source, *, prior: float = 16) -> None:
        super().__init__(source)
        if not prior >= 0:
            raise AdaNPCError(f"prior must be 0 or more images, got {prior}")
        if not use_batch_statistics(self.model, prior):
            raise AdaNPCError("the model has no BatchNorm layer, so no statistics to adapt: take NEO or T3A")

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """The model's probabilities (B, C) under the mixed statistics."""
        probs: Tensor = self.model(batch).softmax(1)
        return probs


class NEO(Adapter):
    """The source model's head, on features less the running mean of all features so far, this batch's included.

    There is nothing to choose. The first batch is centered on its own mean, so a first batch of one row gets the head's
    answer to zero.

    Paper: Murphy et al. 2026, NEO: no-optimization test-time adaptation through latent re-centering.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    mean: Tensor
    count: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.register_buffer("mean", torch.zeros(self.model.dim, dtype=torch.float64, device=self.model.device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=self.model.device))

    def moving(self) -> set[str]:
        """The running mean and how many features it is of."""
        return {"mean", "count"}

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """The head's probabilities (B, C) of the centered features (B, D)."""
        self.count += len(batch)
        self.mean += (batch.double() - self.mean).sum(0) / self.count
        probs: Tensor = self.model.head((batch - self.mean).to(batch.dtype)).softmax(1)
        return probs
