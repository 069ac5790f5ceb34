"""save and load: an AdaNPC as one safetensors file. docs/bank-format.md writes the format down."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from math import isinf
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from adanpc.core import AdaNPC, Admission, MemoryBank, Veto
from adanpc.index.grid import Columns
from adanpc.store.check import FORMAT, VERSION, BankFileError, ContentsError, check_document, check_tensors, number
from adanpc.store.durable import replace
from adanpc.store.layout import contents, read
from adanpc.version import __version__


def save(classifier: AdaNPC, path: str | os.PathLike[str], *, recipe: Mapping[str, str] | None = None) -> None:
    """Writes bank, settings and centring; a crash at any moment leaves the old file or the new one, whole.

    Args:
        classifier: what ``load`` gives back; no other thread may change it meanwhile.
        path: where to; a link is followed, a file that is there is replaced and its permissions are kept.
        recipe: how features are made from inputs; only kept.
    """
    with _told(path, "was not saved", "what was there before is unchanged; mend the bank and save again"):
        document, tensors = _document(classifier, dict(recipe or {})), _tensors(classifier)
        check_document(document)  # a file that load would refuse is not written
        check_tensors(document, tensors)
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise ContentsError("there is a folder or a device", "give the path of a file")
        replace(target, contents(document, tensors))


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> tuple[AdaNPC, dict[str, str]]:
    """The classifier that was saved, to go on exactly where it stopped, and its recipe; executes no code."""
    with _told(path, "was not loaded", "the file is damaged or forged: take another copy or build the bank again"):
        classifier, document = _read(Path(path), torch.device(device))
        if classifier.bank.digest() != document["digest"]:
            raise ContentsError("its rows do not have the digest that it states")
        return classifier, document["recipe"]


@contextmanager
def _told(path: str | os.PathLike[str], fate: str, remedy: str) -> Iterator[None]:
    """Turns whatever is refused inside into one BankFileError."""
    try:
        yield
    except OSError as error:
        raise BankFileError(
            f"{path} {fate}: {error.strerror or error}; check the path, its rights and the disk"
        ) from error
    except ContentsError as flaw:
        raise BankFileError(f"{path} {fate}: {flaw}; {flaw.remedy or remedy}") from flaw
    except ValueError as error:
        raise BankFileError(f"{path} {fate}: {error}; {remedy}") from error


def _document(classifier: AdaNPC, recipe: dict[str, str]) -> dict[str, Any]:
    """All that is not a tensor, as JSON can hold it."""
    bank, centring, admission = classifier.bank, classifier.centring, classifier.admission
    if type(admission) is not Admission:
        raise ContentsError(f"no file can keep an admission of type {type(admission).__name__}", "use an Admission")
    asked = dict(asdict(admission).items() - asdict(Admission()).items())
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
            "admission": {name: _plain(float(asked[name])) for name in sorted(asked)},
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
    """The value for JSON, which knows neither NumPy's whole numbers nor infinities."""
    if isinstance(value, Integral):
        return int(value)
    return str(value) if isinstance(value, float) and isinf(value) else value


def _tensors(classifier: AdaNPC) -> Columns:
    tensors = {**classifier.bank.table(), "centring.total": classifier.centring.total}
    if classifier.centring.mean is not None:
        tensors["centring.mean"] = classifier.centring.mean
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _read(path: Path, device: torch.device) -> tuple[AdaNPC, dict[str, Any]]:
    """The classifier and the document of a file; the buffer it was read into is gone when this returns."""
    document, tensors = read(path)
    check_tensors(document, tensors)
    bank = MemoryBank(**document["bank"], device=device)
    vetoes = {row: Veto((row,), who, why) for row, who, why in document["vetoes"]}
    bank.fill({name: tensors[name] for name in bank.table()}, document["next_id"], vetoes)
    settings, centring = document["classifier"], document["centring"]
    classifier = AdaNPC(
        bank,
        **{name: settings[name] for name in ("k", "k_source", "k_target", "rule")},
        temperature=number(settings["temperature"]),
        admission=Admission(**{name: number(value) for name, value in settings["admission"].items()}),
        centring=centring["mode"],
        prior=centring["prior"],
    )
    classifier.centring.count = centring["count"]
    classifier.centring.total = tensors["centring.total"].clone().to(device)
    if centring["mean"]:
        classifier.centring.mean = tensors["centring.mean"].clone().to(device)
    return classifier, document
