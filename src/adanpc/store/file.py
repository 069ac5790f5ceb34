"""save and load: a bank and all its settings in one safetensors file. docs/bank-format.md describes the format."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from adanpc import require
from adanpc.core import AdaNPC, Admission, MemoryBank
from adanpc.core.codec import NAMES, canonical
from adanpc.core.contents import State
from adanpc.core.paper import PaperSettings
from adanpc.files import replace
from adanpc.index.blocks import BLOCK_BYTES, SMALL_BYTES
from adanpc.index.codes import RULE
from adanpc.index.grid import Columns
from adanpc.index.protocol import Kept
from adanpc.models import RecipeError, Wrapped
from adanpc.models.wrap import check_model
from adanpc.store import format1, format3, format4
from adanpc.store.check import (
    CODED_VERSION,
    CODES,
    FORMAT,
    BankFileError,
    ContentsError,
    beside_rows,
    check_columns,
    check_document,
    check_header,
    check_tensors,
    version_of,
)
from adanpc.store.key import is_own, signed
from adanpc.store.lazy import RowsInFile, seals_of
from adanpc.store.safetensors_file import PIECE, THREADS, SafetensorsFile, opened
from adanpc.version import __version__

logger = logging.getLogger("adanpc")

EARLIER = {1: format1, 3: format3, **dict.fromkeys(format4.KNOWN_NUMBERS, format4)}  # modules by version of the format
KEY = "adanpc"  # the key of the only metadata entry
ROW = "row"  # the only column that may stay in the file
ROW_SHA = "row_sha256"  # the document field with the hash of that column
ROW_SEAL = CODES + "row_seal"
UNSEALED = ("seal", "signature")  # document fields that the seal does not cover
ESTIMATOR = "adanpc.estimator"  # the layer name in files that hold a scikit-learn estimator
MOST_TEXT = 99_000_000  # bytes of text in the header; the safetensors library reads headers of up to 100 MB
REMEDY_OF_SAVING = "what was there before is unchanged; check the disk and save again"
Location = str | os.PathLike[str]
Device = torch.device | str


@require.names_its_arguments
def save(thing: AdaNPC | Wrapped, path: Location) -> None:
    """Writes bank, settings and means to a file; a crash at any moment leaves either the old or the new file intact.

    Args:
        thing: what to save, for ``load`` to return. It is saved as it is at this moment, whatever other threads do in
            the meantime. For a wrapped model, the file records how features are made (layer, preprocessing, a hash of
            the weights) but does not contain the model.
        path: the file to write; links are followed. An existing file is replaced, and its permissions are kept.
    """
    _check_path(path, "save(wrapped, path)")
    if isinstance(thing, Wrapped):
        write(thing.classifier, thing.recipe, path)
    elif isinstance(thing, AdaNPC):
        write(thing, {}, path)
    else:
        kind = type(thing).__name__
        remedy = ""
        if hasattr(thing, "save"):
            remedy = "; use its own method, save(path)"
        raise BankFileError(f"{path} was not saved: expected an AdaNPC or a wrapped model, got {kind}{remedy}")


def write(classifier: AdaNPC, recipe: dict[str, str], path: Location) -> None:
    """Saves a classifier together with how its features are made; see ``save``."""
    with _one_sentence(path, "was not saved", REMEDY_OF_SAVING):
        check_keepable(classifier)
        state = classifier.state(codes=True)
    write_state(state, recipe, path)


def check_keepable(classifier: AdaNPC) -> None:
    """Raises a ContentsError for a classifier with a custom admission rule, which no file can hold."""
    settings = classifier.settings
    if not isinstance(settings, PaperSettings):
        return
    admission = type(settings.admission)
    if admission is not Admission:
        raise ContentsError(f"no file can keep an admission of type {admission.__name__}", "use an Admission")


def write_state(state: State, recipe: dict[str, str], path: Location) -> None:
    """Saves the state of a classifier; see ``write``."""
    with _one_sentence(path, "was not saved", REMEDY_OF_SAVING):
        document = _document(state, recipe)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in state["tensors"].items()}
        _check(document, tensors)  # never write a file that load would refuse
        kept = state.get("kept")
        coded = None
        if kept is not None and kept.codes:
            coded = _signed_with_codes(document, tensors, kept.codes)
        if coded is None:
            document["seal"] = _seal(document, tensors)
        else:
            document, tensors = coded
        text = canonical(document)
        if len(json.dumps(text)) > MOST_TEXT:
            raise ContentsError(f"its texts need more than {MOST_TEXT} bytes", "shorten the reasons of its judgments")
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise ContentsError("a folder or a device has this path", "give the path of a file")
        replace(target, lambda new: save_file(tensors, new, {KEY: text}))


def replace_or_explain(path: Path, fill: Callable[[Path], None]) -> None:
    """Calls ``files.replace`` for a file of another format, and raises a one-sentence error if that fails."""
    with _one_sentence(path, "was not saved", REMEDY_OF_SAVING):
        replace(path, fill)


@overload
def load(
    path: Location,
    model: None = None,
    *,
    preprocessing: Any = None,
    strict: bool = True,
    device: Device = "cpu",
    lazy_rows: bool = False,
) -> AdaNPC: ...


@overload
def load(
    path: Location,
    model: nn.Module,
    *,
    preprocessing: Any = None,
    strict: bool = True,
    device: Device = "cpu",
    lazy_rows: bool = False,
) -> Wrapped: ...


@require.names_its_arguments
def load(
    path: Location,
    model: nn.Module | None = None,
    *,
    preprocessing: Any = None,
    strict: bool = True,
    device: Device = "cpu",
    lazy_rows: bool = False,
) -> AdaNPC | Wrapped:
    """Returns what was saved, ready to continue exactly where it stopped; never executes code from the file.

    Args:
        path: a file that ``save`` wrote.
        model: the model that was wrapped; without one, an AdaNPC that takes features is returned.
        preprocessing: what makes the model's inputs. Model and preprocessing must be the ones that the bank was built
            with; otherwise, a RecipeError says what differs.
        strict: False to accept other weights and preprocessing, if you know that the features are the same.
        device: the device for the bank.
        lazy_rows: True to leave the rows of a bank with storage="progressive" in the file and read each one when a
            search first needs it: a bank of a million rows opens in a second or two. Rows are checked when they are
            read, so damage to the file may turn up only then, as a BankFileError. Do not overwrite the file in the
            meantime; ``save`` may replace it. This has no effect on a file without codes, or with codes that another
            account made.
    """
    _check_path(path, "load(path, model)")
    if model is not None:
        check_model(model)
    classifier, recipe = read(path, device, lazy_rows=lazy_rows)
    if recipe.get("layer") == ESTIMATOR:
        raise BankFileError(f"{path} was not loaded: it holds an estimator; use AdaNPCClassifier.load(path)")
    if model is None:
        return classifier
    if not recipe:
        raise RecipeError(f"{path} was saved without a model; load it without one, or wrap the model and save that")
    wrapped = Wrapped(model, classifier, recipe["layer"], preprocessing)
    try:
        wrapped.check(recipe, strict)
    except RecipeError as error:
        raise RecipeError(f"{path} was not loaded: {error}") from error
    return wrapped


def _check_path(path: Any, call: str) -> None:
    """Raises an error for anything that is not a path, such as arguments in the wrong order."""
    if not isinstance(path, str | os.PathLike):
        raise BankFileError(f"path must be the path of a file, as in {call}, got {type(path).__name__}")


def read(path: Location, device: Device = "cpu", *, lazy_rows: bool = False) -> tuple[AdaNPC, dict[str, str]]:
    """Returns the classifier in a file and how its features are made; the latter is empty if no model was saved."""
    remedy = "the file is damaged or forged: use another copy or build the bank again"
    with _one_sentence(path, "was not loaded", remedy):
        state = _read(Path(path), lazy_rows=lazy_rows)
        recipe: dict[str, str] = state["document"].pop("recipe")
        return AdaNPC.load(state, device=device), recipe


@contextmanager
def _one_sentence(path: Location, fate: str, remedy: str) -> Iterator[None]:
    """Turns every error inside the block into a one-sentence BankFileError."""
    try:
        yield
    except OSError as error:
        what = error.strerror or error
        raise BankFileError(f"{path} {fate}: {what}; check the path, its permissions and the disk") from error
    except ContentsError as flaw:
        raise BankFileError(f"{path} {fate}: {flaw}; {flaw.remedy or remedy}") from flaw
    except MemoryError as error:
        raise BankFileError(f"{path} {fate}: there is not enough memory; free some and try again") from error
    except (SafetensorError, ValueError, OverflowError, RecursionError) as error:
        what = " ".join(str(error).split())[:200]
        raise BankFileError(f"{path} {fate}: {what}; {remedy}") from error


def _signed_with_codes(
    document: dict[str, Any], tensors: Columns, codes: Columns
) -> tuple[dict[str, Any], Columns] | None:
    """Returns the sealed document and all columns with codes; None if this account cannot sign that it made them."""
    columns = dict(tensors)
    for name, code in codes.items():
        columns[CODES + name] = code.contiguous()
    columns[ROW_SEAL] = seals_of(tensors[ROW])
    coded = {**document, "version": CODED_VERSION, ROW_SHA: _sha(tensors[ROW])}
    seal = _seal(coded, columns)
    signature = signed(_statement(seal))
    if not signature:
        return None
    return {**coded, "seal": seal, "signature": signature}, columns


def _statement(seal: str) -> str:
    """Returns the statement to sign for a file with codes: they belong to its rows, made as this version makes them.

    Never reword it: the signatures of files that exist depend on it.
    """
    return f"adanpc: the codes under the seal {seal} were made of its rows, by rule {RULE}"


def _seal(document: dict[str, Any], tensors: Columns) -> str:
    """Returns a hash of the whole file except the seal itself, the signature, and rows hashed in the document."""
    sealed = {name: value for name, value in document.items() if name not in UNSEALED}
    total = hashlib.sha256(canonical(sealed).encode())
    for name, tensor in sorted(tensors.items()):
        if name == ROW and ROW_SHA in document:
            continue
        total.update(canonical([name, NAMES[tensor.dtype], list(tensor.shape)]).encode())
        if ROW_SHA in document:
            total.update(_sha(tensor).encode())
        else:
            array: Any = tensor.numpy()
            total.update(array)
    return total.hexdigest()


def _sha(tensor: Tensor) -> str:
    """Returns the SHA-256 of the SHA-256s of all pieces of a tensor's bytes; two threads share the work."""
    data: Any = tensor.view(-1).view(torch.uint8).numpy()
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(lambda piece: hashlib.sha256(piece).digest(), pieces)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _document(state: State, recipe: dict[str, str]) -> dict[str, Any]:
    """Returns everything that is not a tensor, in a form that JSON can hold; not sealed yet."""
    return {
        **state["document"],
        "format": FORMAT,
        "version": version_of(state["document"]),
        "adanpc": __version__,
        "seal": "",
        "rows": len(state["tensors"]["id"]),
        "recipe": recipe,
    }


