"""What an experiment shows: tables, charts and galleries as plain values, before anything is printed or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan, sqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

from adanpc.errors import AdaNPCError


@dataclass(frozen=True)
class Value:
    """A number as it is shown.

    Args:
        mean: over ``count`` measurements.
        error: the standard error of the mean, or None where there is no more than one measurement.
        count: measurements, where they are known; the paper's are not.
    """

    mean: float
    error: float | None = None
    count: int = 1


def value(measurements: Sequence[float]) -> Value | None:
    """The mean and its standard error (the standard deviation with n - 1, over the root of n); None of nothing."""
    count = len(measurements)
    if not count:
        return None
    mean = sum(measurements) / count
    if count == 1:
        return Value(mean)
    spread = sum((each - mean) ** 2 for each in measurements) / (count - 1)
    return Value(mean, sqrt(spread / count), count)


@dataclass(frozen=True)
class Cell:
    """Ours and the paper's number, side by side; either may be missing. A text says why ours is."""

    ours: Value | None = None
    paper: Value | None = None
    text: str = ""


@dataclass(frozen=True)
class Sheet:
    """A table: a label and one cell for each column in every row.

    Args:
        title: what is shown, in one line.
        columns: headings, without that of the labels.
        rows: label and cells.
        unit: of all numbers, such as "accuracy in %".
        best: which of ours in a column is the best and is set off, if any.
        decimals: shown.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    unit: str = "accuracy in %"
    best: Literal["high", "low", ""] = "high"
    decimals: int = 1

    def __post_init__(self) -> None:
        for label, cells in self.rows:
            if len(cells) != len(self.columns):
                raise AdaNPCError(f"{self.title}: {label} has {len(cells)} cells for {len(self.columns)} columns")


@dataclass(frozen=True)
class Series:
    """One line of a chart, or one group of bars; ``errors`` are drawn as a band or whiskers, a bound is dashed."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    errors: tuple[float, ...] | None = None
    bound: bool = False

    def __post_init__(self) -> None:
        if len({len(self.x), len(self.y), len(self.y if self.errors is None else self.errors)}) > 1:
            raise AdaNPCError(f"{self.label}: x, y and errors must be as many, got {len(self.x)} and {len(self.y)}")


def line(label: str, x: Sequence[float | str], values: Sequence[Value | None]) -> Series:
    """Numbers as a series, with their standard errors where every one has one; what is not known leaves a gap."""
    errors = tuple(value.error for value in values if value and value.error is not None)
    return Series(
        label,
        tuple(x),
        tuple(value.mean if value else nan for value in values),
        errors if len(errors) == len(values) else None,
    )


@dataclass(frozen=True)
class Chart:
    """A figure with two axes: lines over numbers, or bars over names."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    kind: Literal["line", "bar"] = "line"
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, eq=False)
class Picture:
    """An image (height, width, 3) of bytes with what is said below it."""

    image: npt.NDArray[np.uint8]
    caption: str


@dataclass(frozen=True, eq=False)
class Question:
    """A query of a gallery and the rows that answered it, the nearest first."""

    query: Picture
    neighbors: tuple[Picture, ...]
    verdict: str


@dataclass(frozen=True)
class Exhibit:
    """All that one command shows.

    Args:
        name: as the command knows it, such as ``ood-rotated-mnist``.
        title: in words.
        source: where the paper has it, such as "Table 1".
        about: what was run, in sentences that a stranger understands; says "reduced" where it is.
        parts: sheets, charts and galleries in order.
        notes: what to know before believing it: contradictions, what is missing.
    """

    name: str
    title: str
    source: str
    about: str
    parts: tuple[Sheet | Chart | Gallery, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gallery:
    """Queries, each beside its neighbors."""

    title: str
    questions: tuple[Question, ...]
