"""SAR's two passes and DeYO's shuffled patches, written out."""

from __future__ import annotations

from copy import deepcopy
from math import exp, log, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.adapt.mixtures import mixtures, stream
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, BatchError, Source
from adanpc.lab.adapt.reliable import SAR, DeYO, DeYOPublished, SARPublished, perturbed, shuffled_patches
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import check_adapter
from adanpc.testing.adapters import toy_source

RATE = 1e-2
CLASSES = 3


def trained(model: SourceModel) -> list[nn.Parameter]:
    return [model.get_parameter("encoder.1.weight"), model.get_parameter("encoder.1.bias")]


def by_the_batch() -> SourceModel:
    """The source model with BatchNorm in training mode, which leaves only its running statistics to ignore."""
    return deepcopy(toy_source().model).train()


def entropies(logits: Tensor) -> list[Tensor]:
    return [-(row.softmax(0) * row.softmax(0).log()).sum() for row in logits]


def mean_of(values: list[Tensor], rows: list[int]) -> Tensor:
    return torch.stack([values[row] for row in rows]).mean()


def below(values: list[Tensor], margin: float) -> list[int]:
    return [row for row, value in enumerate(values) if value.item() < margin]


def test_a_climb_has_the_radius_as_its_length_and_the_gradient_as_its_direction() -> None:
    values = [nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0]))]
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([-4.0])]
    with perturbed(values, gradients, 0.5):
        assert values[0].tolist() == pytest.approx([1 + 0.5 * 3 / 5, 2.0])
        assert values[1].tolist() == pytest.approx([3 - 0.5 * 4 / 5])
    assert values[0].tolist() == [1.0, 2.0]
    assert values[1].tolist() == [3.0]


def test_a_climb_is_undone_after_an_error_and_stays_where_nothing_rises() -> None:
    values = [nn.Parameter(torch.tensor([0.1, 0.7]))]
    with pytest.raises(ZeroDivisionError), perturbed(values, [torch.ones(2)], 0.3):
        raise ZeroDivisionError
    assert torch.equal(values[0], torch.tensor([0.1, 0.7]))
    with perturbed(values, [torch.zeros(2)], 0.3):
        assert torch.equal(values[0], torch.tensor([0.1, 0.7]))


def test_sar_steps_by_the_gradient_at_the_top_of_the_climb() -> None:
    adapter = SAR(toy_source(), margin=0.6, radius=0.2, floor=0.0, lr=RATE)
    model = by_the_batch()
    margin = 0.6 * log(CLASSES)
    average = None
    speed = [torch.zeros(8), torch.zeros(8)]
    for batch in stream(5):
        got = adapter.step(batch)
        logits = model(batch)
        assert torch.allclose(got, logits.softmax(1), atol=1e-4)
        here = entropies(logits)
        sure = below(here, margin)
        gradients = torch.autograd.grad(mean_of(here, sure), trained(model))
        length = sqrt(sum(value.item() ** 2 for gradient in gradients for value in gradient))
        start = [value.detach().clone() for value in trained(model)]
        for value, gradient in zip(trained(model), gradients, strict=True):
            value.data += 0.2 * gradient / length
        there = entropies(model(batch))
        loss = mean_of(there, [row for row in below(there, margin) if row in sure])
        gradients = torch.autograd.grad(loss, trained(model))
        average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
        for i, value in enumerate(trained(model)):
            speed[i] = 0.9 * speed[i] + gradients[i]
            value.data = start[i] - RATE * speed[i]
    assert adapter.average == pytest.approx(average, rel=1e-3)
    for got, expected, begin in zip(adapter.trained, trained(model), adapter.start, strict=True):
        assert torch.allclose(got, expected, atol=1e-5)
        assert not torch.allclose(got, begin, atol=1e-3)


