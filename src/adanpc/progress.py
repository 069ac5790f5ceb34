"""Shows the progress of long work on stderr: a bar in terminals and notebooks, an occasional line anywhere else."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from operator import length_hint
from typing import IO, ClassVar, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from adanpc.printable import spelled_out

T = TypeVar("T")

INTERVAL = 30.0  # seconds between two lines; shorter work writes none


class Tracked(Generic[T]):
    """The items of an iterable, with progress shown on stderr as they are consumed; see ``track``."""

    reporting: ClassVar[bool] = False  # whether some progress is being shown already

    def __init__(
        self,
        items: Iterable[T],
        description: str,
        total: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.items = items
        self.description = spelled_out(description)
        if total is None:
            total = length_hint(items) or None
        self.total = total
        self._clock = clock
        self._note = ""
        self._expected_end: float | None = None  # by the clock
        self._bar: Progress | None = None

    def note(self, text: str) -> None:
        """Shows a short text, such as the loss, next to the progress."""
        self._note = spelled_out(text)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], note=self._note)

    def expect(self, seconds: float) -> None:
        """Shows this as the time left, instead of one that is extrapolated from the mean time of an item."""
        self._expected_end = self._clock() + seconds

    def __iter__(self) -> Iterator[T]:
        if Tracked.reporting or not _is_main_process():
            yield from self.items
            return
        console = Console(stderr=True)
        Tracked.reporting = True
        try:
            if _can_draw(console):
                yield from self._with_bar(console)
            else:
                yield from self._with_lines(console.file)
        finally:
            Tracked.reporting = False

    def _with_bar(self, console: Console) -> Iterator[T]:
        with _bar(console, self._expected_seconds) as self._bar:
            task = self._bar.add_task(self.description, total=self.total, note=self._note)
            for item in self.items:
                yield item
                self._bar.advance(task)

    def _with_lines(self, file: IO[str]) -> Iterator[T]:
        started = self._clock()
        reported = started
        for done, item in enumerate(self.items, 1):
            yield item
            now = self._clock()
            if now - reported >= INTERVAL:
                file.write(self._line(done, now - started) + "\n")
                file.flush()
                reported = now

    def _line(self, done: int, elapsed: float) -> str:
        """One line of progress, such as ``training erm: 120/300, loss 0.3, 2 min left``."""
        count = f"{done} done"
        if self.total is not None:
            count = f"{done}/{self.total}"
        parts = [count]
        if self._note:
            parts.append(self._note)
        if self.total is not None and done < self.total:
            remaining = self._expected_seconds()
            if remaining is None:
                seconds_per_item = elapsed / done
                remaining = seconds_per_item * (self.total - done)
            parts.append(f"{_duration(remaining)} left")
        return f"{self.description}: {', '.join(parts)}"

    def _expected_seconds(self) -> float | None:
        """The seconds that are left of what was expected last; None if nothing was."""
        if self._expected_end is None:
            return None
        return max(0.0, self._expected_end - self._clock())


class _TimeLeft(TimeRemainingColumn):
    """A column with the expected time, or else with the one that rich extrapolates."""

    def __init__(self, expected_seconds: Callable[[], float | None]) -> None:
        super().__init__()
        self.expected_seconds = expected_seconds

    def render(self, task: Task) -> Text:
        seconds = self.expected_seconds()
        if seconds is None or task.finished:
            return super().render(task)
        return Text(f"{_duration(seconds)} left", style="progress.remaining")


def track(items: Iterable[T], description: str, total: int | None = None) -> Tracked[T]:
    """The items, with progress shown on stderr while they are consumed.

    A terminal or a notebook shows a bar. Elsewhere, as in a log file, a line is written every 30 seconds at most, so
    that short work writes nothing. Progress within other progress is not shown. A text can be shown, too::

        bar = track(items, "training")
        for item in bar:
            bar.note("loss 0.1")

    Args:
        items: anything that can be iterated over.
        description: what is being done, in a few words.
        total: how many items there are, if the items do not know; without it, no remaining time is shown.
    """
    return Tracked(items, description, total)


def _is_main_process() -> bool:
    """Whether this process should show progress: not a worker of a pool, and only the first process of torchrun."""
    return multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"


def _bar(console: Console, expected_seconds: Callable[[], float | None]) -> Progress:
    """An empty bar with the columns that ``Tracked`` fills."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _TimeLeft(expected_seconds),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
    )


def _can_draw(console: Console) -> bool:
    """Whether a moving bar is readable: in a real terminal, or in a notebook with the widgets that rich needs."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    # The file is asked first: with FORCE_COLOR, rich would take a log file for a terminal.
    return console.file.isatty() and console.is_interactive


def _duration(seconds: float) -> str:
    """A length of time in seconds, minutes or hours, whichever reads best."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
