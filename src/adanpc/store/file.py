"""save and load: a bank and all its settings as one safetensors file. docs/bank-format.md writes the format down."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import isinf
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from adanpc.core import AdaNPC, Admission, MemoryBank, Veto
from adanpc.files import replace
from adanpc.index.grid import Columns
from adanpc.models import RecipeError, Wrapped
from adanpc.store.check import (
    DTYPES,
    FORMAT,
    VERSION,
    BankFileError,
    ContentsError,
    check_columns,
    check_document,
    check_tensors,
    number,
)
from adanpc.version import __version__

KEY = "adanpc"  # of the one metadata entry
MOST_TEXT = 99_000_000  # bytes of it in the header; the safetensors library reads a header of 100 MB at most
Location = str | os.PathLike[str]
Device = torch.device | str
SETTINGS = ("k", "k_source", "k_target", "rule")


def save(thing: AdaNPC | Wrapped, path: Location) -> None:
    """Writes bank, settings and centring; a crash at any moment leaves the old file or the new one, whole.

    Args:
        thing: what ``load`` gives back; no other thread may change it meanwhile. Of a wrapped model, the file keeps how
            features are made (layer, preprocessing, a hash of the weights) but not the model.
        path: where to; a link is followed, a file that is there is replaced and its permissions are kept.
    """
    classifier, recipe = (thing.classifier, thing.recipe) if isinstance(thing, Wrapped) else (thing, {})
    with _told(path, "was not saved", "what was there before is unchanged; check the bank and the disk and save again"):
        document, tensors = _document(classifier, recipe), _tensors(classifier)
        check_document(document)  # a file that load would refuse is not written
        check_tensors(document, tensors)
        text = _canonical({**document, "seal": _seal(document, tensors)})
        if len(json.dumps(text)) > MOST_TEXT:
            raise ContentsError(f"its texts need more than {MOST_TEXT} bytes", "shorten the reasons of its vetoes")
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise ContentsError("there is a folder or a device", "give the path of a file")
        replace(target, lambda new: save_file(tensors, new, {KEY: text}))


@overload
def load(path: Location, model: None = None, *, preprocessing: Any = None, device: Device = "cpu") -> AdaNPC: ...


@overload
def load(path: Location, model: nn.Module, *, preprocessing: Any = None, device: Device = "cpu") -> Wrapped: ...


def load(
    path: Location, model: nn.Module | None = None, *, preprocessing: Any = None, device: Device = "cpu"
) -> AdaNPC | Wrapped:
    """What was saved, to go on exactly where it stopped; executes no code of the file's.

    Args:
        path: a file that ``save`` wrote.
        model: the model that was wrapped; without one, features are the caller's affair and the AdaNPC is returned.
        preprocessing: what makes the model's inputs; model and preprocessing must be those that the bank was built
            with, or a RecipeError says what differs.
        device: where the bank shall live.
    """
    with _told(path, "was not loaded", "the file is damaged or forged: take another copy or build the bank again"):
        classifier, recipe = _read(Path(path), torch.device(device))
    if model is None:
        return classifier
    if not recipe:
        raise RecipeError(f"{path} was saved without a model; load it without one, or wrap the model and save that")
    wrapped = Wrapped(model, classifier, recipe["layer"], preprocessing)
    try:
        wrapped.check(recipe)
    except RecipeError as error:
        raise RecipeError(f"{path} was not loaded: {error}; give what it was built with, or wrap anew") from error
    return wrapped


@contextmanager
def _told(path: Location, fate: str, remedy: str) -> Iterator[None]:
    """Turns whatever is refused inside into one BankFileError."""
    try:
        yield
    except OSError as error:
        what = error.strerror or error
        raise BankFileError(f"{path} {fate}: {what}; check the path, its rights and the disk") from error
    except ContentsError as flaw:
        raise BankFileError(f"{path} {fate}: {flaw}; {flaw.remedy or remedy}") from flaw
    except (SafetensorError, ValueError, RecursionError) as error:
        raise BankFileError(f"{path} {fate}: {' '.join(str(error).split())[:200]}; {remedy}") from error


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _seal(document: dict[str, Any], tensors: Columns) -> str:
    """A hash of all that the file says but for the seal itself."""
    total = hashlib.sha256(_canonical({name: document[name] for name in document if name != "seal"}).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(_canonical([name, DTYPES[tensor.dtype], tensor.shape]).encode())
        array: Any = tensor.numpy()
        total.update(array)
    return total.hexdigest()


def _document(classifier: AdaNPC, recipe: dict[str, str]) -> dict[str, Any]:
    """All that is not a tensor, as JSON can hold it; as yet unsealed."""
    bank, centring, admission = classifier.bank, classifier.centering, classifier.admission
    if type(admission) is not Admission:
        raise ContentsError(f"no file can keep an admission of type {type(admission).__name__}", "use an Admission")
    return {
        "format": FORMAT,
        "version": VERSION,
        "adanpc": __version__,
        "seal": "",
        "rows": len(bank),
        "next_id": bank.next_id,
        "bank": bank.config(),
        "vetoes": [[row, veto.who, veto.why] for row, veto in sorted(bank.vetoes.items())],
        "classifier": {
            **{name: _plain(getattr(classifier, name)) for name in SETTINGS},
            "temperature": _plain(float(classifier.temperature)),
        },
        "admission": {name: _plain(float(value)) for name, value in asdict(admission).items()},
        "centring": {name: _plain(getattr(centring, name)) for name in ("mode", "prior", "count")}
        | {"mean": centring.mean is not None},
        "recipe": recipe,
    }


def _plain(value: Any) -> Any:
    """The value for JSON, which knows neither NumPy's whole numbers nor infinities."""
    if isinstance(value, Integral):
        return int(value)
    return str(value) if isinstance(value, float) and isinf(value) else value


