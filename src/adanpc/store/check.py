"""What a bank file must hold. A checksum can be forged with the rest, so no check here relies on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor

from adanpc.core.bank import ACTIVE, VETOED
from adanpc.core.types import Origin
from adanpc.errors import AdaNPCError
from adanpc.index.grid import GRID, Columns, decode

FORMAT, VERSION = "adanpc-bank", 1
LARGEST = 2**53  # whole numbers that every JSON reader keeps exactly
WIDEST = 2**24  # of one axis: a file may not make a loader allocate what it does not hold itself
SIZES = ("dim", "classes", "k", "k_source", "k_target")
CHUNK = 1 << 18  # coordinates checked at once: what the cache holds
LENGTH = 0.01  # how far a stored row's length may be from one: int8 rounds by 0.002 at D = 8192
FIELDS: dict[str, dict[str, Any]] = {
    "document": {
        "format": str, "version": int, "adanpc": str, "digest": str, "rows": int, "next_id": int, "bank": dict,
        "vetoes": list, "classifier": dict, "centring": dict, "recipe": dict,
    },
    "bank": {
        "dim": int, "classes": int, "storage": str, "capacity": int | None, "evict": str, "soft": bool,
    },
    "classifier": {
        "k": int, "k_source": int | None, "k_target": int | None, "rule": str, "temperature": object,
        "admission": dict,
    },
    "centring": {"mode": str, "prior": int, "count": int, "mean": bool},
}  # fmt: skip


class BankFileError(AdaNPCError):
    """A bank file that cannot be read or written; the message names the file, what is wrong, and the remedy."""


class Flaw(AdaNPCError):
    """What is wrong with the contents of a file, for a BankFileError to tell."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


def parse(text: bytes | str, what: str) -> Any:
    """The value of a JSON text; no value depends on which reader is asked, so repeated names are refused."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Flaw(f"its {what} is not the JSON of a bank ({error})") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def check_document(document: Any) -> None:
    """Passes a document whose fields are all there, and none else, each of its type and range."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise Flaw("it is a safetensors file, but not a bank", "give a file that adanpc saved")
    version = document.get("version")
    if isinstance(version, int) and version > VERSION:
        raise Flaw(f"it was written by a newer adanpc (format {version}, this one reads {VERSION})", "upgrade adanpc")
    _check_fields("document", document)
    for part in ("bank", "classifier", "centring"):
        _check_fields(part, document[part])
    if version != VERSION:
        raise Flaw(f"format {version} does not exist")
    for veto in document["vetoes"]:
        if not isinstance(veto, list) or [type(value) for value in veto] != [int, str, str]:
            raise Flaw(f"a veto must be an id and two texts, who and why, got {brief(veto)}")
    for name, value in document["recipe"].items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise Flaw(f"the recipe must map texts to texts, got {brief(name)}: {brief(value)}")


def _check_fields(part: str, values: dict[str, Any]) -> None:
    wrong = sorted(map(str, FIELDS[part].keys() ^ values.keys()))
    if wrong:
        raise Flaw(f"its {part} has fields missing or unknown: {brief(', '.join(wrong))}")
    for name, kind in FIELDS[part].items():
        value = values[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            raise Flaw(f"{name} of its {part} has the wrong type: {brief(value)}")
        most = WIDEST if name in SIZES else LARGEST
        if isinstance(value, int) and not 0 <= value <= most:
            raise Flaw(f"{name} of its {part} must lie in 0 … {most}, got {brief(value)}")


def number(value: Any) -> float:
    """The number that a document holds; infinities, for which JSON has no number, are the texts inf and -inf."""
    if value in ("inf", "-inf") or isinstance(value, float):
        return float(value)
    if type(value) is not int or abs(value) > LARGEST:
        raise Flaw(f"a number was expected, got {brief(value)}")
    return float(value)


def check_tensors(document: dict[str, Any], tensors: Columns) -> None:
    """Passes columns that a bank with this document can hold, and a finite centring."""
    for name in ("centring.mean", "centring.total"):
        if name in tensors and not tensors[name].isfinite().all():
            raise Flaw(f"{name} holds NaN or infinity")
    _check_ids(tensors["id"], document["next_id"])
    for bad, what in _bad_columns(document["bank"], tensors):
        _refuse(bad, tensors["id"], what)
    _check_vetoes(document, tensors)
    capacity, admitted = document["bank"]["capacity"], int((tensors["origin"] == Origin.ADMITTED).sum())
    if capacity is not None and admitted > capacity:
        raise Flaw(f"it holds {admitted} admitted rows, more than its capacity of {capacity}")
    step = max(1, CHUNK // document["bank"]["dim"])
    names = [name for name in ("row", "fine", "scale", "residual") if name in tensors]
    for start in range(0, len(tensors["id"]), step):
        for bad, what in _bad_rows({name: tensors[name][start : start + step] for name in names}):
            _refuse(bad, tensors["id"][start : start + step], what)


def _refuse(bad: Tensor, ids: Tensor, what: str) -> None:
    if bad.any():
        raise Flaw(f"row {int(ids[bad.nonzero()[0, 0]])} {what}")


def _check_ids(ids: Tensor, next_id: int) -> None:
    if (ids[1:] <= ids[:-1]).any():
        raise Flaw("its ids do not rise from row to row")
    if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < next_id:
        raise Flaw(f"its ids must lie in 0 … next_id - 1 = {next_id - 1}, got {int(ids[0])} … {int(ids[-1])}")


def _bad_columns(config: dict[str, Any], tensors: Columns) -> Iterator[tuple[Tensor, str]]:
    label, classes, state = tensors["label"], config["classes"], tensors["state"]
    yield (label < 0) | (label >= classes), f"has a label outside 0 … {classes - 1}"
    yield (state != ACTIVE) & (state != VETOED), "is neither active nor vetoed"
    yield tensors["origin"] > max(Origin), "has an unknown origin"
    yield ~tensors["confidence"].isfinite(), "has a confidence that is NaN or infinite"
    if config["soft"]:
        yield ~tensors["soft"].isfinite().all(1), "has soft labels that are NaN or infinite"


def _check_vetoes(document: dict[str, Any], tensors: Columns) -> None:
    vetoed = tensors["id"][tensors["state"] == VETOED].tolist()
    if [veto[0] for veto in document["vetoes"]] != vetoed:
        raise Flaw(f"its vetoes do not name its vetoed rows {brief(vetoed)} in their order")


def _bad_rows(part: Columns) -> Iterator[tuple[Tensor, str]]:
    """Rows for which search would not be exact; every comparison is written so that NaN fails it."""
    if part["row"].dtype == torch.float32:
        yield ((part["row"] * GRID).frac() != 0).any(1), "is NaN, infinite or off the grid of 2**-24"
    if "fine" in part:
        scale = part["scale"]
        yield ~((scale > 0) & scale.isfinite()), "has a scale that is not a positive number"
        yield ((part["row"] == -128) | (part["fine"] == -128)).any(1), "has a code outside -127 … 127"
        seen = part["row"].double() * scale.double()
        hidden = (decode(part).double() - seen).norm(dim=1, keepdim=True) * 1.0001
        # Not equality: the order in which a sum is rounded is the machine's. The 1.0001 leaves more room than this.
        yield ~((part["residual"].double() - hidden).abs() <= 1e-5 * hidden), "has a false residual"
    length = decode(part).double().norm(dim=1)
    yield ~((length - 1).abs() <= LENGTH), "does not have length one"
