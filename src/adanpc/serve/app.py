"""The app: all routes to a bank, behind the checks that every request has to pass."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from adanpc.serve import v1_ask, v1_bank, v1_change, v2
from adanpc.serve.compressed import Inflate
from adanpc.serve.direct import DirectInference
from adanpc.serve.errors import NotFoundError, answer_errors
from adanpc.serve.head import AnswerHead
from adanpc.serve.limits import LimitRequests
from adanpc.serve.logs import LogRequests
from adanpc.serve.security import LOOPBACK, Gate, SafeHeaders
from adanpc.serve.service import Service, ServiceOfApp
from adanpc.serve.tokens import Tokens
from adanpc.store import DurableBank
from adanpc.version import __version__

PAGE = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class App(FastAPI):
    """FastAPI without the work that it does for telemetry on each request, since telemetry is off here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; FastAPI would look through the environment of the process first."""
        await Starlette.__call__(self, scope, receive, send)


def create(
    bank: DurableBank, *, tokens: Tokens | None = None, hosts: Iterable[str] = LOOPBACK, **options: Any
) -> FastAPI:
    """Returns an app that serves a bank, which it does not close; its service is ``app.state.service``.

    Args:
        bank: an open bank.
        tokens: who may do what; without tokens, everybody who calls this host by one of its names may do everything.
        hosts: the names of this host.
        **options: other arguments of ``Service``: encoder, thumbnails, image_of_key, limits, folder.
    """
    service = Service(bank, **options)
    app = App(
        title="adanpc",
        version=__version__,
        docs_url=None,  # this page and the next load files from other hosts
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    answer_errors(app)
    for module in (v2, v1_ask, v1_bank, v1_change):  # v2 first: programs ask more often than people
        app.include_router(module.routes)
    app.add_api_route("/metrics", _metrics, tags=["look"])
    _add_page(app)
    # The middleware that is added last sees a request first.
    app.add_middleware(AnswerHead)
    app.add_middleware(DirectInference, service=service)
    app.add_middleware(Inflate, most=service.limits.body, held=service.held)
    app.add_middleware(LimitRequests, limits=service.limits, held=service.held)
    app.add_middleware(Gate, tokens=tokens, hosts=hosts)
    app.add_middleware(LogRequests, service=service)
    app.add_middleware(SafeHeaders)
    return app


async def _metrics(service: ServiceOfApp) -> Response:
    """Numbers for Prometheus."""
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI) -> None:
    """Serves the expert's page from memory, so that no request path ever reaches the file system."""
    files = {path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in MEDIA_TYPES}

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        """The page."""
        return Response(files["index.html"], media_type=MEDIA_TYPES[".html"])

    @app.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        """A part of the page."""
        if name not in files:
            raise NotFoundError(f"the page has no file {name[:50]!r}")
        return Response(files[name], media_type=MEDIA_TYPES[Path(name).suffix])
