"""What a bank file must hold. A seal can be forged with the rest, so no check here relies on it."""

from __future__ import annotations

from collections.abc import Iterator
from reprlib import repr as brief
from sys import float_info
from typing import Any

import torch
from torch import Tensor

from adanpc.core import Origin
from adanpc.core.bank import ACTIVE, VETOED
from adanpc.errors import AdaNPCError
from adanpc.index.grid import GRID, Columns, decode

FORMAT, VERSION = "adanpc-bank", 1
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16"}
DTYPES |= {torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8"}
LARGEST = 2**53  # up to here every JSON reader keeps whole numbers exactly
WIDEST = 2**24  # a file must not make its reader allocate more than it holds itself
SIZES = ("dim", "classes", "k", "k_source", "k_target")
CHUNK = 1 << 18  # coordinates checked at once: what the cache holds
LENGTH = 0.01  # how far from one a row's length may be; int8 rounds by less than 0.002 at D = 8192
NUMBER = int | float | str  # see ``number``
FIELDS: dict[str, dict[str, Any]] = {
    "document": {
        "format": str, "version": int, "adanpc": str, "seal": str, "rows": int, "next_id": int, "bank": dict,
        "vetoes": list, "classifier": dict, "admission": dict, "centring": dict, "recipe": dict,
    },
    "bank": {"dim": int, "classes": int, "storage": str, "capacity": int | None, "evict": str, "soft": bool},
    "classifier": {"k": int, "k_source": int | None, "k_target": int | None, "rule": str, "temperature": NUMBER},
    "admission": dict.fromkeys(("min_confidence", "min_margin", "max_entropy", "class_quota"), NUMBER),
    "centring": {"mode": str, "prior": int, "count": int, "mean": bool},
    "recipe": {"layer": str, "preprocessing": str, "weights": str},
}  # fmt: skip


class BankFileError(AdaNPCError):
    """A bank file that cannot be read or written; the message names the file, what is wrong, and the remedy."""


class ContentsError(AdaNPCError):
    """What is wrong with a file's contents, until a BankFileError adds whose they are."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


def number(value: Any) -> float:
    """The number that a document holds; infinities, which JSON lacks, are the texts inf and -inf."""
    if value not in ("inf", "-inf") and (isinstance(value, str) or not abs(value) <= float_info.max):
        raise ContentsError(f"temperature and admission must be numbers, got {brief(value)}")
    return float(value)


def check_document(document: Any) -> None:
    """Passes a document that has all its fields and no other, each of its type and range."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ContentsError("it is a safetensors file but not a bank", "give a file that adanpc saved")
    version = document.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ContentsError(f"it was written by a newer adanpc, in format {version} after {VERSION}", "upgrade adanpc")
    _check_fields("document", document)
    if version != VERSION:
        raise ContentsError(f"there is no format {version}")
    for part in ("bank", "classifier", "admission", "centring", "recipe"):
        if part != "recipe" or document[part]:  # a bank without a model has none
            _check_fields(part, document[part])
    for veto in document["vetoes"]:
        if not isinstance(veto, list) or [type(value) for value in veto] != [int, str, str]:
            raise ContentsError(f"a veto must be a row's id and two texts, who and why, got {brief(veto)}")


def _check_fields(part: str, values: dict[str, Any]) -> None:
    wrong = sorted(map(str, FIELDS[part].keys() ^ values.keys()))
    if wrong:
        raise ContentsError(f"its {part} has missing or unknown fields: {brief(wrong)}")
    for name, kind in FIELDS[part].items():
        value = values[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ContentsError(f"{name} in its {part} has the wrong type: {brief(value)}")
        most = WIDEST if name in SIZES else LARGEST
        if kind is NUMBER:
            number(value)
        elif isinstance(value, int) and not 0 <= value <= most:
            raise ContentsError(f"{name} in its {part} must lie in 0 … {most}, got {brief(value)}")


def check_columns(document: dict[str, Any], table: Columns, found: dict[str, tuple[str, list[int]]]) -> None:
    """Passes types and shapes that follow from the document and an empty bank's table, before anything is read."""
    wanted = {name: (DTYPES[made.dtype], [document["rows"], *made.shape[1:]]) for name, made in table.items()}
    names = ["centring.mean", "centring.total"] if document["centring"]["mean"] else ["centring.total"]
    wanted |= dict.fromkeys(names, ("F64", [document["bank"]["dim"]]))
    for name in sorted(wanted.keys() | found.keys(), key=lambda name: (name in wanted and name in found, name)):
        given, due = found.get(name, "absent"), wanted.get(name, "absent")
        if given != due:
            raise ContentsError(f"its column {brief(name)} is {brief(given)} and should be {brief(due)}")


def check_tensors(document: dict[str, Any], tensors: Columns) -> None:
    """Passes columns that the bank of this document can hold, and a finite centring."""
    ids, config = tensors["id"], document["bank"]
    _check_ids(ids, document["next_id"])
    for bad, what in _bad_columns(config, tensors):
        _refuse(bad, ids, what)
    names = [name for name in ("row", "fine", "scale", "residual") if name in tensors]
    step = max(1, CHUNK // config["dim"])
    for start in range(0, len(ids), step):
        for bad, what in _bad_rows({name: tensors[name][start : start + step] for name in names}):
            _refuse(bad, ids[start : start + step], what)
    vetoed, admitted = ids[tensors["state"] == VETOED].tolist(), int((tensors["origin"] == Origin.ADMITTED).sum())
    if [veto[0] for veto in document["vetoes"]] != vetoed:
        raise ContentsError(f"its vetoes do not name its vetoed rows, {brief(vetoed)}, in this order")
    if config["capacity"] is not None and admitted > config["capacity"]:
        raise ContentsError(f"it holds {admitted} admitted rows, more than its capacity of {config['capacity']}")
    for name in ("centring.mean", "centring.total"):
        if name in tensors and not tensors[name].isfinite().all():
            raise ContentsError(f"its {name} holds NaN or infinity")


def _refuse(bad: Tensor, ids: Tensor, what: str) -> None:
    if bad.any():
        raise ContentsError(f"row {int(ids[bad.nonzero()[0, 0]])} {what}")


def _check_ids(ids: Tensor, next_id: int) -> None:
    if (ids[1:] <= ids[:-1]).any():
        raise ContentsError("its ids do not rise from row to row")
    if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < next_id:
        raise ContentsError(f"its ids, {int(ids[0])} … {int(ids[-1])}, must lie in 0 … next_id - 1, {next_id - 1}")


def _bad_columns(config: dict[str, Any], tensors: Columns) -> Iterator[tuple[Tensor, str]]:
    label, state, classes = tensors["label"], tensors["state"], config["classes"]
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
