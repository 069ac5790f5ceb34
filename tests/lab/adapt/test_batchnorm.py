"""Instance-aware and robust BatchNorm against NumPy."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import sources
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adanpc.lab.adapt.batchnorm import InstanceAware, Renormalized, Robust, learning, replace_batchnorm, shrunk

Array = np.ndarray[Any, np.dtype[np.float64]]
SHAPES = ((5, 4, 3, 3), (1, 4, 3, 2), (6, 4, 7), (5, 4), (3, 4, 1, 1))


class NormThenReLU(nn.BatchNorm2d):
    """A BatchNorm that does more in its forward, as those of model libraries do."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).relu()


def norm_of(shape: tuple[int, ...], affine: bool = True) -> _BatchNorm:
    """A layer for inputs of this shape, in evaluation mode, with random values."""
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    layer = kinds[len(shape)](shape[1], affine=affine).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in layer.state_dict().values():
            if value.is_floating_point():
                value.copy_(0.5 + torch.rand(value.shape, generator=generator))
    return layer


def inputs_of(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Inputs whose rows have different means and spreads."""
    generator = torch.Generator().manual_seed(seed)
    rows = (shape[0], shape[1], *[1] * (len(shape) - 2))
    offset = 3 * torch.rand(rows, dtype=torch.float64, generator=generator)
    spread = 3 * torch.rand(rows, dtype=torch.float64, generator=generator)
    return offset + spread * torch.randn(shape, dtype=torch.float64, generator=generator)


def numbers(layer: _BatchNorm) -> tuple[Array, Array, Array, Array]:
    """Mean, variance, scale and shift of a layer."""
    state = {name: value.numpy().copy() for name, value in layer.state_dict().items()}
    ones = np.ones(layer.num_features)
    return state["running_mean"], state["running_var"], state.get("weight", ones), state.get("bias", 0 * ones)


def shrink(value: float, margin: float) -> float:
    return value - margin if value > margin else value + margin if value < -margin else 0.0


def instance_aware(values: Array, layer: _BatchNorm, mean: Array, variance: Array, k: float) -> Array:
    """The paper's formula, image by image and channel by channel."""
    outputs = np.empty_like(values)
    _, _, scale, shift = numbers(layer)
    for row, channel in np.ndindex(values.shape[:2]):
        seen = values[row, channel]
        near = float(mean[channel])
        spread = float(variance[channel])
        if seen.size > 1:
            size = seen.size
            error = spread + layer.eps
            near += shrink(float(seen.mean()) - near, k * math.sqrt(error / size))
            spread += shrink(float(seen.var(ddof=1)) - spread, k * error * math.sqrt(2 / (size - 1)))
        outputs[row, channel] = (seen - near) / math.sqrt(max(spread, 0.0) + layer.eps) * scale[channel] + shift[
            channel
        ]
    return outputs


def channels(values: Array, ddof: int) -> tuple[Array, Array]:
    """Mean and variance of each channel of a batch."""
    flat = np.moveaxis(values, 1, 0).reshape(values.shape[1], -1)
    return flat.mean(1), flat.var(1, ddof=ddof)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("affine", [True, False])
def test_instance_aware_is_that_of_loops(shape: tuple[int, ...], k: float, affine: bool) -> None:
    layer = norm_of(shape, affine)
    inputs = inputs_of(shape)
    mean, variance, *_ = numbers(layer)
    wrapped = InstanceAware(deepcopy(layer), k=k, share=0.1)
    np.testing.assert_allclose(
        wrapped(inputs).detach(), instance_aware(inputs.numpy(), layer, mean, variance, k), rtol=1e-9, atol=1e-9
    )
    assert all(np.array_equal(*pair) for pair in zip(numbers(wrapped.layer), numbers(layer), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_instance_aware_learns_by_the_statistics_of_the_batch_and_remembers_a_share(shape: tuple[int, ...]) -> None:
    layer = norm_of(shape)
    inputs = inputs_of(shape)
    old_mean, old_variance, *_ = numbers(layer)
    wrapped = InstanceAware(deepcopy(layer), k=0.5, share=0.1)
    with learning(wrapped):
        outputs = wrapped(inputs).detach()
    mean, variance = channels(inputs.numpy(), ddof=1)
    np.testing.assert_allclose(outputs, instance_aware(inputs.numpy(), layer, mean, variance, 0.5), rtol=1e-9)
    new_mean, new_variance, *_ = numbers(wrapped.layer)
    np.testing.assert_allclose(new_mean, 0.9 * old_mean + 0.1 * mean)
    np.testing.assert_allclose(new_variance, 0.9 * old_variance + 0.1 * variance)


def test_instance_aware_learns_nothing_from_a_single_value() -> None:
    layer = norm_of((1, 4))
    inputs = inputs_of((1, 4))
    wrapped = InstanceAware(deepcopy(layer), k=4.0, share=0.1)
    with learning(wrapped):
        torch.testing.assert_close(wrapped(inputs), layer(inputs))
    assert all(np.array_equal(*pair) for pair in zip(numbers(wrapped.layer), numbers(layer), strict=True))


def test_instance_aware_is_batchnorm_for_images_like_the_rest_and_instance_norm_without_margin() -> None:
    layer = norm_of((5, 4, 3, 3))
    inputs = inputs_of((5, 4, 3, 3))
    torch.testing.assert_close(InstanceAware(deepcopy(layer), k=1e9, share=0.1)(inputs), layer(inputs))
    own = (inputs - inputs.mean((2, 3), True)) / (inputs.var((2, 3), keepdim=True) + layer.eps).sqrt()
    expected = own * layer.weight[:, None, None] + layer.bias[:, None, None]
    torch.testing.assert_close(InstanceAware(deepcopy(layer), k=0.0, share=0.1)(inputs), expected)


def test_a_constant_image_stays_finite() -> None:
    layer = norm_of((2, 4, 3, 3))
    for wrapped in (InstanceAware(deepcopy(layer), k=0.0, share=0.1), Robust(deepcopy(layer), share=1.0)):
        with learning(wrapped):
            assert wrapped(torch.full((2, 4, 3, 3), 7.0).double()).isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_robust_is_that_of_loops(shape: tuple[int, ...]) -> None:
    layer = norm_of(shape)
    wrapped = Robust(deepcopy(layer), share=0.2)
    (mean, variance, scale, shift) = numbers(layer)
    for seed in range(3):
        inputs = inputs_of(shape, seed)
        new_mean, new_variance = channels(inputs.numpy(), ddof=0)
        mean = 0.8 * mean + 0.2 * new_mean
        variance = 0.8 * variance + 0.2 * new_variance
        with learning(wrapped):
            learned = wrapped(inputs).detach()
        normed = (np.moveaxis(inputs.numpy(), 1, -1) - mean) / np.sqrt(variance + layer.eps) * scale + shift
        expected = np.moveaxis(normed, -1, 1)
        np.testing.assert_allclose(learned, expected, rtol=1e-9)
        np.testing.assert_allclose(wrapped(inputs).detach(), expected, rtol=1e-9)  # and no further step
        np.testing.assert_allclose(numbers(wrapped.layer)[0], mean)
        np.testing.assert_allclose(numbers(wrapped.layer)[1], variance)


@pytest.mark.parametrize("kind", [Robust, InstanceAware])
def test_gradients_flow_through_the_statistics_that_are_learned(kind: type[Any]) -> None:
    layer = norm_of((2, 3, 2, 2))
    inputs = inputs_of((2, 3, 2, 2))
    settings = {"share": 0.3} if kind is Robust else {"share": 0.3, "k": 0.2}

    def outputs(values: Tensor) -> Tensor:
        wrapped = kind(deepcopy(layer), **settings)
        with learning(wrapped):
            made: Tensor = wrapped(values)
        return made

    assert torch.autograd.gradcheck(outputs, inputs.requires_grad_())


def test_what_a_layer_does_beside_normalizing_stays() -> None:
    layer = NormThenReLU(4).eval()
    outputs = Robust(layer, share=0.1)(inputs_of((5, 4, 3, 3)).float() - 2)
    assert bool((outputs == 0).any())
    assert bool((outputs >= 0).all())


@pytest.mark.parametrize("norm", ["batch2d", "batch1d"])
def test_a_replaced_model_answers_as_before_and_then_learns_on_its_own(norm: str) -> None:
    model = sources.source(norm).model
    images = sources.images(5)
    replaced = deepcopy(model)
    replace_batchnorm(replaced, lambda layer: Robust(layer, share=0.1))
    torch.testing.assert_close(replaced(images), model(images))
    copy = deepcopy(replaced)
    with learning(copy):
        copy(images)
    assert torch.equal(replaced(images), deepcopy(replaced)(images))
    assert not torch.equal(replaced(images), copy(images))
    assert sum(isinstance(module, Renormalized) for module in replaced.modules()) == 1


def test_layers_without_running_statistics_and_other_norms_stay() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.GroupNorm(1, 3), nn.LayerNorm(4))
    before = list(model)
    replace_batchnorm(model, lambda layer: Robust(layer, share=0.1))
    assert list(model) == before


def test_learning_ends_with_its_block_even_by_an_error() -> None:
    layer = Robust(norm_of((5, 4)), share=0.1)
    with learning(layer):
        assert layer.learning
    assert not layer.learning
    with pytest.raises(RuntimeError), learning(layer):
        layer(torch.ones(2, 3, dtype=torch.float64))  # of other channels
    assert not layer.learning


def test_shrunk_moves_toward_zero() -> None:
    assert shrunk(torch.tensor([-3.0, -1.0, 0.0, 0.5, 2.0]), torch.tensor(1.0)).tolist() == [-2, 0, 0, 0, 1]
