"""Tent's steps against autograd and Adam written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from lab.adapt.mixtures import stream
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, linear

from adanpc.lab.adapt.adapter import Adapter, BatchError, Source
from adanpc.lab.adapt.entropy import entropy
from adanpc.lab.adapt.statistics import BNAdapt
from adanpc.lab.adapt.tent import Tent, TentClf, TentPreBN
from adanpc.lab.networks.convnet import ConvNet
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import check_adapter
from adanpc.testing.adapters import toy_images, toy_source

RATE = 1e-2  # of the toy source


def toy_forward(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The toy model's logits written out, by the statistics of the batch."""
    weights = toy_source().model.state_dict()
    hidden = conv2d(images, weights["encoder.0.weight"], weights["encoder.0.bias"], stride=2, padding=1)
    hidden = batch_norm(hidden, None, None, scale, shift, training=True).relu().flatten(1)
    features = linear(hidden, weights["encoder.4.weight"], weights["encoder.4.bias"])
    return linear(features, weights["head.weight"], weights["head.bias"])


def mean_entropy(logits: Tensor) -> Tensor:
    """Row by row, class by class."""
    total = torch.zeros(())
    for row in logits:
        share = row.exp() / row.exp().sum()
        for value in share:
            total = total - value * value.log()
    return total / len(logits)


def adam_by_hand(
    forward: Callable[..., Tensor], batches: Sequence[Tensor], values: list[Tensor], rate: float, steps: int = 1
) -> tuple[list[Tensor], list[Tensor]]:
    """The logits before each last step on a batch, and where the values end: Adam as in its paper."""
    first = [torch.zeros_like(v) for v in values]
    second = [torch.zeros_like(v) for v in values]
    answers = []
    time = 0
    for batch in batches:
        for _ in range(steps):
            time += 1
            values = [value.detach().requires_grad_() for value in values]
            logits = forward(batch, *values)
            gradients = torch.autograd.grad(mean_entropy(logits), values)
            for i, gradient in enumerate(gradients):
                first[i] = 0.9 * first[i] + 0.1 * gradient
                second[i] = 0.999 * second[i] + 0.001 * gradient**2
                step = first[i] / (1 - 0.9**time) / ((second[i] / (1 - 0.999**time)).sqrt() + 1e-8)
                values[i] = values[i].detach() - rate * step
        answers.append(logits.detach())
    return answers, values


def features_of(batches: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [toy_source().model.features(batch) for batch in batches]


def scale_and_shift(model: SourceModel) -> list[Tensor]:
    weights = model.state_dict()
    return [weights["encoder.1.weight"].clone(), weights["encoder.1.bias"].clone()]


@pytest.mark.parametrize(("alpha", "steps"), [(0.1, 1), (1.0, 1), (1.0, 3)])
def test_tent_is_adam_on_the_mean_entropy_of_scale_and_shift(alpha: float, steps: int) -> None:
    adapter = Tent(toy_source(), alpha=alpha, steps=steps)
    got = [adapter.step(batch) for batch in stream()]
    start = scale_and_shift(toy_source().model)
    answers, ends = adam_by_hand(toy_forward, stream(), start, RATE * alpha, steps)
    for probs, logits in zip(got, answers, strict=True):
        assert torch.allclose(probs, logits.softmax(1), atol=1e-4)
    for value, end, begin in zip(scale_and_shift(adapter.model), ends, start, strict=True):
        assert torch.allclose(value, end, atol=1e-4)
        assert not torch.allclose(value, begin, atol=1e-3)


def test_tent_by_sgd_has_momentum() -> None:
    adapter = Tent(toy_source(), optimizer="sgd")
    values = scale_and_shift(toy_source().model)
    speed = [torch.zeros_like(value) for value in values]
    for batch in stream():
        adapter.step(batch)
        values = [value.detach().requires_grad_() for value in values]
        gradients = torch.autograd.grad(mean_entropy(toy_forward(batch, *values)), values)
        speed = [0.9 * old + new for old, new in zip(speed, gradients, strict=True)]
        values = [value.detach() - RATE * v for value, v in zip(values, speed, strict=True)]
    start = scale_and_shift(toy_source().model)
    for got, expected, begin in zip(scale_and_shift(adapter.model), values, start, strict=True):
        assert torch.allclose(got, expected, atol=1e-5)
        assert not torch.allclose(got, begin, atol=1e-3)


def test_the_first_answer_is_that_of_the_statistics_alone() -> None:
    batch = stream(1)[0]
    assert torch.allclose(Tent(toy_source()).step(batch), BNAdapt(toy_source(), prior=0).step(batch), atol=1e-6)


def test_only_scale_and_shift_move_and_running_statistics_stay() -> None:
    adapter = Tent(toy_source())
    before = deepcopy(adapter.model.state_dict())
    for batch in stream():
        adapter.step(batch)
    moved = {name for name, value in adapter.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"encoder.1.weight", "encoder.1.bias"}
    assert adapter.moving() == {f"model.{name}" for name in moved}


def test_tent_makes_answers_surer() -> None:
    adapter = Tent(toy_source())
    batch = stream(1)[0]
    before = [entropy(adapter.step(batch).log()).mean().item() for _ in range(15)]
    assert before[-1] < 0.9 * before[0]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_episodic_tent_is_a_new_one_for_every_batch(optimizer: str) -> None:
    adapter = Tent(toy_source(), episodic=True, optimizer=optimizer, steps=2)
    for batch in stream():
        fresh = Tent(toy_source(), optimizer=optimizer, steps=2)
        fresh.step(batch)
        with torch.no_grad():
            expected = fresh.model(batch).softmax(1)
        assert torch.equal(adapter.step(batch), expected)


def test_one_episodic_step_changes_the_answer() -> None:
    batch = stream(1)[0]
    surer = Tent(toy_source(), episodic=True).step(batch)
    plain = BNAdapt(toy_source(), prior=0).step(batch)
    assert entropy(surer.log()).mean() < entropy(plain.log()).mean()


def test_tent_trains_group_norm_and_layer_norm() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(ConvNet(), nn.LayerNorm(128))
    source = Source(SourceModel(encoder, 128, 3), torch.randn(6, 128), torch.arange(6) % 3)
    adapter = Tent(source)
    adapter.step(toy_images(4, seed=0)[0])
    kinds = ("0.layers.2", "0.layers.5", "0.layers.8", "0.layers.11", "1")
    assert adapter.moving() == {f"model.encoder.{kind}.{name}" for kind in kinds for name in ("weight", "bias")}
    assert not torch.equal(
        source.model.get_parameter("encoder.1.weight"), adapter.model.get_parameter("encoder.1.weight")
    )


def test_tent_refuses_one_row_where_a_batch_norm_sees_one_value() -> None:
    torch.manual_seed(0)
    model = SourceModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), 4, 3, norm=True)
    adapter = Tent(Source(model, torch.randn(6, 4), torch.arange(6) % 3))
    with pytest.raises(BatchError, match="one value per channel"):
        adapter.step(toy_images(1, seed=0)[0])
    assert adapter.step(toy_images(2, seed=0)[0]).isfinite().all()


