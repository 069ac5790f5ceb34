"""Stalled: ends connections that keep the service waiting, for the head of a request or for room to write a response.

Bodies of requests that stop coming are refused by ``limits.Body``, which sees them come.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from adanpc.serve.errors import TooSlowError, raw_response
from adanpc.serve.limits import STEP


class Wait(NamedTuple):
    """What the service waits for on a connection, and since when."""

    cycle: Any  # the latest request on the connection, as uvicorn has it, and its response
    # How many STEP bytes of the response are yet to be written; None while the next request is awaited.
    left: int | None
    since: float


class Stalled:
    """Remembers what each connection waits for. Its method is called about once a second, by one event loop.

    So a request costs nothing here, and it does not matter how uvicorn reads it.

    Args:
        patience: seconds in which a request must begin and its head must be complete, and a client must read ``STEP``
            bytes of a response.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._waits: weakref.WeakKeyDictionary[Any, Wait] = weakref.WeakKeyDictionary()

    def end(self, connections: Iterable[Any], now: float) -> None:
        """Ends the connections of clients that have kept the service waiting for too long."""
        for connection in list(connections):
            wait = _wait(connection, now)
            before = self._waits.get(connection)
            if wait is None:
                self._waits.pop(connection, None)
            elif before is None or (before.cycle, before.left) != (wait.cycle, wait.left):
                self._waits[connection] = wait
            elif now - before.since > self._patience:
                _end(connection, wait, self._patience)


def _wait(connection: Any, now: float) -> Wait | None:
    """Returns what the service waits for on a connection; None if the client waits for the service."""
    cycle = connection.cycle
    if cycle is None or cycle.response_complete:
        return Wait(cycle, None, now)
    if connection.flow.write_paused:
        return Wait(cycle, connection.transport.get_write_buffer_size() // STEP, now)
    return None


def _end(connection: Any, wait: Wait, patience: float) -> None:
    """Ends a connection, with a refusal if no other response is being written."""
    if wait.left is not None:
        connection.transport.abort()
        return
    connection.transport.write(raw_response(TooSlowError(f"no request has come within {patience:g} seconds")))
    connection.transport.close()
