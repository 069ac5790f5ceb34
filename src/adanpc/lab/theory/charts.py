"""Figures of the theory: measurements and the bound, for each proposition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adanpc.lab.show.exhibit import Chart, Series
from adanpc.lab.theory.readings import Group, Reading, Record, bound, by, divergence, excess, mean

ERROR = "excess error"
VOTES = ("source", "joint", "split", "joint pseudo", "split pseudo")


def charts(records: Iterable[Record]) -> tuple[Chart, ...]:
    """Returns charts for each dimension: Proposition 1 over n_s, 2 over k and over n_s, and 3 over n_u for each shift.

    They show means over seeds with standard errors, on logarithmic axes. These cannot show 0, so a point at 0 is left
    out, and so is a chart without points.
    """
    every_chart: list[Chart] = []
    for dim, group in by(records, _dim).items():
        every_chart += _charts_of_dimension(dim, group)
    return tuple(chart for chart in every_chart if chart.series)


def _charts_of_dimension(dim: int, records: Group) -> list[Chart]:
    """Returns the charts of one dimension."""
    sweeps = by(records, lambda record: record["sweep"])
    over_k = sweeps.get("k", [])
    over_n_s = sweeps.get("n_s", [])
    over_n_u = sweeps.get("n_u", [])
    return [
        _proposition_1(dim, over_n_s),
        _proposition_2(dim, over_k, "k"),
        _proposition_2(dim, over_n_s, "n_s"),
        *(_proposition_3(dim, group, shift) for shift, group in by(over_n_u, _shift).items()),
    ]


def _proposition_1(dim: int, records: Group) -> Chart:
    """Returns a chart of how far the voters are from the target.

    Posterior shift moves no points, so the two settings with it would show the same distances again.
    """
    series: list[Series] = []
    for shift, group in by(records, _shift).items():
        if shift in ("none", "covariate"):
            series += [
                _series(f"{shift}: distance", group, "n_s", divergence("mean")),
                _series(f"{shift}: W(D_S, D_U)", group, "n_s", divergence("wasserstein")),
                _bound_series(f"{shift}: distance, bound r_0", group, "n_s", divergence("radius")),
            ]
    return _chart(f"Proposition 1: how far the voters are from the target (d = {dim})", "n_s", "distance", series)


def _proposition_2(dim: int, records: Group, x: str) -> Chart:
    """Returns a chart of the excess error of the source vote under each shift."""
    series: list[Series] = []
    for shift, group in by(records, _shift).items():
        series += [
            _series(f"shift {shift}", group, x, excess("source")),
            _bound_series(f"shift {shift}, bound", group, x, bound("2")),
        ]
    return _chart(f"Proposition 2: the vote of source rows (d = {dim})", x, ERROR, series)


def _proposition_3(dim: int, records: Group, shift: str) -> Chart:
    """Returns a chart of the excess error of every vote under one shift."""
    series = [_series(vote, records, "n_u", excess(vote)) for vote in VOTES]
    series.append(_bound_series("source, bound of Proposition 2", records, "n_u", bound("2")))
    series.append(_bound_series("split, bound", records, "n_u", bound("3")))
    return _chart(f"Proposition 3: votes with target rows (d = {dim}, shift {shift})", "n_u", ERROR, series)


def _series(label: str, records: Group, x: str, read: Reading) -> Series:
    """Returns means over seeds at every positive x, with standard errors if every point has several seeds."""
    sizes = []
    means = []
    errors = []
    for size, group in sorted(by(records, lambda record: record[x]).items()):
        value = mean(group, read)
        if size <= 0 or value.mean <= 0:  # axes are logarithmic
            continue
        sizes.append(size)
        means.append(value.mean)
        if value.error is not None:
            errors.append(value.error)
    if len(errors) < len(means):
        return Series(label, tuple(sizes), tuple(means))
    return Series(label, tuple(sizes), tuple(means), tuple(errors))


def _bound_series(label: str, records: Group, x: str, read: Reading) -> Series:
    """Returns the same for a bound, which is exact and has no errors."""
    measured = _series(label, records, x, read)
    return Series(label, measured.x, measured.y, bound=True)


def _chart(title: str, x: str, y: str, series: Sequence[Series]) -> Chart:
    """Returns a chart on logarithmic axes, without series that have no points."""
    with_points = tuple(one_series for one_series in series if one_series.x)
    return Chart(title, x, y, with_points, log_x=True, log_y=True)


def _dim(record: Record) -> int:
    """Returns the dimension of a record's problem."""
    return int(record["problem"]["dim"])


def _shift(record: Record) -> str:
    """Returns the shift of a record's problem."""
    return str(record["shift"])
