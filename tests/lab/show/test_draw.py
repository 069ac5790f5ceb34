"""Charts and galleries: what is on the figure, where it is, and that the same part gives the same bytes."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from io import BytesIO
from itertools import combinations
from math import nan
from pathlib import Path
from typing import cast

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from PIL import Image

from adanpc.errors import AdaNPCError
from adanpc.lab.show import draw
from adanpc.lab.show.exhibit import Chart, Gallery, Picture, Question, Series

K = (1.0, 10.0, 100.0)
DOMAINS = ("art", "cartoon", "photo")
LONG = "a caption of many words, with-a-word-that-is-longer-than-the-line, and a row 12345 of similarity 0.987654"


def picture(caption: str = "3", height: int = 8, width: int = 8) -> Picture:
    return Picture(np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3), caption)


def lines(count: int, label: str = "method {}") -> Chart:
    series = [Series(label.format(at), K, (at, at + 1.0, at + 0.5), (0.1, 0.2, 0.3)) for at in range(count)]
    return Chart("Accuracy", "k", "accuracy in %", tuple(series))


def bars(count: int, names: tuple[str, ...] = DOMAINS) -> Chart:
    heights = [tuple(10.0 + at + place for place in range(len(names))) for at in range(count)]
    series = [Series(f"method {at}", names, y, (0.5,) * len(names)) for at, y in enumerate(heights)]
    return Chart("Accuracy", "domain", "accuracy in %", tuple(series), kind="bar")


def gallery(rows: int, neighbors: int, caption: str = "3") -> Gallery:
    nearest = (picture(caption),) * neighbors
    return Gallery(
        "Queries", tuple(Question(picture(caption), nearest[: neighbors - row], "right") for row in range(rows))
    )


LOGS = Chart("Time", "rows", "ms", (Series("exact", (10.0, 1e3, 1e6), (0.1, 5.0, 900.0)),), log_x=True, log_y=True)
PARTS: dict[str, Chart | Gallery] = {
    "lines": lines(3),
    "many lines": lines(16, "algorithm {} with a label that takes two lines"),
    "bars": bars(2),
    "many bars": bars(9),
    "long names": bars(3, tuple(f"corruption number {at}" for at in range(15))),
    "logarithms": LOGS,
    "gallery": gallery(2, 3),
}


def drawn_texts(figure: Figure) -> list[Text]:
    """All that is written on a figure, once it has been laid out."""
    figure.draw_without_rendering()
    every_text = cast(list[Text], figure.findobj(Text))
    return [text for text in every_text if text.get_text().strip() and text.get_visible()]


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ["lines", "bars", "logarithms", "gallery"])
@pytest.mark.parametrize("form", draw.FORMS)
def test_the_same_part_gives_the_same_bytes_whatever_the_users_style(name: str, form: draw.Form) -> None:
    first = draw.image(PARTS[name], form)
    with matplotlib.rc_context({"savefig.facecolor": "red", "font.size": 30, "svg.hashsalt": "x", "savefig.dpi": 40}):
        assert draw.image(PARTS[name], form) == first
    if form == "svg":
        ET.fromstring(first)
        assert b"<metadata" not in first
    else:
        assert Image.open(BytesIO(first)).format == {"png": "PNG", "jpg": "JPEG"}[form]


def test_photographs_are_written_as_jpeg_and_all_else_as_png() -> None:
    gray = Picture(np.full((8, 8, 3), 99, np.uint8), "")
    digits = Question(gray, (gray,), "")
    photographs = Question(gray, (picture(),), "")
    assert draw.forms(Gallery("", (digits, photographs))) == ("jpg", "svg")
    assert draw.forms(Gallery("", (digits,))) == ("png", "svg")
    assert draw.forms(Gallery("", ())) == ("png", "svg")
    assert draw.forms(lines(1)) == ("png", "svg")


def test_the_palette_of_a_png_keeps_paper_ink_and_lines_exact() -> None:
    chart = lines(len(draw.PALETTE))
    with Image.open(BytesIO(draw.image(chart, "png"))) as png:
        assert png.mode == "P"
        width, height = draw.figure(chart).get_size_inches() * 150
        assert png.size == (int(width), int(height))
        colors = {color for _, color in png.convert("RGB").getcolors(256) or ()}
    for name in (*draw.PALETTE, "#ffffff", "#000000"):
        assert tuple(round(255 * part) for part in to_rgb(name)) in colors, name


def test_a_gallery_of_photographs_is_small() -> None:
    """As large as those of the results, with pixels that are harder to compress than any photograph's."""
    noise = np.random.default_rng(0).integers(0, 256, (112, 112, 3), np.uint8)
    photograph = Picture(noise.repeat(2, 0).repeat(2, 1), "dog, photo, 0.42")
    question = Question(photograph, (photograph,) * 8, "dog (90%), is horse; after removing 3: horse (70%)")
    assert len(draw.image(Gallery("PACS, target photo", (question,) * 8), "jpg")) < 1_000_000


