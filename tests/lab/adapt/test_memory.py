"""NOTE and RoTTA against steps made by hand, and over streams cut in different ways."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import sources
import torch
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import BatchError, Source
from adanpc.lab.adapt.memory import NOTE, RoTTA, timely_loss
from adanpc.lab.adapt.statistics import affine
from adanpc.lab.adapt.teacher import view
from adanpc.testing import check_adapter

BOTH: tuple[type[Any], ...] = (NOTE, RoTTA)
BATCH_NORMS = ("batch2d", "batch1d")


def in_training(source: Source, momentum: float) -> nn.Module:
    """A copy of the model whose BatchNorm layers normalize by the batch and follow it, and alone have gradients."""
    model = deepcopy(source.model).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.train().requires_grad_(True)
            module.momentum = momentum
    return model


def buffers(module: nn.Module) -> list[Tensor]:
    return [value for name, value in module.state_dict().items() if "running" in name]


def scales(module: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in affine(module)]


class ByBatch(nn.Module):
    """BatchNorm by the batch, whose variance is divided by n - 1."""

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.eps = layer.eps

    def forward(self, inputs: Tensor) -> Tensor:
        axes = [0, *range(2, inputs.ndim)]
        shape = (-1, *[1] * (inputs.ndim - 2))
        normed = (inputs - inputs.mean(axes, keepdim=True)) / (inputs.var(axes, keepdim=True) + self.eps).sqrt()
        return normed * self.weight.view(shape) + self.bias.view(shape)


@pytest.mark.parametrize("norm", BATCH_NORMS)
def test_note_descends_the_entropy_of_its_memory(norm: str) -> None:
    source = sources.source(norm)
    batch = sources.images(8)
    adapter = NOTE(source, lr=0.05, capacity=20, every=8, k=1e9, share=0.1)  # no image is far enough: plain BatchNorm
    torch.testing.assert_close(adapter.step(batch), source.model(batch).softmax(1))

    model = in_training(source, momentum=0.1)
    model(batch)
    torch.testing.assert_close(buffers(adapter.model), buffers(model))
    trained = [value for value in model.parameters() if value.requires_grad]
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
                setattr(parent, name, ByBatch(child))
    probs = model(batch).softmax(1)
    optimizer = torch.optim.Adam(trained, lr=0.05)
    (-(probs * probs.log()).sum() / 8).backward()
    optimizer.step()
    torch.testing.assert_close(scales(adapter.model), [value.detach() for value in trained], rtol=0, atol=2e-4)
    assert not torch.allclose(scales(adapter.model)[0], scales(source.model)[0], atol=0.03)


def rotta_by_hand(source: Source, batch: Tensor, ages: list[int], capacity: int) -> tuple[nn.Module, list[Tensor]]:
    """The student after one step, and the teacher's scales and shifts, if statistics are those of the batch alone."""
    student = in_training(source, momentum=0.0)
    teacher = in_training(source, momentum=0.0)
    answers = teacher(batch).softmax(1).detach()
    logits = student(view(batch))
    optimizer = torch.optim.Adam(affine(student), lr=0.05)
    losses = -(answers * logits.log_softmax(1)).sum(1)
    factors = torch.tensor([math.exp(-age / capacity) / (1 + math.exp(-age / capacity)) for age in ages])
    (losses * factors).mean().backward()
    optimizer.step()
    pairs = zip(scales(source.model), scales(student), strict=True)
    return student, [0.9 * old + 0.1 * new for old, new in pairs]


@pytest.mark.parametrize("norm", BATCH_NORMS)
def test_rotta_learns_from_its_teacher_who_follows(norm: str) -> None:
    source = sources.source(norm)
    batch = sources.images(8)
    adapter = RoTTA(source, lr=0.05, capacity=60, every=8, share=1.0, momentum=0.9)
    torch.manual_seed(3)
    torch.testing.assert_close(adapter.step(batch), source.model(batch).softmax(1))
    torch.manual_seed(3)
    student, teacher = rotta_by_hand(source, batch, ages=list(range(8, 0, -1)), capacity=60)
    torch.testing.assert_close(scales(adapter.model), scales(student), rtol=0, atol=1e-3)
    torch.testing.assert_close(scales(adapter.teacher), teacher, rtol=0, atol=1e-4)
    assert not torch.equal(scales(adapter.teacher)[0], scales(source.model)[0])


@pytest.mark.parametrize("norm", sources.NORMS)
def test_rotta_learns_at_its_defaults(norm: str) -> None:
    adapter = RoTTA(sources.source(norm))
    start = scales(sources.source(norm).model)
    adapter.step(sources.images(63))
    assert all(torch.equal(one, other) for one, other in zip(scales(adapter.teacher), start, strict=True))
    adapter.step(sources.images(1, seed=1))
    assert all(not torch.equal(one, other) for one, other in zip(scales(adapter.model), start, strict=True))
    # A thousandth of a step of a thousandth: some values are too small to show it.
    assert any(not torch.equal(one, other) for one, other in zip(scales(adapter.teacher), start, strict=True))


