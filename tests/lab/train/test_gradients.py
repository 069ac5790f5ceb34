"""MLDG and Fish against training by clones, Fishr against gradients of single samples."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch
from adanpc.lab.train.erm import ERM
from adanpc.lab.train.gradients import MLDG, Fish, Fishr
from adanpc.lab.train.search import draw

CASES: list[tuple[type[Algorithm], dict[str, Any]]] = [
    (MLDG, {}),
    (Fish, {}),
    (Fishr, {"weight": 30.0, "anneal": 3.5, "ema": 0.5}),
]
everyone = pytest.mark.parametrize(("kind", "own"), CASES, ids=lambda value: getattr(value, "__name__", ""))
DECAY = {"lr": 0.01, "weight_decay": 0.1}


def adam(model: nn.Module) -> Adam:
    return Adam(model.parameters(), lr=0.01, weight_decay=0.1)


def mldg_by_clones(
    model: nn.Module, outer: Adam, given: list[Batch], order: list[int], tests: int, beta: float
) -> None:
    """One update: a clone for each meta-train domain takes a real step of a new Adam."""
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for train, test in zip(order[tests:], cycle(order[:tests]), strict=False):
        clone = deepcopy(model)
        inner = adam(clone)
        for domain, factor in ((train, 1.0), (test, beta)):
            inner.zero_grad()
            cross_entropy(clone(given[domain].images), given[domain].labels).backward()
            for sum_, parameter in zip(total, clone.parameters(), strict=True):
                assert parameter.grad is not None
                sum_ += factor * parameter.grad / len(given)
            inner.step()
    for parameter, gradient in zip(model.parameters(), total, strict=True):
        parameter.grad = gradient
    outer.step()


@pytest.mark.parametrize(("domains", "asked", "tests"), [(5, 2, 2), (4, 1, 1), (3, 2, 2), (2, 1, 1), (2, 2, 1)])
def test_mldg_is_that_of_clones(domains: int, asked: int, tests: int) -> None:
    algorithm = MLDG(tiny.model(), domains, weight=0.7, n_meta_test=asked, **DECAY)
    replica = tiny.model()
    outer = adam(replica)
    for step in range(5):
        given = tiny.batches(*[8, 5, 8, 3, 6][:domains], seed=step)
        torch.manual_seed(step)
        order = torch.randperm(domains).tolist()
        mldg_by_clones(replica, outer, given, order, tests, 0.7)
        torch.manual_seed(step)
        algorithm.update(given)
        assert tiny.close(tiny.weights(algorithm.model), tiny.weights(replica))


def test_mldg_reports_what_it_descends() -> None:
    algorithm = MLDG(tiny.model(), 5, weight=0.7, n_meta_test=2)
    reported = algorithm.update(tiny.batches(8, 8, 8, 8, 8))
    assert reported["loss"] == pytest.approx(3 * (reported["risk"] + 0.7 * reported["meta"]) / 5, rel=1e-5)


def test_mldg_learns_from_two_domains() -> None:
    algorithm, given = MLDG(tiny.model(), 2, lr=0.02), tiny.batches(32, 32)
    first = ERM(algorithm.model, 2).loss(given)[0]
    for _ in range(60):
        algorithm.update(given)
    assert ERM(algorithm.model, 2).loss(given)[0].item() < first.item() / 3


def test_mldg_leaves_frozen_weights_alone() -> None:
    model = tiny.model()
    model.encoder.requires_grad_(False)
    before = tiny.weights(model)
    after = tiny.trained(MLDG(model, 3), 3)
    assert tiny.equal(before[:2], after[:2])
    assert not tiny.equal(before[2:], after[2:])


@pytest.mark.parametrize(("kind", "passes"), [(MLDG, 4), (Fish, 3)])
def test_running_statistics_follow_every_pass(kind: type[Algorithm], passes: int) -> None:
    algorithm = kind(tiny.model(norm=True), 3, **({"n_meta_test": 1} if kind is MLDG else {}))
    norm = algorithm.model.norm
    assert isinstance(norm, nn.BatchNorm1d)
    algorithm.update(tiny.batches(8, 8, 8))
    assert norm.running_mean is not None
    assert norm.running_mean.abs().min() > 0
    assert norm.num_batches_tracked == passes


def test_fish_is_that_of_a_clone_whose_adam_goes_on() -> None:
    algorithm, replica = Fish(tiny.model(), 3, meta_lr=0.3, **DECAY), tiny.model()
    kept = None
    for step in range(5):
        given = tiny.batches(8, 5, 3, seed=step)
        torch.manual_seed(step)
        clone = deepcopy(replica)
        inner = adam(clone)
        if kept is not None:
            inner.load_state_dict(kept)
        met = []
        for domain in torch.randperm(3).tolist():
            inner.zero_grad()
            loss = cross_entropy(clone(given[domain].images), given[domain].labels)
            loss.backward()
            inner.step()
            met.append(loss.item())
        kept = deepcopy(inner.state_dict())
        for parameter, moved in zip(replica.parameters(), clone.parameters(), strict=True):
            parameter.data += 0.3 * (moved.data - parameter.data)
        torch.manual_seed(step)
        assert algorithm.update(given)["loss"] == pytest.approx(np.mean(met), rel=1e-5)
        assert tiny.close(tiny.weights(algorithm.model), tiny.weights(replica))


def gradients(model: SourceModel, batch: Batch) -> Tensor:
    """The head's gradient for each sample, one at a time, differentiable (B, all weights and biases)."""
    rows = []
    for image, label in zip(batch.images, batch.labels, strict=True):
        loss = cross_entropy(model(image[None]), label[None])
        parts = torch.autograd.grad(loss, list(model.head.parameters()), create_graph=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def fishr_by_samples(model: SourceModel, given: list[Batch], ema: float, kept: list[Tensor]) -> Tensor:
    """The penalty with averages as published: corrected by 1 / (1 - ema), kept without gradients."""
    averages = []
    for domain, batch in enumerate(given):
        rows = gradients(model, batch)
        average = ema * kept[domain] + (1 - ema) * ((rows - rows.mean(0)) ** 2).mean(0)
        kept[domain] = average.detach()
        averages.append(average / (1 - ema))
    center = sum(averages) / len(given)
    return torch.stack([((average - center) ** 2).mean() for average in averages]).mean()


@pytest.mark.parametrize("bias", [True, False])
def test_fishr_is_that_of_single_samples_and_so_are_its_gradients(bias: bool) -> None:
    model = tiny.model()
    model.head = nn.Linear(tiny.DIM, tiny.CLASSES, bias=bias)
    algorithm = Fishr(model, 3, weight=50.0, anneal=0, ema=0.6).double()
    kept = [torch.zeros((), dtype=torch.float64) for _ in range(3)]
    for step in range(4):
        given = [batch._replace(images=batch.images.double()) for batch in tiny.batches(8, 5, 2, seed=step)]
        expected = fishr_by_samples(model, given, 0.6, kept)
        loss, parts = algorithm.loss(given)
        assert float(parts["penalty"]) == pytest.approx(expected.item(), rel=1e-9)
        parameters = list(model.parameters())
        ours = torch.autograd.grad(loss, parameters)
        risk, _ = ERM(model, 3).loss(given)
        theirs = torch.autograd.grad(risk + 50 * expected, parameters)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_fishr_has_no_penalty_on_equal_domains() -> None:
    algorithm = Fishr(tiny.model(), 4, anneal=0)
    for _ in range(3):
        reported = algorithm.update(tiny.same(8, 4))
        assert reported["penalty"] == pytest.approx(0, abs=1e-10)


def test_fishr_is_erm_until_its_anneal_and_then_starts_adam_anew() -> None:
    algorithm, erm = Fishr(tiny.model(), 3, weight=30.0, anneal=3.5), ERM(tiny.model(), 3)
    assert tiny.equal(tiny.trained(algorithm, 4), tiny.trained(erm, 4))
    assert not tiny.equal(tiny.trained(algorithm, 1, first=4), tiny.trained(erm, 1, first=4))
    (state,) = {float(state["step"]) for state in algorithm.optimizers["model"].state.values()}
    assert state == 1


def test_fishr_with_weight_0_is_erm_beyond_its_anneal() -> None:
    assert Fishr.erm == {"weight": 0.0}
    off = Fishr(tiny.model(), 3, weight=0.0, anneal=3)
    assert tiny.equal(tiny.trained(off, 7), tiny.trained(ERM(tiny.model(), 3), 7))


def test_mldg_and_fish_are_never_erm() -> None:
    assert MLDG.erm is None
    assert Fish.erm is None


@everyone
@pytest.mark.parametrize("stop", [1, 3, 4, 5])
def test_it_resumes_at_any_step(kind: type[Algorithm], own: Mapping[str, Any], stop: int) -> None:
    assert tiny.resumes(lambda: kind(tiny.model(), 3, **own), stop, 7)


@everyone
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 5, 2)])
def test_small_and_unequal_batches_keep_it_finite(
    kind: type[Algorithm], own: Mapping[str, Any], sizes: tuple[int, ...]
) -> None:
    assert all(value.isfinite().all() for value in tiny.trained(kind(tiny.model(), 3, **own), 5, sizes))


