"""Servers in processes of their own, and what the system says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = 4096


@dataclass
class Running:
    """A server that answers."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def processor_seconds(self) -> float:
        """The time that it has spent on any core."""
        numbers = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Bytes that it holds in main memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE


@contextmanager
def running(kind: str, folder: Path) -> Iterator[Running]:
    """A server of ``servers.KINDS`` until the block ends."""
    command = [sys.executable, "-m", "benchmarks.serve.servers", kind, str(folder)]
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Running(process, int(process.stdout.readline()))
    finally:
        process.stdin.close()  # it ends in order
        process.wait()
