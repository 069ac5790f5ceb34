"""Findings follow the records, whichever way they point."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from adanpc.lab.theory.claims import findings
from adanpc.lab.theory.simulate import SHIFTS, measure

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def measured() -> Records:
    sizes = [{"sweep": "k", "k": k, "n_s": 200, "n_u": 40} for k in (1, 9, 199)]
    sizes += [{"sweep": "n_s", "k": 5, "n_s": n_s, "n_u": 40} for n_s in (30, 200)]
    sizes += [{"sweep": "n_u", "k": 9, "n_s": 200, "n_u": n_u} for n_u in (0, 40, 400)]
    return [
        measure({**size, "problem": {"dim": 2, **shift}, "queries": 60, "seed": seed})
        for shift in SHIFTS.values()
        for size in sizes
        for seed in range(3)
    ]


def sentence(records: Records, *words: str) -> str:
    (matching,) = [text for text in findings(records) if all(word in text for word in words)]
    return matching


def edited(records: Records, path: tuple[str, ...], number: float, **where: Any) -> Records:
    changed = deepcopy(records)
    for record in changed:
        if all(record[name] == value for name, value in where.items()):
            place = record
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = number
    return changed


def test_bounds_that_hold_are_counted_by_setting(measured: Records) -> None:
    assert sentence(measured, "Proposition 2:", "at most the bound").endswith("held in 20 of 20 settings.")
    assert sentence(measured, "Proposition 3:", "at most the bound").endswith("held in 28 of 28 settings.")


def test_one_record_above_a_bound_contradicts_its_setting(measured: Records) -> None:
    worse = edited(measured, ("excess", "source"), 99.0, shift="both", sweep="n_s", n_s=30, seed=2)
    finding = sentence(worse, "Proposition 2:", "at most the bound")
    assert "held in 19 of 20 settings, CONTRADICTED in 1 (shift: both, d = 2, k = 5, n_s = 30, n_u = 40)." in finding
    worse = edited(measured, ("excess", "split"), 99.0, sweep="n_u", n_u=400)
    assert "held in 24 of 28 settings, CONTRADICTED in 4" in sentence(worse, "Proposition 3:", "at most the bound")
    assert "; …)" in sentence(worse, "Proposition 3:", "at most the bound")


@pytest.mark.parametrize(
    ("path", "number", "words"),
    [
        (("divergence", "within"), 0.0, "lies within r_0"),
        (("divergence", "error"), 99.0, "kappa + error on Omega"),
    ],
)
def test_proposition_1_can_be_contradicted(measured: Records, path: tuple[str, ...], number: float, words: str) -> None:
    assert "CONTRADICTED" not in sentence(measured, words)
    assert "held in 0 of 20 settings, CONTRADICTED in 20" in sentence(edited(measured, path, number), words)


def test_the_radius_is_held_against_the_distance_of_domains(measured: Records) -> None:
    assert "held in 0 of 10 settings, CONTRADICTED in 10" in sentence(measured, "no covariate shift (W = 0)")
    near = edited(measured, ("divergence", "radius"), 0.0)
    assert "held in 10 of 10 settings" in sentence(near, "no covariate shift (W = 0)")
    assert "held in 10 of 10 settings" in sentence(near, "replaces, covariate shift")


def test_an_empty_bound_is_called_so(measured: Records) -> None:
    assert "held in 0 of 20 settings" in sentence(measured, "answering every query wrongly")
    small = edited(measured, ("bound", "2"), 0.01)
    assert "held in 20 of 20 settings" in sentence(small, "answering every query wrongly")


def test_the_best_k_is_looked_up(measured: Records) -> None:
    extreme = edited(measured, ("excess", "source"), 0.0, sweep="k", k=1)
    inner = edited(measured, ("excess", "source"), 0.0, sweep="k", k=9)
    assert "CONTRADICTED in 4" in sentence(extreme, "neither the smallest")
    assert "held in 4 of 4 sweeps over k." in sentence(inner, "neither the smallest")
    assert "of all k, 9 had the least excess error" in sentence(inner, "of all k", "shift: both")
    few = [record for record in measured if record["k"] != 9]
    assert "undecided in 4" in sentence(few, "neither the smallest")


def test_more_source_rows_must_help_beyond_doubt(measured: Records) -> None:
    many, few = ({"sweep": "n_s", "n_s": size} for size in (200, 30))
    fell = edited(edited(measured, ("excess", "source"), 0.1, **many), ("excess", "source"), 0.2, **few)
    rose = edited(edited(measured, ("excess", "source"), 0.2, **many), ("excess", "source"), 0.1, **few)
    same = edited(measured, ("excess", "source"), 0.1, sweep="n_s")
    words = "more source rows lower"
    assert "held in 2 of 2 sweeps over n_s." in sentence(fell, words)
    assert "held in 0 of 2 sweeps over n_s, CONTRADICTED in 2" in sentence(rose, words)
    assert "undecided in 2" in sentence(same, words)
    assert "undecided in 2" in sentence([each for each in fell if each["seed"] == 0], words)


def test_a_tighter_bound_is_strictly_tighter(measured: Records) -> None:
    words = "where c_mu* = c_mu"
    assert "held in 12 of 12" in sentence(edited(measured, ("bound", "3 half"), 0.0), words)
    assert "CONTRADICTED in 12" in sentence(edited(measured, ("bound", "3 half"), 99.0), words)
    alone = [record for record in measured if record["k"] == 1]
    assert "held in 0 of 2 settings, undecided in 2." in sentence(alone, words)  # half of one neighbor is none


@pytest.mark.parametrize(("with_rows", "verdict"), [(0.0, "held in 12 of 12"), (0.9, "CONTRADICTED in 12")])
def test_whether_target_rows_help_is_read_off(measured: Records, with_rows: float, verdict: str) -> None:
    changed = edited(edited(measured, ("excess", "joint"), with_rows), ("excess", "source"), 0.5)
    finding = sentence(changed, "the k nearest of all rows, labels drawn", "posterior shift")
    assert verdict in finding
    assert f"it was {with_rows:.4f} with them and 0.5000 without" in finding
    alone = [record for record in changed if record["seed"] == 0]
    assert "undecided in 12" in sentence(alone, "the k nearest of all rows, labels drawn", "posterior shift")


def test_a_shared_setting_counts_once_and_no_record_says_nothing(measured: Records) -> None:
    assert findings([*measured, *measured])[:4] == findings(measured)[:4]
    assert findings([]) == ()


def test_the_labels_of_the_method_are_not_those_assumed(measured: Records) -> None:
    assert "differs from eta_U by 0.50 on average" in sentence(
        [{**record, "pseudo_bias": 0.5} for record in measured], "has mean eta_U"
    )
