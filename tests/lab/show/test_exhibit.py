"""Values of a table and series of a chart, before anything is drawn."""

from __future__ import annotations

from math import isnan
from statistics import mean, stdev

import pytest

from adanpc.errors import AdaNPCError
from adanpc.lab.show.exhibit import Cell, Series, Sheet, Value, line, value


def test_a_value_is_the_mean_and_its_standard_error() -> None:
    measurements = [3.0, 5.0, 10.0]
    known = value(measurements)
    assert known is not None
    assert known.mean == pytest.approx(mean(measurements))
    assert known.error == pytest.approx(stdev(measurements) / 3**0.5)
    assert known.count == 3
    assert value([4.0]) == Value(4.0, None, 1)
    assert value([]) is None


def test_a_line_has_a_gap_where_a_value_is_missing_and_errors_only_if_all_are_known() -> None:
    whole = line("a", (1, 2), (Value(3.0, 0.1, 2), Value(4.0, 0.2, 2)))
    assert (whole.y, whole.errors) == ((3.0, 4.0), (0.1, 0.2))
    gap = line("a", (1, 2), (Value(3.0, 0.1, 2), None))
    assert gap.y[0] == 3.0
    assert isnan(gap.y[1])
    assert gap.errors is None
    assert line("a", (1, 2), (Value(3.0, 0.1, 2), Value(4.0))).errors is None


def test_a_row_must_have_a_cell_for_each_column() -> None:
    with pytest.raises(AdaNPCError, match="every row of 'Accuracy' must have 2 cells, .* but 'ERM' has 1"):
        Sheet("Accuracy", ("a", "b"), (("ERM", (Cell(),)),))


def test_a_series_must_have_a_y_and_an_error_for_each_x() -> None:
    with pytest.raises(AdaNPCError, match="x and y of 'ERM' must have the same length, got 2 and 1"):
        Series("ERM", (1, 2), (3,))
    with pytest.raises(AdaNPCError, match="y and errors of 'ERM' must have the same length, got 2 and 1"):
        Series("ERM", (1, 2), (3, 4), (0.1,))