def _check(document: dict[str, Any], tensors: Columns) -> None:
    """Raises a ContentsError unless a file in the format of the document's preset may hold this."""
    check_document(document)
    found = {}
    for name, tensor in tensors.items():
        found[name] = (NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape))
    check_columns(document, _empty_table(document), beside_rows(document, found), found)
    check_tensors(document, tensors)


def _read(path: Path, *, lazy_rows: bool = False) -> State:
    """Returns the checked document and columns of a file, upgraded to the newest format of its kind."""
    with opened(path) as file:
        document = _document_in(file)
        found = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
        codes = []
        if document["version"] in (CODED_VERSION, format4.CODED_VERSION):
            codes = [name for name in found if name.startswith(CODES)]
        for name in codes:
            found.pop(name)
        check_columns(document, _empty_table(document), _due_beside_rows(document, found), found)
        if not codes:
            return _whole(document, {name: file.tensor(name) for name in file.entries})
        own = is_own(document["signature"], _statement(document["seal"]))
        if own and lazy_rows:
            return _without_rows(path, file, document)
        columns = {name: _with_spare(file, name) for name in file.entries}
    kept = Kept({name.removeprefix(CODES): columns.pop(name) for name in codes}, given_away=True)
    state = _whole(document, columns, kept)
    if not own:
        logger.warning("%s: this account did not make the codes in it, so they are made again from its rows", path)
        del state["kept"]
    return state


