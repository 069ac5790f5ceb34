"""Batcher: submits many requests to the bank together, and passes their answers on together.

A bank works in a thread of its own, and waking a thread costs more than most of the work for a request. So once nothing
more is waiting to be read, all requests that have arrived are submitted at once. The same goes for all answers of a
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
NOT_SUBMITTED: Future[Part] = Future()
WAIT_SHARE = 0.1  # the share of a round's duration that the next one waits for the callers it answered
LONGEST_WAIT = 0.005  # seconds
QUIET_TURNS = 2  # turns of the event loop without a new request; a request takes as many from a socket to here


@dataclass(eq=False, slots=True)
class Pending:
    """A request that is waiting for its answer."""

    features: Features
    id: str
    pictures: Sequence[bytes | None]  # of its queries; empty if they came as features
    result: asyncio.Future[Any]  # for the caller
    answer: Future[Part] = NOT_SUBMITTED  # from the bank, once the request has been submitted


class Round(NamedTuple):
    """The size and duration of a round of requests that were submitted together."""

    requests: int
    seconds: float


class AnsweredTogether(NamedTuple):
    """Requests that were answered together, whose answers are adjacent in one prediction."""

    requests: list[Pending]
    parts: list[Part]


class Batcher:
    """Takes requests and returns their answers. Only the thread of one event loop may use it.

    Args:
        bank: the bank that answers.
        note: called with requests that were answered together, before any caller is notified; returns the result for
            each caller.
    """

    def __init__(self, bank: DurableBank, note: Callable[[AnsweredTogether], Sequence[object]]) -> None:
        self._bank = bank
        self._note = note
        self._arrived: list[Pending] = []  # not submitted yet
        self._queries = 0  # the number of queries in ``_arrived``
        self._arrived_before = 0  # the length of ``_arrived`` a turn ago
        self._quiet_turns = 0  # since the last request arrived
        self._check_is_due = False  # whether ``_check_for_more`` is scheduled
        self._wait_timer: asyncio.TimerHandle | None = None  # submits what has arrived, more or not
        self._submitted: deque[Pending] = deque()  # not answered yet
        self._round = Round(0, 0.0)  # the latest
        self._round_began = 0.0

    async def ask(self, features: Features, request: str = "", pictures: Sequence[bytes | None] = ()) -> Any:
        """Returns what ``note`` makes of the answer to these queries, which must have the bank's width."""
        check_request(len(features), request)
        loop = asyncio.get_running_loop()
        pending = Pending(features, request, pictures, loop.create_future())
        self._arrived.append(pending)
        self._queries += len(features)
        self._schedule_check(loop)
        return await pending.result

    def _schedule_check(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._arrived and not self._check_is_due and not self._submitted:
            self._check_is_due = True
            loop.call_soon(self._check_for_more, loop)

    def _check_for_more(self, loop: asyncio.AbstractEventLoop) -> None:
        """Submits what has arrived if nothing more is coming, or if it is enough to fill a batch."""
        self._quiet_turns += 1
        if len(self._arrived) > self._arrived_before:
            self._quiet_turns = 0
        self._arrived_before = len(self._arrived)
        fills_a_batch = self._queries >= TOGETHER
        if self._quiet_turns < QUIET_TURNS and not fills_a_batch:
            loop.call_soon(self._check_for_more, loop)
            return
        self._check_is_due = False
        as_many_as_last_time = len(self._arrived) >= self._round.requests
        if fills_a_batch or as_many_as_last_time:
            self._submit(loop)
        elif self._wait_timer is None:
            # Callers that were just answered are likely to ask again, and including them makes a batch little slower.
            seconds = min(WAIT_SHARE * self._round.seconds, LONGEST_WAIT)
            self._wait_timer = loop.call_later(seconds, self._submit, loop)

    def _submit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Submits everything that has arrived to the bank."""
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None
        arrived = self._arrived
        self._arrived = []
        self._queries = 0
        self._arrived_before = 0
        self._quiet_turns = 0

        def answered() -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody is waiting anymore
                loop.call_soon_threadsafe(self._collect_answers, loop)

        try:
            features = torch.from_numpy(np.concatenate([pending.features for pending in arrived]))
            ids = [pending.id for pending in arrived]
            counts = [len(pending.features) for pending in arrived]
            answers = self._bank.submit_all(features, ids, counts, answered)
        except Exception as error:  # for example, because the bank was closed
            for pending in arrived:
                _fail(pending, error)
            return
        for pending, answer in zip(arrived, answers, strict=True):
            pending.answer = answer
        self._submitted.extend(arrived)
        self._round = Round(len(arrived), self._round.seconds)
        self._round_began = loop.time()
        self._collect_answers(loop)  # requests that were refused at once do not call ``answered``

    def _collect_answers(self, loop: asyncio.AbstractEventLoop) -> None:
        """Passes on the answers that have come; they come in the order of the requests."""
        groups: list[AnsweredTogether] = []
        while self._submitted and self._submitted[0].answer.done():
            pending = self._submitted.popleft()
            error = pending.answer.exception()
            if error is not None:
                _fail(pending, error)
                continue
            part = pending.answer.result()
            if not groups or not _follows(part, groups[-1].parts[-1]):
                groups.append(AnsweredTogether([], []))
            groups[-1].requests.append(pending)
            groups[-1].parts.append(part)
        for group in groups:
            self._return_results(group)
        if not self._submitted:
            self._round = Round(self._round.requests, loop.time() - self._round_began)
            self._schedule_check(loop)

    def _return_results(self, group: AnsweredTogether) -> None:
        try:
            results = self._note(group)
        except Exception as error:  # for example, because a picture could not be kept
            for pending in group.requests:
                _fail(pending, error)
            return
        for pending, result in zip(group.requests, results, strict=True):
            if not pending.result.done():
                pending.result.set_result(result)


def _follows(part: Part, before: Part) -> bool:
    """Returns whether a part directly follows another in the same prediction."""
    return part.together is before.together and part.begin == before.end


def _fail(pending: Pending, error: BaseException) -> None:
    if not pending.result.done():  # it is done if the server has given up on the request
        pending.result.set_exception(error)
