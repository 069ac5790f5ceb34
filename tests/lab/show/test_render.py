"""Sheets as text: read back by other parsers, compared with slow oracles."""

from __future__ import annotations

import re
from csv import DictReader
from decimal import ROUND_HALF_EVEN, Decimal
from io import StringIO
from math import inf, isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from adanpc.lab.show import render
from adanpc.lab.show.exhibit import Cell, Sheet, Value

NASTY = "|&%_#$\\~^{}[]*<>`\"'\n\r\t\x00\x85\u2028\u200b-+=.):! ab1éß中😀±–"
TEXTS = st.text(st.sampled_from(NASTY), max_size=8) | st.text(max_size=4) | st.just("<script>alert(1)</script>")
NUMBERS = st.floats(-1e6, 1e6) | st.sampled_from([nan, inf, -0.0, 0.05, 0.25, 97.25, 97.35])
VALUES = st.builds(Value, NUMBERS, st.none() | st.floats(0, 100) | st.just(nan), st.integers(1, 20))
CELLS = st.builds(Cell, st.none() | VALUES, st.none() | VALUES, TEXTS)


@st.composite
def sheets(draw: st.DrawFn) -> Sheet:
    columns = draw(st.lists(TEXTS, max_size=4))
    row = st.tuples(TEXTS, st.tuples(*[CELLS] * len(columns)))
    rows = draw(st.lists(row, max_size=4))
    best = draw(st.sampled_from(["high", "low", ""]))
    return Sheet(draw(TEXTS), tuple(columns), tuple(rows), draw(TEXTS), best, draw(st.integers(0, 3)))  # type: ignore[arg-type]


def rounded(number: float, decimals: int) -> Decimal:
    """The exact binary number, rounded in decimals; zero has no sign."""
    if number in (inf, -inf):
        return Decimal(number)
    return Decimal(number).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_EVEN) + 0


def written(value: Value | None, decimals: int) -> str:
    if value is None or isnan(value.mean):
        return ""
    mean = str(rounded(value.mean, decimals)).replace("Infinity", "inf")
    return mean if value.error is None or isnan(value.error) else f"{mean} ± {rounded(value.error, decimals)}"


def winners(sheet: Sheet) -> set[tuple[int, int]]:
    """Rows and columns of the best, by loops."""
    best = set()
    for column in range(len(sheet.columns)):
        means = {}
        for row, (_, cells) in enumerate(sheet.rows):
            ours = cells[column].ours
            if ours is not None and not isnan(ours.mean):
                means[row] = rounded(ours.mean, sheet.decimals)
        for row, mean in means.items():
            better = [other for other in means.values() if (other > mean if sheet.best == "high" else other < mean)]
            if sheet.best and not better:
                best.add((row, column))
    return best


def plain(text: str) -> str:
    """What is left of a text in one line."""
    kept = [letter if letter.isprintable() else "\n" for letter in text]
    return re.sub(r"\s+", " ", "".join(kept)).strip()


@given(sheets())
def test_cells_show_ours_then_the_papers_in_brackets(sheet: Sheet) -> None:
    for (_, cells), texts in zip(sheet.rows, render.cells(sheet), strict=True):
        for cell, text in zip(cells, texts, strict=True):
            ours = written(cell.ours, sheet.decimals) or (plain(cell.text) if cell.ours is None else "") or "–"
            paper = written(cell.paper, sheet.decimals)
            assert text == (f"{ours} [{paper}]" if paper else ours)


@given(sheets())
def test_the_best_of_ours_is_set_off_with_all_ties(sheet: Sheet) -> None:
    shown = render.shown(sheet)
    assert {
        (row, column) for row, cells in enumerate(shown) for column, cell in enumerate(cells) if cell.best
    } == winners(sheet)


def test_what_looks_equal_is_a_tie() -> None:
    cells = [Cell(Value(96.41)), Cell(Value(96.44)), Cell(Value(96.3)), Cell(text="99.9"), Cell(paper=Value(99.0))]
    sheet = Sheet("", ("a",), tuple(("", (cell,)) for cell in cells))
    assert [row[0].best for row in render.shown(sheet)] == [True, True, False, False, False]


def test_a_number_that_rounds_to_zero_has_no_sign() -> None:
    assert render.cells(Sheet("", ("a",), (("", (Cell(Value(-0.04)),)),))) == [["0.0"]]


@pytest.mark.parametrize(
    ("cells", "entries"),
    [
        ([Cell(Value(1.0))], []),
        ([Cell(Value(1.0, 0.5, 3))], ["±: standard error over 3 measurements"]),
        ([Cell(Value(1.0, 0.5, 5)), Cell(Value(1.0, 0.5, 3))], ["±: standard error over 3–5 measurements"]),
        ([Cell(Value(nan, 0.5, 3)), Cell(Value(1.0, None, 7))], []),
        ([Cell(paper=Value(1.0))], ["[ ]: the paper's"]),
        ([Cell(paper=Value(nan))], []),
        ([Cell(paper=Value(1.0, 0.1, 20)), Cell(text="± [x]")], ["[ ]: the paper's"]),
    ],
)
def test_the_legend_explains_the_signs_that_are_there(cells: list[Cell], entries: list[str]) -> None:
    sheet = Sheet("", ("a",), tuple(("", (cell,)) for cell in cells), best="")
    assert render.legend(sheet) == entries
    assert render.markdown(sheet).endswith("; ".join(entries) + "\n" if entries else "|\n")


