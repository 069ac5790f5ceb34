"""DurableBank: a classifier that survives its process. This module alone decides what must be on disk before what.

Every request is proposed, logged, applied and answered, in this order. So nobody sees the effect of a change that a
crash could undo, and an answer is given only once everything learned from its query is on disk.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from reprlib import repr as brief
from threading import Condition, Lock, Thread
from types import TracebackType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from adanpc import require
from adanpc.core import AdaNPC, Change, Contents, Prediction
from adanpc.core.changes import Append, Rollback
from adanpc.core.codec import decode, encode
from adanpc.core.guard import Signs, learned_from
from adanpc.core.safe import Question
from adanpc.errors import AdaNPCError, ChangeError, UnavailableError
from adanpc.index import check_features
from adanpc.models import Wrapped
from adanpc.store.answers import decode_answer, encode_answer, part_of
from adanpc.store.check import ContentsError
from adanpc.store.file import Location, check_keepable, write_state
from adanpc.store.log import Answered, Log, LogWriteError
from adanpc.store.recovery import recovered
from adanpc.store.sqlite import SqliteLog

TOGETHER = 128  # the most queries from different requests that are answered and logged together
MOST_QUERIES = 2048  # the most queries in one request: they become one change and are compared with each other
LONGEST_REQUEST = 400  # the most characters in a request id
SNAPSHOT_EVERY = 5000  # changes between snapshots, and so the most that opening a bank has to replay


class Part(NamedTuple):
    """The answer to one request: a range of the prediction that it shares with requests answered at the same time."""

    together: Prediction  # the answers to all of these requests
    begin: int  # where the queries of this request begin in it
    end: int
    again: bool = False  # whether the answer was given before, so that nothing was learned this time

    @property
    def prediction(self) -> Prediction:
        """The answer to this request alone, in tensors of its own."""
        return part_of(self.together, slice(self.begin, self.end))


@dataclass(eq=False)
class Request:
    """The queries that one caller sends together and is waiting for the answer to."""

    features: Tensor  # (B, D), checked
    domain: int
    keys: Tensor | None  # (B,)
    id: str  # empty if the caller gave none
    notify: Callable[[], object] | None = None  # called when this and all requests answered with it have answers
    answer: Future[Any] = field(default_factory=Future)  # a Part if ``notify`` is given, else a Prediction

    def resolve(self, part: Part) -> None:
        """Resolves the future with the answer."""
        if self.notify is None:
            self.answer.set_result(part.prediction)
        else:
            self.answer.set_result(part)


class Applied(NamedTuple):
    """A change that was applied."""

    change: Change  # as it is in the log
    position: int  # of the bank right after it
    ids: range  # of the rows that it appended


@dataclass(eq=False)
class Action:
    """A change that a caller is waiting for; ``make`` is called when its turn comes."""

    make: Callable[[], Change]
    applied: Future[Applied] = field(default_factory=Future)


@require.names_its_arguments
class DurableBank:
    """A classifier that writes every change to disk before anybody sees its effect. Any number of threads may use it.

    A single writer thread carries out all requests. Those that arrive while it waits for the disk are answered together
    afterward and share one commit. They get the same answers as if they had been handled one after another.

    Args:
        log: where changes are kept; ``create`` and ``open`` make one in a folder. It is closed with the bank.
        snapshot_every: the number of changes after which a snapshot is taken in the background.
    """

    def __init__(self, log: Log, *, snapshot_every: int = SNAPSHOT_EVERY) -> None:
        self._snapshot_every = require.whole("snapshot_every", snapshot_every, least=1)
        self._log = log
        recovered_log = recovered(log)
        self._classifier = recovered_log.classifier
        self.recipe = recovered_log.recipe
        self._notices = recovered_log.notices
        self._process = os.getpid()
        self._snapshot_position = recovered_log.snapshot  # the position of the newest snapshot
        self._snapshot_tried = recovered_log.snapshot  # the position at which the last attempt to take one began
        self._snapshot_flaw = ""  # why the last attempt failed
        self._snapshot_lock = Lock()
        self._snapshot_thread: Thread | None = None
        self._failure = ""  # why nothing more can be written
        self._closed = False
        self._waiting: deque[Request | Action] = deque()
        self._arrived = Condition()
        self._writer = Thread(target=self._write, name="adanpc-writer", daemon=True)
        self._writer.start()

    @classmethod
    @require.names_its_arguments
    def create(
        cls,
        folder: Location,
        thing: AdaNPC | Wrapped,
        recipe: dict[str, str] | None = None,
        *,
        snapshot_every: int = SNAPSHOT_EVERY,
    ) -> DurableBank:
        """Creates a durable bank in a new folder, starting from the current state of a classifier.

        Args:
            folder: a folder that does not exist yet, or is empty.
            thing: the classifier, or a wrapped model, whose recipe is kept as well.
            recipe: how the features of a classifier are made, if known.
            snapshot_every: see the class.
        """
        require.whole("snapshot_every", snapshot_every, least=1)  # checked before the folder is created
        if isinstance(thing, Wrapped):
            return cls.create(folder, thing.classifier, thing.recipe, snapshot_every=snapshot_every)
        if not isinstance(thing, AdaNPC):
            kind = type(thing).__name__
            raise LogWriteError(f"{folder} was not created: expected an AdaNPC or a wrapped model, got {kind}")
        try:
            check_keepable(thing)
        except ContentsError as flaw:
            raise LogWriteError(f"{folder} was not created: {flaw}; {flaw.remedy}") from None
        return cls(SqliteLog.create(folder, thing.state(codes=True), recipe or {}), snapshot_every=snapshot_every)

    @classmethod
    @require.names_its_arguments
    def open(cls, folder: Location, *, snapshot_every: int = SNAPSHOT_EVERY) -> DurableBank:
        """Opens the durable bank in a folder, in the state after the last acknowledged change."""
        log = SqliteLog(folder)
        try:
            return cls(log, snapshot_every=snapshot_every)
        except BaseException:
            log.close()
            raise

    def __repr__(self) -> str:
        return f"<DurableBank at position {self.position}: {self._classifier!r}>"

    def __enter__(self) -> DurableBank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # State

    @property
    def contents(self) -> Contents:
        """Everything that the bank holds now, as a value that later changes do not affect."""
        return self._classifier.bank.contents

    @property
    def settings(self) -> Any:
        """How the classifier votes and which queries it admits; see ``AdaNPC.settings``."""
        return self._classifier.settings

    @property
    def preset(self) -> str:
        """The name of the rule by which the classifier learns."""
        return self._classifier.preset

    @property
    def position(self) -> int:
        """The number of changes that have been applied."""
        return self._classifier.position

    @property
    def log(self) -> Log:
        """The log that keeps the changes. Use it for reading only."""
        return self._log

    @property
    def notices(self) -> list[str]:
        """Damage that was found and failures that did no harm, one sentence each."""
        notices = [*self._log.notices, *self._notices]
        if self._snapshot_flaw:
            notices.append(f"no snapshot was taken: {self._snapshot_flaw}")
        return notices

    @property
    def waiting(self) -> int:
        """The number of requests that are waiting for their turn."""
        return len(self._waiting)

    @property
    def ready(self) -> bool:
        """Whether the bank accepts changes: it is open, and its memory and its log have not diverged."""
        return not self._closed and not self._failure

    def digest(self) -> str:
        """Returns a hash of everything that determines later answers; see ``AdaNPC.digest``."""
        return self._classifier.digest()

    def signs(self) -> Signs:
        """Returns what the guard of the preset "safe" sees in the stream; see ``AdaNPC.signs``."""
        return self._classifier.signs()

    def last_trusted(self) -> int | None:
        """Returns the position at which adapted answers were last trusted; None if there is none in the log.

        ``rollback`` to this position forgets everything that was learned since. It also undoes what people did since.
        """
        trusted = self.signs().trusted
        if not trusted:
            return None
        start = self.log.start
        learned = learned_from(self.at(start).bank.contents.statistics.stream)
        found = None
        if learned <= trusted:
            found = start
        for position, change in enumerate(self.log.read(start), start + 1):
            if isinstance(change, Rollback) or (isinstance(change, Append) and change.stream is not None):
                learned = learned_from(change.stream)
            if learned <= trusted:
                found = position
        return found

    # Asking

    def predict(self, features: Tensor, *, without: Iterable[int] = ()) -> Prediction:
        """Returns the answer that each query (B, D) would get if it came next; changes nothing and never waits.

        Args:
            features: the features of the queries.
            without: ids of rows that may not vote, to preview the effect of vetoing them.
        """
        checked = check_features(features, self.contents.settings.dim)
        try:
            rows = torch.tensor(list(without), dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):
            raise AdaNPCError(f"without must be the ids of rows, such as [3, 7], got {brief(without)}") from None
        exclude = None
        if len(rows):
            exclude = rows.repeat(len(checked), 1)
        return self._classifier.predict(checked, exclude=exclude)

    def ask(self, features: Tensor, *, most: int = 10) -> list[Question]:
        """Returns those queries (B, D) whose labels would say the most about whether to adapt; see ``AdaNPC.ask``."""
        return self._classifier.ask(features, most=most)

    def classify(self, features: Tensor, *, domain: int = -1, keys: Any = None, request: str = "") -> Prediction:
        """Answers queries (B, D) in order, once what is learned from them is on disk; see ``AdaNPC.step``.

        Args:
            features: the features of the queries. They become a single change, so either all rows that are admitted
                join the bank or none does.
            domain: the domain of all queries, stored with the rows that join; -1 means unknown.
            keys: (B,) numbers of your own for the queries, stored with the rows that join.
            request: an id of your own. A request whose id was answered before gets the same answer, and nothing is
                learned again; the newest 10,000 answers are kept, up to 64 MiB. Without an id, every call counts.
        """
        return self.submit(features, domain=domain, keys=keys, request=request).result()

    def submit(self, features: Tensor, *, domain: int = -1, keys: Any = None, request: str = "") -> Future[Prediction]:
        """Returns a future of what ``classify`` answers, for callers that do something else in the meantime."""
        checked = check_features(features, self.contents.settings.dim)
        check_request(len(checked), request)
        domain = self._classifier.checked_domain(domain)
        numbers = self._classifier.checked_keys(keys, len(checked))
        waiting = Request(checked.clone(), domain, numbers, request)  # the caller may reuse its own tensor
        self._enqueue([waiting])
        return waiting.answer

    def submit_all(
        self, features: Tensor, requests: Sequence[str], counts: Sequence[int], answered: Callable[[], object]
    ) -> list[Future[Part]]:
        """Returns futures of what ``classify`` answers to several requests in sequence, for servers with many clients.

        Args:
            features: (N, D) the features of all requests; do not change them until they are answered.
            requests: the id of each request; see ``classify``.
            counts: the number of queries in each request.
            answered: called by another thread whenever some of the requests have been answered. It must return at once.
        """
        waiting = []
        for part, request_id in zip(features.split(list(counts)), requests, strict=True):
            waiting.append(Request(part, -1, None, request_id, notify=answered))
        valid = self._valid(features, waiting)
        self._enqueue(valid)
        return [request.answer for request in waiting]

    def _valid(self, features: Tensor, requests: list[Request]) -> list[Request]:
        """Returns the requests that can be answered, and fails each of the others with its own error."""
        dim = self.contents.settings.dim
        try:
            check_features(features, dim)
        except AdaNPCError:
            pass  # at least one request is invalid; it must not fail the others
        else:
            return requests
        valid = []
        for request in requests:
            try:
                check_features(request.features, dim)
            except AdaNPCError as error:
                request.answer.set_exception(error)
            else:
                valid.append(request)
        return valid

    # Changing

    def apply(self, change: Change) -> range:
        """Applies a change once it is on disk, and returns the ids of the rows that it appended.

        A change without a time is given the current time.
        """
        as_logged = _as_logged(change)
        return self._applied(lambda: as_logged).ids

    def decide(self, make: Callable[[Contents], Change]) -> Applied:
        """Applies a change that depends on what the bank holds. No other change comes in between.

        Args:
            make: called with the contents when its turn comes; returns the change. If it raises, nothing happens, and
                the caller gets the error.
        """
        return self._applied(lambda: _as_logged(make(self.contents)))

    def rollback(self, to: int, *, who: str = "", why: str = "", when: float | None = None) -> int:
        """Returns the bank to an earlier state by one more change, and returns the position after that change.

        Use ``at`` to see the outcome beforehand.

        Args:
            to: a position, ``log.start`` or later. Deleted rows stay deleted, and ids are never reused.
            who, why, when: as in every change.
        """
        to = require.whole("to", to, least=self._log.start, most=self._log.position)
        earlier = self.at(to).bank.contents
        made = self._applied(lambda: _dated(self._classifier.rollback(earlier, who=who, why=why, when=when)))
        return made.position

    def _applied(self, make: Callable[[], Change]) -> Applied:
        """Applies the change that ``make`` returns when its turn comes."""
        action = Action(make)
        self._enqueue([action])
        return action.applied.result()

    def at(self, position: int) -> AdaNPC:
        """Returns the classifier as it was at an earlier position: a separate one, in memory only."""
        return recovered(self._log, position).classifier

    # Saving and closing

    def save(self, path: Location) -> None:
        """Writes the current state of the bank to a single file that ``adanpc.load`` reads."""
        write_state(self._classifier.state(codes=True), self.recipe, path)

    def snapshot(self) -> None:
        """Writes a snapshot of the whole bank, so that the next start need not replay the changes before it."""
        with self._snapshot_lock:
            state = self._classifier.state(codes=True)
            position = state["document"]["position"]
            if position > self._snapshot_position:
                self._log.snapshot(state, self.recipe)
                self._snapshot_position = position
                self._snapshot_flaw = ""

    def compact(self, *, keep: int = 2) -> None:
        """Discards all but the newest snapshots and changes; positions before them can no longer be returned to.

        Args:
            keep: the number of snapshots to keep; one is taken first. With 1, nothing is left of deleted rows.
        """
        self.snapshot()
        with self._snapshot_lock:
            self._log.compact(keep)

    def close(self) -> None:
        """Answers all pending requests, takes a snapshot, and lets others open the bank.

        Does nothing in a fork of the process that opened the bank.
        """
        if os.getpid() != self._process:
            return
        with self._arrived:
            if self._closed:
                return
            self._closed = True
            self._arrived.notify()
        self._writer.join()
        if self._snapshot_thread is not None:
            self._snapshot_thread.join()
        if not self._failure:
            self._try_snapshot()
        self._log.close()

    # The writer

    def _enqueue(self, jobs: Sequence[Request | Action]) -> None:
        if os.getpid() != self._process:  # the writer thread does not survive a fork, and SQLite must not cross one
            raise UnavailableError(
                "the bank was opened by another process, of which this is a fork: open it in one of them alone"
            )
        with self._arrived:
            if self._closed:
                raise UnavailableError("the bank is closed: open it again")
            self._waiting.extend(jobs)
            self._arrived.notify()

    def _write(self) -> None:
        """Carries out jobs one after another, several requests at a time, until the bank is closed."""
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                jobs = self._next_jobs()
            if isinstance(jobs, Action):
                self._act(jobs)
            else:
                self._answer(jobs)
                _notify(jobs)
            self._snapshot_if_due()

    def _next_jobs(self) -> Action | list[Request]:
        """Removes and returns the next action, or the next requests that can be answered together."""
        first = self._waiting.popleft()
        if isinstance(first, Action):
            return first
        requests = [first]
        queries = len(first.features)
        ids = {first.id}
        while self._waiting:
            following = self._waiting[0]
            if isinstance(following, Action):
                break
            if following.id and following.id in ids:
                break  # a repeated request must find the answer that was kept for the first
            queries += len(following.features)
            if queries > TOGETHER:
                break
            self._waiting.popleft()
            requests.append(following)
            ids.add(following.id)
        return requests

    def _act(self, action: Action) -> None:
        try:
            change = action.make()
            ids = self._apply(change, [])
        except BaseException as error:
            action.applied.set_exception(error)
        else:
            action.applied.set_result(Applied(change, self.position, ids))

    def _answer(self, requests: list[Request]) -> None:
        """Resolves every request with the answer that was kept for its id, a new answer, or an error."""
        new = []
        for request in requests:
            if not request.answer.set_running_or_notify_cancel():
                continue
            try:
                kept = self._kept_answer(request)
            except BaseException as error:
                request.answer.set_exception(error)
                continue
            if kept is None:
                new.append(request)
            else:
                request.resolve(kept)
        if new:
            self._answer_new(new)

    def _kept_answer(self, request: Request) -> Part | None:
        """Returns the answer that was given before to a request with this id; None if none is kept."""
        if not request.id:
            return None
        data = self._log.answer(request.id)
        if data is None:
            return None
        prediction = decode_answer(data)
        if len(prediction.probs) != len(request.features):
            raise AdaNPCError(
                f"a request with this id was answered before: it had {len(prediction.probs)} queries, and this one has "
                f"{len(request.features)}; give every request an id of its own"
            )
        return Part(prediction, 0, len(prediction.probs), again=True)

    def _answer_new(self, requests: list[Request]) -> None:
        """Resolves every request with a new answer or an error."""
        try:
            answers = self._learn(requests)
        except BaseException as error:
            if len(requests) == 1:
                requests[0].answer.set_exception(error)
                return
            for request in requests:  # one at a time, so that no request fails because of another
                self._answer_new([request])
        else:
            for request, answer in zip(requests, answers, strict=True):
                request.resolve(answer)

    def _learn(self, requests: Sequence[Request]) -> list[Part]:
        """Returns the answers to requests in sequence, once everything learned from them is logged and applied."""
        features = torch.cat([request.features for request in requests])
        prediction, change = self._classifier.propose(features, keys=_keys_of(requests))
        prediction = prediction.settled(self.contents.next_id)  # only this thread assigns ids
        answers = []
        kept = []
        begin = 0
        for request in requests:
            end = begin + len(request.features)
            answer = Part(prediction, begin, end)
            answers.append(answer)
            if request.id:
                kept.append(Answered(request.id, encode_answer(answer.prediction)))
            begin = end
        if change is not None:
            joined = prediction.joined.cpu() >= 0
            change = _dated(replace(change, domain=_domains_of(requests)[joined]))
            self._apply(decode(encode(change)), kept)
        elif kept:
            self._check_state()
            self._log.append(None, kept)
        return answers

    def _apply(self, change: Change, answers: Sequence[Answered]) -> range:
        """Logs a change together with its answers, then applies it and returns the ids of the appended rows."""
        self._check_state()
        logged = []

        def write_to_log(prepared: Change) -> None:
            logged.append(self._log.append(prepared, answers))

        try:
            return self._classifier.apply(change, log=write_to_log)
        except BaseException as error:
            if logged:  # for example, if memory ran out in the very last step
                self._failure = f"the bank lags behind its log ({error}): open it again"
            raise

    def _check_state(self) -> None:
        """Raises a LogWriteError unless memory and log are at the same position."""
        if self._failure:
            raise LogWriteError(self._failure)
        if self.position != self._log.position:
            raise LogWriteError(
                f"the bank is at position {self.position} and its log at {self._log.position}, since it was changed "
                "outside of DurableBank: open it again"
            )

    def _snapshot_if_due(self) -> None:
        last = max(self._snapshot_position, self._snapshot_tried)
        due = self.position - last >= self._snapshot_every
        busy = self._snapshot_thread is not None and self._snapshot_thread.is_alive()
        if due and not busy:
            self._snapshot_tried = self.position  # a failed attempt is not repeated at once: it costs time and space
            thread = Thread(target=self._try_snapshot, name="adanpc-snapshot", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there are too many threads; waiting callers must not be affected
                self._snapshot_flaw = str(error)
            else:
                self._snapshot_thread = thread

    def _try_snapshot(self) -> None:
        """Takes a snapshot if possible; a failure loses nothing, because the log has every change."""
        try:
            self.snapshot()
        except (AdaNPCError, OSError) as error:
            self._snapshot_flaw = str(error)


def check_request(queries: int, request: str) -> None:
    """Raises an error if a request has too many queries, or an id that is too long or not a string."""
    if queries > MOST_QUERIES:
        raise AdaNPCError(f"a request holds at most {MOST_QUERIES:,} queries, got {queries:,}: cut it into several")
    if len(require.text("request", request)) > LONGEST_REQUEST:
        raise AdaNPCError(f"request must have at most {LONGEST_REQUEST} characters, got {len(request)}")


def _notify(requests: Sequence[Request]) -> None:
    """Notifies each caller that sent any of these requests exactly once."""
    callers = {request.notify for request in requests if request.notify is not None}
    for notify in callers:
        notify()


def _as_logged(change: Any) -> Change:
    """Returns the change with its time, exactly as it will be read back from the log; raises if it is not a change."""
    if not isinstance(change, Change):
        raise ChangeError(f"{type(change).__name__} is not a change")
    return decode(encode(_dated(change)))


def _dated(change: Any) -> Any:
    """Returns the change with the current time, unless it has a time already."""
    if change.when is not None:
        return change
    return replace(change, when=time.time())


def _keys_of(requests: Sequence[Request]) -> Tensor | None:
    """Returns the keys of all queries, with -1 for queries without one, or None if no query has a key."""
    if all(request.keys is None for request in requests):
        return None
    parts = []
    for request in requests:
        keys = request.keys
        if keys is None:
            keys = torch.full((len(request.features),), -1)
        parts.append(keys.cpu().to(torch.int64))
    return torch.cat(parts)


def _domains_of(requests: Sequence[Request]) -> Tensor:
    """Returns the domain of each query."""
    domains = [request.domain for request in requests]
    counts = [len(request.features) for request in requests]
    return torch.from_numpy(numpy.repeat(numpy.array(domains, numpy.int64), counts))
