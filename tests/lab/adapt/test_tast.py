"""TAST against loops over heads, queries and supports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, kl_div, one_hot

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Source
from adanpc.lab.adapt.tast import TAST
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import check_adapter

DIM = 12
CLASSES = 3


def source() -> Source:
    torch.manual_seed(0)
    return Source(SourceModel(nn.Identity(), DIM, CLASSES), torch.zeros(0, DIM), torch.zeros(0, dtype=torch.int64))


def features(count: int, seed: int) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


class Oracle:
    """TAST by loops over heads, rows and classes: all supports are mapped by every head."""

    def __init__(self, adapter: TAST, source: Source, keep: int, k: int, steps: int) -> None:
        self.head = source.model.head
        self.keep = keep
        self.k = k
        self.steps = steps
        self.weights = {
            name: value.detach().clone().requires_grad_() for name, value in adapter.heads.named_parameters()
        }
        self.adam = torch.optim.Adam(self.weights.values(), lr=1e-3)
        self.supports: list[tuple[float, int, Tensor]] = []
        weight = source.model.head.weight
        assert isinstance(weight, Tensor)
        self.enter(weight.detach())

    def enter(self, rows: Tensor) -> None:
        for row in rows:
            probs = self.head(row).detach().softmax(0)
            self.supports.append((float(-(probs * probs.log()).sum()), int(probs.argmax()), row))
        kept = [sorted(s for s in self.supports if s[1] == label)[: self.keep] for label in range(CLASSES)]
        self.supports = [support for supports in kept for support in supports]

    def mapped(self, head: int, row: Tensor) -> Tensor:
        inner = self.weights["inner"][head]
        outer = self.weights["outer"][head]
        bias = self.weights["bias"][head]
        return outer * (self.weights["matrix"] @ (inner * row)) + bias

    def logits(self, head: int, row: Tensor) -> Tensor:
        cosines = []
        for label in range(CLASSES):
            mine = [self.mapped(head, support) for _, of, support in self.supports if of == label]
            if mine:
                cosines.append(cosine_similarity(self.mapped(head, row), torch.stack(mine).mean(0), 0))
            else:
                cosines.append(torch.zeros(()))
        return 10 * torch.stack(cosines)

    def step(self, batch: Tensor) -> Tensor:
        self.enter(batch)
        for _ in range(self.steps):
            probs = self.update(batch)
        return probs

    def update(self, batch: Tensor) -> Tensor:
        heads = len(self.weights["inner"])
        loss = torch.zeros(())
        answers = []
        for row in batch:
            ranked = sorted(self.supports, key=lambda s: -float(cosine_similarity(row, s[2], 0)))
            near = [support for _, _, support in ranked[: self.k]]
            answer = torch.zeros(CLASSES)
            for head in range(heads):
                predictions = [self.logits(head, support).detach() for support in near]
                target = sum((one_hot(p.argmax(), CLASSES) for p in predictions), torch.zeros(CLASSES)) / len(near)
                answer += sum((p.softmax(0) for p in predictions), torch.zeros(CLASSES)) / len(near) / heads
                loss = loss + kl_div(self.logits(head, row).log_softmax(0), target, reduction="sum")
            answers.append(answer)
        self.adam.zero_grad()
        (loss / batch.shape[0] / CLASSES).backward()
        self.adam.step()
        return torch.stack(answers)


@pytest.mark.parametrize(("keep", "k", "steps"), [(4, 2, 1), (1, 4, 3), (3, 1, 2)])
def test_tast_is_the_published_one_by_loops(keep: int, k: int, steps: int) -> None:
    start = source()
    adapter = TAST(start, keep=keep, heads=3, k=k, steps=steps)
    oracle = Oracle(adapter, start, keep, min(k, keep), steps)
    for number in range(4):
        batch = features(5, number)
        torch.testing.assert_close(adapter.step(batch), oracle.step(batch), atol=1e-4, rtol=1e-3)
    for name, value in adapter.heads.named_parameters():
        torch.testing.assert_close(value.detach(), oracle.weights[name].detach(), atol=1e-4, rtol=1e-3)


def test_heads_learn_the_prediction_of_the_neighbors() -> None:
    """The same batch again and again: queries come to be predicted as their supports are."""
    adapter = TAST(source(), heads=4, lr=1e-2)
    batch = features(30, 0)

    def disagreement() -> float:
        supports, labels = adapter.supports.rows()
        nearest = adapter._nearest(batch, supports)
        means = adapter._means(supports, labels)
        with torch.no_grad():
            queries = adapter._logits(batch, means)
            near = adapter._logits(nearest, means)
        targets = one_hot(near.unflatten(1, (len(batch), -1)).argmax(3), CLASSES).float().mean(2)
        return float(kl_div(queries.log_softmax(2), targets, reduction="sum"))

    adapter.step(batch)
    before = disagreement()
    for _ in range(30):
        adapter.step(batch)
    assert disagreement() < 0.7 * before


def test_without_a_bound_every_row_is_a_support() -> None:
    adapter = TAST(source(), keep=None, heads=2)
    for number in range(3):
        adapter.step(features(5, number))
    assert len(adapter.supports.rows()[0]) == CLASSES + 15


def test_the_seed_decides_the_heads() -> None:
    batch = features(8, 0)
    one = TAST(source(), seed=1).step(batch)
    same = TAST(source(), seed=1).step(batch)
    other = TAST(source(), seed=2).step(batch)
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


def test_fewer_supports_than_k_are_all_used() -> None:
    assert TAST(source(), k=50).step(features(1, 0)).isfinite().all()


@pytest.mark.parametrize("name", ["heads", "k", "steps"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(AdaNPCError, match=f"{name} must be at least 1, got 0"):
        TAST(source(), **{name: 0})


@pytest.mark.no_cover
@pytest.mark.parametrize("hypers", [{"keep": None, "steps": 3, "heads": 5}, {"keep": 1, "heads": 1}], ids=str)
def test_contract_with_other_settings(hypers: dict[str, Any]) -> None:
    check_adapter(TAST, **hypers)
