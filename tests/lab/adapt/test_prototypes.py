"""T3A against a slow one of lists, and its supports."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.prototypes import T3A, Supports, T3APublished
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import check_adapter

DIM = 6
CLASSES = 4
METHODS: list[tuple[type[Adapter], dict[str, Any]]] = [
    (T3A, {"keep": 1}),
    (T3A, {"keep": None}),
]


def source(seed: int = 0, dim: int = DIM, classes: int = CLASSES) -> Source:
    torch.manual_seed(seed)
    model = SourceModel(nn.Identity(), dim, classes)
    return Source(model, torch.zeros(0, dim), torch.zeros(0, dtype=torch.int64))


def features(count: int, seed: int, dim: int = DIM) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


class Oracle:
    """T3A over lists, sorted anew at every batch, in double precision."""

    def __init__(self, source: Source, cut: Callable[[list[Any]], list[Any]]) -> None:
        self.weight, self.bias = (value.detach().double().numpy() for value in source.model.head.parameters())
        self.cut = cut
        self.supports: list[list[tuple[float, np.ndarray]]] = [[] for _ in self.weight]
        for row in self.weight:
            self.enter(row)

    def enter(self, row: np.ndarray) -> None:
        logits = self.weight @ row + self.bias
        probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        self.supports[int(logits.argmax())].append((float(-(probs * np.log(probs)).sum()), row))

    def step(self, batch: Tensor) -> np.ndarray:
        for row in batch.double().numpy():
            self.enter(row)
        self.supports = [self.cut(sorted(rows, key=lambda pair: pair[0])) for rows in self.supports]
        return np.stack([self.answer(row) for row in batch.double().numpy()])

    def answer(self, row: np.ndarray) -> np.ndarray:
        logits = []
        for rows in self.supports:
            total = sum((row / np.linalg.norm(row) for _, row in rows), np.zeros_like(row))
            if rows:
                logits.append(row @ total / np.linalg.norm(total))
            else:
                logits.append(0.0)
        powers = np.exp(np.array(logits) - max(logits))
        return np.asarray(powers / powers.sum())


@pytest.mark.parametrize("keep", [1, 2, 5, None])
@pytest.mark.parametrize("size", [1, 7])
def test_t3a_is_the_paper_s_by_loops(keep: int | None, size: int) -> None:
    start = source()
    adapter = T3A(start, keep=keep)
    oracle = Oracle(start, lambda rows: rows[:keep])
    for number in range(20):
        batch = features(size, number)
        np.testing.assert_allclose(adapter.step(batch), oracle.step(batch), atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 30])
def test_published_t3a_drops_the_worst_of_every_class_at_every_batch(size: int) -> None:
    start = source()
    adapter = T3APublished(start)
    oracle = Oracle(start, lambda rows: rows[:-1])
    for number in range(12):
        batch = features(size, number)
        np.testing.assert_allclose(adapter.step(batch), oracle.step(batch), atol=1e-5)


def test_keep_all_keeps_all_where_the_public_code_empties_the_classes() -> None:
    """The public code's "-1 = keep all" is overwritten, and its slice [:-1] drops one support of each class a call."""
    mine = T3A(source(), keep=None)
    theirs = T3APublished(source())
    for number in range(10):
        batch = features(1, number)
        mine_probs = mine.step(batch)
        their_probs = theirs.step(batch)
    assert int(mine.prototypes.counts.sum()) == CLASSES + 10
    assert int(theirs.prototypes.counts.sum()) == 0
    assert torch.equal(their_probs, torch.full((1, CLASSES), 1 / CLASSES))
    assert float(mine_probs.max()) > 0.3


def test_a_batch_enters_the_supports_before_it_is_answered() -> None:
    row = features(1, 1)
    others = features(9, 2)
    alone = T3A(source()).step(row)
    together = T3A(source()).step(torch.cat([row, others]))[:1]
    assert not torch.allclose(alone, together)


def test_a_class_that_the_head_gives_no_row_has_logit_0() -> None:
    start = source()
    with torch.no_grad():
        head = start.model.head
        assert isinstance(head, nn.Linear)
        head.weight.copy_(torch.eye(CLASSES, DIM))
        head.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 9.0]))  # every row is predicted to be of the last class
    adapter = T3A(start)
    row = torch.eye(DIM)[3:4]
    direction = torch.eye(CLASSES, DIM).sum(0) + row[0]
    expected = torch.tensor([0.0, 0.0, 0.0, float(row[0] @ direction / direction.norm())]).softmax(0)
    torch.testing.assert_close(adapter.step(row)[0], expected)


def test_directions_stay_right_after_thousands_of_supports_came_and_went() -> None:
    adapter = T3A(source(), keep=3)
    for batch in features(5000, 0).split(50):
        adapter.step(batch)
    assert adapter.supports is not None
    rows, labels = adapter.supports.rows()
    assert len(rows) == 3 * CLASSES
    for label in range(CLASSES):
        total = nn.functional.normalize(rows[labels == label].double(), dim=1).sum(0)
        torch.testing.assert_close(adapter.prototypes.directions[label].double(), total / total.norm())


def test_keep_all_stores_no_rows() -> None:
    adapter = T3A(source(), keep=None)
    sizes = []
    for number in range(3):
        adapter.step(features(100, number))
        file = io.BytesIO()
        torch.save(adapter.state_dict(), file)
        sizes.append(file.tell())
    assert max(sizes) - min(sizes) < 100


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.25, 0.5, 0.75])), min_size=1, max_size=40),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_supports_keep_the_lowest_entropies_and_of_equal_ones_the_earliest(
    arrivals: list[tuple[int, float]], keep: int
) -> None:
    supports = Supports(3, keep)
    kept = set(range(len(arrivals)))
    for number, (label, entropy) in enumerate(arrivals):
        left, classes = supports.add(torch.tensor([[float(number)]]), torch.tensor([label]), torch.tensor([entropy]))
        assert classes == [arrivals[int(row)][0] for row in left]
        kept -= {int(row) for row in left}
    expected = set()
    for label in range(3):
        mine = [(entropy, number) for number, (of, entropy) in enumerate(arrivals) if of == label]
        expected |= {number for _, number in sorted(mine)[:keep]}
    rows, labels = supports.rows()
    assert {int(row) for row in rows} == kept == expected
    assert [arrivals[int(row)][0] for row in rows] == labels.tolist()


def test_two_adapters_from_one_state_go_their_own_ways() -> None:
    first = T3A(source(), keep=2)
    first.step(features(20, 0))
    state = first.state_dict()
    twins = [T3A(source(), keep=2) for _ in range(2)]
    for twin in twins:
        twin.load_state_dict(state)
    twins[0].step(features(20, 1))
    assert torch.equal(first.step(features(3, 2)), twins[1].step(features(3, 2)))


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_below_one_is_refused(keep: int) -> None:
    with pytest.raises(AdaNPCError, match=f"keep must be at least 1, or None for all, got {keep}"):
        T3A(source(), keep=keep)


@pytest.mark.no_cover
@pytest.mark.parametrize(("kind", "hypers"), METHODS, ids=str)
def test_contract_with_other_settings(kind: type[Adapter], hypers: dict[str, Any]) -> None:
    check_adapter(kind, **hypers)
