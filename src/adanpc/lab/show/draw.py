"""Charts and galleries as pictures, by matplotlib; the same part gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

import numpy as np

from adanpc.errors import AdaNPCError
from adanpc.files import replace
from adanpc.lab.show.exhibit import Chart, Gallery, Picture, Question, Series
from adanpc.lab.show.render import line

try:
    from matplotlib import style
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.font_manager import findfont, get_font
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
except ImportError:
    Figure = None  # type: ignore[assignment, misc]

Form = Literal["png", "svg"]
FORMS: tuple[Form, ...] = ("png", "svg")
FONT = "DejaVu Sans"  # comes with matplotlib
STYLE = {
    "font.family": [FONT],
    "font.size": 10,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "svg.hashsalt": "adanpc",  # names inside an SVG are random otherwise
    "hatch.linewidth": 0.6,
}
METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
}
# Okabe and Ito: told apart by the color-blind too. Without yellow, unseen on white; black lightened to show whiskers.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#555555")
GRAY = "#9a9a9a"
MARKERS = "os^Dv<>P"  # one more than colors, so that they do not go round together
LINES = ("-", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
HATCHES = ("", "xxx", "...", "ooo")
LEGEND: dict[str, Any] = {"fontsize": 9, "frameon": False, "handlelength": 3.2}
BELOW = 6  # series at most that the legend names below the axes; more stand in a column beside them
CELL, GAP = 1.15, 0.12  # of a gallery, in inches: the side of a picture, the space between two
TICKS = 8  # values at most of a logarithmic axis that are all written out


def figure(part: Chart | Gallery) -> Figure:
    """The part as a matplotlib figure, on white."""
    if Figure is None:
        raise AdaNPCError("figures are drawn by matplotlib, which is not installed: pip install 'adanpc[bench]'")
    with style.context(["default", STYLE]):
        return _gallery(part) if isinstance(part, Gallery) else _chart(part)


def image(part: Chart | Gallery, form: Form) -> bytes:
    """The part as a file of that form."""
    drawn, file = figure(part), BytesIO()
    with style.context(["default", STYLE]):
        drawn.savefig(file, format=form, metadata=METADATA[form])
    return file.getvalue()


def save(part: Chart | Gallery, path: Path) -> None:
    """Writes the part as PNG or SVG, as the path ends, whole or not at all."""
    form = path.suffix.removeprefix(".")
    if form not in FORMS:
        raise AdaNPCError(f"the figure must end in .png or .svg, got {str(path)!r}")
    content = image(part, form)

    def write(new: Path) -> None:
        new.write_bytes(content)

    replace(path, write)


def named(series: Series) -> str:
    """The label of a series; a bound's says so."""
    told = not series.bound or "bound" in series.label.lower()
    return series.label if told else f"{series.label} (bound)".strip()


def _words(text: str, width: int = 200, lines: int | None = None) -> str:
    """The text wrapped, in letters that the font has; dollars stay dollars and start no formula."""
    known = get_font(findfont(FONT)).get_charmap()
    plain = "".join(letter if ord(letter) in known else "□" for letter in line(text))
    return "\n".join(wrap(plain, width, max_lines=lines, placeholder="…")).replace("$", r"\$")


def _chart(chart: Chart) -> Figure:
    names = _names(chart)
    drawn = Figure(figsize=_size(chart, len(names)), layout="constrained")
    axes = drawn.subplots()
    for number, (series, slot) in enumerate(zip(chart.series, _slots(chart.series), strict=True)):
        at = np.array([names.index(_name(x)) for x in series.x] if names else series.x, dtype=float)
        if chart.kind == "bar":
            width = 0.8 / len(chart.series)
            _bars(axes, series, at + (number - (len(chart.series) - 1) / 2) * width, width, slot)
        else:
            _line(axes, series, at, slot)
    _scale(axes, chart, names)
    _name_places(axes, names, drawn.get_figwidth())
    _dress(axes, chart)
    handles, labels = axes.get_legend_handles_labels()
    below: dict[str, Any] = {"loc": "outside lower center", "ncols": 2 if len(labels) == 4 else 3}
    if labels:
        drawn.legend(handles, labels, **(below if len(labels) <= BELOW else {"loc": "outside right upper"}), **LEGEND)
    return drawn


