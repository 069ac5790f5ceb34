"""Damaged and forged bank files: refused in one sentence, and nothing else happens.

A forger knows the format: where it matters, files here have a right seal.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import time
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from adanpc.core import AdaNPC, Admission, MemoryBank, Veto
from adanpc.models import Wrapped
from adanpc.store import BankFileError, load, save
from adanpc.store import file as file_module

ORDER = {"int64": "I64", "float64": "F64", "float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8"}
Document = dict[str, Any]
Columns = dict[str, numpy.ndarray[Any, Any]]


@cache
def honest(storage: str) -> bytes:
    """The bytes of a small bank with admitted and vetoed rows, soft labels, a capacity, and centring."""
    bank = MemoryBank(4, 3, storage=storage, capacity=4, soft=True)
    classifier = AdaNPC(bank, k=3, admission=Admission(min_confidence=0.1), centering="stream")
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    classifier.learn(rows[:5], torch.tensor([0, 1, 2, 0, 1]))
    classifier.step(rows[5:])
    classifier.apply(Veto((1, 6), "Ann", "wrong"))
    with TemporaryDirectory() as folder:
        save(Wrapped(torch.nn.Linear(1, 1), classifier, "fc", "scale"), Path(folder) / "bank")
        return (Path(folder) / "bank").read_bytes()


def refusal(path: Path) -> str:
    """The sentence by which the file is refused."""
    with pytest.raises(BankFileError) as caught:
        load(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path} was not loaded: ")
    assert "; " in sentence
    assert "\n" not in sentence
    assert len(sentence) < len(str(path)) + 400
    return sentence.removeprefix(f"{path} was not loaded: ")


def written(path: Path, data: bytes) -> Path:
    """The path, once it holds these bytes; not emptied first, which takes the file system most of the time."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.write(data)
        file.truncate()
    return path


def taken_apart(data: bytes) -> tuple[Document, Columns]:
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    document = json.loads(header.pop("__metadata__")["adanpc"])
    types = {short: name for name, short in ORDER.items()}
    columns = {}
    for name, about in header.items():
        first, end = about["data_offsets"]
        column = numpy.frombuffer(data[start + first : start + end], types[about["dtype"]]).reshape(about["shape"])
        columns[name] = column.copy()
    return document, columns


def compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def seal(document: Document, columns: Columns) -> str:
    total = hashlib.sha256(compact({name: document[name] for name in document if name != "seal"}).encode())
    for name in sorted(columns):
        total.update(compact([name, ORDER[str(columns[name].dtype)], columns[name].shape]).encode())
        total.update(columns[name].tobytes())
    return total.hexdigest()


def with_header(text: bytes, data: bytes = b"", multiple: int = 8) -> bytes:
    text += b" " * (-len(text) % multiple)
    return len(text).to_bytes(8, "little") + text + data


def forged(document: Document, columns: Columns, text: str | None = None, multiple: int = 8) -> bytes:
    """A file in perfect order around these contents, or around another text of the document."""
    ranks = list(ORDER)
    names = sorted(columns, key=lambda name: (ranks.index(str(columns[name].dtype)), name))
    header: Document = {"__metadata__": {"adanpc": text or compact({**document, "seal": seal(document, columns)})}}
    end = 0
    for name in names:
        start, end = end, end + columns[name].nbytes
        dtype = ORDER[str(columns[name].dtype)]
        header[name] = {"dtype": dtype, "shape": list(columns[name].shape), "data_offsets": [start, end]}
    return with_header(json.dumps(header).encode(), b"".join(columns[name].tobytes() for name in names), multiple)


def test_the_forger_can_write_what_save_writes() -> None:
    for storage in ("float32", "float16", "int8"):
        document, columns = taken_apart(honest(storage))
        assert document["seal"] == seal(document, columns)
        again, same = taken_apart(forged(document, columns))
        assert again == document
        assert all(numpy.array_equal(columns[name], same[name]) for name in columns)


def test_a_forged_file_in_order_is_loaded(tmp_path: Path) -> None:
    """So the refusals below are due to what they change."""
    for storage in ("float32", "float16", "int8"):
        document, columns = taken_apart(honest(storage))
        document["classifier"]["temperature"] = 1
        document["admission"]["min_confidence"] = -0.0
        loaded = load(written(tmp_path / "bank", forged(document, columns)))
        assert loaded.temperature == 1
        assert loaded.admission == Admission()


