"""save and load: what comes back is what went in, and a crash at any moment leaves one of the two, whole."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from presets import paper
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from adanpc import files
from adanpc.core import (
    AdaNPC,
    Admission,
    Append,
    Judgment,
    MemoryBank,
    Origin,
    Relabel,
    Restore,
    Veto,
    everyone,
    nobody,
)
from adanpc.core.centering import Statistics
from adanpc.core.codec import canonical, decode, encode
from adanpc.core.safe import SafeSettings
from adanpc.errors import AdaNPCError
from adanpc.index import ProgressiveIndex, progressive, row_codes
from adanpc.models import RecipeError, Wrapped
from adanpc.store import BankFileError, load, save
from adanpc.store import file as file_module
from adanpc.store.safetensors_file import SafetensorsFile

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
DIM, CLASSES = 8, 3
STORAGE = ("float32", "float16", "int8")
EVICT = ("fifo", "balanced", "reservoir")
CENTERING = ("none", "source", "stream")
KINDS = [  # every pair of settings meets
    (STORAGE[i], EVICT[j], soft, CENTERING[(i + j + soft) % 3])
    for i in range(3)
    for j in range(3)
    for soft in (False, True)
]


def features(seed: int, count: int) -> torch.Tensor:
    """Clusters around the axes, away from zero, so that some answers are sure and some are not."""
    random = torch.Generator().manual_seed(seed)
    which = torch.randint(0, CLASSES, (count,), generator=random)
    return torch.eye(DIM)[which] + 0.4 * torch.randn(count, DIM, generator=random) + 0.5


def in_mid_stream(
    storage: str = "float32",
    evict: str = "fifo",
    soft: bool = False,
    centering: str = "none",
    seed: int = 0,
    why: str = "blurred “photo” \n\0 \\",
) -> AdaNPC:
    """A classifier that has learned, adapted past its capacity, and had rows vetoed, restored and relabeled."""
    bank = MemoryBank(DIM, CLASSES, storage=storage, capacity=12, evict=evict, soft=soft, seed=7)
    classifier = AdaNPC(bank, k=5, admission=Admission(min_confidence=0.5), centering=centering, prior=4)
    source = features(seed, 24)
    classifier.learn(source, source[:, :CLASSES].argmax(1), domain=torch.arange(24) % 2, keys=torch.arange(24) * 7)
    classifier.step(features(seed + 1, 40), domain=5, keys=torch.arange(40))
    admitted = bank.table()["id"][bank.table()["origin"] == Origin.ADMITTED].tolist()
    classifier.apply(Veto((0, 3, admitted[0], admitted[-1]), "Ann", why, 1.5))
    classifier.apply(Restore((3,), "Bob", "it was fine", 1_700_000_000))
    classifier.apply(Relabel((0, 5, admitted[1]), 1, "Cem"))  # a vetoed row, a source row and an admitted one
    classifier.apply(Append(features(seed + 2, 1), torch.tensor([1]), Origin.EXPERT, confidence=torch.tensor([0.25])))
    return classifier


def assert_same(one: AdaNPC, two: AdaNPC) -> None:
    assert one.digest() == two.digest()
    assert one.bank.digest() == two.bank.digest()
    assert one.bank.config() == two.bank.config()
    assert one.position == two.position
    assert torch.equal(one.bank.admitted, two.bank.admitted)
    assert one.bank.vetoes == two.bank.vetoes
    assert one.bank.contents.judgments == two.bank.contents.judgments
    assert one.settings == two.settings
    ours = one.bank.contents.statistics
    theirs = two.bank.contents.statistics
    assert ours.stream_count == theirs.stream_count
    assert_same_tensor(ours.source_mean, theirs.source_mean)
    assert_same_tensor(ours.stream_total, theirs.stream_total)


def assert_same_tensor(one: torch.Tensor | None, two: torch.Tensor | None) -> None:
    assert (one is None) == (two is None)
    assert one is None or two is None or (one.dtype == two.dtype and torch.equal(one, two))


def assert_same_answer(one: AdaNPC, two: AdaNPC, queries: torch.Tensor) -> None:
    ours = one.step(queries)
    theirs = two.step(queries)
    for name in ("probs", "weights", "joined"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    for name in ("ids", "similarity", "labels"):
        assert torch.equal(getattr(ours.neighbors, name), getattr(theirs.neighbors, name))


@pytest.mark.parametrize(("storage", "evict", "soft", "centering"), KINDS)
def test_a_loaded_classifier_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, storage: str, evict: str, soft: bool, centering: str
) -> None:
    classifier = in_mid_stream(storage, evict, soft, centering)
    save(classifier, tmp_path / "bank")
    loaded = load(tmp_path / "bank")
    assert_same(classifier, loaded)
    for seed in range(2):
        assert_same_answer(classifier, loaded, features(100 + seed, 20))
        for each in (classifier, loaded):
            each.apply(Veto((int(each.bank.table("id")["id"][-1]),), "Cem"))
        assert_same(classifier, loaded)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"k_source": 4, "k_target": 2, "rule": "uniform"},
        {"k": numpy.int64(7), "temperature": numpy.float32(0.3), "rule": "paper"},
        {"temperature": 1e300, "rule": "published"},
        {"temperature": 1, "admission": everyone},
        {"admission": nobody},
        {"admission": Admission(min_confidence=inf, min_margin=inf, max_entropy=0.1 + 0.2, class_quota=3)},
        {"centering": "stream", "prior": numpy.int32(3)},
    ],
)
def test_every_setting_comes_back(tmp_path: Path, settings: dict[str, Any]) -> None:
    classifier = AdaNPC(MemoryBank(DIM, CLASSES), **settings)
    save(classifier, tmp_path / "bank")
    loaded = load(tmp_path / "bank", device=torch.device("cpu"))
    assert_same(classifier, loaded)


def test_an_empty_bank_and_a_lone_surrogate_survive(tmp_path: Path) -> None:
    classifier = AdaNPC(MemoryBank(1, 1, storage="int8", soft=True))
    save(classifier, tmp_path / "bank")
    assert_same(classifier, load(tmp_path / "bank"))
    classifier.learn(torch.ones(2, 1), torch.zeros(2, dtype=torch.int64))
    classifier.apply(Veto((1,), "\ud800"))
    save(classifier, str(tmp_path / "bank"))
    assert_same(classifier, load(str(tmp_path / "bank")))


def test_saving_changes_nothing_and_says_the_same_twice(tmp_path: Path) -> None:
    classifier = in_mid_stream("int8", centering="stream")
    before = classifier.bank.digest()
    save(classifier, tmp_path / "one")
    save(load(tmp_path / "one"), tmp_path / "two")
    assert classifier.bank.digest() == before
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_what_is_loaded_does_not_hold_on_to_the_file(tmp_path: Path) -> None:
    save(in_mid_stream(centering="stream"), tmp_path / "bank")
    loaded = load(tmp_path / "bank")
    digest = loaded.digest()
    (tmp_path / "bank").write_bytes(b"\xff" * 9999)
    assert loaded.digest() == digest
    statistics = loaded.bank.contents.statistics
    for mean in (statistics.source_mean, statistics.stream_total):
        assert mean is not None
        assert mean.untyped_storage().nbytes() == DIM * 8


# With a model


def model(seed: int = 0) -> nn.Module:
    """Features at the input of layer 2; the same weights on every machine."""
    made = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, CLASSES))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.arange(parameter.numel()).add(seed).remainder(7).reshape(parameter.shape) / 7)
    return made


def wrapped_in_mid_stream(preprocessing: Any = "scale to 0 … 1", **kind: Any) -> Wrapped:
    return Wrapped(model(), in_mid_stream(**kind), "input of 2", preprocessing)


def assert_same_stream(one: Wrapped, two: Wrapped) -> None:
    assert (one.layer, one.preprocessing, one.recipe) == (two.layer, two.preprocessing, two.recipe)
    for seed in range(2):
        ours = one.step(features(200 + seed, 20))
        theirs = two.step(features(200 + seed, 20))
        assert torch.equal(ours.probs, theirs.probs)
        assert torch.equal(ours.joined, theirs.joined)
        assert_same(one.classifier, two.classifier)


@pytest.mark.parametrize("preprocessing", [None, "größe 224 × 224", nn.Flatten(2), features])
def test_a_wrapped_model_goes_on_as_if_it_had_never_stopped(tmp_path: Path, preprocessing: Any) -> None:
    wrapped = wrapped_in_mid_stream(preprocessing, storage="int8", soft=True, centering="stream")
    save(wrapped, tmp_path / "bank")
    loaded = load(tmp_path / "bank", model(), preprocessing=preprocessing)
    assert isinstance(loaded, Wrapped)
    assert_same_stream(wrapped, loaded)
    save(loaded, tmp_path / "bank")  # and once more, from what was loaded
    assert_same_stream(load(tmp_path / "bank", wrapped.model, preprocessing=preprocessing), loaded)


def test_names_of_classes_come_back(tmp_path: Path) -> None:
    bank = MemoryBank(DIM, ["cat", "dog", "größer\n"])
    save(AdaNPC(bank), tmp_path / "bank")
    assert load(tmp_path / "bank").bank.names == bank.names


def test_without_a_model_the_classifier_comes_back(tmp_path: Path) -> None:
    wrapped = wrapped_in_mid_stream()
    save(wrapped, tmp_path / "bank")
    loaded = load(tmp_path / "bank")
    assert isinstance(loaded, AdaNPC)
    assert_same(wrapped.classifier, loaded)
    save(loaded, tmp_path / "bank")  # its features may have come from anywhere: no model is recorded
    with pytest.raises(RecipeError, match="bank was saved without a model; load it without one, or wrap"):
        load(tmp_path / "bank", wrapped.model, preprocessing=wrapped.preprocessing)


@pytest.mark.parametrize(
    ("seed", "preprocessing", "words"),
    [
        (1, "scale to 0 … 1", "built with weights 'features:[0-9a-f]{16}', this model has 'features:[0-9a-f]{16}'"),
        (
            0,
            "scale to -1 … 1",
            "built from inputs prepared by 'scale to 0 … 1', not by 'scale to -1 … 1': pass the former",
        ),
        (0, None, "built from inputs prepared by 'scale to 0 … 1': pass preprocessing=transform"),
    ],
)
def test_another_model_or_preprocessing_is_refused(tmp_path: Path, seed: int, preprocessing: Any, words: str) -> None:
    save(wrapped_in_mid_stream(), tmp_path / "bank")
    with pytest.raises(RecipeError, match=f"bank was not loaded: the bank was {words}"):
        load(tmp_path / "bank", model(seed), preprocessing=preprocessing)


def test_preprocessing_where_none_was_recorded_is_refused(tmp_path: Path) -> None:
    save(wrapped_in_mid_stream(None), tmp_path / "bank")
    with pytest.raises(RecipeError, match="built without a preprocessing, got 'scale': leave"):
        load(tmp_path / "bank", model(), preprocessing="scale")


def test_arguments_in_the_wrong_order_are_named(tmp_path: Path) -> None:
    wrapped = wrapped_in_mid_stream()
    with pytest.raises(BankFileError, match=r"as in save\(wrapped, path\), got Wrapped"):
        save(tmp_path / "bank", wrapped)  # type: ignore[arg-type]
    with pytest.raises(BankFileError, match=r"as in load\(path, model\), got Sequential"):
        load(model(), tmp_path / "bank")  # type: ignore[call-overload]
    with pytest.raises(AdaNPCError, match=r"the model must be a torch\.nn\.Module, got int"):
        load(tmp_path / "bank", 3)  # type: ignore[call-overload]


# The format


def test_the_bytes_of_a_small_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "__version__", "0.2.0")
    classifier = AdaNPC(MemoryBank(2, 3, seed=5), centering="stream")
    classifier.learn(torch.tensor([[4.0, 0.0], [0.0, 3.0]]), torch.tensor([2, 0]), keys=torch.tensor([7, -2]))
    classifier.step(torch.tensor([[0.5, 0.0]]))
    classifier.apply(Veto((1,), "Ann", "no", 1.5))
    save(Wrapped(model(), classifier, "fc", "nöne"), tmp_path / "bank")
    weights = Wrapped(model(), classifier, "fc").recipe["weights"]
    document = (
        '{"adanpc":"0.2.0","admission":{"class_quota":"inf","max_copies":"inf","max_entropy":"inf",'
        '"min_confidence":0.9,"min_margin":0.0},'
        '"bank":{"capacity":null,"classes":3,"dim":2,"evict":"fifo","seed":5,"soft":false,"storage":"float32"},'
        '"centering":{"mode":"stream","prior":16,"unit_features":true},'
        '"classifier":{"k":10,"k_source":null,"k_target":null,"rule":"share","temperature":0.1},'
        '"deleted":[],"format":"adanpc-bank","judgments":[[1,[["veto",0,"Ann","no",1.5]]]],"next_id":3,"position":3,'
        '"recipe":{"layer":"fc","preprocessing":"n\\u00f6ne","weights":"' + weights + '"},'
        '"rows":3,SEAL"stream_count":1,"version":2}'
    )
    half = "000000000000e03f"
    columns = {
        "confidence": ("F32", [3], "0000803f 0000803f 0000803f"),  # 1, 1, 1
        "domain": ("I64", [3], "ffffffffffffffff ffffffffffffffff ffffffffffffffff"),  # -1, unknown
        "id": ("I64", [3], "0000000000000000 0100000000000000 0200000000000000"),
        "key": ("I64", [3], "0700000000000000 feffffffffffffff ffffffffffffffff"),
        "label": ("I64", [3], "0200000000000000 0000000000000000 0200000000000000"),
        "origin": ("U8", [3], "000001"),  # source, source, admitted
        "row": ("F32", [3, 2], "f304353f f30435bf f30435bf f304353f f304353f f30435bf"),  # (1, -1) at length one, …
        "source_mean": ("F64", [2], f"{half} {half}"),
        "state": ("U8", [3], "010201"),  # active, vetoed, active
        "stream_total": ("F64", [2], "000000000000f03f 0000000000000000"),  # 1, 0
    }
    sealed = document.replace("SEAL", "")
    data = (tmp_path / "bank").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    end = start
    text = header.pop("__metadata__").pop("adanpc")
    assert header.keys() == columns.keys()
    total = hashlib.sha256(sealed.encode())
    for name, (dtype, shape, digits) in columns.items():
        first, last = header[name]["data_offsets"]
        assert (header[name]["dtype"], header[name]["shape"]) == (dtype, shape)
        assert data[start + first : start + last] == bytes.fromhex(digits)
        total.update(json.dumps([name, dtype, shape], separators=(",", ":")).encode() + bytes.fromhex(digits))
        end += last - first
    assert text == document.replace("SEAL", f'"seal":"{total.hexdigest()}",')
    assert end == len(data)


@pytest.mark.parametrize("storage", [*STORAGE, "progressive"])
def test_the_safetensors_library_reads_the_file(tmp_path: Path, storage: str) -> None:
    classifier = in_mid_stream(storage, soft=True, centering="stream")
    save(classifier, tmp_path / "bank")
    tensors = load_file(tmp_path / "bank")
    statistics = classifier.bank.contents.statistics
    assert_same_tensor(tensors.pop("stream_total"), statistics.stream_total)
    assert_same_tensor(tensors.pop("source_mean"), statistics.source_mean)
    table = classifier.bank.table()
    assert tensors.keys() == table.keys()
    assert all(torch.equal(tensors[name], table[name]) for name in table)
    with safe_open(tmp_path / "bank", "pt") as opened:
        assert opened.metadata().keys() == {"adanpc"}
        assert json.loads(opened.metadata()["adanpc"])["bank"] == classifier.bank.config()


def blocks(language: str) -> list[str]:
    """The code blocks of docs/bank-format.md in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "bank-format.md").read_text(), re.DOTALL)


