"""Forecasts: expected times, corrected by times that were measured, and work that tasks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from sweeping import Chore, Errand

from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.forecast import Forecast
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.task import MISSING, Task


@dataclass(frozen=True)
class Method(Chore):
    """A chore that is named after a method and a scene, whose features all methods share."""

    method: str = ""
    scene: str = ""
    own: float = 1.0

    @property
    def like(self) -> str:
        return self.method

    def effort(self, costs: CostModel) -> float:
        return self.own

    def shared(self, costs: CostModel) -> Mapping[str, float]:
        return {"bank": 1000.0, self.scene: 100.0}


def method(name: str, scene: str, own: float = 1.0) -> Method:
    return Method(f"{name} on {scene}", method=name, scene=scene, own=own)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path)


@pytest.fixture
def costs(tmp_path: Path) -> CostModel:
    return CostModel(Workspace(tmp_path, tmp_path))


def test_what_is_left_is_corrected_by_what_was_seen(records: Records, costs: CostModel) -> None:
    base = Errand("base")
    tasks: list[Task] = [Chore("a"), Chore("bb", after=base), Chore("ccc", after=Errand("other"))]

    def left(workers: int = 1) -> float:
        return Forecast(tasks, records, costs).seconds(workers)

    assert left() == 1 + 2 + 3 + 4 + 5
    assert left(64) == 5 + 3  # a task after what it needs
    tasks.append(Chore("a" * 9))
    assert left(2) == (1 + 2 + 3 + 4 + 5 + 9) / 2
    tasks.pop()
    with records.writing():
        records.add(base, {}, 8.0)  # twice as long as expected
    assert left() == 1 + 2 + 3 + 2 * 5
    with records.writing():
        records.add(Chore("a"), {"error": "refused"}, 0.0)  # tells nothing
    assert left() == 2 + 3 + 2 * 5
    with records.writing():
        records.add(Chore("bb"), {}, 1.0)
    assert left() == 0.5 * 3 + 2 * 5


def test_shared_work_is_done_by_the_first_task_that_needs_it(records: Records, costs: CostModel) -> None:
    tasks = [method(name, scene) for scene in ("fog", "snow") for name in ("head", "vote")]
    forecast = Forecast(tasks, records, costs)
    assert forecast.seconds(1) == 1000 + 2 * 100 + 4
    forecast.finish(tasks[0], {}, 1101.0)  # as expected; the mean time of a task would say that an hour is left
    assert forecast.seconds(1) == 100 + 3
    forecast.finish(tasks[1], {}, 1.0)
    assert forecast.seconds(1) == 100 + 2
    with records.writing():
        records.add(tasks[0], {}, 1101.0)
    assert Forecast(tasks, records, costs).seconds(1) == 100 + 3


def test_tasks_are_corrected_by_those_like_them(records: Records, costs: CostModel) -> None:
    scenes = ("fog", "snow", "frost")
    tasks = [method(name, scene, own) for scene in scenes for name, own in (("head", 1.0), ("memo", 10.0))]
    forecast = Forecast(tasks, records, costs)
    forecast.finish(tasks[0], {}, 1101.0)
    forecast.finish(tasks[1], {}, 500.0)  # fifty times as long as expected
    heads = 2 * (100 + 1)
    memos = 2 * 50 * 10
    assert forecast.seconds(1) == heads + memos
    unknown = method("new", "fog", 10.0)
    forecast = Forecast([*tasks, unknown], records, costs)
    forecast.finish(tasks[0], {}, 2202.0)  # nothing like the others has been seen, so its kind must do
    assert forecast.seconds(1) == 2 * (2 * (100 + 1) + 3 * 10 + 10)


def test_what_could_not_be_done_tells_nothing(records: Records, costs: CostModel) -> None:
    tasks = [Chore("a"), Chore("bb"), Chore("ccc")]
    forecast = Forecast(tasks, records, costs)
    forecast.finish(tasks[0], {MISSING: "no data"}, 0.0)
    forecast.finish(tasks[1], {"error": "refused"}, 0.0)
    assert forecast.seconds(1) == 3
    forecast.finish(tasks[2], {}, 0.0)
    assert forecast.seconds(1) == 0
