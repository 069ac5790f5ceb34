"""Images wait until there is room for their pixels."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from services import encode, filled, png
from torch import Tensor

import adanpc
from adanpc.serve import Limits, create, serving
from adanpc.serve.room import Room


class Visit:
    """An image that is in the room until it is told to go."""

    def __init__(self, room: Room, pixels: int) -> None:
        self.inside = False
        self.go = asyncio.Event()
        self.task = asyncio.create_task(self._visit(room, pixels))

    async def _visit(self, room: Room, pixels: int) -> None:
        async with room.taken(pixels):
            self.inside = True
            await self.go.wait()
            self.inside = False


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_images_come_in_turn_and_the_largest_alone() -> None:
    async def story() -> None:
        room = Room(10)
        visits = [Visit(room, pixels) for pixels in (6, 4, 5, 1, 25, 2)]
        await turns()
        assert [visit.inside for visit in visits] == [True, True, False, False, False, False]
        assert len(room) == 4
        visits[0].go.set()
        await turns()
        assert [visit.inside for visit in visits] == [False, True, True, True, False, False]
        visits[1].go.set()
        visits[2].go.set()
        await turns()
        assert not visits[4].inside
        visits[3].go.set()
        await turns()
        assert visits[4].inside
        assert not visits[5].inside
        visits[4].go.set()
        visits[5].go.set()
        await asyncio.gather(*[visit.task for visit in visits])
        assert room._used == len(room) == 0

    asyncio.run(story())


@pytest.mark.parametrize("moment", ["waiting", "admitted"])
def test_who_gives_up_leaves_their_room_to_others(moment: str) -> None:
    async def story() -> None:
        room = Room(10)
        first = Visit(room, 10)
        second = Visit(room, 10)
        third = Visit(room, 3)
        await turns()
        if moment == "waiting":
            second.task.cancel()
            await turns()
            assert len(room) == 1
            first.go.set()
        else:
            first.go.set()
            while len(room) != 1:  # the second was let in, and has not noticed
                await asyncio.sleep(0)
            second.task.cancel()
        await turns()
        assert third.inside
        third.go.set()
        await asyncio.gather(first.task, third.task)
        assert room._used == 0

    asyncio.run(story())


def test_no_more_images_are_decoded_than_there_is_room_for(tmp_path: Path) -> None:
    go = threading.Event()

    def gated(images: Sequence[Any]) -> Tensor:
        assert go.wait(300)
        return encode(images)

    bank = adanpc.DurableBank.create(tmp_path / "bank", filled())
    app = create(bank, encoder=gated, limits=Limits(pixels=25))
    service = app.state.service

    def asked(seed: int) -> int:
        headers = {"Content-Type": "image/png"}
        return requests.post(f"{url}/v1/predict", data=png(seed), headers=headers).status_code

    with bank, serving(app) as url, ThreadPoolExecutor(8) as pool:
        statuses = pool.map(asked, range(8))
        while len(service._room) < 4:  # the other four are decoded, and some of them are being encoded
            time.sleep(0.01)
        assert service.waiting_images >= 4
        go.set()
        assert list(statuses) == [200] * 8
