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
from sweeping import Chore, Errand, noted, work

from adanpc.errors import AdaNPCError
from adanpc.lab.sweep.cost import Ruler
from adanpc.lab.sweep.records import FILE, Records
from adanpc.lab.sweep.subjects import Workshop
from adanpc.lab.sweep.sweep import ahead, left, sweep
from adanpc.lab.sweep.task import Task

LONG = 300.0  # seconds; no test waits for it
TESTS = Path(__file__).parents[1]


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path, tmp_path)


def run(tasks: Sequence[Task], shop: Workshop, workers: int = 1) -> list[str]:
    return sweep(tasks, shop, Records(shop.folder), workers=workers)


def recorded(shop: Workshop) -> list[str]:
    return [entry["task"]["name"] for entry in Records(shop.folder).entries.values()]


def test_every_task_runs_once_however_often_it_is_wanted(shop: Workshop) -> None:
    assert run([Chore("a"), Chore("b"), Chore("a")], shop) == []
    assert noted(shop) == recorded(shop) == ["a", "b"]
    assert Records(shop.folder).of(Chore("b")) == {"name": "b", "length": 1}


def test_finished_tasks_never_run_again(shop: Workshop) -> None:
    run([Chore("a")], shop)
    run([Chore("b"), Chore("a")], shop)
    run([Chore("b"), Chore("a")], shop)
    assert noted(shop) == ["a", "b"]
    assert len((shop.folder / FILE).read_text().splitlines()) == 2


def test_what_others_need_comes_first_and_once(shop: Workshop) -> None:
    base = Chore("base")
    tasks = [Chore("a"), Chore("b", after=base), base, Chore("c", after=base)]
    run(tasks, shop)
    assert noted(shop) == ["a", "base", "b", "c"]
    assert ahead([*tasks, Chore("d", after=base)], Records(shop.folder)) == [Chore("d", after=base)]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_task_made_possible_comes_next(shop: Workshop, workers: int) -> None:
    bases = [Chore(name) for name in "abcdefgh"]
    tasks = [Chore(f"{base.name}{number}", after=base) for base in bases for number in range(3)]
    assert run(tasks, shop, workers) == []
    begun, order = noted(shop), recorded(shop)
    assert sorted(begun) == sorted(order) == sorted(each.name for each in (*bases, *tasks))
    assert all(order.index(name[0]) <= order.index(name) for name in order)
    assert begun.index("h") > begun.index("a2")  # not all bases first
    if workers == 1:
        assert begun == [name + number for name in "abcdefgh" for number in ("", "0", "1", "2")]


def test_what_waited_for_something_missing_is_tried_and_tells_itself(shop: Workshop) -> None:
    base = Chore("base", fate="no data")
    assert run([Chore("a", after=base), Chore("b", fate="no weights", after=base)], shop) == [
        "there are no data",
        "there are no weights",
    ]
    assert recorded(shop) == ["a"]


def test_nothing_comes_first_for_a_task_that_is_finished(shop: Workshop) -> None:
    run([Chore("a")], shop)
    assert run([Chore("a", after=Chore("base"))], shop) == []
    assert noted(shop) == ["a"]


def test_a_refusal_is_a_record(shop: Workshop) -> None:
    refused = Chore("a", fate="refused")
    assert run([refused, Chore("b")], shop) == []
    assert Records(shop.folder).of(refused) == {"error": "this model has no batch norm"}
    run([refused], shop)
    assert noted(shop) == ["a", "b"]


def test_what_is_missing_is_told_once_and_tried_again(shop: Workshop) -> None:
    tasks = [Chore("a", fate="no data"), Chore("b", fate="no weights"), Chore("c", fate="no data"), Chore("d")]
    assert run([*tasks, Chore("e", fate="damaged")], shop) == [
        "there are no data",
        "there are no weights",
        "the run is damaged",
    ]
    assert recorded(shop) == ["d"]
    assert run([Chore("a"), Chore("b", fate="no weights")], shop) == ["there are no weights"]
    assert recorded(shop) == ["d", "a"]


def test_a_mistake_is_raised_after_what_was_finished_is_recorded(shop: Workshop) -> None:
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        run([Chore("a"), Chore("b", fate="wrong"), Chore("c")], shop)
    assert recorded(shop) == ["a"]
    run([Chore("a"), Chore("b"), Chore("c")], shop)
    assert noted(shop) == ["a", "b", "b", "c"]


def test_a_second_sweep_in_the_same_folder_is_refused(shop: Workshop) -> None:
    with Records(shop.folder).writing(), pytest.raises(AdaNPCError, match="another process is adding to .*choose anot"):
        run([Chore("a")], shop)
    assert noted(shop) == []
    run([Chore("a")], shop)
    assert noted(shop) == ["a"]


