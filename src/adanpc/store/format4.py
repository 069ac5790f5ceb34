"""Files of formats 4, 5 and 6, which know less of a stream than today's: how to check and upgrade them.

Formats 4 and 5 are for the preset "safe", format 6 for files of either preset that hold codes of their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adanpc.core.guard import EARLIER_NUMBER_COUNTS, NUMBER_COUNT, completed
from adanpc.index.grid import Columns
from adanpc.store import check

CODED_VERSION = 6
WITHOUT_GAIN, WITHOUT_NOVELTY = EARLIER_NUMBER_COUNTS
# How many numbers precede the vectors of a stream, by format.
KNOWN_NUMBERS = {4: WITHOUT_GAIN, 5: WITHOUT_NOVELTY, CODED_VERSION: WITHOUT_NOVELTY}


def check_document(document: dict[str, Any]) -> None:
    """Raises unless a document of these formats has exactly its fields, each of the right type and in range."""
    check.check_document(upgraded_document(document))


def upgraded_document(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the equivalent document of today's format."""
    version = check.SAFE_VERSION
    if document["version"] == CODED_VERSION:
        version = check.CODED_VERSION
    return {**document, "version": version}


def beside_rows(document: dict[str, Any], found: Mapping[str, tuple[str, list[int]]]) -> dict[str, list[int]]:
    """Returns the shapes of what a file should hold besides its rows."""
    due = check.beside_rows(document, found)
    if check.STREAM in due:
        missing = NUMBER_COUNT - KNOWN_NUMBERS[document["version"]]
        due[check.STREAM] = [due[check.STREAM][0] - missing]
    return due


def upgraded(document: dict[str, Any], tensors: Columns) -> tuple[dict[str, Any], Columns]:
    """Returns the equivalent document and columns of today's format; what the file does not know is as at the start."""
    columns = dict(tensors)
    if check.STREAM in columns:
        columns[check.STREAM] = completed(columns[check.STREAM], document["bank"]["dim"], check.classes_of(document))
    return upgraded_document(document), columns
