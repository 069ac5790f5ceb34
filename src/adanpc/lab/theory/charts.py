"""Figures of the theory: measured beside the bound, for each proposition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adanpc.lab.show.exhibit import Chart, Series
from adanpc.lab.theory.readings import Group, Reading, Record, bound, by, divergence, excess, mean

ERROR = "excess error"
VOTES = ("source", "joint", "split", "joint pseudo", "split pseudo")


def charts(records: Iterable[Record]) -> tuple[Chart, ...]:
    """For each dimension: Proposition 1 over n_s, Proposition 2 over k and n_s, Proposition 3 over n_u by shift.

    Means over seeds with standard errors, on logarithmic axes: what is 0 has no place there and is left out, and a
    chart of which nothing is left as well.
    """
    drawn = [chart for dim, group in by(records, _dim).items() for chart in _of(dim, group)]
    return tuple(chart for chart in drawn if chart.series)


def _of(dim: int, records: Group) -> list[Chart]:
    sweeps = {name: [each for each in records if each["sweep"] == name] for name in ("k", "n_s", "n_u")}
    return [
        _first(dim, sweeps["n_s"]),
        _second(dim, sweeps["k"], "k"),
        _second(dim, sweeps["n_s"], "n_s"),
        *(_third(dim, group, shift) for shift, group in by(sweeps["n_u"], _shift).items()),
    ]


def _first(dim: int, records: Group) -> Chart:
    """Posterior shift moves no point, so the two shifts that have it show nothing new."""
    groups = {shift: group for shift, group in by(records, _shift).items() if shift in ("none", "covariate")}
    series = [
        line
        for shift, group in groups.items()
        for line in (
            _line(f"{shift}: distance", group, "n_s", divergence("mean")),
            _line(f"{shift}: W(D_S, D_U)", group, "n_s", divergence("wasserstein")),
            _line(f"{shift}: distance, bound r_0", group, "n_s", divergence("radius"), True),
        )
    ]
    return _chart(f"Proposition 1: how far the voters are from the target (d = {dim})", "n_s", "distance", series)


def _second(dim: int, records: Group, x: str) -> Chart:
    series = [
        line
        for shift, group in by(records, _shift).items()
        for line in (
            _line(f"shift {shift}", group, x, excess("source")),
            _line(f"shift {shift}, bound", group, x, bound("2"), True),
        )
    ]
    return _chart(f"Proposition 2: the vote of source rows (d = {dim})", x, ERROR, series)


def _third(dim: int, records: Group, shift: str) -> Chart:
    series = [_line(vote, records, "n_u", excess(vote)) for vote in VOTES]
    series += [_line("source, bound of Proposition 2", records, "n_u", bound("2"), True)]
    series += [_line("split, bound", records, "n_u", bound("3"), True)]
    return _chart(f"Proposition 3: votes with target rows (d = {dim}, shift {shift})", "n_u", ERROR, series)


def _line(label: str, records: Group, x: str, read: Reading, bounded: bool = False) -> Series:
    """Means over seeds at every positive x; a bound is drawn as one."""
    means = {size: mean(group, read) for size, group in sorted(by(records, lambda record: record[x]).items())}
    shown = {size: found for size, found in means.items() if size > 0 and found.mean > 0}
    single = bounded or any(found.error is None for found in shown.values())
    errors = None if single else tuple(found.error or 0.0 for found in shown.values())
    return Series(label, tuple(shown), tuple(found.mean for found in shown.values()), errors, bounded)


def _chart(title: str, x: str, y: str, series: Sequence[Series]) -> Chart:
    return Chart(title, x, y, tuple(each for each in series if each.x), log_x=True, log_y=True)


def _dim(record: Record) -> int:
    return int(record["problem"]["dim"])


def _shift(record: Record) -> str:
    return str(record["shift"])
