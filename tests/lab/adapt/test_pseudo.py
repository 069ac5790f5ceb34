"""Pseudo-labels and SHOT against NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sources
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from scipy.stats import entropy
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source, descend
from adanpc.lab.adapt.pseudo import SHOT, SHOTIM, PLClf, PLFull, information_maximization, pseudo_label_loss
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import ADAPTER_CHECKS, check_adapter
from adanpc.testing.adapters import check_moves

Array = np.ndarray[Any, np.dtype[np.float64]]
LEARNERS: tuple[type[Any], ...] = (PLClf, PLFull, SHOT, SHOTIM)


def random_logits(rows: int, classes: int, seed: int, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(rows, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def input_of(kind: type[Any], source: Source, count: int, seed: int = 0) -> Tensor:
    images = sources.images(count, seed=seed)
    with torch.no_grad():
        if kind.sees == "images":
            return images
        return source.model.features(images)


def moved(adapter: Adapter, batch: Tensor) -> set[str]:
    """The names of the tensors that one step changes."""
    before = {name: value.clone() for name, value in adapter.state_dict().items() if isinstance(value, Tensor)}
    adapter.step(batch)
    return {name for name, value in before.items() if not torch.equal(value, adapter.state_dict()[name])}


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 9), classes=st.integers(2, 6), seed=st.integers(0, 99), threshold=st.floats(0, 1))
def test_the_pseudo_label_loss_is_that_of_loops(rows: int, classes: int, seed: int, threshold: float) -> None:
    logits = random_logits(rows, classes, seed)
    losses = []
    for row in logits.numpy():
        probs = softmax(row)
        if probs.max() > threshold:
            losses.append(-np.log(probs.max()))
    loss = pseudo_label_loss(logits, threshold)
    assert (loss is None) == (not losses)
    if loss is not None:
        assert float(loss) == pytest.approx(np.mean(losses), rel=1e-9, abs=1e-12)


def test_a_row_must_be_surer_than_the_threshold() -> None:
    assert pseudo_label_loss(torch.zeros(1, 2), 0.5) is None
    assert pseudo_label_loss(torch.zeros(1, 2), 0.4999) is not None


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 9), classes=st.integers(2, 6), seed=st.integers(0, 99))
def test_information_maximization_is_that_of_loops(rows: int, classes: int, seed: int) -> None:
    logits = random_logits(rows, classes, seed)
    probs = softmax(logits.numpy(), axis=1)
    mean = probs.mean(0)
    expected = np.mean([entropy(row) for row in probs]) + sum(p * np.log(p + 1e-5) for p in mean)
    assert float(information_maximization(logits)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_information_maximization_is_lowest_for_sure_and_varied_rows() -> None:
    varied = 50 * torch.eye(3)
    same = 50 * torch.eye(3)[[0, 0, 0]]
    unsure = torch.zeros(3, 3)
    assert information_maximization(varied) < information_maximization(unsure)
    assert information_maximization(varied) < information_maximization(same)


def adam_steps(weights: list[Array], gradients: list[list[Array]], lr: float) -> list[Array]:
    """Weights after steps of Adam, by its definition."""
    moments = [np.zeros_like(weight) for weight in weights], [np.zeros_like(weight) for weight in weights]
    for step, gradient in enumerate(gradients, start=1):
        for i, value in enumerate(gradient):
            moments[0][i] = 0.9 * moments[0][i] + 0.1 * value
            moments[1][i] = 0.999 * moments[1][i] + 0.001 * value**2
            first = moments[0][i] / (1 - 0.9**step)
            second = moments[1][i] / (1 - 0.999**step)
            weights[i] = weights[i] - lr * first / (np.sqrt(second) + 1e-8)
    return weights


def test_plclf_descends_the_cross_entropy_of_sure_rows_by_adam() -> None:
    source = sources.source("batch2d")
    adapter = PLClf(source, alpha=0.5, threshold=0.7)
    features = input_of(PLClf, source, 12)
    head = source.model.head.state_dict()
    weight = head["weight"].double().numpy()
    bias = head["bias"].double().numpy()
    rows = features.double().numpy()
    probs = softmax(rows @ weight.T + bias, axis=1)
    sure = probs.max(1) > 0.7
    assert 0 < sure.sum() < 12
    error = (probs - np.eye(3)[probs.argmax(1)])[sure] / sure.sum()  # of softmax and cross-entropy
    weight, bias = adam_steps([weight, bias], [[error.T @ rows[sure], error.sum(0)]], lr=0.5 * source.lr)
    answers = adapter.step(features)
    state = adapter.state_dict()
    np.testing.assert_allclose(answers, probs, rtol=1e-4)  # those before the step
    np.testing.assert_allclose(state["model.head.weight"], weight, atol=1e-5)
    np.testing.assert_allclose(state["model.head.bias"], bias, atol=1e-5)


def test_the_published_weights_make_shot_the_sum_of_its_parts() -> None:
    source = sources.source("batch2d")
    logits = random_logits(8, 3, seed=1)
    labels = -log_softmax(logits.numpy(), axis=1).max(1)
    sure = softmax(logits.numpy(), axis=1).max(1) > 0.9
    assert sure.any()
    expected = float(information_maximization(logits)) + 0.1 * labels[sure].mean()
    assert float(SHOT(source).loss(logits)) == pytest.approx(expected)
    assert float(SHOTIM(source).loss(logits)) == float(information_maximization(logits))


@pytest.mark.parametrize("norm", [*sources.NORMS, "none"])
def test_each_moves_its_own_part(norm: str) -> None:
    source = sources.source(norm)
    weights = {f"model.{name}" for name, _ in source.model.named_parameters()}
    head = {"model.head.weight", "model.head.bias"}
    parts = (head, weights, weights - head, weights - head)
    for kind, part in zip(LEARNERS, parts, strict=True):
        settings = {} if kind is SHOTIM else {"threshold": 0.4}
        adapter = kind(source, **settings)
        assert adapter.moving() == part
        assert moved(adapter, input_of(kind, source, 10)) == part


@pytest.mark.parametrize("kind", [PLFull, SHOT])
def test_a_norm_before_the_head_is_part_of_what_makes_features(kind: type[Any]) -> None:
    source = sources.source("none")
    torch.manual_seed(0)
    model = SourceModel(source.model.encoder, 6, 3, norm=True).eval()
    adapter = kind(replace(source, model=model), threshold=0.0)
    assert {"model.norm.weight", "model.norm.bias"} <= moved(adapter, sources.images(10))


@pytest.mark.parametrize("kind", [PLClf, PLFull])
def test_a_batch_of_unsure_rows_changes_nothing(kind: type[Any]) -> None:
    source = sources.source("batch2d", spread=0.5)
    adapter = kind(source)
    first = input_of(kind, source, 9)
    second = input_of(kind, source, 9, seed=1)
    expected = kind(source).step(second)
    assert float(adapter.step(first).max()) <= 0.9
    assert torch.equal(adapter.step(second), expected)
    assert adapter.optimizers["adam"].state_dict()["state"] == {}


def test_shot_without_sure_rows_is_shot_im() -> None:
    source = sources.source("batch2d")
    batches = [sources.images(9, seed=seed) for seed in range(3)]
    one = SHOT(source, threshold=1.0, steps=2)
    other = SHOTIM(source, steps=2)
    for batch in batches:
        assert torch.equal(one.step(batch), other.step(batch))


@pytest.mark.parametrize("kind", LEARNERS)
def test_three_steps_are_three_times_one(kind: type[Any]) -> None:
    source = sources.source("batch2d")
    settings = {} if kind is SHOTIM else {"threshold": 0.4}
    batch = input_of(kind, source, 9)
    single = kind(source, **settings)
    answers = [single.step(batch) for _ in range(3)]
    assert torch.equal(kind(source, steps=3, **settings).step(batch), answers[2])
    assert not torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("kind", LEARNERS)
def test_alpha_multiplies_the_rate_of_the_source(kind: type[Any]) -> None:
    source = sources.source("batch2d")
    one = kind(source, alpha=10.0)
    other = kind(replace(source, lr=10 * source.lr), alpha=1.0)
    batch = input_of(kind, source, 9)
    for _ in range(2):
        assert torch.equal(one.step(batch), other.step(batch))


def test_gradients_are_made_where_the_caller_has_switched_them_off() -> None:
    source = sources.source("batch2d")
    with torch.no_grad():
        assert moved(PLFull(source, threshold=0.4), sources.images(9))


@pytest.mark.parametrize("kind", LEARNERS)
def test_no_step_is_refused(kind: type[Any]) -> None:
    with pytest.raises(AdaNPCError, match="steps must be at least 1, got 0"):
        kind(sources.source("none"), steps=0)


def test_an_encoder_without_weights_is_refused() -> None:
    source = sources.source("none")
    model = SourceModel(nn.Flatten(), 64, 3).eval()
    with pytest.raises(AdaNPCError, match="SHOT trains the encoder, and this one has no weights: use PLClf"):
        SHOT(replace(source, model=model))


def test_a_loss_that_is_not_finite_is_refused_before_the_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(AdaNPCError, match="the loss is inf: reset the adapter, and use a smaller learning rate"):
        descend((weight / 0).sum(), torch.optim.SGD([weight], lr=1.0))
    assert weight.tolist() == [1, 1]


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", LEARNERS)
def test_the_contract_holds_with_other_settings(kind: type[Any]) -> None:
    check_adapter(kind, alpha=10.0, steps=3)


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", [PLClf, PLFull, SHOT])
@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_the_contract_holds_with_all_rows_and_with_none(kind: type[Any], threshold: float) -> None:
    for check in ADAPTER_CHECKS:
        if check is not check_moves or threshold < 1:  # above 1 there is nothing to learn from
            check(kind, threshold=threshold)
