"""Room: limits how many pixels of images are in memory at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """Admits images while there is room for their pixels; others wait in order. Only one event loop may use it.

    An image that is larger than the whole room is admitted alone.

    Args:
        most: the most pixels at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __len__(self) -> int:
        """Returns the number of images that are waiting."""
        return len(self._waiting)

    @asynccontextmanager
    async def taken(self, pixels: int) -> AsyncIterator[None]:
        """Waits for room for an image, and holds it while the block runs."""
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((pixels, admitted))
        self._admit()
        try:
            await admitted
        except BaseException:  # the server has given up on the request
            self._leave(pixels, admitted)
            raise
        try:
            yield
        finally:
            self._used -= pixels
            self._admit()

    def _admit(self) -> None:
        """Admits waiting images in order, as long as there is room."""
        while self._waiting:
            pixels, admitted = self._waiting[0]
            if self._used and self._used + pixels > self._most:
                return
            self._waiting.popleft()
            self._used += pixels
            admitted.set_result(None)

    def _leave(self, pixels: int, admitted: asyncio.Future[None]) -> None:
        """Stops waiting, or returns the room if it was granted at this very moment."""
        if (pixels, admitted) in self._waiting:
            self._waiting.remove((pixels, admitted))
        else:
            self._used -= pixels
        self._admit()
