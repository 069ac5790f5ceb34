"""Folders that come from strangers: nothing in them is run or followed, and damage is told in one sentence."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweeping import Chore
from typer.testing import CliRunner

from adanpc import cli
from adanpc.lab import environment
from adanpc.lab.environment import commit
from adanpc.lab.show.exhibit import Cell, Exhibit, Sheet, Value
from adanpc.lab.show.report import write
from adanpc.lab.sweep.cost import FILE as RATES
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.records import FILE, Records
from adanpc.lab.sweep.shape import RecordsError
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.task import Task
from adanpc.lab.tables import TABLES, Results
from adanpc.lab.tables.choice import CHOICES, choices
from adanpc.lab.tables.scale import SCALES

ROUNDS = 3 * int(os.environ.get("ADANPC_FUZZ", "1"))
LEAST = replace(SCALES["least"], steps=2, images=10)
THEORY = ("table", "theory", "--scale", "least", "--workers", "1")
GIT = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}


def run(*arguments: str) -> tuple[int, str, str]:
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    return outcome.exit_code, outcome.stdout, outcome.stderr


# A repository that is not to be trusted -------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    known = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
    command = ["git", *known, *arguments]
    done = subprocess.run(command, cwd=folder, env=GIT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--initial-branch=main")
    (folder / "file").write_text("text\n")
    git(folder, "add", "file")
    git(folder, "commit", "--message", "first")
    monkeypatch.chdir(folder)
    return folder


def test_the_commit_is_read_and_nothing_of_the_repository_is_run(repository: Path, tmp_path: Path) -> None:
    expected = git(repository, "rev-parse", "HEAD")
    trace = tmp_path / "trace"
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ntouch '{trace}'\ncat\n")
    script.chmod(0o755)
    (repository / ".gitattributes").write_text("* filter=evil diff=evil\n")
    for setting in ("core.fsmonitor", "filter.evil.clean", "filter.evil.smudge", "diff.evil.textconv", "core.pager"):
        git(repository, "config", setting, str(script))
    (repository / "file").write_text("changed\n")
    assert commit() == expected
    assert environment.environment()["commit"] == expected
    assert not trace.exists()
    subprocess.run(["git", "status"], cwd=repository, env=GIT, capture_output=True, check=False)
    assert trace.exists()  # git itself would have run it


@pytest.mark.parametrize("packed", [False, True])
def test_a_commit_is_found_from_below_on_any_branch_and_in_worktrees(
    repository: Path, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = git(repository, "rev-parse", "HEAD")
    git(repository, "checkout", "-b", "some/branch-1.0")
    git(repository, "worktree", "add", str(tmp_path / "tree"), "-b", "other")
    if packed:
        git(repository, "pack-refs", "--all")
    below = repository / "a" / "b"
    below.mkdir(parents=True)
    for folder in (repository, below, tmp_path / "tree"):
        monkeypatch.chdir(folder)
        assert commit() == expected
    git(repository, "checkout", "--detach")
    monkeypatch.chdir(repository)
    assert commit() == expected


def test_outside_of_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert commit() == ""


@pytest.mark.parametrize(
    "head",
    ["ref: ../../secret", "ref: refs/heads/../../../../secret", "ref: /etc/passwd", "ref: refs/linked", "", "\0", "x"],
)
def test_no_branch_leads_out_of_the_repository(repository: Path, head: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a" * 40)
    (repository / ".git" / "refs" / "linked").symlink_to(secret)
    (repository / ".git" / "HEAD").write_text(head)
    assert commit() == ""


def test_files_that_no_repository_has_are_not_read(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = repository / ".git" / "HEAD"
    head.unlink()
    os.mkfifo(head)  # opening it would wait for ever
    assert commit() == ""
    head.unlink()
    head.write_text("a" * 40)
    monkeypatch.setattr(environment, "LARGEST", 39)
    assert commit() == ""


def test_a_pointer_to_nothing_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("gitdir: /nowhere", "gitdir: ", "nothing", "gitdir: \0"):
        (tmp_path / ".git").write_text(text)
        assert commit() == ""


# Links ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [FILE, "records.lock"])
def test_records_are_never_written_through_a_link(name: str, tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    with (
        pytest.raises(RecordsError, match=f"{name} is a symbolic link, which is not followed"),
        Records(folder).writing(),
    ):
        pass
    code, _, said = run(*THEORY, "--out", str(folder))
    assert code == 2
    assert said.count("\n") <= 2
    assert "is a symbolic link, which is not followed: remove it, or choose another --out" in said
    assert victim.read_text() == "precious"


def test_rates_are_never_written_through_a_link(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "out"
    victim.write_text("{}")
    folder.mkdir()
    (folder / RATES).symlink_to(victim)
    with pytest.raises(RecordsError, match="rates.json is a symbolic link"):
        CostModel(Workspace(tmp_path, folder)).forward("convnet")
    assert victim.read_text() == "{}"


def test_choices_are_never_written_through_a_link(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "out"
    victim.write_text("{}")
    folder.mkdir()
    (folder / CHOICES).symlink_to(victim)
    code, _, said = run(*THEORY, "--out", str(folder))
    assert (code, victim.read_text()) == (2, "{}")
    assert "tables.json is a symbolic link" in said


def test_results_replace_a_link_and_leave_alone_what_it_leads_to(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    folder.mkdir()
    names = ("split.md", "split.csv", "split.tex", "report.html")
    for name in names:
        (folder / name).symlink_to(victim)
    note(folder, "split")
    shown = TABLES["split"].exhibit(Results(Records(folder), LEAST, Workspace(tmp_path, folder), ("rotated-mnist",)))
    write(shown, folder)
    assert run("report", str(folder), "--data-dir", str(tmp_path))[0] == 0
    assert victim.read_text() == "precious"
    assert not any((folder / name).is_symlink() for name in names)


# Damage --------------------------------------------------------------------------------------------------------------


def note(folder: Path, name: str) -> None:
    """Notes that a table was asked for, as ``adanpc table`` does."""
    scale = {**vars(LEAST), "only": []}
    (folder / CHOICES).write_text(json.dumps({name: {"scale": scale, "budget": ""}}))


def adapted(task: Task, number: random.Random) -> dict[str, Any]:
    targets = task.document()["subject"]["spec"]["targets"]
    accuracy = {name: number.uniform(0, 100) for name in targets}
    scores = {name: number.random() for name in ("source", "target", "snd", "diversity", "agreement")}
    return {
        "average": number.uniform(0, 100),
        "domains": accuracy,
        "source": {"before": 90.0, "after": accuracy},
        "scores": scores,
    }


def timed(task: Task, number: random.Random) -> dict[str, Any]:
    methods = task.document()["methods"]
    return {"methods": {name: {"ms": number.random(), "total_ms": 2.0, "mb": 1.0} for name in methods}}


def witnessed(task: Task, number: random.Random) -> dict[str, Any]:
    neighbors = [{"id": id_, "label": id_ % 3, "similarity": number.random(), "weight": 0.1} for id_ in range(10)]
    probs = [0.1] * 10
    question = {"row": 1, "label": 3, "probs": probs, "neighbors": neighbors, "removed": [1, 2], "after": probs}
    return {"accuracy": 50.0, "queries": 9, "questions": [question, {**question, "after": None, "removed": []}]}


def split(task: Task, number: random.Random) -> dict[str, Any]:
    known = {"dim": 3.0, "source_overlap": 1.0, "target_overlap": 0.5, "density": 2.0, "smoothness": 0.3, "gap": 0.1}
    rows = {"k_s": 4, "k_u": 6, "n_s": 48, "n_u": 24, "joint": 3.5}
    return {**rows, "accuracy": {"joint": 50.0, "split": 60.0}, "known": known}


def simulated(task: Task, number: random.Random) -> dict[str, Any]:
    parameters = task.document()["parameters"]
    votes = ("source", "joint", "split", "half", "joint pseudo", "split pseudo", "half pseudo")
    divergence = ("mean", "within", "radius", "wasserstein", "error", "bound")
    draw = {
        **parameters,
        "shift": "none",
        "problem": {"dim": 2, "overlap": 1.0, "gap": 0.0},
        "excess": {name: number.random() for name in votes},
        "worst": number.random(),
        "bound": {name: number.random() for name in ("2", "3", "3 half")},
        "divergence": {name: number.random() for name in divergence},
        "pseudo_bias": number.random(),
    }
    return {"draws": [{**draw, "seed": seed} for seed in range(2)]}


HONEST: dict[str, Callable[[Task, random.Random], dict[str, Any]]] = {
    "successive-rotated-mnist": adapted,
    "ood-rotated-mnist": adapted,
    "inference-time": timed,
    "gallery-rotated-mnist": witnessed,
    "split": split,
    "theory": simulated,
}
JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    7,
    10**11,
    10**400,
    -2.5,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "text",
    "\x1b[31m[bold]",
    [],
    [[]],
    [1, "a"],
    {},
    {"error": 3},
    {"a": {}},
)


def refusal_of(read: Callable[[], object]) -> str:
    """The sentence by which a file is refused; nothing if it is taken."""
    try:
        read()
    except RecordsError as error:
        return str(error)
    return ""


def damage(value: Any, number: random.Random) -> Any:
    """The value with one part of it lost, or something else in its place."""
    if not value or not isinstance(value, dict | list) or number.random() < 0.1:
        return number.choice(JUNK)
    places: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    place = number.choice(places)
    changed = value.copy()
    if number.random() < 0.2:
        del changed[place]
    else:
        changed[place] = damage(value[place], number)
    return changed


@pytest.mark.no_cover
@pytest.mark.parametrize("name", HONEST)
def test_damaged_records_never_end_in_a_traceback(name: str, tmp_path: Path) -> None:
    table = TABLES[name]
    workspace = Workspace(tmp_path, tmp_path)
    made = random.Random(name)
    whole = Records(tmp_path)
    absent = tuple(data for data in table.data if data != "rotated-mnist")
    for task in table.plan(LEAST):
        if not set(task.data()) & set(absent):
            whole.add(task, HONEST[name](task, made), 1.0, {"rotated-mnist": 5000})
    lines = [json.loads(line) for line in whole.path.read_text().splitlines()]
    assert Records(tmp_path).entries.keys() == whole.entries.keys()  # what is honest is read
    assert table.exhibit(Results(Records(tmp_path), LEAST, workspace, absent)).parts
    for round_ in range(ROUNDS):
        number = random.Random(f"{name} {round_}")
        damaged = [damage(line, number) for line in lines]
        whole.path.write_text("".join(json.dumps(line) + "\n" for line in damaged))
        records = Records(tmp_path)
        assert len(records.entries) + records.damaged <= len(lines)
        records.check({})
        shown = table.exhibit(Results(records, LEAST, workspace, absent))
        if records.damaged:
            assert any("Damaged lines of" in text for text in shown.notes)


def test_a_damaged_record_is_made_again(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.add(Chore("a"), {"value": 1}, 1.0)
    entry = json.loads(records.path.read_text())
    for name, junk in (("seconds", float("nan")), ("record", []), ("environment", None), ("data", {"pacs": -1})):
        records.path.write_text(json.dumps({**entry, name: junk}) + "\n")
        again = Records(tmp_path)
        assert Chore("a") not in again
        assert again.damaged == 1
        again.add(Chore("a"), {"value": 2}, 1.0)
        assert Records(tmp_path).of(Chore("a")) == {"value": 2}


@pytest.mark.parametrize(
    "junk", [json.dumps(value) for value in JUNK if value != {}] + ["", "{", "[" * 100_000, "\xff"]
)
@pytest.mark.parametrize("inside", ["{}", '{{"convnet": {}}}', '{{"convnet": [0.1, {}]}}'])
def test_damaged_rates_are_one_sentence(junk: str, inside: str, tmp_path: Path) -> None:
    (tmp_path / RATES).write_text(inside.format(junk))
    costs = CostModel(Workspace(tmp_path, tmp_path))
    refusal = refusal_of(lambda: costs.forward("convnet"))
    if refusal:
        assert refusal.startswith(f"{tmp_path / RATES} is damaged (")
        assert refusal.endswith("): delete it, and the encoders are timed again")


def test_damaged_choices_are_one_sentence(tmp_path: Path) -> None:
    note(tmp_path, "theory")
    assert choices(tmp_path)["theory"].scale == LEAST
    honest = json.loads((tmp_path / CHOICES).read_text())
    for round_ in range(30 * ROUNDS):
        (tmp_path / CHOICES).write_text(json.dumps(damage(honest, random.Random(round_))))
        assert re.search(r"^$|tables\.json is damaged \(.*\): delete it", refusal_of(lambda: choices(tmp_path)))
    (tmp_path / CHOICES).write_text('{"theory": {}}')
    code, _, said = run(*THEORY, "--out", str(tmp_path))
    assert code == 2
    assert said.count("\n") == 1
    assert "tables.json is damaged (it is not what adanpc writes): delete it" in said


# Names that would steer a terminal -----------------------------------------------------------------------------------

EVIL = "\x1b]0;owned\x07[red]a[/red][link=http://x]\x9b31m\udcff"


def test_names_are_shown_as_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    sheet = Sheet(EVIL, (EVIL, EVIL), ((EVIL, (Cell(Value(1.0)), Cell(text=EVIL))),), EVIL)
    cli.table.show(Exhibit(EVIL, EVIL, EVIL, EVIL, (sheet,), (EVIL,)))
    out = capsys.readouterr().out
    assert out.count("[red]a[/red][link=http://x]") >= 8
    assert not {"\x1b]", "\x07", "\x9b", "\x1b[31m", "\udcff"} & {
        out[place : place + size] for place in range(len(out)) for size in (1, 2, 5)
    }


def test_refusals_are_shown_as_text(tmp_path: Path) -> None:
    code, _, said = run("table", "theory", "--scale", "\x1b[31mhuge\x07")
    assert code == 2
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "huge" in said
