"""Methods by name, and methods of one's own by where they are defined."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from adanpc import cli
from adanpc.cli.app import spread
from adanpc.lab.adapt import ADAPTERS, Adapter, MethodError, find
from adanpc.testing import check_adapter

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_method.py"

METHOD = """
from __future__ import annotations

from dataclasses import dataclass

from adanpc.lab.adapt import Adapter, Source


@dataclass
class Settings:
    scale: float


class Scaled(Adapter):
    sees = "features"

    def __init__(self, source: Source, *, scale: float = 1.0) -> None:
        super().__init__(source)
        self.settings = Settings(scale)

    def answer(self, batch):
        return (self.settings.scale * self.model.head(batch)).softmax(1)


class Unfinished(Adapter):
    pass


number = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder; what a test imports from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.mark.parametrize("name", ADAPTERS)
def test_registered_methods_are_found_by_name(name: str) -> None:
    assert find(name) is ADAPTERS[name]


def test_a_module_in_the_current_folder_is_found(here: Path) -> None:
    (here / "registry_found.py").write_text(METHOD)
    kind = find("registry_found:Scaled")
    assert issubclass(kind, Adapter)
    assert find("registry_found:Scaled") is kind
    check_adapter(kind, scale=0.5)


def test_a_module_in_a_package_is_found(here: Path) -> None:
    folder = here / "registry_package" / "inner"
    folder.mkdir(parents=True)
    (folder / "methods.py").write_text(METHOD)
    assert find("registry_package.inner.methods:Scaled").__name__ == "Scaled"


def test_a_file_is_found_wherever_it_is_with_the_modules_beside_it(here: Path) -> None:
    folder = here / "some where"
    folder.mkdir()
    (folder / "registry_beside.py").write_text(METHOD)
    (folder / "random.py").write_text("from registry_beside import Scaled\n")  # a name that Python has taken
    kind = find("some where/random.py:Scaled")
    assert kind.__name__ == "Scaled"
    assert find(f"{folder}/random.py:Scaled") is kind


def test_the_example_is_found() -> None:
    check_adapter(find(f"{EXAMPLE}:ClassPrior"))


WITHOUT_PAPER = ("source", "knn")  # the source model, and its frozen bank


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name not in WITHOUT_PAPER])
def test_every_method_names_its_paper(name: str) -> None:
    assert "Paper:" in (ADAPTERS[name].__doc__ or "")


CASES = {
    "tnet": "unknown method 'tnet'; did you mean 'tent'? Available: source, .*, or module:Class",
    "wholly-unlike": "unknown method 'wholly-unlike'; .*, or module:Class",
    "registry_absent:Scaled": "there is no module 'registry_absent' in .* or among installed packages",
    "registry_absent.inner:Scaled": "there is no module 'registry_absent.inner' in .* or among installed packages",
    "absent.py:Scaled": "there is no file .*absent.py",
    "given.py:Scald": "given.py has no class 'Scald'; test-time methods in it: Scaled; did you mean 'Scaled'?",
    "given.py:number": "given.py:number is not a test-time method: make it a subclass of .*adapter.Adapter",
    "given.py:Settings": "given.py:Settings is not a test-time method: .*",
    "given.py:Unfinished": "given.py:Unfinished is abstract: it must define answer",
    "empty.py:Scaled": "empty.py has no class 'Scaled'; test-time methods in it: none",
    "broken.py:Scaled": "broken.py cannot be imported: ZeroDivisionError: division by zero",
    "needy.py:Scaled": "needy.py cannot be imported: No module named 'registry_missing'",
    "garbled.py:Scaled": "garbled.py cannot be imported: SyntaxError: .*",
    ":Scaled": "name a test-time method of your own as module:Class or file.py:Class, got ':Scaled'",
    "given.py:": "name a test-time method of your own as module:Class or file.py:Class, got 'given.py:'",
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_with_a_name_is_one_sentence(here: Path, name: str) -> None:
    (here / "given.py").write_text(METHOD)
    (here / "empty.py").write_text("")
    (here / "broken.py").write_text("1 / 0\n")
    (here / "needy.py").write_text("import registry_missing\n")
    (here / "garbled.py").write_text("class Scaled(:\n")
    with pytest.raises(MethodError) as caught:
        find(name)
    assert re.fullmatch(CASES[name].replace("?", r"\?"), str(caught.value)), caught.value
    assert caught.value.code == "unknown-method"


# adanpc adapt --------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, spread([str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def folder(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, hardly trained, with one target."""
    out = tmp_path_factory.mktemp("runs") / "run"
    done = run(
        *("train", "--data", "folder", "--data-dir", data_dir, "--target", "plain", "--encoder", "convnet"),
        *("--steps", 2, "--every", 2, "--batch-size", 4, "--workers", 0, "--no-augment", "--out", out),
    )
    assert done.exit_code == 0, done.output
    return out


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "adapt.jsonl").read_text().splitlines()]


def test_adapt_takes_a_method_of_ones_own_and_its_settings(here: Path, folder: Path) -> None:
    (here / "mine.py").write_text(METHOD)
    names = [f"{EXAMPLE}:ClassPrior", "mine.py:Scaled", "source"]
    done = run("adapt", folder, "--method", *names, "--images", 6, "--set", "mine.py:Scaled.scale=0.5")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    assert [row[0] for row in rows if row[1:2] == ["32"]] == ["ClassPrior", "Scaled", "source"]
    written = records(folder)[-3:]
    assert [record["method"] for record in written] == names
    assert [record["settings"] for record in written] == [{}, {"scale": 0.5}, {}]
    assert written[1]["domains"] == written[2]["domains"]  # a scale does not change which class is first


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--method", "source", "tnet"), "did you mean 'tent'?"),
        (("--method", "source", "absent:Mine"), "there is no module 'absent'"),
        (("--method", "source", "tent", "--set", "tent.alpa=1"), "tent has no setting 'alpa'"),
        (("--method", "source", "--stream", "succesive"), "did you mean 'successive'?"),
    ],
)
def test_adapt_checks_what_was_typed_before_it_encodes_anything(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    def scene_of(*_: object, **__: object) -> None:
        raise AssertionError("images were encoded")

    monkeypatch.setattr("adanpc.lab.sweep.evaluation.scene_of", scene_of)
    done = run("adapt", folder, *arguments)
    assert done.exit_code == 2, done.output
    assert sentence in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_adapt_fails_if_every_method_was_refused_and_goes_on_if_one_was(folder: Path) -> None:
    all_refused = run("adapt", folder, "--method", "ttt", "ttt-online", "--images", 4)
    assert all_refused.exit_code == 2
    assert all_refused.output.count("has no rotation head") == 2
    assert "Records:" in all_refused.output
    one_size_refused = run("adapt", folder, "--method", "tent-prebn", "--batch-size", 1, 4, "--images", 4)
    assert one_size_refused.exit_code == 0
    assert "tent-prebn, batches of 1: TentPreBN needs batches of at least 2 rows" in one_size_refused.output
