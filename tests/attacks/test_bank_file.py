"""Damaged and forged bank files: refused in one sentence, and nothing else happens.

A forger knows the format: where it matters, files here have a right seal.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from attacks.forging import (
    ORDER,
    Columns,
    Document,
    compact,
    forged,
    honest,
    of_format_1,
    refusal,
    seal,
    taken_apart,
    with_header,
    written,
)
from presets import paper
from safetensors.torch import save_file

from adanpc.core import AdaNPC, Admission, MemoryBank
from adanpc.store import BankFileError, load, safetensors_file, save
from adanpc.store import file as file_module


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
        assert paper(loaded).temperature == 1
        assert paper(loaded).admission == Admission()


# Damage


@pytest.mark.no_cover
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_cut_at_every_byte(tmp_path: Path, storage: str) -> None:
    data = honest(storage)
    for end in range(len(data)):
        refusal(written(tmp_path / "bank", data[:end]))
    assert "0 bytes cannot hold a header of 0 bytes" in refusal(written(tmp_path / "bank", b""))
    assert "it is not a safetensors file: 100 bytes cannot" in refusal(written(tmp_path / "bank", data[:100]))
    size = len(data)
    for other in (data[:-1], data + b"\0"):
        words = f"its header describes {size} bytes, but it has {len(other)}"
        assert words in refusal(written(tmp_path / "bank", other))


def identity(classifier: AdaNPC) -> tuple[str, int]:
    """All that tells two classifiers apart."""
    return classifier.digest(), classifier.position


@pytest.mark.no_cover
@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_a_changed_byte_anywhere(tmp_path: Path, storage: str) -> None:
    """It is refused, or it was a blank behind the header and nothing has changed."""
    data = honest(storage)
    change = random.Random(0)
    blanks = 0
    same = identity(load(written(tmp_path / "bank", data)))
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= change.choice([1 << change.randrange(8), change.randrange(1, 256)])
        try:
            loaded = load(written(tmp_path / "bank", bytes(damaged)))
        except BankFileError:
            continue
        assert identity(loaded) == same
        blanks += 1
    assert blanks < 8


def test_a_blank_changed_to_another_blank(tmp_path: Path) -> None:
    document, columns = taken_apart(honest("float32"))
    data = forged(document, columns, multiple=64)
    start = 8 + int.from_bytes(data[:8], "little")
    assert data[start - 1 : start] == b" "
    same = identity(load(written(tmp_path / "bank", data)))
    assert identity(load(written(tmp_path / "bank", data[: start - 1] + b"\n" + data[start:]))) == same


@pytest.mark.no_cover
def test_a_changed_byte_anywhere_under_a_right_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What still loads is in order; nothing but a BankFileError is ever raised."""
    data = honest("int8")
    change = random.Random(1)
    loaded = 0
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


# Writers that do not replace the file but cut it


