from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from sweeping import Chore, noted, work

from adanpc import progress
from adanpc.errors import AdaNPCError
from adanpc.lab.sweep.cost import CostModel
from adanpc.lab.sweep.forecast import Forecast
from adanpc.lab.sweep.records import FILE, Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.sweep import sweep
from adanpc.lab.sweep.task import Task

LONG = 300.0  # seconds; no test waits for it
TESTS = Path(__file__).parents[2]
MODULES = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])  # where other processes find them


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path, tmp_path)


def run(tasks: Sequence[Task], workspace: Workspace, workers: int = 1) -> list[str]:
    return sweep(tasks, workspace, Records(workspace.folder), workers=workers)


def recorded(workspace: Workspace) -> list[str]:
    return [entry["task"]["name"] for entry in Records(workspace.folder).entries.values()]


def test_every_task_runs_once_however_often_it_is_wanted(workspace: Workspace) -> None:
    assert run([Chore("a"), Chore("b"), Chore("a")], workspace) == []
    assert noted(workspace) == recorded(workspace) == ["a", "b"]
    assert Records(workspace.folder).of(Chore("b")) == {"name": "b", "length": 1}


def test_finished_tasks_never_run_again(workspace: Workspace) -> None:
    run([Chore("a")], workspace)
    run([Chore("b"), Chore("a")], workspace)
    run([Chore("b"), Chore("a")], workspace)
    assert noted(workspace) == ["a", "b"]
    assert len((workspace.folder / FILE).read_text().splitlines()) == 2


