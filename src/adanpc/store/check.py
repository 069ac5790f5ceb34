"""What a bank file must hold. A seal can be forged with the rest, so no check here relies on it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from reprlib import repr as brief
from sys import float_info
from typing import Any

import torch
from torch import Tensor

from adanpc.core import Origin
from adanpc.core.codec import NAMES, judgments_from_json, judgments_to_json
from adanpc.core.contents import ACTIVE, VETOED
from adanpc.errors import AdaNPCError
from adanpc.index.grid import GRID, Columns, decode

FORMAT = "adanpc-bank"
VERSION = 2
LARGEST = 2**53  # up to here every JSON reader keeps whole numbers exactly
WIDEST = 2**24  # a file must not make its reader allocate more than it holds itself
SIZES = ("dim", "classes", "k", "k_source", "k_target")
CHUNK = 1 << 18  # coordinates checked at once: what the cache holds
LENGTH = 0.01  # how far from one a row's length may be; int8 rounds by less than 0.002 at D = 8192
NUMBER = int | float | str  # see ``number``
PARTS = ("bank", "classifier", "admission", "centering", "recipe")
FIELDS: dict[str, dict[str, Any]] = {
    "document": {
        "format": str, "version": int, "adanpc": str, "seal": str, "rows": int, "next_id": int, "position": int,
        "judgments": list, "stream_count": int, "bank": dict, "classifier": dict, "admission": dict, "centering": dict,
        "recipe": dict,
    },
    "bank": {
        "dim": int, "classes": int, "storage": str, "capacity": int | None, "evict": str, "soft": bool, "seed": int,
    },
    "classifier": {"k": int, "k_source": int | None, "k_target": int | None, "rule": str, "temperature": NUMBER},
    "admission": dict.fromkeys(
        ("min_confidence", "min_margin", "max_entropy", "class_quota", "max_copies"), NUMBER
    ),
    "centering": {"mode": str, "prior": int, "unit_features": bool},
    "recipe": {"layer": str, "preprocessing": str, "weights": str},
}  # fmt: skip
MEANS = ("source_mean", "stream_total")  # tensors that a file may lack


class BankFileError(AdaNPCError):
    """A bank file that cannot be read or written; the message names the file, what is wrong, and the remedy."""

    code = "bad-bank-file"


class ContentsError(AdaNPCError):
    """What is wrong with a file's contents, until a BankFileError adds whose they are."""

    code = "bad-bank-contents"

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


def number(value: Any) -> float:
    """The number that a document holds; infinities, which JSON lacks, are the texts inf and -inf."""
    if value not in ("inf", "-inf") and (isinstance(value, str) or not abs(value) <= float_info.max):
        raise ContentsError(f"temperature and admission must be numbers, got {brief(value)}")
    return float(value)


