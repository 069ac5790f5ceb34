"""The paper's own numbers, as it prints them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from adanpc.errors import AdaNPCError
from adanpc.lab.show.exhibit import Value


@cache
def _printed() -> dict[str, Any]:
    text = files("adanpc.lab.tables").joinpath("paper.toml").read_text(encoding="utf-8")
    printed: dict[str, Any] = tomllib.loads(text)["table"]
    return printed


def _pick(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """The value of a name, or an error that lists the names."""
    if name not in known:
        raise AdaNPCError(f"{kind} must be one of {', '.join(known)}; got {name}")
    return known[name]


def _rows(table: str, group: str) -> dict[str, list[Any]]:
    """The rows of a group by name, each with its cells as in the file."""
    groups = _pick("table", table, _printed())["rows"]
    chosen: dict[str, list[Any]] = _pick(f"group of {table}", group, groups)
    return chosen


def tables() -> dict[str, tuple[str, ...]]:
    """The tables by name, each with its groups (selection rules, batch sizes, …), or "all" if it has none."""
    return {name: tuple(table["rows"]) for name, table in _printed().items()}


def columns(table: str) -> tuple[str, ...]:
    """The headings of a table's columns, without the column of row names."""
    return tuple(_pick("table", table, _printed())["columns"])


def rows(table: str, group: str) -> tuple[str, ...]:
    """The row names of a group as printed and in that order; the paper spells some in two ways (Fishr, Fisher)."""
    return tuple(_rows(table, group))


def notes(table: str) -> tuple[str, ...]:
    """What to know before comparing with a table: contradictions with others, and cells that cannot be right."""
    return tuple(_pick("table", table, _printed())["notes"])


def cell(table: str, group: str, row: str, column: str) -> Value | None:
    """A number as printed, even if a note doubts it; None where the paper leaves the cell empty.

    Its count is always 1, because the paper does not say how many runs an error was computed from.
    """
    cells = _pick(f"row of {table}, {group}", row, _rows(table, group))
    by_column = dict(zip(columns(table), cells, strict=True))
    printed = _pick(f"column of {table}", column, by_column)
    match printed:
        case []:
            return None
        case [mean, error]:
            return Value(float(mean), float(error))
        case mean:
            return Value(float(mean))