def _size(chart: Chart, names: int) -> tuple[float, float]:
    """Inches: wide enough for the bars, high enough for the legend."""
    lines = sum(1.2 + _label(series).count("\n") for series in chart.series)
    bars = names * len(chart.series) if chart.kind == "bar" else names
    beside = len(chart.series) > BELOW
    return min(max(7, 2 + 0.22 * bars), 16) + 2.4 * beside, max(4.5, 0.4 + 0.18 * lines * beside)


def _names(chart: Chart) -> list[str]:
    """The names below the axis in order of appearance; none where it is an axis of numbers."""
    every = list(chain.from_iterable(series.x for series in chart.series))
    numbers = chart.kind == "line" and not any(isinstance(x, str) for x in every)
    return [] if numbers else list(dict.fromkeys(map(_name, every)))


def _name(x: float | str) -> str:
    return _words(x) if isinstance(x, str) else f"{x:g}"


def _slots(series: Sequence[Series]) -> list[int]:
    """A number for the look of each series; a bound on one of them gets the number of that."""
    ours = {label: slot for slot, label in enumerate(dict.fromkeys(each.label for each in series if not each.bound))}
    slots: list[int] = []
    for each in series:
        akin = [label for label in ours if label and label in each.label] if each.bound else [each.label]
        key = max(akin, key=len, default=each.label)
        slots.append(ours.setdefault(key, len(ours)))
    return slots


def _color(slot: int, bound: bool) -> tuple[float, ...]:
    """The color of a slot, half gray for a bound."""
    pure = np.array(to_rgb(PALETTE[slot % len(PALETTE)]))
    return tuple((pure + to_rgb(GRAY)) / 2 if bound else pure)


