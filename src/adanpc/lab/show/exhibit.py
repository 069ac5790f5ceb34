"""The results of an experiment as plain values: tables, charts and galleries, before anything is printed or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import nan, sqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from adanpc.errors import AdaNPCError


@dataclass(frozen=True)
class Value:
    """A number as it is shown.

    Args:
        mean: the mean of ``count`` measurements.
        error: the standard error of the mean, or None if there is only one measurement.
        count: how many measurements there are; 1 for the paper's numbers, whose count is unknown.
    """

    mean: float
    error: float | None = None
    count: int = 1


def value(measurements: Sequence[float]) -> Value | None:
    """The mean of the measurements and its standard error; None if there are no measurements.

    The standard error is the standard deviation, with n - 1 in the denominator, over the square root of n.
    """
    count = len(measurements)
    if count == 0:
        return None
    mean = sum(measurements) / count
    if count == 1:
        return Value(mean)
    variance = sum((measurement - mean) ** 2 for measurement in measurements) / (count - 1)
    return Value(mean, sqrt(variance / count), count)


@dataclass(frozen=True)
class Cell:
    """Our number and the paper's, side by side; either may be missing. The text says why ours is."""

    ours: Value | None = None
    paper: Value | None = None
    text: str = ""


@dataclass(frozen=True)
class Sheet:
    """A table: every row has a label and one cell per column.

    Args:
        title: what is shown, in one line.
        columns: the headings, without the one above the labels.
        rows: the label and the cells of each row.
        unit: the unit of all numbers, such as "accuracy in %".
        best: whether the highest or the lowest of our numbers in a column is emphasized, or none.
        decimals: how many decimals are shown.
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
                raise AdaNPCError(
                    f"every row of {self.title!r} must have {len(self.columns)} cells, one for each column, "
                    f"but {label!r} has {len(cells)}"
                )


@dataclass(frozen=True)
class Series:
    """One line of a chart, or the bars of one color."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    errors: tuple[float, ...] | None = None  # drawn as a band around a line, or as whiskers of bars
    bound: bool = False  # drawn dashed or hatched: it is calculated, not measured

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise AdaNPCError(
                f"x and y of {self.label!r} must have the same length, got {len(self.x)} and {len(self.y)}"
            )
        if self.errors is not None and len(self.errors) != len(self.y):
            raise AdaNPCError(
                f"y and errors of {self.label!r} must have the same length, got {len(self.y)} and {len(self.errors)}"
            )


def line(label: str, x: Sequence[float | str], values: Sequence[Value | None]) -> Series:
    """The values as a series; a missing value leaves a gap.

    Standard errors are drawn only if every value has one: a band with holes would look like certainty.
    """
    means = tuple(value.mean if value else nan for value in values)
    errors = tuple(value.error for value in values if value and value.error is not None)
    if len(errors) < len(values):
        return Series(label, tuple(x), means)
    return Series(label, tuple(x), means, errors)


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
    """An image (height, width, 3) of bytes, and the caption below it."""

    image: npt.NDArray[np.uint8]
    caption: str


@dataclass(frozen=True, eq=False)
class Question:
    """A query of a gallery and the rows that answered it, nearest first."""

    query: Picture
    neighbors: tuple[Picture, ...]
    verdict: str


@dataclass(frozen=True)
class Gallery:
    """Queries, each beside its neighbors."""

    title: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Exhibit:
    """Our version of one table or figure of the paper.

    Args:
        name: the name that the command takes, such as ``ood-rotated-mnist``.
        title: the title in words.
        paper_place: where the paper shows it, such as "Table 1".
        about: what was run, in sentences that a newcomer understands; says so if the scale is reduced.
        parts: sheets, charts and galleries, in order.
        notes: what to know before using the numbers: contradictions, and what is missing.
    """

    name: str
    title: str
    paper_place: str
    about: str
    parts: tuple[Sheet | Chart | Gallery, ...]
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """All words and numbers as JSON; galleries only by their titles."""
        return {
            "name": self.name,
            "title": self.title,
            "paper_place": self.paper_place,
            "about": self.about,
            "tables": [asdict(part) for part in self.parts if isinstance(part, Sheet)],
            "charts": [asdict(part) for part in self.parts if isinstance(part, Chart)],
            "galleries": [part.title for part in self.parts if isinstance(part, Gallery)],
            "notes": list(self.notes),
        }
