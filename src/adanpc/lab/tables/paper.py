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
    if name not in known:
        raise AdaNPCError(f"{kind} must be one of {', '.join(known)}; got {name}")
    return known[name]


def _rows(table: str, group: str) -> dict[str, list[Any]]:
    chosen: dict[str, list[Any]] = _pick(f"group of {table}", group, _pick("table", table, _printed())["rows"])
    return chosen


def tables() -> dict[str, tuple[str, ...]]:
    """Every table by name, with its groups: selection rules, batch sizes and the like, or "all" where it has none."""
    return {name: tuple(table["rows"]) for name, table in _printed().items()}


def columns(table: str) -> tuple[str, ...]:
    """The headings of a table, without that of its rows."""
    return tuple(_pick("table", table, _printed())["columns"])


def rows(table: str, group: str) -> tuple[str, ...]:
    """The names of the rows of a group in printed order; a name may differ between tables (Fishr, Fisher)."""
    return tuple(_rows(table, group))


def notes(table: str) -> tuple[str, ...]:
    """What to know before comparing with a table: contradictions with others, and cells that cannot be right."""
    return tuple(_pick("table", table, _printed())["notes"])


def cell(table: str, group: str, row: str, column: str) -> Value | None:
    """A number as printed, also where a note doubts it; None where the paper leaves the cell empty.

    The count is always 1: over how many runs an error was taken is not clear from the paper.
    """
    cells = _pick(f"row of {table}, {group}", row, _rows(table, group))
    printed = _pick(f"column of {table}", column, dict(zip(columns(table), cells, strict=True)))
    match printed:
        case []:
            return None
        case [mean, error]:
            return Value(float(mean), float(error))
        case mean:
            return Value(float(mean))
