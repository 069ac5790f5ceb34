"""Compressed bodies of requests: inflated within limits before any route sees them."""

from __future__ import annotations

import zlib
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adanpc.errors import AdaNPCError
from adanpc.serve.errors import MediaTypeError, RequestError, TooLargeError, error_response, framework_response
from adanpc.serve.limits import Held
from adanpc.serve.security import header

EITHER_HEADER = 32  # added to zlib's window size to detect gzip and deflate automatically
OF_COMPRESSED = (b"content-encoding", b"content-length")  # headers that do not apply to the inflated body


class Inflate:
    """Middleware that inflates compressed bodies.

    Args:
        app: the app that answers requests.
        most: the most bytes that a body may have once it is inflated.
        held: counts the bytes of all requests.
    """

    def __init__(self, app: ASGIApp, most: int, held: Held) -> None:
        self._app = app
        self._most = most
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, with its body inflated if it is compressed."""
        encoding = None
        if scope["type"] == "http":
            encoding = header(scope["headers"], b"content-encoding")
        if encoding is None:
            await self._app(scope, receive, send)
            return
        try:
            sent = await whole_body(receive)
            if sent is None:
                return  # the client has disconnected
            content = inflated(sent, encoding, self._most)
            self._held.claim(len(content))
        except AdaNPCError as error:
            await error_response(error)(scope, receive, send)
            return
        except HTTPException as error:
            await framework_response(error)(scope, receive, send)
            return
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in OF_COMPRESSED]
        unread: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive_inflated() -> Message:
            if unread:
                return unread.pop()
            return await receive()

        try:
            await self._app(scope, receive_inflated, send)
        finally:
            self._held.remove(len(content))


async def whole_body(receive: Receive) -> bytes | None:
    """Returns the body of a request; None if the client disconnected before the end."""
    parts: list[bytes] = []
    more: Any = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    if len(parts) == 1:
        return parts[0]
    return b"".join(parts)


def inflated(content: bytes, encoding: str, most: int) -> bytes:
    """Returns the decompressed body of a request.

    Args:
        content: the body as it was sent.
        encoding: the value of the header Content-Encoding; empty if the body is not compressed.
        most: the most bytes in the result, since a few compressed bytes may expand to very many.
    """
    name = encoding.lower()
    if name in ("", "identity"):
        return content
    if name not in ("gzip", "x-gzip", "deflate"):
        raise MediaTypeError(f"a body may be compressed by gzip or deflate, got {encoding[:50]!r}")
    decompressor = zlib.decompressobj(zlib.MAX_WBITS + EITHER_HEADER)
    try:
        result = decompressor.decompress(content, most + 1)
    except zlib.error:
        raise RequestError(f"the body is not {name} data") from None
    if len(result) > most:
        raise TooLargeError(f"a request has at most {most:,} bytes: send several")
    if not decompressor.eof:
        raise RequestError(f"the {name} data in the body end too early")
    if decompressor.unused_data:
        raise RequestError(f"the body is more than one piece of {name} data: compress it in one piece")
    return result