def _tensors(classifier: AdaNPC) -> Columns:
    tensors = {**classifier.bank.table(), "centring.total": classifier.centering.total}
    if classifier.centering.mean is not None:
        tensors["centring.mean"] = classifier.centering.mean
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _read(path: Path, device: torch.device) -> tuple[AdaNPC, dict[str, str]]:
    """The checked classifier and the recipe of a file, be it replaced meanwhile."""
    while True:
        if not path.is_file():  # opening a pipe would wait for its writer
            what = "it is a folder or a device" if path.exists() else "there is no such file"
            raise ContentsError(what, "give the path of a file that adanpc saved")
        before = path.stat()
        try:
            return _read_once(path, device)
        except Exception:  # the library opens the file twice: it may have met the old one and the new one
            now = path.stat()
            if (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns):
                raise


def _read_once(path: Path, device: torch.device) -> tuple[AdaNPC, dict[str, str]]:
    with safe_open(path, "pt") as opened:
        text = (opened.metadata() or {}).get(KEY, "null")
        document = json.loads(text)
        check_document(document)
        if text != _canonical(document):  # repeated names, for one: readers would differ on what they mean
            raise ContentsError("its document is not written as adanpc writes it")
        bank = MemoryBank(**document["bank"], device=device)
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        found = {name: (column.get_dtype(), column.get_shape()) for name, column in slices.items()}
        check_columns(document, bank.table(), found)
        tensors = {name: opened.get_tensor(name) for name in found}
    if any(tensor.data_ptr() % tensor.element_size() for tensor in tensors.values()):
        raise ContentsError("its columns do not start at multiples of their size")
    if _seal(document, tensors) != document["seal"]:
        raise ContentsError("its contents do not have the seal that it states")
    check_tensors(document, tensors)
    vetoes = {row: Veto((row,), who, why) for row, who, why in document["vetoes"]}
    bank.fill({name: tensors[name] for name in bank.table()}, document["next_id"], vetoes)
    return _classifier(bank, document, tensors), document["recipe"]


def _classifier(bank: MemoryBank, document: dict[str, Any], tensors: Columns) -> AdaNPC:
    """The bank with its settings and centring; keeps no tensor of the file's."""
    settings, centring = document["classifier"], document["centring"]
    classifier = AdaNPC(
        bank,
        **{name: settings[name] for name in SETTINGS},
        temperature=number(settings["temperature"]),
        admission=Admission(**{name: number(value) for name, value in document["admission"].items()}),
        centering=centring["mode"],
        prior=centring["prior"],
    )
    classifier.centering.count = centring["count"]
    classifier.centering.total = tensors["centring.total"].clone().to(bank.device)
    if centring["mean"]:
        classifier.centering.mean = tensors["centring.mean"].clone().to(bank.device)
    return classifier
