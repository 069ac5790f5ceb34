"""Forecasts of how long tasks will take, corrected by how long others took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.task import MISSING, Task


@dataclass
class Pace:
    """How long some finished tasks took, in seconds, and how long they were expected to take."""

    taken: float = 0.0
    expected: float = 0.0


class Forecast:
    """How long tasks will take that have no record yet, together with their prerequisites.

    What a task is expected to take is corrected by what tasks like it took, or by what others of its kind took if there
    is none like it. Work that tasks share, such as the features of their images, counts for the first of them only.

    Args:
        tasks: in the order in which they are wanted.
        records: the records of earlier work.
        costs: what the expectation is computed from.
    """

    def __init__(self, tasks: Iterable[Task], records: Records, costs: CostModel) -> None:
        tasks = list(tasks)
        finished = records.finished(tasks)
        pending = records.pending(tasks)
        self.left = {task.id: task for task in pending}
        self.expected = _expected([*finished, *pending], costs)
        self.paces: dict[str, Pace] = {}  # by ``like`` and by ``kind``
        for task in finished:
            entry = records.entries[task.id]
            self._note(task, entry["record"], entry["seconds"])

    def finish(self, task: Task, record: Mapping[str, Any], seconds: float) -> None:
        """Takes note of a task that is over: of its record, and of the seconds that it took."""
        del self.left[task.id]
        self._note(task, record, seconds)

    def seconds(self, workers: int) -> float:
        """The seconds that the rest takes with so many workers.

        However many there are, it is at least the time of the longest task together with its prerequisite.
        """
        corrected = {id_: self.expected[id_] * self._correction(task) for id_, task in self.left.items()}
        longest = 0.0
        for id_, task in self.left.items():
            alone = corrected[id_]
            first = task.prerequisite()
            if first is not None:
                alone += corrected.get(first.id, 0.0)  # nothing if it is done
            longest = max(longest, alone)
        return max(sum(corrected.values()) / workers, longest)

    def _note(self, task: Task, record: Mapping[str, Any], seconds: float) -> None:
        """Takes the time of a task into account, unless the task could not be done, which takes no time."""
        if "error" in record or MISSING in record:
            return
        for name in {task.like, task.kind}:
            pace = self.paces.setdefault(name, Pace())
            pace.taken += seconds
            pace.expected += self.expected[task.id]

    def _correction(self, task: Task) -> float:
        """The ratio of actual to expected time of tasks like this one, or else of its kind; 1 if there are none."""
        for name in (task.like, task.kind):
            pace = self.paces.get(name)
            if pace is not None and pace.expected > 0:
                return pace.taken / pace.expected
        return 1.0


def _expected(tasks: Sequence[Task], costs: CostModel) -> dict[str, float]:
    """The seconds that each task is expected to take, by its id; the first that needs shared work does it."""
    expected = {}
    shared_before: set[str] = set()
    for task in tasks:
        seconds = task.effort(costs)
        for work, its_seconds in task.shared(costs).items():
            if work not in shared_before:
                shared_before.add(work)
                seconds += its_seconds
        expected[task.id] = seconds
    return expected