# Damage


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_cut_at_every_byte(tmp_path: Path, storage: str) -> None:
    data = honest(storage)
    for end in range(len(data)):
        refusal(written(tmp_path / "bank", data[:end]))
    assert "header too small" in refusal(written(tmp_path / "bank", b""))
    assert "invalid header length" in refusal(written(tmp_path / "bank", data[:100]))
    for other in (data[:-1], data + b"\0"):
        assert "file not fully covered" in refusal(written(tmp_path / "bank", other))


def state(classifier: AdaNPC) -> list[Any]:
    """All that tells two classifiers apart."""
    centring = classifier.centering
    assert centring.mean is not None
    return [
        classifier.bank.digest(), classifier.pools, classifier.rule, classifier.temperature, classifier.admission,
        centring.mode, centring.prior, centring.count, centring.total.tolist(), centring.mean.tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_a_changed_byte_anywhere(tmp_path: Path, storage: str) -> None:
    """It is refused, or it was a blank behind the header and nothing has changed."""
    data, change, blanks = honest(storage), random.Random(0), 0
    same = state(load(written(tmp_path / "bank", data)))
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= change.choice([1 << change.randrange(8), change.randrange(1, 256)])
        try:
            loaded = load(written(tmp_path / "bank", bytes(damaged)))
        except BankFileError:
            continue
        assert state(loaded) == same
        blanks += 1
    assert blanks < 8


def test_a_blank_changed_to_another_blank(tmp_path: Path) -> None:
    document, columns = taken_apart(honest("float32"))
    data = forged(document, columns, multiple=64)
    start = 8 + int.from_bytes(data[:8], "little")
    assert data[start - 1 : start] == b" "
    same = state(load(written(tmp_path / "bank", data)))
    assert state(load(written(tmp_path / "bank", data[: start - 1] + b"\n" + data[start:]))) == same


def test_a_changed_byte_anywhere_under_a_right_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What still loads is in order; nothing but a BankFileError is ever raised."""
    data, change, loaded = honest("int8"), random.Random(1), 0
    monkeypatch.setattr(file_module, "_seal", lambda document, _: document["seal"])
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] = change.choice(b'0123456789"\\,:[]{} \n-+.eE\x00\xff') if place % 2 else change.randrange(256)
        try:
            classifier = load(written(tmp_path / "bank", bytes(damaged)))
        except BankFileError:
            continue
        loaded += 1
        save(classifier, tmp_path / "again")
        classifier.step(torch.eye(4))
    assert loaded < len(data) / 2


def test_bytes_of_no_meaning(tmp_path: Path) -> None:
    noise = random.Random(2)
    for size in (1, 7, 8, 9, 40, 1000):
        for _ in range(20):
            refusal(written(tmp_path / "bank", noise.randbytes(size)))
            refusal(
                written(tmp_path / "bank", (size - 8 & ~7).to_bytes(8, "little", signed=True) + noise.randbytes(size))
            )


# Not a bank


def test_what_is_not_a_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent").startswith("there is no such file; give the path of")
    assert refusal(tmp_path).startswith("it is a folder or a device; give the path of")
    os.mkfifo(tmp_path / "pipe")
    assert "device" in refusal(tmp_path / "pipe")  # and does not wait for a writer
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "no such file" in refusal(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    assert "no such file" in refusal(tmp_path / "dangling")
    written(tmp_path / "bank", b"")
    assert "no such file" in refusal(tmp_path / "bank" / "under a file")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path / "bank", honest("float32"))
    monkeypatch.setattr(file_module, "safe_open", forbid)
    assert refusal(path).startswith("Permission denied; check the path, its rights")


def test_safetensors_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    for about in (None, {"format": "pt"}, {"adanpc": '"text"'}, {"adanpc": "{}"}, {"adanpc": '{"format": "other"}'}):
        save_file({"weight": torch.zeros(3, 3)}, path, about)
        assert refusal(path).startswith("it is a safetensors file but not a bank; give a file that adanpc saved")


class Bomb:
    """Unpickling this would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (self.path, "executed")


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "crater")
    written(tmp_path / "pickle", pickle.dumps(bomb))
    torch.save({"bank": bomb}, tmp_path / "torch")
    for name in ("pickle", "torch"):
        refusal(tmp_path / name)
    document, columns = taken_apart(honest("float32"))
    document["recipe"]["layer"] = document["vetoes"][0][2] = pickle.dumps(bomb, 0).decode()
    assert load(written(tmp_path / "bank", forged(document, columns))).bank.vetoes[1].why == document["vetoes"][0][2]
    assert not (tmp_path / "crater").exists()


