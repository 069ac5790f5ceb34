"""save and load: an AdaNPC as one safetensors file. docs/bank-format.md writes the format down.

The header is written and read here rather than by the safetensors library because the trailer seals the header's own
bytes, and because columns then go from memory to disk, and one read of one open file back, without a copy between.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from math import isinf, prod
from numbers import Integral
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from adanpc.core import AdaNPC, Admission, MemoryBank, Veto
from adanpc.index.grid import Columns
from adanpc.store.check import FORMAT, VERSION, BankFileError, Flaw, check_document, check_tensors, number, parse
from adanpc.version import __version__

KEY = "adanpc"  # of the one metadata entry
TRAILER = "trailer.sha256"
MOST_HEADER = 100_000_000  # bytes; what the safetensors library accepts
DTYPES = {  # in the order in which columns stand in the file, so that each is aligned
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.int8: "I8",
    torch.uint8: "U8",
}  # fmt: skip

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def save(classifier: AdaNPC, path: str | os.PathLike[str], *, recipe: Mapping[str, str] | None = None) -> None:
    """Writes bank, settings and centring; a crash at any moment leaves the old file or the new one, whole.

    Args:
        classifier: what ``load`` will give back.
        path: where to; a link is followed, an existing file replaced.
        recipe: how features are made from inputs; kept, not read.
    """
    with _told(path, "was not saved", "what was there before is unchanged; mend the bank and save again"):
        document, tensors = _document(classifier, dict(recipe or {})), _tensors(classifier)
        check_document(document)
        check_tensors(document, tensors)
        header = _header(document)
        columns = (_bytes(tensors[name]) for name in _layout(document) if name != TRAILER)
        _replace(Path(os.path.realpath(path)), _sealed(header, columns))


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> tuple[AdaNPC, dict[str, str]]:
    """The classifier that was saved, which goes on exactly where it stopped, and its recipe; no code is executed."""
    with _told(path, "was not loaded", "the file is damaged or forged: take another copy, or build the bank again"):
        document, tensors = _read(Path(path))
        check_tensors(document, tensors)
        return _rebuild(document, tensors, torch.device(device)), document["recipe"]


@contextmanager
def _told(path: str | os.PathLike[str], fate: str, remedy: str) -> Iterator[None]:
    """Turns whatever is refused inside into one BankFileError."""
    try:
        yield
    except Flaw as flaw:
        raise BankFileError(f"{path} {fate}: {flaw}; {flaw.remedy or remedy}") from flaw
    except OSError as error:
        raise BankFileError(f"{path} {fate}: {error.strerror}; check the path, its rights and the disk") from error
    except ValueError as error:
        raise BankFileError(f"{path} {fate}: {error}; {remedy}") from error


def _document(classifier: AdaNPC, recipe: dict[str, str]) -> dict[str, Any]:
    """All that is not a tensor, as JSON knows it."""
    bank, centring, admission = classifier.bank, classifier.centring, classifier.admission
    if type(admission) is not Admission:
        raise Flaw(f"its admission is a {type(admission).__name__}, which no file can keep", "use an Admission")
    asked = {name: value for name, value in asdict(admission).items() if value != asdict(Admission())[name]}
    return {
        "format": FORMAT,
        "version": VERSION,
        "adanpc": __version__,
        "digest": bank.digest(),
        "rows": len(bank),
        "next_id": bank.next_id,
        "bank": bank.config(),
        "vetoes": [[row, veto.who, veto.why] for row, veto in sorted(bank.vetoes.items())],
        "classifier": {
            **{name: _plain(getattr(classifier, name)) for name in ("k", "k_source", "k_target", "rule")},
            "temperature": _plain(float(classifier.temperature)),
            "admission": {name: _plain(float(value)) for name, value in asked.items()},
        },
        "centring": {
            "mode": centring.mode,
            "prior": _plain(centring.prior),
            "count": centring.count,
            "mean": centring.mean is not None,
        },
        "recipe": recipe,
    }


def _plain(value: Any) -> Any:
    """The value as JSON holds it: NumPy's whole numbers are made int, infinities text."""
    if isinstance(value, Integral):
        return int(value)
    return str(value) if isinstance(value, float) and isinf(value) else value


def _tensors(classifier: AdaNPC) -> Columns:
    centring = {"centring.mean": classifier.centring.mean, "centring.total": classifier.centring.total}
    given = {name: tensor for name, tensor in centring.items() if tensor is not None}
    return {name: tensor.cpu().contiguous() for name, tensor in {**classifier.bank.table(), **given}.items()}


def _rebuild(document: dict[str, Any], tensors: Columns, device: torch.device) -> AdaNPC:
    """The classifier of a checked document and checked tensors."""
    bank, settings, centring = MemoryBank(**document["bank"], device=device), document["classifier"], document["centring"]
    table = {name: tensors[name] for name in bank.table()}
    bank.fill(table, document["next_id"], {row: Veto((row,), who, why) for row, who, why in document["vetoes"]})
    if bank.digest() != document["digest"]:
        raise Flaw("its rows do not have the digest that it states")
    return bank


def _layout(document: dict[str, Any]) -> Layout:
    """Each column's type and shape, in the order of the file: it follows from the document alone."""
    config = document["bank"]
    layout = {
        name: (column.dtype, (document["rows"], *column.shape[1:]))
        for name, column in MemoryBank(**config).table().items()
    }
    names = ("centring.mean", "centring.total") if document["centring"]["mean"] else ("centring.total",)
    layout |= dict.fromkeys(names, (torch.float64, (config["dim"],)))
    order = list(DTYPES)
    columns = sorted(layout.items(), key=lambda item: (order.index(item[1][0]), item[0]))
    return {**dict(columns), TRAILER: (torch.uint8, (32,))}
