"""What a bank file must hold. A checksum can be forged with the rest, so no check here relies on one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor

from adanpc.core import Admission, Origin
from adanpc.core.bank import ACTIVE, VETOED
from adanpc.errors import AdaNPCError
from adanpc.index.grid import GRID, Columns, decode

FORMAT, VERSION = "adanpc-bank", 1
LARGEST = 2**53  # up to here every JSON reader keeps whole numbers exactly
WIDEST = 2**24  # a file must not make its reader allocate more than it holds itself
SIZES = ("dim", "classes", "k", "k_source", "k_target")
CHUNK = 1 << 18  # coordinates checked at once: what the cache holds
LENGTH = 0.01  # how far from one a row's length may be; int8 rounds by less than 0.002 at D = 8192
FIELDS: dict[str, dict[str, Any]] = {
    "document": {
        "format": str, "version": int, "adanpc": str, "digest": str, "rows": int, "next_id": int, "bank": dict,
        "vetoes": list, "classifier": dict, "centring": dict, "recipe": dict,
    },
    "bank": {"dim": int, "classes": int, "storage": str, "capacity": int | None, "evict": str, "soft": bool},
    "classifier": {
        "k": int, "k_source": int | None, "k_target": int | None, "rule": str, "temperature": object,
        "admission": dict,
    },
    "centring": {"mode": str, "prior": int, "count": int, "mean": bool},
}  # fmt: skip


class BankFileError(AdaNPCError):
    """A bank file that cannot be read or written; the message names the file, what is wrong, and the remedy."""


class ContentsError(AdaNPCError):
    """What is wrong with a file's contents, until a BankFileError adds whose they are."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


def parse(text: bytes | str, what: str) -> Any:
    """The value of a JSON text, the same for every reader: repeated names and NaN are refused."""
    try:
        text = text if isinstance(text, str) else text.decode()
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ContentsError(f"its {what} is not JSON as adanpc writes it ({error})") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def check_document(document: Any) -> None:
    """Passes a document that has all its fields and no other, each of its type and range."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ContentsError("it is a safetensors file but not a bank", "give a file that adanpc saved")
    version = document.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ContentsError(
            f"it was written by a newer adanpc (format {version}; this one reads {VERSION})", "upgrade adanpc"
        )
    _check_fields("document", document)
    if version != VERSION:
        raise ContentsError(f"there is no format {version}")
    for part in ("bank", "classifier", "centring"):
        _check_fields(part, document[part])
    _check_entries(document)


def _check_fields(part: str, values: dict[str, Any]) -> None:
    wrong = sorted(map(str, FIELDS[part].keys() ^ values.keys()))
    if wrong:
        raise ContentsError(f"its {part} has missing or unknown fields: {brief(wrong)}")
    for name, kind in FIELDS[part].items():
        value = values[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ContentsError(f"{name} in its {part} has the wrong type: {brief(value)}")
        most = WIDEST if name in SIZES else LARGEST
        if isinstance(value, int) and not 0 <= value <= most:
            raise ContentsError(f"{name} in its {part} must lie in 0 … {most}, got {brief(value)}")


def _check_entries(document: dict[str, Any]) -> None:
    """Passes the parts of a document whose length is free."""
    settings = document["classifier"]
    unknown = settings["admission"].keys() - {field.name for field in fields(Admission)}
    if unknown:
        raise ContentsError(f"its admission has unknown fields: {brief(sorted(unknown))}")
    for value in (settings["temperature"], *settings["admission"].values()):
        number(value)
    for veto in document["vetoes"]:
        if not isinstance(veto, list) or [type(value) for value in veto] != [int, str, str]:
            raise ContentsError(f"a veto must be a row's id and two texts, who and why, got {brief(veto)}")
    for item in document["recipe"].items():
        if [type(value) for value in item] != [str, str]:
            raise ContentsError(f"a recipe maps texts to texts, got {brief(item)}", "give a dict of strings")


def number(value: Any) -> float:
    """The number that a document holds; infinities, which JSON lacks, are the texts inf and -inf."""
    whole = type(value) is int and abs(value) <= LARGEST
    if not whole and not isinstance(value, float) and value not in ("inf", "-inf"):
        raise ContentsError(f"temperature and admission must be numbers, got {brief(value)}")
    return float(value)


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
        raise ContentsError(
            f"its ids, {int(ids[0])} … {int(ids[-1])}, must be at least 0 and below its next_id, {next_id}"
        )


def _bad_columns(config: dict[str, Any], tensors: Columns) -> Iterator[tuple[Tensor, str]]:
    label, state, classes = tensors["label"], tensors["state"], config["classes"]
    yield (label < 0) | (label >= classes), f"has a label outside 0 … {classes - 1}"
    yield (state != ACTIVE) & (state != VETOED), "is neither active nor vetoed"
    yield tensors["origin"] > max(Origin), "has an unknown origin"
    yield ~tensors["confidence"].isfinite(), "has a confidence that is NaN or infinite"
    if config["soft"]:
        yield ~tensors["soft"].isfinite().all(1), "has soft labels that are NaN or infinite"


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
