"""``adanpc table`` and ``adanpc report`` as a user meets them."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from stat import S_ISREG

import pytest
from typer.testing import CliRunner

from adanpc import cli
from adanpc.files import entries
from adanpc.lab.sweep.records import Records
from adanpc.lab.tables import TABLES

LEAST = ("--scale", "least", "--steps", "2", "--images", "10", "--workers", "1")


def run(*arguments: str) -> tuple[int, str, str]:
    outcome = CliRunner().invoke(cli.app, arguments)
    return outcome.exit_code, outcome.stdout, outcome.stderr


@pytest.mark.parametrize("arguments", [("--list",), ()])
def test_the_list_names_every_table(arguments: tuple[str, ...]) -> None:
    code, out, _ = run("table", *arguments)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(TABLES)


def test_a_table_its_files_and_the_report(tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ("table", "loss-rotated-mnist", "--data-dir", str(tmp_path), "--out", str(out), *LEAST, "--only", "erm")
    code, printed, said = run(*asked)
    assert code == 0, said
    assert re.match(r"Reduced \(least\): 2 steps \(paper 5,000\).* About .+ left on 1 core\.", said)
    assert "ERM + AdaNPC" in printed
    assert "[96.6 ± 0.4]" in printed  # the paper's, from its own table
    for form in ("md", "csv", "tex"):
        assert (out / f"loss-rotated-mnist.{form}").stat().st_size > 0
    before = (out / "records.jsonl").read_bytes()
    assert run(*asked)[1] == printed
    assert (out / "records.jsonl").read_bytes() == before  # nothing is done twice
    code, path, _ = run("report", str(out), "--data-dir", str(tmp_path))
    assert code == 0
    assert "Training loss on Rotated MNIST" in Path(path.strip()).read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("table", "nope"), "unknown table 'nope'; available: ood, "),
        (("table", "ood-vlcs", "--scale", "least"), "vlcs is not at"),
        (("table", "theory", "--scale", "huge"), "--scale must be one of full, large"),
        (("table", "theory", "--budget", "soon"), "--budget must be a time such as 30m"),
        (("table", "theory", "--budget", "1h", "--scale", "least"), "give --budget or --scale, not both"),
        (
            ("table", "loss-rotated-mnist", "--scale", "least", "--only", "nobody"),
            "loss-rotated-mnist: unknown row 'nobody'; available: erm, knn",
        ),
        (("table", "loss-rotated-mnist", "--scale", "least", "--only", "emr"), "; did you mean 'erm'?"),
        (("table", "theory", "--scale", "least", "--only", "1"), "it is always made as a whole: omit --only"),
        (("report", "nowhere"), "nowhere holds no tables: make one with adanpc table NAME"),
    ],
)
def test_wrong_inputs_are_one_sentence(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = run(*arguments)
    assert code == 2
    assert words in said
    assert "Traceback" not in said


def test_a_second_command_in_the_same_folder_changes_nothing(tmp_path: Path) -> None:
    with Records(tmp_path).writing():
        code, _, said = run("table", "theory", "--scale", "least", "--out", str(tmp_path))
    assert code == 2
    assert "another process is adding to" in said
    assert not (tmp_path / "tables.json").exists()


def test_a_full_disk_is_one_sentence_and_the_same_command_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("table", "loss-rotated-mnist", "--data-dir", str(tmp_path), *LEAST, "--only", "erm", "--out")
    code, printed, _ = run(*asked, str(tmp_path / "roomy"))
    assert code == 0
    sync = os.fsync
    left = 0  # how many more files and lines there is room for

    def sync_to_a_full_disk(descriptor: int) -> None:
        nonlocal left
        if S_ISREG(os.fstat(descriptor).st_mode):
            if not left:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)  # what it had no room for is cut off
                raise OSError(errno.ENOSPC, "No space left on device")
            left -= 1
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_to_a_full_disk)
    out = tmp_path / "full"
    finished = 0
    for room in (0, 1, 5, 60, 10_000):
        left = room
        code, continued, said = run(*asked, str(out))
        if code == 0:
            break
        assert code == 2
        assert said.splitlines()[-1] == (
            "adanpc: No space left on device; nothing that was saved is lost: free some space, then run the same "
            "command again"
        )
        assert len(list(entries(out / "records.jsonl"))) >= finished
        finished = len(list(entries(out / "records.jsonl")))
    assert code == 0
    assert continued == printed.replace(str(tmp_path / "roomy"), str(out))
    for form in ("md", "csv", "tex"):
        name = f"loss-rotated-mnist.{form}"
        assert (out / name).read_bytes() == (tmp_path / "roomy" / name).read_bytes()


# The command, whose fourth task takes an hour and says that it has begun.
UNTIL_THE_FOURTH = """
import time

from adanpc.cli import main
from adanpc.lab.theory.tasks import Simulate

finished = []
simulate = Simulate.run

def run(task, workspace):
    if len(finished) == 3:
        print("at work", flush=True)
        time.sleep(3600)
    finished.append(task)
    return simulate(task, workspace)

Simulate.run = run
main()
"""


def test_ctrl_c_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNTIL_THE_FOURTH, "table", "theory", "--scale", "least", "--out", str(tmp_path)]
    command += ["--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "at work\n" in iter(process.stdout.readline, "")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "Stopped; the same command continues." in said
    ids = [entry["id"] for entry in entries(tmp_path / "records.jsonl")]
    assert len(ids) == len(set(ids)) == 3
