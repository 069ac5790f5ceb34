"""Logging of each request as a line of JSON: who, what, how long, and how it ended, but never what was sent."""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import sys
import time
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adanpc.serve.errors import internal_error
from adanpc.serve.security import header

if TYPE_CHECKING:
    from adanpc.serve.service import Service

REQUEST_ID = re.compile(r"[\w.:-]{1,100}", re.ASCII)
STANDARD = frozenset(vars(logging.makeLogRecord({})))  # the attributes of every log record
FOR_TERMINALS = "color_message"  # the message of uvicorn again, with escape codes

START = secrets.token_hex(4)  # the first part of the request ids that this process assigns
NUMBERS = itertools.count(1)  # the second part

logger = logging.getLogger("adanpc.serve")


class LogRequests:
    """Middleware that gives each request an id, and logs and counts it once it has been answered.

    Args:
        app: the app that answers requests.
        service: the service whose metrics count them.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._metrics = service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and logs it once it has been answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        request_id = _request_id(scope)
        id_header = (b"x-request-id", request_id.encode())
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # nobody is left to answer
        except Exception:
            logger.exception("an error that nobody foresaw", extra={"request": request_id})
            if status is not None:
                raise  # part of the response has been sent, so all that is left is to cut the connection
            await internal_error()(scope, receive, send_with_id)
        finally:
            self._note(scope, request_id, status, time.perf_counter() - began)

    def _note(self, scope: Scope, request_id: str, status: int | None, seconds: float) -> None:
        route = _route(scope)
        self._metrics.note_request(route, status, seconds)
        if not logger.isEnabledFor(logging.INFO):
            return
        caller = scope.get("state", {}).get("caller")
        extra = {
            "request": request_id,
            "method": scope["method"],
            "route": route,
            "status": status,
            "seconds": round(seconds, 6),
            "caller": getattr(caller, "name", ""),
        }
        logger.info("request", extra=extra)


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON, including everything that was passed as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of JSON."""
        document = {"time": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        for name, value in vars(record).items():
            if name not in STANDARD and name != FOR_TERMINALS:
                document[name] = value
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Sends the logs of the service and uvicorn to standard error, as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("adanpc.serve", "uvicorn"):
        target = logging.getLogger(name)
        target.handlers = [handler]
        target.setLevel(level)
        target.propagate = False


def _route(scope: Scope) -> str:
    """Returns the route of a request; there are only a few, whatever paths clients send."""
    if "route_path" in scope:  # the request bypassed the framework's routing
        return str(scope["route_path"])
    return str(getattr(scope.get("route"), "path", "other"))


def _request_id(scope: Scope) -> str:
    """Returns the id that the client gave to a request if it is safe to log, or else a new one."""
    given = header(scope["headers"], b"x-request-id")
    if given is not None and REQUEST_ID.fullmatch(given):
        return given
    return f"{START}{next(NUMBERS):08x}"
