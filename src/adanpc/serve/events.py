"""Events: what happens, told to everybody who listens, as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from adanpc.serve.errors import TooManyError

WAITING = 1000  # events that a listener may be behind; then the oldest are dropped
KEEP_ALIVE = 15.0  # seconds of silence, after which a comment shows that the connection is alive

Listener = asyncio.Queue[bytes | None]  # None is the end


class Events:
    """Passes events on to listeners; for the thread of one event loop.

    Args:
        most: listeners at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._listeners: set[Listener] = set()
        self._closed = False

    def __len__(self) -> int:
        """How many listen."""
        return len(self._listeners)

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        """Passes an event on."""
        if not self._listeners:
            return
        event = format_sse_event(data_str=json.dumps(data), event=kind)
        for listener in self._listeners:
            _put(listener, event)

    def stream(self) -> AsyncIterator[bytes]:
        """All events from now on as bytes, until the service ends or nobody reads them."""
        if len(self._listeners) >= self._most:
            raise TooManyError(f"{self._most} others are listening already: try again later")
        return self._stream()

    async def _stream(self) -> AsyncIterator[bytes]:
        listener: Listener = asyncio.Queue(WAITING)
        self._listeners.add(listener)
        if self._closed:
            _put(listener, None)
        try:
            yield KEEPALIVE_COMMENT  # so that the answer begins, and a client knows that it is heard
            while True:
                event = await _next(listener)
                if event is None:
                    return
                yield event
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        """Lets all listeners go."""
        self._closed = True
        for listener in self._listeners:
            _put(listener, None)


async def _next(listener: Listener) -> bytes | None:
    """The next event, or a comment after a long silence."""
    try:
        async with asyncio.timeout(KEEP_ALIVE):
            return await listener.get()
    except TimeoutError:
        return KEEPALIVE_COMMENT


def _put(listener: Listener, event: bytes | None) -> None:
    if listener.full():
        listener.get_nowait()
    listener.put_nowait(event)