def test_a_bank_with_codes_comes_back_in_mid_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_codes, "ROWS_FOR_CODES", 16)
    monkeypatch.setattr(progressive, "ROWS_PER_WANTED", 1)
    classifier = in_mid_stream("progressive", soft=True, centering="stream")
    without_codes = AdaNPC.load(in_mid_stream("progressive", soft=True, centering="stream").state())
    save(classifier, tmp_path / "bank")
    loaded = load(tmp_path / "bank")
    assert_same(loaded, classifier)
    assert isinstance(loaded.bank.contents.index, ProgressiveIndex)
    assert loaded.bank.contents.index.coded
    assert loaded.bank.config()["storage"] == "progressive"
    assert load_file(tmp_path / "bank")["row"].dtype == torch.float16
    queries = features(9, 30)
    for other in (loaded, without_codes):
        ours = classifier.predict(queries)
        theirs = other.predict(queries)
        assert torch.equal(ours.probs, theirs.probs)
        assert torch.equal(ours.neighbors.ids, theirs.neighbors.ids)
    save(loaded, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "bank").read_bytes()


@pytest.mark.parametrize("storage", STORAGE)
def test_the_reader_in_the_docs_needs_no_adanpc(tmp_path: Path, storage: str) -> None:
    classifier = in_mid_stream(storage, soft=True, centering="stream")
    wrapped = Wrapped(model(), classifier, "fc")
    save(wrapped, tmp_path / "bank")
    (code,) = blocks("python")
    assert re.findall(r"import (.*)", code) == ["hashlib, json, numpy, pathlib"]
    assert len(code.splitlines()) <= 25
    names: dict[str, Any] = {}
    exec(code, names)
    document, columns, rows = names["read_bank"](tmp_path / "bank")
    table = classifier.bank.table()
    assert document["recipe"] == wrapped.recipe
    assert columns.keys() - {"source_mean", "stream_total"} == table.keys()
    assert all(numpy.array_equal(columns[name], table[name].numpy()) for name in table)
    assert rows.dtype == numpy.float32
    assert numpy.array_equal(rows, classifier.bank.rows(table["id"]).numpy())
    for version in (1, 2):
        golden = GOLDEN / f"format-{version}-{storage}.safetensors"
        document, columns, rows = names["read_bank"](golden)
        assert document["version"] == version
        assert numpy.array_equal(rows, load(golden).bank.rows(torch.from_numpy(columns["id"].copy())).numpy())
    data = (tmp_path / "bank").read_bytes()
    for damaged in (data[:-20] + bytes([data[-20] ^ 1]) + data[-19:], data.replace(b"Ann", b"Bob")):
        (tmp_path / "bank").write_bytes(damaged)
        with pytest.raises(AssertionError, match="damaged"):
            names["read_bank"](tmp_path / "bank")


