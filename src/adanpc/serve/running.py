"""Running an app: until a signal ends it, or in a thread beside its caller."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from adanpc.errors import UnavailableError
from adanpc.serve.errors import TooManyError, error_response
from adanpc.serve.service import Service

Protocol: Any = AutoHTTPProtocol  # httptools if it is installed, else h11
BACKLOG = 2048  # connections that wait to be accepted
GATHERED = 2**16  # bytes of an answer that are held back for its end
PATIENCE = 30  # seconds that accepted requests get to be answered when the service ends


class WholeAnswers(Protocol):  # type: ignore[misc]  # which of the two it is, is known when it runs
    """HTTP over a connection to which the head of an answer and its body are written together.

    Each write would be a call of the system, a packet, and a client that wakes for a part of its answer.
    """

    def connection_made(self, transport: Any) -> None:
        """Begins with a connection."""
        super().connection_made(Gathered(transport, self.loop))


class Gathered:
    """A transport that writes at the end of a turn of the event loop all that was written in it.

    Args:
        transport: of the connection.
        loop: whose turns they are.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Writes soon."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > GATHERED:
            self._flush()  # so that the server learns when a client reads more slowly than it is written to

    def close(self) -> None:
        """Writes what is left, and ends."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts = self._parts
        self._parts = []
        self._size = 0
        if parts:
            self._transport.write(b"".join(parts))


class GracefulServer(Server):
    """A server that lets listeners go when it ends: they would stay forever.

    Args:
        app: that answers.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        config = Config(
            self._answer,
            interface="asgi3",
            http=WholeAnswers,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=PATIENCE,
            ws="none",
        )
        super().__init__(config)
        self._service: Service = app.state.service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers what was accepted, and no more."""
        self._service.events.close()
        await super().shutdown(sockets)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, unless there are too many connections; uvicorn would refuse it in a shape of its own."""
        most = self._service.limits.connections
        if scope["type"] == "http" and len(self.server_state.connections) > most:
            refusal = error_response(TooManyError(f"{most} connections are open already: try again later"))
            refusal.headers["Connection"] = "close"
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


def settle() -> None:
    """Tells the garbage collector that what is there now will stay: looking through it again delays answers."""
    gc.collect()
    gc.freeze()


def listening(host: str, port: int) -> socket.socket:
    """A socket that accepts connections; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
        opened.listen(BACKLOG)
    except OSError as error:
        opened.close()
        raise UnavailableError(f"cannot listen at {host}, port {port}: {error.strerror}; choose another port") from None
    return opened


def run(app: FastAPI, opened: socket.socket) -> None:
    """Answers until SIGTERM or Ctrl-C, and then what was accepted before.

    Args:
        app: that ``create`` made.
        opened: where connections are accepted.
    """
    # uvicorn has handlers of its own, and calls these when it has ended.
    before = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGINT)}
    server = GracefulServer(app)
    settle()
    try:
        server.run([opened])
    finally:
        app.state.service.close()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def serving(app: FastAPI, host: str = "127.0.0.1") -> Iterator[str]:
    """Answers in a thread while the block runs; gives the address, such as http://127.0.0.1:34567."""
    opened = listening(host, 0)
    server = GracefulServer(app)
    thread = Thread(target=server.run, args=([opened],), name="adanpc-serve")
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield f"http://{host}:{opened.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        app.state.service.close()


def _end(number: int, frame: Any) -> None:
    raise SystemExit(0)
