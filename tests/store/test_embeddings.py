"""Embeddings in CSV, Parquet and NumPy files: what is read, what is written, what is refused."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from adanpc.core import AdaNPC, MemoryBank, Veto, large
from adanpc.errors import AdaNPCError, UnavailableError
from adanpc.store import EmbeddingsError, embeddings, read_embeddings, write_parquet
from adanpc.store.embeddings import LARGE, Embeddings, StoredArray, classifier_of, storage_for

CSV = "label,a,domain,b,key\ncat,1.5,0,2,7\ndog,-1e3,1,0.25,8\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def saved(path: Path, array: Any) -> Path:
    numpy.save(path, numpy.asarray(array))
    return path


def test_a_table_of_comma_separated_values(tmp_path: Path) -> None:
    found = read_embeddings(written(tmp_path / "rows.csv", CSV))
    assert found.features.tolist() == [[1.5, 2.0], [-1000.0, 0.25]]
    assert found.labels == ["cat", "dog"]
    assert found.domains is not None
    assert found.keys is not None
    assert (found.domains.tolist(), found.keys.tolist()) == ([0, 1], [7, 8])
    assert found.classes() == ["cat", "dog"]
    assert found.labels_in(("ant", "cat", "dog"), 3).tolist() == [1, 2]


def test_reading_a_table_leaves_the_limits_of_other_readers_alone(tmp_path: Path) -> None:
    """The longest field that the csv module reads is a setting of the whole process."""
    before = csv.field_size_limit()
    whole = tmp_path / "whole.csv"
    whole.write_text("label,f0\ncat,1\n")
    read_embeddings(whole)
    assert csv.field_size_limit() == before
    uneven = tmp_path / "uneven.csv"
    uneven.write_text("label,f0\ncat,1,2\n")
    with pytest.raises(EmbeddingsError):
        read_embeddings(uneven)
    assert csv.field_size_limit() == before


def test_arrays(tmp_path: Path) -> None:
    features = numpy.arange(6, dtype=numpy.float64).reshape(3, 2) + 1
    path = saved(tmp_path / "rows.npy", features)
    found = read_embeddings(path, saved(tmp_path / "labels.npy", [0, 4, 1]))
    assert found.features.dtype == torch.float32
    assert found.features.tolist() == features.tolist()
    assert (found.labels, found.classes(), found.domains, found.keys) == (["0", "4", "1"], 5, None, None)
    with (tmp_path / "rows.npy").open("wb") as file:
        numpy.lib.format.write_array(file, features, version=(2, 0))
    assert read_embeddings(path, tmp_path / "labels.npy").features.tolist() == features.tolist()


def test_a_large_array_stays_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = numpy.random.default_rng(0)
    features = generator.standard_normal((200, 5)).astype(numpy.float32)
    labels = saved(tmp_path / "labels.npy", numpy.arange(200) % 3)
    path = saved(tmp_path / "rows.npy", features)
    monkeypatch.setattr(embeddings, "PIECE", 33 * 20)
    found = read_embeddings(path, labels)
    assert isinstance(found.pieces, StoredArray)
    assert [len(piece) for piece in found.pieces] == [33] * 6 + [2]
    assert found.pieces.parts == 7
    column_by_column = saved(tmp_path / "other.npy", numpy.asfortranarray(features))
    in_memory = read_embeddings(column_by_column, labels)
    assert isinstance(in_memory.pieces, torch.Tensor)
    assert torch.equal(found.features, in_memory.features)
    for at_once in (1 << 26, 100 * 5):
        monkeypatch.setattr(large, "AT_ONCE", at_once)
        digests = {classifier_of(given, preset="safe", settings={}).digest() for given in (found, in_memory)}
        assert len(digests) == 1, "answers do not depend on where rows come from"
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 4)
    with pytest.raises(EmbeddingsError, match="rows.npy was not read: it has become shorter while it was read"):
        classifier_of(found, preset="safe", settings={})


def test_what_is_written_as_parquet_is_read_back(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    classifier = AdaNPC(MemoryBank(3, ["cat", "dog"], storage="int8"))
    classifier.learn(torch.randn(9, 3), torch.arange(9) % 2, keys=torch.arange(9) + 5, domain=2)
    classifier.apply(Veto((4,)))
    write_parquet(classifier.bank.contents, tmp_path / "rows.parquet")
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table.column_names == [
        "id", "label", "class", "origin", "vetoed", "domain", "key", "confidence", "feature",
    ]  # fmt: skip
    assert table.column("class").to_pylist()[:2] == ["cat", "dog"]
    assert table.column("vetoed").to_pylist() == [row == 4 for row in range(9)]
    found = read_embeddings(tmp_path / "rows.parquet")
    assert torch.equal(found.features, classifier.bank.rows(torch.arange(9)))
    assert found.labels_in(("cat", "dog"), 2).tolist() == [0, 1] * 4 + [0]
    assert found.keys is not None
    assert found.keys.tolist() == list(range(5, 14))
    nameless = AdaNPC(MemoryBank(3, 2))
    nameless.learn(torch.randn(2, 3), torch.tensor([1, 0]))
    write_parquet(nameless.bank.contents, tmp_path / "rows.parquet")
    assert parquet.read_table(tmp_path / "rows.parquet").column("class").to_pylist() == ["1", "0"]


def test_a_parquet_file_with_a_column_for_each_number(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"x": [1.0, 2.0], "label": ["a", "b"], "y": [3, 4]}), tmp_path / "rows.parquet")
    assert read_embeddings(tmp_path / "rows.parquet").features.tolist() == [[1, 3], [2, 4]]


def test_a_classifier_of_embeddings(tmp_path: Path) -> None:
    given = read_embeddings(written(tmp_path / "rows.csv", CSV))
    made = classifier_of(given, preset="paper", settings={"k": 1}, storage="float16", capacity=5)
    assert made.bank.names == ("cat", "dog")
    assert made.bank.table("key", "domain")["key"].tolist() == [7, 8]
    assert made.predict(given.features).labels.tolist() == [0, 1]
    bare = read_embeddings(written(tmp_path / "rows.csv", "label,a\n0,1\n1,-1\n"))
    table = classifier_of(bare, preset="safe", settings={}).bank.table("key", "domain")
    assert (table["key"].tolist(), table["domain"].tolist()) == ([0, 1], [-1, -1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"it needs a column 'label'; it has \[\]"),
        ("a,b\n1,2\n", r"it needs a column 'label'; it has \['a', 'b'\]"),
        ("label\ncat\n", "it has no columns of features"),
        ("label,a\n", "it has no rows"),
        ("label,a,a\ncat,1,2\n", "two of its columns have the same name"),
        ("label,a\ncat,1,2\n", "line 2 has 3 values for 2 columns"),
        ("label,a\ncat,x\n", "its column 'a' must hold numbers"),
        ("label,a,domain\ncat,1,x\n", "its column 'domain' must hold whole numbers"),
        ("label,a,key\ncat,1,99999999999999999999\n", "its column 'key' must hold whole numbers"),
        ("label,a\n,1\n", "a row has no label"),
        ("label,a\n" + "x" * (2**24 + 1) + ",1\n", "field larger than field limit"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path / "rows.csv", text)
    with pytest.raises(EmbeddingsError, match=f"rows.csv was not read: {words}") as caught:
        read_embeddings(path)
    assert "\n" not in str(caught.value)


def test_labels_of_very_many_digits_are_names(tmp_path: Path) -> None:
    long = "9" * 5000  # Python refuses to read such a number
    found = read_embeddings(written(tmp_path / "rows.csv", f"label,a\n{long},1\n7,2\n"))
    assert found.classes() == ["7", long]


def test_labels_that_no_class_has(tmp_path: Path) -> None:
    found = read_embeddings(written(tmp_path / "rows.csv", CSV))
    with pytest.raises(EmbeddingsError, match="the label of row 1 is 'dog', and the classes are"):
        found.labels_in(("cat", "cow"), 2)
    with pytest.raises(EmbeddingsError, match=r"the label of row 0 is 'cat', and the classes are \['0', '1'\]"):
        found.labels_in((), 2)


def test_arrays_that_cannot_be_used(tmp_path: Path) -> None:
    rows = saved(tmp_path / "rows.npy", numpy.ones((3, 2)))
    labels = saved(tmp_path / "labels.npy", [0, 1])
    with pytest.raises(EmbeddingsError, match="there are 2 labels for 3 rows"):
        read_embeddings(rows, labels)
    with pytest.raises(EmbeddingsError, match="an array has no labels; give the file that holds them as `labels`"):
        read_embeddings(rows)
    with pytest.raises(EmbeddingsError, match="its labels are in a column; leave out `labels`"):
        read_embeddings(written(tmp_path / "rows.csv", CSV), labels)
    with pytest.raises(EmbeddingsError, match=r"its features must have shape \(n, D\), got \(2,\)"):
        read_embeddings(labels, labels)
    with pytest.raises(EmbeddingsError, match="none.npy was not read: No such file or directory"):
        read_embeddings(rows, tmp_path / "none.npy")
    rows.write_bytes(rows.read_bytes()[:-1])
    with pytest.raises(EmbeddingsError, match="its header announces 48 bytes, and there are 47"):
        read_embeddings(rows, labels)
    rows.write_bytes(b"nothing of the kind")
    with pytest.raises(EmbeddingsError, match="the magic string is not correct"):
        read_embeddings(rows, labels)
    numpy.save(rows, numpy.array([[os], [sys]], dtype=object).astype(str).astype(object), allow_pickle=True)
    with pytest.raises(EmbeddingsError, match="it holds objects of Python, and these are not read"):
        read_embeddings(rows, labels)
    saved(rows, [["a", "b"]])
    with pytest.raises(EmbeddingsError, match="its features must be numbers"):
        read_embeddings(rows, labels)


def test_other_files_and_missing_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EmbeddingsError, match=r"give a file that ends with .csv, .parquet, .npy"):
        read_embeddings(tmp_path / "rows.txt")
    pytest.importorskip("pyarrow")
    with pytest.raises(AdaNPCError, match="rows.parquet was not read"):
        read_embeddings(tmp_path / "rows.parquet")
    with pytest.raises(EmbeddingsError, match="rows.parquet was not read: "):
        read_embeddings(written(tmp_path / "rows.parquet", "nothing of the kind"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UnavailableError, match="a Parquet file needs pyarrow, which is not installed"):
        read_embeddings(tmp_path / "rows.parquet")


def test_a_large_bank_is_stored_as_it_is_searched_fastest() -> None:
    assert storage_for(LARGE - 1) == "float32"
    assert storage_for(LARGE) == "int8"
    assert storage_for(LARGE, "float16") == "float16"
    labels = ["a", "b"] * (LARGE // 2)
    given = Embeddings(torch.randn(LARGE, 2, generator=torch.Generator().manual_seed(0)), labels)
    assert classifier_of(given, preset="paper", settings={}).bank.contents.settings.storage == "int8"
