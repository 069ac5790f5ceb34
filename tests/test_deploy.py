"""What is in deploy/: the container file and the systemd unit name options, files and settings that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main

from adanpc import cli

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "deploy" / "adanpc.service"
CONTAINER = ROOT / "deploy" / "Containerfile"
ANALYZE = shutil.which("systemd-analyze") or ""
MOST_EXPOSED = 2.5  # of 10, by the measure of systemd-analyze security


def lines(path: Path) -> list[str]:
    """The lines of a file without comments, those that end in a backslash joined with the next."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def options_of(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument.startswith("--")]


def known_options() -> set[str]:
    commands = typer.main.get_group(cli.app).commands
    return {option for parameter in commands["serve"].params for option in parameter.opts}


def test_the_unit_starts_the_service_with_options_that_exist() -> None:
    (started,) = [line.removeprefix("ExecStart=") for line in lines(UNIT) if line.startswith("ExecStart=")]
    _, command, bank, *arguments = shlex.split(started)
    assert command == "serve"
    assert bank.startswith("/var/lib/adanpc/")  # its StateDirectory
    assert "StateDirectory=adanpc" in lines(UNIT)
    assert set(options_of(arguments)) <= known_options()
    assert "--tokens" in arguments


@pytest.mark.skipif(not ANALYZE, reason="there is no systemd-analyze on this machine")
def test_the_unit_is_understood_by_systemd_and_leaves_little_exposed(tmp_path: Path) -> None:
    # Neither the program nor the user of the unit are on a machine that only looks at it.
    text = UNIT.read_text(encoding="utf-8").replace("/usr/local/lib/adanpc/bin/adanpc", "/bin/true")
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"(User|Group)=adanpc", r"\1=root", text), encoding="utf-8")
    checked = subprocess.run([ANALYZE, "verify", "--man=no", copy], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    rated = subprocess.run(
        [ANALYZE, "security", "--offline=true", "--no-pager", copy], capture_output=True, text=True
    ).stdout
    exposure = re.search(r"exposure level for .*: ([\d.]+)", rated)
    assert exposure is not None, rated
    assert float(exposure[1]) <= MOST_EXPOSED


def test_the_container_runs_as_nobody_in_particular_with_options_that_exist() -> None:
    instructions = []
    for line in lines(CONTAINER):
        name, value = line.split(maxsplit=1)
        instructions.append((name, value))
    last = dict(instructions)  # of each name, the last one
    user, _, group = last["USER"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert json.loads(last["ENTRYPOINT"]) == ["adanpc"]
    command, _, *arguments = json.loads(last["CMD"])
    assert command == "serve"
    assert set(options_of(arguments)) <= known_options()
    assert "--tokens" in arguments  # it would refuse to listen elsewhere than at loopback
    assert "/v2/health/ready" in last["HEALTHCHECK"]
    assert "8080" in last["EXPOSE"]
    for name, value in instructions:
        if name == "FROM":
            assert re.search(r":\d", value), "a version is named"
        if name == "COPY" and not value.startswith("--from"):
            for source in value.split()[:-1]:
                assert (ROOT / source).exists(), source


def test_both_are_described() -> None:
    text = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    assert "deploy/Containerfile" in text
    assert "deploy/adanpc.service" in text
