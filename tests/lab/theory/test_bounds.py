"""The bounds against arithmetic by hand, and the problems against what they say of themselves."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, isclose, pi, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adanpc.errors import AdaNPCError
from adanpc.lab.theory.bounds import (
    Assumptions,
    Problem,
    best_split,
    failure,
    proposition_1,
    proposition_2,
    proposition_3,
    radius,
    unit_ball,
    vote_error,
)

KNOWN = Assumptions(2, 0.5, 0.8, 0.1, 0.4, margin=1.0, margin_constant=2.0)
PROBLEMS = (
    Problem(),
    Problem(overlap=0.2),
    Problem(gap=0.2),
    Problem(1, 0.3, 0.1),
    Problem(3, 0.5, power=2.0),
    Problem(2, 0.4, power=0.5),
)

knowns = st.builds(
    Assumptions,
    st.integers(1, 12),
    st.floats(0.01, 1),
    st.floats(0.01, 1),
    st.floats(0.01, 1),
    st.floats(0, 2),
    st.floats(0.2, 1),
    st.floats(0.2, 3),
    st.floats(0.5, 4),
    st.floats(0, 0.5),
)
counts = st.integers(1, 200)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_unit_ball_has_the_volume_of_a_length_a_disc_and_a_ball() -> None:
    assert [unit_ball(dim) for dim in (1, 2, 3)] == pytest.approx([2, pi, 4 * pi / 3])


def test_the_radius_by_hand() -> None:
    assert radius(5, 1000, 0.5, 0.1, 2) == pytest.approx(sqrt(10 / (0.05 * pi * 1000)))
    assert (radius(0, 0, 0.5, 0.1, 2), radius(1, 0, 0.5, 0.1, 2)) == (0, inf)


def test_the_bounds_by_hand() -> None:
    near = sqrt(2 * 16 / (0.5 * 0.1 * pi * 1000))  # r_0
    assert proposition_1(16, 1000, KNOWN, 0.7, 0.1, 0.2) == pytest.approx(0.3 + 1.4 * near)
    assert proposition_2(16, 1000, KNOWN) == pytest.approx(4 * (0.5 + 0.4 * near) ** 2)
    shifted = replace(KNOWN, gap=0.3)
    assert proposition_2(16, 1000, shifted) == pytest.approx(4 * (0.5 + 0.4 * near + 0.3) ** 2)
    near_s, near_u = sqrt(24 / (0.05 * pi * 1000)), sqrt(8 / (0.08 * pi * 100))
    by_hand = 0.5 + 0.75 * (0.4 * near_s + 0.3) + 0.25 * 0.4 * near_u
    assert proposition_3(12, 4, 1000, 100, shifted) == pytest.approx(4 * by_hand**2)
    rough = replace(KNOWN, holder=0.5, margin=2.0)
    assert proposition_2(16, 1000, rough) == pytest.approx(4 * (0.5 + 0.4 * sqrt(near)) ** 3)


@given(knowns, counts, counts, st.integers(1, 10_000), st.integers(1, 10_000))
def test_bounds_fall_with_rows_and_overlap_and_rise_with_gap(
    known: Assumptions, k_s: int, k_u: int, n_s: int, n_u: int
) -> None:
    here = proposition_3(k_s, k_u, n_s, n_u, known)
    assert proposition_3(k_s, k_u, 2 * n_s, n_u, known) <= here
    assert proposition_3(k_s, k_u, n_s, 2 * n_u, known) <= here
    assert proposition_3(k_s, k_u, n_s, n_u, replace(known, source_overlap=1.0)) <= here
    assert proposition_3(k_s, k_u, n_s, n_u, replace(known, target_overlap=1.0)) <= here
    assert proposition_3(k_s, k_u, n_s, n_u, replace(known, gap=known.gap + 0.1)) > here
    assert proposition_1(k_s, 2 * n_s, known, 1.0, 0, 0) < proposition_1(k_s, n_s, known, 1.0, 0, 0)
    assert proposition_1(k_s + 1, n_s, known, 1.0, 0, 0) > proposition_1(k_s, n_s, known, 1.0, 0, 0)


@given(knowns, counts)
def test_with_endless_rows_noise_and_gap_are_left(known: Assumptions, k: int) -> None:
    assert vote_error(k, 0, 10**300, 0, replace(known, holder=1.0)) == pytest.approx(k**-0.25 + known.gap, rel=1e-6)


@given(knowns, counts, st.integers(1, 10_000))
def test_proposition_3_without_target_neighbors_is_proposition_2(known: Assumptions, k: int, n_s: int) -> None:
    assert proposition_3(k, 0, n_s, 10, known) == proposition_2(k, n_s, known)


def test_a_vote_needs_a_neighbor() -> None:
    for counts_ in ((0, 0), (-1, 3), (3, -1)):
        with pytest.raises(AdaNPCError, match="at least 0 and one of them 1"):
            vote_error(*counts_, 10, 10, KNOWN)


def test_the_probability_of_failure_by_hand() -> None:
    assert failure(100) == pytest.approx(2 * exp(-20) + exp(-25))
    assert failure(64, 36) == pytest.approx(2 * exp(-20) + exp(-16) + exp(-9))
    assert failure(1, 1) == 1
    assert failure(63) > 3 * exp(-2 * sqrt(63))  # the paper's short form is too small below k = 64
    assert failure(65) < 3 * exp(-2 * sqrt(65))


@given(st.integers(1, 40), st.integers(1, 500), st.integers(0, 500), knowns)
def test_the_best_split_is_the_best_of_all(k: int, n_s: int, n_u: int, known: Assumptions) -> None:
    if k > n_s + n_u:
        with pytest.raises(AdaNPCError, match="the number of rows"):
            best_split(k, n_s, n_u, known)
        return
    k_s, k_u = best_split(k, n_s, n_u, known)
    assert (k_s + k_u, k_s <= n_s, k_u <= n_u) == (k, True, True)
    every = [proposition_3(k - each, each, n_s, n_u, known) for each in range(k + 1) if each <= n_u and k - each <= n_s]
    assert isclose(proposition_3(k_s, k_u, n_s, n_u, known), min(every))


@given(st.integers(1, 6), st.floats(0.05, 1), st.integers(50, 5000), st.integers(50, 5000))
def test_without_a_gap_the_best_split_is_that_of_masses(dim: int, overlap: float, n_s: int, n_u: int) -> None:
    k_s, _ = best_split(40, n_s, n_u, Assumptions(dim, overlap, 1.0, 0.1, 0.5))
    assert abs(k_s - 40 * overlap * n_s / (overlap * n_s + n_u)) <= 1


def test_a_gap_moves_the_best_split_toward_the_target() -> None:
    chosen = [best_split(40, 1000, 200, replace(KNOWN, gap=gap))[1] for gap in (0.0, 0.1, 0.2, 5.0)]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[2]
    assert chosen[-1] == 40


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_points_are_unit_vectors_of_the_declared_margin_smoothness_and_gap(problem: Problem) -> None:
    points, known = problem.target(4000, generator()), problem.assumptions
    assert points.shape == (4000, 2 * problem.dim)
    assert np.linalg.norm(points, axis=1) == pytest.approx(1)
    eta = problem.target_probability(points)
    for t in (0.01, 0.05, 0.1, 0.3):
        share = np.mean(np.abs(eta - 0.5) < t)
        assert share <= known.margin_constant * t**known.margin + 0.02
    steps = np.linalg.norm(points[1:] - points[:-1], axis=1) ** known.holder
    assert np.all(np.abs(eta[1:] - eta[:-1]) <= known.smoothness * steps + 1e-12)
    near = points + generator(1).normal(size=points.shape) * 1e-4
    near /= np.linalg.norm(near, axis=1, keepdims=True)
    moved = np.linalg.norm(points - near, axis=1) ** known.holder
    assert np.all(np.abs(problem.target_probability(near) - eta) <= 1.01 * known.smoothness * moved)
    assert np.abs(problem.source_probability(points) - eta) == pytest.approx(problem.gap)
    assert 0 <= eta.min() <= problem.source_probability(points).max() <= 1


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_balls_have_at_least_the_declared_mass(problem: Problem) -> None:
    known, centers = problem.assumptions, problem.target(100, generator(1))
    for draw, overlap in ((problem.source, known.source_overlap), (problem.target, known.target_overlap)):
        rows = draw(20_000, generator(2))
        distance = np.linalg.norm(centers[:, None] - rows[None], axis=2)
        for r in (0.4, 0.7):
            mass = np.mean(distance <= r, axis=1).min()
            promised = overlap * known.density * unit_ball(problem.dim) * r**problem.dim
            assert mass >= promised - 4 * sqrt(promised / 20_000)


def test_the_declared_mass_is_not_a_loose_one() -> None:
    problem = Problem(2, 0.2)
    center = np.array([[1, 0, 0, 1]]) / sqrt(2)  # amid the half where the target lives
    rows = problem.source(200_000, generator())
    mass = np.mean(np.linalg.norm(rows - center, axis=1) <= 0.3)
    assert mass == pytest.approx(0.2 * problem.assumptions.density * pi * 0.09, rel=0.1)


@pytest.mark.parametrize("problem", [Problem(1, 0.3), Problem(2, 0.1), Problem(4, 0.8)], ids=str)
def test_the_wasserstein_distance_lies_between_a_dual_and_a_transport(problem: Problem) -> None:
    source, target = (draw(100_000, generator()) for draw in (problem.source, problem.target))
    dual = target[:, -1].mean() - source[:, -1].mean()  # a coordinate is 1-Lipschitz
    wrong = source[:, -1] < 0
    cost = np.mean(2 * np.abs(source[:, -1]) * wrong)  # these are mirrored
    assert dual == pytest.approx(problem.wasserstein, rel=0.02)
    assert cost == pytest.approx(problem.wasserstein, rel=0.02)
    assert Problem(problem.dim).wasserstein == 0


def test_the_shift_is_named() -> None:
    shifts = [problem.shift for problem in (Problem(), Problem(overlap=0.5), Problem(gap=0.1), Problem(2, 0.5, 0.1))]
    assert shifts == ["none", "covariate", "posterior", "both"]


def test_excess_error_is_what_labels_say_and_the_bayes_rule_has_none() -> None:
    problem = Problem(2, 0.5, 0.1)
    points = problem.target(400_000, generator())
    eta = problem.target_probability(points)
    labels = generator(1).uniform(size=len(eta)) < eta
    bayes, other = eta >= 0.5, points[:, 0] + 0.5 * points[:, 1] >= 0.2
    by_labels = np.mean(other != labels) - np.mean(bayes != labels)
    assert problem.excess(points, other) == pytest.approx(by_labels, abs=0.003)
    assert problem.excess(points, other) > 0.01
    assert problem.excess(points, bayes) == 0
    assert problem.excess(points, ~bayes) == pytest.approx(np.mean(np.abs(2 * eta - 1)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"overlap": 0.0}, "overlap must be greater than 0 and at most 1, got 0.0"),
        ({"overlap": 1.1}, "overlap must be greater than 0 and at most 1, got 1.1"),
        ({"gap": 0.3}, "gap must be from 0 to 0.5 - amplitude = 0.2, .* got 0.3"),
        ({"gap": -0.1}, "gap must be from 0 to 0.5 - amplitude = 0.2, .* got -0.1"),
        ({"amplitude": 0.0}, "amplitude must be a finite number greater than 0, got 0.0"),
        ({"power": 0.0}, "power must be a finite number greater than 0, got 0.0"),
    ],
)
def test_impossible_problems_are_refused(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(AdaNPCError, match=words):
        Problem(**wrong)  # type: ignore[arg-type]
