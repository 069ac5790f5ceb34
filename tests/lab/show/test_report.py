"""Exhibits as files and as a page: parsed again, with every link followed."""

from __future__ import annotations

import base64
import csv
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from adanpc.errors import AdaNPCError
from adanpc.lab.show import draw, render, report
from adanpc.lab.show.exhibit import Cell, Chart, Exhibit, Gallery, Picture, Question, Series, Sheet, Value
from adanpc.printable import on_one_line

EVIL = "<script>alert('1')</script> & \"x\" --> ]]> {} \\ $ | `"
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
VOID = {"meta", "img", "link", "br", "hr", "input"}
ENVIRONMENT = {"machine": "a processor, 2 cores", EVIL: EVIL}
TEXTS = st.text(st.sampled_from("<>&\"'|\\`-#[]()\n\x00 abé中😀"), max_size=10) | st.just(EVIL)


def sheet(title: str = "Accuracy", label: str = "AdaNPC") -> Sheet:
    cells = (Cell(Value(96.41, 0.21, 3), Value(98.5)), Cell(Value(90.0)), Cell(text=label))
    return Sheet(title, (label, "15°", "30°"), (("ERM", (Cell(), Cell(Value(91.0)), Cell())), (label, cells)))


def chart(label: str = "AdaNPC") -> Chart:
    return Chart(
        label, label, label, (Series(label, (1, 2), (3, 4), (0.1, 0.1)), Series(label, (1, 2), (3, 4), bound=True))
    )


def gallery(label: str = "3") -> Gallery:
    picture = Picture(np.arange(48, dtype=np.uint8).reshape(4, 4, 3), label)  # in color, as photographs are
    return Gallery(label, (Question(picture, (picture, picture), label),))


def exhibit(text: str = "Some text", name: str = "ood-digits") -> Exhibit:
    parts = (sheet(text, text), chart(text), chart(text), gallery(text), sheet("Second"))
    return Exhibit(name, text, text, f"{text}\n\n{text}", parts, (text, "another note"))


