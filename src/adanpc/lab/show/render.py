"""Write sheets as text: Markdown, LaTeX, CSV, and the plain strings that every other form is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from csv import writer
from io import StringIO
from math import isnan
from typing import NamedTuple
from unicodedata import normalize

from adanpc.lab.show.exhibit import Cell, Sheet, Value
from adanpc.printable import on_one_line

MISSING = "–"
COLUMNS = ("row", "column", "ours", "error", "count", "paper", "paper_error", "text")

# Characters that Markdown would read as markup, and how to write them.
MARKDOWN = str.maketrans(
    {
        **{mark: f"\\{mark}" for mark in "\\`*_[]|~$#"},
        "&": "&amp;",
        "<": "&lt;",
        ">": "&gt;",
    }
)

# Characters that LaTeX would read as markup or does not know, and the commands that print them.
MATH_COMMANDS = {
    "±": "pm",
    "×": "times",
    "·": "cdot",
    "→": "to",
    "≤": "le",
    "≥": "ge",
    "≈": "approx",
    "∞": "infty",
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "λ": "lambda",
    "μ": "mu",
    "σ": "sigma",
    "τ": "tau",
}
TEXT_COMMANDS = {
    "\\": "backslash",
    "~": "asciitilde",
    "^": "asciicircum",
    "`": "asciigrave",
    "<": "less",
    ">": "greater",
    "|": "bar",
    "–": "endash",
    "—": "emdash",
    "…": "ellipsis",
    "‘": "quoteleft",
    "’": "quoteright",
}
LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    **{mark: f"{{{mark}}}" for mark in "[]*"},  # after the end of a row or a rule, LaTeX would read them as its options
    **{mark: f"$\\{command}$" for mark, command in MATH_COMMANDS.items()},
    **{mark: f"\\text{command}{{}}" for mark, command in TEXT_COMMANDS.items()},
    "°": r"$^\circ$",
    "−": "$-$",
}


class Shown(NamedTuple):
    """A cell as text.

    Args:
        ours: our number with its error, or what is shown instead of it.
        paper: the paper's number in brackets, or an empty string.
        best: whether ours is the best of its column.
    """

    ours: str
    paper: str
    best: bool


def shown(sheet: Sheet) -> list[list[Shown]]:
    """Every cell as text, row by row.

    The best number is chosen among the rounded ones that are shown, so that two numbers that look equal are a tie.
    """
    best_means = [_best_mean(sheet, column) for column in range(len(sheet.columns))]
    rows = []
    for _, cells_of_row in sheet.rows:
        row = []
        for cell, best_mean in zip(cells_of_row, best_means, strict=True):
            mean = _rounded_mean(sheet, cell)
            is_best = mean is not None and mean == best_mean
            row.append(Shown(_ours(sheet, cell), _paper(sheet, cell), is_best))
        rows.append(row)
    return rows


def cells(sheet: Sheet) -> list[list[str]]:
    """Every cell as a plain string, row by row, such as ``96.4 ± 0.2 [98.5]``."""
    rows = []
    for row in shown(sheet):
        rows.append([f"{cell.ours} {cell.paper}".strip() for cell in row])
    return rows


def heading(sheet: Sheet) -> str:
    """The title and, in parentheses, the unit."""
    if sheet.unit:
        return on_one_line(f"{sheet.title} ({sheet.unit})")
    return on_one_line(sheet.title)


def legend(sheet: Sheet) -> list[str]:
    """What the signs in this sheet mean; only signs that it shows."""
    every_cell = [cell for row in shown(sheet) for cell in row]
    entries = []
    if any(cell.best for cell in every_cell):
        entries.append("bold: the best of ours in its column")
    counts = _counts_of_errors(sheet)
    if counts:
        span = f"{min(counts)}"
        if len(counts) > 1:
            span += f"–{max(counts)}"
        entries.append(f"±: standard error over {span} measurements")
    if any(cell.paper for cell in every_cell):
        entries.append("[ ]: the paper's")
    return entries


def markdown(sheet: Sheet) -> str:
    """A section: the title as a heading, a table, and the legend."""
    rows = [
        ["", *(marked(column) for column in sheet.columns)],
        [":--", *("--:" for _ in sheet.columns)],
    ]
    for (label, _), row in zip(sheet.rows, shown(sheet), strict=True):
        rows.append([marked(label), *(_markdown_cell(cell) for cell in row)])
    blocks = [
        f"## {marked(heading(sheet))}",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
    ]
    entries = legend(sheet)
    if entries:
        blocks.append("; ".join(entries))
    return "\n\n".join(blocks) + "\n"


def marked(text: str) -> str:
    """The text on one line, escaped so that Markdown shows it literally."""
    escaped = on_one_line(text).translate(MARKDOWN)
    # "1." or "-" at the start would begin a list, and "---" would be a rule.
    return re.sub(r"^(\d*)([-+.)])(?=[\s-]|$)", r"\1\\\2", escaped)


def latex(sheet: Sheet) -> str:
    """A ``table`` that needs the packages booktabs and xcolor, in letters that every LaTeX knows.

    Accents are kept on Latin letters; a letter of another script becomes a question mark.
    """
    head = " & ".join(["", *(_tex(column) for column in sheet.columns)])
    lines = [r"\toprule", rf"{head} \\", r"\midrule"]
    for (label, _), row in zip(sheet.rows, shown(sheet), strict=True):
        body = " & ".join([_tex(label), *(_tex_cell(cell) for cell in row)])
        lines.append(rf"{body} \\")
    lines.append(r"\bottomrule")
    alignment = "l" + "r" * len(sheet.columns)
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering\small",
            rf"  \caption{{{_tex(heading(sheet))}}}",
            rf"  \begin{{tabular}}{{{alignment}}}",
            *(f"    {each}" for each in lines),
            r"  \end{tabular}",
            rf"  \par\smallskip{{\footnotesize {_tex('; '.join(legend(sheet)))}}}",
            "\\end{table}\n",
        ]
    )


def csv(sheet: Sheet) -> str:
    """One line per cell with the columns ``COLUMNS``: numbers with all their digits, or nothing if there is none."""
    return separated(COLUMNS, records(sheet))


def separated(names: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """The lines as comma-separated values, below a line with the names of the columns."""
    text = StringIO()
    table = writer(text, lineterminator="\n")
    table.writerow(names)
    table.writerows(lines)
    return text.getvalue()


def records(sheet: Sheet) -> list[tuple[object, ...]]:
    """The values of ``COLUMNS`` for each cell, row by row."""
    return [
        (on_one_line(label), on_one_line(column), *_numbers(cell), on_one_line(cell.text))
        for label, row in sheet.rows
        for column, cell in zip(sheet.columns, row, strict=True)
    ]


def _numbers(cell: Cell) -> tuple[float | None, ...]:
    """Our mean, error and count, and the paper's mean and error; None for those that are missing."""
    ours: tuple[float | None, ...] = (None, None, None)
    if cell.ours:
        ours = (cell.ours.mean, cell.ours.error, cell.ours.count)
    paper: tuple[float | None, ...] = (None, None)
    if cell.paper:
        paper = (cell.paper.mean, cell.paper.error)
    return (*ours, *paper)


