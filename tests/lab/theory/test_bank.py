"""The split of a bank whose constants are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adanpc.core import Append, MemoryBank, Origin, Veto
from adanpc.errors import AdaNPCError
from adanpc.lab.theory.bank import split_chart, split_of_bank
from adanpc.lab.theory.bounds import Problem, vote_error


def bank_of(problem: Problem, n_s: int = 2000, n_u: int = 1000, seed: int = 0) -> MemoryBank:
    draw = np.random.default_rng(seed)
    bank = MemoryBank(2 * problem.dim, 2)
    for points, eta, origin in (
        (problem.source(n_s, draw), problem.source_probability, Origin.SOURCE),
        (problem.target(n_u, draw), problem.target_probability, Origin.ADMITTED),
    ):
        labels = draw.uniform(size=len(points)) < eta(points)
        bank.apply(Append(torch.from_numpy(points), torch.from_numpy(labels).long(), origin))
    return bank


def test_constants_are_found_on_problems_that_have_them() -> None:
    for dim in (1, 2, 4):
        known = split_of_bank(bank_of(Problem(dim)), 40).known
        assert known.dim == pytest.approx(dim, rel=0.15)
        assert known.source_overlap / known.target_overlap == pytest.approx(1, rel=0.2)
    known = split_of_bank(bank_of(Problem(2)), 40).known
    assert known.density == pytest.approx(Problem(2).assumptions.density, rel=0.2)
    assert 0 < known.smoothness < Problem(2).assumptions.smoothness
    assert known.gap < 0.05


def test_the_gap_is_found_without_the_noise_of_votes() -> None:
    gaps = [split_of_bank(bank_of(Problem(2, gap=gap)), 40).known.gap for gap in (0.0, 0.1, 0.2)]
    assert gaps == pytest.approx([0, 0.1, 0.2], abs=0.05)


def test_the_gap_of_three_classes_is_that_of_loops() -> None:
    draw = np.random.default_rng(0)
    rows, labels = draw.normal(size=(160, 5)), draw.integers(0, 3, 160)
    labels[:100] = np.minimum(labels[:100], draw.integers(0, 3, 100))  # the source has more of class 0
    bank = MemoryBank(5, 3)
    for part, origin in ((slice(0, 100), Origin.SOURCE), (slice(100, 160), Origin.ADMITTED)):
        bank.apply(Append(torch.from_numpy(rows[part]), torch.from_numpy(labels[part]), origin))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    squares = []
    for probe in range(100, 160):
        order = [row for row in np.argsort(-rows @ rows[probe]) if row != probe]
        near = [[labels[row] for row in order if (row < 100) == source][:12] for source in (True, False)]
        shares = [[each.count(label) / 12 for label in range(3)] for each in near]
        chance = sum(share * (1 - share) / 11 for each in shares for share in each)
        squares.append((sum((a - b) ** 2 for a, b in zip(*shares, strict=True)) - chance) / 2)
    assert np.mean(squares) > 0
    assert split_of_bank(bank, 12).known.gap == pytest.approx(np.mean(squares) ** 0.5)


def test_a_thin_source_and_a_gap_leave_the_vote_to_target_rows() -> None:
    plain, thin, apart = (split_of_bank(bank_of(each), 40) for each in (Problem(), Problem(2, 0.1), Problem(gap=0.2)))
    assert (plain.n_s, plain.n_u, plain.k_s + plain.k_u) == (2000, 1000, 40)
    assert plain.k_u == pytest.approx(40 / 3, abs=3)
    assert plain.joint == pytest.approx(40 / 3, abs=1)
    assert thin.k_u > 28
    assert thin.joint > 28
    assert apart.k_u > 28
    assert apart.joint == pytest.approx(40 / 3, abs=1)


def test_vetoed_rows_do_not_count() -> None:
    bank = bank_of(Problem(), 100, 50)
    bank.apply(Veto((0, 1, 120)))
    split = split_of_bank(bank, 5)
    assert (split.n_s, split.n_u) == (98, 49)


def test_probes_are_drawn_by_seed() -> None:
    bank = bank_of(Problem(), 200, 100)
    assert split_of_bank(bank, 10, probes=20, seed=1) == split_of_bank(bank, 10, probes=20, seed=1)
    assert split_of_bank(bank, 10, probes=20, seed=1).known != split_of_bank(bank, 10, probes=20, seed=2).known


def test_repeated_rows_do_not_change_the_dimension() -> None:
    problem, draw = Problem(2), np.random.default_rng(0)
    bank = MemoryBank(4, 2)
    bank.apply(Append(torch.from_numpy(problem.source(500, draw)), torch.tensor([0, 1] * 250)))
    twice = torch.from_numpy(problem.target(500, draw)).repeat(2, 1)
    bank.apply(Append(twice, torch.tensor([0, 1] * 500), Origin.ADMITTED))
    assert split_of_bank(bank, 60).known.dim == pytest.approx(2, rel=0.15)


@pytest.mark.parametrize("target", [torch.eye(9), torch.ones(9, 9)], ids=["equally far", "equal"])
def test_rows_without_a_dimension_are_refused(target: torch.Tensor) -> None:
    bank = MemoryBank(9, 2)
    for origin in (Origin.SOURCE, Origin.ADMITTED):
        bank.apply(Append(target, torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0]), origin))
    with pytest.raises(AdaNPCError, match="dimension of at most 100"):
        split_of_bank(bank, 4)


def test_a_source_that_repeats_the_target_is_refused() -> None:
    draw, bank = np.random.default_rng(0), MemoryBank(4, 2)
    target = torch.from_numpy(Problem(2).target(20, draw))
    bank.apply(Append(target.repeat(5, 1), torch.tensor([0, 1] * 50)))
    bank.apply(Append(target, torch.tensor([0, 1] * 10), Origin.ADMITTED))
    with pytest.raises(AdaNPCError, match="have 3 rows equal to them"):
        split_of_bank(bank, 3)


def test_too_few_rows_are_refused() -> None:
    for n_s, n_u, k in ((1, 10, 5), (10, 2, 5), (10, 10, 1)):
        with pytest.raises(AdaNPCError, match=f"must be at least 2, got {k}, {n_s} and {n_u - 1}"):
            split_of_bank(bank_of(Problem(), n_s, n_u), k)


def test_the_chart_has_its_least_where_the_split_is() -> None:
    split = split_of_bank(bank_of(Problem(2, 0.3), 300, 30), 40)
    bound, least, joint = split_chart(split).series
    assert bound.x == tuple(range(31))
    assert (min(bound.y), bound.x[bound.y.index(min(bound.y))]) == (least.y[0], least.x[0])
    assert bound.y[3] == vote_error(37, 3, 300, 30, split.known)
    assert joint.x == (round(split.joint),)
