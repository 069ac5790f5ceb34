"""Checks of what a bank file holds. A seal can be forged along with the rest, so no check here relies on it."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as brief
from sys import float_info
from typing import Any

from adanpc.core import Origin
from adanpc.core.codec import (
    NAMES,
    PREFIX_OF_TRANSFORM,
    TRANSFORM,
    judgments_from_json,
    judgments_to_json,
    take_transform,
)
from adanpc.core.contents import BESIDE_ROWS, class_names
from adanpc.core.estimate import PACKED
from adanpc.core.guard import packed_length
from adanpc.core.table import (
    ACTIVE,
    VETOED,
    TableError,
    check_judgments,
    check_mean,
    check_rows,
    check_stream,
    check_transform,
)
from adanpc.core.transform import SAMPLE
from adanpc.errors import AdaNPCError
from adanpc.index.grid import Columns

FORMAT = "adanpc-bank"
VERSION = 8  # the newest format that can be read
CODED_VERSION = 8  # the format of files with codes of their rows, for either preset
SAFE_VERSION = 7  # the format of other files with the preset "safe"
PAPER_VERSION = 2  # the format of other files with the preset "paper", which earlier releases can read
CODES = "codes."  # prefix of the names of columns that hold codes
LARGEST = 2**53  # every JSON reader represents whole numbers exactly up to here
WIDEST = 2**24  # a file must not make its reader allocate more than the file itself holds
SIZES = ("dim", "classes", "k", "k_source", "k_target")
NUMBER = int | float | str  # see ``number``
PAPER_PARTS = ("classifier", "admission", "centering")  # the settings of the preset "paper"
SAFE_PARTS = ("safe",)  # the settings of the preset "safe"
FIELDS: dict[str, dict[str, Any]] = {
    "document": {
        "format": str, "version": int, "adanpc": str, "seal": str, "rows": int, "next_id": int, "position": int,
        "judgments": list, "deleted": list, "stream_count": int, "bank": dict, "recipe": dict,
    },
    "bank": {
        "dim": int, "classes": int | list, "storage": str, "capacity": int | None, "evict": str, "soft": bool,
        "seed": int,
    },
    "classifier": {"k": int, "k_source": int | None, "k_target": int | None, "rule": str, "temperature": NUMBER},
    "admission": dict.fromkeys(
        ("min_confidence", "min_margin", "max_entropy", "class_quota", "max_copies"), NUMBER
    ),
    "safe": {
        "stream": str, "transform": bool, "screen": bool, "guard": bool, "balance": NUMBER, "carry": bool, "home": bool,
    },
    "centering": {"mode": str, "prior": int, "unit_features": bool},
    "recipe": {"layer": str, "preprocessing": str, "weights": str},
}  # fmt: skip
MEANS = ("source_mean", "stream_total")
ORIGIN = "transform.origin"
TRANSFORM_PARTS = tuple(PREFIX_OF_TRANSFORM + name for name in TRANSFORM if name != "origin")
FOREIGN = "transform.foreign"  # this and the next three hold no vectors
CALIBRATION = "transform.calibration"
POWER = "transform.power"
VOTERS = "transform.voters"
STREAM = "stream"


class BankFileError(AdaNPCError):
    """A bank file cannot be read or written; the message names the file, what is wrong, and the remedy."""

    code = "bad-bank-file"


class ContentsError(AdaNPCError):
    """The contents of a file are wrong; a BankFileError later adds the name of the file."""

    code = "bad-bank-contents"

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


class NewerContentsError(ContentsError):
    """The contents are in a format that only a newer adanpc can read."""


def number(value: Any) -> float:
    """Returns the number that a document holds; infinities, which JSON lacks, are the strings "inf" and "-inf"."""
    if value not in ("inf", "-inf") and (isinstance(value, str) or not abs(value) <= float_info.max):
        raise ContentsError(f"temperature, balance and admission must be numbers, got {brief(value)}")
    return float(value)


def check_header(document: Any) -> int:
    """Returns the format version of a document; raises a ContentsError unless it is a bank that can be read."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ContentsError("it is a safetensors file but not a bank", "give a file that adanpc saved")
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise ContentsError(f"version in its document has the wrong type: {brief(version)}")
    if version > VERSION:
        newer = f"it was written by a newer adanpc, in format {brief(version)} after {VERSION}"
        raise NewerContentsError(newer, "upgrade adanpc")
    if version < 1:
        raise ContentsError(f"there is no format {brief(version)}")
    return version


def version_of(document: dict[str, Any]) -> int:
    """Returns the version of the format in which a document without codes is written."""
    return SAFE_VERSION if "safe" in document else PAPER_VERSION


def check_document(document: dict[str, Any]) -> None:
    """Raises unless a document of format 2, 7 or 8 has exactly its fields, each of the right type and in range."""
    parts = SAFE_PARTS if "safe" in document else PAPER_PARTS
    fields = FIELDS["document"] | dict.fromkeys(parts, dict)
    if document["version"] == CODED_VERSION:
        fields |= {"signature": str, "row_sha256": str}
    check_fields("document", document, fields)
    for part in ("bank", *parts, "recipe"):
        if part != "recipe" or document[part]:  # the recipe of a bank without a model is empty
            check_fields(part, document[part], FIELDS[part])
    if document["version"] not in (version_of(document), CODED_VERSION):
        raise ContentsError(f"its settings are not those of format {document['version']}")
    if "safe" in document and not document["bank"]["soft"]:
        raise ContentsError("it is of the preset 'safe' and keeps no probabilities in its rows")
    judgments = judgments_from_json(document["judgments"])
    for row, history in judgments.items():
        if row >= document["next_id"]:
            raise ContentsError(f"its judgments are of row {brief(row)}, which never existed")
        if not history:
            raise ContentsError(f"its judgments of row {row} are empty")
    _check_deleted(document)
    if judgments_to_json(judgments) != document["judgments"]:
        raise ContentsError("its judgments are not written as adanpc writes them: each row once, in the order of ids")