# Absurd sizes


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**62, 2**40, 10**9])
def test_a_header_that_claims_more_than_there_is(tmp_path: Path, length: int) -> None:
    assert "header too large" in refusal(
        written(tmp_path / "bank", length.to_bytes(8, "little") + honest("float32")[8:])
    )


def test_a_huge_file_of_holes(tmp_path: Path) -> None:
    path = written(tmp_path / "bank", (2**40).to_bytes(8, "little") + b"{")
    os.truncate(path, 2**41)
    started = time.monotonic()
    assert "header too large" in refusal(path)
    written(path, honest("float32"))
    os.truncate(path, 2**41)
    assert "file not fully covered" in refusal(path)
    assert time.monotonic() - started < 5


def huge(document: Document, columns: Columns, changes: dict[str, Any], shapes: dict[str, list[int]]) -> bytes:
    """A file whose header agrees with its document on sizes that nothing is behind."""
    document["bank"].update({name: value for name, value in changes.items() if name in document["bank"]})
    document.update({name: value for name, value in changes.items() if name in document})
    ranks, end = list(ORDER), 0
    header: Document = {"__metadata__": {"adanpc": compact(document)}}
    for name in sorted(columns, key=lambda name: (ranks.index(str(columns[name].dtype)), name)):
        shape = shapes.get(name, list(columns[name].shape))
        start, end = end, end + prod(shape) * columns[name].itemsize
        header[name] = {"dtype": ORDER[str(columns[name].dtype)], "shape": shape, "data_offsets": [start, end]}
    return with_header(json.dumps(header).encode())


def test_columns_that_claim_exabytes(tmp_path: Path) -> None:
    document, columns = taken_apart(honest("float32"))
    rows = 2**50
    shapes = {name: [rows, *columns[name].shape[1:]] for name in columns if not name.startswith("centring.")}
    assert "file not fully covered" in refusal(
        written(tmp_path / "bank", huge(document, columns, {"rows": rows, "next_id": rows}, shapes))
    )
    document, columns = taken_apart(honest("float32"))
    wide = {name: [*columns[name].shape[:-1], 2**24] for name in ("row", "centring.mean", "centring.total")}
    assert "file not fully covered" in refusal(
        written(tmp_path / "bank", huge(document, columns, {"dim": 2**24}, wide))
    )


@pytest.mark.parametrize(
    ("part", "name"), [("bank", "dim"), ("bank", "classes"), ("classifier", "k"), ("classifier", "k_source")]
)
def test_sizes_that_no_file_could_hold(tmp_path: Path, part: str, name: str) -> None:
    for value in (2**24 + 1, 2**40, 2**63, 2**64, 10**400):
        document, columns = taken_apart(honest("float32"))
        document[part][name] = value
        assert f"{name} in its {part} must lie in 0 … 16777216, got" in refusal(
            written(tmp_path / "bank", forged(document, columns))
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 200_000, "invalid JSON in header"),
        (b'{"a":' * 100_000, "recursion limit exceeded"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "number out of range"),
        (b'{"a": NaN}', "invalid JSON in header"),
        (b'{"\xff": 1}', "invalid UTF-8 in header"),
        ('{"a": 1}'.encode("utf-16"), "invalid UTF-8 in header"),
        (b"", "invalid JSON in header"),
        (b"[]", "invalid JSON in header"),
        (b"null", "invalid JSON in header"),
        (b"{}", "not a bank"),
        (b'{"__metadata__": null}', "not a bank"),
        (b'{"__metadata__": []}', "invalid JSON in header"),
        (b'{"__metadata__": {"adanpc": {"format": "adanpc-bank"}}}', "expected a string"),
        (b'{"__metadata__": {"adanpc": "{"}}', "Expecting property name"),
        (b'{"__metadata__": {"adanpc": "' + b"[" * 200_000 + b'"}}', "recursion"),
        (b'{"a\\nb": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', "invalid offset for tensor"),
        (b'{"' + b"a" * 9999 + b'": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', "invalid offset"),
    ],
)
def test_headers_of_no_sense(tmp_path: Path, text: bytes, words: str) -> None:
    assert words in refusal(written(tmp_path / "bank", with_header(text)))