def check_header(document: Any) -> int:
    """The version of a document, if it is a bank's and this adanpc can read it."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ContentsError("it is a safetensors file but not a bank", "give a file that adanpc saved")
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise ContentsError(f"version in its document has the wrong type: {brief(version)}")
    if version > VERSION:
        newer = f"it was written by a newer adanpc, in format {brief(version)} after {VERSION}"
        raise ContentsError(newer, "upgrade adanpc")
    if version < 1:
        raise ContentsError(f"there is no format {brief(version)}")
    return version


def check_document(document: dict[str, Any]) -> None:
    """Passes a document of the newest format that has all its fields and no other, each of its type and range."""
    check_fields("document", document, FIELDS["document"])
    for part in PARTS:
        if part != "recipe" or document[part]:  # a bank without a model has none
            check_fields(part, document[part], FIELDS[part])
    judgments = judgments_from_json(document["judgments"])
    for row, history in judgments.items():
        if row >= document["next_id"]:
            raise ContentsError(f"its judgments are of row {brief(row)}, which never existed")
        if not history:
            raise ContentsError(f"its judgments of row {row} are empty")
    if judgments_to_json(judgments) != document["judgments"]:
        raise ContentsError("its judgments are not written as adanpc writes them: each row once, in the order of ids")


def check_fields(part: str, values: dict[str, Any], fields: dict[str, Any]) -> None:
    """Passes values that have these fields and no other, each of its type and range."""
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
            raise ContentsError(f"{name} in its {part} must lie in 0 … {most}, got {brief(value)}")


def means_of(document: dict[str, Any], found: Collection[str]) -> list[str]:
    """The means that a file of the newest format should hold: those that it has, and the one that it cannot lack."""
    means = [name for name in MEANS if name in found]
    if document["stream_count"] and "stream_total" not in means:
        means.append("stream_total")
    return means


def check_columns(
    document: dict[str, Any], table: Columns, means: Collection[str], found: dict[str, tuple[str, list[int]]]
) -> None:
    """Passes types and shapes that follow from the document, before anything of that size is read.

    Args:
        document: of any format.
        table: of an empty bank with the document's settings.
        means: names of the means that there should be.
        found: what there is.
    """
    wanted = {name: (NAMES[made.dtype], [document["rows"], *made.shape[1:]]) for name, made in table.items()}
    for name in means:
        wanted[name] = ("F64", [document["bank"]["dim"]])
    # Columns that are missing or unknown come first: they explain the others.
    for name in sorted(wanted.keys() | found.keys(), key=lambda name: (name in wanted and name in found, name)):
        given = found.get(name, "absent")
        due = wanted.get(name, "absent")
        if given != due:
            raise ContentsError(f"its column {brief(name)} is {brief(given)} and should be {brief(due)}")


def check_tensors(document: dict[str, Any], tensors: Columns) -> None:
    """Passes columns that the bank of this document can hold, and finite means."""
    ids = tensors["id"]
    config = document["bank"]
    _check_ids(ids, document["next_id"])
    for bad, what in _bad_columns(config, tensors):
        _refuse(bad, ids, what)
    names = [name for name in ("row", "fine", "scale", "residual") if name in tensors]
    step = max(1, CHUNK // config["dim"])
    for start in range(0, len(ids), step):
        for bad, what in _bad_rows({name: tensors[name][start : start + step] for name in names}):
            _refuse(bad, ids[start : start + step], what)
    _check_judgments(document, tensors)
    voting = (tensors["origin"] == Origin.ADMITTED) & (tensors["state"] == ACTIVE)
    admitted = int(voting.sum())
    if config["capacity"] is not None and admitted > config["capacity"]:
        raise ContentsError(f"it holds {admitted} admitted rows, more than its capacity of {config['capacity']}")
    for name in MEANS:
        if name in tensors and not tensors[name].isfinite().all():
            raise ContentsError(f"its {name} holds NaN or infinity")


def _check_judgments(document: dict[str, Any], tensors: Columns) -> None:
    """Passes judgments of rows that are there, and states that are what was decided last."""
    ids = tensors["id"]
    judgments = judgments_from_json(document["judgments"])
    judged = torch.tensor(list(judgments), dtype=torch.int64)
    absent = judged[~torch.isin(judged, ids)]
    if len(absent):
        raise ContentsError(f"its judgments are of row {int(absent[0])}, which it does not hold")
    vetoed_last = []
    for row, history in judgments.items():
        if any(judgment.label >= document["bank"]["classes"] for judgment in history):
            raise ContentsError(f"its judgments of row {row} name a label outside its classes")
        decisions = [judgment.verdict for judgment in history if judgment.verdict != "relabel"]
        if decisions and decisions[-1] == "veto":
            vetoed_last.append(row)
    vetoed = ids[tensors["state"] == VETOED].tolist()
    if vetoed_last != vetoed:
        by_judgment = f"by its judgments, the vetoed rows are {brief(vetoed_last)}"
        raise ContentsError(f"{by_judgment}, but by their states {brief(vetoed)}")


def _refuse(bad: Tensor, ids: Tensor, what: str) -> None:
    if bad.any():
        raise ContentsError(f"row {int(ids[bad.nonzero()[0, 0]])} {what}")


def _check_ids(ids: Tensor, next_id: int) -> None:
    if (ids[1:] <= ids[:-1]).any():
        raise ContentsError("its ids do not rise from row to row")
    if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < next_id:
        raise ContentsError(f"its ids, {int(ids[0])} … {int(ids[-1])}, must lie in 0 … next_id - 1, {next_id - 1}")


def _bad_columns(config: dict[str, Any], tensors: Columns) -> Iterator[tuple[Tensor, str]]:
    label = tensors["label"]
    state = tensors["state"]
    classes = config["classes"]
    yield (label < 0) | (label >= classes), f"has a label outside 0 … {classes - 1}"
    yield (state != ACTIVE) & (state != VETOED), "is neither active nor vetoed"
    yield tensors["origin"] > max(Origin), "has an unknown origin"
    yield ~tensors["confidence"].isfinite(), "has a confidence that is NaN or infinite"
    if config["soft"]:
        soft = tensors["soft"]
        probabilities = (soft >= 0).all(1) & ((soft.sum(1) - 1).abs() <= 1e-3)
        yield ~probabilities, "has soft labels that are not probabilities"


def _bad_rows(part: Columns) -> Iterator[tuple[Tensor, str]]:
    """Rows for which search would not be exact; every comparison is turned so that NaN is bad."""
    if part["row"].dtype == torch.float32:
        yield ((part["row"] * GRID).frac() != 0).any(1), "is NaN, infinite or off the grid of 2**-24"
    rows = decode(part).double()
    if "fine" in part:
        scale = part["scale"].double()
        yield ~((scale > 0) & scale.isfinite()), "has a scale that is not a positive number"
        yield ((part["row"] == -128) | (part["fine"] == -128)).any(1), "has a code outside -127 … 127"
        hidden = (rows - part["row"].double() * scale).norm(dim=1, keepdim=True) * 1.0001
        # Machines round a sum in different orders; this is far less than the room that 1.0001 leaves.
        yield ~((part["residual"].double() - hidden).abs() <= 1e-6 * hidden), "has a false residual"
    yield ~((rows.norm(dim=1) - 1).abs() <= LENGTH), "does not have length one"