@pytest.mark.parametrize("chosen", [{"margin": 1e-9}, {"margin": 1e-3, "radius": 10.0}])
def test_sar_without_sure_answers_here_or_there_moves_nothing(chosen: dict[str, Any]) -> None:
    adapter = SAR(toy_source(), floor=0.0, **chosen)
    before = [value.detach().clone() for value in adapter.trained]
    assert adapter.step(mixtures(12, seed=70)).isfinite().all()
    assert all(torch.equal(now, then) for now, then in zip(adapter.trained, before, strict=True))
    assert adapter.average is None


def test_sar_recovers_when_its_average_loss_is_too_low() -> None:
    adapter = SAR(toy_source(), margin=1.0, floor=0.0, lr=0.1)
    batches = stream(3)
    for batch in batches:
        adapter.step(batch)
    assert not torch.equal(adapter.trained[0], adapter.start[0])
    assert adapter.average is not None
    adapter.floor = adapter.average + 10
    adapter.step(batches[0])
    assert all(torch.equal(now, start) for now, start in zip(adapter.trained, adapter.start, strict=True))
    assert adapter.average is None
    adapter.floor = 0.0
    fresh = SAR(toy_source(), margin=1.0, floor=0.0, lr=0.1)
    assert all(torch.equal(adapter.step(batch), fresh.step(batch)) for batch in batches)


def test_the_published_sar_keeps_momentum_and_average_when_it_recovers() -> None:
    adapter = SARPublished(toy_source(), margin=1.0, floor=0.0, lr=0.1)
    batches = stream(3)
    for batch in batches:
        adapter.step(batch)
    assert adapter.average is not None
    adapter.floor = adapter.average + 10
    adapter.step(batches[0])
    assert all(torch.equal(now, start) for now, start in zip(adapter.trained, adapter.start, strict=True))
    assert adapter.average is not None
    momenta = [state["momentum_buffer"] for state in adapter.optimizers["entropy"].state.values()]
    assert momenta
    assert all(momentum.any() for momentum in momenta)


def named_source(names: list[str]) -> Source:
    """A model whose encoder has BatchNorm layers of these names, one after another."""
    encoder = nn.Sequential()
    for name in names:
        encoder.add_module(name, nn.Sequential(nn.BatchNorm2d(1)))
    encoder.add_module("flat", nn.Flatten())
    return Source(SourceModel(encoder, 64, CLASSES).eval(), torch.randn(6, 64), torch.arange(6) % CLASSES)


@pytest.mark.parametrize("kind", [SARPublished, DeYOPublished])
@pytest.mark.parametrize(
    ("names", "trained_layers"),
    [
        (["layer1", "layer2", "layer3", "layer4"], ["layer1", "layer2", "layer3"]),  # a ResNet
        (["one", "two", "three", "four", "five"], ["one", "two", "three", "four"]),  # the last quarter
        (["one", "two", "three"], ["one", "two", "three"]),
    ],
)
def test_the_last_block_is_not_trained_as_published(
    kind: type[SAR | DeYO], names: list[str], trained_layers: list[str]
) -> None:
    moving = kind(named_source(names)).moving()
    assert {name.split(".")[2] for name in moving} == set(trained_layers)


def patches_by_loop(image: Tensor, grid: int) -> list[Tensor]:
    high = image.shape[1] // grid
    wide = image.shape[2] // grid
    return [
        image[:, row * high : (row + 1) * high, column * wide : (column + 1) * wide]
        for row in range(grid)
        for column in range(grid)
    ]


