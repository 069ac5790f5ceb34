"""Entropy against NumPy, and what all methods share that descend it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.adapt.mixtures import mixtures, stream
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.entropy import EntropyDescent, entropy
from adanpc.lab.adapt.filtered import ETA
from adanpc.lab.adapt.tent import Tent
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import check_adapter
from adanpc.testing.adapters import toy_source


class TentThenNearestMean(Adapter):
    """Tent moves the encoder, and its features go to another classifier."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.tent = Tent(source)
        means = torch.stack([source.features[source.labels == label].mean(0) for label in range(3)])
        self.register_buffer("means", means)

    means: Tensor

    def moving(self) -> set[str]:
        return {f"tent.{name}" for name in self.tent.moving()}

    def answer(self, batch: Tensor) -> Tensor:
        self.tent.step(batch)
        with torch.no_grad():
            return (-torch.cdist(self.tent.model.features(batch), self.means)).softmax(1)


class ETAOnAnotherVote(Adapter):
    """The entropy of another classifier's probabilities moves the encoder."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.eta = ETA(source, margin=1.0, similarity=1.1, lr=0.1)
        means = torch.stack([source.features[source.labels == label].mean(0) for label in range(3)])
        self.register_buffer("means", means)

    means: Tensor

    def moving(self) -> set[str]:
        return {f"eta.{name}" for name in self.eta.moving()}

    def answer(self, batch: Tensor) -> Tensor:
        with torch.enable_grad():
            probs = (-torch.cdist(self.eta.model.features(batch), self.means)).softmax(1)
            self.eta.learn(batch, probs.log())
        return probs.detach()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(-30, 30), min_size=3, max_size=3), min_size=1, max_size=4))
def test_entropy_is_minus_the_sum_of_p_log_p(rows: list[list[float]]) -> None:
    logits = np.array(rows)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    probs = powers / powers.sum(1, keepdims=True)
    expected = [-sum(p * np.log(p) for p in row if p > 0) for row in probs]
    np.testing.assert_allclose(entropy(torch.tensor(rows, dtype=torch.float64)).numpy(), expected, atol=1e-9)


def test_entropy_of_sure_and_of_even_answers() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [5.0, 5.0, 5.0]])
    assert torch.allclose(entropy(logits), torch.tensor([0.0, np.log(3)], dtype=torch.float32))
    probs = torch.tensor([[0.5, 0.25, 0.25]])
    assert entropy(probs.log()).item() == pytest.approx(1.5 * np.log(2))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"alpha": 0.0}, "alpha must be a finite number greater than 0, got 0.0"),
        ({"alpha": float("nan")}, "alpha must be a finite number greater than 0, got nan"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"optimizer": "rmsprop"}, "optimizer must be one of adam, sgd, got 'rmsprop'"),
    ],
)
def test_settings_that_make_no_sense_are_named(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(AdaNPCError, match=message):
        Tent(toy_source(), **chosen)


def test_a_part_that_is_not_there_is_named() -> None:
    with pytest.raises(
        AdaNPCError, match="trains must be one of norm, norm but the last block, head, new norm, got 'all'"
    ):
        ETA(toy_source(), trains="all")


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.BatchNorm1d(4, affine=False)])
def test_a_model_without_scale_and_shift_is_refused_with_a_remedy(layer: nn.Module) -> None:
    model = SourceModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 4), layer), 4, 3)
    with pytest.raises(AdaNPCError, match="Tent trains the scales and shifts.* the model has none: use .* TentClf"):
        Tent(Source(model, torch.randn(6, 4), torch.arange(6) % 3))


def test_a_loss_that_is_not_finite_moves_nothing_and_is_named() -> None:
    adapter = Tent(toy_source())
    before = [value.detach().clone() for value in adapter.trained]
    with pytest.raises(AdaNPCError, match="Tent: the loss is nan: reset, and use a smaller learning rate"):
        adapter.descend(adapter.trained[0].sum() * torch.nan)
    assert all(torch.equal(now, then) for now, then in zip(adapter.trained, before, strict=True))


def test_a_parameter_that_plays_no_part_stays() -> None:
    adapter = Tent(toy_source())
    scale = adapter.trained[0].detach().clone()
    shift = adapter.trained[1].detach().clone()
    adapter.descend(adapter.trained[0].sum())
    assert not torch.equal(adapter.trained[0], scale)
    assert torch.equal(adapter.trained[1], shift)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_recovery_is_to_the_source_even_after_a_resumed_stream(optimizer: str) -> None:
    images = mixtures(6, seed=1)
    fresh = Tent(toy_source(), optimizer=optimizer)
    expected = [fresh.step(images) for _ in range(3)]
    moved = Tent(toy_source(), optimizer=optimizer)
    resumed = Tent(toy_source(), optimizer=optimizer)
    for batch in stream():
        moved.step(batch)
    resumed.load_state_dict(moved.state_dict())
    resumed.step(images)
    resumed.recover()
    assert all(torch.equal(resumed.step(images), answer) for answer in expected)


@pytest.mark.parametrize("kind", [TentThenNearestMean, ETAOnAnotherVote])
def test_another_method_may_use_one_for_its_encoder(kind: type[Adapter]) -> None:
    check_adapter(kind)


def test_an_encoder_moved_by_another_vote_makes_that_vote_surer() -> None:
    adapter = ETAOnAnotherVote(toy_source())
    images = mixtures(12, seed=1)
    answers = [adapter.step(images) for _ in range(20)]
    assert entropy(answers[-1].log()).mean() < entropy(answers[0].log()).mean() - 0.01


def test_the_class_itself_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        EntropyDescent(toy_source(), trains="norm", lr=1.0, optimizer="adam", steps=1)  # type: ignore[abstract]
