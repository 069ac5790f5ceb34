"""Limits on requests: how large they may be, how many may run at the same time, and how fast they may come."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adanpc import require
from adanpc.serve.errors import AmbiguousError, RequestError, TooLargeError, TooManyError, TooSlowError, error_response
from adanpc.serve.security import header

LONGEST_NUMBER = 15  # digits in a stated number of bytes
STEP = 2**16  # bytes that a client sends or reads in time if it is not stalled
BODIES = 8  # of the largest allowed size that may be in memory at the same time, or as many bytes of smaller ones
MOST_CALLERS = 10_000  # whose rates are remembered; the least recently active one is forgotten first


@dataclass(frozen=True)
class Limits:
    """What a single request may contain, and how many requests there may be."""

    body: int = 32 * 2**20  # bytes in a request
    pixels: int = 50_000_000  # in an image
    queries: int = 2048  # in a request; a durable bank accepts no more
    requests: int = 256  # being answered at the same time
    connections: int = 1000  # open at the same time
    listeners: int = 64  # following the events at the same time
    rate: float = 2000.0  # requests per second from one caller
    burst: float = 4000.0  # requests from one caller that may come at once after a pause
    patience: float = 20.0  # seconds to wait for the head of a request, and for each next STEP bytes of its body

    def __post_init__(self) -> None:
        for name in ("body", "pixels", "queries", "requests", "connections", "listeners"):
            require.whole(name, getattr(self, name), least=1)
        require.positive("rate", self.rate)
        require.positive("burst", self.burst)
        require.positive("patience", self.patience)


class Rates:
    """A budget for each caller, which refills over time and is spent on requests."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._budgets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what was left, and when

    def spend(self, caller: str, now: float) -> bool:
        """Returns whether the caller may make one more request now, and if so, takes it from the budget."""
        left, since = self._budgets.pop(caller, (self._burst, now))
        left = min(self._burst, left + self._rate * (now - since))
        allowed = left >= 1
        if allowed:
            left -= 1
        self._budgets[caller] = (left, now)
        if len(self._budgets) > MOST_CALLERS:
            self._budgets.popitem(last=False)
        return allowed


class Held:
    """Counts the bytes of all requests that are being read or answered. Only one event loop may use it.

    Args:
        most: the most bytes that requests may hold.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0

    def __len__(self) -> int:
        """Returns the number of bytes that requests hold now."""
        return self._bytes

    def has_room_for(self, count: int) -> bool:
        """Returns whether there is room for this many more bytes."""
        return self._bytes + count <= self._most

    def add(self, count: int) -> None:
        """Adds bytes that were received."""
        self._bytes += count

    def remove(self, count: int) -> None:
        """Removes bytes that were released."""
        self._bytes -= count

    def claim(self, count: int) -> None:
        """Adds bytes that are about to be used; raises a TooManyError if there is no room for them."""
        if not self.has_room_for(count):
            raise TooManyError(self.refusal)
        self.add(count)

    @property
    def refusal(self) -> str:
        """The message for a request that is refused because there is no room."""
        return f"requests of {self._most:,} bytes are being answered already: try again in a second"


class Body:
    """The body of a request while it is received, counted as it comes: its stated length may be missing or wrong.

    Args:
        receive: receives the parts of the body.
        limits: the limits on requests.
        held: counts the bytes of all requests.
    """

    def __init__(self, receive: Receive, limits: Limits, held: Held) -> None:
        self._receive = receive
        self._most = limits.body
        self._patience = limits.patience
        self._held = held
        self._complete = False
        self._due: float | None = None  # when the next ``STEP`` bytes must have come
        self._expected = 0  # bytes that must have come by then
        self.received = 0

    async def receive(self) -> Message:
        """Returns the next part; raises an HTTPException if the body is too large or too slow, or there is no room."""
        if self._complete:
            return await self._receive()  # only waits for the client to disconnect
        message = await self._next_part()
        self._complete = not message.get("more_body", False)
        count = len(message.get("body", b""))
        if self.received + count > self._most:
            raise HTTPException(TooLargeError.status, _too_large(self._most))
        if not self._held.has_room_for(count):
            raise HTTPException(TooManyError.status, self._held.refusal, TooManyError.headers)
        self.received += count
        self._held.add(count)
        return message

    async def _next_part(self) -> Message:
        """Returns the next part if it comes in time."""
        loop = asyncio.get_running_loop()
        if self._due is None or self.received >= self._expected:
            self._due = loop.time() + self._patience
            self._expected = self.received + STEP
        try:
            async with asyncio.timeout_at(self._due):
                return await self._receive()
        except TimeoutError:
            raise HTTPException(TooSlowError.status, _too_slow(self._patience), TooSlowError.headers) from None


class LimitRequests:
    """Middleware that refuses requests that are too large, too many or too frequent.

    Args:
        app: the app that answers all other requests.
        limits: the limits on requests.
        held: counts the bytes of all requests.
    """

    def __init__(self, app: ASGIApp, limits: Limits, held: Held) -> None:
        self._app = app
        self._limits = limits
        self._held = held
        self._rates = Rates(limits.rate, limits.burst)
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or responds with the reason why it is refused."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        self._running += 1
        body = Body(receive, self._limits, self._held)
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._running -= 1
            self._held.remove(body.received)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = scope["headers"]
        stated = header(headers, b"content-length")
        if stated is not None and header(headers, b"transfer-encoding") is not None:
            return AmbiguousError("a request has a Content-Length or a Transfer-Encoding, not both")
        stated = stated or "0"
        if not stated.isascii() or not stated.isdigit() or len(stated) > LONGEST_NUMBER:
            return RequestError("the header Content-Length must be a number of bytes")
        if int(stated) > self._limits.body:
            return TooLargeError(_too_large(self._limits.body))
        if self._running >= self._limits.requests:
            return TooManyError(f"{self._running} requests are being answered already: try again in a second")
        if not self._held.has_room_for(int(stated)):
            return TooManyError(self._held.refusal)
        if not self._rates.spend(_caller(scope), time.monotonic()):
            return TooManyError(f"more than {self._limits.rate:g} requests a second: try again in a second")
        return None


def _too_large(most: int) -> str:
    return f"a request has at most {most:,} bytes: send several"


def _too_slow(patience: float) -> str:
    return f"less than {STEP:,} bytes of the body have come within {patience:g} seconds, and not its end"


def _caller(scope: Scope) -> str:
    """Returns who made a request: the caller's name, or else the client's address."""
    name: str = scope["state"]["caller"].name
    if name:
        return f"name {name}"
    client = scope.get("client")
    if client is None:
        return ""
    return f"address {client[0]}"