def _line(axes: Axes, series: Series, at: np.ndarray[Any, Any], slot: int) -> None:
    color, y = _color(slot, series.bound), np.array(series.y, dtype=float)
    axes.plot(
        at,
        y,
        linestyle="--" if series.bound else LINES[slot // len(PALETTE) % len(LINES)],
        color=color,
        marker=MARKERS[slot % len(MARKERS)],
        markersize=5,
        markerfacecolor="white" if series.bound else color,
        markevery=max(1, len(y) // 20),
        linewidth=1.6,
        label=_label(series),
    )
    if series.errors is not None:
        axes.fill_between(at, y - series.errors, y + np.array(series.errors), color=color, alpha=0.18, linewidth=0)


def _bars(axes: Axes, series: Series, at: np.ndarray[Any, Any], width: float, slot: int) -> None:
    axes.bar(
        at,
        series.y,
        width * 0.92,
        yerr=series.errors,
        color=_color(slot, series.bound),
        edgecolor="white",
        linewidth=0,
        hatch="////" if series.bound else HATCHES[slot // len(PALETTE) % len(HATCHES)],
        error_kw={"elinewidth": 1, "capsize": min(3, 18 * width), "ecolor": "#000000"},
        label=_label(series),
    )


def _label(series: Series) -> str:
    words = _words(named(series), 32)
    return f" {words}" if words.startswith("_") else words  # matplotlib would hide it


def _name_places(axes: Axes, names: Sequence[str], width: float) -> None:
    """Names below the axis, aslant where they would run into each other."""
    if not names:
        return
    crowded = sum(len(name) + 2 for name in names) > 10 * width
    aslant: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axes.set_xticks(range(len(names)), names, **aslant)
    axes.tick_params("x", length=0)


def _scale(axes: Axes, chart: Chart, names: Sequence[str]) -> None:
    """Logarithms where they are asked for and there is anything to take them of."""
    across = [x for series in chart.series for x in series.x if not isinstance(x, str) and x > 0]
    if chart.log_x and across and not names:
        axes.set_xscale("log")
        _log_ticks(axes.xaxis, sorted(set(across)))
    up = [y for series in chart.series for y in series.y if y > 0]
    if chart.log_y and up:
        axes.set_yscale("log")
        _log_ticks(axes.yaxis, [min(up), max(up)])


def _log_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Plain numbers: at the values themselves if they are few and well apart, else at powers of ten."""
    steps = np.diff(np.log(values))
    if 2 < len(values) <= TICKS and steps.min() > 0.07 * steps.sum():
        axis.set_major_locator(FixedLocator(values))
        axis.set_minor_locator(NullLocator())
    plain = FuncFormatter(lambda number, _: f"{number:,.0f}" if number >= 1000 else f"{number:g}")
    axis.set_major_formatter(plain)
    axis.set_minor_formatter(plain if values[-1] < 10 * values[0] else NullFormatter())  # one power is no scale


def _dress(axes: Axes, chart: Chart) -> None:
    axes.set(xlabel=_words(chart.x_label), ylabel=_words(chart.y_label))
    axes.set_title(_words(chart.title, 80), loc="left", fontsize=11)
    axes.grid(axis="y" if chart.kind == "bar" else "both", color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.margins(x=0.02 if chart.kind == "bar" else 0.05)
    axes.spines[["top", "right"]].set_visible(False)


def _gallery(gallery: Gallery) -> Figure:
    """One question below the other, laid out in inches on one pair of axes that is as large as the figure."""
    columns = 1 + max((len(question.neighbors) for question in gallery.questions), default=0)
    width = max(columns, 4) * (CELL + GAP) + 3 * GAP
    title = _words(gallery.title, int(11 * width))
    heights = [_height(question, width) for question in gallery.questions]
    tops = np.cumsum([0.16 + (0.2 * (title.count("\n") + 1) if title else 0), *heights])
    drawn = Figure(figsize=(width, tops[-1]))
    axes = drawn.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.text(GAP, 0.1, title, va="top", fontsize=11)
    for question, top in zip(gallery.questions, tops[:-1], strict=True):
        _question(axes, question, top, width)
    axes.set(xlim=(0, width), ylim=(tops[-1], 0))
    return drawn


def _height(question: Question, width: float) -> float:
    captions = [_caption(picture) for picture in (question.query, *question.neighbors)]
    lines = 1 + max(caption.count("\n") for caption in captions)
    return 0.3 + _verdict(question, width).count("\n") * 0.16 + 0.16 + CELL + lines * 0.125


def _question(axes: Axes, question: Question, top: float, width: float) -> None:
    """A line across, the verdict, the query at the left and its neighbors to the right of it."""
    verdict = _verdict(question, width)
    axes.plot((GAP, width - GAP), (top, top), color="#cccccc", linewidth=0.8)
    axes.text(GAP, top + 0.07, verdict, va="top", fontsize=9, fontweight="bold")
    down = top + 0.3 + verdict.count("\n") * 0.16
    _picture(axes, question.query, GAP, down)
    for place, picture in enumerate(question.neighbors, 1):
        _picture(axes, picture, 2 * GAP + place * (CELL + GAP), down)
    if question.neighbors:
        axes.plot((CELL + 2 * GAP,) * 2, (down, down + CELL), color="#888888", linewidth=0.8)


def _picture(axes: Axes, picture: Picture, left: float, top: float) -> None:
    """The image in the middle of its cell, with the caption below."""
    high, wide = np.array(picture.image.shape[:2]) * CELL / max(picture.image.shape[:2])
    x, y = left + (CELL - wide) / 2, top + (CELL - high) / 2
    axes.imshow(picture.image, extent=(x, x + wide, y + high, y), aspect="auto")
    axes.text(left + CELL / 2, top + CELL + 0.04, _caption(picture), va="top", ha="center", fontsize=7)


def _caption(picture: Picture) -> str:
    return _words(picture.caption, 20, 4)


def _verdict(question: Question, width: float) -> str:
    return _words(question.verdict, int(12 * width), 3)
