"""Room: how many pixels of images may be in memory at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """Lets images in as long as there is room for their pixels, and others wait in turn; for one event loop.

    One that is larger than all of the room comes in alone.

    Args:
        most: pixels.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __len__(self) -> int:
        """How many images wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def taken(self, pixels: int) -> AsyncIterator[None]:
        """Room for an image while the block runs."""
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((pixels, admitted))
        self._admit()
        try:
            await admitted
        except BaseException:  # the server gave up on the request
            self._leave(pixels, admitted)
            raise
        try:
            yield
        finally:
            self._used -= pixels
            self._admit()

    def _admit(self) -> None:
        """Lets in whoever comes next, as long as there is room."""
        while self._waiting:
            pixels, admitted = self._waiting[0]
            if self._used and self._used + pixels > self._most:
                return
            self._waiting.popleft()
            self._used += pixels
            admitted.set_result(None)

    def _leave(self, pixels: int, admitted: asyncio.Future[None]) -> None:
        """Gives up waiting, or the room that was given at this very moment."""
        if (pixels, admitted) in self._waiting:
            self._waiting.remove((pixels, admitted))
        else:
            self._used -= pixels
        self._admit()
