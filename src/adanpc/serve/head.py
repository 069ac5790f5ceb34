"""Head: answers a HEAD request as the same GET request, without the body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class AnswerHead:
    """Middleware that answers HEAD wherever GET is answered, so that no route has to.

    Args:
        app: the app that answers GET.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, as GET if it is HEAD."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        ended = False

        async def send_without_body(message: Message) -> None:
            nonlocal ended
            if ended:
                return  # the rest of a body, such as events, which go on until they find the request answered
            if message["type"] == "http.response.body":
                ended = True
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        scope["method"] = "GET"
        try:
            await self._app(scope, receive, send_without_body)
        finally:
            scope["method"] = "HEAD"  # for the log
