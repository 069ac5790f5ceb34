"""Records: the results of tasks, one per line of a file; lines are added and never changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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

    Damaged lines are skipped, so their tasks are run again; ``damaged`` counts them.

    Args:
        folder: where the file of records is; created if necessary.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.lock = self.path.with_suffix(".lock")
        self.entries: dict[str, dict[str, Any]] = {}  # by task id
        self.damaged = 0  # number of damaged lines
        self.locked = False
        self._read()

    @cached_property
    def environment(self) -> dict[str, object]:
        """The environment that is written into records, as it was on first use."""
        return environment()

    def __contains__(self, task: Task) -> bool:
        return task.id in self.entries

    def of(self, task: Task) -> dict[str, Any] | None:
        """The record of a task, or None. A record with an ``error`` says why the task could not be done."""
        if task not in self:
            return None
        record: dict[str, Any] = self.entries[task.id]["record"]
        return record

    def pending(self, tasks: Iterable[Task]) -> list[Task]:
        """The tasks that have no record and their prerequisites, each once, in an order in which they can be run."""
        by_id: dict[str, Task] = {}
        for task in tasks:
            if task in self:
                continue
            first = task.prerequisite()
            if first is not None and first not in self:
                by_id.setdefault(first.id, first)
            by_id.setdefault(task.id, task)
        return list(by_id.values())

    def finished(self, tasks: Iterable[Task]) -> list[Task]:
        """The tasks that have a record, and their prerequisites that have one, each once."""
        by_id: dict[str, Task] = {}
        for task in tasks:
            for each in (task.prerequisite(), task):
                if each is not None and each in self:
                    by_id.setdefault(each.id, each)
        return list(by_id.values())

    def add(self, task: Task, record: Mapping[str, Any], seconds: float, data: Mapping[str, int] | None = None) -> None:
        """Adds the record of a task; it is on the disk when this returns.

        Args:
            task: a task without a record so far.
            record: the result of the task.
            seconds: how long the task took.
            data: the data sets that the task read, by name, each with its number of images.
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
        """Refuses records that were made on other data than is here now.

        Args:
            counts: the data sets that are here, by name, each with its number of images.
        """
        for entry in self.entries.values():
            for name, count in entry.get("data", {}).items():
                if counts.get(name, count) != count:
                    raise RecordsError(
                        f"{self.path} has records on {name} with {count:,} images, but there are {counts[name]:,} now: "
                        "choose another `out`, or the `data_dir` that the records were made with"
                    )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Locks the records for writing, and reads what other processes have added; a second writer is refused.

        Nested inside another ``writing`` of the same records, it does nothing.
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
            _ = self.environment  # taken now, since source files may be edited while tasks run
            self.locked = True
            try:
                yield
            finally:
                self.locked = False

    def _read(self) -> None:
        """Reads the file again; if a task has several usable records, the first one counts."""
        self.entries = {}
        self.damaged = 0
        for entry in entries(self.path):
            if usable(entry):
                self.entries.setdefault(entry["id"], entry)
            else:
                self.damaged += 1
