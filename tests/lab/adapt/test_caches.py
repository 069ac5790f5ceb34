"""TDA, BoostAdapter and DMN against slow ones of lists, and their caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lab.adapt.directions import CLASSES, DIM, Array, directions, entropy, softmax, source, stream, unit
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.caches import DMN, TDA, BoostAdapter, Cache, TDAPublished
from adanpc.testing import check_adapter

Kept = list[list[tuple[float, Any]]]  # of each class: entropy and what is kept
T = unit(directions())


def offer(kept: Kept, label: int, height: float, item: Any, keep: int) -> None:
    """Keeps the items of lowest entropy of a class; of equal ones the earlier."""
    kept[label] = sorted([*kept[label], (height, item)], key=lambda pair: pair[0])[:keep]


class SlowTDA:
    """TDA over sorted lists, one query after another, in double precision."""

    def __init__(self, largest_entropy: float) -> None:
        self.largest_entropy = largest_entropy
        self.positive: Kept = [[] for _ in range(CLASSES)]
        self.negative: Kept = [[] for _ in range(CLASSES)]
        self.offered = 0

    def learn(self, row: Array) -> Array:
        logits = 100 * T @ row
        probs = softmax(logits)
        height = entropy(probs)
        label = int(logits.argmax())
        offer(self.positive, label, height, row, 3)
        if 0.2 < height / self.largest_entropy < 0.5:
            self.offered += 1
            offer(self.negative, label, height, (row, probs > 0.03), 2)
        return logits

    def answer(self, row: Array, logits: Array, positive: Kept) -> Array:
        logits = logits.copy()
        for label, rows in enumerate(positive):
            for _, key in rows:
                logits[label] += 2 * np.exp(-5 * (1 - key @ row))
        for rows in self.negative:
            for _, (key, denied) in rows:
                for label in range(CLASSES):
                    if denied[label]:
                        logits[label] -= 0.117 * np.exp(-(1 - key @ row))
        return softmax(logits)

    def step(self, batch: Tensor) -> Array:
        answers = []
        for row in unit(batch):
            logits = self.learn(row)
            answers.append(self.answer(row, logits, self.positive))
        return np.stack(answers)


@pytest.mark.parametrize(("kind", "largest"), [(TDA, np.log(CLASSES)), (TDAPublished, np.log2(CLASSES))])
@pytest.mark.parametrize("size", [1, 9])
def test_tda_is_that_of_lists(kind: type[TDA], largest: float, size: int) -> None:
    adapter = kind(source())
    slow = SlowTDA(float(largest))
    for batch in stream(90).split(size):
        expected = torch.from_numpy(slow.step(batch))
        assert torch.allclose(adapter.step(batch).double(), expected, atol=2e-4)
    assert slow.offered > 10  # so that the negative cache was tested, too
    assert len(adapter.positive) == 3 * CLASSES


def test_the_text_and_the_code_of_tda_differ() -> None:
    text = TDA(source()).step(stream(90))
    code = TDAPublished(source()).step(stream(90))
    assert not torch.allclose(text, code, atol=1e-3)


def test_boost_adapter_adds_the_surest_views_for_one_answer() -> None:
    adapter = BoostAdapter(source(nn.Sequential(nn.Flatten(), nn.Linear(12, DIM))), views=40, room=1)
    slow = SlowTDA(float(np.log(CLASSES)))
    images = torch.randn(12, 3, 2, 2, generator=torch.Generator().manual_seed(3))
    views_differ = 0
    for number, image in enumerate(images.split(1)):
        torch.manual_seed(number)
        views = adapter._views(image)
        assert torch.equal(views[:1], image)
        rows = unit(adapter.model.features(views).detach())
        logits = slow.learn(rows[0])
        kept = [list(each) for each in slow.positive]
        heights = [entropy(softmax(100 * T @ row)) for row in rows]
        for place in np.argsort(heights, kind="stable")[:4]:
            offer(kept, int((T @ rows[place]).argmax()), heights[place], rows[place], 4)
        expected = slow.answer(rows[0], logits, kept)
        views_differ += not np.allclose(expected, slow.answer(rows[0], logits, slow.positive), atol=1e-3)
        torch.manual_seed(number)
        assert torch.allclose(adapter.step(image)[0].double(), torch.from_numpy(expected), atol=1e-3)
    assert views_differ


def test_boost_adapter_without_mirrors_sees_no_mirrored_views() -> None:
    ramp = torch.arange(8.0).expand(1, 1, 8, 8)
    adapter = BoostAdapter(source(), mirror=False)
    assert bool((adapter._views(ramp).diff(dim=3) >= 0).all())
    torch.manual_seed(0)
    assert bool((BoostAdapter(source())._views(ramp).diff(dim=3) < 0).any())


@pytest.mark.parametrize("keep", [2, 50])
def test_dmn_is_that_of_lists(keep: int) -> None:
    adapter = DMN(source(), keep=keep)
    kept: Kept = [[] for _ in range(CLASSES)]
    for batch in stream(60).split(7):
        answers = []
        for row in unit(batch):
            probs = softmax(100 * T @ row)
            offer(kept, int(probs.argmax()), entropy(probs), row, keep)
            prototypes = []
            for label in range(CLASSES):
                total = np.zeros(DIM)
                for member in [*(item for _, item in kept[label]), T[label]]:
                    total += np.exp(-5.5 * (1 - member @ row)) * member
                prototypes.append(total / np.linalg.norm(total))
            answers.append((probs + softmax(100 * np.stack(prototypes) @ row)) / 2)
        assert torch.allclose(adapter.step(batch).double(), torch.from_numpy(np.stack(answers)), atol=2e-4)


def test_a_cache_keeps_the_lowest_entropies_and_of_equal_ones_the_earlier() -> None:
    cache = Cache(1, 2, keep=2)
    for number, height in enumerate([0.5, 0.3, 0.5, 0.4, 0.3, 0.1]):
        cache.add(torch.tensor([float(number)]), 0, height)
    cache.add(torch.tensor([9.0]), 1, 1.0)
    kept = {(float(row), label) for row, label in zip(cache.rows, cache.labels, strict=True)}
    assert kept == {(1.0, 0), (5.0, 0), (9.0, 1)}
    assert cache.counts().tolist() == [2, 1]


def test_a_cache_grows_and_is_put_back() -> None:
    cache = Cache(2, 3, keep=100)
    rows = torch.randn(200, 2)
    for number, row in enumerate(rows[:150]):
        cache.add(row, number % 3, float(number))
    state = cache.state()
    for row in rows[150:]:
        cache.add(row, 0, 0.0)
    again = Cache(2, 3, keep=100)
    again.load(state)
    assert torch.equal(again.rows, rows[:150])
    again.add(rows[150], 1, 0.0)
    assert torch.equal(again.rows, rows[:151])
    assert again.counts().tolist() == [50, 51, 50]


@pytest.mark.no_cover
def test_other_prototypes_keep_the_contract() -> None:
    check_adapter(TDA, prototypes="means")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (TDA, {"weight": 0.0}),
        (TDA, {"sharpness": -1.0}),
        (DMN, {"keep": 0}),
        (DMN, {"sharpness": 0.0}),
        (BoostAdapter, {"views": 0}),
        (BoostAdapter, {"room": -1}),
    ],
)
def test_bad_settings_are_refused(kind: type[TDA], settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(AdaNPCError, match=name):
        kind(source(), **settings)