def test_a_sweep_may_be_a_part_of_a_longer_writing(shop: Workshop) -> None:
    records = Records(shop.folder)
    with records.writing():
        sweep([Chore("a")], shop, records, workers=1)
        with pytest.raises(AdaNPCError, match="another process is adding"):
            run([Chore("b")], shop)
        sweep([Chore("c")], shop, records, workers=1)
    run([Chore("b")], shop)
    assert noted(shop) == ["a", "c", "b"]


def test_a_sweep_sees_what_another_finished_since_the_records_were_read(shop: Workshop) -> None:
    early = Records(shop.folder)
    run([Chore("a")], shop)
    sweep([Chore("a"), Chore("b")], shop, early, workers=1)
    assert noted(shop) == ["a", "b"]


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    shops = [Workshop(tmp_path, tmp_path / name) for name in ("one", "two")]
    tasks = [Chore("a"), Chore("b", fate="refused"), Chore("c", fate="no data"), Chore("d")]
    told = [run(tasks, shop, workers) for workers, shop in enumerate(shops, start=1)]
    assert told == [["there are no data"]] * 2
    one, two = ({name: entry["record"] for name, entry in Records(shop.folder).entries.items()} for shop in shops)
    assert one == two
    assert sorted(noted(shops[1])) == ["a", "b", "c", "d"]
    assert multiprocessing.active_children() == []


def test_a_process_that_is_killed_ends_the_others_and_loses_nothing(shop: Workshop) -> None:
    with pytest.raises(AdaNPCError, match="^a process was killed, by lack of memory perhaps; what was finished is rec"):
        run([Chore("a"), Chore("b", fate="killed"), Chore("c", LONG)], shop, workers=2)
    assert multiprocessing.active_children() == []
    assert noted(shop, "end") == ["a"]
    assert recorded(shop) == ["a"]
    run([Chore("a"), Chore("b"), Chore("c")], shop)
    assert noted(shop).count("a") == 1
    assert sorted(recorded(shop)) == ["a", "b", "c"]


def test_records_that_cannot_be_written_end_the_work(shop: Workshop) -> None:
    with pytest.raises(IsADirectoryError):
        run([Chore("a", fate="in the way"), Chore("b", LONG), Chore("c", LONG)], shop, workers=2)
    assert multiprocessing.active_children() == []
    assert noted(shop, "end") == ["a"]


def until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stopped(shop: Workshop, number: signal.Signals, whom: Callable[[int, int], None]) -> tuple[int, str]:
    """A sweep that gets a signal while two long tasks are at work: its exit code, and what it said."""
    before = len(noted(shop))
    process = subprocess.Popen(
        [sys.executable, "-c", "import sweeping; sweeping.main()", str(shop.folder), str(LONG)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: len(recorded(shop)) == 2 and len(noted(shop)) - before == (2 if before else 4), process)
        whom(process.pid, number)
        _, said = process.communicate(timeout=60)  # ends when the last process that holds the pipe does
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def test_stopped_sweeps_leave_no_process_and_are_taken_up_where_they_were(shop: Workshop) -> None:
    code, said = stopped(shop, signal.SIGINT, os.killpg)  # as a terminal does
    assert code == -signal.SIGINT
    assert said.count("Traceback") == 1, said
    assert sorted(noted(shop, "end")) == sorted(recorded(shop)) == ["a", "bb"]
    assert stopped(shop, signal.SIGKILL, os.kill)[0] == -signal.SIGKILL
    assert sorted(recorded(shop)) == ["a", "bb"]
    run(work(0), shop)
    begun = noted(shop)
    assert begun.count("a") == begun.count("bb") == 1
    assert sorted(noted(shop, "end")) == sorted(recorded(shop)) == ["a", "bb", "ccc", "dddd", "eeeee"]


def test_what_is_left_is_corrected_by_what_was_seen(shop: Workshop) -> None:
    records, ruler = Records(shop.folder), Ruler(shop)
    base = Errand("base")
    tasks = [Chore("a"), Chore("bb", after=base), Chore("ccc", after=Errand("other"))]
    assert left(tasks, records, ruler, 1) == 1 + 2 + 3 + 4 + 5
    assert left([*tasks, Chore("a" * 9)], records, ruler, 2) == (1 + 2 + 3 + 4 + 5 + 9) / 2
    assert left(tasks, records, ruler, 64) == 5 + 3  # a task after what it needs
    with records.writing():
        records.add(base, {}, 8.0)  # twice as long as expected
    assert left(tasks, records, ruler, 1) == 1 + 2 + 3 + 2 * 5
    with records.writing():
        records.add(Chore("a"), {"error": "refused"}, 0.0)  # tells nothing
    assert left(tasks, records, ruler, 1) == 2 + 3 + 2 * 5
    with records.writing():
        records.add(Chore("bb"), {}, 1.0)
    assert left(tasks, records, ruler, 1) == 0.5 * 3 + 2 * 5