@pytest.mark.no_cover
@pytest.mark.parametrize("name", PARTS)
def test_everything_written_is_inside_the_figure(name: str) -> None:
    figure = draw.figure(PARTS[name])
    texts = drawn_texts(figure)
    inside = figure.bbox.padded(1)
    ticks = [text for axes in figure.axes for text in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    for text in texts:
        box = text.get_window_extent()
        assert text in ticks or (inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)), text.get_text()


@pytest.mark.no_cover
@pytest.mark.parametrize("name", [name for name in PARTS if name != "gallery"])
def test_the_legend_hides_no_data(name: str) -> None:
    figure = draw.figure(PARTS[name])
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert not legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())
    beside = legend.get_window_extent().x0 > figure.axes[0].get_window_extent().x1
    assert beside == (len(cast(Chart, PARTS[name]).series) > 6)


def test_lines_have_their_values_and_a_band() -> None:
    figure = draw.figure(lines(2))
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0, 1, 0.5], [1, 2, 1.5]]  # type: ignore[arg-type]
    assert [list(line.get_xdata()) for line in axes.lines] == [list(K)] * 2  # type: ignore[arg-type]
    band = axes.collections[1].get_paths()[0].vertices
    corners = {(round(float(x), 6), round(float(y), 6)) for x, y in np.asarray(band)}
    assert {(1, 0.9), (1, 1.1), (10, 1.8), (10, 2.2), (100, 1.2), (100, 1.8)} <= corners
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title("left")) == ("k", "accuracy in %", "Accuracy")


def test_every_line_looks_different() -> None:
    (axes,) = draw.figure(lines(28)).axes
    looks = {(line.get_color(), line.get_marker()) for line in axes.lines}
    styles = {(line.get_color(), str(line.get_linestyle())) for line in axes.lines[:14]}
    assert (len(looks), len(styles)) == (28, 14)


def test_a_bound_is_dashed_in_the_grayed_color_of_what_it_bounds() -> None:
    series = (
        Series("T3A", K, K),
        Series("AdaNPC", K, K),
        Series("AdaNPC", K, K, bound=True),
        Series("SHOT", K, K, bound=True),
    )
    figure = draw.figure(Chart("", "k", "y", series))
    t3a, ours, bound, other = figure.axes[0].lines
    assert [line.get_linestyle() for line in (t3a, ours, bound, other)] == ["-", "-", "--", "--"]
    middle = [(one + gray) / 2 for one, gray in zip(to_rgb(ours.get_color()), to_rgb(draw.GRAY), strict=True)]
    assert to_rgb(bound.get_color()) == pytest.approx(middle)
    assert len({t3a.get_color(), ours.get_color(), bound.get_color(), other.get_color()}) == 4
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["T3A", "AdaNPC", "AdaNPC (bound)", "SHOT (bound)"]


def test_bars_stand_in_groups_over_their_names() -> None:
    series = (Series("a", ("x", "y"), (1.0, 2.0), (0.1, 0.2)), Series("b", ("y", "z"), (3.0, nan), bound=True))
    (axes,) = draw.figure(Chart("", "", "", series, kind="bar")).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "y", "z"]
    first, second = (each for each in axes.containers if isinstance(each, BarContainer))
    middles = [[bar.get_x() + bar.get_width() / 2 for bar in group] for group in (first, second)]
    assert middles == [pytest.approx([-0.2, 0.8]), pytest.approx([1.2, 2.2])]
    assert [bar.get_height() for bar in (*first, *second)] == pytest.approx([1, 2, 3, nan], nan_ok=True)
    assert (first.errorbar is not None, second.errorbar is not None) == (True, False)
    assert [bar.get_hatch() for bar in (first[0], second[0])] == ["", "////"]


def test_lines_over_names_leave_a_gap_where_a_name_is_missing() -> None:
    chart = Chart("", "", "", (Series("a", ("0°", "15°"), (9.0, 8.0)), Series("b", ("15°", "30°"), (7.0, 6.0))))
    (axes,) = draw.figure(chart).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[0, 1], [1, 2]]  # type: ignore[arg-type]


def test_logarithmic_axes_show_plain_numbers() -> None:
    figure = draw.figure(LOGS)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "1,000", "1,000,000"]
    assert {"0.1", "1", "10", "100"} <= {label.get_text() for label in axes.get_yticklabels()}


def test_nothing_positive_stays_linear() -> None:
    chart = Chart("", "", "", (Series("a", (0.0, -1.0), (0.0, nan)),), log_x=True, log_y=True)
    (axes,) = draw.figure(chart).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")


