"""The Ray cluster is real: two nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ray_two_nodes import NAMES
from sweeping import Chore, noted

from adanpc.errors import AdaNPCError
from adanpc.lab.sweep.records import FILE, Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.sweep import sweep

TESTS = Path(__file__).parents[2]
MODULES = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])  # where other processes find them
ALONE = {  # nothing leaves this machine, and nodes are found at 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "PYTHONPATH": MODULES,
}


def run(program: str, folder: Path, limit: float = 900) -> None:
    """Runs a program to its end, or fails with what it said; nothing of it stays."""
    with (
        TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short,  # as names of sockets must be
        (folder / "said").open("w") as said,  # a pipe would stay open for as long as anything that Ray started
    ):
        command = [sys.executable, "-c", program, str(folder)]
        environment = {**os.environ, **ALONE, "RAY_TMPDIR": short}
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
        try:
            process.wait(limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, (folder / "said").read_text()


def test_a_node_that_is_killed_loses_nothing_and_nothing_is_done_twice(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, tmp_path)
    run("import ray_two_nodes; ray_two_nodes.main()", tmp_path)
    seen, begun = json.loads((tmp_path / "seen.json").read_text()), Counter(noted(workspace))
    assert len(seen["recorded"]) >= 3
    assert {begun[name] for name in seen["recorded"]} == {1}
    assert begun[seen["there"][-1]] == 2  # it was at work there when the node was killed
    assert begun["mistaken"] == 1  # what a task raises is no reason to try again
    assert begun["deadly"] == 2
    wrong, given_up = noted(workspace, "raised")
    assert "ZeroDivisionError" in wrong
    assert given_up.startswith("AdaNPCError: the Ray cluster gave up on a task (The worker died unexpectedly")
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    here = Workspace(tmp_path, tmp_path / "here")
    sweep([Chore(name) for name in NAMES], here, Records(here.folder), workers=1)
    compared = ("id", "kind", "task", "record")
    found = sorted(tuple(str(line[name]) for name in compared) for line in lines)
    assert found == sorted(
        tuple(str(entry[name]) for name in compared) for entry in Records(here.folder).entries.values()
    )


def unused() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_without_work_no_cluster_is_asked(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, tmp_path)
    sweep([Chore("a")], workspace, Records(tmp_path), workers=1)
    assert sweep([Chore("a")], workspace, Records(tmp_path), ray=f"127.0.0.1:{unused()}") == []


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "127.0.0.1:99999", "somewhere"])
def test_a_wrong_address_is_refused(tmp_path: Path, address: str) -> None:
    address = address.format(unused())
    with pytest.raises(AdaNPCError, match=f"^there is no Ray cluster at '{address}' .*: start one with ray"):
        sweep([Chore("a")], Workspace(tmp_path, tmp_path), Records(tmp_path), ray=address)
    assert not (tmp_path / FILE).exists()


def test_without_ray_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AdaNPCError, match=r"^Ray is not installed: pip install 'adanpc\[cluster\]'$"):
        sweep([Chore("a")], Workspace(tmp_path, tmp_path), Records(tmp_path), ray="auto")
