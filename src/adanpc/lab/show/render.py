"""Sheets as text: Markdown, LaTeX, CSV, and the plain strings that every other form is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from csv import writer
from io import StringIO
from math import isnan
from typing import NamedTuple
from unicodedata import normalize

from adanpc.lab.show.exhibit import Cell, Sheet, Value

MISSING = "–"
COLUMNS = ("row", "column", "ours", "error", "count", "paper", "paper_error", "text")
MARKED = str.maketrans({**{mark: f"\\{mark}" for mark in "\\`*_[]|~$#"}, "&": "&amp;", "<": "&lt;", ">": "&gt;"})
MATHS = {"±": "pm", "×": "times", "·": "cdot", "→": "to", "≤": "le", "≥": "ge", "≈": "approx", "∞": "infty"}
GREEK = {"α": "alpha", "β": "beta", "γ": "gamma", "λ": "lambda", "μ": "mu", "σ": "sigma", "τ": "tau"}
ASCII = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "`": "asciigrave", "<": "less", ">": "greater"}
PROSE = {"|": "bar", "–": "endash", "—": "emdash", "…": "ellipsis", "‘": "quoteleft", "’": "quoteright"}
TEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    **{mark: f"{{{mark}}}" for mark in "[]*"},  # after the end of a row or a rule they would be read as its options
    **{mark: f"$\\{name}$" for mark, name in (MATHS | GREEK).items()},
    **{mark: f"\\text{name}{{}}" for mark, name in (ASCII | PROSE).items()},
    "°": r"$^\circ$",
    "−": "$-$",
}


class Shown(NamedTuple):
    """A cell in words: ours or what stands for it, the paper's in brackets or nothing, and whether ours is the best."""

    ours: str
    paper: str
    best: bool


def line(text: str) -> str:
    """The text in one line, without what cannot be printed."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def shown(sheet: Sheet) -> list[list[Shown]]:
    """Every cell in words, row by row. Ours are the best by the decimals that are shown: what looks equal is a tie."""
    best = [_best(sheet, column) for column in range(len(sheet.columns))]
    return [
        [Shown(_ours(sheet, cell), _paper(sheet, cell), _mean(sheet, cell) in top) for cell, top in pairs]
        for pairs in (zip(row, best, strict=True) for _, row in sheet.rows)
    ]


def cells(sheet: Sheet) -> list[list[str]]:
    """Every cell as a plain string, row by row, such as ``96.4 ± 0.2 [98.5]``."""
    return [[f"{cell.ours} {cell.paper}".strip() for cell in row] for row in shown(sheet)]


def heading(sheet: Sheet) -> str:
    """The title and, in brackets, the unit."""
    return line(f"{sheet.title} ({sheet.unit})" if sheet.unit else sheet.title)


def legend(sheet: Sheet) -> list[str]:
    """What the signs of this sheet mean; none that it does not show."""
    every = [cell for row in shown(sheet) for cell in row]
    counts = {cell.ours.count for _, row in sheet.rows for cell in row if cell.ours and "±" in _value(sheet, cell.ours)}
    said = ["bold: the best of ours in its column"] if any(cell.best for cell in every) else []
    if counts:
        said.append(f"±: standard error over {'–'.join(map(str, sorted({min(counts), max(counts)})))} measurements")
    return [*said, "[ ]: the paper's"] if any(cell.paper for cell in every) else said


def markdown(sheet: Sheet) -> str:
    """A section: the title as a heading, a table, and the legend."""
    rows = [
        (marked(label), *(" ".join(filter(None, (_strong(cell), cell.paper))) for cell in row))
        for (label, _), row in zip(sheet.rows, shown(sheet), strict=True)
    ]
    lines = [("", *map(marked, sheet.columns)), (":--", *["--:"] * len(sheet.columns)), *rows]
    table = "\n".join(f"| {' | '.join(each)} |" for each in lines)
    return "\n\n".join(filter(None, (f"## {marked(heading(sheet))}", table, "; ".join(legend(sheet))))) + "\n"


def marked(text: str) -> str:
    """The text in one line of Markdown that shows it as it is."""
    plain = line(text).translate(MARKED)
    return re.sub(r"^(\d*)([-+.)])(?=[\s-]|$)", r"\1\\\2", plain)  # would start a list, or be a rule


def latex(sheet: Sheet) -> str:
    """A ``table`` for the packages booktabs and xcolor, in the letters that every LaTeX knows.

    Accents are kept on Latin letters; a letter of another script becomes a question mark.
    """
    rows = [
        " & ".join((_tex(label), *map(_tex_cell, row)))
        for (label, _), row in zip(sheet.rows, shown(sheet), strict=True)
    ]
    head = " & ".join(("", *map(_tex, sheet.columns)))
    lines = [r"\toprule", rf"{head} \\", r"\midrule", *(rf"{row} \\" for row in rows), r"\bottomrule"]
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering\small",
            rf"  \caption{{{_tex(heading(sheet))}}}",
            rf"  \begin{{tabular}}{{l{'r' * len(sheet.columns)}}}",
            *(f"    {each}" for each in lines),
            r"  \end{tabular}",
            rf"  \par\smallskip{{\footnotesize {_tex('; '.join(legend(sheet)))}}}",
            "\\end{table}\n",
        ]
    )


def csv(sheet: Sheet) -> str:
    """One line for each cell, under the names of ``COLUMNS``; numbers in full, nothing where there is none."""
    return separated(COLUMNS, records(sheet))


def separated(names: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Comma-separated values under their names."""
    text = StringIO()
    writer(text, lineterminator="\n").writerows([names, *lines])
    return text.getvalue()


