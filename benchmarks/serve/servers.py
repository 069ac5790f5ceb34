"""The servers that are compared, each in a process of its own: ``python -m benchmarks.serve.servers KIND FOLDER``.

A server prints its address, and ends when its standard input does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response

from adanpc.core import AdaNPC, Change, State
from adanpc.serve import Limits, create, listening
from adanpc.serve.running import GracefulServer, settle
from adanpc.store import Answered, DurableBank, SqliteLog
from adanpc.store.recovery import recovered

KINDS = ("durable", "memory", "echo")
LIMITS = Limits(rate=1e6, burst=1e6)  # the clients are meant to be many


class MemoryLog:
    """A log that keeps nothing: what a bank would be without durability."""

    notices: Sequence[str] = ()

    def __init__(self, classifier: AdaNPC, recipe: dict[str, str]) -> None:
        self._classifier = classifier
        self._recipe = recipe
        self._answers: dict[str, bytes] = {}
        self.start = classifier.position
        self.position = classifier.position

    def append(self, change: Change | None, answers: Sequence[Answered] = ()) -> int:
        for answered in answers:
            self._answers[answered.request] = answered.answer
        if change is not None:
            self.position += 1
        return self.position

    def answer(self, request: str) -> bytes | None:
        return self._answers.get(request)

    def read(self, after: int) -> Iterator[Change]:
        return iter(())

    def snapshot(self, state: State, recipe: dict[str, str]) -> None:
        pass

    def snapshots(self) -> list[int]:
        return [self.start]

    def load(self, position: int) -> tuple[AdaNPC, dict[str, str]]:
        return self._classifier, self._recipe

    def compact(self, keep: int) -> None:
        pass

    def close(self) -> None:
        pass


def bank_of(kind: str, folder: Path) -> DurableBank:
    """The bank in a folder, with its log there or without any."""
    if kind == "durable":
        return DurableBank.open(folder)
    log = SqliteLog(folder, read_only=True)
    found = recovered(log)
    log.close()
    return DurableBank(MemoryLog(found.classifier, found.recipe))


def echo() -> FastAPI:
    """The least that FastAPI can do with a body: give it back, as bytes or as JSON."""
    app = FastAPI()

    @app.post("/binary")
    async def as_bytes(request: Request) -> Response:
        return Response(await request.body(), media_type="application/octet-stream")

    @app.post("/json")
    async def as_json(body: dict[str, Any]) -> dict[str, Any]:
        return body

    return app


def app_of(kind: str, folder: Path) -> FastAPI:
    """The app that is measured."""
    if kind == "echo":
        return echo()
    return create(bank_of(kind, folder), limits=LIMITS)


def main() -> None:
    """Serves until there is nothing more to read."""
    kind, folder = sys.argv[1:]
    torch.set_num_threads(1)
    app = app_of(kind, Path(folder))
    opened = listening("127.0.0.1", 0)
    server: uvicorn.Server
    rows = 0
    if kind == "echo":
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, proxy_headers=False, ws="none"))
    else:
        server = GracefulServer(app)
        rows = len(app.state.service.bank.contents)
    settle(rows)  # as a service does

    def wait_for_the_end() -> None:
        sys.stdin.read()
        server.should_exit = True

    Thread(target=wait_for_the_end, daemon=True).start()
    print(opened.getsockname()[1], flush=True)
    server.run([opened])
    if kind != "echo":
        app.state.service.bank.close()


if __name__ == "__main__":
    main()
