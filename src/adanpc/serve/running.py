"""Running an app, either until a signal stops it or in a background thread."""

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
from uvicorn.protocols.http.h11_impl import H11Protocol

from adanpc.errors import UnavailableError
from adanpc.serve.errors import RequestError, TooManyError, error_response, raw_response
from adanpc.serve.memory import give_freed_memory_back
from adanpc.serve.service import Service
from adanpc.serve.stalled import Stalled

BACKLOG = 2048  # connections that may wait to be accepted
GATHERED = 2**16  # bytes of a response that may be held back until more of it is written
TICKS = 10  # of uvicorn between two looks for stalled connections
LARGEST_HEAD = 2**16  # bytes of a request before its body, and in the head of a chunk of its body
NOT_HTTP = f"the request is not valid in HTTP/1.1, or its head has more than {LARGEST_HEAD:,} bytes"
PATIENCE = 30  # seconds for accepted requests to finish when the service shuts down


class WholeAnswers(H11Protocol):
    """HTTP over a connection to which the head and the body of a response are written together.

    Separate writes would each cost a system call and a packet, and wake the client for a part of its response.

    This is h11 even where httptools is installed, which uvicorn would prefer: only h11 limits the head of a request.
    """

    def connection_made(self, transport: Any) -> None:
        """Starts handling a connection."""
        gathered: Any = Gathered(transport, self.loop)  # stands in for the transport
        super().connection_made(gathered)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn always closes the connection
        """Keeps the connection open for a response if its client, such as nc, sends nothing after a whole request.

        A response that has begun, such as the events, may have no end, and most likely its reader has left.
        """
        cycle = self.cycle
        is_due = cycle is not None and not cycle.more_body and not cycle.response_started
        if is_due:
            cycle.keep_alive = False  # no other request can come
        return is_due

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP in the format of all errors."""
        cycle = self.cycle
        is_waiting = cycle is not None and not cycle.response_complete  # for the rest of a body
        if not is_waiting or not cycle.response_started:  # in the middle of a response, there is no room for another
            self.transport.write(raw_response(RequestError(NOT_HTTP)))
        if is_waiting:
            cycle.disconnected = True  # so that the app, which may be about to answer, sends nothing more
        self.transport.close()


class Gathered:
    """A transport that combines everything written during a turn of the event loop into one write.

    Args:
        transport: the transport of the connection.
        loop: the event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Writes data at the end of this turn, or at once if much has accumulated."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > GATHERED:
            self._flush()  # lets the transport signal when the client reads more slowly than the server writes

    def close(self) -> None:
        """Writes what is left and closes the connection."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts = self._parts
        self._parts = []
        self._size = 0
        if parts:
            self._transport.write(b"".join(parts))


class GracefulServer(Server):
    """A server that disconnects listeners when it shuts down; they would stay connected forever.

    Args:
        app: the app that answers requests.
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
            h11_max_incomplete_event_size=LARGEST_HEAD,
            ws="none",
        )
        super().__init__(config)
        self._service: Service = app.state.service
        self._stalled = Stalled(self._service.limits.patience)

    async def on_tick(self, counter: int) -> bool:
        """Looks for stalled connections about once a second; uvicorn calls this ten times as often."""
        if counter % TICKS == 0:
            self._stalled.end(self.server_state.connections, time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers the requests that were accepted, and no others."""
        self._service.events.close()
        await super().shutdown(sockets)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on unless there are too many connections; uvicorn would refuse it in its own format."""
        most = self._service.limits.connections
        if scope["type"] == "http" and len(self.server_state.connections) > most:
            refusal = error_response(TooManyError(f"{most} connections are open already: try again later"))
            refusal.headers["Connection"] = "close"
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


def settle(rows: int = 0) -> None:
    """Prepares the process to serve a bank of so many rows for long; to be called when everything has been loaded."""
    give_freed_memory_back(rows)
    gc.collect()
    gc.freeze()  # objects that are here now will stay, and looking through them would delay answers


def listening(host: str, port: int) -> socket.socket:
    """Returns a socket that accepts connections; port 0 picks a free port."""
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
    """Serves an app until SIGTERM or Ctrl-C, then answers the requests that were accepted before.

    Args:
        app: an app that ``create`` made.
        opened: the socket that accepts connections.
    """
    server = GracefulServer(app)
    settle(len(app.state.service.bank.contents))
    with ended_by_signals():  # uvicorn has handlers of its own, and calls these once it has shut down
        try:
            server.run([opened])
        finally:
            app.state.service.close()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and Ctrl-C end the process in order, with status 0, while the block runs."""
    before = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def serving(app: FastAPI, host: str = "127.0.0.1") -> Iterator[str]:
    """Serves an app in a thread while the block runs; yields the address, such as http://127.0.0.1:34567."""
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
