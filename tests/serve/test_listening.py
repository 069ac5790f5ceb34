"""The socket at which the service listens."""

from __future__ import annotations

import asyncio
import socket

from adanpc.serve import listening


def test_small_answers_are_sent_at_once() -> None:
    """Otherwise the second packet of each answer waits 40 ms for the client to acknowledge the first."""

    async def delays() -> bool:
        accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sending: socket.socket = writer.get_extra_info("socket")
            accepted.set_result(not sending.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        opened = listening("127.0.0.1", 0)
        async with await asyncio.start_server(accept, sock=opened):
            _, writer = await asyncio.open_connection(*opened.getsockname())
            delayed = await accepted
            writer.close()
            await writer.wait_closed()
        return delayed

    assert not asyncio.run(delays())
