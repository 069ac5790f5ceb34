"""ETA's choice and EATA's penalty against loops."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from math import exp, log, sqrt
from typing import Any

import pytest
import torch
from lab.adapt.mixtures import mixtures, stream
from torch import Tensor
from torch.nn.functional import cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter
from adanpc.lab.adapt.entropy import EntropyDescent
from adanpc.lab.adapt.filtered import EATA, ETA, Selection, usual_similarity, usual_weight
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import check_adapter
from adanpc.testing.adapters import toy_source

RATE = 1e-2
CLASSES = 3
MILD: dict[str, Any] = {
    "margin": 0.8,
    "similarity": 0.9,
    "lr": RATE,
}  # keeps some of a batch of mixtures, and not others


def chosen_by_loop(
    logits: Tensor, average: list[float] | None, margin: float, similarity: float
) -> tuple[list[int], list[float], list[float] | None]:
    """Rows, their weights, and the average afterwards: one answer after another, in plain numbers."""
    rows = []
    weights = []
    probs = logits.double().softmax(1).tolist()
    for row, answer in enumerate(probs):
        surprise = -sum(p * log(p) for p in answer if p > 0)
        if surprise >= margin:
            continue
        if average is not None:
            product = sum(p * q for p, q in zip(answer, average, strict=True))
            cosine = product / sqrt(sum(p * p for p in answer)) / sqrt(sum(q * q for q in average))
            if abs(cosine) >= similarity:
                continue
        rows.append(row)
        weights.append(exp(margin - surprise))
    if rows:
        mean = [sum(probs[row][label] for row in rows) / len(rows) for label in range(len(probs[0]))]
        average = mean if average is None else [0.9 * old + 0.1 * new for old, new in zip(average, mean, strict=True)]
    return rows, weights, average


def loss_by_loop(logits: Tensor, rows: list[int], weights: list[float]) -> Tensor:
    total = torch.zeros(())
    for row, weight in zip(rows, weights, strict=True):
        share = logits[row].softmax(0)
        total = total - weight * (share * share.log()).sum()
    return total / len(rows)


def trained(model: SourceModel) -> list[Tensor]:
    return [model.get_parameter("encoder.1.weight"), model.get_parameter("encoder.1.bias")]


def by_the_batch() -> SourceModel:
    """The source model with BatchNorm in training mode, which leaves only its running statistics to ignore."""
    return deepcopy(toy_source().model).train()


@pytest.mark.parametrize(("margin", "similarity"), [(0.4, None), (0.8, 0.9), (0.9, 0.7), (0.7, 2.0)])
def test_selection_is_that_of_a_loop(margin: float, similarity: float | None) -> None:
    selection = Selection(CLASSES, margin, similarity)
    average = None
    limit = usual_similarity(CLASSES) if similarity is None else similarity
    kept = []
    for number in range(8):
        logits = 3 * torch.randn(20, CLASSES, generator=torch.Generator().manual_seed(number))
        got = selection.loss(logits)
        rows, weights, average = chosen_by_loop(logits, average, margin * log(CLASSES), limit)
        kept.append(len(rows))
        if rows:
            assert got is not None
            assert torch.allclose(got, loss_by_loop(logits, rows, weights), atol=1e-5)
        else:
            assert got is None
        assert average is not None
        assert torch.allclose(selection.average, torch.tensor(average), atol=1e-6)
    assert 0 < sum(kept) < 160


def test_the_average_stays_if_no_answer_is_selected() -> None:
    selection = Selection(CLASSES, 0.4, None)
    even = torch.zeros(5, CLASSES)
    assert selection.loss(even) is None
    assert not selection.average.any()
    assert selection.loss(torch.tensor([[9.0, 0.0, 0.0]])) is not None
    before = selection.average.clone()
    assert selection.loss(even) is None
    assert selection.loss(torch.tensor([[9.0, 0.0, 0.0]])) is None  # like the average
    assert torch.equal(selection.average, before)


def test_the_weight_is_a_constant_for_the_gradient() -> None:
    logits = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.5]], requires_grad=True)
    loss = Selection(CLASSES, 0.8, None).loss(logits)
    assert loss is not None
    (got,) = torch.autograd.grad(loss, logits)
    rows, weights, _ = chosen_by_loop(logits.detach(), None, 0.8 * log(CLASSES), 1)
    (expected,) = torch.autograd.grad(loss_by_loop(logits, rows, weights), logits)
    assert torch.allclose(got, expected, atol=1e-6)


def test_the_usual_similarity_has_the_published_values_and_never_refuses_all_sure_answers() -> None:
    assert usual_similarity(10) == pytest.approx(0.4)
    assert usual_similarity(1000) == pytest.approx(0.05)
    assert all(1 / sqrt(classes) < usual_similarity(classes) < 1 for classes in range(2, 20_000))


def test_margins_grow_with_the_number_of_classes() -> None:
    assert Selection(1000, 0.4, None).margin == pytest.approx(0.4 * log(1000))
    assert Selection(10, 0.4, None).margin == pytest.approx(0.4 * log(10))


def test_eta_is_sgd_on_the_chosen() -> None:
    adapter = ETA(toy_source(), **MILD)
    model = by_the_batch()
    average = None
    speed = [torch.zeros(8), torch.zeros(8)]
    steps = 0
    for batch in stream(6):
        got = adapter.step(batch)
        logits = model(batch)
        assert torch.allclose(got, logits.softmax(1), atol=1e-4)
        rows, weights, average = chosen_by_loop(logits.detach(), average, 0.8 * log(CLASSES), 0.9)
        if not rows:
            continue
        steps += 1
        gradients = torch.autograd.grad(loss_by_loop(logits, rows, weights), trained(model))
        for i, (value, gradient) in enumerate(zip(trained(model), gradients, strict=True)):
            speed[i] = 0.9 * speed[i] + gradient
            value.data -= RATE * speed[i]
    assert steps > 2
    for got, expected, begin in zip(adapter.trained, trained(model), adapter.start, strict=True):
        assert torch.allclose(got, expected, atol=1e-5)
        assert not torch.allclose(got, begin, atol=1e-3)


@pytest.mark.parametrize("kind", [ETA, EATA])
def test_a_batch_without_sure_answers_moves_nothing(kind: type[ETA | EATA]) -> None:
    adapter = kind(toy_source(), margin=1e-9)
    before = deepcopy(adapter.state_dict())
    assert adapter.step(mixtures(6, seed=1)).isfinite().all()
    after = adapter.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in adapter.moving())
    assert not after["_extra_state"]["optimizers"]["entropy"]["state"]


def test_the_head_alone_can_be_trained_by_source_statistics() -> None:
    adapter = ETA(toy_source(), trains="head", **MILD)
    batch = mixtures(12, seed=70)
    with torch.no_grad():
        expected = toy_source().model(batch).softmax(1)
    assert torch.allclose(adapter.step(batch), expected, atol=1e-6)
    assert adapter.moving() == {"model.head.weight", "model.head.bias", "selection.average"}
    assert not torch.equal(adapter.trained[0], adapter.start[0])


@pytest.mark.parametrize("samples", [2000, 60, 37])
def test_fisher_weights_are_mean_squares_of_batch_gradients(samples: int) -> None:
    source = toy_source()
    model = by_the_batch()
    assert source.images is not None
    adapter = EATA(source, samples=samples)
    rows = source.mixed()[:samples]
    assert sorted(source.mixed().tolist()) == list(range(60))
    logits = model(source.images(rows))
    gradients = torch.autograd.grad(cross_entropy(logits, logits.argmax(1)), trained(model))
    for got, gradient in zip(adapter.fisher, gradients, strict=True):
        assert torch.allclose(got, gradient**2, rtol=1e-3, atol=1e-12)
        assert got.sum() > 0


def test_fisher_weights_are_averaged_over_batches() -> None:
    source = toy_source()
    assert source.images is not None
    images = mixtures(150, seed=9)
    many = replace(source, images=lambda rows: images[rows], features=torch.zeros(150, 16), labels=torch.arange(150))
    model = by_the_batch()
    total = [torch.zeros(8), torch.zeros(8)]
    mixed = images[many.mixed()]
    for part in (mixed[:50], mixed[50:100], mixed[100:]):  # three batches of 64 at most
        logits = model(part)
        gradients = torch.autograd.grad(cross_entropy(logits, logits.argmax(1)), trained(model))
        total = [old + gradient**2 / 3 for old, gradient in zip(total, gradients, strict=True)]
    for got, expected in zip(EATA(many).fisher, total, strict=True):
        assert torch.allclose(got, expected, rtol=1e-3)


def test_the_penalty_is_the_weighted_square_of_every_move() -> None:
    adapter = EATA(toy_source())
    assert adapter.penalty().item() == 0
    with torch.no_grad():
        adapter.trained[0].add_(torch.arange(8.0))
        adapter.trained[1].sub_(0.5)
    expected = sum(adapter.fisher[0][i].item() * i**2 + adapter.fisher[1][i].item() * 0.25 for i in range(8))
    assert adapter.penalty().item() == pytest.approx(expected, rel=1e-4)


def test_eata_is_eta_with_the_gradient_of_the_penalty() -> None:
    source = replace(toy_source(), images=lambda rows: mixtures(60, seed=9)[rows])  # in doubt: the penalty pulls
    adapter = EATA(source, weight=50.0, optimizer="sgd", **MILD)
    model = by_the_batch()
    begin = [value.clone() for value in adapter.start]
    average = None
    speed = [torch.zeros(8), torch.zeros(8)]
    for batch in stream(6):
        adapter.step(batch)
        logits = model(batch)
        rows, weights, average = chosen_by_loop(logits.detach(), average, 0.8 * log(CLASSES), 0.9)
        if not rows:
            continue
        gradients = torch.autograd.grad(loss_by_loop(logits, rows, weights), trained(model))
        for i, (value, gradient) in enumerate(zip(trained(model), gradients, strict=True)):
            pull = 50.0 * 2 * adapter.fisher[i] * (value.data - begin[i])
            speed[i] = 0.9 * speed[i] + gradient + pull
            value.data -= RATE * speed[i]
    for got, expected in zip(adapter.trained, trained(model), strict=True):
        assert torch.allclose(got, expected, atol=1e-5)


def moved(adapter: EntropyDescent, batches: list[Tensor]) -> float:
    for batch in batches:
        adapter.step(batch)
    return sum((now - start).square().sum().item() for now, start in zip(adapter.trained, adapter.start, strict=True))


def test_without_weight_eata_is_eta_and_with_more_it_moves_less() -> None:
    source = replace(toy_source(), images=lambda rows: mixtures(60, seed=9)[rows])
    free = ETA(source, **MILD)
    none = EATA(source, weight=0.0, **MILD)
    some = EATA(source, weight=20.0, **MILD)
    much = EATA(source, weight=200.0, **MILD)
    distances = [moved(adapter, stream(8)) for adapter in (free, none, some, much)]
    assert distances[0] == distances[1]
    assert distances[1] > distances[2] > distances[3] > 0


@pytest.mark.parametrize(
    ("kind", "chosen", "message"),
    [
        (ETA, {"margin": 0.0}, "margin must be a finite number greater than 0, got 0.0"),
        (EATA, {"weight": -1.0}, "weight must be 0 or more, got -1.0"),
        (EATA, {"samples": 0}, "samples must be at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_named(kind: type[Adapter], chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(AdaNPCError, match=message):
        kind(toy_source(), **chosen)


def test_eata_says_that_it_needs_source_images() -> None:
    with pytest.raises(AdaNPCError, match="EATA looks at source images: .* or use ETA"):
        EATA(replace(toy_source(), images=None))


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", [ETA, EATA])
@pytest.mark.parametrize("chosen", [MILD, {"optimizer": "adam", "lr": 0.1}, {"trains": "head", **MILD}])
def test_contract_with_other_settings(kind: type[Adapter], chosen: dict[str, Any]) -> None:
    check_adapter(kind, **chosen)


def test_rates_and_the_weight_of_the_penalty_are_the_published_ones() -> None:
    """2.5e-4 with SGD on ImageNet; the weight is 1 for CIFAR-10 and 2,000 for ImageNet."""
    source = toy_source()
    for kind in (ETA, EATA):
        for optimizer, rate in (("sgd", 2.5e-4), ("adam", 1e-3)):
            adapter = kind(source, optimizer=optimizer)
            assert adapter.optimizers["entropy"].param_groups[0]["lr"] == rate
    assert usual_weight(10) == pytest.approx(1)
    assert usual_weight(1000) == pytest.approx(2000)
    assert EATA(source).weight == usual_weight(3)
