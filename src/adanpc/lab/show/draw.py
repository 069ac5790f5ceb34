"""Draw charts and galleries with matplotlib; the same part always gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

import numpy as np

from adanpc.errors import AdaNPCError
from adanpc.files import replace
from adanpc.lab.show.exhibit import Chart, Gallery, Picture, Question, Series
from adanpc.printable import on_one_line

try:
    from matplotlib import style
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.font_manager import findfont, get_font
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
    from PIL import Image  # matplotlib depends on it
except ImportError:
    Figure = None  # type: ignore[assignment, misc]

Form = Literal["png", "jpg", "svg"]
FORMS: tuple[Form, ...] = ("png", "jpg", "svg")
FONT = "DejaVu Sans"  # comes with matplotlib
STYLE = {
    "font.family": [FONT],
    "font.size": 10,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "svg.hashsalt": "adanpc",  # ids inside an SVG are random otherwise
    "hatch.linewidth": 0.6,
}
# Dates and versions are left out, so that the same part gives the same bytes on another day.
SAVE_OPTIONS: dict[Form, dict[str, Any]] = {
    "png": {"metadata": {"Software": None}},
    # Photographs need fewer pixels than thin lines and small letters do.
    "jpg": {"dpi": 100, "pil_kwargs": {"quality": 85, "optimize": True, "progressive": True}},
    "svg": {"metadata": dict.fromkeys(("Date", "Creator", "Format", "Type"))},
}
PNG_DPI = STYLE["savefig.dpi"]
PNG_COLORS = 256  # as many as a palette can have; the colors of lines and of the background stay exact

# The palette of Okabe and Ito, which color-blind readers can tell apart. Its yellow is left out, since it vanishes on
# white, and its black is lightened, so that black whiskers are visible on it.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#555555")
GRAY = "#9a9a9a"
MARKERS = "os^Dv<>P"  # one more than there are colors, so that a pair of color and marker rarely repeats
LINES = ("-", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
HATCHES = ("", "xxx", "...", "ooo")
LEGEND: dict[str, Any] = {"fontsize": 9, "frameon": False, "handlelength": 3.2}
MOST_BELOW = 6  # the most series in a legend below the axes; a longer legend is a column beside them
MOST_TICKS = 8  # the most values of a logarithmic axis that all get a tick

# The layout of a gallery, in inches.
CELL = 1.15  # the side of a picture
GAP = 0.12  # the space between two pictures
TITLE_LINE = 0.2
VERDICT_LINE = 0.16
CAPTION_LINE = 0.125
ABOVE_PICTURES = 0.3  # from the line across to the pictures, with a verdict of one line


def forms(part: Chart | Gallery) -> tuple[Form, ...]:
    """The file formats of a part: first the one that a page shows, then the one that can be enlarged.

    Photographs are much smaller as JPEG. Everything else has few colors: lines and letters, but also gray digits,
    which stay exact as PNG and take less space than as JPEG.
    """
    if isinstance(part, Gallery) and _is_colored(part):
        return ("jpg", "svg")
    return ("png", "svg")


def figure(part: Chart | Gallery) -> Figure:
    """The part as a matplotlib figure, on white."""
    if Figure is None:
        raise AdaNPCError("figures are drawn by matplotlib, which is not installed: pip install 'adanpc[demo]'")
    with style.context(["default", STYLE]):
        if isinstance(part, Gallery):
            return _gallery(part)
        return _chart(part)


def image(part: Chart | Gallery, form: Form) -> bytes:
    """The part as the content of a file in that format."""
    drawing = figure(part)
    file = BytesIO()
    with style.context(["default", STYLE]):
        drawing.savefig(file, format=form, **SAVE_OPTIONS[form])
    if form == "png":
        return _with_palette(file)
    return file.getvalue()


def save(part: Chart | Gallery, path: Path) -> None:
    """Writes the part in the format that the suffix of the path names; the file is complete or not there at all."""
    form = path.suffix.removeprefix(".")
    if form not in FORMS:
        endings = ", ".join(f".{form}" for form in FORMS)
        raise AdaNPCError(f"the path of a figure must end in one of {endings}, got {str(path)!r}")
    content = image(part, form)

    def write(new: Path) -> None:
        new.write_bytes(content)

    replace(path, write)


def named(series: Series) -> str:
    """The label of a series, which says so if the series is a bound."""
    if series.bound and "bound" not in series.label.lower():
        return f"{series.label} (bound)".strip()
    return series.label


def _is_colored(gallery: Gallery) -> bool:
    """Whether any picture has a pixel that is not gray."""
    for question in gallery.questions:
        for picture in (question.query, *question.neighbors):
            if (picture.image != picture.image[..., :1]).any():
                return True
    return False


def _with_palette(png: BytesIO) -> bytes:
    """The same PNG with a palette of its most frequent colors, at a third of the size."""
    with Image.open(png) as drawing:
        pixels = drawing.convert("RGB")
    reduced = pixels.quantize(PNG_COLORS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    file = BytesIO()
    reduced.save(file, "PNG", optimize=True, dpi=(PNG_DPI, PNG_DPI))
    return file.getvalue()


def _text(text: str, width: int = 200, max_lines: int | None = None) -> str:
    """The text wrapped to lines of ``width`` letters, escaped for matplotlib.

    A letter that the font lacks becomes a box. Matplotlib would draw a box, too, but with a warning.
    """
    known = _letters()
    letters = [letter if ord(letter) in known else "□" for letter in on_one_line(text)]
    lines = wrap("".join(letters), width, max_lines=max_lines, placeholder="…")
    return "\n".join(lines).replace("$", r"\$")  # a bare dollar would start a formula


@cache  # the font has six thousand letters, and a gallery has a hundred captions that need them
def _letters() -> frozenset[int]:
    """The code points that the font can draw."""
    return frozenset(get_font(findfont(FONT)).get_charmap())


def _chart(chart: Chart) -> Figure:
    """Lines or bars with axes, a title and a legend."""
    names = _names(chart)
    drawing = Figure(figsize=_size(chart, len(names)), layout="constrained")
    axes = drawing.subplots()
    slots = _slots(chart.series)
    bar_width = 0.8 / max(1, len(chart.series))
    for number, series in enumerate(chart.series):
        if names:
            places = np.array([names.index(_name(x)) for x in series.x], dtype=float)
        else:
            places = np.array(series.x, dtype=float)
        if chart.kind == "bar":
            from_middle = number - (len(chart.series) - 1) / 2  # in bars; a group of bars is centered on its name
            _bars(axes, series, places + from_middle * bar_width, bar_width, slots[number])
        else:
            _line(axes, series, places, slots[number])
    _scale(axes, chart, names)
    _write_names(axes, names, drawing.get_figwidth())
    _decorate(axes, chart)
    _add_legend(drawing, axes)
    return drawing


def _add_legend(drawing: Figure, axes: Axes) -> None:
    """Adds a legend outside the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    if len(labels) > MOST_BELOW:
        drawing.legend(handles, labels, loc="outside right upper", **LEGEND)
        return
    columns = 2 if len(labels) == 4 else 3
    drawing.legend(handles, labels, loc="outside lower center", ncols=columns, **LEGEND)


