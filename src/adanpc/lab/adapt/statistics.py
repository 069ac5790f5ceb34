"""Methods that adapt statistics only: those of BatchNorm layers (BNAdapt), or the mean of the features (NEO)."""

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
    """Returns the BatchNorm, GroupNorm and LayerNorm layers inside a module, in the order of ``module.modules()``."""
    return [layer for layer in module.modules() if isinstance(layer, NORMS)]


def affine(module: nn.Module) -> list[nn.Parameter]:
    """Returns the scales and shifts of the normalization layers inside a module; some layers have none."""
    parameters: list[nn.Parameter] = []
    for layer in norm_layers(module):
        parameters.extend(layer.parameters(recurse=False))
    return parameters


def use_batch_statistics(module: nn.Module, prior: float = 0.0) -> int:
    """Makes every BatchNorm inside a module normalize by its batch from now on; returns how many there are.

    The running statistics are never written, so the names and values in ``state_dict`` stay the same. Copies of the
    module behave in the same way. The module must stay in evaluation mode. If ``prior`` is 0, gradients flow through
    the statistics, as in training; a mixture with the running statistics counts as a constant. Another call changes the
    prior.

    Args:
        module: a model, or a part of one.
        prior: the weight of the running statistics, as a number of images; with 0 they are ignored.
    """
    count = 0
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            _exchange_of(layer).prior = prior
            count += 1
    return count


def statistics_used(module: nn.Module) -> list[float | None]:
    """Returns the ``prior`` of every BatchNorm inside a module, see ``use_batch_statistics``.

    It is None for a layer that normalizes by its running statistics.
    """
    priors: list[float | None] = []
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            exchange = layer.__dict__.get("exchange")
            priors.append(None if exchange is None else exchange.prior)
    return priors


def mixed_statistics(inputs: Tensor, mean: Tensor, variance: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    """Returns the mean and variance (C,) of inputs (n, C, …), mixed with given ones that count for ``prior`` rows.

    The variance of the batch is the unbiased one, which BatchNorm tracks in training, as in the code of BN adaptation
    and of MEMO. The variance of a single value counts as 0.
    """
    all_but_channels = [axis for axis in range(inputs.ndim) if axis != 1]
    values = inputs.detach().to(mean.dtype)
    correction = 1 if values[:, 0].numel() > 1 else 0  # the unbiased variance of a single value would be NaN
    batch_variance, batch_mean = torch.var_mean(values, all_but_channels, correction=correction)
    share = len(inputs) / (prior + len(inputs))
    return mean.lerp(batch_mean, share), variance.lerp(batch_variance, share)


def _exchange_of(layer: _BatchNorm) -> _Exchange:
    """Returns the hooks of a layer, and registers them the first time."""
    exchange = layer.__dict__.get("exchange")
    if not isinstance(exchange, _Exchange):
        exchange = _Exchange()
        # Stored on the layer, so that a deep copy of the layer gets its own copy, to which its hooks are bound.
        layer.__dict__["exchange"] = exchange
        layer.register_forward_pre_hook(exchange.before)
        layer.register_forward_hook(exchange.after, always_call=True)
    return exchange


class _Exchange:
    """Hooks that replace the running statistics of one BatchNorm while its forward runs.

    They are hooks rather than another layer because subclasses of BatchNorm may do more in their forward, such as an
    activation.
    """

    def __init__(self) -> None:
        self.prior = 0.0
        self.kept: tuple[Tensor | None, Tensor | None] | None = None  # the running statistics, during a forward

    def before(self, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        """Replaces the running statistics by those to normalize by."""
        batch = inputs[0]
        # If statistics are still kept, the last forward was interrupted, as by Ctrl-C, before they were put back.
        mean, variance = self.kept or (layer.running_mean, layer.running_var)
        assert mean is not None
        assert variance is not None
        new_mean: Tensor | None = None  # torch uses batch statistics if there are no running ones
        new_variance: Tensor | None = None
        if self.prior:
            new_mean, new_variance = mixed_statistics(batch, mean, variance, self.prior)
        elif batch.numel() == batch.shape[1]:
            name = type(layer).__name__
            raise BatchError(f"{name} gets one value per channel, too few for statistics: use larger batches")
        self.kept = (mean, variance)
        layer.running_mean = new_mean
        layer.running_var = new_variance

    def after(self, layer: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor | None) -> None:
        """Puts the running statistics back."""
        if self.kept is not None:
            layer.running_mean, layer.running_var = self.kept
            self.kept = None


class BNAdapt(Adapter):
    """Answers with the source model, whose BatchNorm layers mix their statistics with those of the batch.

    Nothing is kept from one batch to the next. With ``prior`` 0 only the batch counts, which is also known as Tent-Norm
    or prediction-time BN.

    Paper:
        Schneider et al., Improving Robustness against Common Corruptions by Covariate Shift Adaptation, NeurIPS 2020.

    Differs from the published code:
        With ``prior`` 0 the variance of the batch is the biased one, as in training and in ``Tent``. In the published
        code it is always the unbiased one.

    Args:
        prior: how many images the source statistics count for in the mixture; N in the paper.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"prior": (0, 1, 4, 16, 64, 256)}

    def __init__(self, source: Source, *, prior: float = 16) -> None:
        super().__init__(source)
        if not prior >= 0:
            raise AdaNPCError(f"prior must be 0 or more, got {prior}")
        layers = use_batch_statistics(self.model, prior)
        if layers == 0:
            raise AdaNPCError("the model has no BatchNorm layer, so no statistics to adapt: use NEO or T3A")

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the model's probabilities (B, C) under the mixed statistics."""
        probs: Tensor = self.model(batch).softmax(1)
        return probs


class NEO(Adapter):
    """Answers with the head, on features minus the mean of all features so far, this batch included.

    It has no settings. The first batch is centered on its own mean, so a first batch of one row gets the head's answer
    to the zero vector.

    Paper:
        Murphy et al., NEO: No-Optimization Test-Time Adaptation through Latent Re-Centering, 2026.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    mean: Tensor
    count: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.register_buffer("mean", torch.zeros(self.model.dim, dtype=torch.float64, device=self.model.device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=self.model.device))

    def moving(self) -> set[str]:
        """Returns the names of the running mean and of the number of features in it."""
        return {"mean", "count"}

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the head's probabilities (B, C) for the centered features (B, D)."""
        self.count += len(batch)
        self.mean += (batch.double() - self.mean).sum(0) / self.count
        centered = (batch - self.mean).to(batch.dtype)
        probs: Tensor = self.model.head(centered).softmax(1)
        return probs
