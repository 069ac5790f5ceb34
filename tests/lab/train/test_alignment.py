"""CORAL and MMD against loops over pairs of domains, and of rows."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import tiny
import torch
from numpy.typing import NDArray

from adanpc.errors import AdaNPCError
from adanpc.lab.train.alignment import CORAL, MMD
from adanpc.lab.train.erm import ERM
from adanpc.lab.train.penalty import Outputs
from adanpc.lab.train.search import draw

Array = NDArray[np.float64]
both = pytest.mark.parametrize("kind", [CORAL, MMD])


def coral(one: Array, other: Array) -> float:
    def covariance(rows: Array) -> Array:
        return np.cov(rows, rowvar=False) if len(rows) > 1 else np.zeros((rows.shape[1], rows.shape[1]))

    means = ((one.mean(0) - other.mean(0)) ** 2).mean()
    return float(means + ((covariance(one) - covariance(other)) ** 2).mean())


def mmd(one: Array, other: Array) -> float:
    def kernel(xs: Array, ys: Array) -> float:
        gammas = (0.001, 0.01, 0.1, 1, 10, 100, 1000)
        return float(np.mean([[sum(np.exp(-g * ((x - y) ** 2).sum()) for g in gammas) for y in ys] for x in xs]))

    return kernel(one, one) + kernel(other, other) - 2 * kernel(one, other)


ORACLES = {CORAL: coral, MMD: mmd}


@both
@pytest.mark.parametrize("sizes", [(8, 8), (8, 3, 5), (1, 4, 1, 2)])
def test_the_penalty_is_the_mean_over_pairs(kind: type[CORAL | MMD], sizes: tuple[int, ...]) -> None:
    algorithm, given = kind(tiny.model(), len(sizes)), tiny.batches(*sizes)
    features = [algorithm.model.features(batch.images).detach().double().numpy() for batch in given]
    expected = np.mean([ORACLES[kind](one, other) for one, other in combinations(features, 2)])
    loss, parts = algorithm.loss(given)
    assert float(parts["penalty"]) == pytest.approx(expected, rel=1e-4)
    assert loss.item() == pytest.approx(float(parts["risk"]) + expected, rel=1e-5)


@both
def test_its_gradient_is_right(kind: type[CORAL | MMD]) -> None:
    algorithm, sizes = kind(tiny.model(), 3), (4, 1, 3)

    def penalty(features: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0)
        return algorithm.penalty([Outputs(part, empty, empty, empty) for part in features.split(sizes)])

    features = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 3
    assert torch.autograd.gradcheck(penalty, features.requires_grad_())


@both
def test_equal_domains_have_no_penalty_and_finite_gradients(kind: type[CORAL | MMD]) -> None:
    algorithm = kind(tiny.model(), 3, weight=10.0)
    loss, parts = algorithm.loss(tiny.same(8, 3))
    assert float(parts["penalty"]) == pytest.approx(0, abs=1e-5)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in algorithm.parameters())


def test_mmd_sees_small_distances_far_from_the_origin() -> None:
    near = torch.tensor([[100.0, 100.0], [100.0, 100.03125]])
    made = MMD(tiny.model(), 2).penalty([Outputs(row[None], row, row, row) for row in near])
    assert made.item() == pytest.approx(mmd(near[:1].double().numpy(), near[1:].double().numpy()), rel=1e-5)


@both
def test_with_weight_0_it_is_erm(kind: type[CORAL | MMD]) -> None:
    assert kind.erm == {"weight": 0.0}
    erm = tiny.trained(ERM(tiny.model(), 3), 6)
    assert tiny.equal(tiny.trained(kind(tiny.model(), 3, weight=0.0), 6), erm)
    assert not tiny.equal(tiny.trained(kind(tiny.model(), 3), 6), erm)


@both
def test_training_brings_the_domains_together(kind: type[CORAL | MMD]) -> None:
    penalties = {}
    for weight in (0.0, 10.0):
        algorithm = kind(tiny.model(), 3, weight=weight, lr=0.02)
        for step in range(60):
            penalties[weight] = algorithm.update(tiny.batches(16, 16, 16, seed=step))["penalty"]
    assert penalties[10.0] < 0.9 * penalties[0.0]


@both
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 5, 2)])
def test_small_and_unequal_batches_keep_it_finite(kind: type[CORAL | MMD], sizes: tuple[int, ...]) -> None:
    assert all(value.isfinite().all() for value in tiny.trained(kind(tiny.model(), 3), 5, sizes))


@both
def test_it_resumes(kind: type[CORAL | MMD]) -> None:
    assert tiny.resumes(lambda: kind(tiny.model(), 3), 3, 6)


@both
def test_one_domain_is_refused(kind: type[CORAL | MMD]) -> None:
    with pytest.raises(AdaNPCError, match=f"{kind.__name__} needs at least 2 source domains, got 1"):
        kind(tiny.model(), 1)


@both
def test_draws_of_its_space_are_arguments(kind: type[CORAL | MMD]) -> None:
    for seed in range(5):
        kind(tiny.model(), 3, **draw(kind.space, seed))
