"""ROID against NumPy and against steps made by hand."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import sources
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import entropy
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter
from adanpc.lab.adapt.roid import (
    ROID,
    ROIDPublished,
    diversity_weights,
    likelihood_ratio,
    prior_corrected,
    symmetric_cross_entropy,
)
from adanpc.lab.adapt.statistics import affine, use_batch_statistics
from adanpc.lab.adapt.teacher import view
from adanpc.testing import check_adapter

SIZES: dict[str, Any] = {"rows": st.integers(1, 9), "classes": st.integers(2, 6), "seed": st.integers(0, 99)}


def random_logits(rows: int, classes: int, seed: int, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(rows, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slow_weights(logits: Tensor, trend: list[float], temperature: float) -> list[float]:
    """Certainty times diversity, row by row."""
    distances = []
    certainties = []
    for row in logits.numpy():
        probs = softmax(row)
        norms = math.sqrt(sum(p * p for p in probs)) * math.sqrt(sum(t * t for t in trend))
        distances.append(1 - sum(p * t for p, t in zip(probs, trend, strict=True)) / norms)
        certainties.append(-float(entropy(probs)))
    scaled = []
    for values in (distances, certainties):
        low = min(values)
        high = max(values)
        width = high - low
        if width == 0:
            width = 1.0  # all are equal, and become 0
        scaled.append([(value - low) / width for value in values])
    mean = sum(scaled[0]) / len(scaled[0])
    return [0.0 if d < mean else math.exp(d * c / temperature) for d, c in zip(*scaled, strict=True)]


@settings(max_examples=50, deadline=None)
@given(**SIZES)
def test_weights_are_certainty_times_diversity(rows: int, classes: int, seed: int) -> None:
    logits = random_logits(rows, classes, seed)
    trend = random_logits(1, classes, seed + 100)[0].softmax(0)
    weights = diversity_weights(logits, trend, 1 / 3)
    if rows > 1:
        np.testing.assert_allclose(weights, slow_weights(logits, trend.tolist(), 1 / 3), rtol=1e-6, atol=1e-9)
    assert float(weights.max()) >= 1
    assert float(weights.max()) <= math.exp(3) + 1e-9


def test_rows_that_are_alike_weigh_one() -> None:
    trend = torch.full((3,), 1 / 3)
    assert diversity_weights(torch.zeros(4, 3), trend, 1 / 3).tolist() == [1, 1, 1, 1]
    assert diversity_weights(torch.tensor([[5.0, 0.0, 1.0]]), trend, 1 / 3).tolist() == [1]


def test_weights_and_losses_of_saturated_logits_are_finite() -> None:
    logits = (1e4 * torch.eye(3)).requires_grad_()
    weights = diversity_weights(logits.detach(), torch.full((3,), 1 / 3), 1 / 3)
    losses = likelihood_ratio(logits) + symmetric_cross_entropy(logits.flip(0), logits)
    (weights * losses).sum().backward()
    assert weights.isfinite().all()
    assert losses.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@settings(max_examples=50, deadline=None)
@given(**SIZES)
def test_losses_are_those_of_loops(rows: int, classes: int, seed: int) -> None:
    one = random_logits(rows, classes, seed)
    other = random_logits(rows, classes, seed + 100)
    ratio = likelihood_ratio(one)
    symmetric = symmetric_cross_entropy(one, other)
    for row in range(rows):
        first = softmax(one[row].numpy())
        second = softmax(other[row].numpy())
        total = 0.0
        for p in np.minimum(first, 0.99):
            total -= p * math.log(p / (1 - p) + 1e-5)
        assert float(ratio[row]) == pytest.approx(total, rel=1e-9, abs=1e-9)
        forth = -(second * np.log(first)).sum()
        back = -(first * np.log(second)).sum()
        assert float(symmetric[row]) == pytest.approx((forth + back) / 2, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(**SIZES)
def test_answers_are_multiplied_by_the_smoothed_share_of_each_class(rows: int, classes: int, seed: int) -> None:
    probs = random_logits(rows, classes, seed).softmax(1)
    prior = [float(probs[:, label].sum()) / rows for label in range(classes)]
    smooth = max(1 / rows, 1 / classes) / max(prior)
    shares = [(share + smooth) / (1 + smooth * classes) for share in prior]
    assert sum(shares) == pytest.approx(1)
    for row, corrected in zip(probs.tolist(), prior_corrected(probs).tolist(), strict=True):
        products = [p * share for p, share in zip(row, shares, strict=True)]
        assert corrected == pytest.approx([product / sum(products) for product in products])


def test_a_class_that_is_frequent_in_the_batch_gains() -> None:
    probs = torch.tensor([[0.9, 0.1]] * 9 + [[0.45, 0.55]])
    assert prior_corrected(probs)[-1].argmax() == 0


@pytest.mark.parametrize("norm", sources.NORMS)
def test_steps_are_those_made_by_hand(norm: str) -> None:
    source = sources.source(norm)
    batches = [sources.images(count, seed=count) for count in (9, 20)]
    adapter = ROID(source, lr=0.05, momentum=0.9)
    model = deepcopy(source.model).requires_grad_(False)
    trend = torch.full((3,), 1 / 3)
    use_batch_statistics(model)
    scales = affine(model)
    start = [scale.clone() for scale in scales]
    for scale in scales:
        scale.requires_grad_(True)
    optimizer = torch.optim.Adam(scales, lr=0.05)
    for batch in batches:
        torch.manual_seed(7)
        answers = adapter.step(batch)
        logits = model(batch)
        probs = logits.detach().softmax(1)
        weights = torch.tensor(slow_weights(logits.detach().double(), trend.tolist(), 1 / 3))
        kept = weights > 0
        assert 1 < int(kept.sum()) < len(batch)
        torch.manual_seed(7)
        losses = likelihood_ratio(logits[kept]) + symmetric_cross_entropy(model(view(batch[kept])), logits[kept])
        optimizer.zero_grad()
        ((weights[kept] * losses).sum() / len(batch)).backward()
        optimizer.step()
        with torch.no_grad():
            for scale, old in zip(scales, start, strict=True):
                scale.copy_(0.9 * scale + 0.1 * old)
        trend = 0.9 * trend + 0.1 * probs.mean(0)
        torch.testing.assert_close(answers, prior_corrected(probs), rtol=0, atol=1e-4)
        torch.testing.assert_close(list(adapter.trained), scales, rtol=0, atol=2e-4)
        torch.testing.assert_close(adapter.trend, trend, rtol=0, atol=1e-4)


@pytest.mark.parametrize("norm", sources.NORMS)
def test_only_scales_shifts_and_the_trend_move(norm: str) -> None:
    adapter = ROID(sources.source(norm))
    before = {name: value.clone() for name, value in adapter.state_dict().items() if isinstance(value, Tensor)}
    for seed in range(3):
        adapter.step(sources.images(9, seed=seed))
    moved = {name for name, value in before.items() if not torch.equal(value, adapter.state_dict()[name])}
    layers = {name.rpartition(".")[0] for name in moved - {"trend"}}
    assert moved == adapter.moving()
    assert len(layers) == 1
    assert moved == {"trend", *(f"{layer}.{part}" for layer in layers for part in ("weight", "bias"))}


def test_without_momentum_the_weights_are_always_those_of_the_source() -> None:
    adapter = ROID(sources.source("batch2d"), momentum=0.0)
    adapter.step(sources.images(9))
    assert all(torch.equal(one, other) for one, other in zip(adapter.trained, adapter.anchor, strict=True))


def test_a_single_varied_row_is_viewed_with_its_batch() -> None:
    source = sources.source("batch1d")  # one row alone has no statistics
    adapter = ROID(source)
    batch = sources.images(1).repeat(6, 1, 1, 1)
    batch[-1] = 3 * sources.images(1, seed=8)[0]
    for row in range(5):
        batch[row] += 1e-3 * row
    with torch.no_grad():
        weights = diversity_weights(adapter.model(batch), adapter.trend, 1 / 3)
    assert int((weights > 0).sum()) == 1
    assert adapter.step(batch).isfinite().all()


def test_batches_of_one_leave_everything_finite() -> None:
    adapter = ROID(sources.source("group"))
    for seed in range(4):
        assert adapter.step(sources.images(1, seed=seed)).isfinite().all()
    assert all(value.isfinite().all() for value in adapter.parameters())


def test_a_model_without_scales_is_refused_with_a_remedy() -> None:
    with pytest.raises(
        AdaNPCError, match="ROID trains the scales and shifts of normalization layers, and the model has none"
    ):
        ROID(sources.source("none"))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("double", [False, True])
def test_it_runs_in_color_and_in_double_precision(channels: int, double: bool) -> None:
    source = sources.source("batch2d", channels=channels)
    dtype = torch.float64 if double else torch.float32
    source.model.to(dtype)
    adapter: Adapter = ROID(source)
    for seed in range(2):
        answers = adapter.step(sources.images(5, channels=channels, seed=seed).to(dtype))
        assert answers.dtype == dtype
        assert answers.isfinite().all()


@pytest.mark.no_cover
def test_the_contract_holds_with_other_settings() -> None:
    check_adapter(ROID, lr=0.1, momentum=0.5)


def test_the_published_prior_multiplies_logits() -> None:
    """As in classification/methods/roid.py of mariodoebler/test-time-adaptation at 8b2ed63."""
    source = sources.source("batch2d")
    batch = torch.rand(5, *sources.images(1)[0].shape)
    torch.manual_seed(0)
    published = ROIDPublished(source).step(batch)
    model = deepcopy(source.model).eval()
    use_batch_statistics(model)
    with torch.no_grad():
        outputs = model(batch).double().numpy()
    prior = softmax(outputs, 1).mean(0)
    smooth = max(1 / outputs.shape[0], 1 / outputs.shape[1]) / prior.max()
    outputs = outputs * (prior + smooth) / (1 + smooth * outputs.shape[1])
    np.testing.assert_allclose(published.numpy(), softmax(outputs, 1), atol=1e-5)
