"""Writes the table of all test-time methods into methods.md, from what their classes say of themselves.

    python docs/methods_table.py

A test fails while the page and the classes differ.
"""

from __future__ import annotations

import re
from inspect import getdoc
from pathlib import Path

from adanpc.lab.adapt import ADAPTERS, Adapter

PAGE = Path(__file__).parent / "methods.md"
START = "<!-- The table is written by docs/methods_table.py. -->"
END = "<!-- End of the table. -->"
ADANPC = "Zhang et al., AdaNPC: Exploring Non-Parametric Classifier for Test-Time Adaptation, ICML 2023"
PAPER = re.compile(r"^Paper:\s*(.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
UP_TO_THE_YEAR = re.compile(r".*?\b(?:19|20)\d\d\b")


def table() -> str:
    """The table: one line for each method."""
    lines = ["| name | paper | takes | needs |", "|---|---|---|---|"]
    for name, method in ADAPTERS.items():
        lines.append(f"| `{name}` | {paper(name, method)} | {method.sees} | {needs(method)} |")
    return "\n".join(lines)


def paper(name: str, method: type[Adapter]) -> str:
    """The paper that the docstring of a method names, up to its year."""
    found = PAPER.search(getdoc(method) or "")
    if found is not None:
        cited = UP_TO_THE_YEAR.match(" ".join(found[1].split()))
        if cited is not None:
            return cited[0]
    return ADANPC if name.startswith("adanpc") else "–"


def needs(method: type[Adapter]) -> str:
    """What a method cannot do without, besides a model and a batch of one."""
    if method.needs_rotation_head:
        return "a model trained with rotations"
    if method.least > 1:
        return f"batches of {method.least}"
    return "–"


def with_table(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
