"""Test-time augmentation and MEMO against steps made by hand."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from sources import images, source
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.augment import augmix, flip, shift
from adanpc.lab.adapt.views import MEMO, TTAug, log_mean
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import check_adapter

METHODS: list[tuple[type[Adapter], dict[str, Any]]] = [
    (TTAug, {"copies": 3}),
    (MEMO, {"copies": 3}),
    (MEMO, {"copies": 2, "lr": 0.1, "steps": 2, "prior": math.inf, "mirror": False}),
]


class Mixed(nn.Module):
    """A BatchNorm2d written out: 16 parts of its own statistics and one of the batch's, which carry no gradient."""

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        super().__init__()
        assert layer.running_mean is not None
        assert layer.running_var is not None
        self.weight = layer.weight
        self.bias = layer.bias
        self.eps = layer.eps
        self.mean = layer.running_mean
        self.variance = layer.running_var

    def forward(self, inputs: Tensor) -> Tensor:
        channels = inputs.detach().transpose(0, 1).flatten(1)
        mean = (16 * self.mean + channels.mean(1)) / 17
        variance = (16 * self.variance + channels.var(1)) / 17
        scale = self.weight / (variance + self.eps).sqrt()
        return inputs * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


def views(image: Tensor, copies: int) -> Tensor:
    return augmix(flip(shift(image.expand(copies, -1, -1, -1))))


def mixing(start: Source) -> SourceModel:
    """A copy of the model whose BatchNorm layers are written out."""
    model = deepcopy(start.model).eval()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, Mixed(child))
    return model