def _whole(document: dict[str, Any], columns: Columns, kept: Kept | None = None) -> State:
    """Returns the state in a file; raises a ContentsError if the seal is wrong or no bank can hold the state."""
    everything = dict(columns)
    if kept is not None:
        everything |= {CODES + name: column for name, column in kept.codes.items()}
    with ThreadPoolExecutor(1) as other_thread:
        sealing = other_thread.submit(_has_its_seal, document, everything)
        try:
            state = _checked(document, columns)
        finally:  # a wrong seal takes precedence, because it explains whatever else is wrong
            if not sealing.result():
                raise _wrong_seal()
    if kept is not None:
        state["kept"] = kept
    return state


def _with_spare(file: SafetensorsFile, name: str) -> Tensor:
    """Returns a column that an index may take over; a large one is followed by untouched memory for more rows."""
    entry = file.entries[name]
    if entry.end - entry.start < SMALL_BYTES:
        return file.tensor(name)
    return file.tensor(name, BLOCK_BYTES)


def _has_its_seal(document: dict[str, Any], columns: Columns) -> bool:
    if ROW_SHA in document and _sha(columns[ROW]) != document[ROW_SHA]:
        return False
    seal: str = document["seal"]
    return _seal(document, columns) == seal


def _wrong_seal() -> ContentsError:
    return ContentsError("its contents do not have the seal that it states")