def test_the_loss_of_rotta_is_that_of_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=generator)
    answers = torch.randn(5, 3, generator=generator).softmax(1)
    ages = torch.tensor([0.0, 0.1, 0.5, 1.0, 9.0])
    total = 0.0
    for row in range(5):
        log_probs = [float(logits[row, label] - logits[row].logsumexp(0)) for label in range(3)]
        loss = -sum(float(answers[row, label]) * log_probs[label] for label in range(3))
        total += loss * math.exp(-float(ages[row])) / (1 + math.exp(-float(ages[row])))
    assert float(timely_loss(logits, answers, ages)) == pytest.approx(total / 5)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("norm", sources.NORMS)
def test_answers_do_not_depend_on_how_the_stream_is_cut(kind: type[Any], norm: str) -> None:
    source = sources.source(norm)
    stream = sources.images(40)
    answers = []
    for size in (40, 1, 7):
        adapter = kind(source, lr=0.05, capacity=6, every=10)
        torch.manual_seed(0)
        answers.append(torch.cat([adapter.step(batch) for batch in stream.split(size)]))
        assert adapter.seen == 40
    torch.testing.assert_close(answers[1], answers[0], rtol=0, atol=1e-3)
    torch.testing.assert_close(answers[2], answers[0], rtol=0, atol=1e-3)
    frozen = source.model(stream).softmax(1)
    assert not torch.allclose(answers[0][10:], frozen[10:], atol=1e-2) or kind is RoTTA  # whose teacher is slow


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("norm", sources.NORMS)
def test_scales_shifts_and_running_statistics_move(kind: type[Any], norm: str) -> None:
    adapter = kind(sources.source(norm), lr=0.05, capacity=6, every=10)
    before = {name: value.clone() for name, value in adapter.state_dict().items() if isinstance(value, Tensor)}
    for seed in range(4):
        adapter.step(sources.images(10, seed=seed))
    moved = {name for name, value in before.items() if not torch.equal(value, adapter.state_dict()[name])}
    assert moved == adapter.moving()
    parts = {"weight", "bias"}
    if norm in BATCH_NORMS:
        parts |= {"running_mean", "running_var"}
    assert {name.rpartition(".")[2] for name in moved} == parts
    models = 2 if kind is RoTTA else 1
    assert len(moved) == models * len(parts)


@pytest.mark.parametrize("kind", BOTH)
def test_the_memory_knows_what_the_model_thought(kind: type[Any]) -> None:
    source = sources.source("layer")
    batch = sources.images(20)
    adapter = kind(source, capacity=64)
    answers = adapter.step(batch)
    numbers = []  # of the kept images, in the batch
    for one in adapter.memory.kept:
        same = [torch.equal(image, one.image) for image in batch]
        numbers.append(same.index(True))
    assert numbers == sorted(numbers)
    if kind is NOTE:
        assert numbers == list(range(20))
    for number, one in zip(numbers, adapter.memory.kept, strict=True):
        assert one.label == int(answers[number].argmax())
        assert one.uncertainty == pytest.approx(float(-(answers[number] * answers[number].log()).sum()), abs=1e-5)
        assert one.image.untyped_storage().nbytes() == 64 * 4  # its own, not the batch's
    held = [[one.label for one in adapter.memory.kept].count(label) for label in range(3)]
    assert adapter.memory.held() == held
    assert kind is NOTE or max(held) <= math.ceil(64 / 3)


@pytest.mark.parametrize("kind", BOTH)
def test_images_of_another_size_are_refused_until_reset(kind: type[Any]) -> None:
    adapter = kind(sources.source("group"))
    adapter.step(sources.images(3))
    larger = torch.randn(2, 1, 9, 9)
    with pytest.raises(BatchError, match=r"images in memory have shape \(1, 8, 8\), these have \(1, 9, 9\): resize"):
        adapter.step(larger)
    assert adapter.seen == 3
    adapter.reset()
    assert adapter.memory.kept == []
    adapter.step(larger)


@pytest.mark.parametrize("kind", BOTH)
def test_a_model_without_scales_and_a_wrong_setting_are_refused(kind: type[Any]) -> None:
    with pytest.raises(
        AdaNPCError, match=f"{kind.__name__} trains the scales and shifts .* the model has none: use PLFull"
    ):
        kind(sources.source("none"))
    with pytest.raises(AdaNPCError, match="every must be at least 1, got 0"):
        kind(sources.source("batch2d"), every=0)
    with pytest.raises(AdaNPCError, match="capacity must be at least 1, got 0"):
        kind(sources.source("batch2d"), capacity=0)


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("settings", [{"every": 8, "capacity": 5, "lr": 0.05}, {"every": 1, "capacity": 1}])
def test_the_contract_holds_with_other_settings(kind: type[Any], settings: dict[str, Any]) -> None:
    check_adapter(kind, **settings)