def _size(chart: Chart, names: int) -> tuple[float, float]:
    """The width and height in inches: wide enough for the bars, high enough for the legend."""
    places = names
    if chart.kind == "bar":
        places = names * len(chart.series)
    width = min(max(7, 2 + 0.22 * places), 16)
    height = 4.5
    if len(chart.series) > MOST_BELOW:  # the legend is a column of its own
        legend_lines = sum(1.2 + _label(series).count("\n") for series in chart.series)
        width += 2.4
        height = max(height, 0.4 + 0.18 * legend_lines)
    return width, height


def _names(chart: Chart) -> list[str]:
    """The names along the x-axis in order of appearance; empty if it is an axis of numbers."""
    every_x = [x for series in chart.series for x in series.x]
    if chart.kind == "line" and not any(isinstance(x, str) for x in every_x):
        return []
    return list(dict.fromkeys(_name(x) for x in every_x))


def _name(x: float | str) -> str:
    return _text(x) if isinstance(x, str) else f"{x:g}"


def _slots(every_series: Sequence[Series]) -> list[int]:
    """A number for each series that decides its color and marker; a bound shares it with the series that it bounds."""
    slot_of: dict[str, int] = {}
    for series in every_series:
        if not series.bound:
            slot_of.setdefault(series.label, len(slot_of))
    slots = []
    for series in every_series:
        key = series.label
        if series.bound:
            # The label of a bound contains that of its series; the longest match is the right one.
            bounded = [label for label in slot_of if label and label in series.label]
            key = max(bounded, key=len, default=series.label)
        slots.append(slot_of.setdefault(key, len(slot_of)))
    return slots


