"""Errors of requests, and the one format in which every error is sent: a sentence and a code."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from adanpc.errors import AdaNPCError

JSON = "application/json"
UNPROCESSABLE = 422  # for values that can be parsed but not used
STATUS_OF_CODE = {  # errors of the library that are not caused by an invalid value
    "unknown-row": 404,
    "empty-bank": 409,
    "bad-log": 503,
    "log-not-written": 503,
    "bad-tokens": 503,
    "bank-in-use": 503,
    "unavailable": 503,
}
ALTERNATIVES = ("int", "str", "list[list[float]]", "list[float]")  # what pydantic calls the kinds of value of one field
CODE_OF_STATUS = {
    400: "bad-request",
    404: "not-found",
    405: "wrong-method",
    408: "too-slow",
    413: "too-large",
    429: "too-many-requests",
}

logger = logging.getLogger("adanpc.serve")


class RequestError(AdaNPCError):
    """A request cannot be read."""

    code = "bad-request"
    status: ClassVar[int] = 400
    headers: ClassVar[dict[str, str]] = {}


class AmbiguousError(RequestError):
    """A request states its length twice, so a proxy and the service may disagree on where the next one begins."""

    headers: ClassVar[dict[str, str]] = {"Connection": "close"}


class UnauthorizedError(RequestError):
    """A request has no known token."""

    code = "unauthorized"
    status = 401
    headers: ClassVar[dict[str, str]] = {"WWW-Authenticate": "Bearer"}


class ForbiddenError(RequestError):
    """The caller may not make this request, or it comes from a place from which requests are not allowed."""

    code = "forbidden"
    status = 403


class NotFoundError(RequestError):
    """Something that the request names does not exist."""

    code = "not-found"
    status = 404


class TooSlowError(RequestError):
    """A request did not come in time."""

    code = "too-slow"
    status = 408
    headers: ClassVar[dict[str, str]] = {"Connection": "close"}


class ConflictError(RequestError):
    """A change conflicts with what has happened since."""

    code = "conflict"
    status = 409


class TooLargeError(RequestError):
    """A request has more bytes, pixels or queries than allowed."""

    code = "too-large"
    status = 413


class MediaTypeError(RequestError):
    """The body of a request has an unsupported type."""

    code = "unsupported-type"
    status = 415


class TooManyError(RequestError):
    """There are more requests than this caller may send, or than are answered at the same time."""

    code = "too-many-requests"
    status = 429
    headers: ClassVar[dict[str, str]] = {"Retry-After": "1"}


def status_of(error: AdaNPCError) -> int:
    """Returns the HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    return STATUS_OF_CODE.get(error.code, UNPROCESSABLE)


def error_response(error: AdaNPCError) -> JSONResponse:
    """Returns the response to an error."""
    headers = {}
    if isinstance(error, RequestError):
        headers = error.headers
    return _response(status_of(error), str(error), error.code, headers)


def raw_response(error: RequestError) -> bytes:
    """Returns the response to an error as the bytes of HTTP, for a request that no app has seen; it is the last one."""
    response = error_response(error)
    response.headers["Connection"] = "close"
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)


def answer_errors(app: FastAPI) -> None:
    """Makes an app send all errors in the same format."""
    app.add_exception_handler(AdaNPCError, _of_library)
    app.add_exception_handler(HTTPException, _of_framework)
    app.add_exception_handler(RequestValidationError, _of_validation)


def _of_library(request: Request, error: Any) -> JSONResponse:
    return error_response(error)


def _of_framework(request: Request, error: Any) -> JSONResponse:
    return framework_response(error)


def framework_response(error: HTTPException) -> JSONResponse:
    """Returns the response to an error of the framework."""
    code = CODE_OF_STATUS.get(error.status_code, "bad-request")
    return _response(error.status_code, str(error.detail), code, error.headers)


def _of_validation(request: Request, error: Any) -> JSONResponse:
    """Returns what the first invalid value must be; the value itself may be large, so it is not repeated."""
    first = error.errors()[0]
    kind = request.headers.get("content-type", "")
    media_type = kind.partition(";")[0].strip().lower()
    if first["loc"] == ("body",) and media_type != JSON:
        return error_response(MediaTypeError(f"the body must be {JSON}, got {kind[:50]!r}"))
    if first["type"] == "json_invalid":
        return _response(UNPROCESSABLE, f"the body is not valid JSON: {first['ctx']['error']}", AdaNPCError.code)
    place = ".".join(str(part) for part in first["loc"] if part not in ALTERNATIVES)
    if not place:
        place = "body"
    return _response(UNPROCESSABLE, f"{place}: {first['msg']}", AdaNPCError.code)


def internal_error() -> JSONResponse:
    """Returns the response to an unexpected error. The error has been logged; its text might reveal too much."""
    return _response(500, "something went wrong inside the service: see its log", "internal")


def _response(status: int, sentence: str, code: str, headers: Any = None) -> JSONResponse:
    return JSONResponse({"error": sentence, "code": code}, status, headers)
