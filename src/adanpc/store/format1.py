"""Files of format 1, as the first release wrote them: how to check and upgrade them."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as brief
from typing import Any

from adanpc.core import Origin
from adanpc.core.table import VETOED
from adanpc.index.grid import Columns
from adanpc.store.check import FIELDS, NUMBER, ContentsError, check_fields

CENTERING = "centring"  # as it was spelled in format 1
MEAN = f"{CENTERING}.mean"
TOTAL = f"{CENTERING}.total"
FIELDS_1: dict[str, dict[str, Any]] = {
    "document": {
        "format": str, "version": int, "adanpc": str, "seal": str, "rows": int, "next_id": int, "bank": dict,
        "vetoes": list, "classifier": dict, "admission": dict, CENTERING: dict, "recipe": dict,
    },
    "bank": {"dim": int, "classes": int, "storage": str, "capacity": int | None, "evict": str, "soft": bool},
    "classifier": FIELDS["classifier"],
    "admission": dict.fromkeys(("min_confidence", "min_margin", "max_entropy", "class_quota"), NUMBER),
    CENTERING: {"mode": str, "prior": int, "count": int, "mean": bool},
    "recipe": FIELDS["recipe"],
}  # fmt: skip


def check_document(document: dict[str, Any]) -> None:
    """Raises unless a document of format 1 has exactly its fields, each of the right type and in range."""
    for part, fields in FIELDS_1.items():
        values = document if part == "document" else document[part]
        if part != "recipe" or values:
            check_fields(part, values, fields)
    for veto in document["vetoes"]:
        if not isinstance(veto, list) or [type(value) for value in veto] != [int, str, str]:
            raise ContentsError(f"a veto must be a row's id and two texts, who and why, got {brief(veto)}")


def beside_rows(document: dict[str, Any], found: Mapping[str, tuple[str, list[int]]]) -> dict[str, list[int]]:
    """Returns the shapes of what a file should hold besides its rows: the means, whatever it was found to hold."""
    shape = [document["bank"]["dim"]]
    if document[CENTERING]["mean"]:
        return {MEAN: shape, TOTAL: shape}
    return {TOTAL: shape}


def upgraded(document: dict[str, Any], tensors: Columns) -> tuple[dict[str, Any], Columns]:
    """Returns the equivalent document and columns of format 2.

    Format 1 had no positions and no times, and did not record who restored or relabeled a row.
    """
    _check_rows(document, tensors)
    columns = dict(tensors)
    centering = document[CENTERING]
    total = columns.pop(TOTAL)
    if centering["count"]:
        columns["stream_total"] = total
    if centering["mean"]:
        columns["source_mean"] = columns.pop(MEAN)
    judgments = []
    labels = tensors["label"][tensors["state"] == VETOED].tolist()
    for (row, who, why), label in zip(document["vetoes"], labels, strict=True):
        judgments.append([row, [["veto", label, who, why, None]]])
    upgraded_document = {
        "format": document["format"],
        "version": 2,
        "adanpc": document["adanpc"],
        "seal": document["seal"],
        "rows": document["rows"],
        "next_id": document["next_id"],
        "position": 0,
        "judgments": judgments,
        "deleted": [],
        "stream_count": centering["count"],
        "bank": {**document["bank"], "seed": 0},  # the ranks of a reservoir used to be the same for every bank
        "classifier": document["classifier"],
        "admission": {**document["admission"], "max_copies": "inf"},
        # Means used to be taken of features at their original length.
        "centering": {"mode": centering["mode"], "prior": centering["prior"], "unit_features": False},
        "recipe": document["recipe"],
    }
    return upgraded_document, columns


def _check_rows(document: dict[str, Any], tensors: Columns) -> None:
    """Raises unless the vetoes are those of the vetoed rows, and the admitted rows, even vetoed, fit the capacity."""
    vetoed = tensors["id"][tensors["state"] == VETOED].tolist()
    if [row for row, _, _ in document["vetoes"]] != vetoed:
        raise ContentsError(f"its vetoes do not name its vetoed rows, {brief(vetoed)}, in this order")
    admitted = int((tensors["origin"] == Origin.ADMITTED).sum())
    capacity = document["bank"]["capacity"]
    if capacity is not None and admitted > capacity:
        raise ContentsError(f"it holds {admitted} admitted rows, more than its capacity of {capacity}")
