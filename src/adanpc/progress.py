"""Progress bars: the one door to them, for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from operator import length_hint
from typing import ClassVar, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


class Tracked(Generic[T]):
    """The items of an iterable, with a bar on stderr that moves as they are taken; see ``track``."""

    drawing: ClassVar[bool] = False  # a bar inside another stays hidden

    def __init__(self, items: Iterable[T], description: str, total: int | None = None) -> None:
        self.items, self.description = items, description
        self.total = length_hint(items) or None if total is None else total
        self._text = ""
        self._bar: Progress | None = None

    def note(self, text: str) -> None:
        """Shows a short text, such as the loss, beside the bar."""
        self._text = text
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], note=text)

    def __iter__(self) -> Iterator[T]:
        console = Console(stderr=True)
        if Tracked.drawing or not _can_draw(console):
            yield from self.items
            return
        Tracked.drawing = True
        try:
            with _bar(console) as self._bar:
                task = self._bar.add_task(self.description, total=self.total, note=self._text)
                for item in self.items:
                    yield item
                    self._bar.advance(task)
        finally:
            Tracked.drawing = False


def track(items: Iterable[T], description: str, total: int | None = None) -> Tracked[T]:
    """The items, with a progress bar while they are taken; nothing is written where no bar can be drawn.

    ``for item in (bar := track(items, "training")): bar.note("loss 0.1")`` also shows a text. A bar inside
    another is not drawn.

    Args:
        items: anything that can be iterated.
        description: what is being done, a few words.
        total: how many items there are, if they cannot tell; without it the bar only shows that work goes on.
    """
    return Tracked(items, description, total)


def _bar(console: Console) -> Progress:
    description, note = (TextColumn(part, markup=False) for part in ("{task.description}", "{task.fields[note]}"))
    return Progress(description, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note, console=console)


def _can_draw(console: Console) -> bool:
    """Whether a moving bar is readable: a real terminal, or a notebook with the widgets that rich needs."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    # rich alone would believe FORCE_COLOR, and write control characters into a log file.
    return console.file.isatty() and console.is_interactive
