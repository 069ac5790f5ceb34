"""Events: tells all listeners what happens, as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from adanpc.serve.errors import TooManyError

WAITING = 1000  # events by which a listener may lag before the oldest are dropped
KEEP_ALIVE = 15.0  # seconds of silence after which a comment shows that the connection is alive

Listener = asyncio.Queue[bytes | None]  # None is the end


class Events:
    """Sends events to listeners. Only the thread of one event loop may use it.

    Args:
        most: the most listeners at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._listeners: set[Listener] = set()
        self._closed = False

    def __len__(self) -> int:
        """Returns the number of listeners."""
        return len(self._listeners)

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        """Sends an event to all listeners."""
        if not self._listeners:
            return
        event = format_sse_event(data_str=json.dumps(data), event=kind)
        for listener in self._listeners:
            _put(listener, event)

    def stream(self) -> AsyncIterator[bytes]:
        """Returns all events from now on as bytes, until the service ends or the listener leaves."""
        if len(self._listeners) >= self._most:
            raise TooManyError(f"{self._most} others are listening already: try again later")
        return self._stream()

    async def _stream(self) -> AsyncIterator[bytes]:
        listener: Listener = asyncio.Queue(WAITING)
        self._listeners.add(listener)
        if self._closed:
            _put(listener, None)
        try:
            yield KEEPALIVE_COMMENT  # starts the response, so that the client knows that it is connected
            while True:
                event = await _next(listener)
                if event is None:
                    return
                yield event
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        """Ends the streams of all listeners."""
        self._closed = True
        for listener in self._listeners:
            _put(listener, None)


async def _next(listener: Listener) -> bytes | None:
    """Returns the next event, or a comment after a long silence."""
    try:
        async with asyncio.timeout(KEEP_ALIVE):
            return await listener.get()
    except TimeoutError:
        return KEEPALIVE_COMMENT


def _put(listener: Listener, event: bytes | None) -> None:
    if listener.full():
        listener.get_nowait()
    listener.put_nowait(event)
