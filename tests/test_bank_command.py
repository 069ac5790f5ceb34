"""``adanpc bank``: every command as a user meets it, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from pictures import plant
from typer.testing import CliRunner, Result

import adanpc
from adanpc import cli
from adanpc.cli.bank import _time
from adanpc.lab.train.assemble import load_algorithm
from adanpc.lab.train.run import Run
from adanpc.models import Wrapped
from adanpc.store import DurableBank

CLASSES = ("ant", "bee", "cat")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["bank", *(str(argument) for argument in arguments)])


def said(*arguments: object) -> Any:
    """What a command prints for programs."""
    outcome = run(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout)


def refusal(*arguments: object) -> str:
    outcome = run(*arguments)
    assert outcome.exit_code == 2
    sentence: str = outcome.stderr
    assert sentence.startswith("adanpc: ")
    assert sentence.count("\n") == 1
    return sentence


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Embeddings of three classes."""
    chance = numpy.random.default_rng(0)
    lines = ["label,a,b,c,d"]
    for number in range(30):
        values = numpy.eye(4)[number % 3] + 0.2 * chance.standard_normal(4)
        lines.append(",".join([CLASSES[number % 3], *(str(value) for value in values)]))
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def bank(tmp_path: Path, rows: Path) -> Path:
    folder = tmp_path / "bank"
    assert said("create", folder, "--from", rows) == {"bank": str(folder), "position": 1, "start": 1, "rows": 30}
    return folder


def test_a_bank_is_looked_after(bank: Path, rows: Path) -> None:
    assert run("veto", bank, 3, 4, "--who", "Ann", "--why", "blurred").stdout == (
        f"Done: {bank} is at position 2, with 30 rows.\n"
    )
    assert said("restore", bank, 4)["position"] == 3
    assert said("relabel", bank, 5, 6, "--label", "ant")["position"] == 4
    assert said("relabel", bank, *range(7), "--label", "2")["position"] == 5
    assert said("import", bank, rows, "--why", "more of them")["rows"] == 60
    assert said("rollback", bank, "--to", 4, "--who", "Bob")["rows"] == 30
    entries = said("log", bank)["entries"]
    assert [entry["kind"] for entry in entries] == ["veto", "restore", "relabel", "relabel", "append", "rollback"]
    assert [entry["position"] for entry in entries] == [2, 3, 4, 5, 6, 7]
    assert (entries[0]["who"], entries[0]["why"], entries[0]["ids"]) == ("Ann", "blurred", [3, 4])
    assert entries[1]["who"]  # of whoever runs the tests
    assert entries[4]["features"] == [30, 4]
    assert [entry["position"] for entry in said("log", bank, "--after", 5)["entries"]] == [6, 7]
    assert [entry["position"] for entry in said("log", bank, "--last", 1)["entries"]] == [7]
    shown = run("log", bank).stdout
    for words in ("veto", "3, 4", "5, 6 to class 0", "Ann", "blurred", "and 2 more", "30 new", "back to 4"):
        assert words in shown
    found = said("info", bank)
    assert (found["position"], found["rows"], found["vetoed"], found["preset"]) == (7, 30, 1, "safe")
    assert found["bank"]["classes"] == list(CLASSES)
    assert found["notices"] == []
    assert "digest" in run("info", bank).stdout
    assert said("verify", bank)["digest"] == found["digest"]
    assert "is whole: changes 1 … 7" in run("verify", bank).stdout
    assert said("compact", bank, "--keep", 1)["start"] == 7
    assert said("info", bank)["digest"] == found["digest"]


def test_a_bank_that_is_in_use_is_read_and_not_changed(bank: Path, tmp_path: Path) -> None:
    with DurableBank.open(bank) as opened:
        opened.classify(torch.ones(1, 4))
        assert said("info", bank)["position"] == 2
        assert len(said("log", bank)["entries"]) == 1
        assert not said("verify", bank)["problems"]
        assert said("export", bank, tmp_path / "file.safetensors")["rows"] == 31
        assert "is in use: a bank has one writer at a time" in refusal("veto", bank, 0)


def test_what_is_exported_is_what_the_bank_holds(bank: Path, tmp_path: Path) -> None:
    assert said("export", bank, tmp_path / "file.safetensors")["rows"] == 30
    digest = said("info", bank)["digest"]
    assert adanpc.load(tmp_path / "file.safetensors").digest() == digest
    assert said("create", tmp_path / "again", "--from", tmp_path / "file.safetensors")["position"] == 1
    assert said("info", tmp_path / "again")["digest"] == digest
    assert "the ending of the file must be one of .safetensors, .parquet, .onnx" in refusal("export", bank, "x.txt")