def test_columns_between_words(tmp_path: Path) -> None:
    document, columns = taken_apart(honest("float32"))
    for length in range(1, 9):
        document["recipe"]["layer"] = "l" * length
        data = forged(document, columns, multiple=1)
        if int.from_bytes(data[:8], "little") % 8:
            assert "columns do not start at multiples" in refusal(written(tmp_path / "bank", data))


@pytest.mark.parametrize(
    "forge",
    [
        lambda text: text.replace('"rows"', '"rows":9,"rows"'),
        lambda text: text.replace('"rows":', '"rows": '),
        lambda text: text.replace('"temperature":0.1', '"temperature":1e-1'),
        lambda text: text.replace("scale", "sc\\u0061le"),
    ],
)
def test_a_document_that_readers_could_differ_on(tmp_path: Path, forge: Callable[[str], str]) -> None:
    document, columns = taken_apart(honest("float32"))
    text = compact(document)
    assert forge(text) != text
    assert "not written as adanpc writes it" in refusal(written(tmp_path / "bank", forged({}, columns, forge(text))))


# Forged documents


def test_a_newer_format(tmp_path: Path) -> None:
    document, columns = taken_apart(honest("float32"))
    newer = {"format": "adanpc-bank", "version": 2, "whatever": "comes"}
    for each in ({**document, "version": 2}, newer):
        assert refusal(written(tmp_path / "bank", forged(each, columns))) == (
            "it was written by a newer adanpc, in format 2 after 1; upgrade adanpc"
        )


def change(*place: str, to: Any) -> Callable[[Document, Columns], None]:
    def forge(document: Document, _: Columns) -> None:
        for name in place[:-1]:
            document = document[name]
        document[place[-1]] = to

    return forge


def without(*place: str) -> Callable[[Document, Columns], None]:
    def forge(document: Document, _: Columns) -> None:
        for name in place[:-1]:
            document = document[name]
        del document[place[-1]]

    return forge