def test_tent_learns_where_gradients_are_switched_off() -> None:
    one = Tent(toy_source())
    other = Tent(toy_source())
    expected = [one.step(batch) for batch in stream()]
    with torch.no_grad():
        got = [other.step(batch) for batch in stream()]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("steps", [1, 3])
def test_tent_clf_is_adam_on_the_head(steps: int) -> None:
    batches = features_of(stream())
    head = toy_source().model.head
    assert isinstance(head, nn.Linear)
    adapter = TentClf(toy_source(), alpha=0.5, steps=steps)
    got = [adapter.step(batch) for batch in batches]
    answers, ends = adam_by_hand(linear, batches, [head.weight, head.bias], RATE * 0.5, steps)
    for probs, logits in zip(got, answers, strict=True):
        assert torch.allclose(probs, logits.softmax(1), atol=1e-4)
    assert isinstance(adapter.model.head, nn.Linear)
    assert torch.allclose(adapter.model.head.weight, ends[0], atol=1e-4)
    assert adapter.moving() == {"model.head.weight", "model.head.bias"}


def test_tent_pre_bn_is_adam_on_a_new_layer() -> None:
    batches = features_of(stream())
    head = toy_source().model.head

    def forward(features: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        centered = (features - features.mean(0)) / (features.var(0, correction=0) + 1e-5).sqrt()
        logits: Tensor = head(centered * scale + shift)
        return logits

    adapter = TentPreBN(toy_source())
    got = [adapter.step(batch) for batch in batches]
    answers, ends = adam_by_hand(forward, batches, [torch.ones(16), torch.zeros(16)], RATE)
    for probs, logits in zip(got, answers, strict=True):
        assert torch.allclose(probs, logits.softmax(1), atol=1e-3)
    assert torch.allclose(adapter.model.get_parameter("head.0.weight"), ends[0], atol=1e-3)
    assert adapter.moving() == {"model.head.0.weight", "model.head.0.bias"}


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        (Tent, {"alpha": 10.0, "steps": 3, "optimizer": "sgd"}),
        (Tent, {"episodic": True}),
        (Tent, {"episodic": True, "steps": 3, "optimizer": "sgd"}),
        (TentClf, {"alpha": 10.0, "steps": 3}),
        (TentPreBN, {"alpha": 10.0, "steps": 3}),
    ],
)
def test_contract_with_other_settings(kind: type[Adapter], chosen: dict[str, Any]) -> None:
    check_adapter(kind, **chosen)