def memo_by_hand(start: Source, image: Tensor, copies: int, lr: float, steps: int) -> Tensor:
    model = mixing(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        mean = torch.zeros(start.model.classes)
        for probs in model(views(image, copies)).softmax(1):
            mean = mean + probs / copies
        optimizer.zero_grad()
        (-(mean * mean.log()).sum()).backward()
        optimizer.step()
    answer: Tensor = model(image).detach().softmax(1)
    return answer


def test_ttaug_is_the_mean_over_views() -> None:
    start = source("group")
    batch = images(4)
    torch.manual_seed(3)
    made = TTAug(start, copies=5).step(batch)
    torch.manual_seed(3)
    for image, probs in zip(batch.split(1), made, strict=True):
        with torch.no_grad():
            each = [start.model(view[None]).softmax(1)[0] for view in views(image, 5)]
        torch.testing.assert_close(probs, sum(each, torch.zeros(3)) / 5)


@pytest.mark.parametrize("norm", ["none", "group", "batch2d"])
@pytest.mark.parametrize("steps", [1, 3])
def test_memo_is_gradient_descent_on_the_entropy_of_the_mean(norm: str, steps: int) -> None:
    start = source(norm)
    batch = images(3)
    torch.manual_seed(5)
    made = MEMO(start, copies=6, lr=0.1, steps=steps).step(batch)
    torch.manual_seed(5)
    expected = torch.cat([memo_by_hand(start, image, 6, 0.1, steps) for image in batch.split(1)])
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        assert not torch.allclose(made, start.model(batch).softmax(1), atol=1e-3)


def test_memo_without_a_rate_or_a_weight_of_views_is_the_source_model() -> None:
    start = source("batch2d")
    batch = images(3)
    with torch.no_grad():
        expected = start.model(batch).softmax(1)
    torch.testing.assert_close(MEMO(start, copies=2, lr=0.0, prior=math.inf).step(batch), expected)


def test_memo_makes_answers_surer() -> None:
    start = source("none", spread=0.5)
    batch = images(10)
    torch.manual_seed(0)
    after = MEMO(start, copies=32, lr=0.5).step(batch)
    with torch.no_grad():
        before = start.model(batch).softmax(1)
    assert after.max(1).values.mean() > before.max(1).values.mean() + 0.05


@pytest.mark.parametrize(("kind", "hypers"), METHODS, ids=str)
@pytest.mark.parametrize("norm", ["group", "batch2d"])
def test_each_image_is_answered_on_its_own(kind: type[Adapter], hypers: dict[str, Any], norm: str) -> None:
    adapter = kind(source(norm), **hypers)
    batch = images(5)
    torch.manual_seed(1)
    together = adapter.step(batch)
    torch.manual_seed(1)
    assert torch.equal(together, torch.cat([adapter.step(image) for image in batch.split(1)]))


@pytest.mark.parametrize(("kind", "hypers"), METHODS, ids=str)
def test_nothing_is_kept(kind: type[Adapter], hypers: dict[str, Any]) -> None:
    adapter = kind(source("batch2d"), **hypers)
    new = kind(source("batch2d"), **hypers)
    batch = images(3)
    before = {name: value.clone() for name, value in adapter.state_dict().items() if isinstance(value, Tensor)}
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        made = adapter.step(batch)
    assert all(torch.equal(adapter.state_dict()[name], value) for name, value in before.items())
    torch.manual_seed(1)
    assert torch.equal(made, new.step(batch))
    assert adapter.moving() == set()


def test_memo_learns_where_gradients_are_off() -> None:
    adapter = MEMO(source("group"), copies=3, lr=0.5)
    batch = images(2)
    torch.manual_seed(1)
    expected = adapter.step(batch)
    torch.manual_seed(1)
    with torch.no_grad():
        assert torch.equal(adapter.step(batch), expected)


def test_digits_need_not_be_mirrored() -> None:
    """A model that looks at the left half alone sees the same in all views that are not mirrored, where all is flat."""
    encoder = nn.Sequential(nn.AvgPool2d((8, 4)), nn.Flatten())
    start = Source(SourceModel(encoder, 2, 3), torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    image = torch.zeros(1, 1, 8, 8)
    image[..., 6:] = 5.0
    torch.manual_seed(0)
    straight = TTAug(start, copies=200, mirror=False).step(image)
    mirrored = TTAug(start, copies=200, mirror=True).step(image)
    with torch.no_grad():
        both = torch.stack([start.model(image).softmax(1), start.model(image.flip(3)).softmax(1)])
    assert (straight - both[0]).abs().sum() < (straight - both.mean(0)).abs().sum()
    assert (mirrored - both.mean(0)).abs().sum() < (mirrored - both[0]).abs().sum()


def test_log_mean_holds_for_logits_of_any_size() -> None:
    logits = torch.tensor([[1000.0, 0.0, -1000.0], [0.0, 1000.0, -1000.0]])
    torch.testing.assert_close(log_mean(logits).exp(), torch.tensor([[0.5, 0.5, 0.0]]))
    assert log_mean(logits).isfinite().all()


def test_a_descent_into_nowhere_is_refused() -> None:
    adapter = MEMO(source("none"), copies=2, lr=math.inf)
    with pytest.raises(AdaNPCError, match="its probabilities are not finite: reset, and use a smaller lr"):
        adapter.step(images(1))


@pytest.mark.parametrize(
    ("kind", "hypers", "message"),
    [
        (TTAug, {"copies": 0}, "copies must be at least 1, got 0"),
        (MEMO, {"copies": 0}, "copies must be at least 1, got 0"),
        (MEMO, {"steps": 0}, "steps must be at least 1, got 0"),
        (MEMO, {"prior": 0}, "prior must be greater than 0, got 0"),
    ],
)
def test_useless_numbers_are_refused(kind: type[Adapter], hypers: dict[str, Any], message: str) -> None:
    with pytest.raises(AdaNPCError, match=message):
        kind(source("none"), **hypers)


@pytest.mark.no_cover
def test_the_contract_holds_with_other_settings() -> None:
    check_adapter(MEMO, copies=2, lr=0.1, steps=2, prior=math.inf, mirror=False)
