"""Charts of the theory from records."""

from __future__ import annotations

from typing import Any

import pytest

from adanpc.lab.theory.bounds import Problem, proposition_2
from adanpc.lab.theory.charts import charts
from adanpc.lab.theory.simulate import SHIFTS, measure


def records(seeds: int, dims: tuple[int, ...] = (2,)) -> list[dict[str, Any]]:
    sizes = [{"sweep": "k", "k": k, "n_s": 60, "n_u": 20} for k in (9, 1)]
    sizes += [{"sweep": "n_s", "k": 5, "n_s": n_s, "n_u": 20} for n_s in (30, 60)]
    sizes += [{"sweep": "n_u", "k": 5, "n_s": 60, "n_u": n_u} for n_u in (0, 20, 40)]
    return [
        measure({**size, "problem": {"dim": dim, **shift}, "queries": 50, "seed": seed})
        for dim in dims
        for shift in SHIFTS.values()
        for size in sizes
        for seed in range(seeds)
    ]


def test_every_proposition_has_its_charts_in_each_dimension() -> None:
    every_chart = charts(records(1, (2, 3)))
    assert [chart.title.partition(":")[0] for chart in every_chart] == 2 * (
        ["Proposition 1", "Proposition 2", "Proposition 2"] + 4 * ["Proposition 3"]
    )
    assert [chart.x_label for chart in every_chart[:4]] == ["n_s", "k", "n_s", "n_u"]
    assert all(chart.log_x and chart.log_y for chart in every_chart)
    assert all(y > 0 for chart in every_chart for series in chart.series for y in series.y)
    assert all(x > 0 for chart in every_chart for series in chart.series for x in series.x if not isinstance(x, str))


def test_lines_are_means_over_seeds_with_standard_errors() -> None:
    known = records(3)
    chart = charts(known)[1]
    line = next(series for series in chart.series if series.label == "shift both")
    assert line.x == (1, 9)
    chosen = [
        each["excess"]["source"] for each in known if (each["shift"], each["sweep"], each["k"]) == ("both", "k", 9)
    ]
    mean = sum(chosen) / 3
    assert line.y[1] == pytest.approx(mean)
    assert line.errors is not None
    assert line.errors[1] == pytest.approx((sum((each - mean) ** 2 for each in chosen) / 6) ** 0.5)
    bound = next(series for series in chart.series if series.label == "shift both, bound")
    assert bound.bound
    assert bound.errors is None
    expected = [proposition_2(k, 60, Problem(2, **SHIFTS["both"]).assumptions) for k in (1, 9)]
    assert list(bound.y) == pytest.approx(expected)


def test_a_single_seed_has_no_errors_and_what_is_zero_is_left_out() -> None:
    first, *_, last = charts(records(1))
    assert all(series.errors is None for series in first.series)
    assert "none: W(D_S, D_U)" not in [series.label for series in first.series]
    assert "covariate: W(D_S, D_U)" in [series.label for series in first.series]
    assert all(series.x == (20, 40) for series in last.series)


def test_no_records_make_no_chart() -> None:
    assert charts([]) == ()