def test_bold_is_explained_where_it_is_used() -> None:
    sheet = Sheet("", ("a",), (("", (Cell(Value(1.0)),)),))
    assert render.legend(sheet) == ["bold: the best of ours in its column"]


def inline(token: Token) -> str:
    return "".join(child.content for child in token.children or [] if child.type == "text")


@pytest.mark.no_cover
@given(sheets())
def test_markdown_is_read_back_by_a_markdown_parser(sheet: Sheet) -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(render.markdown(sheet))
    kinds = [token.type for token in tokens]
    assert kinds.count("table_open") == 1
    assert kinds.count("tr_open") == 1 + len(sheet.rows)
    title = inline(tokens[1])
    assert (tokens[0].tag, title) == ("h2", plain(f"{sheet.title} ({sheet.unit})" if sheet.unit else sheet.title))
    texts = [inline(tokens[at + 1]) for at, kind in enumerate(kinds) if kind in ("th_open", "td_open")]
    labels = [plain(label) for label, _ in sheet.rows]
    expected = ["", *map(plain, sheet.columns)]
    for label, row in zip(labels, render.cells(sheet), strict=True):
        expected += [label, *row]
    assert texts == expected
    children = [child.type for token in tokens for child in token.children or []]
    assert set(children) <= {"text", "strong_open", "strong_close"}
    assert children.count("strong_open") == len(winners(sheet))


def test_markdown_sets_off_ours_alone() -> None:
    sheet = Sheet("Title", ("a",), (("x|y", (Cell(Value(96.41, 0.21, 3), Value(98.5)),)),))
    assert r"| x\|y | **96.4 ± 0.2** [98.5] |" in render.markdown(sheet)


@given(TEXTS)
def test_a_marked_text_is_one_paragraph_of_itself(text: str) -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(render.marked(text))
    assert [token.type for token in tokens if token.type != "inline"] == ["paragraph_open", "paragraph_close"] * bool(
        plain(text)
    )
    assert "".join(inline(token) for token in tokens) == plain(text)


def balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth < 0:
            return False
    return depth == 0


@given(sheets())
def test_latex_has_a_cell_for_each_column_and_nothing_unescaped(sheet: Sheet) -> None:
    text = re.sub(r"(?<!\\)\\[&%$#_{}]", "", render.latex(sheet))
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")].splitlines()
    rows = [line.strip() for line in body if line.endswith(r" \\")]
    assert len(rows) == 1 + len(sheet.rows) == len(body) - 3  # two rules, and what stands before the last
    assert all(row.count("&") == len(sheet.columns) for row in rows)
    assert not any(row.startswith(("[", "*")) for row in rows)  # an option of the end of the row before
    assert all(balanced(line) for line in rows)
    assert balanced(text)
    assert text.count("$") % 2 == 0
    assert not re.search(r"[%#_~<>|`]|\^(?!\\circ)|[^\x20-\x7eÀ-ÿ\n]", text)
    assert "--" not in text
    assert (
        set(re.findall(r"\\begin\{(\w+)\}", text)) == set(re.findall(r"\\end\{(\w+)\}", text)) == {"table", "tabular"}
    )


def test_latex_of_one_sheet() -> None:
    row = (Cell(Value(-96.41, 0.21, 3), Value(98.5)), Cell(text="50 % [off] Ü → 中"))
    legend = r"bold: the best of ours in its column; $\pm$: standard error over 3 measurements; {[} {]}: the paper's"
    assert render.latex(Sheet("A & B", ("15°", "x_1"), (("a--b", row),), unit="")) == "\n".join(
        [
            r"\begin{table}",
            r"  \centering\small",
            r"  \caption{A \& B}",
            r"  \begin{tabular}{lrr}",
            r"    \toprule",
            r"     & 15$^\circ$ & x\_1 \\",
            r"    \midrule",
            r"    a-{}-b & \textbf{$-$96.4 $\pm$ 0.2} \textcolor{gray}{{[}98.5{]}} & 50 \% {[}off{]} Ü $\to$ ? \\",
            r"    \bottomrule",
            r"  \end{tabular}",
            rf"  \par\smallskip{{\footnotesize {legend}}}",
            "\\end{table}\n",
        ]
    )


@given(sheets())
def test_csv_is_read_back_with_every_number_in_full(sheet: Sheet) -> None:
    read = list(DictReader(StringIO(render.csv(sheet), newline="")))
    expected = []
    for label, cells in sheet.rows:
        for column, cell in zip(sheet.columns, cells, strict=True):
            ours, paper = cell.ours, cell.paper
            record = {"row": plain(label), "column": plain(column)}
            record["ours"] = repr(ours.mean) if ours else ""
            record["error"] = repr(ours.error) if ours and ours.error is not None else ""
            record["count"] = str(ours.count) if ours else ""
            record["paper"] = repr(paper.mean) if paper else ""
            record["paper_error"] = repr(paper.error) if paper and paper.error is not None else ""
            expected.append({**record, "text": plain(cell.text)})
    assert read == expected
    assert render.csv(sheet).splitlines()[0] == "row,column,ours,error,count,paper,paper_error,text"
