"""Training algorithms of one's own, by where they are defined; a run alone never makes their code run."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from adanpc import cli
from adanpc.cli.app import spread
from adanpc.lab.own import absolute_name
from adanpc.lab.train import ALGORITHMS, Algorithm, AlgorithmError, find
from adanpc.lab.train import registry as registry_module
from adanpc.lab.train.assemble import load_algorithm, start
from adanpc.lab.train.loop import train
from adanpc.lab.train.registry import UntrustedAlgorithmError, known
from adanpc.lab.train.run import SPEC, Run, RunError
from adanpc.lab.train.spec import Spec
from adanpc.testing import check_algorithm

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_algorithm.py"

ALGORITHM = """
from adanpc.lab.train import Algorithm
from adanpc.lab.train.algorithm import losses


class Doubled(Algorithm):
    erm = None

    def __init__(self, model, domains, *, factor: float = 2.0, **adam):
        super().__init__(model, domains, **adam)
        self.factor = factor

    def loss(self, batches):
        return self.factor * losses(self.model, batches).mean(), {}


class Unfinished(Algorithm):
    pass


number = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder in what seems to be a new process: no algorithm has been named yet."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(registry_module, "_loaded", {})
    return folder


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process knows of the algorithms that this one has named: nothing."""
    monkeypatch.setattr(registry_module, "_loaded", {})


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, spread([str(argument) for argument in arguments]))


def assert_one_sentence(done: Result, words: str) -> None:
    assert done.exit_code == 2, done.output
    assert words in done.output
    assert len(done.output.strip().splitlines()) == 1


def options(data_dir: Path, *more: object) -> list[object]:
    settings = ["--target", "bright", "--encoder", "convnet", "--batch-size", 4, "--no-augment", "--workers", 0]
    return ["train", "--data", "folder", "--data-dir", data_dir, *settings, "--steps", 2, *more]


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_registered_algorithms_are_found_by_name(name: str) -> None:
    assert find(name) is ALGORITHMS[name]
    assert known(name) is ALGORITHMS[name]


def test_modules_and_files_are_found(here: Path) -> None:
    (here / "own_found.py").write_text(ALGORITHM)
    kind = find("own_found:Doubled")
    assert issubclass(kind, Algorithm)
    assert find("own_found:Doubled") is kind
    of_file = find("own_found.py:Doubled")
    assert find(f"{here}/own_found.py:Doubled") is of_file
    check_algorithm(of_file, factor=1.5)


def test_a_file_is_run_once_and_is_not_needed_again(here: Path) -> None:
    (here / "once.py").write_text("with open('count', 'a') as file:\n    file.write('x')\n" + ALGORITHM)
    kind = find("once.py:Doubled")
    (here / "once.py").unlink()
    assert find("once.py:Doubled") is kind
    assert (here / "count").read_text() == "x"


CASES = {
    "emr": "unknown algorithm 'emr'; did you mean 'erm'? Available: erm, .*, or module:Class",
    "own_absent:Doubled": "there is no module 'own_absent' in .* or among installed packages",
    "absent.py:Doubled": "there is no file .*absent.py",
    "given.py:Double": "given.py has no class 'Double'; training algorithms in it: Doubled; did you mean 'Doubled'?",
    "given.py:number": "given.py:number is not a training algorithm: make it a subclass of .*algorithm.Algorithm",
    "given.py:Unfinished": "given.py:Unfinished is abstract: it must define loss",
    "broken.py:Doubled": "broken.py cannot be imported: ZeroDivisionError: division by zero",
    "given.py:": "name a training algorithm of your own as module:Class or file.py:Class, got 'given.py:'",
    "a\0b.py:Doubled": ".* cannot be imported: ValueError: .*",
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_with_a_name_is_one_sentence(here: Path, name: str) -> None:
    (here / "given.py").write_text(ALGORITHM)
    (here / "broken.py").write_text("1 / 0\n")
    with pytest.raises(AlgorithmError) as caught:
        find(name)
    assert re.fullmatch(CASES[name].replace("?", r"\?"), str(caught.value)), caught.value
    with pytest.raises(AlgorithmError):
        known(name)


def test_settings_of_ones_own_algorithm_are_checked(here: Path) -> None:
    (here / "given.py").write_text(ALGORITHM)
    spec = Spec("folder", ("bright",), "given.py:Doubled", hyper={"factor": 3.0, "lr": 0.1})
    assert spec.complete().hyper == {"factor": 3.0, "lr": 0.1, "weight_decay": 0.0}
    with pytest.raises(ValueError, match="given.py:Doubled has no setting 'fctor'; .*did you mean 'factor'"):
        Spec("folder", ("bright",), "given.py:Doubled", hyper={"fctor": 3.0})


# Who names an algorithm ----------------------------------------------------------------------------------------------


def test_a_document_names_nothing_by_itself(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "given.py").write_text("open('marker', 'w').close()\n" + ALGORITHM)
    document = replace(Spec("folder", ("bright",)), algorithm="erm").document()
    document["algorithm"] = "given.py:Doubled"
    with pytest.raises(UntrustedAlgorithmError, match=r"call adanpc.lab.train.find\('given.py:Doubled'\) first"):
        Spec.of(document)
    assert not (here / "marker").exists()
    find("given.py:Doubled")
    assert Spec.of(document).algorithm == "given.py:Doubled"
    forget(monkeypatch)
    with pytest.raises(UntrustedAlgorithmError):
        Spec.of(document)


def test_a_name_holds_for_the_file_that_was_named_and_for_no_other(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "given.py").write_text(ALGORITHM)
    spec = Spec("folder", ("bright",), "given.py:Doubled")
    other = tmp_path / "other"
    other.mkdir()
    (other / "given.py").write_text("open('marker', 'w').close()\n" + ALGORITHM)
    monkeypatch.chdir(other)
    with pytest.raises(UntrustedAlgorithmError):
        Spec.of(spec.document())
    with pytest.raises(UntrustedAlgorithmError):
        spec.complete()
    assert not (other / "marker").exists()
    assert known(f"{here}/given.py:Doubled") is find(f"../{here.name}/given.py:Doubled")


def test_another_class_of_the_same_module_has_not_been_named(here: Path) -> None:
    (here / "given.py").write_text(ALGORITHM + "\n\nclass Other(Doubled):\n    pass\n")
    find("given.py:Doubled")
    with pytest.raises(UntrustedAlgorithmError):
        known("given.py:Other")


@pytest.mark.parametrize("name", ["a\0b.py:X", "\ud800.py:X", ":", "::", ".py:", "x" * 100_000 + ".py:X", "a\nb:X"])
def test_any_text_that_a_file_may_hold_is_refused(name: str) -> None:
    with pytest.raises(UntrustedAlgorithmError) as caught:
        known(name)
    assert "\n" not in str(caught.value)


def test_the_absolute_name_does_not_depend_on_the_current_folder(here: Path) -> None:
    assert absolute_name("sub/../given.py:Doubled") == f"{here}/given.py:Doubled"
    assert absolute_name("package.module:Doubled") == "package.module:Doubled"


def test_a_spec_that_is_sent_to_another_process_is_known_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "given.py").write_text(ALGORITHM)
    sent = pickle.dumps(Spec("folder", ("bright",), "given.py:Doubled"))
    forget(monkeypatch)
    received = pickle.loads(sent)
    assert received.complete().algorithm == "given.py:Doubled"


# Runs ----------------------------------------------------------------------------------------------------------------


def test_a_run_is_opened_by_who_names_its_algorithm(
    here: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "given.py").write_text(ALGORITHM)
    spec = Spec("folder", ("bright",), "given.py:Doubled", "convnet", steps=1, batch=4, augment=False)
    folder = tmp_path / "run"
    train(start(spec, data_dir, folder), workers=0)
    assert type(load_algorithm(Run(folder))) is find("given.py:Doubled")  # a spec in this process has named it
    forget(monkeypatch)
    with pytest.raises(RunError, match="'given.py:Doubled', which is not part of adanpc, .* as `algorithm`"):
        Run(folder)
    with pytest.raises(RunError, match="'given.py:Doubled', which is not part of adanpc"):
        Run(folder, "erm")
    assert Run(folder, "./given.py:Doubled").spec.algorithm == "given.py:Doubled"
    assert Run(folder).finished()
    with pytest.raises(RunError, match="was trained with the algorithm given.py:Doubled, not with erm"):
        Run(folder, "erm")


def test_the_commands_train_resume_and_adapt(here: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "own folder").mkdir()
    (here / "own folder" / "given.py").write_text(ALGORITHM)
    name = "own folder/given.py:Doubled"
    done = command(*options(data_dir, "--algorithm", name, "--set", "factor=3"))
    assert done.exit_code == 0, done.output
    folder = Path("runs") / "folder-Doubled-bright-0-2steps"
    assert f"Run: {folder}" in done.output
    spec = json.loads((folder / SPEC).read_text())["spec"]
    assert spec["algorithm"] == name
    assert spec["hyper"]["factor"] == 3

    resume = ["train", "--resume", folder]
    adapt = ["adapt", folder, "--method", "source", "--images", 4]
    for arguments in (resume, adapt):
        forget(monkeypatch)
        assert_one_sentence(command(*arguments), "if you trust that algorithm, name it yourself as --algorithm")
        assert_one_sentence(command(*arguments, "--algorithm", "erm"), f"was trained with the algorithm '{name}'")
        assert_one_sentence(command(*arguments, "--algorithm", "absent.py:Doubled"), "there is no file")
        done = command(*arguments, "--algorithm", name)
        assert done.exit_code == 0, done.output


def test_another_algorithm_than_that_of_the_run_is_refused(data_dir: Path) -> None:
    assert command(*options(data_dir)).exit_code == 0
    folder = Path("runs") / "folder-erm-bright-0-2steps"
    words = f"{folder} was trained with the algorithm erm, not with knn"
    assert_one_sentence(command("train", "--resume", folder, "--algorithm", "knn"), words)
    assert command("train", "--resume", folder, "--algorithm", "erm").exit_code == 0


def test_what_cannot_be_found_leaves_no_folder(here: Path, data_dir: Path) -> None:
    assert_one_sentence(command(*options(data_dir, "--algorithm", "absent.py:Doubled")), "there is no file")
    assert_one_sentence(command(*options(data_dir, "--algorithm", "")), "unknown algorithm ''")
    assert not (here / "runs").exists()


def test_the_sentence_after_a_stop_repeats_the_algorithm(
    here: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = ALGORITHM.replace("return self.factor", "raise KeyboardInterrupt\n        return self.factor")
    (here / "stopping.py").write_text(stopping)
    done = command(*options(data_dir, "--algorithm", "stopping.py:Doubled"))
    assert done.exit_code == 130
    assert "adanpc train --resume runs/folder-Doubled-bright-0-2steps --algorithm stopping.py:Doubled" in done.output


def test_the_example_trains_in_two_processes(here: Path, data_dir: Path) -> None:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "adanpc"]
    arguments = [str(argument) for argument in options(data_dir, "--algorithm", f"{EXAMPLE}:WorstDomain")]
    done = subprocess.run([*program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Run: runs/folder-WorstDomain-bright-0-2steps" in done.stdout