DOCUMENTS: list[tuple[str, Callable[[Document, Columns], None]]] = [
    ("there is no format 0", change("version", to=0)),
    ("version in its document has the wrong type: '1'", change("version", to="1")),
    ("version in its document has the wrong type: True", change("version", to=True)),
    ("version in its document must lie in 0 …", change("version", to=-1)),
    ("missing or unknown fields: ['recipe']", without("recipe")),
    ("missing or unknown fields: ['version']", without("version")),
    ("missing or unknown fields: ['more']", change("more", to=1)),
    ("its bank has missing or unknown fields: ['dim']", without("bank", "dim")),
    ("its bank has missing or unknown fields: ['device']", change("bank", "device", to="cuda")),
    ("its classifier has missing or unknown fields: ['rule']", without("classifier", "rule")),
    ("bank in its document has the wrong type: []", change("bank", to=[])),
    ("dim in its bank has the wrong type: 4.0", change("bank", "dim", to=4.0)),
    ("dim must be at least 1, got 0", change("bank", "dim", to=0)),
    ("dim in its bank must lie in 0 … 16777216, got -4", change("bank", "dim", to=-4)),
    ("classes must be at least 1, got 0", change("bank", "classes", to=0)),
    ("storage must be one of float32, float16, int8, got 'int4'", change("bank", "storage", to="int4")),
    ("evict must be one of", change("bank", "evict", to="lru")),
    ("capacity must be at least 1, got 0", change("bank", "capacity", to=0)),
    ("capacity in its bank has the wrong type: '4'", change("bank", "capacity", to="4")),
    ("soft in its bank has the wrong type: 1", change("bank", "soft", to=1)),
    ("its column 'soft' is", change("bank", "soft", to=False)),
    ("k must be at least 1, got 0", change("classifier", "k", to=0)),
    ("k in its classifier has the wrong type: None", change("classifier", "k", to=None)),
    ("k_source and k_target go together", change("classifier", "k_source", to=3)),
    ("rule must be one of", change("classifier", "rule", to="__import__('os')")),
    ("temperature must be", change("classifier", "temperature", to=0)),
    ("temperature must be", change("classifier", "temperature", to=-0.5)),
    ("temperature and admission must be numbers, got 'hot'", change("classifier", "temperature", to="hot")),
    ("temperature in its classifier has the wrong type: None", change("classifier", "temperature", to=None)),
    ("temperature in its classifier has the wrong type: True", change("classifier", "temperature", to=True)),
    ("must be numbers, got 1000000", change("classifier", "temperature", to=10**400)),
    ("its admission has missing or unknown fields: ['call']", change("admission", "call", to=1)),
    ("its admission has missing or unknown fields: ['min_margin']", without("admission", "min_margin")),
    ("min_margin in its admission has the wrong type: [0.5]", change("admission", "min_margin", to=[0.5])),
    ("must be numbers, got 'nan'", change("admission", "min_margin", to="nan")),
    ("min_margin in its admission has the wrong type: True", change("admission", "min_margin", to=True)),
    ("must be numbers, got nan", change("admission", "min_margin", to=float("nan"))),
    ("must be numbers, got inf", change("admission", "min_margin", to=float("inf"))),
    ("must be numbers, got 1000000", change("admission", "min_margin", to=10**400)),
    ("centring must be one of", change("centring", "mode", to="mean")),
    ("prior must be at least 1", change("centring", "prior", to=0)),
    ("count in its centring must lie in 0 …", change("centring", "count", to=-1)),
    ("count in its centring must lie in 0 …", change("centring", "count", to=2**53 + 1)),
    ("its column 'centring.mean' is", change("centring", "mean", to=False)),
    ("layer in its recipe has the wrong type: 5", change("recipe", "layer", to=5)),
    ("its recipe has missing or unknown fields: ['weights']", without("recipe", "weights")),
    ("its recipe has missing or unknown fields: ['more']", change("recipe", "more", to="")),
    ("seal in its document has the wrong type: 5", change("seal", to=5)),
    ("its ids, 0 … 8, must lie in 0 … next_id - 1, 7", change("next_id", to=8)),
    ("next_id in its document must lie in 0 …", change("next_id", to=2**63)),
    ("next_id in its document must lie in 0 …", change("next_id", to=-1)),
    ("its column 'confidence' is", change("rows", to=8)),
    ("rows in its document must lie in 0 …", change("rows", to=-1)),
    ("admitted rows, more than its capacity of 3", change("bank", "capacity", to=3)),
    ("vetoes do not name its vetoed rows, [1, 6]", change("vetoes", to=[])),
    ("vetoes do not name its vetoed rows, [1, 6]", change("vetoes", to=[[1, "", ""], [6, "", ""], [7, "", ""]])),
    ("vetoes do not name its vetoed rows, [1, 6]", change("vetoes", to=[[1, "", ""], [5, "", ""]])),
    ("vetoes do not name its vetoed rows, [1, 6]", change("vetoes", to=[[6, "", ""], [1, "", ""]])),
    ("vetoes do not name its vetoed rows, [1, 6]", change("vetoes", to=[[1, "", ""], [1, "", ""], [6, "", ""]])),
    ("a veto must be a row's id and two texts", change("vetoes", to=[1, 6])),
    ("a veto must be a row's id and two texts", change("vetoes", to=[[1, "Ann"], [6, "Ann"]])),
    ("a veto must be a row's id and two texts", change("vetoes", to=[["1", "Ann", ""], ["6", "Ann", ""]])),
    ("a veto must be a row's id and two texts", change("vetoes", to=[[True, "Ann", ""], [6, "Ann", ""]])),
]


@pytest.mark.parametrize(("words", "forge"), DOCUMENTS)
def test_forged_documents(tmp_path: Path, words: str, forge: Callable[[Document, Columns], None]) -> None:
    document, columns = taken_apart(honest("float32"))
    forge(document, columns)
    text = compact(document) if "seal in" in words else None
    assert words in refusal(written(tmp_path / "bank", forged(document, columns, text)))


@pytest.mark.parametrize("false", ["0" * 64, ""])
def test_a_false_seal(tmp_path: Path, false: str) -> None:
    document, columns = taken_apart(honest("float32"))
    text = compact({**document, "seal": false})
    assert "do not have the seal that it states" in refusal(written(tmp_path / "bank", forged(document, columns, text)))


# Forged columns