@settings(max_examples=30, deadline=None)
@given(
    sides=st.tuples(st.integers(4, 13), st.integers(4, 13)),
    grid=st.integers(2, 4),
    channels=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_shuffling_moves_whole_patches_and_leaves_the_rest(
    sides: tuple[int, int], grid: int, channels: int, seed: int
) -> None:
    torch.manual_seed(seed)
    images = torch.rand(3, channels, *sides)
    before = images.clone()
    shuffled = shuffled_patches(images, grid)
    assert torch.equal(images, before)
    for image, other in zip(images, shuffled, strict=True):
        ours = sorted(patch.flatten().tolist() for patch in patches_by_loop(image, grid))
        theirs = sorted(patch.flatten().tolist() for patch in patches_by_loop(other, grid))
        assert ours == theirs
        high = sides[0] // grid * grid
        wide = sides[1] // grid * grid
        assert torch.equal(image[:, high:], other[:, high:])
        assert torch.equal(image[:, :, wide:], other[:, :, wide:])


@pytest.mark.parametrize("side", [8, 28, 30])
def test_every_image_is_shuffled_in_its_own_way(side: int) -> None:
    torch.manual_seed(0)
    image = torch.rand(1, 2, side, side)
    shuffled = shuffled_patches(image.expand(6, -1, -1, -1), 4)
    assert len({tuple(each.flatten().tolist()) for each in shuffled}) == 6


@pytest.mark.parametrize("shape", [(3, 16), (3, 1, 3, 8), (3, 1, 8, 2)])
def test_what_has_no_patches_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BatchError, match="patches are cut from images"):
        shuffled_patches(torch.rand(shape), 4)


def test_deyo_is_sgd_on_sure_answers_that_fall_under_shuffling() -> None:
    adapter = DeYO(toy_source(), margin=0.9, drop=0.3, lr=RATE)
    model = by_the_batch()
    speed = [torch.zeros(8), torch.zeros(8)]
    kept = 0
    met = 0
    for number, batch in enumerate(stream(5)):
        torch.manual_seed(number)
        got = adapter.step(batch)
        logits = model(batch)
        assert torch.allclose(got, logits.softmax(1), atol=1e-4)
        torch.manual_seed(number)
        shuffled = model(shuffled_patches(batch, 4)).softmax(1)
        terms = []
        for row, surprise in enumerate(entropies(logits)):
            probs = logits[row].softmax(0)
            answer = int(probs.argmax())
            fall = probs[answer].item() - shuffled[row, answer].item()
            if surprise.item() < 0.9 * log(CLASSES) and fall > 0.3:
                terms.append((exp(0.4 * log(CLASSES) - surprise.item()) + exp(fall)) * surprise)
        kept = kept + len(terms)
        met = met + len(batch)
        gradients = torch.autograd.grad(sum(terms, torch.zeros(())) / len(terms), trained(model))
        for i, (value, gradient) in enumerate(zip(trained(model), gradients, strict=True)):
            speed[i] = 0.9 * speed[i] + gradient
            value.data -= RATE * speed[i]
    assert 0 < kept < met
    for got, expected, begin in zip(adapter.trained, trained(model), adapter.start, strict=True):
        assert torch.allclose(got, expected, atol=1e-5)
        assert not torch.allclose(got, begin, atol=1e-3)


@pytest.mark.parametrize("chosen", [{"drop": 1.0}, {"margin": 1e-9}])
def test_deyo_without_anybody_chosen_moves_nothing(chosen: dict[str, Any]) -> None:
    adapter = DeYO(toy_source(), **chosen)
    assert adapter.step(mixtures(12, seed=70)).isfinite().all()
    assert all(torch.equal(now, start) for now, start in zip(adapter.trained, adapter.start, strict=True))


@pytest.mark.parametrize(
    ("kind", "chosen", "message"),
    [
        (SAR, {"margin": 0.0}, "margin must be a finite number greater than 0, got 0.0"),
        (SAR, {"radius": -0.1}, "radius must be a finite number greater than 0, got -0.1"),
        (DeYO, {"margin": 0.0}, "margin must be a finite number greater than 0, got 0.0"),
        (DeYO, {"patches": 1}, "patches must be at least 2, got 1"),
    ],
)
def test_settings_that_make_no_sense_are_named(kind: type[Adapter], chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(AdaNPCError, match=message):
        kind(toy_source(), **chosen)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        (SAR, {"margin": 1.0, "floor": 0.0, "lr": 0.1}),
        (SAR, {"optimizer": "adam", "floor": 0.0}),
        (DeYO, {"margin": 1.0, "drop": -1.0, "lr": 0.1}),
        (DeYO, {"optimizer": "adam", "patches": 2}),
    ],
)
def test_contract_with_other_settings(kind: type[Adapter], chosen: dict[str, Any]) -> None:
    check_adapter(kind, **chosen)