def _color(slot: int, bound: bool) -> tuple[float, ...]:
    """The color of a slot, half gray for a bound."""
    color = np.array(to_rgb(PALETTE[slot % len(PALETTE)]))
    if bound:
        color = (color + to_rgb(GRAY)) / 2
    return tuple(color)


def _line(axes: Axes, series: Series, places: np.ndarray[Any, Any], slot: int) -> None:
    """A line with markers and, where there are errors, a band around it."""
    color = _color(slot, series.bound)
    y = np.array(series.y, dtype=float)
    look: dict[str, Any] = {
        "linestyle": LINES[slot // len(PALETTE) % len(LINES)],
        "markerfacecolor": color,
    }
    if series.bound:
        look = {"linestyle": "--", "markerfacecolor": "white"}
    axes.plot(
        places,
        y,
        **look,
        color=color,
        marker=MARKERS[slot % len(MARKERS)],
        markersize=5,
        markevery=max(1, len(y) // 20),
        linewidth=1.6,
        label=_label(series),
    )
    if series.errors is not None:
        errors = np.array(series.errors)
        axes.fill_between(places, y - errors, y + errors, color=color, alpha=0.18, linewidth=0)


def _bars(axes: Axes, series: Series, places: np.ndarray[Any, Any], width: float, slot: int) -> None:
    """One bar in each group, with whiskers where there are errors."""
    hatch = "////" if series.bound else HATCHES[slot // len(PALETTE) % len(HATCHES)]
    axes.bar(
        places,
        series.y,
        width * 0.92,
        yerr=series.errors,
        color=_color(slot, series.bound),
        edgecolor="white",
        linewidth=0,
        hatch=hatch,
        error_kw={"elinewidth": 1, "capsize": min(3, 18 * width), "ecolor": "#000000"},
        label=_label(series),
    )


def _label(series: Series) -> str:
    label = _text(named(series), 32)
    if label.startswith("_"):
        return f" {label}"  # matplotlib hides a label that starts with an underscore
    return label


def _write_names(axes: Axes, names: Sequence[str], width: float) -> None:
    """Writes names below the axis, slanted where they would run into each other."""
    if not names:
        return
    slanted: dict[str, Any] = {}
    letters = sum(len(name) + 2 for name in names)
    if letters > 10 * width:
        slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), names, **slanted)
    axes.tick_params("x", length=0)


def _scale(axes: Axes, chart: Chart, names: Sequence[str]) -> None:
    """Makes axes logarithmic where the chart asks for it and has a positive number to show."""
    positive_x = [x for series in chart.series for x in series.x if not isinstance(x, str) and x > 0]
    if chart.log_x and positive_x and not names:
        axes.set_xscale("log")
        _log_ticks(axes.xaxis, sorted(set(positive_x)))
    positive_y = [y for series in chart.series for y in series.y if y > 0]
    if chart.log_y and positive_y:
        axes.set_yscale("log")
        _log_ticks(axes.yaxis, [min(positive_y), max(positive_y)])


def _log_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Sets ticks with plain numbers: at the values if they are few and well apart, otherwise at powers of ten."""
    steps = np.diff(np.log(values))
    if 2 < len(values) <= MOST_TICKS and steps.min() > 0.07 * steps.sum():
        axis.set_major_locator(FixedLocator(values))
        axis.set_minor_locator(NullLocator())
    plain = FuncFormatter(_plain_number)
    axis.set_major_formatter(plain)
    if values[-1] < 10 * values[0]:
        axis.set_minor_formatter(plain)  # within one power of ten there would be no or only one major tick
    else:
        axis.set_minor_formatter(NullFormatter())


def _plain_number(number: float, position: int | None) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:g}"


def _decorate(axes: Axes, chart: Chart) -> None:
    """Adds the title, labels, grid and margins."""
    axes.set(xlabel=_text(chart.x_label), ylabel=_text(chart.y_label))
    axes.set_title(_text(chart.title, 80), loc="left", fontsize=11)
    if chart.kind == "bar":
        axes.grid(axis="y", color="#e4e4e4")
        axes.margins(x=0.02)
    else:
        axes.grid(axis="both", color="#e4e4e4")
        axes.margins(x=0.05)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _gallery(gallery: Gallery) -> Figure:
    """One question below another, laid out in inches on axes that fill the figure."""
    columns = 1 + max((len(question.neighbors) for question in gallery.questions), default=0)
    width = max(columns, 4) * (CELL + GAP) + 3 * GAP
    title = _text(gallery.title, int(11 * width))
    title_height = 0.16
    if title:
        title_height += TITLE_LINE * (title.count("\n") + 1)
    heights = [_height(question, width) for question in gallery.questions]
    *tops, bottom = np.cumsum([title_height, *heights])
    drawing = Figure(figsize=(width, bottom))
    axes = drawing.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.text(GAP, 0.1, title, va="top", fontsize=11)
    for question, top in zip(gallery.questions, tops, strict=True):
        _question(axes, question, top, width)
    axes.set(xlim=(0, width), ylim=(bottom, 0))  # y grows downward, as on a page
    return drawing


def _height(question: Question, width: float) -> float:
    """The height of a question in inches: the verdict, the pictures and the longest caption."""
    captions = [_caption(picture) for picture in (question.query, *question.neighbors)]
    caption_lines = 1 + max(caption.count("\n") for caption in captions)
    return _above_pictures(_verdict(question, width)) + 0.16 + CELL + caption_lines * CAPTION_LINE


def _above_pictures(verdict: str) -> float:
    return ABOVE_PICTURES + verdict.count("\n") * VERDICT_LINE


def _question(axes: Axes, question: Question, top: float, width: float) -> None:
    """Draws a line across, the verdict, the query at the left, and its neighbors to the right of it."""
    verdict = _verdict(question, width)
    axes.plot((GAP, width - GAP), (top, top), color="#cccccc", linewidth=0.8)
    axes.text(GAP, top + 0.07, verdict, va="top", fontsize=9, fontweight="bold")
    pictures_top = top + _above_pictures(verdict)
    _picture(axes, question.query, GAP, pictures_top)
    for place, picture in enumerate(question.neighbors, 1):
        _picture(axes, picture, 2 * GAP + place * (CELL + GAP), pictures_top)
    if question.neighbors:
        divider = CELL + 2 * GAP
        axes.plot((divider, divider), (pictures_top, pictures_top + CELL), color="#888888", linewidth=0.8)


def _picture(axes: Axes, picture: Picture, left: float, top: float) -> None:
    """Draws the image in the middle of its cell, with the caption below."""
    pixels = np.array(picture.image.shape[:2])
    height, width = pixels * CELL / max(pixels)  # in inches; the longer side fills the cell
    x = left + (CELL - width) / 2
    y = top + (CELL - height) / 2
    extent = (x, x + width, y + height, y)
    axes.imshow(picture.image, extent=extent, aspect="auto")
    middle = left + CELL / 2
    below = top + CELL + 0.04
    axes.text(middle, below, _caption(picture), va="top", ha="center", fontsize=7)


def _caption(picture: Picture) -> str:
    return _text(picture.caption, 20, 4)


def _verdict(question: Question, width: float) -> str:
    return _text(question.verdict, int(12 * width), 3)
