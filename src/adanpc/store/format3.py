"""Files of format 3, the first for the preset "safe": how to check and upgrade them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from adanpc.core.estimate import UNKNOWN
from adanpc.core.guard import NUMBER_COUNT, Stream
from adanpc.core.vote import PER_CLASS
from adanpc.index.grid import Columns
from adanpc.store import check
from adanpc.store.check import FIELDS, ContentsError

SAFE = {name: FIELDS["safe"][name] for name in ("stream", "guard", "balance")}
VECTORS = ("transform.directions", "transform.damped", "transform.span")
KNOWN_NUMBERS = 4  # how many numbers precede the vectors of a stream in format 3


def check_document(document: dict[str, Any]) -> None:
    """Raises unless a document of format 3 has exactly its fields, each of the right type and in range."""
    if not isinstance(document.get("safe"), dict):
        raise ContentsError("its settings are not those of format 3")
    check.check_fields("safe", document["safe"], SAFE)
    check.check_document(upgraded_document(document))


def upgraded_document(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the equivalent document of today's format; in format 3, every query joined."""
    safe = {"transform": True, "screen": False, "carry": False, "home": False, **document["safe"]}
    return {**document, "version": check.SAFE_VERSION, "safe": safe}


def beside_rows(document: dict[str, Any], found: Mapping[str, tuple[str, list[int]]]) -> dict[str, list[int]]:
    """Returns the shapes of what a file should hold besides its rows."""
    due = check.beside_rows(document, found)
    for name in check.TRANSFORM_PARTS:
        if name not in VECTORS:
            due.pop(name, None)
    if check.STREAM in due:
        classes = check.classes_of(document)
        due[check.STREAM] = [KNOWN_NUMBERS + document["bank"]["dim"] + 3 * classes]
    return due


def upgraded(document: dict[str, Any], tensors: Columns) -> tuple[dict[str, Any], Columns]:
    """Returns the equivalent document and columns of today's format: nothing is amplified, and nothing is foreign."""
    columns = dict(tensors)
    if check.ORIGIN in columns:
        nothing = torch.zeros(0, document["bank"]["dim"], dtype=torch.float64)
        columns[check.POWER] = torch.tensor([0.5], dtype=torch.float64)
        columns["transform.telling"] = nothing
        columns["transform.amplified"] = nothing.clone()
        columns[check.FOREIGN] = torch.zeros(0, dtype=torch.float64)
        columns[check.CALIBRATION] = torch.tensor(UNKNOWN, dtype=torch.float64)
        columns[check.VOTERS] = torch.tensor([PER_CLASS], dtype=torch.float64)
    if check.STREAM in columns:
        stream = columns[check.STREAM]
        classes = check.classes_of(document)
        nothing_known = Stream.none(torch.zeros(document["bank"]["dim"]), classes).packed()
        known = stream[:KNOWN_NUMBERS]
        since = nothing_known[KNOWN_NUMBERS:NUMBER_COUNT]
        columns[check.STREAM] = torch.cat([known, since, stream[KNOWN_NUMBERS:], nothing_known[-classes:]])
    return upgraded_document(document), columns
