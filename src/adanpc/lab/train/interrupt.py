"""Ctrl-C that waits until training can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """A context in which the first Ctrl-C or SIGTERM only sets ``requested``, and the second raises KeyboardInterrupt.

    Outside of the main thread signals cannot be caught, so there it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._at_once = False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside a ``with`` block, the first signal interrupts, too: for work that may be dropped at any moment."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Sets ``requested`` on the first signal; interrupts on the second, or if the first may interrupt."""
        if self.requested or self._at_once:
            self._at_once = False  # the run is saved next, which an impatient second signal must not interrupt
            raise KeyboardInterrupt
        self.requested = True
