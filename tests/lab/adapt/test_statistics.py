"""BatchNorm by the batch, BN adaptation and NEO against NumPy."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import BatchError, Source
from adanpc.lab.adapt.statistics import NEO, BNAdapt, affine, mixed_statistics, norm_layers, use_batch_statistics
from adanpc.lab.networks.convnet import ConvNet
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import check_adapter
from adanpc.testing.adapters import toy_images, toy_source


class NormThenReLU(nn.BatchNorm2d):
    """A BatchNorm that does more in its forward, as those of model libraries do."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).relu()


class Interrupted(nn.BatchNorm2d):
    """Somebody presses Ctrl-C in its first forward."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            raise KeyboardInterrupt
        return super().forward(inputs)


def random_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.BatchNorm1d | nn.BatchNorm2d:
    """The layer in evaluation mode, with statistics, scale and shift that are not those of a new one."""
    generator = torch.Generator().manual_seed(layer.num_features)
    with torch.no_grad():
        for value in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
            assert value is not None
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return layer.eval()


def source_of(encoder: nn.Module, dim: int, norm: bool = False) -> Source:
    torch.manual_seed(3)
    model = SourceModel(encoder, dim, 3, norm=norm).eval()
    return Source(model, torch.randn(12, dim), torch.arange(12) % 3)


def numpy_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, inputs: Tensor, prior: float) -> np.ndarray[Any, Any]:
    """Schneider's formula, channel by channel; without a prior the variance is torch's own, which is not corrected."""
    values = inputs.double().numpy()
    outputs = np.empty(inputs.shape)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    n = len(values)
    for channel in range(values.shape[1]):
        seen = values[:, channel]
        mean = (prior * layer.running_mean[channel].item() + n * seen.mean()) / (prior + n)
        variance = (prior * layer.running_var[channel].item() + n * seen.var(ddof=int(prior > 0))) / (prior + n)
        scale = layer.weight[channel].item()
        shift = layer.bias[channel].item()
        outputs[:, channel] = (seen - mean) / np.sqrt(variance + layer.eps) * scale + shift
    return outputs


def numpy_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    shares: np.ndarray[Any, Any] = powers / powers.sum(1, keepdims=True)
    return shares


def test_norm_layers_are_found_in_order_and_give_scale_and_shift() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten()), nn.LayerNorm(4)
    )
    layers = norm_layers(model)
    assert [type(layer) for layer in layers] == [nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm]
    assert [id(value) for value in affine(model)] == [id(v) for layer in layers for v in (layer.weight, layer.bias)]


def test_a_layer_without_scale_and_shift_gives_none() -> None:
    assert affine(nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3))) == []
    assert norm_layers(ConvNet())
    assert norm_layers(nn.Linear(3, 3)) == []


@settings(max_examples=25, deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=2, max_size=4), prior=st.floats(0.25, 1e4), seed=st.integers(0, 1000))
def test_mixed_statistics_are_weighted_means_by_rows(shape: list[int], prior: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    mean = torch.randn(shape[1], dtype=torch.float64)
    variance = torch.rand(shape[1], dtype=torch.float64)
    mixed = mixed_statistics(inputs, mean, variance, prior)
    axes = tuple(axis for axis in range(len(shape)) if axis != 1)
    for got, source, batch in (
        (mixed[0], mean, inputs.numpy().mean(axes)),
        (mixed[1], variance, inputs.numpy().var(axes, ddof=min(1, inputs[:, 0].numel() - 1))),
    ):
        expected = (prior * source.numpy() + shape[0] * batch) / (prior + shape[0])
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("prior", [0, 1, 16, 1000])
@pytest.mark.parametrize("rows", [2, 7])
def test_bn_adapt_answers_by_the_formula(prior: float, rows: int) -> None:
    layer = random_norm(nn.BatchNorm2d(2))
    source = source_of(nn.Sequential(layer, nn.Flatten()), 18)
    images = torch.rand(rows, 2, 3, 3) * 3
    features = numpy_norm(layer, images, prior).reshape(rows, -1)
    head = source.model.head
    assert isinstance(head, nn.Linear)
    expected = numpy_softmax(features @ head.weight.detach().double().numpy().T + head.bias.detach().double().numpy())
    np.testing.assert_allclose(BNAdapt(source, prior=prior).step(images).numpy(), expected, atol=1e-5)


def test_a_large_prior_is_the_source_model_and_none_is_training_mode() -> None:
    source = toy_source()
    images = toy_images(6, seed=5, shift=0.4)[0]
    with torch.no_grad():
        kept = source.model(images).softmax(1)
        batch = deepcopy(source.model).train()(images).softmax(1)
    assert torch.allclose(BNAdapt(source, prior=1e9).step(images), kept, atol=1e-5)
    assert torch.allclose(BNAdapt(source, prior=0).step(images), batch, atol=1e-6)
    assert not torch.allclose(kept, batch, atol=1e-3)


def test_a_batch_normed_by_itself_undoes_a_scale_and_a_shift() -> None:
    layer = random_norm(nn.BatchNorm2d(8))
    inputs = torch.randn(6, 8, 4, 4)
    use_batch_statistics(layer)
    assert torch.allclose(layer(inputs), layer(inputs * 5 + 3), atol=1e-4)


@pytest.mark.parametrize("prior", [0, 16])
def test_running_statistics_and_names_stay(prior: float) -> None:
    source = toy_source()
    before = deepcopy(source.model.state_dict())
    adapter = BNAdapt(source, prior=prior)
    adapter.step(toy_images(6, seed=5, shift=1.0)[0])
    after = adapter.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert adapter.moving() == set()


def test_one_batch_leaves_no_trace_in_the_next() -> None:
    adapter = BNAdapt(toy_source())
    images = toy_images(6, seed=5)[0]
    first = adapter.step(images)
    adapter.step(toy_images(6, seed=6, shift=2.0)[0])
    assert torch.equal(adapter.step(images), first)


def test_a_single_image_has_statistics_but_a_single_vector_has_none() -> None:
    assert BNAdapt(toy_source(), prior=0).step(toy_images(1, seed=5)[0]).isfinite().all()
    source = source_of(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), 4, norm=True)
    adapter = BNAdapt(source, prior=0)
    image = toy_images(1, seed=5)[0]
    with pytest.raises(BatchError, match="BatchNorm1d gets one value per channel"):
        adapter.step(image)
    two = toy_images(2, seed=5)[0]
    assert torch.equal(adapter.step(two), BNAdapt(source, prior=0).step(two))
    assert BNAdapt(source, prior=1).step(image).isfinite().all()


def test_a_forward_that_fails_leaves_the_running_statistics() -> None:
    layer = random_norm(nn.BatchNorm2d(2))
    before = deepcopy(layer.state_dict())
    use_batch_statistics(layer)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.rand(3, 2))
    after = layer.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("prior", [0.0, 4.0])
def test_an_interrupted_forward_is_mended_by_the_next(prior: float) -> None:
    layer = random_norm(Interrupted(2))
    inputs = torch.randn(5, 2, 3, 3)
    before = deepcopy(layer.state_dict())
    expected = numpy_norm(layer, inputs, prior)
    use_batch_statistics(layer, prior)
    with pytest.raises(KeyboardInterrupt):
        layer(inputs)
    np.testing.assert_allclose(layer(inputs).detach().numpy(), expected, atol=1e-5)
    after = layer.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("prior", [0.0, 4.0])
def test_a_layer_that_also_activates_still_does(prior: float) -> None:
    layer = random_norm(NormThenReLU(2))
    inputs = torch.randn(5, 2, 3, 3)
    expected = numpy_norm(layer, inputs, prior).clip(min=0)
    assert use_batch_statistics(layer, prior) == 1
    np.testing.assert_allclose(layer(inputs).detach().numpy(), expected, atol=1e-5)


def test_a_copy_does_the_same_by_its_own_statistics() -> None:
    layer = random_norm(nn.BatchNorm2d(2))
    inputs = torch.randn(5, 2, 3, 3)
    use_batch_statistics(layer, 4.0)
    copy = deepcopy(layer)
    assert torch.equal(copy(inputs), layer(inputs))
    assert copy.running_mean is not None
    copy.running_mean.add_(1)
    np.testing.assert_allclose(copy(inputs).detach().numpy(), numpy_norm(copy, inputs, 4.0), atol=1e-5)
    np.testing.assert_allclose(layer(inputs).detach().numpy(), numpy_norm(layer, inputs, 4.0), atol=1e-5)


@pytest.mark.parametrize(("first", "second"), [(4.0, 0.0), (0.0, 4.0)])
def test_another_call_changes_the_prior_and_a_copy_has_its_own(first: float, second: float) -> None:
    layer = random_norm(nn.BatchNorm2d(2))
    inputs = torch.randn(5, 2, 3, 3)
    use_batch_statistics(layer, first)
    copy = deepcopy(layer)
    before = deepcopy(layer.state_dict())
    use_batch_statistics(copy, second)
    for _ in range(2):
        np.testing.assert_allclose(layer(inputs).detach().numpy(), numpy_norm(layer, inputs, first), atol=1e-5)
        np.testing.assert_allclose(copy(inputs).detach().numpy(), numpy_norm(copy, inputs, second), atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in copy.state_dict().items())


def test_gradients_flow_through_the_statistics_of_a_batch_as_in_training() -> None:
    layer = random_norm(nn.BatchNorm2d(2))
    trained = deepcopy(layer).train()
    inputs = torch.randn(5, 2, 3, 3)
    target = torch.randn(5, 2, 3, 3)
    use_batch_statistics(layer)
    one = inputs.clone().requires_grad_()
    other = inputs.clone().requires_grad_()
    (layer(one) * target).sum().backward()
    (trained(other) * target).sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    assert torch.allclose(one.grad, other.grad, atol=1e-6)
    assert layer.weight.grad is not None
    assert trained.weight.grad is not None
    assert torch.allclose(layer.weight.grad, trained.weight.grad, atol=1e-5)


def test_a_layer_without_running_statistics_is_left_alone() -> None:
    layer = nn.BatchNorm1d(2, track_running_stats=False).eval()
    assert use_batch_statistics(layer, 4.0) == 0
    assert torch.allclose(layer(torch.randn(50, 2)).mean(0), torch.zeros(2), atol=1e-5)


def test_bn_adapt_names_what_it_cannot_use() -> None:
    torch.manual_seed(0)
    group = Source(SourceModel(ConvNet(), 128, 3), torch.randn(6, 128), torch.arange(6) % 3)
    with pytest.raises(AdaNPCError, match="no BatchNorm layer.* use NEO or T3A"):
        BNAdapt(group)
    with pytest.raises(AdaNPCError, match="prior must be 0 or more, got -1"):
        BNAdapt(toy_source(), prior=-1)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 1, 5), (8, 2)])
def test_neo_subtracts_the_mean_of_all_features_so_far(sizes: tuple[int, ...]) -> None:
    source = toy_source()
    adapter = NEO(source)
    head = source.model.head
    stream = torch.randn(sum(sizes), 16, generator=torch.Generator().manual_seed(4)) + 7
    met = 0
    for batch in stream.split(sizes):
        met += len(batch)
        centered = batch.numpy() - stream[:met].numpy().mean(0)
        with torch.no_grad():
            expected = head(torch.as_tensor(centered)).softmax(1)
        assert torch.allclose(adapter.step(batch), expected, atol=1e-5)
    assert adapter.count.item() == met
    np.testing.assert_allclose(adapter.mean.numpy(), stream.double().numpy().mean(0), atol=1e-9)


def test_neo_undoes_a_shift_of_all_features() -> None:
    source = toy_source()
    still = NEO(source)
    moved = NEO(source)
    for seed in range(3):
        batch = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(still.step(batch), moved.step(batch + 100), atol=1e-3)


@pytest.mark.no_cover
@pytest.mark.parametrize("prior", [0, 256])
def test_contract_with_other_settings(prior: int) -> None:
    check_adapter(BNAdapt, prior=prior)