def _number(sheet: Sheet, number: float) -> str:
    return f"{number:z.{sheet.decimals}f}"  # z: no negative zero


def _value(sheet: Sheet, value: Value | None) -> str:
    """The number and its error as text; empty if there is no number."""
    if value is None or isnan(value.mean):
        return ""
    mean = _number(sheet, value.mean)
    if value.error is None or isnan(value.error):
        return mean
    return f"{mean} ± {_number(sheet, value.error)}"


def _counts_of_errors(sheet: Sheet) -> set[int]:
    """The numbers of measurements behind the errors that the sheet shows."""
    counts = set()
    for _, row in sheet.rows:
        for cell in row:
            if cell.ours and "±" in _value(sheet, cell.ours):
                counts.add(cell.ours.count)
    return counts


def _ours(sheet: Sheet, cell: Cell) -> str:
    """Our number, or else the text that says why there is none, or else a dash."""
    if cell.ours is None:
        return on_one_line(cell.text) or MISSING
    return _value(sheet, cell.ours) or MISSING


def _paper(sheet: Sheet, cell: Cell) -> str:
    value = _value(sheet, cell.paper)
    return f"[{value}]" if value else ""


def _rounded_mean(sheet: Sheet, cell: Cell) -> float | None:
    """Our mean as it is shown, or None if there is none."""
    if cell.ours is None or isnan(cell.ours.mean):
        return None
    return float(_number(sheet, cell.ours.mean))


def _best_mean(sheet: Sheet, column: int) -> float | None:
    """The best of our means in a column, as it is shown; None if none is emphasized."""
    if not sheet.best:
        return None
    means = [_rounded_mean(sheet, row[column]) for _, row in sheet.rows]
    known = [mean for mean in means if mean is not None]
    if not known:
        return None
    return max(known) if sheet.best == "high" else min(known)


def _markdown_cell(cell: Shown) -> str:
    ours = f"**{cell.ours}**" if cell.best else marked(cell.ours)
    return f"{ours} {cell.paper}" if cell.paper else ours


def _tex_cell(cell: Shown) -> str:
    text = re.sub(r"^-(?=\d)", "$-$", _tex(cell.ours))
    if cell.best:
        text = rf"\textbf{{{text}}}"
    if cell.paper:
        text += rf" \textcolor{{gray}}{{{_tex(cell.paper)}}}"
    return text


def _tex(text: str) -> str:
    letters = [_tex_letter(letter) for letter in on_one_line(text)]
    return re.sub("-(?=-)", "-{}", "".join(letters))  # two hyphens would become a dash


def _tex_letter(letter: str) -> str:
    """A letter for LaTeX; accents stay on Latin letters."""
    if letter in LATEX or letter.isascii():
        return LATEX.get(letter, letter)
    parts = normalize("NFKD", letter)
    if "À" <= letter <= "ÿ" and len(parts) == 2:  # one Latin letter and one accent
        return letter
    known = [LATEX.get(part, part) for part in parts if part.isascii()]
    return "".join(known) or "?"
