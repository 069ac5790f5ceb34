"""Records: what tasks found, one line each, added and never changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from adanpc.files import add_entry, entries, held
from adanpc.lab.environment import environment
from adanpc.lab.sweep.shape import RecordsError, refuse_link, usable
from adanpc.lab.sweep.task import Task

FILE = "records.jsonl"


class Records:
    """The records of a folder; a task that has one is never run again.

    Lines that are damaged are skipped, so that their tasks are run again; ``damaged`` counts them.

    Args:
        folder: is made if need be.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.lock = self.path.with_suffix(".lock")
        self.entries: dict[str, dict[str, Any]] = {}  # by the id of the task
        self.damaged = 0  # lines
        self.locked = False
        self._read()

    @cached_property
    def environment(self) -> dict[str, object]:
        """What records are made with, as it was when it was first asked for."""
        return environment()

    def __contains__(self, task: Task) -> bool:
        return task.id in self.entries

    def of(self, task: Task) -> dict[str, Any] | None:
        """The record of a task, or None; one with an ``error`` says why there is no more."""
        if task not in self:
            return None
        record: dict[str, Any] = self.entries[task.id]["record"]
        return record

    def add(self, task: Task, record: Mapping[str, Any], seconds: float, data: Mapping[str, int] | None = None) -> None:
        """Adds the record of a task, on the disk when it returns.

        Args:
            task: without a record so far.
            record: what it found.
            seconds: that it took.
            data: the data sets that it read, by name, with the number of their images.
        """
        entry = {
            "id": task.id,
            "kind": task.kind,
            "task": task.document(),
            "record": dict(record),
            "data": dict(data or {}),
            "seconds": round(seconds, 3),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": self.environment,
        }
        add_entry(self.path, entry)
        self.entries[task.id] = entry

    def check(self, counts: Mapping[str, int]) -> None:
        """Refuses records that were made on data other than those here, by name with the number of their images."""
        for entry in self.entries.values():
            for name, count in entry.get("data", {}).items():
                if counts.get(name, count) != count:
                    raise RecordsError(
                        f"{self.path} has records on {name} with {count:,} images, and there are {counts[name]:,} now: "
                        "choose another `out`, or the `data_dir` that it was made with"
                    )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Refuses a second writer for as long as this one is at work; it sees all that others added before.

        Within another ``writing`` of the same records it does nothing.
        """
        if self.locked:
            yield
            return
        refuse_link(self.path)
        refuse_link(self.lock)
        with held(self.lock, wait=False) as free:
            if not free:
                raise RecordsError(f"another process is adding to {self.path}: wait for it, or choose another `out`")
            self._read()
            _ = self.environment  # as it is now: files may be edited while tasks run
            self.locked = True
            try:
                yield
            finally:
                self.locked = False

    def _read(self) -> None:
        """Takes up what the file has now; the first usable record of a task counts."""
        self.entries = {}
        self.damaged = 0
        for entry in entries(self.path):
            if usable(entry):
                self.entries.setdefault(entry["id"], entry)
            else:
                self.damaged += 1
