"""Events: in order, to everybody, and a listener that is slow or gone harms nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from adanpc.serve import events
from adanpc.serve.errors import TooManyError
from adanpc.serve.events import WAITING, Events


async def begun(told: Events) -> AsyncIterator[bytes]:
    """A listener that is heard of."""
    stream = told.stream()
    assert await anext(stream) == b": ping\n\n"
    return stream


def test_a_listener_that_is_too_slow_misses_the_oldest_events() -> None:
    async def run() -> None:
        told = Events(most=2)
        stream = await begun(told)
        for number in range(WAITING + 5):
            told.tell("answer", {"number": number})
        assert b'{"number": 5}' in await anext(stream)
        assert len(told) == 1
        told.close()

    asyncio.run(run())


def test_a_silent_connection_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE", 0.01)

    async def run() -> None:
        told = Events(most=1)
        stream = await begun(told)
        assert await anext(stream) == b": ping\n\n"
        told.close()

    asyncio.run(run())


def test_the_end_lets_everybody_go() -> None:
    async def run() -> None:
        told = Events(most=2)
        early = await begun(told)
        told.tell("answer", {"number": 1})
        told.close()
        assert [part async for part in early] == [b'event: answer\ndata: {"number": 1}\n\n']
        late = told.stream()
        assert [part async for part in late] == [b": ping\n\n"]
        assert len(told) == 0

    asyncio.run(run())


def test_no_more_listen_than_may() -> None:
    async def run() -> None:
        told = Events(most=1)
        await begun(told)
        with pytest.raises(TooManyError, match="1 others are listening already"):
            told.stream()

    asyncio.run(run())