def _without_rows(path: Path, file: SafetensorsFile, document: dict[str, Any]) -> State:
    """Returns the state in a file that this account signed, except the rows, which are read when they are needed.

    The contents were checked when they were saved and signed. If they match the seal, they have not changed since.
    """
    columns = {name: _with_spare(file, name) for name in file.entries if name != ROW}
    if _seal(document, columns) != document["seal"]:
        raise _wrong_seal()
    codes = {name.removeprefix(CODES): columns.pop(name) for name in list(columns) if name.startswith(CODES)}
    rows = RowsInFile(path, file.file.fileno(), file.entries[ROW], codes["row_seal"])
    if document["version"] == format4.CODED_VERSION:
        document, columns = format4.upgraded(document, columns)
    return {"document": document, "tensors": columns, "kept": Kept(codes, rows, given_away=True)}


def _checked(document: dict[str, Any], tensors: Columns) -> State:
    """Returns document and columns, upgraded to the newest format of their kind.

    Raises a ContentsError if no bank can hold them.
    """
    earlier = EARLIER.get(document["version"])
    if earlier is not None:
        document, tensors = earlier.upgraded(document, tensors)
    check_tensors(document, tensors)
    return {"document": document, "tensors": tensors}


def _document_in(file: SafetensorsFile) -> dict[str, Any]:
    """Returns the checked document of a file, in the format in which it was written."""
    text = file.metadata.get(KEY, "null")
    document: dict[str, Any] = json.loads(text)
    earlier = EARLIER.get(check_header(document))
    if earlier is None:
        check_document(document)
    else:
        earlier.check_document(document)
    if text != canonical(document):  # rules out repeated names, for example, which readers interpret differently
        raise ContentsError("its document is not written as adanpc writes it")
    return document


def _due_beside_rows(document: dict[str, Any], found: dict[str, tuple[str, list[int]]]) -> dict[str, list[int]]:
    """Returns the shapes of what a file with this document should hold besides its rows, by name in its format."""
    earlier = EARLIER.get(document["version"])
    if earlier is None:
        return beside_rows(document, found)
    shapes: dict[str, list[int]] = earlier.beside_rows(document, found)
    return shapes


def _empty_table(document: dict[str, Any]) -> Columns:
    """Returns the columns of a bank that has the document's settings and no rows."""
    return MemoryBank(**document["bank"]).table()