@pytest.mark.parametrize("left", [4, 100, 1500, -20])
def test_a_file_that_is_cut_after_its_size_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    data = honest("float32")
    path = written(tmp_path / "bank", data[:left])
    status = os.stat_result((path.stat().st_mode, 0, 0, 1, 0, 0, len(data), 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda _: status)
    assert refusal(path) == "it became shorter while it was read; load it again when nothing is writing to it"


CUT = """
import os, random, sys, time
path = sys.argv[1]
data = open(path, "rb").read()
places = random.Random(0)
print("ready", flush=True)
with open(path, "rb+") as file:
    while True:
        os.truncate(path, places.randrange(len(data)))
        file.seek(0)
        file.write(data)
        file.flush()
        time.sleep(places.uniform(0, 0.01))
"""
LOAD = """
import sys
import torch
from adanpc.store import BankFileError, load
torch.set_num_threads(1)
path, digest = sys.argv[1:]
loaded = 0
refused = 0
while loaded + refused < 100 or (not refused and loaded < 100_000):  # a busy machine may let it load very often
    try:
        found = load(path)
    except BankFileError:
        refused += 1
    else:
        assert found.digest() == digest
        loaded += 1
print(loaded, refused)
"""


def test_a_file_that_another_process_cuts_again_and_again(tmp_path: Path) -> None:
    """A mapped file would kill the reader by SIGBUS. This one is loaded or refused."""
    classifier = AdaNPC(MemoryBank(64, 3, storage="float16"))
    rows = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    classifier.learn(rows, torch.arange(1000) % 3)
    path = tmp_path / "bank"
    save(classifier, path)
    cutter = subprocess.Popen([sys.executable, "-c", CUT, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert cutter.stdout is not None
        assert cutter.stdout.readline() == "ready\n"
        command = [sys.executable, "-c", LOAD, str(path), classifier.digest()]
        loader = subprocess.run(command, capture_output=True, text=True, check=False)
        assert cutter.poll() is None
    finally:
        cutter.kill()
        cutter.communicate()
    assert (loader.returncode, loader.stderr) == (0, "")
    loaded, refused = loader.stdout.split()
    assert int(refused) > 0
    assert int(loaded) + int(refused) >= 100


# Not a bank


def test_what_is_not_a_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent").startswith("there is no such file; give the path of")
    assert refusal(tmp_path).startswith("it is a folder or a device; give the path of")
    os.mkfifo(tmp_path / "pipe")
    assert "device" in refusal(tmp_path / "pipe")  # and does not wait for a writer
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert refusal(tmp_path / "loop").startswith("Too many levels of symbolic links; check the path")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    assert "no such file" in refusal(tmp_path / "dangling")
    written(tmp_path / "bank", b"")
    assert "no such file" in refusal(tmp_path / "bank" / "under a file")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted on Linux only")
def test_what_is_refused_is_closed_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    written(tmp_path / "noise", b"noise")
    written(tmp_path / "bank", honest("float32"))
    before = os.listdir("/proc/self/fd")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "noise"):
        refusal(path)
    load(tmp_path / "bank")
    assert os.listdir("/proc/self/fd") == before


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path / "bank", honest("float32"))
    monkeypatch.setattr(os, "open", forbid)
    assert refusal(path).startswith("Permission denied; check the path, its permissions")


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
    text = pickle.dumps(bomb, 0).decode()
    document["recipe"]["layer"] = text
    row, history = document["judgments"][0]
    history[0][3] = text
    assert load(written(tmp_path / "bank", forged(document, columns))).bank.history(row)[0].why == text
    assert not (tmp_path / "crater").exists()


# Absurd sizes


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**62, 2**40, 10**9])
def test_a_header_that_claims_more_than_there_is(tmp_path: Path, length: int) -> None:
    path = written(tmp_path / "bank", length.to_bytes(8, "little") + honest("float32")[8:])
    assert f"bytes cannot hold a header of {length} bytes" in refusal(path)


def test_a_huge_file_of_holes(tmp_path: Path) -> None:
    path = written(tmp_path / "bank", (2**40).to_bytes(8, "little") + b"{")
    os.truncate(path, 2**41)
    assert f"{2**41} bytes cannot hold a header of {2**40} bytes" in refusal(path)
    written(path, honest("float32"))
    os.truncate(path, 2**41)
    assert f"bytes, but it has {2**41};" in refusal(path)


