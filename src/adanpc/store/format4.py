"""Files of format 4, the second of the preset "safe": how they are checked, and what they mean today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adanpc.core.guard import HEAD, HEAD_BEFORE, completed
from adanpc.index.grid import Columns
from adanpc.store import check


def check_document(document: dict[str, Any]) -> None:
    """Passes a document of format 4 that has all its fields and no other, each of its type and range."""
    check.check_document({**document, "version": check.SAFE_VERSION})


def beside_rows(document: dict[str, Any], found: Mapping[str, tuple[str, list[int]]]) -> dict[str, list[int]]:
    """The shapes of what a file should hold beside its rows."""
    due = check.beside_rows(document, found)
    if check.STREAM in due:
        due[check.STREAM] = [due[check.STREAM][0] - HEAD + HEAD_BEFORE]
    return due


def upgraded(document: dict[str, Any], tensors: Columns) -> tuple[dict[str, Any], Columns]:
    """The document and the columns of format 5 that mean the same: no gain is known."""
    columns = dict(tensors)
    if check.STREAM in columns:
        columns[check.STREAM] = completed(columns[check.STREAM], document["bank"]["dim"], check.classes_of(document))
    return {**document, "version": check.SAFE_VERSION}, columns
