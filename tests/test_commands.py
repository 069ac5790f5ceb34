"""adanpc data, train and adapt, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from adanpc import cli
from adanpc.cli.app import settings, spread
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt import ADAPTERS


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, spread([str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def folder(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    command = [
        "train",
        "--data",
        "folder",
        "--data-dir",
        data_dir,
        "--target",
        "plain",
        "bright",
        "--encoder",
        "convnet",
    ]
    command += ["--steps", "4", "--every", "2", "--batch-size", "4", "--workers", "0", "--no-augment", "--out", out]
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert "After 4 steps" in done.output
    assert [line.split()[:2] for line in done.output.splitlines()[3:6]] == [
        ["bright", "target"],
        ["dim", "source"],
        ["plain", "target"],
    ]
    return out


def test_data_shows_domains_and_names_what_cannot_be_read(data_dir: Path, tmp_path: Path) -> None:
    done = run("data", "folder", "--data-dir", data_dir, "--check")
    assert done.exit_code == 0
    assert "bright" in done.output
    assert "3 of 3" in done.output
    bad = tmp_path / "here" / "cat" / "broken.png"
    bad.parent.mkdir(parents=True)
    bad.write_bytes(b"no image")
    done = run("data", "folder", "--data-dir", tmp_path, "--check")
    assert done.exit_code == 2
    assert str(bad) in done.output
    assert "Images that cannot be read: 1. Delete them, or copy them again." in done.output
    done = run("data", "pacs", "--data-dir", tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "pacs is not at" in done.output


def test_adapt_prints_a_table_and_keeps_records(folder: Path) -> None:
    done = run("adapt", folder, "--method", "source", "adanpc", "tent-prebn", "--batch-size", "1", "8", "--images", "9")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if line.split()[:1] and line.split()[0] in ADAPTERS]
    assert [row[:2] for row in rows] == [
        ["source", "1"],
        ["adanpc", "1"],
        ["tent-prebn", "1"],
        ["source", "8"],
        ["adanpc", "8"],
        ["tent-prebn", "8"],
    ]
    assert "tent-prebn, batches of 1: TentPreBN needs batches of at least 2 rows" in done.output
    assert "Reduced: at most 9 images" in done.output
    records = [json.loads(line) for line in (folder / "adapt.jsonl").read_text().splitlines()]
    assert len(records) == 6
    assert records[1]["domains"] == records[4]["domains"]
    assert f"{records[1]['average']:.1f}" in rows[1]


def test_without_a_method_the_default_of_the_library_is_run(folder: Path) -> None:
    done = run("adapt", folder, "--images", "5")
    assert done.exit_code == 0, done.output
    assert json.loads((folder / "adapt.jsonl").read_text().splitlines()[-1])["method"] == "adanpc-safe"


def test_settings_of_methods(folder: Path) -> None:
    done = run("adapt", folder, "--method", "adanpc", "--set", "adanpc.k=1", "--images", "5")
    assert done.exit_code == 0, done.output
    assert json.loads((folder / "adapt.jsonl").read_text().splitlines()[-1])["settings"] == {"k": 1}
    done = run("adapt", folder, "--method", "adanpc", "--set", "t3a.k=1")
    assert done.exit_code == 2
    assert "--set takes method.name=value with one of the methods adanpc, got t3a.k=1" in done.output


def test_what_is_wrong_is_said_in_one_sentence(folder: Path, data_dir: Path, tmp_path: Path) -> None:
    cases = {
        ("adapt", folder, "--method", "magic"): "unknown method 'magic'; available: source",
        ("adapt", folder, "--method", "adanpc", "--stream", "river"): "unknown stream 'river'; available: iid",
        ("adapt", folder, "--method", "t3a", "--set", "t3a.k=1"): "t3a has no setting 'k'; it has: keep",
        ("adapt", tmp_path, "--method", "adanpc"): "is not a run of adanpc train",
        ("train",): "there is no data to train on: pass --data, such as --data rotated-mnist, or --resume to",
        ("train", "--data", "nothing", "--target", "x"): "unknown data set 'nothing'; available: rotated-mnist",
        ("train", "--data", "folder", "--data-dir", data_dir, "--algorithm", "luck"): "unknown algorithm 'luck'",
        ("train", "--data", "folder", "--data-dir", data_dir, "--out", folder): "already holds a run",
        ("train", "--resume", tmp_path): "is not a run of adanpc train",
        ("train", "--data", "folder", "--set", "lr"): "--set takes name=value, got 'lr'",
    }
    for arguments, sentence in cases.items():
        done = run(*arguments)
        assert done.exit_code == 2, done.output
        assert sentence in done.output
        assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "lr=abc"), "lr of erm must be a number, got 'abc'"),
        (("--set", "lr=-1"), "lr and weight_decay must not be below 0, got -1 and 0.0"),
        (("--set", "lr=true"), "lr of erm must be a number, got True"),
        (("--algorithm", "knn", "--set", "k=0"), "k must be at least 1, got 0"),
        (("--algorithm", "knn", "--set", "k=2.5"), "k of knn must be a whole number, got 2.5"),
        (("--encoder", "nope"), "unknown encoder 'nope'"),
        (("--weights", "nofile"), "there is no file of weights at nofile"),
        (("--device", "tpu"), "device 'tpu' is not available here: use cpu"),
        (("--device", "cuda:99"), "device 'cuda:99' is not available here: use cpu"),
        (("--target", "dim"), "no source domain is left"),
    ],
)
def test_a_run_that_cannot_be_trained_leaves_no_folder(
    arguments: tuple[str, ...], words: str, data_dir: Path, tmp_path: Path
) -> None:
    asked = ["train", "--data", "folder", "--data-dir", data_dir, "--target", "plain", "--target", "bright"]
    done = run(*asked, "--encoder", "convnet", "--steps", 2, "--out", tmp_path / "run", *arguments)
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("adanpc.k=abc", "k of adanpc must be a whole number, got 'abc'"),
        ("adanpc.min_confidence=x", "min_confidence of adanpc must be a number, got 'x'"),
        ("adanpc.capacity=0.5", "capacity of adanpc must be a whole number or null, got 0.5"),
        ("tent.alpha=abc", "alpha of tent must be a number, got 'abc'"),
    ],
)
def test_settings_of_the_wrong_kind_are_one_sentence(folder: Path, setting: str, words: str) -> None:
    done = run("adapt", folder, "--method", setting.split(".")[0], "--images", 2, "--set", setting)
    assert done.exit_code == 2
    assert words in done.output


def test_options_that_may_be_repeated_take_several_values() -> None:
    given = ["adapt", "run", "--method", "a", "b", "--stream", "iid", "--batch-size", "1", "32", "--seed", "3"]
    made = ["adapt", "run", "--method", "a", "--method", "b", "--stream", "iid", "--batch-size", "1", "--batch-size"]
    assert spread(given) == [*made, "32", "--seed", "3"]
    assert spread(["demo", "--out", "x.png"]) == ["demo", "--out", "x.png"]


def test_settings_are_read_as_json_where_they_are() -> None:
    assert settings(["k=3", "lr=1e-3", "live_keys=true", "refresh=null", "rule=share", "text=a=b"]) == {
        "k": 3,
        "lr": 1e-3,
        "live_keys": True,
        "refresh": None,
        "rule": "share",
        "text": "a=b",
    }
    with pytest.raises(AdaNPCError, match="--set takes name=value, got '=3'"):
        settings(["=3"])
