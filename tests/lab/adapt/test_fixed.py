from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracles import vote
from scipy.optimize import fixed_point
from scipy.special import log_softmax, softmax
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.fixed import LAME, FrozenKNN, Linear
from adanpc.lab.networks.source import SourceModel
from adanpc.testing import check_adapter

DIM, CLASSES = 5, 3
METHODS: list[tuple[type[Adapter], dict[str, Any]]] = [
    (FrozenKNN, {"k": 3}),
    (LAME, {"k": 1}),
    (LAME, {"k": 50}),
    (LAME, {"kernel": "rbf"}),
    (LAME, {"kernel": "linear"}),
]


def source() -> Source:
    torch.manual_seed(0)
    return Source(SourceModel(nn.Identity(), DIM, CLASSES), features(20, 99), torch.arange(20) % CLASSES)


def features(count: int, seed: int) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def logits(start: Source, batch: Tensor) -> np.ndarray:
    weight, bias = (value.detach().double().numpy() for value in start.model.head.parameters())
    return np.asarray(batch.double().numpy() @ weight.T + bias)


def affinity(batch: Tensor, k: int) -> np.ndarray:
    """1 where a row listens to another, by loops over distances of normalized rows."""
    rows = batch.double().numpy() / np.linalg.norm(batch.double().numpy(), axis=1, keepdims=True)
    weights = np.zeros((len(rows), len(rows)))
    for i, row in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i]
        for j in sorted(others, key=lambda j: float(np.linalg.norm(row - rows[j])))[:k]:
            weights[i, j] = 1
    return weights


def test_linear_is_the_head() -> None:
    start, batch = source(), features(7, 1)
    np.testing.assert_allclose(Linear(start).step(batch).detach(), softmax(logits(start, batch), 1), atol=1e-6)


def test_frozen_knn_is_a_vote_of_source_rows_however_long_the_stream() -> None:
    start, adapter = source(), FrozenKNN(source(), k=4, temperature=0.2)
    for number in range(3):
        batch = features(6, number)
        for query, probs in zip(batch, adapter.step(batch), strict=True):
            cosines = torch.cosine_similarity(start.features, query[None]).tolist()
            nearest = sorted(range(20), key=lambda row: -cosines[row])[:4]
            expected = vote([(cosines[row], row % CLASSES) for row in nearest], CLASSES, "share", 0.2)
            np.testing.assert_allclose(probs, expected, atol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("count", [2, 5, 40])
def test_lame_is_the_fixed_point_of_its_equation(k: int, count: int) -> None:
    start, batch = source(), features(count, count)
    unary, weights = log_softmax(logits(start, batch), 1), affinity(batch, k)
    expected = fixed_point(
        lambda probs: softmax(unary + weights @ probs, 1), np.exp(unary), xtol=1e-12, maxiter=10_000, method="iteration"
    )
    np.testing.assert_allclose(LAME(start, k=k).step(batch), expected, atol=1e-5)


def published_affinity(batch: torch.Tensor, kernel: str, k: int) -> np.ndarray[Any, Any]:
    """As in src/adaptation/lame.py of fiveai/LAME at d2e5f63, row by row."""
    rows = batch.double().numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    if kernel == "linear":
        return np.array([[one @ other for other in rows] for one in rows])
    distances = np.array([[np.linalg.norm(one - other) for other in rows] for one in rows])
    width = np.mean([sorted(line)[min(k, len(rows)) - 1] for line in distances])
    gaussian: np.ndarray[Any, Any] = np.exp(-(distances**2) / (2 * width**2))
    return gaussian


@pytest.mark.parametrize("kernel", ["rbf", "linear"])
@pytest.mark.parametrize(("k", "count"), [(3, 2), (5, 9)])
def test_lame_has_the_published_kernels(kernel: str, k: int, count: int) -> None:
    start, batch = source(), features(count, count)
    unary = log_softmax(logits(start, batch), 1)
    weights = published_affinity(batch, kernel, k)
    probs = np.exp(unary)
    for _ in range(100):
        probs = softmax(unary + weights @ probs, 1)
    np.testing.assert_allclose(LAME(start, kernel=kernel, k=k).step(batch), probs, atol=1e-4)


def test_lame_knows_no_other_kernel() -> None:
    with pytest.raises(AdaNPCError, match="kernel must be one of knn, rbf, linear, got 'cosine'"):
        LAME(source(), kernel="cosine")


@pytest.mark.parametrize("kernel", ["knn", "rbf", "linear"])
def test_lame_leaves_a_batch_of_one_to_the_head(kernel: str) -> None:
    batch = features(1, 3)
    torch.testing.assert_close(LAME(source(), kernel=kernel).step(batch), Linear(source()).step(batch).detach())


def test_lame_rows_do_not_listen_to_themselves_though_others_are_equal() -> None:
    """In the public code the nearest row is taken to be the row itself, which is wrong where rows are equal."""
    start, row = source(), features(1, 4)
    unary = log_softmax(logits(start, row), 1)[0]
    expected = fixed_point(lambda probs: softmax(unary + probs), np.exp(unary), xtol=1e-12, method="iteration")
    for probs in LAME(start, k=1).step(row.expand(4, -1)):
        np.testing.assert_allclose(probs, expected, atol=1e-5)


def test_lame_does_not_care_for_the_order_of_a_batch_nor_for_the_last_one() -> None:
    adapter, batch, order = LAME(source()), features(20, 5), torch.randperm(20)
    straight = adapter.step(batch)
    torch.testing.assert_close(adapter.step(batch[order]), straight[order])


def test_lame_sways_a_doubtful_row_among_sure_ones() -> None:
    start = source()
    with torch.no_grad():
        head = start.model.head
        assert isinstance(head, nn.Linear)
        head.weight.copy_(4 * torch.eye(CLASSES, DIM))
        head.bias.zero_()
    sure, doubtful = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]]), torch.tensor([[0.45, 0.5, 0.0, 0.0, 0.0]])
    batch = torch.cat([sure + 0.01 * features(6, 6), doubtful])
    assert int(Linear(start).step(batch)[-1].argmax()) == 1
    assert int(LAME(start).step(batch)[-1].argmax()) == 0


def test_lame_refuses_to_ask_nobody() -> None:
    with pytest.raises(AdaNPCError, match="k must be at least 1, got 0"):
        LAME(source(), k=0)


@pytest.mark.no_cover
@pytest.mark.parametrize(("kind", "hypers"), METHODS, ids=str)
def test_contract_with_other_settings(kind: type[Adapter], hypers: dict[str, Any]) -> None:
    check_adapter(kind, **hypers)
