"""OGA and StatA against slow ones of loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lab.adapt.directions import CLASSES, DIM, Array, directions, entropy, softmax, source, stream, unit

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.gaussians import OGA, OGAPublished, StatA, inverse_covariance

T = unit(directions())


class SlowOGA:
    """OGA over sorted lists, in double precision."""

    def __init__(self, keep: int, published: bool) -> None:
        self.keep = keep
        self.published = published
        self.kept: list[list[tuple[float, Array]]] = [[] for _ in range(CLASSES)]
        self.precision: Array = DIM * np.eye(DIM)

    def step(self, rows: Array) -> Array:
        for row in rows:
            probs = softmax(100 * T @ row)
            label = int(probs.argmax())
            self.kept[label] = sorted([*self.kept[label], (entropy(probs), row)], key=lambda pair: pair[0])
            self.kept[label] = self.kept[label][: self.keep]
        centers = [self.center(label) for label in range(CLASSES)]
        if any(len(each) >= 3 for each in self.kept):
            deviations = [row - centers[label] for label, each in enumerate(self.kept) for _, row in each]
            covariance = np.cov(np.array(deviations).T)
            count = len(deviations)
            if count > 4 * DIM:
                self.precision = np.asarray(np.linalg.pinv(covariance), dtype=np.float64)
            else:
                ridge = (count - 1) * covariance + np.trace(covariance) * np.eye(DIM)
                self.precision = DIM * np.linalg.inv(ridge)
        return np.stack([self.answer(row, centers) for row in rows])

    def center(self, label: int) -> Array:
        rows = [row for _, row in self.kept[label]]
        if len(rows) < 2:
            return np.asarray(T[label])
        divisor = self.keep if self.published else len(rows)
        return np.asarray(sum(rows) / divisor)

    def answer(self, row: Array, centers: list[Array]) -> Array:
        logs = np.array([-(row - center) @ self.precision @ (row - center) / 2 for center in centers])
        product = softmax(100 * T @ row) * softmax(0.05 * logs)
        return np.asarray(product / product.sum())


@pytest.mark.parametrize(("kind", "published"), [(OGA, False), (OGAPublished, True)])
@pytest.mark.parametrize(("size", "keep"), [(1, 8), (8, 8), (8, 3)])
def test_oga_is_that_of_loops(kind: type[OGA], published: bool, size: int, keep: int) -> None:
    adapter = kind(source(), keep=keep)
    slow = SlowOGA(keep, published)
    for batch in stream(80).split(size):
        expected = torch.from_numpy(slow.step(unit(batch)))
        assert torch.allclose(adapter.step(batch).double(), expected, atol=1e-3)
    if keep == 8:
        assert len(adapter.kept) > 4 * DIM  # so that both ways to an inverse were tested


def test_features_that_do_not_differ_have_no_covariance() -> None:
    assert torch.equal(inverse_covariance(torch.zeros(3, 4, dtype=torch.float64)), torch.zeros(4, 4).double())


def log_likelihood(row: Array, center: Array, variance: Array) -> float:
    return float(-((row - center) ** 2 / variance).sum() / 2 - np.log(variance).sum() / 2)


def slow_stata(rows: Array, k: int) -> Array:
    """StatA by loops over rows, classes and dimensions."""
    count = len(rows)
    prior = np.stack([softmax(100 * T @ row) for row in rows])
    near = np.zeros((count, count))
    for i in range(count):
        others = sorted((j for j in range(count) if j != i), key=lambda j: -(rows[i] @ rows[j]))
        for j in others[:k]:
            near[i, j] = rows[i] @ rows[j]
    first = np.zeros(DIM)
    for i in range(count):
        for c in range(CLASSES):
            first += prior[i, c] * (rows[i] - T[c]) ** 2 / count
    centers = T.copy()
    variances = np.tile(first, (CLASSES, 1))
    shares = prior.copy()
    for turn in range(11):
        logs = np.array([[log_likelihood(row, centers[c], variances[c]) for c in range(CLASSES)] for row in rows])
        for _ in range(5):
            heard = 50 / (2 * k) * (near @ shares + near.T @ shares)
            powers = prior * np.exp((logs + heard - (logs + heard).max(1, keepdims=True)) / 50)
            shares = powers / powers.sum(1, keepdims=True)
        if turn == 10:
            break
        for c in range(CLASSES):
            members = int((shares.argmax(1) == c).sum())
            trust = members / (members + 1)
            mean = shares[:, c] @ rows / shares[:, c].sum()
            center = trust * mean / np.linalg.norm(mean) + (1 - trust) * T[c]
            centers[c] = center / np.linalg.norm(center)
            spread = sum(shares[i, c] * (rows[i] - centers[c]) ** 2 for i in range(count)) / shares[:, c].sum()
            variances[c] = trust * spread + (1 - trust) * (first + (T[c] - centers[c]) ** 2)
    return shares


@pytest.mark.parametrize("size", [12, 40])
def test_stata_is_that_of_loops_batch_by_batch(size: int) -> None:
    adapter = StatA(source())
    for batch in stream(80).split(size):
        if len(batch) == size:
            expected = torch.from_numpy(slow_stata(unit(batch), 3))
            assert torch.allclose(adapter.step(batch).double(), expected, atol=1e-3)
    assert adapter.state_dict()["_extra_state"]["extra"] == {}  # nothing is kept


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(OGA, {"keep": 0}), (OGA, {"temperature": 0.0}), (StatA, {"k": 0}), (StatA, {"anchor": 0.0})],
)
def test_bad_settings_are_refused(kind: type[OGA], settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(AdaNPCError, match=name):
        kind(source(), **settings)