@pytest.mark.parametrize("kind", [MLDG, Fish])
def test_the_seed_decides_the_order_of_domains(kind: type[Algorithm]) -> None:
    ends = []
    for seed in (1, 1, 2, 3, 4):
        algorithm = kind(tiny.model(), 3)
        torch.manual_seed(seed)
        algorithm.update(tiny.batches(8, 8, 8))
        ends.append(tiny.weights(algorithm.model))
    assert tiny.equal(ends[0], ends[1])
    assert not all(tiny.equal(ends[0], end) for end in ends[2:])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="n_meta_test must be at least 1, got 0"):
        MLDG(tiny.model(), 3, n_meta_test=0)
    with pytest.raises(AdaNPCError, match="ema must be at least 0 and below 1, got 1"):
        Fishr(tiny.model(), 3, ema=1)
    model = tiny.model()
    model.head = nn.Sequential(nn.Linear(tiny.DIM, 5), nn.Linear(5, tiny.CLASSES))
    with pytest.raises(AdaNPCError, match="Fishr needs a linear head, got Sequential"):
        Fishr(model, 3)
    for kind, _ in CASES:
        with pytest.raises(AdaNPCError, match=f"{kind.__name__} needs at least 2 source domains, got 1"):
            kind(tiny.model(), 1)
    with pytest.raises(AdaNPCError, match="expected one batch from each of 3 domains, got 2"):
        Fish(tiny.model(), 3).update(tiny.batches(8, 8))


@everyone
def test_draws_of_its_space_are_arguments(kind: type[Algorithm], own: Mapping[str, Any]) -> None:
    for seed in range(5):
        kind(tiny.model(), 3, **draw(kind.space, seed))
