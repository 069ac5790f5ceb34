"""Desk: hands the questions of many requests to the bank together, and brings its answers back together.

A bank works in a thread of its own, and waking a thread costs more than most of the work for a request. So once nothing
more is waiting to be read, all questions that have arrived are handed over at once. The same goes for all answers of a
commit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adanpc.store.durable import TOGETHER, DurableBank, Part, check_request

Features = NDArray[np.float32]  # (B, D)
NOT_YET: Future[Part] = Future()
PATIENCE_SHARE = 0.1  # the share of a round's duration that the next one waits for the callers it answered
MOST_PATIENCE = 0.005  # seconds
QUIET_TURNS = 2  # turns of the event loop without a new question; a request takes as many from a socket to here


@dataclass(eq=False, slots=True)
class Asked:
    """A request that is waiting for its answer."""

    features: Features
    request: str  # its id
    pictures: Sequence[bytes | None]  # of its queries; empty if they came as features
    waiting: asyncio.Future[Any]
    answer: Future[Part] = NOT_YET  # from the bank, once the question has been handed over


class Round(NamedTuple):
    """The size and duration of a round of requests that were handed to the bank together."""

    requests: int
    seconds: float


class Given(NamedTuple):
    """Requests that were answered together, whose answers are adjacent in one prediction."""

    asked: list[Asked]
    parts: list[Part]


class Desk:
    """Takes questions and returns answers. Only the thread of one event loop may use it.

    Args:
        bank: the bank that answers.
        note: called with requests that were answered together, before any caller is notified; returns what each caller
            is told.
    """

    def __init__(self, bank: DurableBank, note: Callable[[Given], Sequence[object]]) -> None:
        self._bank = bank
        self._note = note
        self._arrived: list[Asked] = []  # not handed over yet
        self._queries = 0  # the number of queries in ``_arrived``
        self._seen = 0  # the length of ``_arrived`` a turn ago
        self._quiet = 0  # turns since the last request arrived
        self._looking = False  # whether ``_look`` is scheduled
        self._patience: asyncio.TimerHandle | None = None  # ends the wait for more
        self._handed: deque[Asked] = deque()  # handed to the bank and not answered yet
        self._round = Round(0, 0.0)  # the latest
        self._began = 0.0  # when the latest round began

    async def ask(self, features: Features, request: str = "", pictures: Sequence[bytes | None] = ()) -> Any:
        """Returns what ``note`` makes of the answer to these queries, which must have the bank's width."""
        check_request(len(features), request)
        loop = asyncio.get_running_loop()
        asked = Asked(features, request, pictures, loop.create_future())
        self._arrived.append(asked)
        self._queries += len(features)
        self._look_soon(loop)
        return await asked.waiting

    def _look_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._arrived and not self._looking and not self._handed:
            self._looking = True
            loop.call_soon(self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hands over what has arrived if nothing more is coming, or if it is enough to fill a batch."""
        self._quiet += 1
        if len(self._arrived) > self._seen:
            self._quiet = 0
        self._seen = len(self._arrived)
        enough = self._queries >= TOGETHER
        if self._quiet < QUIET_TURNS and not enough:
            loop.call_soon(self._look, loop)
            return
        self._looking = False
        if enough or len(self._arrived) >= self._round.requests:
            self._hand_over(loop)
        elif self._patience is None:
            # Callers that were just answered are likely to ask again, and including them makes a batch little slower.
            seconds = min(PATIENCE_SHARE * self._round.seconds, MOST_PATIENCE)
            self._patience = loop.call_later(seconds, self._hand_over, loop)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Submits everything that has arrived to the bank."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        arrived = self._arrived
        self._arrived = []
        self._queries = 0
        self._seen = 0
        self._quiet = 0

        def answered() -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody is waiting anymore
                loop.call_soon_threadsafe(self._bring, loop)

        try:
            features = torch.from_numpy(np.concatenate([asked.features for asked in arrived]))
            requests = [asked.request for asked in arrived]
            counts = [len(asked.features) for asked in arrived]
            answers = self._bank.submit_all(features, requests, counts, answered)
        except Exception as error:  # for example, because the bank was closed
            for asked in arrived:
                _fail(asked, error)
            return
        for asked, answer in zip(arrived, answers, strict=True):
            asked.answer = answer
        self._handed.extend(arrived)
        self._round = Round(len(arrived), self._round.seconds)
        self._began = loop.time()
        self._bring(loop)  # requests that were refused at once do not call ``answered``

    def _bring(self, loop: asyncio.AbstractEventLoop) -> None:
        """Passes on the answers that have come; they come in the order of the questions."""
        groups: list[Given] = []
        while self._handed and self._handed[0].answer.done():
            asked = self._handed.popleft()
            error = asked.answer.exception()
            if error is not None:
                _fail(asked, error)
                continue
            part = asked.answer.result()
            if not groups or not _follows(part, groups[-1].parts[-1]):
                groups.append(Given([], []))
            groups[-1].asked.append(asked)
            groups[-1].parts.append(part)
        for group in groups:
            self._give(group)
        if not self._handed:
            self._round = Round(self._round.requests, loop.time() - self._began)
            self._look_soon(loop)

    def _give(self, group: Given) -> None:
        try:
            heard = self._note(group)
        except Exception as error:  # for example, because a picture could not be kept
            for asked in group.asked:
                _fail(asked, error)
            return
        for asked, answer in zip(group.asked, heard, strict=True):
            if not asked.waiting.done():
                asked.waiting.set_result(answer)


def _follows(part: Part, before: Part) -> bool:
    """Returns whether a part directly follows another in the same prediction."""
    return part.together is before.together and part.begin == before.end


def _fail(asked: Asked, error: BaseException) -> None:
    if not asked.waiting.done():  # it is done if the server has given up on the request
        asked.waiting.set_exception(error)
