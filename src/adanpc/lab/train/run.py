"""A run's folder: what was asked, what was measured, and where training stands."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch

from adanpc.errors import UnavailableError
from adanpc.files import add_entry, entries, replace
from adanpc.lab.environment import environment
from adanpc.lab.train.spec import Spec

SPEC, RECORDS, CHECKPOINT, BEST = "spec.json", "records.jsonl", "checkpoint.pt", "best.pt"
FORMAT = 1


class RunError(UnavailableError):
    """A folder that is no run, or one that cannot be continued."""


class Run:
    """A folder with ``spec.json``, ``records.jsonl``, ``checkpoint.pt`` and ``best.pt``.

    Args:
        folder: made by ``Run.create``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            document = json.loads((folder / SPEC).read_text())
        except (OSError, ValueError) as error:
            raise RunError(f"{folder} is not a run of adanpc train: {SPEC} cannot be read ({error})") from None
        if document.get("format") != FORMAT:
            raise RunError(f"{folder} has format {document.get('format')}, this version reads {FORMAT}: update adanpc")
        self.document: Mapping[str, Any] = document
        self.spec = Spec.of(document["spec"])

    @classmethod
    def create(cls, folder: Path, spec: Spec, data: Mapping[str, Any]) -> Run:
        """A new run on data as described; refuses a folder that already has one."""
        check_vacant(folder)
        document = {
            "format": FORMAT,
            "spec": spec.document(),
            "data": dict(data),
            "environment": environment(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / SPEC, lambda new: _write(new, json.dumps(document, indent=1)))
        return cls(folder)

    @property
    def data(self) -> Mapping[str, Any]:
        """What the data looked like when the run was made: folder, channels, classes, domains and their sizes."""
        return cast(Mapping[str, Any], self.document["data"])

    def record(self, entry: Mapping[str, Any]) -> None:
        """Adds a line to the records."""
        add_entry(self.folder / RECORDS, entry)

    def records(self) -> list[dict[str, Any]]:
        """One record for each evaluation, in order of steps; what was measured again after a crash counts once."""
        found = {entry["step"]: entry for entry in entries(self.folder / RECORDS) if "step" in entry}
        return [found[step] for step in sorted(found)]

    def finished(self) -> bool:
        """Whether every step is made and saved; a record alone comes earlier, and a crash may lie between."""
        state = self.state(CHECKPOINT)
        return state is not None and state["algorithm"]["step"] >= self.spec.steps

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        """Writes a state, whole or not at all."""
        replace(self.folder / name, lambda new: torch.save(dict(state), new))

    def state(self, name: str) -> dict[str, Any] | None:
        """A state that was saved, or None; loading it runs no code."""
        path = self.folder / name
        if not path.exists():
            return None
        try:
            return cast(dict[str, Any], torch.load(path, map_location="cpu", weights_only=True))
        except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
            raise RunError(f"{path} cannot be read ({error}): it is damaged, or was not written by adanpc") from None


def check_vacant(folder: Path) -> None:
    """Refuses a folder that already has a run."""
    if (folder / SPEC).exists():
        raise RunError(f"{folder} already holds a run: continue it with --resume {folder}, or choose another --out")


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n")