def test_a_file_that_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "bank", honest("float32"))

    def no_memory(size: int) -> None:
        raise MemoryError(f"Unable to allocate {size} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file, "main_memory", no_memory)
        assert "there is no memory for the" in refusal(path)

    def none_for_the_bank(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(AdaNPC, "load", none_for_the_bank)
    assert refusal(path) == "there is not enough memory; free some and try again"


def huge(document: Document, columns: Columns, changes: dict[str, Any], shapes: dict[str, list[int]]) -> bytes:
    """A file whose header agrees with its document on sizes that nothing is behind."""
    document["bank"].update({name: value for name, value in changes.items() if name in document["bank"]})
    document.update({name: value for name, value in changes.items() if name in document})
    ranks = list(ORDER)
    end = 0
    header: Document = {"__metadata__": {"adanpc": compact(document)}}
    for name in sorted(columns, key=lambda name: (ranks.index(str(columns[name].dtype)), name)):
        shape = shapes.get(name, list(columns[name].shape))
        start, end = end, end + prod(shape) * columns[name].itemsize
        header[name] = {"dtype": ORDER[str(columns[name].dtype)], "shape": shape, "data_offsets": [start, end]}
    return with_header(json.dumps(header).encode())


def test_columns_that_claim_exabytes(tmp_path: Path) -> None:
    document, columns = taken_apart(honest("float32"))
    means = ("source_mean", "stream_total")
    rows = 2**50
    shapes = {name: [rows, *columns[name].shape[1:]] for name in columns if name not in means}
    data = huge(document, columns, {"rows": rows, "next_id": rows}, shapes)
    assert f"bytes, but it has {len(data)};" in refusal(written(tmp_path / "bank", data))
    document, columns = taken_apart(honest("float32"))
    wide = {name: [*columns[name].shape[:-1], 2**24] for name in ("row", *means)}
    data = huge(document, columns, {"dim": 2**24}, wide)
    assert f"bytes, but it has {len(data)};" in refusal(written(tmp_path / "bank", data))


@pytest.mark.parametrize(
    ("part", "name"), [("bank", "dim"), ("bank", "classes"), ("classifier", "k"), ("classifier", "k_source")]
)
def test_sizes_that_no_file_could_hold(tmp_path: Path, part: str, name: str) -> None:
    for value in (2**24 + 1, 2**40, 2**63, 2**64, 10**400):
        document, columns = taken_apart(honest("float32"))
        document[part][name] = value
        assert f"{name} in its {part} must be between 0 and 16777216, got" in refusal(
            written(tmp_path / "bank", forged(document, columns))
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 200_000, "its header is not a JSON object"),
        (b'{"a":' * 100_000, "its header cannot be read: maximum recursion depth exceeded"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "its header cannot be read: Exceeds the limit"),
        (b'{"a": NaN}', "its column 'a' must be described by its type, shape and offsets, got nan"),
        (b'{"\xff": 1}', "its header cannot be read: 'utf-8' codec can't decode"),
        ('{"a": 1}'.encode("utf-16"), "its header is not a JSON object"),
        (b'{"a"}', "its header cannot be read: Expecting ':'"),
        (b"", "its header is not a JSON object"),
        (b"[]", "its header is not a JSON object"),
        (b"null", "its header is not a JSON object"),
        (b"{}", "not a bank"),
        (b'{"a": {}, "a": {}}', "its header names something twice; the file is damaged"),
        (b'{"__metadata__": null}', "its metadata must be texts"),
        (b'{"__metadata__": []}', "its metadata must be texts"),
        (b'{"__metadata__": {"adanpc": {"format": "adanpc-bank"}}}', "its metadata must be texts"),
        (b'{"__metadata__": {"adanpc": "{"}}', "Expecting property name"),
        (b'{"__metadata__": {"adanpc": "' + b"[" * 200_000 + b'"}}', "recursion"),
        (b'{"a\\nb": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', "begins at byte"),
        (b'{"' + b"a" * 9999 + b'": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', "begins at byte"),
        (b'{"a": {"dtype": "U8", "shape": [1]}}', "must be described by its type, shape and offsets"),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "b": 1}}', "must be described by"),
        (b'{"a": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}', "'a' has an unknown type, 'BF16'"),
        (b'{"a": {"dtype": ["U8"], "shape": [0], "data_offsets": [0, 0]}}', "'a' has an unknown type, ['U8']"),
        (b'{"a": {"dtype": {}, "shape": [0], "data_offsets": [0, 0]}}', "'a' has an unknown type, {}"),
        (b'{"a": {"dtype": "U8", "shape": 0, "data_offsets": [0, 0]}}', "'a' has no proper shape, 0"),
        (b'{"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 0]}}', "'a' has no proper shape, [-1]"),
        (b'{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 1]}}', "'a' has no proper shape, [True]"),
        (b'{"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}', "'a' has no proper shape, [1.0]"),
        (b'{"a": {"dtype": "U8", "shape": [0, 0, 0], "data_offsets": [0, 0]}}', "'a' has no proper shape"),
        (b'{"a": {"dtype": "U8", "shape": [' + b"9" * 4000 + b'], "data_offsets": [0, 0]}}', "no proper shape"),
        (b'{"a": {"dtype": "U8", "shape": [' + b"9," * 99999 + b'9], "data_offsets": [0, 0]}}', "no proper shape"),
        (b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0]}}', "'a' has no proper offsets, [0]"),
        (b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0, 0]}}', "'a' has no proper offsets"),
        (b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, "0"]}}', "'a' has no proper offsets"),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}}', "shape [1] cannot have -1 bytes"),
        (
            b'{"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 1]}}',
            "type I64 and shape [1] cannot have 1 bytes",
        ),
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
            assert "does not start at a multiple of its 8 bytes" in refusal(written(tmp_path / "bank", data))


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
    newer = {"format": "adanpc-bank", "version": 9, "whatever": "comes"}
    for each in ({**document, "version": 9}, newer):
        assert refusal(written(tmp_path / "bank", forged(each, columns))) == (
            "it was written by a newer adanpc, in format 9 after 8; upgrade adanpc"
        )
    refusal(written(tmp_path / "bank", forged({**newer, "version": 10**4000}, columns)))


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