def test_an_empty_chart_and_an_empty_gallery_are_drawn() -> None:
    for part in (Chart("", "", "", ()), Chart("", "", "", (), kind="bar"), Gallery("", ())):
        assert draw.image(part, "png").startswith(b"\x89PNG")


def test_a_gallery_shows_each_query_left_of_its_neighbors_and_leaves_gaps() -> None:
    figure = draw.figure(gallery(3, 4))
    images = cast(list[AxesImage], figure.findobj(AxesImage))
    rows: dict[float, list[float]] = {}
    for image in images:
        left, _, _, top = image.get_extent()
        rows.setdefault(round(top, 6), []).append(round(left, 6))
    assert [len(lefts) for _, lefts in sorted(rows.items())] == [5, 4, 3]
    widest = max(rows.values(), key=len)
    assert all(lefts == widest[: len(lefts)] for lefts in rows.values())
    assert widest == sorted(widest)


def test_images_keep_their_shape() -> None:
    question = Question(picture(height=4, width=8), (picture(height=9, width=3),), "")
    first, second = cast(list[AxesImage], draw.figure(Gallery("", (question,))).findobj(AxesImage))
    for image, ratio in ((first, 2.0), (second, 1 / 3)):
        left, right, bottom, top = image.get_extent()
        assert (right - left) / (bottom - top) == pytest.approx(ratio)


@pytest.mark.no_cover
@pytest.mark.parametrize("rows", [1, 30])
def test_long_captions_overlap_nothing(rows: int) -> None:
    question = Question(picture(LONG), (picture(LONG),) * 8, f"{LONG}; " * 4)
    figure = draw.figure(Gallery(LONG, (question,) * rows))
    texts = drawn_texts(figure)
    assert max(text.get_text().count("\n") for text in texts) == 3  # longer ones are cut
    boxes = [text.get_window_extent() for text in texts]
    boxes += [image.get_window_extent() for image in cast(list[AxesImage], figure.findobj(AxesImage))]
    assert len(boxes) == 1 + rows * (1 + 9 + 9)
    tops = sorted(boxes, key=lambda box: box.y0)
    for at, box in enumerate(tops):  # only what starts below the top of a box can overlap it
        for other in tops[at + 1 : at + 40]:
            assert not box.overlaps(other)


@pytest.mark.no_cover
@settings(max_examples=15, deadline=None)
@given(st.text(st.sampled_from("$\\{}_^%&<>-— a中😀\n\x00"), max_size=12) | st.text(max_size=5))
def test_any_text_can_be_drawn(text: str) -> None:
    chart = Chart(text, text, text, (Series(text, (text, "b"), (1.0, 2.0)), Series(text, ("b",), (1.0,), bound=True)))
    ET.fromstring(draw.image(chart, "svg"))
    ET.fromstring(draw.image(Gallery(text, (Question(picture(text), (), text),)), "svg"))


def test_dollars_start_no_formula_and_a_leading_underscore_is_not_hidden() -> None:
    figure = draw.figure(Chart("$x$ costs $5", "", "", (Series("_private", K, K),)))
    title = figure.axes[0].get_title("left")
    assert title.replace(r"\$", "$") == "$x$ costs $5"
    assert title.count(r"\$") == title.count("$") == 3
    assert [text.get_text().strip() for text in figure.legends[0].get_texts()] == ["_private"]


def test_saves_what_the_path_ends_in(tmp_path: Path) -> None:
    for form in draw.FORMS:
        draw.save(PARTS["bars"], tmp_path / f"figure.{form}")
        assert (tmp_path / f"figure.{form}").read_bytes() == draw.image(PARTS["bars"], form)
    assert {path.name for path in tmp_path.iterdir()} == {"figure.png", "figure.jpg", "figure.svg"}


def test_refuses_another_ending(tmp_path: Path) -> None:
    with pytest.raises(AdaNPCError, match=r"must end in one of \.png, \.jpg, \.svg, got .*figure\.gif"):
        draw.save(PARTS["bars"], tmp_path / "figure.gif")


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "Figure", None)
    with pytest.raises(AdaNPCError, match=r"matplotlib.*pip install 'adanpc\[demo\]'"):
        draw.figure(PARTS["bars"])


def test_colors_can_be_told_apart_on_white() -> None:
    """Contrast of at least 2 to 1 with the paper, and a distance between any two that is seen."""
    shades = np.array([to_rgb(color) for color in draw.PALETTE])
    linear = np.where(shades <= 0.04045, shades / 12.92, ((shades + 0.055) / 1.055) ** 2.4)
    contrast = 1.05 / (linear @ (0.2126, 0.7152, 0.0722) + 0.05)
    assert contrast.min() >= 2
    assert min(np.abs(one - other).max() for one, other in combinations(shades, 2)) > 0.15
