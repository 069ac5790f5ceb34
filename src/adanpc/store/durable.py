"""DurableBank: a classifier that outlives its process. The one place that decides what is durable before what.

Whatever is asked of it is proposed, logged, applied and answered, in this order: nobody sees the effect of a change
that a crash could undo, and an answer is given when what it taught is on the disk.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Condition, Lock, Thread
from types import TracebackType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from adanpc import require
from adanpc.core import AdaNPC, Change, Contents, Prediction
from adanpc.core.codec import decode, encode
from adanpc.core.guard import Signs
from adanpc.core.safe import Question as Asked
from adanpc.errors import AdaNPCError, ChangeError, UnavailableError
from adanpc.index import check_features
from adanpc.models import Wrapped
from adanpc.store.answers import decode_answer, encode_answer, part_of
from adanpc.store.check import ContentsError
from adanpc.store.file import Location, check_keepable, write_state
from adanpc.store.log import Answered, Log, LogWriteError
from adanpc.store.recovery import recovered
from adanpc.store.sqlite import SqliteLog

TOGETHER = 128  # queries of different requests that are answered and logged together
MOST_QUERIES = 2048  # of one request: they become one change, and are compared with each other
LONGEST_REQUEST = 200  # characters of a request's id
SNAPSHOT_EVERY = 5000  # changes; a start replays no more than so many


class Part(NamedTuple):
    """The answer to a request among those that were answered together, which share their tensors."""

    together: Prediction  # of all of them
    begin: int  # of this request's queries in it
    end: int
    again: bool = False  # it was given before, and nothing was learned this time

    @property
    def prediction(self) -> Prediction:
        """The answer in tensors of its own."""
        return part_of(self.together, slice(self.begin, self.end))


@dataclass(eq=False)
class Question:
    """Queries of one caller, who waits for the answer."""

    features: Tensor  # (B, D), checked
    domain: int
    keys: Tensor | None  # (B,)
    request: str
    answered: Callable[[], object] | None = None  # called when this and all that were answered with it have answers
    answer: Future[Any] = field(default_factory=Future)  # a Prediction, or a Part for whoever is called

    def give(self, part: Part) -> None:
        """Answers it."""
        if self.answered is None:
            self.answer.set_result(part.prediction)
        else:
            self.answer.set_result(part)


@dataclass(eq=False)
class Action:
    """A change that somebody waits for; it is made when its turn has come."""

    make: Callable[[], Change]
    ids: Future[range] = field(default_factory=Future)


@require.names_its_arguments
class DurableBank:
    """A classifier whose every change is on the disk before anybody sees its effect. For any number of threads.

    One thread of its own carries out what the others ask for. Requests that arrive while it waits for the disk are
    answered together afterwards, and share one commit. The answers are those that they would get one after another.

    Args:
        log: where changes are kept; ``create`` and ``open`` make one in a folder. It is closed with the bank.
        snapshot_every: changes after which a snapshot is taken, in the background.
    """

    def __init__(self, log: Log, *, snapshot_every: int = SNAPSHOT_EVERY) -> None:
        self._snapshot_every = require.whole("snapshot_every", snapshot_every, least=1)
        self._log = log
        found = recovered(log)
        self._classifier = found.classifier
        self.recipe = found.recipe
        self._notices = found.notices
        self._process = os.getpid()
        self._snapshot_position = found.snapshot
        self._snapshot_tried = found.snapshot  # the position at which one was last begun
        self._snapshot_flaw = ""  # why the last one was not taken
        self._snapshot_lock = Lock()
        self._snapshot_thread: Thread | None = None
        self._failure = ""
        self._closed = False
        self._waiting: deque[Question | Action] = deque()
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
        """A durable bank in a new folder that begins as a classifier is now.

        Args:
            folder: that does not exist, or is empty.
            thing: the classifier, or a wrapped model, of which the recipe is kept, too.
            recipe: of a classifier: how its features are made, if that is known.
            snapshot_every: see the class.
        """
        require.whole("snapshot_every", snapshot_every, least=1)  # before there is a folder
        if isinstance(thing, Wrapped):
            return cls.create(folder, thing.classifier, thing.recipe, snapshot_every=snapshot_every)
        try:
            check_keepable(thing)
        except ContentsError as flaw:
            raise LogWriteError(f"{folder} was not created: {flaw}; {flaw.remedy}") from None
        return cls(SqliteLog.create(folder, thing.state(codes=True), recipe or {}), snapshot_every=snapshot_every)

    @classmethod
    @require.names_its_arguments
    def open(cls, folder: Location, *, snapshot_every: int = SNAPSHOT_EVERY) -> DurableBank:
        """The durable bank in a folder, as it was when the last change was acknowledged."""
        log = SqliteLog(folder)
        try:
            return cls(log, snapshot_every=snapshot_every)
        except BaseException:
            log.close()
            raise

    def __enter__(self) -> DurableBank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # What it is

    @property
    def contents(self) -> Contents:
        """All that the bank holds now, as a value that later changes do not touch."""
        return self._classifier.bank.contents

    @property
    def settings(self) -> Any:
        """How it votes and whom it admits, see ``AdaNPC.settings``."""
        return self._classifier.settings

    @property
    def preset(self) -> str:
        """The name of the rule by which it learns."""
        return self._classifier.preset

    @property
    def position(self) -> int:
        """How many changes have been applied."""
        return self._classifier.position

    @property
    def log(self) -> Log:
        """Where changes are kept, to read in."""
        return self._log

    @property
    def notices(self) -> list[str]:
        """What was found to be damaged or went wrong without harm, each in a sentence."""
        notices = [*self._log.notices, *self._notices]
        if self._snapshot_flaw:
            notices.append(f"no snapshot was taken: {self._snapshot_flaw}")
        return notices

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._waiting)

    @property
    def ready(self) -> bool:
        """Whether it takes changes: it is open, and memory and log have not come apart."""
        return not self._closed and not self._failure

    def digest(self) -> str:
        """A hash of all that decides later answers, see ``AdaNPC.digest``."""
        return self._classifier.digest()

    def signs(self) -> Signs:
        """What the guard of the preset "safe" sees in the stream, see ``AdaNPC.signs``."""
        return self._classifier.signs()

    # Asking

    def predict(self, features: Tensor, *, without: Iterable[int] = ()) -> Prediction:
        """What each query (B, D) would be answered if it came next; changes nothing, and waits for nobody.

        Args:
            features: of the queries.
            without: ids of rows that may not vote: a preview of their veto.
        """
        checked = check_features(features, self.contents.settings.dim)
        rows = torch.tensor(list(without), dtype=torch.int64)
        exclude = None
        if len(rows):
            exclude = rows.repeat(len(checked), 1)
        return self._classifier.predict(checked, exclude=exclude)

    def ask(self, features: Tensor, *, most: int = 10) -> list[Asked]:
        """Those of the queries (B, D) whose labels would say most about whether to adapt, see ``AdaNPC.ask``."""
        return self._classifier.ask(features, most=most)

    def classify(self, features: Tensor, *, domain: int = -1, keys: Any = None, request: str = "") -> Prediction:
        """The answers to queries (B, D) in this order, once what they teach is on the disk; see ``AdaNPC.step``.

        Args:
            features: of the queries, which become one change: all that join do, or none.
            domain: of all of them, noted with the rows that join; -1 is unknown.
            keys: (B,) your own numbers of the queries, noted with the rows that join.
            request: an id of your own. If a request of this id was answered before, it gets that answer, and nothing is
                learned again; the newest 10,000 answers, and of these 64 MiB, are kept. Without one, every call counts.
        """
        return self.submit(features, domain=domain, keys=keys, request=request).result()

    def submit(self, features: Tensor, *, domain: int = -1, keys: Any = None, request: str = "") -> Future[Prediction]:
        """What ``classify`` will answer, for callers that do something else meanwhile."""
        checked = check_features(features, self.contents.settings.dim)
        check_request(len(checked), request)
        domain = require.whole("domain", domain, least=-(2**63), most=2**63 - 1)
        numbers = self._classifier.checked_keys(keys, len(checked))
        question = Question(checked.clone(), domain, numbers, request)  # the caller may use its own again
        self._enqueue([question])
        return question.answer

    def submit_all(
        self, features: Tensor, requests: Sequence[str], counts: Sequence[int], answered: Callable[[], object]
    ) -> list[Future[Part]]:
        """What ``classify`` will answer to several requests that come one after another, for whoever serves many.

        Args:
            features: (N, D) of all of them, which stay as they are until they are answered.
            requests: the id of each, see ``classify``.
            counts: how many of the features belong to each.
            answered: called by another thread whenever some of them have been answered. It must return at once.
        """
        questions = []
        for part, request in zip(features.split(list(counts)), requests, strict=True):
            questions.append(Question(part, -1, None, request, answered))
        sound = self._sound(features, questions)
        self._enqueue(sound)
        return [question.answer for question in questions]

    def _sound(self, features: Tensor, questions: list[Question]) -> list[Question]:
        """Those of the questions that can be answered; the others get the error that is their own."""
        dim = self.contents.settings.dim
        try:
            check_features(features, dim)
        except AdaNPCError:
            pass  # one of them has a flaw, and the others shall not suffer from it
        else:
            return questions
        sound = []
        for question in questions:
            try:
                check_features(question.features, dim)
            except AdaNPCError as error:
                question.answer.set_exception(error)
            else:
                sound.append(question)
        return sound

    # Changing

    def apply(self, change: Change) -> range:
        """Carries out a change once it is on the disk; the ids that it gave to the rows it appended.

        A change that does not say when it was made is given the time now.
        """
        as_logged = _as_logged(change)
        action = Action(lambda: as_logged)
        self._enqueue([action])
        return action.ids.result()

    def decide(self, make: Callable[[Contents], Change]) -> Change:
        """Carries out a change that depends on what the bank holds; nothing else changes it in between.

        Args:
            make: the change, given the contents when its turn has come. If it raises, nothing happens, and the error is
                the caller's.
        """
        made: list[Change] = []

        def change_now() -> Change:
            made.append(_as_logged(make(self.contents)))
            return made[0]

        action = Action(change_now)
        self._enqueue([action])
        action.ids.result()
        return made[0]

    def rollback(self, to: int, *, who: str = "", why: str = "", when: float | None = None) -> None:
        """Returns to an earlier position, by one more change; ``at`` shows beforehand what that means.

        Args:
            to: a position from ``log.start`` on. Deleted rows stay deleted, and ids are not given again.
            who, why, when: as in every change.
        """
        earlier = self.at(to).bank.contents
        action = Action(lambda: _dated(self._classifier.rollback(earlier, who=who, why=why, when=when)))
        self._enqueue([action])
        action.ids.result()

    def at(self, position: int) -> AdaNPC:
        """The classifier as it was at an earlier position: another one, in memory alone."""
        return recovered(self._log, position).classifier

    # Keeping

    def save(self, path: Location) -> None:
        """Writes the bank as it is now to one file, which ``adanpc.load`` reads."""
        write_state(self._classifier.state(codes=True), self.recipe, path)

    def snapshot(self) -> None:
        """Writes down all of the bank, so that the next start replays nothing before it."""
        with self._snapshot_lock:
            state = self._classifier.state(codes=True)
            position = state["document"]["position"]
            if position > self._snapshot_position:
                self._log.snapshot(state, self.recipe)
                self._snapshot_position = position
                self._snapshot_flaw = ""

    def compact(self, *, keep: int = 2) -> None:
        """Forgets changes and snapshots but the newest: no position before them can be returned to.

        Args:
            keep: how many snapshots are kept; one is taken first. With 1, nothing is left of rows that were deleted.
        """
        self.snapshot()
        with self._snapshot_lock:
            self._log.compact(keep)

    def close(self) -> None:
        """Answers what was asked before, takes a snapshot, and lets others open the bank.

        In a fork of the process that opened it, nothing happens.
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

    def _enqueue(self, jobs: Sequence[Question | Action]) -> None:
        if os.getpid() != self._process:  # threads do not live on in a fork, and SQLite must not be used there
            raise UnavailableError(
                "the bank was opened by another process, of which this is a fork: open it in one of them alone"
            )
        with self._arrived:
            if self._closed:
                raise UnavailableError("the bank is closed: open it again")
            self._waiting.extend(jobs)
            self._arrived.notify()

    def _write(self) -> None:
        """Carries out one job after another, or several questions together, until the bank is closed."""
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
                _tell(jobs)
            self._snapshot_if_due()

    def _next_jobs(self) -> Action | list[Question]:
        """The next action, or as many questions as are answered together."""
        first = self._waiting.popleft()
        if isinstance(first, Action):
            return first
        questions = [first]
        queries = len(first.features)
        requests = {first.request} - {""}
        while self._waiting:
            following = self._waiting[0]
            if isinstance(following, Action) or following.request in requests:
                break  # the second of two equal requests gets the answer to the first
            queries += len(following.features)
            if queries > TOGETHER:
                break
            self._waiting.popleft()
            questions.append(following)
            requests |= {following.request} - {""}
        return questions

    def _act(self, action: Action) -> None:
        try:
            ids = self._apply(action.make(), [])
        except BaseException as error:
            action.ids.set_exception(error)
        else:
            action.ids.set_result(ids)

    def _answer(self, questions: list[Question]) -> None:
        """Gives everyone an answer: the one that was given before, or a new one, or an error."""
        fresh = []
        for question in questions:
            if not question.answer.set_running_or_notify_cancel():
                continue
            try:
                kept = self._kept_answer(question)
            except BaseException as error:
                question.answer.set_exception(error)
                continue
            if kept is None:
                fresh.append(question)
            else:
                question.give(kept)
        if fresh:
            self._answer_fresh(fresh)

    def _kept_answer(self, question: Question) -> Part | None:
        if not question.request:
            return None
        data = self._log.answer(question.request)
        if data is None:
            return None
        prediction = decode_answer(data)
        return Part(prediction, 0, len(prediction.probs), again=True)

    def _answer_fresh(self, questions: list[Question]) -> None:
        try:
            answers = self._learn(questions)
        except BaseException as error:
            if len(questions) == 1:
                questions[0].answer.set_exception(error)
                return
            for question in questions:  # each has its own error, and none suffers from another's
                self._answer_fresh([question])
        else:
            for question, answer in zip(questions, answers, strict=True):
                question.give(answer)

    def _learn(self, questions: Sequence[Question]) -> list[Part]:
        """The answers to questions that come one after another, once all that they teach is logged and applied."""
        features = torch.cat([question.features for question in questions])
        prediction, change = self._classifier.propose(features, keys=_keys_of(questions))
        prediction = prediction.settled(self.contents.next_id)  # nobody else gives ids
        answers = []
        kept = []
        end = 0
        for question in questions:
            begin, end = end, end + len(question.features)
            answer = Part(prediction, begin, end)
            answers.append(answer)
            if question.request:
                kept.append(Answered(question.request, encode_answer(answer.prediction)))
        if change is not None:
            joined = prediction.joined.cpu() >= 0
            change = _dated(replace(change, domain=_domains_of(questions)[joined]))
            self._apply(decode(encode(change)), kept)
        elif kept:
            self._check_state()
            self._log.append(None, kept)
        return answers

    def _apply(self, change: Change, answers: Sequence[Answered]) -> range:
        """Logs a change with the answers that came with it, and then applies it."""
        self._check_state()
        logged = False

        def log(prepared: Change) -> None:
            nonlocal logged
            self._log.append(prepared, answers)
            logged = True

        try:
            return self._classifier.apply(change, log=log)
        except BaseException as error:
            if logged:  # out of memory in the very last step, say
                self._failure = f"the bank lags behind its log ({error}): open it again"
            raise

    def _check_state(self) -> None:
        """Refuses to write when memory and log are not at the same place."""
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
            self._snapshot_tried = self.position  # one that fails is not tried again at once: it takes time and room
            thread = Thread(target=self._try_snapshot, name="adanpc-snapshot", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there are too many threads; those who wait must not suffer from it
                self._snapshot_flaw = str(error)
            else:
                self._snapshot_thread = thread

    def _try_snapshot(self) -> None:
        """Takes a snapshot if that is possible; the log has all of it anyway."""
        try:
            self.snapshot()
        except (AdaNPCError, OSError) as error:
            self._snapshot_flaw = str(error)


def check_request(queries: int, request: str) -> None:
    """Refuses a request of too many queries, and an id that is too long or no text."""
    if queries > MOST_QUERIES:
        raise AdaNPCError(f"a request holds at most {MOST_QUERIES:,} queries, got {queries:,}: cut it into several")
    if len(require.text("request", request)) > LONGEST_REQUEST:
        raise AdaNPCError(f"request must have at most {LONGEST_REQUEST} characters, got {len(request)}")


def _tell(questions: Sequence[Question]) -> None:
    """Lets everyone know who asked some of these questions, each once."""
    callers = {question.answered for question in questions if question.answered is not None}
    for answered in callers:
        answered()


def _as_logged(change: Any) -> Change:
    """The change, dated, as the log will give it back."""
    if not isinstance(change, Change):
        raise ChangeError(f"{type(change).__name__} is not a change")
    return decode(encode(_dated(change)))


def _dated(change: Any) -> Any:
    """The change with the time at which it is made, unless it says so itself."""
    if change.when is not None:
        return change
    return replace(change, when=time.time())


def _keys_of(questions: Sequence[Question]) -> Tensor | None:
    """The keys of all queries, -1 where there are none."""
    if all(question.keys is None for question in questions):
        return None
    parts = []
    for question in questions:
        keys = question.keys
        if keys is None:
            keys = torch.full((len(question.features),), -1)
        parts.append(keys.cpu().to(torch.int64))
    return torch.cat(parts)


def _domains_of(questions: Sequence[Question]) -> Tensor:
    """The domain of each query."""
    domains = [question.domain for question in questions]
    counts = [len(question.features) for question in questions]
    return torch.from_numpy(numpy.repeat(numpy.array(domains, numpy.int64), counts))