def test_what_others_need_comes_first_and_once(workspace: Workspace) -> None:
    base = Chore("base")
    tasks = [Chore("a"), Chore("b", after=base), base, Chore("c", after=base)]
    run(tasks, workspace)
    assert noted(workspace) == ["a", "base", "b", "c"]
    records = Records(workspace.folder)
    assert records.pending([*tasks, Chore("d", after=base)]) == [Chore("d", after=base)]
    assert [task.id for task in records.finished([Chore("d", after=base), *tasks])] == [
        Chore(name).id for name in ("base", "a", "b", "c")
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_task_made_possible_comes_next(workspace: Workspace, workers: int) -> None:
    bases = [Chore(name) for name in "abcdefgh"]
    tasks = [Chore(f"{base.name}{number}", after=base) for base in bases for number in range(3)]
    assert run(tasks, workspace, workers) == []
    begun, order = noted(workspace), recorded(workspace)
    assert sorted(begun) == sorted(order) == sorted(each.name for each in (*bases, *tasks))
    assert all(order.index(name[0]) <= order.index(name) for name in order)
    assert begun.index("h") > begun.index("a2")  # not all bases first
    if workers == 1:
        assert begun == [name + number for name in "abcdefgh" for number in ("", "0", "1", "2")]


def test_what_waited_for_something_missing_is_tried_and_tells_itself(workspace: Workspace) -> None:
    base = Chore("base", fate="no data")
    assert run([Chore("a", after=base), Chore("b", fate="no weights", after=base)], workspace) == [
        "there are no data",
        "there are no weights",
    ]
    assert recorded(workspace) == ["a"]


def test_nothing_comes_first_for_a_task_that_is_finished(workspace: Workspace) -> None:
    run([Chore("a")], workspace)
    assert run([Chore("a", after=Chore("base"))], workspace) == []
    assert noted(workspace) == ["a"]


def test_a_refusal_is_a_record(workspace: Workspace) -> None:
    refused = Chore("a", fate="refused")
    assert run([refused, Chore("b")], workspace) == []
    assert Records(workspace.folder).of(refused) == {"error": "this model has no batch norm"}
    run([refused], workspace)
    assert noted(workspace) == ["a", "b"]


def test_what_is_missing_is_told_once_and_tried_again(workspace: Workspace) -> None:
    tasks = [Chore("a", fate="no data"), Chore("b", fate="no weights"), Chore("c", fate="no data"), Chore("d")]
    assert run([*tasks, Chore("e", fate="damaged")], workspace) == [
        "there are no data",
        "there are no weights",
        "the run is damaged",
    ]
    assert recorded(workspace) == ["d"]
    assert run([Chore("a"), Chore("b", fate="no weights")], workspace) == ["there are no weights"]
    assert recorded(workspace) == ["d", "a"]


def test_a_mistake_is_raised_after_what_was_finished_is_recorded(workspace: Workspace) -> None:
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        run([Chore("a"), Chore("b", fate="wrong"), Chore("c")], workspace)
    assert recorded(workspace) == ["a"]
    run([Chore("a"), Chore("b"), Chore("c")], workspace)
    assert noted(workspace) == ["a", "b", "b", "c"]


def test_a_second_sweep_in_the_same_folder_is_refused(workspace: Workspace) -> None:
    with (
        Records(workspace.folder).writing(),
        pytest.raises(AdaNPCError, match="another process is adding to .*choose anot"),
    ):
        run([Chore("a")], workspace)
    assert noted(workspace) == []
    run([Chore("a")], workspace)
    assert noted(workspace) == ["a"]


def test_a_sweep_may_be_a_part_of_a_longer_writing(workspace: Workspace) -> None:
    records = Records(workspace.folder)
    with records.writing():
        sweep([Chore("a")], workspace, records, workers=1)
        with pytest.raises(AdaNPCError, match="another process is adding"):
            run([Chore("b")], workspace)
        sweep([Chore("c")], workspace, records, workers=1)
    run([Chore("b")], workspace)
    assert noted(workspace) == ["a", "c", "b"]


def test_a_sweep_sees_what_another_finished_since_the_records_were_read(workspace: Workspace) -> None:
    early = Records(workspace.folder)
    run([Chore("a")], workspace)
    sweep([Chore("a"), Chore("b")], workspace, early, workers=1)
    assert noted(workspace) == ["a", "b"]


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    workspaces = [Workspace(tmp_path, tmp_path / name) for name in ("one", "two")]
    tasks = [Chore("a"), Chore("b", fate="refused"), Chore("c", fate="no data"), Chore("d")]
    told = [run(tasks, workspace, workers) for workers, workspace in enumerate(workspaces, start=1)]
    assert told == [["there are no data"]] * 2
    one, two = (
        {name: entry["record"] for name, entry in Records(workspace.folder).entries.items()} for workspace in workspaces
    )
    assert one == two
    assert sorted(noted(workspaces[1])) == ["a", "b", "c", "d"]
    assert multiprocessing.active_children() == []


def test_a_process_that_is_killed_ends_the_others_and_loses_nothing(workspace: Workspace) -> None:
    with pytest.raises(
        AdaNPCError, match="^a worker process was killed, perhaps for lack of memory; finished tasks are rec"
    ):
        run([Chore("a"), Chore("b", fate="killed"), Chore("c", LONG)], workspace, workers=2)
    assert multiprocessing.active_children() == []
    assert noted(workspace, "end") == ["a"]
    assert recorded(workspace) == ["a"]
    run([Chore("a"), Chore("b"), Chore("c")], workspace)
    assert noted(workspace).count("a") == 1
    assert sorted(recorded(workspace)) == ["a", "b", "c"]


def test_records_that_cannot_be_written_end_the_work(workspace: Workspace) -> None:
    with pytest.raises(IsADirectoryError):
        run([Chore("a", fate="in the way"), Chore("b", LONG), Chore("c", LONG)], workspace, workers=2)
    assert multiprocessing.active_children() == []
    assert noted(workspace, "end") == ["a"]


def until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 900
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stopped(workspace: Workspace, number: signal.Signals, whom: Callable[[int, int], None]) -> tuple[int, str]:
    """A sweep that gets a signal while two long tasks are at work: its exit code, and what it said."""
    before = len(noted(workspace))
    process = subprocess.Popen(
        [sys.executable, "-c", "import sweeping; sweeping.main()", str(workspace.folder), str(LONG)],
        env={**os.environ, "PYTHONPATH": MODULES},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: len(recorded(workspace)) == 2 and len(noted(workspace)) - before == (2 if before else 4), process)
        whom(process.pid, number)
        _, said = process.communicate(timeout=600)  # ends when the last process that holds the pipe does
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def test_stopped_sweeps_leave_no_process_and_are_taken_up_where_they_were(workspace: Workspace) -> None:
    code, said = stopped(workspace, signal.SIGINT, os.killpg)  # as a terminal does
    assert code == -signal.SIGINT
    assert said.count("Traceback") == 1, said
    assert sorted(noted(workspace, "end")) == sorted(recorded(workspace)) == ["a", "bb"]
    assert stopped(workspace, signal.SIGKILL, os.kill)[0] == -signal.SIGKILL
    assert sorted(recorded(workspace)) == ["a", "bb"]
    run(work(0), workspace)
    begun = noted(workspace)
    assert begun.count("a") == begun.count("bb") == 1
    assert sorted(noted(workspace, "end")) == sorted(recorded(workspace)) == ["a", "bb", "ccc", "dddd", "eeeee"]


class Forever(Forecast):
    """A forecast that never changes."""

    def seconds(self, workers: int) -> float:
        return 7200 / workers


@pytest.mark.parametrize(("workers", "left"), [(1, "2.0 h"), (2, "60 min")])
def test_the_time_left_is_that_of_the_forecast(
    workers: int, left: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    tasks = [Chore("a"), Chore("bb"), Chore("ccc", fate="no data")]
    records = Records(workspace.folder)
    forecast = Forever(tasks, records, CostModel(workspace))
    sweep(tasks, workspace, records, workers=workers, forecast=forecast)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"tasks: 1/3, chore, {left} left",
        f"tasks: 2/3, chore, {left} left",
        "tasks: 3/3, chore",
    ]
    assert not forecast.left


def test_no_workers_are_refused(workspace: Workspace) -> None:
    with pytest.raises(AdaNPCError, match="workers must be at least 1, got 0"):
        sweep([Chore("a")], workspace, Records(workspace.folder), workers=0)
