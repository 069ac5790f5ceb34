"""The command line as a user meets it, and the progress bar."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from adanpc import cli, progress
from adanpc.cli.app import with_flags
from adanpc.errors import AdaNPCError
from adanpc.index import kernels
from adanpc.lab.data import Domain, rotated_digits
from adanpc.lab.demo import ADAPTED, METHODS, PAPER, OnSource, Result, Settings, Stage
from adanpc.progress import track
from adanpc.version import __version__

ANGLES = ("0°", "15°", "30°", "45°", "60°", "75°")
PROGRAM = (sys.executable, "-m", "adanpc")


@pytest.fixture
def perfect() -> Result:
    """The widest result there is: every number has four digits."""
    source = dict.fromkeys(METHODS, OnSource(100.0, 100.0, 100.0))
    rows = {PAPER: 667, ADAPTED: 4834}
    stages = (Stage(angle.rstrip("°"), dict.fromkeys(METHODS, 100.0), source, rows) for angle in ANGLES)
    return Result(Settings(), tuple(stages))


def run(*arguments: str) -> tuple[int, str, str]:
    outcome = CliRunner().invoke(cli.app, arguments)
    return outcome.exit_code, outcome.stdout, outcome.stderr


def test_version() -> None:
    assert run("--version") == (0, f"adanpc {__version__}\n", "")


@pytest.mark.parametrize("arguments", [("--help",), ()])
def test_help(arguments: tuple[str, ...]) -> None:
    _, out, err = run(*arguments)
    assert "demo" in out + err
    assert "Adapt a trained classifier" in out + err
    assert run("--help")[0] == 0


def test_info_says_which_kernels_and_versions_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WANTED", "numpy")
    code, out, err = run("info")
    assert (code, err) == (0, "")
    assert f"adanpc: {__version__}\n" in out
    assert f"kernels: in use numpy, available {' '.join(kernels.paths())}, chosen by ADANPC_KERNELS\n" in out
    assert f"torch {version('torch')}, " in out
    assert "threads of torch: " in out
    monkeypatch.setattr(kernels, "WANTED", None)
    document = json.loads(run("info", "--json")[1])
    assert document["kernels"]["in use"] == kernels.paths()[0]
    assert document["kernels"]["chosen by"] == "speed"
    assert document["packages"]["numpy"] == version("numpy")
    monkeypatch.setattr(kernels, "WANTED", "abacus")
    code, out, err = run("info")
    assert code == 2
    assert "ADANPC_KERNELS must be one of" in err


def test_help_of_the_demo_names_its_options() -> None:
    code, out, _ = run("demo", "--help")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert code == 0
    assert all(option in plain for option in ("--out", "--seed", "--epochs"))


@pytest.mark.parametrize("options", [("--epochs", "0"), ("--seed", "-1"), ("--epochs", "many")])
def test_bad_options_are_refused(options: tuple[str, str]) -> None:
    code, _, err = run("demo", *options)
    assert code == 2
    assert options[0] in re.sub(r"\x1b\[[0-9;]*m", "", err)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("choose another `out`, or the `data_dir` that it was made with", "another --out, or the --data-dir that"),
        ("scale must be one of full, large, got 'x'", "--scale must be one of full, large, got 'x'"),
        ("preset must be one of paper, safe, got 'x'", "--preset must be one of paper, safe"),
        ("storage must be one of float32, int8, got 'x'", "--storage must be one of float32"),
        ("table must be one of ood, got 'x'", "table must be one of ood"),
        ("the 5 images must be read: steps must follow", "the 5 images must be read: steps must follow"),
    ],
)
def test_arguments_are_called_by_their_flags(message: str, shown: str) -> None:
    assert shown in with_flags(message)
    assert with_flags(with_flags(message)) == with_flags(message)


def forbid_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*arguments: object, **named: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("adanpc.lab.data.digits.rotated_digits", work)
    monkeypatch.setattr("adanpc.lab.demo.successive", work)


def test_a_missing_folder_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_work(monkeypatch)
    code, out, err = run("demo", "--out", str(tmp_path / "missing" / "demo.png"))
    assert (code, out) == (2, "")
    assert err == f"adanpc: the folder '{tmp_path / 'missing'}' does not exist: create it, or choose another place\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (AdaNPCError("k must be at least 1, got 0"), 2, "adanpc: k must be at least 1, got 0\n"),
        (OSError(28, "No space left on device"), 2, "adanpc: No space left on device\n"),
        (PermissionError(13, "Permission denied", "a b"), 2, "adanpc: Permission denied: 'a b'\n"),
        (OSError("odd"), 2, "adanpc: odd\n"),
        (KeyboardInterrupt(), 130, "Stopped.\n"),
    ],
)
def test_trouble_is_one_line(
    error: BaseException, code: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("adanpc.lab.demo.successive", work)
    got, out, err = run("demo", "--out", str(tmp_path / "demo.png"))
    assert (got, out) == (code, "")
    assert err.splitlines(keepends=True)[1:] == [line]  # after the line that says what is being done


def test_faults_of_the_program_keep_their_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_work(monkeypatch)
    outcome = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path / "demo.png")])
    assert isinstance(outcome.exception, AssertionError)


def test_demo_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(seed: int) -> tuple[Domain, ...]:
        return tuple(d.subset(range(40)) for d in rotated_digits(seed=seed))

    monkeypatch.setattr("adanpc.lab.data.digits.rotated_digits", few)
    code, out, err = run("demo", "--out", str(tmp_path / "demo.png"), "--seed", "5", "--epochs", "1")
    assert code == 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert all(text in out for text in (*METHODS, *ANGLES, "seed 5", "epochs 1", f"Figure: {tmp_path / 'demo.png'}"))
    assert "32 source rows" in out
    assert re.search(r"Time:\s+\d+\s+s\b", out)  # a long time on a busy machine may be on the next line
    assert "\x1b" not in out + err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_the_widest_table_is_whole(
    columns: str, perfect: Result, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    cli.demo._show(perfect, 1.0)
    out = capsys.readouterr().out
    assert "…" not in out.replace("0° … 75°", "")
    for method in METHODS:
        (line,) = [line for line in out.splitlines() if line.startswith(method + " ")]
        assert line.count("100.0") == (9 if method == "linear head" else 10)
    assert max(map(len, out.splitlines())) <= max(80, int(columns))


def test_main_is_the_program() -> None:
    done = subprocess.run([*PROGRAM, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"adanpc {__version__}\n"


def read_terminal(parent: int) -> bytes:
    """What a program wrote to its terminal until it ended."""
    seen = b""
    try:
        while part := os.read(parent, 4096):
            seen += part
    except OSError:  # how Linux says that the other end is closed
        pass
    return seen


def test_ctrl_c_during_training_stops_with_one_line_and_gives_the_cursor_back(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    command = [*PROGRAM, "demo", "--out", str(tmp_path / "demo.png")]
    with subprocess.Popen(command, stdout=child, stderr=child, stdin=child) as process:
        os.close(child)
        seen = b""
        while b"loss" not in seen:
            seen += os.read(parent, 4096)
        process.send_signal(signal.SIGINT)
        seen += read_terminal(parent)
    os.close(parent)
    assert process.returncode == 130
    assert b"training on" in seen
    assert b"Traceback" not in seen
    assert seen.replace(b"\r\n", b"\n").rstrip().endswith(b"Stopped.")
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
    assert not (tmp_path / "demo.png").exists()


class Terminal(io.StringIO):
    """A stderr that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    for item in (bar := track([1, 2, 3], "counting [sheep]")):
        bar.note(f"at {item}")
    assert "counting [sheep]" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
    assert "at 3" in terminal.getvalue()


@pytest.mark.parametrize("force", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_file_gets_nothing(force: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(force, "1")
    bar = track(iter("abc"), "reading", 3)
    bar.note("early")
    assert list(bar) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_a_dumb_terminal_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert list(track([1], "reading")) == [1]
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_needs_widgets(widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "find_spec", lambda name: object() if widgets and name == "ipywidgets" else None)
    console = Console(force_jupyter=True, file=io.StringIO())
    assert progress._can_draw(console) is widgets


def test_the_total_is_found_where_it_can_be() -> None:
    assert track([1, 2], "").total == 2
    assert track((n for n in [1]), "").total is None
    assert track((n for n in [1]), "", 7).total == 7