def records(sheet: Sheet) -> list[tuple[object, ...]]:
    """The values of ``COLUMNS`` for each cell, row by row."""
    return [
        (line(label), line(column), *_numbers(cell), line(cell.text))
        for label, row in sheet.rows
        for column, cell in zip(sheet.columns, row, strict=True)
    ]


def _numbers(cell: Cell) -> tuple[float | None, ...]:
    ours = (cell.ours.mean, cell.ours.error, cell.ours.count) if cell.ours else (None, None, None)
    return (*ours, *((cell.paper.mean, cell.paper.error) if cell.paper else (None, None)))


def _number(sheet: Sheet, number: float) -> str:
    return f"{number:z.{sheet.decimals}f}"  # z: no negative zero


def _value(sheet: Sheet, value: Value | None) -> str:
    """The number and its error; nothing of a number that is not there."""
    if value is None or isnan(value.mean):
        return ""
    mean = _number(sheet, value.mean)
    return mean if value.error is None or isnan(value.error) else f"{mean} ± {_number(sheet, value.error)}"


def _ours(sheet: Sheet, cell: Cell) -> str:
    return _value(sheet, cell.ours) or (line(cell.text) if cell.ours is None else "") or MISSING


def _paper(sheet: Sheet, cell: Cell) -> str:
    value = _value(sheet, cell.paper)
    return f"[{value}]" if value else ""


def _mean(sheet: Sheet, cell: Cell) -> float | None:
    return float(_number(sheet, cell.ours.mean)) if cell.ours and not isnan(cell.ours.mean) else None


def _best(sheet: Sheet, column: int) -> tuple[float, ...]:
    """The best mean of a column as it is shown; nothing where there is none."""
    means = [mean for _, row in sheet.rows if (mean := _mean(sheet, row[column])) is not None]
    return (max(means) if sheet.best == "high" else min(means),) if means and sheet.best else ()


def _strong(cell: Shown) -> str:
    return f"**{cell.ours}**" if cell.best else marked(cell.ours)


def _tex_cell(cell: Shown) -> str:
    ours = re.sub(r"^-(?=\d)", "$-$", _tex(cell.ours))
    paper = rf" \textcolor{{gray}}{{{_tex(cell.paper)}}}" if cell.paper else ""
    return (rf"\textbf{{{ours}}}" if cell.best else ours) + paper


def _tex(text: str) -> str:
    return re.sub("-(?=-)", "-{}", "".join(map(_letter, line(text))))  # two hyphens would become a dash


def _letter(letter: str) -> str:
    """A letter for LaTeX; an accent stays where the letter below it is Latin."""
    if letter in TEX or letter.isascii():
        return TEX.get(letter, letter)
    parts = normalize("NFKD", letter)
    if "À" <= letter <= "ÿ" and len(parts) == 2:
        return letter
    return "".join(TEX.get(part, part) for part in parts if part.isascii()) or "?"