def value(name: str, place: Any, to: float) -> Callable[[Document, Columns], None]:
    def forge(_: Document, columns: Columns) -> None:
        columns[name][place] = to

    return forge


def scaled(name: str, by: float) -> Callable[[Document, Columns], None]:
    def forge(_: Document, columns: Columns) -> None:
        columns[name][2] = (columns[name][2].astype("float64") * by).astype(columns[name].dtype)

    return forge


def moved(name: str, by: float) -> Callable[[Document, Columns], None]:
    """The second coordinate of a row's ``name`` a little to the side, which its length does not show."""

    def forge(_: Document, columns: Columns) -> None:
        columns[name][2, 1] += by

    return forge


NAN, INF = float("nan"), float("inf")
COLUMNS: list[tuple[str, str, Callable[[Document, Columns], None]]] = [
    *[
        (words, storage, value(name, place, to))
        for storage in ("float32", "int8")
        for words, name, place, to in [
            ("row 3 has a label outside 0 … 2", "label", 3, 3),
            ("row 0 has a label outside 0 … 2", "label", 0, -1),
            ("row 8 has a label outside 0 … 2", "label", 8, 2**62),
            ("row 2 is neither active nor vetoed", "state", 2, 0),
            ("row 2 is neither active nor vetoed", "state", 2, 3),
            ("row 2 has an unknown origin", "origin", 2, 3),
            ("row 2 has an unknown origin", "origin", 2, 255),
            ("row 4 has a confidence that is NaN or infinite", "confidence", 4, NAN),
            ("row 4 has a confidence that is NaN or infinite", "confidence", 4, -INF),
            ("row 4 has soft labels that are not probabilities", "soft", (4, 2), NAN),
            ("row 4 has soft labels that are not probabilities", "soft", (4, 0), INF),
            ("its centring.mean holds NaN or infinity", "centring.mean", 0, NAN),
            ("its centring.total holds NaN or infinity", "centring.total", 3, INF),
            ("its ids do not rise", "id", 1, 0),
            ("its ids do not rise", "id", 1, 5),
            ("its ids, -1 … 8, must lie in 0 …", "id", 0, -1),
            ("its ids, 0 … 9, must lie in 0 … next_id - 1, 8", "id", 8, 9),
            ("its ids, 0 … 9223372036854775807, must lie in", "id", 8, 2**63 - 1),
            ("vetoes do not name its vetoed rows, [1, 2, 6]", "state", 2, 2),
            ("vetoes do not name its vetoed rows, [6]", "state", 1, 1),
            ("it holds 5 admitted rows, more than its capacity of 4", "origin", 0, 1),
        ]
    ],
    ("row 2 is NaN, infinite or off the grid", "float32", value("row", (2, 1), NAN)),
    ("row 2 is NaN, infinite or off the grid", "float32", value("row", (2, 1), INF)),
    ("row 2 is NaN, infinite or off the grid", "float32", value("row", (2, 1), 1e-40)),
    ("row 2 is NaN, infinite or off the grid", "float32", value("row", (2, 1), 2.0**-25)),
    ("row 2 is NaN, infinite or off the grid", "float32", scaled("row", 1 / 3)),
    ("row 2 does not have length one", "float32", scaled("row", 0)),
    ("row 2 does not have length one", "float32", scaled("row", 2)),
    ("row 2 does not have length one", "float32", value("row", (2, 1), 2.0**30)),
    ("row 2 does not have length one", "float16", value("row", (2, 1), NAN)),
    ("row 2 does not have length one", "float16", value("row", (2, 1), -INF)),
    ("row 2 does not have length one", "float16", scaled("row", 0)),
    ("row 2 does not have length one", "float16", scaled("row", 1.05)),
    ("row 2 has a scale that is not a positive number", "int8", scaled("scale", 0)),
    ("row 2 has a scale that is not a positive number", "int8", scaled("scale", -1)),
    ("row 2 has a scale that is not a positive number", "int8", scaled("scale", NAN)),
    ("row 2 has a scale that is not a positive number", "int8", value("scale", (2, 0), INF)),
    ("row 2 has a code outside -127 … 127", "int8", value("row", (2, 1), -128)),
    ("row 2 has a code outside -127 … 127", "int8", value("fine", (2, 1), -128)),
    *[
        ("row 2 has a false residual", "int8", forge)
        for forge in [
            *[scaled("residual", by) for by in (0, 0.5, 0.9999, 1.001, 10, -1, NAN, INF)],
            *[moved("fine", by) for by in (1, -1)],
            scaled("fine", 0),
            scaled("scale", 0.5),
            scaled("scale", 1e30),
        ]
    ],
]