# Files that were written once and are kept


def digest_of_release_1(bank: MemoryBank) -> str:
    """A hash of settings and rows, as the first release computed it."""
    config = {name: value for name, value in bank.config().items() if name != "seed"}
    vetoes = [[row, veto.who, veto.why] for row, veto in bank.vetoes.items()]
    total = hashlib.sha256(json.dumps([config, bank.next_id, vetoes]).encode())
    for name, column in sorted(bank.table().items()):
        total.update(name.encode() + column.numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize(
    ("storage", "digest"),
    [
        ("float32", "5e79f0fbd4859d712db0c82dd5075d80cb7c351e4f5cf13489f1b3ec044d1f61"),
        ("float16", "6fccab28bb7edc2b5fdc6379579e4afae96587e494cc81ea7d389fd0626b292e"),
        ("int8", "8acff19e71195cf9b5d0ad610a42b8c1deffc6c478cb81abf6ef309970fe850d"),
    ],
)
def test_files_of_format_1_load_for_ever(tmp_path: Path, storage: str, digest: str) -> None:
    """The first release wrote what wrapped_in_mid_stream(…, why="blurred") gave then: float32 with fifo; float16 with
    balanced, soft and source; int8 with reservoir, soft and stream.
    """
    path = GOLDEN / f"format-1-{storage}.safetensors"
    loaded = load(path)
    assert digest_of_release_1(loaded.bank) == digest
    assert not paper(loaded).centering.unit_features
    assert loaded.bank.vetoes[0] == Judgment("veto", int(loaded.bank.table()["label"][0]), "Ann", "blurred", None)
    assert loaded.predict(torch.eye(DIM)[:CLASSES] + 0.5).labels.tolist() == [0, 1, 2]
    assert load(path, model(), preprocessing="scale to 0 … 1").layer == "input of 2"
    save(loaded, tmp_path / "bank")
    assert_same(load(tmp_path / "bank"), loaded)


@pytest.mark.parametrize(
    ("storage", "digest"),
    [
        ("float32", "26118730638d53aeb508e3a005b399cfafcb51e1311776780cc6d63a016c7c3f"),
        ("float16", "dbbc30da279e2d39cbc34f595625922e6f8ae4cb4ad729736f27f536ef603aae"),
        ("int8", "8dc115161c3fd5c3e962a5ea4a2ef2671cfd9791136dbad3fb70afd20fb02b5d"),
    ],
)
def test_files_of_format_2_load_for_ever(tmp_path: Path, storage: str, digest: str) -> None:
    """They hold what ``golden_of_format_2`` gave when they were written, with everything that a file can hold."""
    path = GOLDEN / f"format-2-{storage}.safetensors"
    loaded = load(path)
    assert loaded.digest() == digest
    assert loaded.position == 6
    assert len(loaded.bank.contents.deleted) == 1
    assert [judgment.verdict for judgment in loaded.bank.history(3)] == ["veto", "restore"]
    assert loaded.bank.history(0)[0].when == 1.5
    assert loaded.bank.history(0)[1] == Judgment("relabel", loaded.bank.history(0)[0].label, "Cem")
    assert set(loaded.bank.vetoes) - {0}
    wrapped = load(path, model(), preprocessing="scale to 0 … 1")
    assert wrapped.layer == "input of 2"
    save(wrapped, tmp_path / "bank")
    again = load_file(tmp_path / "bank")
    for name, column in load_file(path).items():
        assert_same_tensor(again[name], column)
    assert document_in(tmp_path / "bank") == document_in(path)


def golden_of_format_2(storage: str) -> Wrapped:
    """What the files of format 2 were written from."""
    return wrapped_in_mid_stream(storage=storage, evict="reservoir", soft=True, centering="stream", why="blurred")


def document_in(path: Path) -> dict[str, Any]:
    """The document of a file, but for the version of adanpc that wrote it."""
    with safe_open(path, "pt") as opened:
        document: dict[str, Any] = json.loads(opened.metadata()["adanpc"])
    del document["adanpc"], document["seal"]
    return document


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("storage", STORAGE)
def test_golden_files_go_on_as_the_release_that_wrote_them_did(version: int, storage: str) -> None:
    """All vetoed rows are restored first: in format 1 they filled the capacity, and since then they do not."""
    expected = load_file(GOLDEN / f"format-{version}-answers.safetensors")
    classifier = load(GOLDEN / f"format-{version}-{storage}.safetensors")
    for name, value in answers(classifier, expected["predicted"], expected["streamed"]).items():
        assert_same_tensor(value, expected[f"{storage}.{name}"])


def assert_sharpened(given: torch.Tensor, earlier: torch.Tensor, within: float = 1e-6) -> None:
    """Probabilities are those of an earlier release, which did not yet raise them to the power of 2.5."""
    powers = earlier.double() ** 2.5
    expected = powers / powers.sum(1, keepdim=True)
    assert torch.equal(given.argmax(1), earlier.argmax(1))
    assert given.flatten().tolist() == pytest.approx(expected.flatten().tolist(), abs=within)


def test_files_of_format_3_load_for_ever(tmp_path: Path) -> None:
    """It holds a bank in the middle of a stream, written when the preset "safe" was new."""
    expected = load_file(GOLDEN / "format-3-answers.safetensors")
    classifier = load(GOLDEN / "format-3-float32.safetensors")
    assert classifier.settings == SafeSettings(balance=0.25, screen=False, carry=False, home=False)
    answer = classifier.predict(expected["queries"])
    assert answer.frozen is not None
    assert answer.trust is not None
    assert_sharpened(answer.frozen, expected["frozen"])
    # How far classes seem mixed is now read before a query, not after it, which changes the last few digits.
    assert_sharpened(answer.probs, expected["probs"], within=0.04)
    assert answer.trust.tolist() == pytest.approx(expected["trust"].tolist(), abs=1e-6)
    save(classifier, tmp_path / "bank")
    assert document_in(tmp_path / "bank")["version"] == 7
    assert load(tmp_path / "bank").digest() == classifier.digest()


def test_files_of_format_4_load_for_ever(tmp_path: Path) -> None:
    """It holds a bank in the middle of a stream, from before gains and foreign queries were counted."""
    expected = load_file(GOLDEN / "format-4-answers.safetensors")
    classifier = load(GOLDEN / "format-4-float32.safetensors")
    assert classifier.settings == SafeSettings(balance=0.25)
    answer = classifier.predict(expected["queries"])
    assert answer.frozen is not None
    assert answer.trust is not None
    assert_sharpened(answer.frozen, expected["frozen"])
    assert_sharpened(answer.probs, expected["probs"])
    assert_same_tensor(answer.trust, expected["trust"])
    save(classifier, tmp_path / "bank")
    assert document_in(tmp_path / "bank")["version"] == 7
    assert load(tmp_path / "bank").digest() == classifier.digest()


def test_files_of_format_5_load_for_ever(tmp_path: Path) -> None:
    """It holds a bank in the middle of a stream, from before it was known how far away a stream is."""
    expected = load_file(GOLDEN / "format-5-answers.safetensors")
    classifier = load(GOLDEN / "format-5-float32.safetensors")
    assert classifier.settings == SafeSettings(balance=0.25)
    assert classifier.bank.contents.stream().novelty == 0
    answer = classifier.predict(expected["queries"])
    assert answer.frozen is not None
    assert answer.trust is not None
    assert_same_tensor(answer.frozen, expected["frozen"])
    assert_same_tensor(answer.probs, expected["probs"])
    assert_same_tensor(answer.trust, expected["trust"])
    save(classifier, tmp_path / "bank")
    assert document_in(tmp_path / "bank")["version"] == 7
    assert load(tmp_path / "bank").digest() == classifier.digest()
    assert_same_tensor(classifier.step(expected["streamed"]).probs, expected["streamed_probs"])


@pytest.mark.parametrize("version", [4, 5])
def test_changes_that_were_logged_with_earlier_formats_are_applied(version: int) -> None:
    classifier = load(GOLDEN / f"format-{version}-float32.safetensors")
    before = classifier.signs()
    change = decode((GOLDEN / f"format-{version}-append.bin").read_bytes())
    classifier.apply(change)
    after = classifier.signs()
    assert after.queries == before.queries + 8
    assert (after.gain == before.gain) == (version == 4)  # format 4 knew nothing of gains


@pytest.mark.parametrize("version", [4, 5])
def test_files_of_earlier_formats_before_a_stream_and_of_another_preset(tmp_path: Path, version: int) -> None:
    tensors = load_file(GOLDEN / f"format-{version}-float32.safetensors")
    document = forged_document({}, f"format-{version}-float32")
    without_stream = {name: column for name, column in tensors.items() if name != "stream"}
    assert load(forged(tmp_path / "learned", document, without_stream)).signs().queries == 0
    paper = forged_document({"version": version}, "format-2-float32")
    with pytest.raises(BankFileError, match="format"):
        load(forged(tmp_path / "paper", paper, load_file(GOLDEN / "format-2-float32.safetensors")))


def test_files_of_format_3_before_a_stream_and_before_any_source_row(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "format-3-float32.safetensors")
    document = forged_document({})
    without_stream = {name: column for name, column in tensors.items() if name != "stream"}
    learned = forged(tmp_path / "learned", document, without_stream)
    assert load(learned).signs().queries == 0
    columns = {name: column[:0] for name, column in without_stream.items() if not name.startswith("transform.")}
    empty = forged(tmp_path / "empty", {**document, "rows": 0, "next_id": 0}, columns)
    assert len(load(empty).bank) == 0


@pytest.mark.parametrize("safe", [None, 3, {"stream": "mixed"}], ids=str)
def test_forged_settings_of_format_3_are_refused(tmp_path: Path, safe: Any) -> None:
    document = forged_document({"safe": safe})
    if safe is None:
        del document["safe"]
    path = forged(tmp_path / "bank", document, load_file(GOLDEN / "format-3-float32.safetensors"))
    with pytest.raises(BankFileError, match="format 3|missing or unknown fields"):
        load(path)


def forged_document(changed: dict[str, Any], name: str = "format-3-float32") -> dict[str, Any]:
    """The document of a golden file with some fields changed."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as opened:
        document: dict[str, Any] = json.loads(opened.metadata()["adanpc"])
    return {**document, **changed}


def forged(path: Path, document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A file with this document, these tensors, and a true seal."""
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    sealed = {**document, "seal": file_module._seal(document, kept)}
    save_file(kept, path, {file_module.KEY: canonical(sealed)})
    return path


def answers(classifier: AdaNPC, predicted: torch.Tensor, streamed: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is said of queries as if each came next, and of a stream, and which rows are held after it."""
    found = {"predicted": classifier.predict(predicted)}
    classifier.apply(Restore(tuple(classifier.bank.vetoes)))
    found["streamed"] = classifier.step(streamed)
    tensors = {}
    for when, answer in found.items():
        for name in ("probs", "weights", "joined"):
            tensors[f"{when}.{name}"] = getattr(answer, name)
        for name in ("ids", "similarity", "labels"):
            tensors[f"{when}.{name}"] = getattr(answer.neighbors, name)
    for name, column in classifier.bank.table("id", "label").items():
        tensors[f"rows.{name}"] = column
    return tensors


def test_the_document_in_the_docs_is_that_of_a_file() -> None:
    with safe_open(GOLDEN / "format-2-int8.safetensors", "pt") as opened:
        (example,) = blocks("json")
        assert json.loads(example) == json.loads(opened.metadata()["adanpc"])


def test_the_bytes_of_a_change_in_the_docs() -> None:
    (dump,) = blocks("hex")
    data = bytes.fromhex("".join(line[6:53] for line in dump.splitlines()))
    change = Append(torch.tensor([[3.0, 4.0]]), torch.tensor([1]), Origin.EXPERT, who="Ann")
    assert encode(change) == data
    decoded = decode(data)
    assert isinstance(decoded, Append)
    assert (decoded.origin, decoded.who, decoded.features.tolist()) == (Origin.EXPERT, "Ann", [[3.0, 4.0]])
    for number, line in enumerate(dump.splitlines()):  # the right side shows what is written on the left
        part = data[16 * number : 16 * number + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        assert line == f"{16 * number:04x}  {part.hex(' '):<47}  {shown}".rstrip()


# What cannot be saved


def refused(thing: AdaNPC | Wrapped, path: Path) -> str:
    with pytest.raises(BankFileError) as caught:
        save(thing, path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_that_load_would_refuse_is_not_written(tmp_path: Path) -> None:
    classifier = AdaNPC(MemoryBank(2, 2, soft=True), centering="source")
    path = tmp_path / "bank"
    classifier.learn(torch.eye(2), torch.tensor([0, 1]))
    save(classifier, path)
    before = path.read_bytes()
    contents = classifier.bank.contents
    for statistics, words in (
        (Statistics(torch.tensor([0.0, torch.nan]).double()), "its source_mean holds NaN or infinity"),
        (Statistics(torch.zeros(3)), "its column 'source_mean' is ('F32', [3]) and should be ('F64', [2])"),
        (Statistics(torch.zeros(2).bfloat16()), "its column 'source_mean' is ('torch.bfloat16', [2])"),
        (Statistics(stream_count=5), "its column 'stream_total' is 'absent' and should be ('F64', [2])"),
    ):
        classifier.bank.revert(dataclasses.replace(contents, statistics=statistics))
        assert words in refused(classifier, path)
    judgments = {0: (Judgment("veto", 0, None),)}  # type: ignore[arg-type]
    classifier.bank.revert(dataclasses.replace(contents, judgments=judgments))
    assert "who must be a string, got None" in refused(classifier, path)
    classifier.bank.revert(contents)
    object.__setattr__(classifier.settings, "temperature", torch.nan)
    assert "must be numbers, got nan" in refused(classifier, path)
    object.__setattr__(classifier.settings, "temperature", 1.0)
    object.__setattr__(classifier.bank.settings, "capacity", numpy.int64(4))
    assert "capacity in its bank has the wrong type" in refused(classifier, path)
    object.__setattr__(classifier.bank.settings, "capacity", None)
    assert "layer in its recipe has the wrong type: 2" in refused(Wrapped(model(), classifier, 2), path)  # type: ignore[arg-type]
    assert "expected an AdaNPC or a wrapped model, got MemoryBank" in refused(classifier.bank, path)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["bank"]


def test_an_admission_of_ones_own_cannot_be_kept(tmp_path: Path) -> None:
    class Odd(Admission):
        pass

    assert "type Odd; use an Admission" in refused(AdaNPC(MemoryBank(2, 2), admission=Odd()), tmp_path / "bank")


def test_texts_beyond_what_a_header_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "MOST_TEXT", 3000)
    classifier = in_mid_stream(why="short")
    save(classifier, tmp_path / "bank")
    assert "more than 3000 bytes; shorten" in refused(in_mid_stream(why="long" * 750), tmp_path / "bank")
    assert_same(load(tmp_path / "bank"), classifier)


def test_the_limit_of_texts_is_what_the_library_reads(tmp_path: Path) -> None:
    classifier = AdaNPC(MemoryBank(2, 2))
    classifier.learn(torch.ones(1, 2), torch.tensor([0]))
    classifier.apply(Veto((0,), "Ann", "x" * (file_module.MOST_TEXT - 1000)))
    save(classifier, tmp_path / "bank")
    assert len(load(tmp_path / "bank").bank.vetoes[0].why) > 98_000_000
    classifier.apply(Veto((0,), "Ann", "x" * file_module.MOST_TEXT))
    assert "bytes; shorten" in refused(classifier, tmp_path / "bank")


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    classifier = AdaNPC(MemoryBank(2, 2))
    assert "No such file or directory; check the path" in refused(classifier, tmp_path / "absent" / "bank")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        assert "a folder or a device has this path; give the path" in refused(classifier, tmp_path / name)
    assert "too long" in refused(classifier, tmp_path / ("n" * 255))
    assert "embedded null" in refused(classifier, tmp_path / "a\0b")  # byte or character, as Python says
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


# Links, permissions, leftovers


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(Path("real") / "bank")
    for seed in range(2):
        classifier = in_mid_stream(seed=seed)
        save(classifier, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert os.listdir(tmp_path / "real") == ["bank"]
        assert_same(load(tmp_path / "link"), classifier)


def test_permissions_are_the_umasks_and_then_kept(tmp_path: Path) -> None:
    classifier = AdaNPC(MemoryBank(2, 2))
    path = tmp_path / "bank"
    old = os.umask(0o027)
    try:
        save(classifier, path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o604)
    save(classifier, path)
    assert path.stat().st_mode & 0o777 == 0o604


def test_the_bytes_reach_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = AdaNPC(MemoryBank(2, 2))
    path = tmp_path / "bank"
    events: list[tuple[str, Any, Any]] = []
    fsync = os.fsync
    replace = os.replace

    def watched_fsync(number: int) -> None:
        events.append(("fsync", os.fstat(number).st_ino, os.fstat(number).st_size))
        fsync(number)

    def watched_replace(one: Path, two: Path) -> None:
        events.append(("replace", one.name, two.name))
        replace(one, two)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    save(classifier, path)
    assert events[:2] == [("fsync", path.stat().st_ino, path.stat().st_size), ("replace", "new", "bank")]
    assert [event[:2] for event in events[2:]] == [("fsync", tmp_path.stat().st_ino)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_ctrl_c_or_a_full_disk_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, step: str
) -> None:
    old = in_mid_stream()
    path = tmp_path / "bank"
    save(old, path)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises((KeyboardInterrupt, BankFileError), match=r"^$|No space left on device; check"):
            save(in_mid_stream(seed=9), path)
    assert os.listdir(tmp_path) == ["bank"]
    assert_same(load(path), old)


def test_ctrl_c_after_the_replacement_leaves_the_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def then_interrupt(one: Path, two: Path) -> None:
        replace(one, two)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(in_mid_stream(), tmp_path / "bank")
    assert os.listdir(tmp_path) == ["bank"]
    assert_same(load(tmp_path / "bank"), in_mid_stream())


def test_a_disk_that_is_full_for_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object, path: Path, __: object) -> None:
        path.with_name(".tmpAbCdEf").write_text("what the library leaves")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(file_module, "save_file", fail)
    assert "No space left on device; what was there before is unchanged; check" in refused(
        in_mid_stream(), tmp_path / "bank"
    )
    assert os.listdir(tmp_path) == []


def test_a_platform_that_opens_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        files.sync_folder(tmp_path / "absent")
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        files.sync_folder(tmp_path / "absent")


def leftover(path: Path, seconds: float) -> Path:
    """What a writer that was killed so long ago has left."""
    path.mkdir()
    (path / ".tmpAbCdEf").write_bytes(b"half a bank")
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_what_killed_writers_left_goes_after_an_hour(tmp_path: Path) -> None:
    old = [leftover(tmp_path / f".b[a-z]nk.{pid}-0123456789abcdef.tmp", 3700) for pid in (1, 22, os.getpid())]
    kept = [
        leftover(tmp_path / ".b[a-z]nk.7-0123456789abcdef.tmp", 3500),  # its writer may be alive
        leftover(tmp_path / ".bank.7-0123456789abcdef.tmp", 9999),  # of another file
        leftover(tmp_path / ".b[a-z]nk.7-0123456789abcdef.tmp.more", 9999),
        leftover(tmp_path / ".b[a-z]nk.tmp", 9999),
    ]
    save(in_mid_stream(), tmp_path / "b[a-z]nk")
    assert not any(path.exists() for path in old)
    assert sorted(os.listdir(tmp_path)) == sorted([path.name for path in kept] + ["b[a-z]nk"])
    assert all((path / ".tmpAbCdEf").exists() for path in kept)
    assert_same(load(tmp_path / "b[a-z]nk"), in_mid_stream())


def test_a_leftover_that_another_writer_removes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / ".bank.1-0123456789abcdef.tmp"
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([gone]))
    save(in_mid_stream(), tmp_path / "bank")
    assert os.listdir(tmp_path) == ["bank"]


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is opened once, so what is read is the old one, whole."""
    path = tmp_path / "bank"
    save(in_mid_stream(), path)
    read = SafetensorsFile.tensor

    def late(file: SafetensorsFile, name: str) -> torch.Tensor:
        save(in_mid_stream(seed=9), path)
        return read(file, name)

    monkeypatch.setattr(SafetensorsFile, "tensor", late)
    assert_same(load(path), in_mid_stream())
    monkeypatch.undo()
    assert_same(load(path), in_mid_stream(seed=9))


# Kills

HELPER = """
import os, signal, sys
import torch
from adanpc import files
from adanpc.store import load, save
torch.set_num_threads(1)
path, old, new = sys.argv[1:]
old = load(old)
new = load(new)

def kill_before_line(number):
    def trace(frame, event, _):
        nonlocal number
        if frame.f_code.co_filename != files.__file__:
            return None
        number -= event == "line"
        if number < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    save(new, path)
    os._exit(0)

def save_for_ever():
    while True:
        save(new, path)
        save(old, path)

for line in sys.stdin:
    child = os.fork()
    if not child:
        save_for_ever() if line == "ever\\n" else kill_before_line(int(line))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def helper(*paths: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that forks a saving child for each line it is sent, and answers the child's id and its end."""
    command = [sys.executable, "-c", HELPER, *map(str, paths)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    with process:
        try:
            yield process
        finally:  # a child that saves for ever would keep the process, and us, for ever
            for children in Path(f"/proc/{process.pid}/task/{process.pid}").glob("children"):
                for child in children.read_text().split():
                    os.kill(int(child), signal.SIGKILL)


def ask(process: subprocess.Popen[str], line: str) -> int:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    return answer(process)


def answer(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def only_leftovers(folder: Path) -> int:
    """How many leftovers there are beside the bank, and that there is nothing else."""
    others = [name for name in os.listdir(folder) if name != "bank"]
    assert all(re.fullmatch(r"\.bank\.[0-9]+-[0-9a-f]{16}\.tmp", name) for name in others)
    return len(others)


def test_killed_before_every_line_of_the_replacement(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    old = tmp_path / "old"
    new = tmp_path / "new"
    folder.mkdir()
    save(in_mid_stream(), old)
    save(in_mid_stream(seed=9), new)
    digests = [load(file).bank.digest() for file in (old, new)]
    seen = []
    ends = [-signal.SIGKILL]
    line = 0
    with helper(folder / "bank", old, new) as process:
        while ends[-1] == -signal.SIGKILL:
            shutil.copy(old, folder / "bank")
            leftover(folder / ".bank.1-0123456789abcdef.tmp", 9999)
            ask(process, str(line))
            ends.append(answer(process))
            seen.append(load(folder / "bank").bank.digest())
            assert ends[-1] or os.listdir(folder) == ["bank"]  # a save that nobody killed leaves nothing
            assert only_leftovers(folder) <= 2
            for path in folder.glob(".*"):
                shutil.rmtree(path)
            line += 1
    assert ends[-1] == 0
    assert line > 15
    assert seen == sorted(seen, key=digests.index)  # first the old one, and from some line on the new one
    assert set(seen) == set(digests)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """The bank is large enough for its writing to take most of the time."""
    folder = tmp_path / "folder"
    banks = [tmp_path / "old", tmp_path / "new"]
    folder.mkdir()
    for seed, file in enumerate(banks):
        classifier = AdaNPC(MemoryBank(64, CLASSES, storage="float16"))
        rows = torch.randn(2000, 64, generator=torch.Generator().manual_seed(seed))
        classifier.learn(rows, torch.arange(2000) % CLASSES)
        save(classifier, file)
    valid = {load(file).bank.digest() for file in banks}
    shutil.copy(banks[0], folder / "bank")
    moments = random.Random(0)
    with helper(folder / "bank", *banks) as process:
        rounds = 0
        # On a busy machine a process may be killed before it has begun to write, so there each gets longer and longer.
        while rounds < 20 or (only_leftovers(folder) == 0 and rounds < 200):
            child = ask(process, "ever")
            time.sleep(moments.uniform(0.005, 0.06) * (1 + rounds // 20))
            os.kill(child, signal.SIGKILL)
            assert answer(process) == -signal.SIGKILL
            assert load(folder / "bank").bank.digest() in valid
            rounds += 1
    assert 0 < only_leftovers(folder) <= rounds
    for path in folder.glob(".*"):
        os.utime(path, (0, 0))
    save(in_mid_stream(), folder / "bank")
    assert os.listdir(folder) == ["bank"]


def test_two_writing_processes_and_a_reader(tmp_path: Path) -> None:
    """The last writer wins; whoever reads meanwhile finds a whole file."""
    folder = tmp_path / "folder"
    banks = [tmp_path / "old", tmp_path / "new"]
    folder.mkdir()
    for seed, file in enumerate(banks):
        save(in_mid_stream(seed=9 * seed), file)
    valid = {load(file).bank.digest() for file in banks}
    seen: set[str] = set()
    shutil.copy(banks[0], folder / "bank")
    with helper(folder / "bank", *banks) as one, helper(folder / "bank", *banks) as two:
        children = [ask(process, "ever") for process in (one, two)]
        loads = 0
        while loads < 100 or (seen != valid and loads < 5000):
            seen.add(load(folder / "bank").bank.digest())
            loads += 1
        for child in children:
            os.kill(child, signal.SIGKILL)
        assert [answer(process) for process in (one, two)] == [-signal.SIGKILL] * 2
    assert seen == valid
    assert only_leftovers(folder) <= 2


MEASURE = """
import sys, torch
from adanpc.core import AdaNPC, MemoryBank
from adanpc.store import load, save
torch.set_num_threads(1)

def peak(action):
    before = {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/self/status") if line[:3] == "VmR"}
    open("/proc/self/clear_refs", "w").write("5")
    action()
    after = {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/self/status") if line[:3] == "VmH"}
    return (after["VmHWM"] - before["VmRSS"]) * 1024

classifier = AdaNPC(MemoryBank(256, 3))
for _ in range(16):
    classifier.learn(torch.randn(4096, 256), torch.zeros(4096, dtype=torch.int64))
held = classifier.bank.nbytes
print(peak(lambda: save(classifier, sys.argv[1])) / held)
classifier = None
print(peak(lambda: load(sys.argv[1])) / held)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured on Linux only")
def test_memory_stays_within_twice_the_bank(tmp_path: Path) -> None:
    """Saving needs a table beside the bank; loading needs the file and the bank; each one block of 32 MiB more."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # so that what is freed is given back
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "bank")]
    saving, loading = subprocess.check_output(command, text=True, env=environment).split()
    assert float(saving) < 1.8
    assert float(loading) < 2.8