VETO = ["veto", 0, "Ann", "", None]
STATES = "its judgments say that rows {} are vetoed, but its states say [1, 6]"


def vetoed(row: int) -> list[Any]:
    return [row, [VETO]]


def judged(*judgments: Any) -> Callable[[Document, Columns], None]:
    return change("judgments", to=list(judgments))


DOCUMENTS: list[tuple[str, Callable[[Document, Columns], None]]] = [
    ("there is no format 0", change("version", to=0)),
    ("version in its document has the wrong type: '2'", change("version", to="2")),
    ("version in its document has the wrong type: True", change("version", to=True)),
    ("there is no format -1", change("version", to=-1)),
    ("there is no format -1", change("version", to=-(10**4000))),
    ("missing or unknown fields: ['recipe']", without("recipe")),
    ("version in its document has the wrong type: None", without("version")),
    ("its document has missing or unknown fields", change("version", to=1)),
    ("missing or unknown fields: ['more']", change("more", to=1)),
    ("its bank has missing or unknown fields: ['dim']", without("bank", "dim")),
    ("its bank has missing or unknown fields: ['device']", change("bank", "device", to="cuda")),
    ("its classifier has missing or unknown fields: ['rule']", without("classifier", "rule")),
    ("bank in its document has the wrong type: []", change("bank", to=[])),
    ("dim in its bank has the wrong type: 4.0", change("bank", "dim", to=4.0)),
    ("dim must be at least 1, got 0", change("bank", "dim", to=0)),
    ("dim in its bank must be between 0 and 16777216, got -4", change("bank", "dim", to=-4)),
    ("classes must be at least 1, got 0", change("bank", "classes", to=0)),
    ("classes must be a whole number, got []", change("bank", "classes", to=[])),
    ("each of the classes must be a string, got 1", change("bank", "classes", to=[1, 2, 3])),
    ("classes must have different names", change("bank", "classes", to=["a", "a", "b"])),
    ("storage must be one of float32, float16, int8, progressive, got 'int4'", change("bank", "storage", to="int4")),
    ("evict must be one of", change("bank", "evict", to="lru")),
    ("capacity must be at least 1, got 0", change("bank", "capacity", to=0)),
    ("capacity in its bank has the wrong type: '4'", change("bank", "capacity", to="4")),
    ("soft in its bank has the wrong type: 1", change("bank", "soft", to=1)),
    ("its column 'soft' is", change("bank", "soft", to=False)),
    ("seed in its bank must be between 0 and", change("bank", "seed", to=-1)),
    ("seed in its bank must be between 0 and", change("bank", "seed", to=2**53 + 1)),
    ("seed in its bank has the wrong type: None", change("bank", "seed", to=None)),
    ("k must be at least 1, got 0", change("classifier", "k", to=0)),
    ("k in its classifier has the wrong type: None", change("classifier", "k", to=None)),
    ("k_source and k_target go together", change("classifier", "k_source", to=3)),
    ("rule must be one of", change("classifier", "rule", to="__import__('os')")),
    ("temperature must be", change("classifier", "temperature", to=0)),
    ("temperature must be", change("classifier", "temperature", to=-0.5)),
    ("temperature, balance and admission must be numbers, got 'hot'", change("classifier", "temperature", to="hot")),
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
    ("its admission has missing or unknown fields: ['max_copies']", without("admission", "max_copies")),
    ("must be numbers, got 'many'", change("admission", "max_copies", to="many")),
    ("centering must be one of", change("centering", "mode", to="mean")),
    ("prior must be at least 1", change("centering", "prior", to=0)),
    ("unit_features in its centering has the wrong type: 1", change("centering", "unit_features", to=1)),
    ("its centering has missing or unknown fields", without("centering", "unit_features")),
    ("stream_count in its document must be between 0 and", change("stream_count", to=-1)),
    ("stream_count in its document must be between 0 and", change("stream_count", to=2**53 + 1)),
    ("position in its document must be between 0 and", change("position", to=-1)),
    ("position in its document has the wrong type: True", change("position", to=True)),
    ("layer in its recipe has the wrong type: 5", change("recipe", "layer", to=5)),
    ("its recipe has missing or unknown fields: ['weights']", without("recipe", "weights")),
    ("its recipe has missing or unknown fields: ['more']", change("recipe", "more", to="")),
    ("seal in its document has the wrong type: 5", change("seal", to=5)),
    ("its ids, 0 … 8, must be between 0 and next_id - 1, 7", change("next_id", to=8)),
    ("deleted in its document must be ids of rows, each once and rising, got 0", change("deleted", to=[0, 0])),
    ("deleted in its document must be ids of rows", change("deleted", to=[True])),
    ("it holds row 1, which was deleted", change("deleted", to=[1])),
    ("next_id in its document must be between 0 and", change("next_id", to=2**63)),
    ("next_id in its document must be between 0 and", change("next_id", to=-1)),
    ("its column 'confidence' is", change("rows", to=8)),
    ("rows in its document must be between 0 and", change("rows", to=-1)),
    ("it holds 3 admitted rows, more than its capacity of 2", change("bank", "capacity", to=2)),
    (STATES.format("[]"), judged()),
    (STATES.format("[1, 6, 7]"), judged(vetoed(1), vetoed(6), vetoed(7))),
    (STATES.format("[1, 5]"), judged(vetoed(1), vetoed(5))),
    (STATES.format("[1]"), judged(vetoed(1), [6, [VETO, ["restore", 0, "", "", None]]])),
    (STATES.format("[1]"), judged(vetoed(1), [6, [["relabel", 0, "", "", None]]])),
    ("each row once, in the order of ids", judged(vetoed(6), vetoed(1))),
    ("judgments name row 1 twice", judged(vetoed(1), vetoed(1), vetoed(6))),
    ("its judgments are of row 9, which never existed", judged(vetoed(1), vetoed(6), vetoed(9))),
    ("which never existed", judged(vetoed(1), vetoed(6), vetoed(2**64))),
    ("which never existed", judged(vetoed(1), vetoed(6), vetoed(10**400))),
    ("row must be at least 0, got -1", judged(vetoed(-1), vetoed(1), vetoed(6))),
    ("its judgments of row 2 are empty", judged(vetoed(1), [2, []], vetoed(6))),
    ("its judgments of row 2 are empty", judged(vetoed(1), [2, {}], vetoed(6))),
    ("judgments must be [row, [[verdict,", judged(vetoed(1), [6, {"veto": VETO}])),
    ("its judgments on row 1 name a label outside", judged([1, [["veto", 3, "", "", None]]], vetoed(6))),
    ("its judgments on row 1 name a label outside", judged([1, [["veto", 2**70, "", "", None]]], vetoed(6))),
    ("label must be at least 0, got -1", judged([1, [["veto", -1, "", "", None]]], vetoed(6))),
    ("label must be a whole number, got True", judged([1, [["veto", True, "", "", None]]], vetoed(6))),
    ("verdict must be one of veto, restore, relabel, got 'ban'", judged([1, [["ban", 0, "", "", None]]], vetoed(6))),
    ("verdict must be one of", judged([1, [[[], 0, "", "", None]]], vetoed(6))),
    ("who must be a string, got None", judged([1, [["veto", 0, None, "", None]]], vetoed(6))),
    ("why must be a string, got 5", judged([1, [["veto", 0, "", 5, None]]], vetoed(6))),
    ("when must be a number, got 'now'", judged([1, [["veto", 0, "", "", "now"]]], vetoed(6))),
    ("when must be a number, got True", judged([1, [["veto", 0, "", "", True]]], vetoed(6))),
    ("when must be a finite number", judged([1, [["veto", 0, "", "", 10**400]]], vetoed(6))),
    ("when must be a", judged([1, [["veto", 0, "", "", float("nan")]]], vetoed(6))),
    ("when must be a finite number", judged([1, [["veto", 0, "", "", float("-inf")]]], vetoed(6))),
    ("judgments must be [row, [[verdict,", judged(1, 6)),
    ("judgments must be [row, [[verdict,", judged([1], [6])),
    ("judgments must be [row, [[verdict,", judged([1, 5], [6, 5])),
    ("judgments must be [row, [[verdict,", judged([1, [5]], [6, [5]])),
    ("judgments must be [row, [[verdict,", judged([1, [VETO[:4]]], vetoed(6))),
    ("row must be a whole number, got '1'", judged(["1", [VETO]], vetoed(6))),
    ("row must be a whole number, got True", judged([True, [VETO]], vetoed(6))),
    ("judgments in its document has the wrong type: {}", change("judgments", to={})),
]


