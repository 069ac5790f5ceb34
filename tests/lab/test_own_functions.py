"""Encoders and data sets of one's own, by where they are defined, and what installed packages register."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from adanpc import cli
from adanpc.cli.app import spread
from adanpc.lab import own
from adanpc.lab.adapt import find as find_method
from adanpc.lab.adapt import registry as methods
from adanpc.lab.data import DataError, find_data, read
from adanpc.lab.data.read import OWN as OWN_DATA
from adanpc.lab.networks import EncoderError, build, find_encoder
from adanpc.lab.networks.encoders import OWN as OWN_ENCODERS
from adanpc.lab.own import UntrustedCodeError
from adanpc.lab.sweep.subjects import Frozen
from adanpc.lab.tables.choice import note_choice
from adanpc.lab.tables.corruptions import WEIGHTS
from adanpc.lab.tables.ood import ROWS, rows_at
from adanpc.lab.tables.scale import SCALES, Scale
from adanpc.lab.train import find as find_algorithm
from adanpc.lab.train.run import SPEC, Run, RunError
from adanpc.lab.train.spec import Spec

CODE = """
from pathlib import Path

import torch
from torch import nn

from adanpc.lab.adapt import Adapter
from adanpc.lab.data import read
from adanpc.lab.networks import SourceModel
from adanpc.lab.train import ALGORITHMS

Path("marker").touch()


def make(classes, channels, pretrained):
    encoder = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return SourceModel(encoder, 16, classes)


def module(classes, channels, pretrained):
    return nn.Linear(3, classes)


def fewer(classes, channels, pretrained):
    return SourceModel(nn.Flatten(), 16, classes - 1)


def normed(classes, channels, pretrained):
    return SourceModel(nn.Flatten(), 16, classes, norm=True)


def tones(root, seed):
    return read("folder", root)


def nothing(root, seed):
    return None


def rows(root, seed):
    return [1, 2, 3]


class Uniform(Adapter):
    def answer(self, batch):
        return torch.full((len(batch), self.model.classes), 1 / self.model.classes)


class Plain(ALGORITHMS["erm"]):
    pass


number = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with code in it, in what seems to be a new process: nothing has been named yet."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (folder / "given.py").write_text(CODE)
    forget(monkeypatch)
    return folder


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process knows of what this one has named: nothing."""
    monkeypatch.setattr(own, "_modules_of_files", {})
    monkeypatch.setattr(OWN_ENCODERS, "named", {})
    monkeypatch.setattr(OWN_DATA, "named", {})
    monkeypatch.setattr(methods, "_loaded", set())
    Path("marker").unlink(missing_ok=True)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, spread([str(argument) for argument in arguments]))


def assert_one_sentence(done: Result, words: str) -> None:
    assert done.exit_code == 2, done.output
    assert words in done.output
    assert len(done.output.strip().splitlines()) == 1


# Names ---------------------------------------------------------------------------------------------------------------


def test_an_encoder_is_built_with_the_settings_of_any_other() -> None:
    find_encoder("given.py:make")
    model = build("given.py:make", 5, channels=3, norm=True, dropout=0.5)
    assert (model.dim, model.classes) == (16, 5)
    assert model.norm.num_features == 16
    assert model.dropout.p == 0.5


def test_data_is_read(data_dir: Path) -> None:
    find_data("given.py:tones")
    data = read("given.py:tones", data_dir)
    assert [domain.name for domain in data.domains] == ["bright", "dim", "plain"]


ENCODER_CASES = {
    "convent": "unknown encoder 'convent'; did you mean 'convnet'? Available: .*, timm:NAME, or module:function",
    "absent.py:make": "there is no file .*absent.py",
    "given.py:mke": "given.py has no 'mke'; did you mean 'make'?",
    "given.py:number": "given.py:number cannot be called: name the function that makes the encoder",
    "given.py:": "name your own encoder as module:function or file.py:function, got 'given.py:'",
    "given.py:module": "given.py:module must return a SourceModel, got a Linear: use SourceModel.*",
    "given.py:fewer": "given.py:fewer was asked for 4 classes, and returned a model of 3",
    "given.py:normed": "given.py:normed must return a linear head and no norm.*",
}


def _found_and_built(name: str) -> None:
    find_encoder(name)
    build(name, 4)


def _found_and_read(name: str, root: Path) -> None:
    find_data(name)
    read(name, root)


@pytest.mark.parametrize("name", ENCODER_CASES)
def test_what_is_wrong_with_an_encoder_is_one_sentence(name: str) -> None:
    with pytest.raises(EncoderError) as caught:
        _found_and_built(name)
    assert re.fullmatch(ENCODER_CASES[name].replace("?", r"\?"), str(caught.value)), caught.value


DATA_CASES = {
    "pcas": "unknown data set 'pcas'; did you mean 'pacs'? Available: rotated-mnist, .*, or module:function",
    "given.py:tone": "given.py has no 'tone'; did you mean 'tones'?",
    "given.py:nothing": "given.py:nothing is not at .*: its reader has found nothing there",
    "given.py:rows": "given.py:rows must return a DataSet, got a list",
}


@pytest.mark.parametrize("name", DATA_CASES)
def test_what_is_wrong_with_data_is_one_sentence(name: str, data_dir: Path) -> None:
    with pytest.raises(DataError) as caught:
        _found_and_read(name, data_dir)
    assert re.fullmatch(DATA_CASES[name].replace("?", r"\?"), str(caught.value)), caught.value


# Who names code ------------------------------------------------------------------------------------------------------


def test_names_that_nobody_has_typed_run_no_code(here: Path, data_dir: Path) -> None:
    with pytest.raises(UntrustedCodeError, match=r"call adanpc.lab.networks.find_encoder\('given.py:make'\) first"):
        build("given.py:make", 4)
    with pytest.raises(UntrustedCodeError, match=r"call adanpc.lab.data.find_data\('given.py:tones'\) first"):
        read("given.py:tones", data_dir)
    document = Spec("folder", ("bright",)).document()
    with pytest.raises(UntrustedCodeError):
        Spec.of({**document, "encoder": "given.py:make"})
    with pytest.raises(UntrustedCodeError):
        Spec.of({**document, "data": "given.py:tones"})
    assert not (here / "marker").exists()


def test_values_that_are_sent_to_another_process_are_known_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("given.py:tones", ("bright",), encoder="given.py:make")
    frozen = Frozen("folder", ("bright",), "given.py:make")
    sent = pickle.dumps((spec, frozen))
    forget(monkeypatch)
    assert pickle.loads(sent) == (spec, frozen)
    assert build("given.py:make", 4).dim == 16


def test_the_commands_train_resume_and_adapt(here: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["--target", "bright", "--batch-size", 4, "--no-augment", "--workers", 0, "--steps", 2]
    code = ["--data", "given.py:tones", "--encoder", "given.py:make"]
    done = command("train", "--data-dir", data_dir, *code, *settings)
    assert done.exit_code == 0, done.output
    folder = Path("runs") / "tones-erm-bright-0-2steps"
    assert f"Run: {folder}" in done.output
    spec = json.loads((folder / SPEC).read_text())["spec"]
    assert (spec["data"], spec["encoder"]) == ("given.py:tones", "given.py:make")
    for arguments in (["train", "--resume", folder], ["adapt", folder, "--method", "source", "--images", 4]):
        forget(monkeypatch)
        assert_one_sentence(command(*arguments), "if you trust that encoder, name it yourself as --encoder")
        assert not (here / "marker").exists()
        some = [*arguments, "--encoder", "given.py:make"]
        assert_one_sentence(command(*some), "if you trust that data, name it yourself as --data")
        done = command(*arguments, *code)
        assert done.exit_code == 0, done.output
        others = [*arguments, "--data", "given.py:tones", "--encoder", "convnet"]
        assert_one_sentence(command(*others), "was trained with the encoder given.py:make, not with convnet")


def test_a_run_is_opened_only_with_its_own_data(data_dir: Path) -> None:
    settings = ["--target", "bright", "--batch-size", 4, "--no-augment", "--workers", 0, "--steps", 1]
    assert (
        command("train", "--data-dir", data_dir, "--data", "folder", "--encoder", "convnet", *settings).exit_code == 0
    )
    folder = Path("runs") / "folder-erm-bright-0-1steps"
    assert Run(folder, encoder="convnet", data="folder").finished()
    with pytest.raises(RunError, match="was trained on the data set 'folder', not on 'pacs'"):
        Run(folder, data="pacs")


def test_what_a_stop_says_repeats_encoder_and_data(data_dir: Path) -> None:
    text = "class Stops(ALGORITHMS['erm']):\n    def loss(self, batches):\n        raise KeyboardInterrupt\n"
    Path("given.py").write_text(CODE + "\n\n" + text)
    code = ["--data", "given.py:tones", "--encoder", "given.py:make", "--algorithm", "given.py:Stops"]
    done = command("train", "--data-dir", data_dir, *code, "--target", "bright", "--no-augment", "--workers", 0)
    assert done.exit_code == 130
    assert "--algorithm given.py:Stops --encoder given.py:make --data given.py:tones" in done.output


def test_a_report_does_not_run_an_encoder_that_a_file_names(here: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    least = SCALES["least"]
    scale = Scale(least.name, 1, 2, 1, 1, 10, "given.py:make")
    note_choice(folder, "backbones", scale, "")
    assert_one_sentence(command("report", folder), "if you trust that encoder, name it yourself as --encoder")
    assert not (here / "marker").exists()
    done = command("report", folder, "--encoder", "given.py:make")
    assert done.exit_code == 0, done.output
    assert (here / "marker").exists()


def test_a_report_does_not_run_a_method_that_a_file_names(here: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    scale = replace(SCALES["least"], methods=("given.py:Uniform",))
    note_choice(folder, "adaptation-rotated-mnist", scale, "")
    assert_one_sentence(command("report", folder), "if you trust that method, name it yourself as --method")
    assert not (here / "marker").exists()
    done = command("report", folder, "--method", "given.py:Uniform")
    assert done.exit_code == 0, done.output
    assert (here / "marker").exists()


def test_methods_are_rows_of_tables_that_compare_methods(tmp_path: Path) -> None:
    out = tmp_path / "tables"
    sizes = ["--scale", "least", "--steps", 1, "--images", 10, "--workers", 1, "--out", out]
    table = ["table", "adaptation-rotated-mnist", "--data-dir", tmp_path, "--only", "source"]
    done = command(*table, "--method", "given.py:Uniform", *sizes)
    assert done.exit_code == 0, done.output
    text = (out / "adaptation-rotated-mnist.md").read_text()
    assert re.search(r"\| Uniform \|( [\d.*]+ \|){6}", text), text
    page = command("report", out)
    assert page.exit_code == 0, page.output
    assert "Uniform" in (out / "report.html").read_text()
    refused = command("table", "theory", "--method", "given.py:Uniform", *sizes)
    assert_one_sentence(refused, "theory does not compare methods of your own: omit --method")
    assert_one_sentence(command(*table, "--method", "given.py:Uniorm", *sizes), "did you mean 'Uniform'")


def test_methods_are_rows_of_successive_tables_and_of_corrupted_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C" / "labels.npy", np.arange(50) % 10)
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", rng.integers(0, 256, (50, 32, 32, 3)).astype(np.uint8))
    (tmp_path / "weights").mkdir()
    torch.save(build("cifar-resnet-56", 10).state_dict(), tmp_path / WEIGHTS)
    out = tmp_path / "tables"
    sizes = ["--scale", "least", "--steps", 1, "--images", 10, "--workers", 1, "--out", out, "--data-dir", tmp_path]
    only = {"successive-rotated-mnist": "source", "cifar-10-c-5": "Linear"}
    for name, row in only.items():
        done = command("table", name, "--method", "given.py:Uniform", "--only", row, *sizes)
        assert done.exit_code == 0, done.output
        assert "Uniform" in (out / f"{name}.md").read_text()
    chart = (out / "successive-rotated-mnist.csv").read_text()
    assert "given.py" not in chart


def test_a_report_does_not_run_an_algorithm_that_a_file_names(here: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    note_choice(folder, "ood-rotated-mnist", replace(SCALES["least"], algorithms=("given.py:Plain",)), "")
    assert_one_sentence(command("report", folder), "if you trust that algorithm, name it yourself as --algorithm")
    assert not (here / "marker").exists()
    done = command("report", folder, "--algorithm", "given.py:Plain")
    assert done.exit_code == 0, done.output
    assert (here / "marker").exists()


def test_algorithms_are_rows_of_tables_that_compare_algorithms(tmp_path: Path) -> None:
    out = tmp_path / "tables"
    Path("given.py").write_text(CODE + "\n\nclass Votes(ALGORITHMS['knn']):\n    pass\n")
    sizes = ["--scale", "least", "--steps", 1, "--images", 10, "--workers", 1, "--out", out]
    table = ["table", "ood-rotated-mnist", "--data-dir", tmp_path, "--only", "ERM"]
    done = command(*table, "--algorithm", "given.py:Votes", *sizes)
    assert done.exit_code == 0, done.output
    text = (out / "ood-rotated-mnist.md").read_text()
    assert len(re.findall(r"\| Votes \|( [\d.*]+ \|){7}", text)) == 2, text  # one for each rule of selection
    page = command("report", out)
    assert page.exit_code == 0, page.output
    assert "Votes" in (out / "report.html").read_text()
    refused = command("table", "theory", "--algorithm", "given.py:Plain", *sizes)
    assert_one_sentence(refused, "theory does not compare training algorithms of your own: omit --algorithm")
    assert_one_sentence(command(*table, "--algorithm", "given.py:Plin", *sizes), "did you mean 'Plain'")


def test_runs_of_an_own_algorithm_are_judged_by_what_answers() -> None:
    Path("given.py").write_text(
        CODE + "\n\nclass Votes(ALGORITHMS['knn']):\n    pass\n\n\nclass ERM(Plain):\n    pass\n"
    )
    scale = replace(SCALES["least"], algorithms=("given.py:Plain", "given.py:Votes", "given.py:ERM"))
    own_rows = {row: answers for row, answers in rows_at(scale).items() if row not in ROWS}
    assert own_rows == {
        "Plain": ("given.py:Plain", "source"),
        "Votes": ("given.py:Votes", "knn"),
        "given.py:ERM": ("given.py:ERM", "source"),
    }
    assert rows_at(scale)["ERM"] == ROWS["ERM"]


# Installed packages --------------------------------------------------------------------------------------------------

ENTRY_POINTS = """
[adanpc.methods]
uniform = plug_in:Uniform
broken = plug_in:absent
number = plug_in:number
[adanpc.algorithms]
plain = plug_in:Plain
[adanpc.encoders]
tiny = plug_in:make
[adanpc.data]
tones = plug_in:tones
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that has registered one of each kind."""
    site = tmp_path / "site"
    about = site / "plug_in-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "plug_in.py").write_text(CODE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    own._registered.cache_clear()
    yield
    own._registered.cache_clear()
    sys.modules.pop("plug_in", None)


@pytest.mark.usefixtures("installed")
def test_what_installed_packages_register_is_found_by_name(data_dir: Path) -> None:
    assert find_method("uniform").__name__ == "Uniform"
    assert find_algorithm("plain").__name__ == "Plain"
    find_encoder("tiny")
    assert build("tiny", 4).dim == 16
    assert len(read("tones", data_dir).domains) == 3
    settings = ["--target", "bright", "--batch-size", 4, "--no-augment", "--workers", 0, "--steps", 2]
    done = command(
        "train", "--data-dir", data_dir, "--data", "tones", "--encoder", "tiny", "--algorithm", "plain", *settings
    )
    assert done.exit_code == 0, done.output
    folder = Path("runs") / "tones-plain-bright-0-2steps"
    assert command("train", "--resume", folder).exit_code == 0
    done = command("adapt", folder, "--method", "uniform", "source", "--images", 4)
    assert done.exit_code == 0, done.output
    assert "uniform" in done.output


@pytest.mark.usefixtures("installed")
def test_what_is_wrong_with_a_package_is_one_sentence() -> None:
    with pytest.raises(
        ValueError, match="broken, registered by an installed package as plug_in:absent, cannot be loaded"
    ):
        find_method("broken")
    with pytest.raises(ValueError, match="number is not a test-time method"):
        find_method("number")
    with pytest.raises(ValueError, match="did you mean 'uniform'. Available: .* more, or module:Class"):
        find_method("unifrm")


def test_without_such_a_package_the_names_are_unknown() -> None:
    with pytest.raises(ValueError, match="unknown method 'uniform'"):
        find_method("uniform")
