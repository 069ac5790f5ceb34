"""Simulated votes against loops over all rows."""

from __future__ import annotations

import json
from math import ceil, exp, log
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from adanpc.errors import AdaNPCError
from adanpc.lab.theory.bounds import Problem, best_split, failure, proposition_2, proposition_3
from adanpc.lab.theory.simulate import SCALES, SHIFTS, measure, plan, simulate

Floats = npt.NDArray[np.float64]
BOTH = Problem(2, 0.3, 0.2)


def by_loops(problem: Problem, k: int, n_s: int, n_u: int, queries: int, seed: int) -> dict[str, Any]:
    """Every vote in plain NumPy, by Euclidean distance, one query after the other."""
    draw = [np.random.default_rng([seed, stream]) for stream in range(5)]
    source = problem.source(n_s, draw[0])
    target = problem.target(n_u, draw[1])
    points = problem.target(queries, draw[2])
    labels_s = (draw[3].uniform(size=n_s) < problem.source_probability(source)).astype(int)
    labels_u = (draw[4].uniform(size=n_u) < problem.target_probability(target)).astype(int)

    def nearest(point: Floats, rows: Floats) -> npt.NDArray[np.intp]:
        return np.argsort(np.linalg.norm(rows - point, axis=1))

    def is_class_1(votes: npt.NDArray[Any]) -> bool:
        return bool(votes.sum() >= k / 2)

    pseudo = np.array([int(is_class_1(labels_s[nearest(point, source)[:k]])) for point in target])
    k_s, k_u = best_split(k, n_s, n_u, problem.assumptions)
    splits = {"split": (k_s, k_u), "half": (k - k // 2, k // 2)}
    answers: dict[str, list[bool]] = {}
    for point in points:
        near_s = nearest(point, source)
        near_u = nearest(point, target)
        answers.setdefault("source", []).append(is_class_1(labels_s[near_s[:k]]))
        for suffix, labels in (("", labels_u), (" pseudo", pseudo)):
            every = np.concatenate([labels_s, labels])[nearest(point, np.concatenate([source, target]))[:k]]
            answers.setdefault("joint" + suffix, []).append(is_class_1(every))
            for name, (one, other) in splits.items():
                votes = np.concatenate([labels_s[near_s[:one]], labels[near_u[:other]]])
                answers.setdefault(name + suffix, []).append(is_class_1(votes))
    excess = {name: problem.excess(points, np.array(each)) for name, each in answers.items()}
    return {"excess": excess, "bias": float(np.mean(np.abs(pseudo - problem.target_probability(target))))}


@pytest.mark.parametrize("problem", [Problem(), BOTH, Problem(3, 0.5, 0.1, power=2.0)], ids=str)
@pytest.mark.parametrize("k", [1, 6, 15])
def test_every_vote_is_that_of_plain_loops(problem: Problem, k: int) -> None:
    record = simulate(problem, k, 150, 60, 80, seed=3)
    known = by_loops(problem, k, 150, 60, 80, 3)
    assert record["excess"] == pytest.approx(known["excess"])
    assert record["pseudo_bias"] == pytest.approx(known["bias"])


def test_a_record_has_its_parameters_and_bounds_and_is_json() -> None:
    record = simulate(BOTH, 15, 200, 50, 100, seed=1)
    assert json.loads(json.dumps(record)) == record
    assert Problem(**record["problem"]) == BOTH
    assert record["shift"] == "both"
    assert [record[name] for name in ("k", "n_s", "n_u", "queries", "seed")] == [15, 200, 50, 100, 1]
    k_s, k_u = best_split(15, 200, 50, BOTH.assumptions)
    assert (record["k_s"], record["k_u"]) == (k_s, k_u)
    assert record["bound"] == {
        "2": proposition_2(15, 200, BOTH.assumptions),
        "3": proposition_3(k_s, k_u, 200, 50, BOTH.assumptions),
        "3 half": proposition_3(8, 7, 200, 50, BOTH.assumptions),
    }
    assert record["failure"] == failure(15)
    assert record["divergence"]["wasserstein"] == BOTH.wasserstein


def test_a_seed_decides_everything() -> None:
    assert simulate(BOTH, 5, 100, 30, 50, seed=1) == simulate(BOTH, 5, 100, 30, 50, seed=1)
    assert simulate(BOTH, 5, 100, 30, 50, seed=1)["excess"] != simulate(BOTH, 5, 100, 30, 50, seed=2)["excess"]


def test_without_target_rows_every_vote_is_the_source_vote() -> None:
    record = simulate(BOTH, 7, 100, 0, 60, seed=0)
    assert len(set(record["excess"].values())) == 1
    assert record["pseudo_bias"] is None
    assert record["bound"]["3"] == record["bound"]["3 half"] == record["bound"]["2"]


def test_few_target_rows_are_no_more_than_there_are() -> None:
    record = simulate(Problem(gap=0.2), 15, 100, 3, 60, seed=0)
    assert record["k_u"] <= 3
    assert record["bound"]["3 half"] == proposition_3(12, 3, 100, 3, Problem(gap=0.2).assumptions)


def test_distances_and_errors_of_proposition_1() -> None:
    problem = Problem(2, 0.3)
    record = simulate(problem, 9, 400, 10, 300, seed=5)
    source = problem.source(400, np.random.default_rng([5, 0]))
    points = problem.target(300, np.random.default_rng([5, 2]))
    distance = np.sort(np.linalg.norm(points[:, None] - source[None], axis=2), axis=1)[:, :9]
    divergence = record["divergence"]
    assert divergence["mean"] == pytest.approx(distance.mean(), abs=1e-6)
    assert divergence["within"] == np.mean(distance[:, -1] <= divergence["radius"])
    assert divergence["within"] >= 1 - exp(-9 / 4)
    probability = problem.target_probability(points)
    bayes_error = np.minimum(probability, 1 - probability).mean()
    assert divergence["error"] == pytest.approx(bayes_error + record["excess"]["source"])
    # What is left of the bound without the distance is three Bayes errors and an excess.
    errors = divergence["bound"] - 2 * problem.assumptions.smoothness * divergence["radius"]
    assert 0.7 < errors < 1.1


def test_many_rows_find_the_bayes_rule_and_a_gap_keeps_the_source_from_it() -> None:
    excess = [simulate(Problem(**shift), 101, 3000, 1500, 500, seed=0)["excess"] for shift in SHIFTS.values()]  # type: ignore[arg-type]
    assert all(votes["source"] < 0.015 for votes in excess[:2])
    assert all(votes["source"] > 0.03 for votes in excess[2:])
    assert all(votes["split"] < votes["source"] / 2 for votes in excess[2:])


def test_k_must_fit_the_source() -> None:
    for k in (0, 11):
        with pytest.raises(AdaNPCError, match=f"k must be from 1 to 10, the number of source rows, got {k}"):
            simulate(Problem(), k, 10, 5, 5, 0)


@pytest.mark.parametrize("scale", SCALES)
def test_a_plan_has_every_sweep_under_every_shift_with_every_seed(scale: str) -> None:
    entries = plan(scale)
    size = SCALES[scale]
    each = len(size.k) + len(size.n_s) + len(size.n_u)
    assert len(entries) == each * len(SHIFTS) * size.seeds * len(size.dims)
    assert {entry["sweep"] for entry in entries} == {"k", "n_s", "n_u"}
    assert len({Problem(**entry["problem"]).shift for entry in entries}) == 4
    assert {entry["seed"] for entry in entries} == set(range(size.seeds))
    assert all(
        entry["k"] in (ceil(log(entry["n_s"])), 1 + ceil(log(entry["n_s"])))
        for entry in entries
        if entry["sweep"] == "n_s"
    )
    assert len({json.dumps(entry) for entry in entries}) == len(entries)


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="scale must be one of reduced, full, got 'huge'"):
        plan("huge")


def test_measuring_an_entry_of_a_plan_keeps_its_sweep() -> None:
    entry = {"sweep": "k", "problem": {"dim": 2, "gap": 0.1}, "k": 3, "n_s": 50, "n_u": 5, "queries": 20, "seed": 4}
    assert measure(entry) == {"sweep": "k", **simulate(Problem(gap=0.1), 3, 50, 5, 20, 4)}