@pytest.mark.parametrize(("words", "forge"), DOCUMENTS)
def test_forged_documents(tmp_path: Path, words: str, forge: Callable[[Document, Columns], None]) -> None:
    document, columns = taken_apart(honest("float32"))
    forge(document, columns)
    text = compact(document) if "seal in" in words else None
    assert words in refusal(written(tmp_path / "bank", forged(document, columns, text)))


def test_judgments_of_a_row_that_has_left(tmp_path: Path) -> None:
    document, columns = taken_apart(honest("float32"))
    columns = {name: column if "_" in name else numpy.delete(column, 3, 0) for name, column in columns.items()}
    document["rows"] = 8
    words = "it has judgments on row 3, which it does not hold"
    assert words in refusal(written(tmp_path / "bank", forged(document, columns)))


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
            ("its source_mean holds NaN or infinity", "source_mean", 0, NAN),
            ("its stream_total holds NaN or infinity", "stream_total", 3, INF),
            ("its ids do not rise", "id", 1, 0),
            ("its ids do not rise", "id", 1, 5),
            ("its ids do not rise", "id", 8, -(2**63)),  # the difference to the one before overflows
            ("its ids, -1 … 8, must be between 0 and", "id", 0, -1),
            ("its ids, 0 … 9, must be between 0 and next_id - 1, 8", "id", 8, 9),
            ("its ids, 0 … 9223372036854775807, must be between", "id", 8, 2**63 - 1),
            ("rows [1, 6] are vetoed, but its states say [1, 2, 6]", "state", 2, 2),
            ("rows [1, 6] are vetoed, but its states say [6]", "state", 1, 1),
            ("it holds 5 admitted rows, more than its capacity of 4", "origin", [0, 2], 1),
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
    monkeypatch.setattr("adanpc.core.table.CHUNK", 8)
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
        lambda columns: columns.pop("stream_total"),
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
    path = written(tmp_path / "bank", with_header(json.dumps(header).encode(), data[start:]))
    assert "begins at byte" in refusal(path)