@pytest.mark.parametrize(("words", "storage", "forge"), COLUMNS)
def test_forged_columns_under_a_right_seal(
    tmp_path: Path, words: str, storage: str, forge: Callable[[Document, Columns], None]
) -> None:
    document, columns = taken_apart(honest(storage))
    forge(document, columns)
    assert words in refusal(written(tmp_path / "bank", forged(document, columns)))


def test_codes_and_residual_of_another_length(tmp_path: Path) -> None:
    """All of an int8 row scaled alike: consistent in itself, but not a unit row."""
    document, columns = taken_apart(honest("int8"))
    columns["scale"] = columns["scale"] * 0.5
    step = numpy.ceil(columns["scale"] / 254 * 2**24) / 2**24
    coarse = columns["row"].astype("float32") * columns["scale"]
    rows = numpy.rint(coarse * 2**24) / 2**24 + columns["fine"] * step
    exact = columns["row"].astype("float64") * columns["scale"].astype("float64")
    hidden = numpy.linalg.norm(rows.astype("float64") - exact, axis=1, keepdims=True)
    columns["residual"] = (hidden * 1.0001).astype("float32")
    assert "row 0 does not have length one" in refusal(written(tmp_path / "bank", forged(document, columns)))


def test_rows_far_behind_the_first_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adanpc.store.check.CHUNK", 8)
    document, columns = taken_apart(honest("float32"))
    columns["row"][7, 0] = NAN
    assert "row 7 is NaN" in refusal(written(tmp_path / "bank", forged(document, columns)))


@pytest.mark.parametrize(
    "forge",
    [
        lambda columns: columns.pop("row"),
        lambda columns: columns.pop("fine"),
        lambda columns: columns.pop("id"),
        lambda columns: columns.pop("state"),
        lambda columns: columns.pop("centring.total"),
        lambda columns: columns.update(more=columns["id"]),
        lambda columns: columns.update(label=columns["label"].astype("float64")),
        lambda columns: columns.update(row=columns["row"].astype("uint8")),
        lambda columns: columns.update(confidence=columns["confidence"].astype("float64")),
        lambda columns: columns.update(id=columns["id"][:-1]),
        lambda columns: columns.update(label=columns["label"][:, None]),
        lambda columns: columns.update(scale=columns["scale"][:, 0]),
        lambda columns: columns.update(row=columns["row"].T.copy()),
        lambda columns: columns.update(soft=columns["soft"][:, :2].copy()),
    ],
)
def test_columns_missing_or_of_another_kind(tmp_path: Path, forge: Callable[[Columns], Any]) -> None:
    document, columns = taken_apart(honest("int8"))
    forge(columns)
    assert refusal(written(tmp_path / "bank", forged(document, columns))).startswith("its column '")


def test_two_columns_in_one_place(tmp_path: Path) -> None:
    """The same bytes as labels and as keys, and the bytes of keys unused."""
    data = honest("float32")
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["label"]["data_offsets"] = header["key"]["data_offsets"]
    assert "invalid offset for tensor" in refusal(
        written(tmp_path / "bank", with_header(json.dumps(header).encode(), data[start:]))
    )


# Saving where an attacker can write


def test_a_link_planted_where_leftovers_are_swept(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    written(victim / "precious", b"precious")
    os.utime(victim, (0, 0))
    link = tmp_path / ".bank.1-0123456789abcdef.tmp"
    link.symlink_to(victim)
    os.utime(link, (0, 0), follow_symlinks=False)
    save(AdaNPC(MemoryBank(2, 2)), tmp_path / "bank")
    assert (victim / "precious").read_bytes() == b"precious"
    assert (tmp_path / "bank").is_file()


def test_nobody_else_may_look_into_the_folder_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    replace = os.replace

    def watched(one: Path, two: Path) -> None:
        modes.append(one.parent.stat().st_mode & 0o777)
        replace(one, two)

    monkeypatch.setattr(os, "replace", watched)
    save(AdaNPC(MemoryBank(2, 2)), tmp_path / "bank")
    assert modes == [0o700]
