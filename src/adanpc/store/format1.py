"""Files of format 1, as the first release wrote them: their documents and columns in today's words."""

from __future__ import annotations

from reprlib import repr as brief
from typing import Any

from adanpc.index.grid import Columns
from adanpc.store.check import FIELDS, NUMBER, ContentsError, check_fields

CENTERING = "centring"  # as it was spelled
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
RENAMED = {f"{CENTERING}.mean": "source_mean", f"{CENTERING}.total": "stream_total"}


def check_document(document: dict[str, Any]) -> None:
    """Passes a document of format 1 that has all its fields and no other, each of its type and range."""
    for part, fields in FIELDS_1.items():
        values = document if part == "document" else document[part]
        if part != "recipe" or values:
            check_fields(part, values, fields)
    for veto in document["vetoes"]:
        if not isinstance(veto, list) or [type(value) for value in veto] != [int, str, str]:
            raise ContentsError(f"a veto must be a row's id and two texts, who and why, got {brief(veto)}")


def renamed(found: dict[str, Any]) -> dict[str, Any]:
    """What belongs to columns, by the names that they have today."""
    return {RENAMED.get(name, name): value for name, value in found.items()}


def check_means(document: dict[str, Any], found: dict[str, Any]) -> None:
    """Passes columns that have the means that the document announces."""
    centering = document[CENTERING]
    if "stream_total" not in found or ("source_mean" in found) != centering["mean"]:
        raise ContentsError(f"its columns {brief(sorted(found))} do not have the means that its document announces")


def upgraded(document: dict[str, Any], tensors: Columns) -> dict[str, Any]:
    """The document in today's format. Format 1 knew neither positions, nor times, nor what had been restored."""
    label_of = dict(zip(tensors["id"].tolist(), tensors["label"].tolist(), strict=True))
    judgments = []
    for row, who, why in document["vetoes"]:
        if row not in label_of:
            raise ContentsError(f"its vetoes name row {row}, which it does not hold")
        judgments.append([row, [["veto", label_of[row], who, why, None]]])
    centering = document[CENTERING]
    return {
        "format": document["format"],
        "version": 2,
        "adanpc": document["adanpc"],
        "seal": document["seal"],
        "rows": document["rows"],
        "next_id": document["next_id"],
        "position": 0,
        "judgments": judgments,
        "stream_count": centering["count"],
        "bank": {**document["bank"], "seed": 0},  # ranks of a reservoir were the same for every bank
        "classifier": document["classifier"],
        "admission": {**document["admission"], "max_copies": "inf"},
        # Means were taken of features as long as they came.
        "centering": {"mode": centering["mode"], "prior": centering["prior"], "unit_features": False},
        "recipe": document["recipe"],
    }