# Files of format 1, which are still read


def test_the_forger_knows_format_1(tmp_path: Path) -> None:
    for storage in ("float32", "float16", "int8"):
        document, columns = taken_apart(of_format_1(storage))
        assert document["seal"] == seal(document, columns)
        document["classifier"]["temperature"] = 1
        document["recipe"] = {}
        loaded = load(written(tmp_path / "bank", forged(document, columns)))
        assert paper(loaded).temperature == 1


@pytest.mark.no_cover
def test_format_1_cut_or_changed(tmp_path: Path) -> None:
    data = of_format_1("int8")
    same = identity(load(written(tmp_path / "bank", data)))
    change = random.Random(3)
    for place in range(0, len(data), 5):
        refusal(written(tmp_path / "bank", data[:place]))
        damaged = bytearray(data)
        damaged[place] ^= change.randrange(1, 256)
        try:
            loaded = load(written(tmp_path / "bank", bytes(damaged)))
        except BankFileError:
            continue
        assert identity(loaded) == same


VETOES_1 = "vetoes do not name its vetoed rows, [0, 24, 63], in this order"


def vetoes(*rows: Any) -> Callable[[Document, Columns], None]:
    return change("vetoes", to=[[row, "", ""] for row in rows])


def renamed(old: str, new: str) -> Callable[[Document, Columns], None]:
    def forge(_: Document, columns: Columns) -> None:
        columns[new] = columns.pop(old)

    return forge


