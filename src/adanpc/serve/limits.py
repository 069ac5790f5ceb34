"""How much may be asked: the size of a request, how many there are at a time, and how fast they come."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adanpc import require
from adanpc.serve.errors import RequestError, TooLargeError, TooManyError, error_response
from adanpc.serve.security import header

LONGEST_NUMBER = 15  # digits of a length in bytes
MOST_CALLERS = 10_000  # whose rates are remembered; the one that was silent for longest is forgotten


@dataclass(frozen=True)
class Limits:
    """What one request may hold, and how many there may be."""

    body: int = 32 * 2**20  # bytes of a request
    pixels: int = 50_000_000  # of an image
    queries: int = 2048  # of a request; a durable bank takes no more
    requests: int = 256  # that are answered at the same time
    connections: int = 1000  # that are open at the same time
    listeners: int = 64  # who follow the events
    rate: float = 2000.0  # requests a second of one caller
    burst: float = 4000.0  # requests that may come at once after a pause

    def __post_init__(self) -> None:
        for name in ("body", "pixels", "queries", "requests", "connections", "listeners"):
            require.whole(name, getattr(self, name), least=1)
        require.positive("rate", self.rate)
        require.positive("burst", self.burst)


class Rates:
    """A budget for each caller, which fills with time and is spent by requests."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._budgets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and as of when

    def spend(self, caller: str, now: float) -> bool:
        """Whether the caller may make one more request now."""
        left, since = self._budgets.pop(caller, (self._burst, now))
        left = min(self._burst, left + self._rate * (now - since))
        allowed = left >= 1
        if allowed:
            left -= 1
        self._budgets[caller] = (left, now)
        if len(self._budgets) > MOST_CALLERS:
            self._budgets.popitem(last=False)
        return allowed


class LimitRequests:
    """Middleware that refuses requests that are too large, too many, or too fast."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._rates = Rates(limits.rate, limits.burst)
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, self._bounded(receive), send)
        finally:
            self._running -= 1

    def _refusal(self, scope: Scope) -> RequestError | None:
        stated = header(scope["headers"], b"content-length") or "0"
        if not stated.isascii() or not stated.isdigit() or len(stated) > LONGEST_NUMBER:
            return RequestError("the header Content-Length must be a number of bytes")
        if int(stated) > self._limits.body:
            return TooLargeError(_too_large(self._limits.body))
        if self._running >= self._limits.requests:
            return TooManyError(f"{self._running} requests are being answered already: try again in a second")
        if not self._rates.spend(_caller(scope), time.monotonic()):
            return TooManyError(f"more than {self._limits.rate:g} requests a second: try again in a second")
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """``receive`` for a body whose length was not stated, or not truly."""
        received = 0

        async def receive_bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limits.body:
                raise HTTPException(TooLargeError.status, _too_large(self._limits.body))
            return message

        return receive_bounded


def _too_large(most: int) -> str:
    return f"a request has at most {most:,} bytes: send several"


def _caller(scope: Scope) -> str:
    """By whom a request was made: the name of a token, or an address."""
    name: str = scope["state"]["caller"].name
    if name:
        return f"name {name}"
    client = scope.get("client")
    if client is None:
        return ""
    return f"address {client[0]}"
