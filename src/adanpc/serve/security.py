"""Access control by the name of the host, the origin of the page, and the token that a request carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated
from urllib.parse import unquote, urlsplit

from fastapi import Depends, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adanpc.errors import AdaNPCError
from adanpc.serve.errors import ForbiddenError, RequestError, UnauthorizedError, error_response
from adanpc.serve.tokens import LONGEST_NAME, Caller, Tokens

RawHeaders = Sequence[tuple[bytes, bytes]]  # as the server passes them, with names in lower case

NOBODY = Caller()  # without a token and without a name
LOOPBACK = ("127.0.0.1", "::1", "localhost")
OPEN_TO_ALL = ("/", "/favicon.ico", "/v2/health/live", "/v2/health/ready")  # need no token, as they reveal nothing
OPEN_FOLDER = "/page/"  # the page itself, which then asks the user for a token
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'; object-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
NOT_STORED = (b"cache-control", b"no-store")


class SafeHeaders:
    """Middleware that tells browsers to load nothing from other hosts, and to store no responses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and adds headers to the response."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *RAW_HEADERS]  # no route sets any of these itself
                if header(headers, NOT_STORED[0]) is None:
                    headers.append(NOT_STORED)
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, send_with_headers)


class Gate:
    """Middleware that identifies the caller of each request, and refuses callers without access.

    Without tokens, everybody who reaches this host by one of its own names may do everything. If a web page on another
    host makes a browser send a request here, it is refused because of the host name it uses (DNS rebinding) or because
    of its origin.

    Args:
        app: the app that is protected.
        tokens: who has access; None for everybody.
        hosts: the names of this host.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens | None, hosts: Iterable[str] = LOOPBACK) -> None:
        self._app = app
        self._tokens = tokens
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on together with its caller, or responds with the reason why it is refused."""
        if scope["type"] == "http":
            headers = scope["headers"]
            try:
                self._check_origin(headers)
                caller = self._caller(scope["path"], headers)
            except AdaNPCError as error:  # the request is refused, or the token file cannot be read
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _check_origin(self, headers: RawHeaders) -> None:
        host = header(headers, b"host") or ""
        if self._tokens is None and _name(host) not in self._hosts:
            raise ForbiddenError(
                f"this service answers to {', '.join(sorted(self._hosts))} only: configure tokens to reach it otherwise"
            )
        origin = header(headers, b"origin")
        if origin is not None and _place(origin) != host:
            raise ForbiddenError("pages of other hosts may not use this service")

    def _caller(self, path: str, headers: RawHeaders) -> Caller:
        if self._tokens is None:
            name = header(headers, b"x-expert")
            if name is None:
                return NOBODY
            return Caller(_expert(name))
        if path in OPEN_TO_ALL or path.startswith(OPEN_FOLDER):
            return Caller(role="predict")
        kind, _, token = (header(headers, b"authorization") or "").partition(" ")
        if kind.lower() != "bearer" or not token:
            raise UnauthorizedError("a token is needed: send the header Authorization: Bearer TOKEN")
        caller = self._tokens.caller(token.strip())
        if caller is None:
            raise UnauthorizedError("the token is not known: ask for another one")
        return caller


def header(headers: RawHeaders, name: bytes) -> str | None:
    """Returns the value of the first header with this name, given in lower case; None if there is none."""
    for own_name, value in headers:
        if own_name == name:
            return value.decode("latin-1")
    return None


@lru_cache(maxsize=100)  # clients send the same header all the time
def _name(host: str) -> str:
    """Returns the host name in a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _place(origin: str) -> str:
    """Returns the host and port of an Origin header."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _expert(given: str) -> str:
    """Returns the name that a caller without a token gave; browsers percent-encode non-ASCII letters, as in %C3%A9."""
    name = unquote(given).strip()
    if not name.isprintable() or len(name) > LONGEST_NAME:
        raise RequestError(f"the header X-Expert must be at most {LONGEST_NAME} printable characters")
    return name


def caller_of(request: Request) -> Caller:
    """Returns the caller of a request."""
    caller: Caller = request.state.caller
    return caller


async def _expert_only(request: Request) -> Caller:
    return _with_role(request, "expert")


async def _admin_only(request: Request) -> Caller:
    return _with_role(request, "admin")


def _with_role(request: Request, role: str) -> Caller:
    caller = caller_of(request)
    if not caller.may(role):
        raise ForbiddenError(f"this needs a token with the role {role}, and {caller.name!r} has {caller.role}")
    return caller


Expert = Annotated[Caller, Depends(_expert_only)]
Admin = Annotated[Caller, Depends(_admin_only)]
