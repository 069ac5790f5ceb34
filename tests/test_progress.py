"""Progress without a terminal: plain lines, by a clock that the tests move."""

from __future__ import annotations

import io
import multiprocessing
import sys
from collections.abc import Iterable

import pytest

from adanpc.progress import Tracked, track


class Clock:
    """A clock that moves by so many seconds with every item."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def ticking(self, items: Iterable[int], seconds: float) -> Iterable[int]:
        for item in items:
            self.now += seconds
            yield item


class Terminal(io.StringIO):
    """A stderr that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def taken(count: int, seconds: float, total: int | None, note: str = "", description: str = "training erm") -> None:
    """Takes so many items that each need so many seconds."""
    clock = Clock()
    tracked = Tracked(clock.ticking(range(count), seconds), description, total, clock=clock)
    for item in tracked:
        assert item < count
        tracked.note(note)


def test_long_work_writes_a_line_every_thirty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    taken(300, 1, 300, "loss 0.3")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "training erm: 30/300, loss 0.3, 4 min left"
    assert lines[3] == "training erm: 120/300, loss 0.3, 3 min left"
    assert lines[8] == "training erm: 270/300, loss 0.3, 30 s left"
    assert lines[9] == "training erm: 300/300, loss 0.3"


def test_slow_items_write_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    taken(3, 7200, 3)
    assert capsys.readouterr().err.splitlines() == [
        "training erm: 1/3, 4.0 h left",
        "training erm: 2/3, 2.0 h left",
        "training erm: 3/3",
    ]


def test_an_expected_time_replaces_the_extrapolated_one(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    tracked = Tracked(clock.ticking(range(4), 600), "tasks", 4, clock=clock)
    for item in tracked:
        if item < 2:  # after that, the time that was expected last runs down
            tracked.expect(660 - 600 * item)
    assert capsys.readouterr().err.splitlines() == [
        "tasks: 1/4, 11 min left",
        "tasks: 2/4, 1 min left",
        "tasks: 3/4, 0 s left",
        "tasks: 4/4",
    ]


def test_a_bar_shows_the_expected_time(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    clock = Clock()
    tracked = Tracked(range(3), "tasks", 3, clock=clock)
    items = iter(tracked)
    next(items)
    tracked.expect(7200.0)
    tracked.note("so far")
    next(items)
    items.close()  # type: ignore[attr-defined]
    assert "2.0 h left so far" in terminal.getvalue()


def test_without_a_total_the_items_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    taken(4, 20, None)
    assert capsys.readouterr().err.splitlines() == ["training erm: 2 done", "training erm: 4 done"]


def test_more_items_than_announced_leave_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    taken(2, 40, 1)
    assert capsys.readouterr().err.splitlines() == ["training erm: 1/1", "training erm: 2/1"]


def test_short_work_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    taken(29, 1, 29, "loss 0.3")
    assert capsys.readouterr() == ("", "")


def test_progress_inside_other_progress_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    for _ in Tracked(clock.ticking(range(2), 40), "tasks", 2, clock=clock):
        taken(3, 60, 3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["tasks", "tasks"]
    taken(1, 60, 1)
    assert capsys.readouterr().err == "training erm: 1/1\n"  # once the outer work is over


def test_work_that_is_left_early_makes_room_for_other_progress(capsys: pytest.CaptureFixture[str]) -> None:
    items = iter(track(range(3), "left early"))
    next(items)
    assert Tracked.reporting
    items.close()  # type: ignore[attr-defined]
    assert not Tracked.reporting
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("rank", ["1", "7"])
def test_of_several_processes_one_reports(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    taken(2, 60, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    taken(2, 60, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.undo()
    taken(2, 60, 2)
    assert len(capsys.readouterr().err.splitlines()) == 2


EVIL = "a\x1b[2Jb\nc\r\x07\udce9é [bold]"
SPELLED_OUT = r"a\x1b[2Jb\nc\r\x07\udce9é [bold]"


def test_control_characters_are_shown_as_text_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    taken(1, 60, 1, note=EVIL, description=EVIL)
    assert capsys.readouterr().err == f"{SPELLED_OUT}: 1/1, {SPELLED_OUT}\n"


def test_control_characters_are_shown_as_text_in_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    for _ in (bar := track([1], EVIL)):
        bar.note(EVIL)
    assert "\x1b[2J" not in terminal.getvalue()
    assert terminal.getvalue().count(SPELLED_OUT) >= 2