class Page(HTMLParser):
    """A page as a list of elements with attributes; raises where tags are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.strong: list[str] = []
        self.style = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data
        if self.open and self.open[-1] == "style" and "svg" not in self.open:
            self.style += data
        if self.open and self.open[-1] == "strong":
            self.strong.append(data)

    def all(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


def check(text: str) -> Page:
    """The page, once it is known to be well formed, alone in the world, and readable by all."""
    page = Page(text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "iframe", "object", "base")
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "xlink:href"):
            assert name not in attributes or attributes[name] in {f"#{each}" for each in ids}
        assert attributes.get("src", "data:").startswith("data:")
        for value in attributes.values():
            assert all(each in ids for each in re.findall(r"url\(#([^)]*)\)", value))
            assert "url(" not in re.sub(r"url\(#", "", value)
        assert set(attributes.get("aria-labelledby", "").split()) <= set(ids)
    assert "url(" not in page.style
    assert "@import" not in page.style
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(attributes.get("scope") in ("row", "col") for attributes in page.all("th"))
    assert all(attributes.get("alt") for attributes in page.all("img"))
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in page.all("svg"))
    assert page.all("html") == [{"lang": "en"}]
    assert all(len(row) == len(table[0]) for table in page.tables for row in table)
    return page


def test_the_page_is_valid_and_alone_whatever_the_texts() -> None:
    text = report.page((exhibit(EVIL), exhibit("Plain")), ENVIRONMENT, EVIL)
    page = check(text)
    assert text.startswith("<!DOCTYPE html>\n<html")
    assert "<script" not in text
    assert len(page.all("svg")) == 4
    assert len(page.all("img")) == 2
    assert len(page.all("aside")) == 2
    links = [attributes["href"] for attributes in page.all("a")]
    assert links == ["#exhibit-1", "#exhibit-2"]


def test_the_tables_of_a_page_have_the_cells_of_the_sheets() -> None:
    first, second = sheet(EVIL, EVIL), sheet("Second")
    both = Exhibit("name", "Title", "Table 1", "About", (first, second))
    page = check(report.page((both,), ENVIRONMENT, "Page"))
    for each, table in zip((first, second), page.tables, strict=False):
        tidy = [[" ".join(cell.split()) for cell in row] for row in table]
        rows = zip(each.rows, render.cells(each), strict=True)
        assert tidy == [
            ["", *map(on_one_line, each.columns)],
            *([on_one_line(label), *row] for (label, _), row in rows),
        ]
    assert page.tables[2] == [["what", "value"], ["machine", "a processor, 2 cores"], [EVIL, EVIL]]
    assert page.strong == ["91.0", "96.4 ± 0.2"] * 2


@settings(max_examples=40, deadline=None)
@given(TEXTS, TEXTS)
def test_any_text_leaves_the_page_well_formed(one: str, other: str) -> None:
    nasty = Exhibit(one, one, other, one + "\n\n" + other, (sheet(one, other),), (other,))
    check(report.page((nasty,), {one: other}, other))


def test_a_page_of_nothing_is_a_page() -> None:
    assert check(report.page((), {}, "Empty")).tables == []


def test_the_pictures_of_galleries_are_in_the_page() -> None:
    (image,) = check(report.page((exhibit(),), ENVIRONMENT, "Page")).all("img")
    kind, content = image["src"].split(",")
    assert kind == "data:image/jpeg;base64"
    assert base64.b64decode(content, validate=True).startswith(b"\xff\xd8\xff")


def test_gray_pictures_are_in_the_page_as_png() -> None:
    digit = Picture(np.full((4, 4, 3), 99, np.uint8), "3")
    digits = Gallery("Digits", (Question(digit, (digit,), "right"),))
    (image,) = check(report.page((Exhibit("name", "Title", "Figure 6", "About", (digits,)),), {}, "Page")).all("img")
    kind, content = image["src"].split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content, validate=True).startswith(b"\x89PNG\r\n")


def test_a_page_with_every_gallery_of_the_paper_stays_below_five_megabytes() -> None:
    """The galleries of the results as a page embeds them, and room for two dozen charts of up to 70 kB each."""
    galleries = [*RESULTS.rglob("gallery-*.jpg"), *RESULTS.rglob("gallery-*.png")]
    assert galleries
    embedded = sum(len(base64.b64encode(path.read_bytes())) for path in galleries)
    assert len(draw.image(chart(), "svg")) < 70_000
    assert embedded + 24 * 70_000 < 5_000_000


def test_the_same_exhibits_give_the_same_page() -> None:
    assert report.page((exhibit(),), ENVIRONMENT, "Page") == report.page((exhibit(),), ENVIRONMENT, "Page")


def test_writes_these_files_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    paths = report.write(exhibit(EVIL), folder)
    charts = ["ood-digits-1.png", "ood-digits-1.svg", "ood-digits-2.png", "ood-digits-2.svg"]
    pictures = [*charts, "ood-digits-3.jpg", "ood-digits-3.svg"]
    assert [path.name for path in paths] == ["ood-digits.tex", "ood-digits.csv", *pictures, "ood-digits.md"]
    assert set(folder.iterdir()) == set(paths)


@pytest.mark.no_cover
def test_the_same_exhibit_gives_the_same_files(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        report.write(exhibit(), tmp_path / folder)
    report.write(exhibit(), tmp_path / "one")  # over what is there
    contents = [{path.name: path.read_bytes() for path in (tmp_path / each).iterdir()} for each in ("one", "other")]
    assert contents[0] == contents[1]


def test_files_hold_every_part(tmp_path: Path) -> None:
    written = exhibit("Some text")
    report.write(written, tmp_path)
    sheets = [part for part in written.parts if isinstance(part, Sheet)]
    tex = (tmp_path / "ood-digits.tex").read_text(encoding="utf-8")
    assert all(render.latex(each) in tex for each in sheets)
    with (tmp_path / "ood-digits.csv").open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert [record.pop("sheet") for record in read] == ["Some text"] * 6 + ["Second"] * 6
    assert read == [record for each in sheets for record in csv.DictReader(render.csv(each).splitlines())]
    assert (tmp_path / "ood-digits-3.jpg").read_bytes() == draw.image(gallery("Some text"), "jpg")


def test_markdown_links_to_pictures_that_are_there(tmp_path: Path) -> None:
    paths = report.write(exhibit(EVIL, "a name"), tmp_path)
    tokens = MarkdownIt("commonmark").enable("table").parse(paths[-1].read_text(encoding="utf-8"))
    children = [child for token in tokens for child in token.children or []]
    targets = [str(child.attrs.get("src", child.attrs.get("href", ""))) for child in children if child.attrs]
    assert {tmp_path / unquote(target) for target in targets} == {path for path in paths if "a name-" in path.name}
    assert not [token for token in (*tokens, *children) if token.type.startswith("html")]
    headings = [tokens[at + 1].children for at, token in enumerate(tokens) if token.type == "heading_open"]
    texts = ["".join(child.content for child in inline or []) for inline in headings]
    unit = "(accuracy in %)"
    assert texts == [EVIL, f"{EVIL} {unit}", f"Second {unit}", "What to keep in mind"]
    assert sum(token.type == "list_item_open" for token in tokens) == 2


@pytest.mark.parametrize("parts", [(), (chart(),)])
def test_without_sheets_there_is_no_table_to_write(parts: tuple[Chart, ...], tmp_path: Path) -> None:
    paths = report.write(Exhibit("bare", "Title", "Figure 2", "About", parts), tmp_path)
    assert {path.suffix for path in paths} == {".md", ".png", ".svg"} if parts else {".md"}
    assert "What to keep in mind" not in paths[-1].read_text(encoding="utf-8")


def test_numbers_are_written_even_if_nothing_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "Figure", None)
    with pytest.raises(AdaNPCError, match="matplotlib"):
        report.write(exhibit(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"ood-digits.tex", "ood-digits.csv"}