def test_rows_and_votes_for_other_programs(bank: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    runtime = pytest.importorskip("onnxruntime")
    said("export", bank, tmp_path / "rows.parquet")
    assert parquet.read_table(tmp_path / "rows.parquet").num_rows == 30
    said("export", bank, tmp_path / "vote.onnx")
    session = runtime.InferenceSession(str(tmp_path / "vote.onnx"), providers=["CPUExecutionProvider"])
    (labels,) = session.run(["labels"], {"features": numpy.eye(4, dtype=numpy.float32)[:3]})
    assert labels.tolist() == [0, 1, 2]


def test_banks_of_arrays_and_with_settings(tmp_path: Path) -> None:
    numpy.save(tmp_path / "rows.npy", numpy.eye(4))
    numpy.save(tmp_path / "labels.npy", numpy.array([0, 1, 2, 0]))
    arrays = ("--from", tmp_path / "rows.npy", "--labels", tmp_path / "labels.npy")
    made = ("--preset", "paper", "--set", "k=3", "--set", "rule=uniform", "--storage", "int8", "--capacity", 9)
    said("create", tmp_path / "bank", *arrays, *made)
    with DurableBank.open(tmp_path / "bank") as bank:
        assert (bank.settings.k, bank.settings.rule) == (3, "uniform")
        assert (bank.contents.settings.storage, bank.contents.settings.capacity) == ("int8", 9)
    assert "the preset 'safe' has no option 'k'" in refusal("create", tmp_path / "other", *arrays, "--set", "k=3")
    assert "preset must be one of paper, safe" in refusal("create", tmp_path / "other", *arrays, "--preset", "x")
    assert not (tmp_path / "other").exists()


def test_a_bank_of_images(tmp_path: Path) -> None:
    plant(tmp_path / "images", {"photo/cat": 4, "photo/dog": 3, "sketch/cat": 2, "sketch/dog": 3})
    images = ("--from", tmp_path / "images", "--encoder", "convnet")
    assert said("create", tmp_path / "bank", *images)["rows"] == 12
    found = said("info", tmp_path / "bank")
    assert found["bank"]["classes"] == ["cat", "dog"]
    assert found["recipe"]["layer"] == "input of head"
    assert "name the --encoder that turns the images in it into features" in refusal(
        "create", tmp_path / "other", "--from", tmp_path / "images"
    )
    assert "the bank is made from images, so --which has no effect: omit it" in refusal(
        "create", tmp_path / "other", *images, "--which", "last"
    )


def test_a_bank_of_a_run_meets_the_model_of_that_run(data_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained = CliRunner().invoke(
        cli.app,
        [
            "train", "--data", "folder", "--data-dir", str(data_dir), "--target", "bright", "--encoder", "convnet",
            "--steps", "2", "--every", "2", "--batch-size", "2", "--workers", "0", "--out", str(folder),
        ],
    )  # fmt: skip
    assert trained.exit_code == 0, trained.output
    assert said("create", tmp_path / "bank", "--from", folder)["rows"] == 48  # four fifths of two domains
    trained_run = Run(folder)
    model = load_algorithm(trained_run).model
    with DurableBank.open(tmp_path / "bank") as bank:
        assert list(bank.contents.settings.names) == trained_run.data["classes"]
        Wrapped(model, bank.at(bank.position), bank.recipe["layer"], model.preprocessing).check(bank.recipe)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("veto", "bank", 99), "row 99 is not in the bank: it never existed"),
        (("relabel", "bank", 0, "--label", "cow"), "--label must be one of ant, bee, cat, got 'cow'"),
        (("rollback", "bank", "--to", 5), "adanpc: --to must be at most 1, got 5"),
        (("info", "nowhere"), "is not a durable bank: it has no log.sqlite"),
        (("log", "bank", "--after", 9), "holds changes from 1 to 1, so none can be read from 9 on"),
        (("import", "bank", "none.csv"), "No such file or directory"),
        (("create", "bank", "--from", "rows.csv"), "something is there already"),
        (("create", "new", "--from", "none.safetensors"), "none.safetensors was not read: there is no such file or"),
        (("create", "new", "--from", "nope"), "nope was not read: there is no such file or folder"),
        (("create", "new", "--from", "nope", "--encoder", "convnet"), "nope was not read: there is no such file or"),
        (
            ("export", "bank", "nowhere/rows.parquet"),
            "rows.parquet was not saved: No such file or directory; check the",
        ),
        (("export", "bank", "nowhere/vote.onnx"), "vote.onnx was not saved: No such file or directory; check the path"),
        (("create", "new", "--from", "rows.csv", "--weights", "w"), "made from embeddings, so --weights has no effect"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    bank: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], words: str
) -> None:
    monkeypatch.chdir(bank.parent)
    assert words in refusal(*arguments)


def test_a_user_without_a_name(bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number that its system does not know."""

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("adanpc.cli.bank.getuser", nobody)
    assert said("veto", bank, 0)["position"] == 2
    assert said("log", bank)["entries"][0]["who"] == ""


def test_classes_without_names_are_numbers(tmp_path: Path) -> None:
    numpy.save(tmp_path / "rows.npy", numpy.eye(2))
    numpy.save(tmp_path / "labels.npy", numpy.array([0, 1]))
    said("create", tmp_path / "bank", "--from", tmp_path / "rows.npy", "--labels", tmp_path / "labels.npy")
    assert "--label must be one of 0 … 1, got 'x'" in refusal("relabel", tmp_path / "bank", 0, "--label", "x")
    assert "--label must be one of 0 … 1" in refusal("relabel", tmp_path / "bank", 0, "--label", "9" * 5000)


def test_damage_is_told(bank: Path) -> None:
    data = bytearray((bank / "log.sqlite").read_bytes())
    data[2000] ^= 1
    (bank / "log.sqlite").write_bytes(data)
    assert "is not as it was closed: verify the bank" in refusal("verify", bank)
    outcome = run("verify", bank, "--json")
    assert outcome.exit_code == 2
    assert json.loads(outcome.stdout)["problems"]
    assert "Note: " in run("info", bank).stderr
    assert "Note: " in run("veto", bank, 0).stderr


def test_times_that_no_calendar_has() -> None:
    assert _time(None) == ""
    assert _time(0.0) == "1970-01-01 00:00:00"
    assert _time(1e300) == "1e+300"
