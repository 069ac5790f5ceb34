"""Damaged, edited and forged runs: refused in one sentence, or noticed and made again; never believed.

A forger knows the format: where it matters, files here have a right seal. ``ADANPC_FUZZ`` multiplies the random tries.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner, Result

from adanpc import cli
from adanpc.cli.app import spread
from adanpc.errors import AdaNPCError
from adanpc.files import entries, held
from adanpc.lab.data.domain import Domain
from adanpc.lab.networks import build
from adanpc.lab.networks.features import features
from adanpc.lab.networks.sealed import HEADER_START, SEAL_END, SEAL_START, SealError, read_sealed, write_sealed
from adanpc.lab.train import assemble as assemble_module
from adanpc.lab.train import checkpoint
from adanpc.lab.train import run as run_module
from adanpc.lab.train.assemble import load_algorithm, splits, start
from adanpc.lab.train.loop import train
from adanpc.lab.train.run import BEST, CHECKPOINT, LOCK, RECORDS, SPEC, Run, RunError
from adanpc.lab.train.spec import Spec

FUZZ = int(os.environ.get("ADANPC_FUZZ", "1"))
SETTINGS = ["--target", "bright", "--encoder", "convnet", "--batch-size", "4", "--no-augment", "--workers", "0"]


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, spread([str(argument) for argument in arguments]))


def assert_one_sentence(done: Result, words: str) -> None:
    assert done.exit_code == 2, done.output
    assert words in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.fixture(scope="module")
def honest(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run; tests change copies of it."""
    spec = Spec("folder", ("bright",), "erm", "convnet", steps=2, batch=4, every=1, augment=False)
    run = start(spec, data_dir, tmp_path_factory.mktemp("runs") / "run")
    train(run, workers=0)
    return run.folder


@pytest.fixture
def folder(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "run"))


# Checkpoints


def small_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "layer.weight": torch.randn(3, 2, generator=generator),
        "layer.bias": torch.randn(3, generator=generator),
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}]
    optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": groups}
    algorithm = {"weights": weights, "optimizers": {"model": optimizer}, "step": 2}
    return {"algorithm": algorithm, "best": 50.0, "rng": torch.arange(9, dtype=torch.uint8)}