def _check_deleted(document: dict[str, Any]) -> None:
    """Raises unless the deleted ids are those of rows that existed, in ascending order and without repeats."""
    before = -1
    for row in document["deleted"]:
        if not isinstance(row, int) or isinstance(row, bool) or not before < row < document["next_id"]:
            raise ContentsError(f"deleted in its document must be ids of rows, each once and rising, got {brief(row)}")
        before = row


def check_fields(part: str, values: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raises a ContentsError unless the values have exactly these fields, each of the right type and in range."""
    wrong = sorted(map(str, fields.keys() ^ values.keys()))
    if wrong:
        raise ContentsError(f"its {part} has missing or unknown fields: {brief(wrong)}")
    for name, kind in fields.items():
        value = values[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ContentsError(f"{name} in its {part} has the wrong type: {brief(value)}")
        if kind is NUMBER:
            number(value)
            continue
        most = WIDEST if name in SIZES else LARGEST
        if isinstance(value, int) and not 0 <= value <= most:
            raise ContentsError(f"{name} in its {part} must be between 0 and {most}, got {brief(value)}")


def beside_rows(document: dict[str, Any], found: Mapping[str, tuple[str, list[int]]]) -> dict[str, list[int]]:
    """Returns the shapes of what a file of format 2, 7 or 8 should hold besides its rows: what it has or must have."""
    dim = document["bank"]["dim"]
    due = {name: [dim] for name in (*MEANS, ORIGIN) if name in found}
    if document["stream_count"]:
        due["stream_total"] = [dim]
    if STREAM in found or ORIGIN in found:
        due[ORIGIN] = [dim]  # statistics of a stream always come with a transform
        for name in TRANSFORM_PARTS:
            due[name] = _shape_of_part(name, found.get(name, ("", []))[1], dim)
    if STREAM in found:
        due[STREAM] = [packed_length(dim, classes_of(document))]
    return due


def _shape_of_part(name: str, given: list[int], dim: int) -> list[int]:
    """Returns the shape that a part of a transform should have: the given number of rows, up to the maximum."""
    rows = given[0] if given else 0
    if name == FOREIGN:
        return [min(rows, SAMPLE)]
    if name == CALIBRATION:
        return [PACKED]
    if name in (POWER, VOTERS):
        return [1]
    return [min(rows, dim), dim]


def classes_of(document: dict[str, Any]) -> int:
    """Returns the number of classes of a document's bank."""
    classes = document["bank"]["classes"]
    return len(class_names(classes)) or int(classes)


def check_columns(
    document: dict[str, Any],
    table: Columns,
    beside: Mapping[str, list[int]],
    found: Mapping[str, tuple[str, list[int]]],
) -> None:
    """Raises unless types and shapes are those that follow from the document; called before columns are read.

    Args:
        document: a document of any format.
        table: the columns of an empty bank with the document's settings.
        beside: the shapes of what the file should hold besides the rows.
        found: the types and shapes in the file.
    """
    wanted = {name: (NAMES[made.dtype], [document["rows"], *made.shape[1:]]) for name, made in table.items()}
    for name, shape in beside.items():
        wanted[name] = ("F64", shape)
    # Missing and unknown columns are reported first, because they explain the other errors.
    for name in sorted(wanted.keys() | found.keys(), key=lambda name: (name in wanted and name in found, name)):
        given = found.get(name, "absent")
        due = wanted.get(name, "absent")
        if given != due:
            raise ContentsError(f"its column {brief(name)} is {brief(given)} and should be {brief(due)}")


def check_tensors(document: dict[str, Any], tensors: Columns) -> None:
    """Raises unless the document's bank can hold these columns, of the right types and shapes, and means are finite."""
    config = document["bank"]
    classes = classes_of(document)
    table = {name: column for name, column in tensors.items() if name not in BESIDE_ROWS}
    ids = table["id"]
    try:
        check_rows(table, classes, document["next_id"])
        held = set(ids.tolist())
        vetoed = set(ids[table["state"] == VETOED].tolist())
        check_judgments(judgments_from_json(document["judgments"]), held, vetoed, classes)
        for name in MEANS:
            if name in tensors:
                check_mean(name, tensors[name], config["dim"])
        transform = take_transform(dict(tensors))
        if transform is not None:
            check_transform(transform, config["dim"])
        if STREAM in tensors:
            check_stream(tensors[STREAM], config["dim"], classes)
    except TableError as flaw:
        raise ContentsError(str(flaw)) from None
    back = held.intersection(document["deleted"])
    if back:
        raise ContentsError(f"it holds row {min(back)}, which was deleted")
    admitted = int(((table["origin"] == Origin.ADMITTED) & (table["state"] == ACTIVE)).sum())
    if config["capacity"] is not None and admitted > config["capacity"]:
        raise ContentsError(f"it holds {admitted} admitted rows, more than its capacity of {config['capacity']}")