def copied(old: str, new: str) -> Callable[[Document, Columns], None]:
    def forge(_: Document, columns: Columns) -> None:
        columns[new] = columns[old]

    return forge


FORMAT_1: list[tuple[str, Callable[[Document, Columns], None]]] = [
    ("its document has missing or unknown fields: ['vetoes']", without("vetoes")),
    ("its document has missing or unknown fields: ['judgments']", change("judgments", to=[])),
    ("its document has missing or unknown fields", change("version", to=2)),
    ("its bank has missing or unknown fields: ['seed']", change("bank", "seed", to=0)),
    ("its admission has missing or unknown fields: ['max_copies']", change("admission", "max_copies", to="inf")),
    ("its recipe has missing or unknown fields: ['weights']", without("recipe", "weights")),
    ("dim in its bank must be between 0 and 16777216, got", change("bank", "dim", to=2**40)),
    ("storage must be one of", change("bank", "storage", to="int4")),
    ("rule must be one of", change("classifier", "rule", to="__import__('os')")),
    ("must be numbers, got 'hot'", change("classifier", "temperature", to="hot")),
    ("centering must be one of", change("centring", "mode", to="mean")),
    ("prior must be at least 1", change("centring", "prior", to=0)),
    ("count in its centring must be between 0 and", change("centring", "count", to=-1)),
    ("count in its centring must be between 0 and", change("centring", "count", to=2**53 + 1)),
    ("its column 'centring.mean' is", change("centring", "mean", to=False)),
    ("mean in its centring has the wrong type: 1", change("centring", "mean", to=1)),
    ("its column 'centring.mean' is 'absent'", renamed("centring.mean", "source_mean")),
    ("its column 'centring.total' is 'absent'", renamed("centring.total", "stream_total")),
    ("its column 'source_mean' is", copied("centring.mean", "source_mean")),
    ("its column 'stream_total' is", copied("centring.total", "stream_total")),
    ("its source_mean holds NaN or infinity", value("centring.mean", 0, NAN)),
    ("its stream_total holds NaN or infinity", value("centring.total", 3, INF)),
    ("it holds 12 admitted rows, more than its capacity of 11", change("bank", "capacity", to=11)),
    ("next_id - 1, 63", change("next_id", to=64)),
    (VETOES_1, vetoes()),
    (VETOES_1, vetoes(0, 24)),
    (VETOES_1, vetoes(0, 24, 62)),
    (VETOES_1, vetoes(0, 24, 63, 2**70)),
    (VETOES_1, vetoes(24, 0, 63)),
    (VETOES_1, vetoes(0, 0, 24, 63)),
    (VETOES_1.replace("63", "64"), value("id", 35, 64)),
    ("a veto must be a row's id and two texts", change("vetoes", to=[0, 24, 63])),
    ("a veto must be a row's id and two texts", change("vetoes", to=[[0, "Ann"], [24, "Ann"], [63, "Ann"]])),
    ("a veto must be a row's id and two texts", vetoes("0", 24, 63)),
    ("a veto must be a row's id and two texts", vetoes(False, 24, 63)),
    ("row 2 has a label outside 0 … 2", value("label", 2, 3)),
    ("row 2 is neither active nor vetoed", value("state", 2, 3)),
    ("row 2 has soft labels that are not probabilities", value("soft", (2, 2), NAN)),
    ("row 2 has a false residual", scaled("residual", 0.5)),
    ("row 2 has a code outside -127 … 127", value("fine", (2, 1), -128)),
]


@pytest.mark.parametrize(("words", "forge"), FORMAT_1)
def test_forged_files_of_format_1(tmp_path: Path, words: str, forge: Callable[[Document, Columns], None]) -> None:
    document, columns = taken_apart(of_format_1("int8"))
    forge(document, columns)
    assert words in refusal(written(tmp_path / "bank", forged(document, columns)))


def test_format_1_that_readers_could_differ_on(tmp_path: Path) -> None:
    document, columns = taken_apart(of_format_1("float32"))
    text = compact(document).replace('"rows"', '"rows":9,"rows"')
    assert "not written as adanpc writes it" in refusal(written(tmp_path / "bank", forged({}, columns, text)))
    text = compact({**document, "seal": "0" * 64})
    assert "do not have the seal that it states" in refusal(written(tmp_path / "bank", forged(document, columns, text)))


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