def resealed(data: bytes) -> bytes:
    """The bytes as a forger would leave them: with a seal that fits, if there is room for one."""
    if len(data) < SEAL_END:
        return data
    seal = hashlib.sha256(data[:SEAL_START] + data[SEAL_END:]).hexdigest().encode()
    return data[:SEAL_START] + seal + data[SEAL_END:]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The bytes with one random flip, cut, insertion, loss, repetition or overwritten stretch."""
    kind = chance.choice(("flip", "cut", "insert", "lose", "repeat", "overwrite"))
    place = chance.randrange(len(data))
    length = chance.randrange(1, 40)
    stretch = data[place : place + length]
    if kind == "flip":
        return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
    if kind == "cut":
        return data[:place]
    if kind == "insert":
        return data[:place] + chance.randbytes(length) + data[place:]
    if kind == "lose":
        return data[:place] + data[place + length :]
    if kind == "repeat":
        return data[:place] + stretch + data[place:]
    return data[:place] + chance.randbytes(len(stretch)) + data[place + len(stretch) :]


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    checkpoint.write(path, small_state())
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 7):  # every byte, and every place in a byte
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(SealError, match="damaged"):
            checkpoint.read(path)


def test_random_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    checkpoint.write(path, small_state())
    data = path.read_bytes()
    chance = random.Random(0)
    for _ in range(300 * FUZZ):
        changed = damaged(data, chance)
        if changed == data:
            continue
        path.write_bytes(changed)
        with pytest.raises(SealError):
            checkpoint.read(path)


def test_damage_under_a_right_seal_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    checkpoint.write(path, small_state())
    data = path.read_bytes()
    assert resealed(data) == data  # the forger can write what adanpc writes
    chance = random.Random(1)
    refused = 0
    for _ in range(300 * FUZZ):
        path.write_bytes(resealed(damaged(data, chance)))
        try:
            assert isinstance(checkpoint.read(path), dict)
        except SealError:
            refused += 1
    assert refused


def test_a_document_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_sealed(path, {}, "0" * 200_000)
    data = path.read_bytes()
    start = data.index(b'"' + b"0" * 100_000)
    path.write_bytes(resealed(data[:start] + b"[" * 200_002 + data[start + 200_002 :]))
    with pytest.raises(SealError, match="RecursionError"):
        checkpoint.read(path)


@pytest.mark.parametrize("name", [CHECKPOINT, BEST])
def test_a_damaged_model_is_refused_by_every_command(folder: Path, name: str) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    which = "last" if name == CHECKPOINT else "best"
    words = f"{path} is damaged: its contents do not match its seal; restore the file from a copy, or train again"
    assert_one_sentence(command("adapt", folder, "--method", "source", "--which", which), words)
    if name == CHECKPOINT:
        assert_one_sentence(command("train", "--resume", folder), words)
        with pytest.raises(RunError, match="is damaged"):
            Run(folder).finished()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"algorithm": {"step": 1}},
        {"algorithm": {"step": "1"}},
        {"algorithm": {"step": 1, "weights": {}, "optimizers": {}}},
        {"algorithm": {"step": 1, "weights": [], "optimizers": {}}},
        small_state(),
    ],
)
def test_a_sealed_state_of_something_else_is_refused(folder: Path, state: dict[str, Any]) -> None:
    for name in (CHECKPOINT, BEST):
        checkpoint.write(folder / name, state)
    with pytest.raises(RunError, match=f"{BEST} "):
        load_algorithm(Run(folder))
    with pytest.raises(RunError, match=f"{CHECKPOINT} "):
        train(Run(folder), workers=0)


def test_nothing_in_a_checkpoint_is_executed(folder: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path / 'sprung'}",)

    torch.save({"algorithm": Trap()}, folder / CHECKPOINT)
    with pytest.raises(RunError, match="it does not begin with a seal"):
        train(Run(folder), workers=0)
    assert not (tmp_path / "sprung").exists()


def test_runs_of_older_versions_are_refused_in_one_sentence(folder: Path) -> None:
    document = json.loads((folder / SPEC).read_text())
    (folder / SPEC).write_text(json.dumps({**document, "format": 1}))
    (folder / CHECKPOINT).rename(folder / "checkpoint.pt")
    done = command("train", "--resume", folder)
    assert_one_sentence(done, "has format 1, this version reads 3: train it again, older checkpoints cannot be read")


# The feature cache


@pytest.fixture(scope="module")
def domain() -> Domain:
    return Domain("here", torch.rand(9, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(9).long())


def shuffled(path: Path) -> None:
    rows, _ = read_sealed(path)
    first, second = (row.numpy().tobytes() for row in rows["features"][:2])
    path.write_bytes(path.read_bytes().replace(first + second, second + first))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_another_domain(path: Path) -> None:
    tensors, document = read_sealed(path)
    write_sealed(path, tensors, {**document, "domain": "0" * 16})


def with_fewer_rows(path: Path) -> None:
    tensors, document = read_sealed(path)
    write_sealed(path, {"features": tensors["features"][:-1]}, document)


def in_other_numbers(path: Path) -> None:
    tensors, document = read_sealed(path)
    write_sealed(path, {"features": tensors["features"].double()}, document)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "change", [shuffled, truncated, emptied, of_another_domain, with_fewer_rows, in_other_numbers, linked]
)
def test_a_changed_feature_file_is_made_again(
    change: Callable[[Path], None], domain: Domain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = build("convnet", 3)
    computed = features(model, domain, cache=tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    before = path.read_bytes()
    change(path)
    changed = path.read_bytes()
    with caplog.at_level(logging.WARNING, logger="adanpc"):
        assert torch.equal(features(model, domain, cache=tmp_path), computed)
    (message,) = caplog.messages
    assert str(path) in message
    assert message.endswith("; it is computed again")
    assert path.read_bytes() == before
    assert not path.is_symlink()
    if change is linked:
        assert (tmp_path / "elsewhere").read_bytes() == changed  # nothing is written through the link


# Data


def repainted(data_dir: Path, tmp_path: Path) -> tuple[Path, Callable[[], None]]:
    """A copy of the data, and what changes one of its images and no size."""
    copy = Path(shutil.copytree(data_dir, tmp_path / "data"))

    def repaint() -> None:
        path = copy / "dim" / "red" / "0.png"
        Image.fromarray(np.full((8, 8, 3), 200, dtype=np.uint8)).save(path)

    return copy, repaint


def test_other_images_of_the_same_number_are_refused(data_dir: Path, tmp_path: Path) -> None:
    copy, repaint = repainted(data_dir, tmp_path)
    folder = tmp_path / "run"
    done = command("train", "--data", "folder", "--data-dir", copy, *SETTINGS, "--steps", "1", "--out", folder)
    assert done.exit_code == 0, done.output
    splits(Run(folder), None)
    repaint()
    words = f"the data in {copy} has changed since {folder} was created: its digest was"
    with pytest.raises(RunError, match="restore the data, or train again in another folder"):
        splits(Run(folder), None)
    assert_one_sentence(command("train", "--resume", folder), words)
    assert_one_sentence(command("adapt", folder, "--method", "source"), words)


def test_other_names_of_classes_are_refused(folder: Path) -> None:
    document = json.loads((folder / SPEC).read_text())
    document["data"]["classes"] = ["red", "blue", "green"]
    (folder / SPEC).write_text(json.dumps(document))
    with pytest.raises(RunError, match="its classes was"):
        splits(Run(folder), None)


# One writer


def test_a_second_process_is_refused_while_one_trains(data_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ["--data", "folder", "--data-dir", str(data_dir), *SETTINGS, "--every", "5"]
    program = [sys.executable, "-m", "adanpc", "train"]
    first = subprocess.Popen(
        [*program, *settings, "--steps", "1000000", "--out", str(folder)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        while not (folder / CHECKPOINT).exists():
            assert first.poll() is None, first.communicate()
            time.sleep(0.02)
        again = command("train", *settings, "--out", folder)
        assert (again.exit_code, again.stdout) == (2, "")
        assert again.stderr.startswith(f"adanpc: {folder} already holds a run")
        second = command("train", "--resume", folder)
        assert (second.exit_code, second.stdout) == (2, "")
        sentence = f"adanpc: another process is training in {folder}: wait for it to end, or choose another folder\n"
        assert second.stderr == sentence
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    steps = [entry["step"] for entry in entries(folder / RECORDS)]
    assert steps == list(range(5, 5 * len(steps) + 1, 5))  # one writer's


def test_neither_training_nor_creating_enters_a_folder_that_is_held(
    folder: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "PATIENCE", 0.0)
    with held(folder / LOCK, wait=False), pytest.raises(RunError, match="another process is training in"):
        train(Run(folder), workers=0)
    with held(tmp_path / "new" / LOCK, wait=False), pytest.raises(RunError, match="another process is training in"):
        start(Run(folder).spec, data_dir, tmp_path / "new")
    assert not (tmp_path / "new" / SPEC).exists()


# spec.json

VALUES: list[Any] = [None, True, False, 0, -1, 1, 7, 0.5, -2.5, 10**30, 1e308, "", "x", "1", [], ["x"], {}, {"x": 1}]


def edited(document: dict[str, Any], chance: random.Random) -> str:
    """The document as text with a value replaced, a key dropped, added or renamed, or cut off."""
    document = json.loads(json.dumps(document))
    places = [document, document["spec"], document["spec"], document["data"], document["spec"]["hyper"]]
    where = chance.choice([*places, document["data"]["domains"], document["environment"]])
    key = chance.choice(list(where))
    kind = chance.choice(("replace", "replace", "replace", "drop", "add", "rename", "cut"))
    if kind == "replace":
        where[key] = chance.choice(VALUES)
    elif kind == "drop":
        del where[key]
    elif kind == "add":
        where[f"{key}s"] = chance.choice(VALUES)
    elif kind == "rename":
        where[f"{key}s"] = where.pop(key)
    text = json.dumps(document, indent=1)
    return text[: chance.randrange(len(text))] if kind == "cut" else text


def test_edited_specs_open_or_are_refused_in_one_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # where data are looked for if the path of their folder is emptied
    document = json.loads((folder / SPEC).read_text())
    chance = random.Random(2)
    sentences: list[str] = []
    for _ in range(250 * FUZZ):
        (folder / SPEC).write_text(edited(document, chance))
        try:
            run = Run(folder)
            load_algorithm(run)
            splits(run, None)
        except AdaNPCError as error:
            sentences.append(str(error))
    assert len(sentences) > 150 * FUZZ
    assert not any("\n" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        (None, {"started": 3}, "started must be a string, got 3"),
        (None, {"extra": 3}, "the run has an unknown field 'extra'"),
        (None, {"format": "3"}, "format must be a whole number, got '3'"),
        (None, {"environment": []}, "environment must be an object"),
        (None, {"spec": []}, "the spec must be an object with named fields"),
        ("spec", {"step": 3}, "the spec has an unknown field 'step'; did you mean 'steps'?"),
        ("spec", {"steps": "many"}, "steps must be a whole number, got 'many'"),
        ("spec", {"batch": 10**30}, "batch must be at most 1000000"),
        ("spec", {"batch": 0}, "leaves settings open"),
        ("spec", {"hyper": {}}, "leaves settings open"),
        ("spec", {"hyper": {"lr": "fast"}}, "lr of erm must be a number, got 'fast'"),
        ("spec", {"hyper": 3}, "hyper must map names of settings to values, got 3"),
        ("spec", {"targets": "bright"}, "targets must be a tuple of domain names, got 'bright'"),
        ("spec", {"targets": [3]}, "each of the targets must be a string, got 3"),
        ("spec", {"targets": ["dark"]}, "target 'dark' is not one of the domains bright, dim, plain"),
        ("spec", {"targets": ["dim", "plain", "bright"]}, "none is left to train on"),
        ("spec", {"norm": None}, "norm must be True or False, got None"),
        ("spec", {"pretrained": 1}, "pretrained must be True or False, got 1"),
        ("spec", {"dropout": 2}, "dropout must be a number from 0 to 1, got 2"),
        ("spec", {"weights": 2}, "weights must be a string, got 2"),
        ("spec", {"algorithm": ["erm"]}, r"unknown algorithm \['erm'\]"),
        ("spec", {"images": 1}, "must be at least 2, got 1"),
        ("data", {"channels": 0}, "channels must be at least 1, got 0"),
        ("data", {"classes": []}, r"classes must be a list of names, got \[\]"),
        ("data", {"classes": [3]}, "each of the classes must be a string, got 3"),
        ("data", {"domains": {}}, "domains must be an object of sizes by name"),
        ("data", {"domains": {"dim": "all"}}, "the size of domain 'dim' must be a whole number, got 'all'"),
        ("data", {"digest": None}, "digest must be a string, got None"),
    ],
)
def test_what_is_wrong_in_a_spec_is_named(folder: Path, part: str | None, changes: dict[str, Any], words: str) -> None:
    document = json.loads((folder / SPEC).read_text())
    (document if part is None else document[part]).update(changes)
    (folder / SPEC).write_text(json.dumps(document))
    with pytest.raises(RunError, match=words) as caught:
        Run(folder)
    assert str(caught.value).startswith(f"{folder / SPEC} was changed or is damaged: ")
    assert str(caught.value).endswith("; restore it, or train again")


def test_fields_that_are_missing_are_named(folder: Path) -> None:
    document = json.loads((folder / SPEC).read_text())
    for name in document["spec"]:
        spec = {key: value for key, value in document["spec"].items() if key != name}
        (folder / SPEC).write_text(json.dumps({**document, "spec": spec}))
        with pytest.raises(RunError, match=f"the spec has no field '{name}'"):
            Run(folder)


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 5000])
def test_a_spec_that_is_no_document_is_refused(folder: Path, text: bytes) -> None:
    (folder / SPEC).write_bytes(text)
    with pytest.raises(RunError):
        Run(folder)


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / SPEC).unlink()
    os.mkfifo(folder / SPEC)
    with pytest.raises(RunError, match=f"it has no file {SPEC}"):
        Run(folder)


def test_a_spec_of_another_network_does_not_fit_the_checkpoint(folder: Path) -> None:
    document = json.loads((folder / SPEC).read_text())
    document["spec"]["encoder"] = "cifar-resnet-20"
    (folder / SPEC).write_text(json.dumps(document))
    assert_one_sentence(command("train", "--resume", folder), f"{CHECKPOINT} does not fit spec.json (RuntimeError")
    assert_one_sentence(command("adapt", folder, "--method", "source"), f"{BEST} does not fit spec.json (RuntimeError")


# Records

ACCURACIES = {"dim": 1.0, "plain": 2.0, "bright": 3.0}
LACKING = json.dumps({"step": 2, "held_out": ACCURACIES, "target": {}, "seconds": 1})


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "2"}',
        '{"step": 2}',
        '{"step": 2, "held_out": 3, "target": {}, "seconds": 1}',
        LACKING,
        "[]",
        "no JSON",
        "",
    ],
)
def test_records_that_lack_the_last_step_are_refused(folder: Path, line: str) -> None:
    (folder / RECORDS).write_text(line + "\n")
    words = f"{folder / RECORDS} has no complete record of the last step, 2: it was changed; restore it, or train again"
    assert_one_sentence(command("train", "--resume", folder), words)


# Links


@pytest.mark.parametrize("name", [SPEC, RECORDS, CHECKPOINT, BEST, LOCK, "features", "adapt.jsonl", "tensorboard"])
def test_nothing_is_written_through_a_link(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    if (folder / name).exists():
        shutil.move(folder / name, outside)
    elif name == "features":
        outside.mkdir()
    else:
        outside.write_text("precious")
    before = None if outside.is_dir() else outside.read_bytes()
    (folder / name).symlink_to(outside)
    words = f"{folder / name} is a symbolic link, and a run does not write through links"
    assert_one_sentence(command("train", "--resume", folder), words)
    assert_one_sentence(command("adapt", folder, "--method", "source"), words)
    if before is None:
        assert not list(outside.iterdir())
    else:
        assert outside.read_bytes() == before


@pytest.mark.parametrize("name", [SPEC, RECORDS, CHECKPOINT])
def test_no_run_is_created_beside_a_link(data_dir: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "outside")
    done = command("train", "--data", "folder", "--data-dir", data_dir, *SETTINGS, "--steps", "1", "--out", folder)
    assert_one_sentence(done, f"{folder / name} is a symbolic link")
    assert not (tmp_path / "outside").exists()


# Once


def test_a_training_builds_once_and_reads_once(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> None:
        function = getattr(assemble_module, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(assemble_module, name, counting)

    counted("read")
    counted("build")
    folder = tmp_path / "run"
    done = command("train", "--data", "folder", "--data-dir", data_dir, *SETTINGS, "--steps", "1", "--out", folder)
    assert done.exit_code == 0, done.output
    assert sorted(calls) == ["build", "read"]
    calls.clear()
    assert command("train", "--resume", folder).exit_code == 0
    assert sorted(calls) == ["build", "read"]


def test_what_is_built_once_trains_as_what_is_built_again(honest: Path, data_dir: Path, tmp_path: Path) -> None:
    options = [*SETTINGS, "--steps", "2", "--every", "1", "--set", "lr=0.00005", "--out", tmp_path / "run"]
    done = command("train", "--data", "folder", "--data-dir", data_dir, *options)
    assert done.exit_code == 0, done.output
    one, other = (weights_of(Run(folder)) for folder in (honest, tmp_path / "run"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def weights_of(run: Run) -> dict[str, Tensor]:
    state = run.state(CHECKPOINT)
    assert state is not None
    weights: dict[str, Tensor] = state["algorithm"]["weights"]
    return weights


def test_the_seal_stands_where_the_reader_looks_for_it(tmp_path: Path) -> None:
    write_sealed(tmp_path / "file", {"a": torch.zeros(3)}, {"b": 1})
    data = (tmp_path / "file").read_bytes()
    assert data[8:SEAL_START] == HEADER_START
    assert data[SEAL_START:SEAL_END].decode() == hashlib.sha256(data[:SEAL_START] + data[SEAL_END:]).hexdigest()


# Algorithms of one's own


@pytest.mark.parametrize("place", ["file", "path", "module"])
def test_a_run_cannot_bring_its_own_code(folder: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    trap = "open({!r}, 'w').close()\nfrom adanpc.lab.train.erm import ERM\n\nclass Evil(ERM):\n    pass\n"
    marker = folder.parent / "marker"
    (folder / "evil.py").write_text(trap.format(str(marker)))
    names = {"file": "evil.py:Evil", "path": f"{folder}/evil.py:Evil", "module": "evil:Evil"}
    document = json.loads((folder / SPEC).read_text())
    document["spec"]["algorithm"] = names[place]
    (folder / SPEC).write_text(json.dumps(document))
    monkeypatch.chdir(folder)  # where even Python itself would find it
    words = f"was trained with the algorithm {names[place]!r}, which is not part of adanpc"
    with pytest.raises(RunError, match=re.escape(words)):
        Run(folder)
    resume = ["train", "--resume", folder]
    adapt = ["adapt", folder, "--method", "source"]
    for arguments in (resume, adapt):
        assert_one_sentence(command(*arguments), words)
        assert_one_sentence(command(*arguments, "--algorithm", "erm"), words)  # another one than the run's
    assert not marker.exists()
