"""Tasks that leave traces: a log of when they began and ended, which other processes can be asked for."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from adanpc.errors import AdaNPCError
from adanpc.lab.data.domain import DataError
from adanpc.lab.networks.weights import WeightsError
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.records import FILE, Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.sweep import sweep
from adanpc.lab.sweep.task import Task
from adanpc.lab.train.run import RunError

LOG = "log"
Fate = Literal["fine", "refused", "no data", "no weights", "damaged", "wrong", "killed", "in the way"]


@dataclass(frozen=True)
class Chore(Task):
    """Tells the log when it begins and ends, and between the two sleeps, or meets another fate."""

    name: str
    seconds: float = 0.0
    fate: Fate = "fine"
    after: Chore | None = None

    kind: ClassVar[str] = "chore"

    def document(self) -> dict[str, Any]:
        return {"name": self.name}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        note(workspace, f"begin {self.name}")
        time.sleep(self.seconds)
        meet(self.fate, workspace)
        note(workspace, f"end {self.name}")
        return {"name": self.name, "length": len(self.name)}

    def effort(self, costs: CostModel) -> float:
        return float(len(self.name))

    def prerequisite(self) -> Chore | None:
        return self.after


class Errand(Chore):
    """A chore of another kind."""

    kind: ClassVar[str] = "errand"


def meet(fate: Fate, workspace: Workspace) -> None:
    """Ends a chore early; those that end the sweep wait until it has recorded something."""
    if fate == "refused":
        raise AdaNPCError("this model has no batch norm")
    if fate == "no data":
        raise DataError("there are no data")
    if fate == "no weights":
        raise WeightsError("there are no weights")
    if fate == "damaged":
        raise RunError("the run is damaged")
    if fate == "in the way":
        (workspace.folder / FILE).mkdir()
    if fate in ("wrong", "killed"):
        while not Records(workspace.folder).entries:
            time.sleep(0.05)
        if fate == "wrong":
            raise ZeroDivisionError("a mistake in a task")
        os.kill(os.getpid(), signal.SIGKILL)


def note(workspace: Workspace, line: str) -> None:
    """Adds a line to the log at once, whoever else writes."""
    number = os.open(workspace.folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(number, f"{line}\n".encode())
    finally:
        os.close(number)


def noted(workspace: Workspace, what: str = "begin") -> list[str]:
    """The names of the chores that began, or ended, in that order."""
    path = workspace.folder / LOG
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.removeprefix(f"{what} ") for line in lines if line.startswith(f"{what} ")]


def work(seconds: float) -> Sequence[Task]:
    """Two chores that end at once, and three that take their time."""
    return [Chore("a"), Chore("bb"), *(Chore(name, seconds) for name in ("ccc", "dddd", "eeeee"))]


def main() -> None:
    """A sweep in two processes; takes a folder, and the seconds of ``work``."""
    folder = Path(sys.argv[1])
    sweep(work(float(sys.argv[2])), Workspace(folder, folder), Records(folder), workers=2)
