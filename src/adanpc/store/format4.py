"""Files of format 4, the second for the preset "safe": how to check and upgrade them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adanpc.core.guard import HEAD, HEAD_BEFORE, completed
from adanpc.index.grid import Columns
from adanpc.store import check


def check_document(document: dict[str, Any]) -> None:
    """Raises unless a document of format 4 has exactly its fields, each of the right type and in range."""
    check.check_document({**document, "version": check.SAFE_VERSION})


def beside_rows(document: dict[str, Any], found: Mapping[str, tuple[str, list[int]]]) -> dict[str, list[int]]:
    """Returns the shapes of what a file should hold besides its rows."""
    due = check.beside_rows(document, found)
    if check.STREAM in due:
        due[check.STREAM] = [due[check.STREAM][0] - HEAD + HEAD_BEFORE]
    return due


def upgraded(document: dict[str, Any], tensors: Columns) -> tuple[dict[str, Any], Columns]:
    """Returns the equivalent document and columns of format 5, in which no gain is known."""
    columns = dict(tensors)
    if check.STREAM in columns:
        columns[check.STREAM] = completed(columns[check.STREAM], document["bank"]["dim"], check.classes_of(document))
    return {**document, "version": check.SAFE_VERSION}, columns
