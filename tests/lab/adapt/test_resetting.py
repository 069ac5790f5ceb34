"""RDumb and ASR: when they return to the source, and how far."""

from __future__ import annotations

import math

import pytest
import torch
from sources import images, source
from torch import Tensor

from adanpc.lab.adapt.filtered import ETA
from adanpc.lab.adapt.resetting import ASR, RDumb


def learning_source() -> RDumb:
    adapter = RDumb(source("batch2d", spread=6.0), every=20)
    adapter.selection.margin = 10.0  # every answer is sure enough
    adapter.selection.similarity = 2.0
    return adapter


def test_rdumb_is_eta_until_it_returns() -> None:
    adapter = learning_source()
    first = [adapter.step(images(10, seed=number)) for number in range(2)]
    again = [adapter.step(images(10, seed=number)) for number in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(first[0], adapter.step(images(10, seed=1)))
    assert RDumb(source("batch2d")).reset_every == 64_000
    assert issubclass(RDumb, ETA)


def alike(adapter: ASR, height: float) -> Tensor:
    """Logits (2, 3) whose mean has this entropy, at most; found by bisection."""
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        probs = torch.tensor([middle, 0.0, 0.0], dtype=torch.float64).softmax(0)
        if float(-(probs * probs.log()).sum()) > height:
            low = middle
        else:
            high = middle
    return torch.tensor([[high, 0.0, 0.0]] * 2, dtype=torch.float64)


def moved(adapter: ASR) -> list[bool]:
    """Which of the trained parameters are not those of the source."""
    return [not torch.equal(now, start) for now, start in zip(adapter.trained, adapter.start, strict=True)]


def test_asr_returns_where_answers_are_alike_the_deepest_weights_first() -> None:
    adapter = ASR(source("batch2d"), start=0.9, kept=0.6, slope=2.0)
    assert adapter.average == pytest.approx(math.log(0.9 * 3))
    for gap, expected in ((0.01, [True, True]), (0.2, [True, False]), (0.31, [False, False])):
        with torch.no_grad():
            for parameter in adapter.trained:
                parameter.add_(1)
        adapter._reset_if_collapsing(images(2), alike(adapter, adapter.average - gap))
        assert moved(adapter) == expected  # shares of 0.58, 0.2 and 0 of two parameters
        assert adapter.average == adapter.first_average
        adapter.recover()


def test_asr_follows_the_entropy_the_slower_the_more_answers_differ() -> None:
    adapter = ASR(source("batch2d"), start=0.5)
    batch = images(4, seed=2)
    even = torch.zeros(4, 3)
    answers = adapter.frozen(batch).argmax(1)
    even[0, answers[0]] = even[1, answers[1]] = 1e-3  # two of the source's answers, two of class 0
    flipped = float((even.argmax(1) != answers).float().mean())
    stays = 1 - 0.15 + 0.15 * flipped
    before = adapter.average
    adapter._reset_if_collapsing(batch, even)
    assert adapter.average == pytest.approx(stays * before + (1 - stays) * math.log(3), rel=1e-4)


def test_the_penalty_of_asr_is_by_squared_gradients_and_earlier_weights() -> None:
    adapter = ASR(source("batch2d"), penalty=5.0)
    loss = torch.stack([(parameter * 3).sum() for parameter in adapter.trained]).sum()
    assert adapter.objective(loss) is loss  # nothing is known before the first return
    adapter._remember_weights()
    earlier = [parameter.detach().clone() for parameter in adapter.trained]
    with torch.no_grad():
        for parameter in adapter.trained:
            parameter.add_(0.5)
    adapter.flipped = 0.5
    loss = torch.stack([parameter.sum() for parameter in adapter.trained]).sum()
    count = sum(parameter.numel() for parameter in adapter.trained)
    difference = (adapter.objective(loss) - loss).detach()
    assert float(difference) == pytest.approx(5 * 0.5**2 * 9 * 0.25 * count, rel=1e-4)
    adapter._remember_weights()
    expected = [0.9 * before + 0.1 * (before + 0.5) for before in earlier]
    assert all(torch.allclose(one, other) for one, other in zip(adapter.usual, expected, strict=True))
    assert all(torch.allclose(each, torch.tensor(0.9 * 9 + 0.1 * 1)) for each in adapter.importance)
