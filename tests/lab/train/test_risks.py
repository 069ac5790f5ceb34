"""IRM, VREx and GroupDRO against finite differences, NumPy and hand-written training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.train.algorithm import Algorithm, Batch, losses
from adanpc.lab.train.erm import ERM
from adanpc.lab.train.risks import IRM, GroupDRO, VREx
from adanpc.lab.train.search import draw

CASES: list[tuple[type[Algorithm], dict[str, Any]]] = [
    (IRM, {"weight": 30.0, "anneal": 3}),
    (VREx, {"weight": 30.0, "anneal": 3}),
    (GroupDRO, {"rate": 0.5}),
]
everyone = pytest.mark.parametrize(("kind", "own"), CASES, ids=lambda value: getattr(value, "__name__", ""))


def slope(logits: Tensor, labels: Tensor, size: float = 1e-4) -> float:
    """Of the loss in a scale of the logits, by central differences."""
    up, down = (float(cross_entropy(logits * scale, labels)) for scale in (1 + size, 1 - size))
    return (up - down) / (2 * size)


def test_irm_multiplies_the_slopes_of_even_and_odd_rows() -> None:
    algorithm, given = IRM(tiny.model(), 3).double(), doubled(tiny.batches(8, 5, 2))
    expected = []
    for batch in given:
        logits = algorithm(batch.images).detach()
        expected.append(slope(logits[::2], batch.labels[::2]) * slope(logits[1::2], batch.labels[1::2]))
    _, parts = algorithm.loss(given)
    assert float(parts["penalty"]) == pytest.approx(np.mean(expected), rel=1e-6)


def test_irm_has_the_gradient_of_a_differentiated_slope() -> None:
    algorithm, given = IRM(tiny.model(), 2, weight=7.0, anneal=0).double(), doubled(tiny.batches(6, 6))
    loss, _ = algorithm.loss(given)
    loss.backward()
    made = [parameter.grad for parameter in algorithm.parameters()]
    total = torch.zeros((), dtype=torch.float64)
    for batch in given:
        logits, scale = algorithm(batch.images), torch.ones((), dtype=torch.float64, requires_grad=True)
        halves = [cross_entropy(logits[half::2] * scale, batch.labels[half::2]) for half in (0, 1)]
        first, second = (torch.autograd.grad(half, scale, create_graph=True)[0] for half in halves)
        total = total + cross_entropy(logits, batch.labels) / 2 + 7.0 * first * second / 2
    expected = torch.autograd.grad(total, list(algorithm.parameters()))
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_irm_has_no_slope_to_square_in_a_single_row() -> None:
    _, parts = IRM(tiny.model(), 3).loss(tiny.batches(1, 1, 1))
    assert float(parts["penalty"]) == 0


def test_vrex_is_the_variance_of_the_losses() -> None:
    algorithm, given = VREx(tiny.model(), 3, weight=10.0, anneal=0), tiny.batches(8, 4, 6)
    risks = [cross_entropy(algorithm(batch.images), batch.labels).item() for batch in given]
    loss, parts = algorithm.loss(given)
    assert float(parts["penalty"]) == pytest.approx(np.var(risks), rel=1e-4)
    assert loss.item() == pytest.approx(np.mean(risks) + 10 * np.var(risks), rel=1e-5)


def test_vrex_is_zero_on_equal_domains() -> None:
    _, parts = VREx(tiny.model(), 4).loss(tiny.same(8, 4))
    assert float(parts["penalty"]) == pytest.approx(0, abs=1e-12)


def test_groupdro_multiplies_weights_by_the_exponential_of_losses() -> None:
    algorithm, weights = GroupDRO(tiny.model(), 3, rate=0.7, lr=0.05), np.ones(3) / 3
    for step in range(6):
        given = tiny.batches(8, 4, 6, seed=step)
        risks = losses(algorithm.model, given).detach().double().numpy()
        weights = weights * np.exp(0.7 * risks)
        weights /= weights.sum()
        reported = algorithm.update(given)
        assert reported["loss"] == pytest.approx(weights @ risks, rel=1e-5)
        assert reported["worst"] == pytest.approx(risks.max(), rel=1e-5)


def test_groupdro_gradient_is_that_of_weighted_losses() -> None:
    algorithm, given = GroupDRO(tiny.model(), 3, rate=2.0), tiny.batches(8, 4, 6)
    parameters = list(algorithm.model.parameters())
    risks = losses(algorithm.model, given)
    expected = torch.autograd.grad(torch.softmax(2 * risks.detach(), 0) @ risks, parameters)
    made = torch.autograd.grad(algorithm.loss(given)[0], parameters)
    assert tiny.close(made, expected)


def test_groupdro_survives_huge_losses() -> None:
    algorithm = GroupDRO(tiny.model(), 3, rate=1.0)
    with torch.no_grad():
        algorithm.model.head.weight.mul_(1e5)  # type: ignore[operator]
    for step in range(3):
        reported = algorithm.update(tiny.batches(8, 8, 8, seed=step))
        assert np.isfinite(list(reported.values())).all()
    assert reported["loss"] == pytest.approx(reported["worst"])


@everyone
def test_without_its_own_part_it_is_erm(kind: type[Algorithm], own: Mapping[str, Any]) -> None:
    assert kind.erm is not None
    off = kind(tiny.model(), 3, **{**own, **kind.erm})
    assert tiny.equal(tiny.trained(off, 7), tiny.trained(ERM(tiny.model(), 3), 7))
    assert not tiny.equal(tiny.trained(kind(tiny.model(), 3, **own), 7), tiny.weights(off.model))


@everyone
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
def test_it_resumes_at_any_step(kind: type[Algorithm], own: Mapping[str, Any], stop: int) -> None:
    assert tiny.resumes(lambda: kind(tiny.model(), 3, **own), stop, 7)


@everyone
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 5, 2)])
def test_small_and_unequal_batches_keep_it_finite(
    kind: type[Algorithm], own: Mapping[str, Any], sizes: tuple[int, ...]
) -> None:
    weights = tiny.trained(kind(tiny.model(), 3, **own), 5, sizes)
    assert all(value.isfinite().all() for value in weights)


@pytest.mark.parametrize("kind", [IRM, VREx])
def test_the_weight_is_one_and_then_its_own(kind: type[IRM | VREx]) -> None:
    algorithm = kind(tiny.model(), 3, weight=30.0, anneal=3)
    for step in range(5):
        reported = algorithm.update(tiny.batches(8, 8, 8, seed=step))
        expected = reported["risk"] + (1 if step < 3 else 30) * reported["penalty"]
        assert reported["loss"] == pytest.approx(expected, rel=1e-5)


def test_adam_starts_anew_when_the_weight_changes() -> None:
    algorithm, replica = VREx(tiny.model(), 3, weight=30.0, anneal=3), tiny.model()
    adam = torch.optim.Adam(replica.parameters(), lr=1e-3)
    for step in range(6):
        given = tiny.batches(8, 8, 8, seed=step)
        if step == 3:
            adam = torch.optim.Adam(replica.parameters(), lr=1e-3)
        risks = losses(replica, given)
        adam.zero_grad()
        (risks.mean() + (1 if step < 3 else 30) * ((risks - risks.mean()) ** 2).mean()).backward()
        adam.step()
        algorithm.update(given)
        assert tiny.close(tiny.weights(algorithm.model), tiny.weights(replica))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="weight must be 0 or more, got -1"):
        IRM(tiny.model(), 3, weight=-1)
    with pytest.raises(AdaNPCError, match="anneal must be 0 or more, got nan"):
        VREx(tiny.model(), 3, anneal=float("nan"))
    for kind in (VREx, GroupDRO):
        with pytest.raises(AdaNPCError, match=f"{kind.__name__} needs at least 2 source domains, got 1"):
            kind(tiny.model(), 1)


@pytest.mark.parametrize("kind", [IRM, VREx, GroupDRO])
def test_draws_of_its_space_are_arguments(kind: type[Algorithm]) -> None:
    for seed in range(5):
        kind(tiny.model(), 3, **draw(kind.space, seed))


def doubled(given: list[Batch]) -> list[Batch]:
    return [batch._replace(images=batch.images.double()) for batch in given]
