"""DurableBank: what was acknowledged is there after a restart, and answers are those of a classifier in memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adanpc
from adanpc.core import (
    AdaNPC,
    Admission,
    Append,
    Change,
    Contents,
    Delete,
    MemoryBank,
    Origin,
    Prediction,
    Relabel,
    Restore,
    Veto,
    everyone,
    nobody,
    replay,
)
from adanpc.errors import AdaNPCError, ChangeError, EmptyBankError, FeatureError, LabelError, RowError, UnavailableError
from adanpc.models import Wrapped
from adanpc.store import DurableBank, LogError, LogWriteError, SqliteLog, check, durable, sqlite, verify
from adanpc.store.file import read

DIM, CLASSES = 8, 3
KINDS: dict[str, Callable[[], AdaNPC]] = {
    "paper": lambda: AdaNPC(MemoryBank(DIM, CLASSES), k=5, admission=Admission(min_confidence=0.6)),
    "centered": lambda: AdaNPC(
        MemoryBank(DIM, CLASSES, storage="int8", capacity=9, evict="reservoir", soft=True, seed=3),
        k=5,
        admission=everyone,
        centering="stream",
    ),
    "safe": lambda: AdaNPC(MemoryBank(DIM, CLASSES, capacity=20, soft=True), preset="safe"),
}


def features(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(0, CLASSES, (count,), generator=generator)
    return torch.eye(DIM)[which] + 0.4 * torch.randn(count, DIM, generator=generator) + 0.5


def classifier(kind: str = "centered") -> AdaNPC:
    made = KINDS[kind]()
    made.learn(features(0, 24), torch.arange(24) % CLASSES, domain=torch.arange(24) % 2)
    return made


def assert_same_answer(one: Prediction, two: Prediction) -> None:
    for field in fields(Prediction):
        ours, theirs = getattr(one, field.name), getattr(two, field.name)
        if field.name == "neighbors":
            for name in ("ids", "similarity", "labels", "soft"):
                assert_same(getattr(ours, name), getattr(theirs, name))
        else:
            assert_same(ours, theirs)


def assert_same(one: Any, two: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, two)
    else:
        assert one == two


@contextmanager
def held_up(bank: DurableBank) -> Iterator[list[int]]:
    """Lets the writer wait at its next commit until the block ends; gives the positions of the commits."""
    log = bank.log
    gate = threading.Event()
    reached = threading.Event()
    append = log.append
    positions = []

    def waiting(change: Change | None, answers: Any = ()) -> int:
        reached.set()
        gate.wait()
        positions.append(append(change, answers))
        return positions[-1]

    log.append = waiting  # type: ignore[method-assign]
    first = bank.submit(features(99, 1), request="first")
    reached.wait()
    try:
        yield positions
    finally:
        gate.set()
        first.result()


# Answers


@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_digests_are_those_of_a_classifier_in_memory(tmp_path: Path, kind: str) -> None:
    twin = classifier(kind)
    with DurableBank.create(tmp_path / "bank", twin) as bank:
        for number in range(12):
            queries = features(100 + number, number % 4)
            keys = torch.arange(len(queries))
            expected = twin.step(queries, domain=number, keys=keys)
            assert_same_answer(bank.classify(queries, domain=number, keys=keys), expected)
            assert bank.digest() == twin.digest()
            if number == 6:
                for change in (Veto((1, 2), "Ann"), Restore((1,), "Bob"), Relabel((3,), 0), Delete((4,))):
                    dated = adanpc.store.durable._dated(change)
                    twin.apply(dated)
                    bank.apply(dated)
                row = Append(features(7, 1), torch.tensor([2]), Origin.EXPERT, who="Ann")
                assert bank.apply(row) == twin.apply(row)
        assert_same_answer(bank.predict(features(8, 5)), twin.predict(features(8, 5)))
        exclude = torch.tensor([[0, 5]]).repeat(5, 1)
        assert_same_answer(bank.predict(features(8, 5), without=(0, 5)), twin.predict(features(8, 5), exclude=exclude))
        assert bank.digest() == twin.digest()
        assert (bank.preset, bank.settings) == (twin.preset, twin.settings)
    with DurableBank.open(tmp_path / "bank") as bank:
        assert bank.digest() == twin.digest()
        assert bank.position == twin.position
        assert_same_answer(bank.classify(features(9, 3)), twin.step(features(9, 3)))
    assert verify(tmp_path / "bank").digest == twin.digest()


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_alone_leads_to_the_same_bank(tmp_path: Path, kind: str) -> None:
    with DurableBank.create(tmp_path / "bank", classifier(kind)) as bank:
        for number in range(5):
            bank.classify(features(number, 3))
        bank.apply(Append(features(7, 4).double(), torch.tensor([0, 1, 2, 0]), domain=torch.arange(4) % 2))
        assert replay(bank.log.read(1), classifier(kind)).digest() == bank.digest()


def test_the_caller_may_use_its_tensors_again(tmp_path: Path) -> None:
    twin = classifier()
    with DurableBank.create(tmp_path / "bank", twin) as bank:
        with held_up(bank):
            queries = features(5, 2)
            answer = bank.submit(queries)
            queries.zero_()
        twin.step(features(99, 1))
        assert_same_answer(answer.result(), twin.step(features(5, 2)))


# Many callers


def test_requests_that_wait_share_one_commit(tmp_path: Path) -> None:
    twin = classifier()
    with DurableBank.create(tmp_path / "bank", twin) as bank:
        with held_up(bank) as positions:
            answers = [
                bank.submit(features(number, 2), domain=number, keys=[number] * (2 * (number % 2)) or None)
                for number in range(10)
            ]
        twin.step(features(99, 1))
        for number, answer in enumerate(answers):
            keys = [number] * 2 if number % 2 else None
            expected = twin.step(features(number, 2), domain=number, keys=None if keys is None else torch.tensor(keys))
            assert_same_answer(answer.result(), expected)
        assert positions == [2, 3]
        assert bank.digest() == twin.digest()


def test_no_more_are_answered_together_than_is_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "TOGETHER", 5)
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        with held_up(bank) as positions:
            answers = [bank.submit(features(number, 2)) for number in range(4)]
            change = threading.Thread(target=bank.apply, args=(Veto((0,)),))
            change.start()
            while len(bank._waiting) < 5:
                time.sleep(0.001)
            last = bank.submit(features(9, 1))
        change.join()
        last.result()
        assert len(positions) == 5  # the first, two and two, the veto, the last
        assert [int(answer.result().joined[0]) for answer in answers] == [25, 27, 29, 31]


def test_every_answer_is_the_one_that_its_place_in_the_log_implies(tmp_path: Path) -> None:
    """Threads ask at once; replaying the log, one query after another, gives every one of their answers."""
    bank = DurableBank.create(tmp_path / "bank", classifier())
    twin = classifier()
    answers: dict[int, tuple[Tensor, Prediction, int]] = {}

    def caller(number: int) -> None:
        for turn in range(8):
            first = 1000 * number + 10 * turn
            queries = features(first, 1 + turn % 3)
            answer = bank.classify(queries, domain=number, keys=range(first, first + len(queries)), request=str(first))
            for place in range(len(queries)):
                answers[first + place] = (queries[place : place + 1], answer, place)
            if turn == 4:
                bank.apply(Veto((number,), f"expert {number}"))

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for change in bank.log.read(1):
        if not isinstance(change, Append):
            twin.apply(change)
            continue
        assert change.keys is not None
        assert isinstance(change.domain, Tensor)
        for key, domain in zip(change.keys.tolist(), change.domain.tolist(), strict=True):
            queries, answer, place = answers.pop(key)
            expected = twin.step(queries, domain=domain, keys=torch.tensor([key]))
            assert torch.equal(answer.probs[place], expected.probs[0])
            assert torch.equal(answer.neighbors.ids[place], expected.neighbors.ids[0])
            assert torch.equal(answer.joined[place], expected.joined[0])
    assert not answers
    assert bank.digest() == twin.digest()
    bank.close()


def test_one_callers_error_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        propose = AdaNPC.propose

        def failing(made: AdaNPC, queries: Tensor, **options: Any) -> Any:
            if (queries == 7).any():
                raise MemoryError("too much")
            return propose(made, queries, **options)

        monkeypatch.setattr(AdaNPC, "propose", failing)
        with held_up(bank):
            good = bank.submit(features(1, 1))
            bad = bank.submit(torch.full((1, DIM), 7.0))
            also_good = bank.submit(features(2, 1))
        assert len(good.result().labels) == len(also_good.result().labels) == 1
        with pytest.raises(MemoryError, match="too much"):
            bad.result()


def test_requests_that_are_handed_over_together_are_answered_one_after_another(tmp_path: Path) -> None:
    twin = classifier()
    with DurableBank.create(tmp_path / "bank", twin) as bank:
        told = threading.Event()
        sizes = (1, 3, 0, 2)
        asked = [features(number, size) for number, size in enumerate(sizes)]
        requests = ["", "a", "", "b"]
        answers = bank.submit_all(torch.cat(asked), requests, sizes, told.set)
        assert told.wait(300)
        assert all(answer.done() for answer in answers)
        expected = [twin.step(queries) for queries in asked]
        for answer, other in zip(answers, expected, strict=True):
            assert_same_answer(answer.result().prediction, other)
            assert not answer.result().again
        assert answers[1].result().together is answers[3].result().together
        (again,) = bank.submit_all(asked[3], ["b"], [2], told.set)
        assert_same_answer(again.result().prediction, expected[3])
        assert again.result().again


def test_a_flaw_in_one_of_many_requests_is_its_own(tmp_path: Path) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        asked = torch.cat([features(1, 1), torch.ones(1, DIM), torch.full((1, DIM), torch.nan), features(2, 1)])
        first, bad, last = bank.submit_all(asked, ["", "", ""], [1, 2, 1], lambda: None)
        with pytest.raises(FeatureError, match="feature row 1 holds NaN"):
            bad.result()
        assert first.result().end == last.result().begin == 1
    with pytest.raises(UnavailableError, match="closed"):
        bank.submit_all(features(1, 1), [""], [1], lambda: None)


def test_a_caller_that_no_longer_waits(tmp_path: Path) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        with held_up(bank):
            given_up = bank.submit(features(1, 1))
            assert given_up.cancel()
        bank.classify(features(2, 1))
        assert bank.position == 3


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"features": torch.zeros(1, DIM)}, FeatureError, "zero vector"),
        ({"features": torch.ones(1, 3)}, FeatureError, "shape"),
        ({"features": torch.ones(2049, DIM)}, AdaNPCError, "at most 2,048 queries, got 2,049: cut it into several"),
        ({"keys": [1, 2]}, LabelError, "keys must have shape"),
        ({"domain": 1.5}, AdaNPCError, "domain must be a whole number"),
        ({"request": 5}, AdaNPCError, "request must be a string"),
        ({"request": "x" * 401}, AdaNPCError, "request must have at most 400 characters, got 401"),
    ],
)
def test_what_cannot_be_asked(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        with pytest.raises(error, match=words):
            bank.classify(**{"features": features(1, 1), **arguments})
        assert bank.position == 1


def test_what_is_no_classifier_or_no_list_of_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogWriteError, match="bank was not created: expected an AdaNPC or a wrapped model, got Linear"):
        DurableBank.create(tmp_path / "bank", nn.Linear(2, 2))  # type: ignore[arg-type]
    assert not (tmp_path / "bank").exists()
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        for wrong in ("a", [None], 3):
            with pytest.raises(AdaNPCError, match="without must be the ids of rows, such as"):
                bank.predict(features(1, 2), without=wrong)  # type: ignore[arg-type]
        assert repr(bank).startswith("<DurableBank at position 1: <AdaNPC with ")


def test_an_empty_bank_says_so(tmp_path: Path) -> None:
    with DurableBank.create(tmp_path / "bank", KINDS["paper"]()) as bank:
        with pytest.raises(EmptyBankError):
            bank.classify(features(1, 1))
        bank.apply(Append(features(0, 3), torch.arange(3)))
        bank.classify(features(1, 1))


# Requests that are sent again


def test_an_id_that_is_used_again_for_another_number_of_queries_is_refused(tmp_path: Path) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        answer = bank.classify(features(1, 3), request="a")
        digest = bank.digest()
        with pytest.raises(AdaNPCError, match="answered before: it had 3 queries, and this one has 2; give every"):
            bank.classify(features(1, 2), request="a")
        assert_same_answer(answer, bank.classify(features(1, 3), request="a"))
        assert bank.digest() == digest


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_is_sent_twice_enters_once(tmp_path: Path, kind: str) -> None:
    with DurableBank.create(tmp_path / "bank", classifier(kind)) as bank:
        with held_up(bank):
            twice = [bank.submit(features(1, 3), request="a") for _ in range(2)]
        answer = twice[0].result()
        assert_same_answer(answer, twice[1].result())
        bank.classify(features(2, 1), request="b")
        after = bank.digest()
        assert_same_answer(answer, bank.classify(features(1, 3), request="a"))
        assert bank.digest() == after
    with DurableBank.open(tmp_path / "bank") as bank:
        assert_same_answer(answer, bank.classify(features(1, 3), request="a"))
        assert bank.digest() == after


def test_an_answer_that_taught_nothing_is_given_again_too(tmp_path: Path) -> None:
    frozen = AdaNPC(MemoryBank(DIM, CLASSES), k=5, admission=nobody)
    frozen.learn(features(0, 24), torch.arange(24) % CLASSES)
    with DurableBank.create(tmp_path / "bank", frozen) as bank:
        answer = bank.classify(features(1, 3), request="a")
        bank.classify(features(1, 3))
        assert bank.position == 1
        bank.apply(Veto(tuple(range(12))))
        assert_same_answer(answer, bank.classify(features(1, 3), request="a"))
        assert bank.classify(features(1, 3), request="b").neighbors.ids.min() >= 12


def test_an_answer_that_is_damaged_is_its_callers_problem(tmp_path: Path) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        bank.classify(features(1, 3), request="a")
        log = bank.log
        assert isinstance(log, SqliteLog)
        log._connection.execute("UPDATE answer SET answer = x'00'")
        with pytest.raises(LogError, match="does not have its seal"):
            bank.classify(features(1, 3), request="a")
        bank.classify(features(1, 3), request="b")


# Changes


def test_a_change_that_depends_on_the_bank_is_decided_at_its_turn(tmp_path: Path) -> None:
    def veto_next(contents: Contents) -> Veto:
        row = len(contents.vetoed)
        if row == 4:
            raise ChangeError("enough")
        return Veto((row,))

    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        with ThreadPoolExecutor(4) as callers:
            made = list(callers.map(bank.decide, [veto_next] * 4))
        vetoes = {each.position: each.change.ids for each in made if isinstance(each.change, Veto)}
        assert vetoes == {2: (0,), 3: (1,), 4: (2,), 5: (3,)}  # each at the position of its own
        assert all(each.change.when is not None for each in made)
        before = bank.position
        with pytest.raises(ChangeError, match="enough"):
            bank.decide(veto_next)
        assert bank.position == before == bank.log.position


def test_a_change_that_is_refused_is_not_logged(tmp_path: Path) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        with pytest.raises(RowError, match="row 99 is not in the bank"):
            bank.apply(Veto((99,)))
        with pytest.raises(AdaNPCError, match="is not a change"):
            bank.apply("veto")  # type: ignore[arg-type]
        with pytest.raises(AdaNPCError, match="NoneType is not a change"):
            bank.decide(lambda contents: None)  # type: ignore[arg-type,return-value]
        assert bank.log.position == bank.position == 1
        bank.apply(Veto((0,)))


def test_changes_are_dated_and_a_clock_that_is_set_back_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        monkeypatch.setattr(time, "time", lambda: 2000.0)
        bank.apply(Veto((0,), "Ann"))
        bank.classify(features(1, 1))
        monkeypatch.setattr(time, "time", lambda: 1000.0)
        bank.apply(Veto((1,), "Ann"))
        bank.apply(Veto((2,), "Ann", when=5.0))
        bank.rollback(3)
        assert [change.when for change in bank.log.read(1)] == [2000, 2000, 1000, 5, 1000]
        digest = bank.digest()
    monkeypatch.undo()
    with DurableBank.open(tmp_path / "bank") as bank:
        assert bank.digest() == digest


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_can_be_looked_at_and_returned_to(tmp_path: Path, kind: str) -> None:
    with DurableBank.create(tmp_path / "bank", classifier(kind)) as bank:
        known = {}
        for number in range(6):
            known[bank.position] = answers_of(bank.predict(features(3, 4)))
            bank.classify(features(number, 2))
            if number == 2:
                bank.snapshot()
            bank.apply(Relabel((number,), 0, "Ann"))
        before = bank.position
        for position, answers in known.items():
            assert answers_of(bank.at(position).predict(features(3, 4))) == answers
            assert bank.rollback(position, who="Ann", why="a bad day", when=4.0) == bank.position
            assert answers_of(bank.predict(features(3, 4))) == answers
        assert bank.position == before + len(known)
        for position in (0, bank.position + 1):
            with pytest.raises(AdaNPCError, match="to must be at"):
                bank.rollback(position)
            with pytest.raises(AdaNPCError, match="position must be at"):
                bank.at(position)
        digest = bank.digest()
    with DurableBank.open(tmp_path / "bank") as bank:
        assert bank.digest() == digest
    assert not verify(tmp_path / "bank").problems


def moved(count: int, seed: int, shift: float) -> tuple[Tensor, Tensor]:
    """Features of eight classes that share a shift, and their classes."""
    centers = torch.randn(8, 64, generator=torch.Generator().manual_seed(99))
    direction = torch.randn(64, generator=torch.Generator().manual_seed(98))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 8, (count,), generator=generator)
    return centers[labels] + 0.5 * torch.randn(count, 64, generator=generator) + shift * direction, labels


def test_where_answers_were_last_trusted_one_can_return_to(tmp_path: Path) -> None:
    made = AdaNPC(MemoryBank(64, 8, soft=True), preset="safe", screen=False)
    with DurableBank.create(tmp_path / "bank", made) as bank:
        bank.apply(Append(*moved(200, 0, shift=0.0)))
        start = bank.position
        for number in range(3):
            bank.classify(moved(50, number, shift=4.0)[0])
        assert bank.last_trusted() == bank.position
        bank.apply(Veto((0,), "Ann"))
        for number in range(5):
            bank.classify(torch.randn(50, 64, generator=torch.Generator().manual_seed(number)))
        signs = bank.signs()
        assert signs.trust < 0.5
        position = bank.last_trusted()
        assert position is not None
        assert start + 4 <= position < bank.position
        bank.rollback(position)
        assert answers_of(bank.predict(moved(4, 9, shift=4.0)[0])) == answers_of(
            bank.at(position).predict(moved(4, 9, shift=4.0)[0])
        )
        assert bank.contents.stream().arrivals.count <= signs.trusted
        assert bank.last_trusted() == bank.position
        bank.rollback(start)
        assert bank.last_trusted() is None
        bank.rollback(bank.position - 2)
        assert bank.signs().trust < 0.5
        bank.snapshot()
        bank.compact(keep=1)
        assert bank.log.start == bank.position
        assert bank.last_trusted() is None


def answers_of(prediction: Prediction) -> list[Any]:
    return [prediction.probs.tolist(), prediction.neighbors.ids.tolist()]


# What goes wrong


def test_a_log_that_cannot_be_written_changes_nothing_and_reads_go_on(tmp_path: Path) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        bank.classify(features(1, 1))
        digest = bank.digest()
        log = bank.log
        assert isinstance(log, SqliteLog)
        (pages,) = log._connection.execute("PRAGMA page_count").fetchone()
        log._connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()
        for ask in (
            lambda: bank.classify(features(2, 1000)),
            lambda: bank.apply(Append(features(2, 1000), torch.zeros(1000, dtype=torch.int64))),
        ):
            with pytest.raises(LogWriteError, match="nothing has changed: database or disk is full"):
                ask()
        assert bank.digest() == digest
        bank.predict(features(3, 2))
        log._connection.execute("PRAGMA max_page_count = 100000").fetchall()
        bank.classify(features(2, 1000))
        digest = bank.digest()
    with DurableBank.open(tmp_path / "bank") as bank:
        assert bank.digest() == digest


def test_memory_that_lags_behind_its_log_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = classifier()
    with DurableBank.create(tmp_path / "bank", twin) as bank:
        with monkeypatch.context() as patches:

            def fail(*_: Any) -> None:
                raise MemoryError("no room")

            patches.setattr(MemoryBank, "_publish", fail)
            with pytest.raises(MemoryError):
                bank.classify(features(1, 1))
        assert not bank.ready
        with pytest.raises(LogWriteError, match=r"the bank lags behind its log \(no room\): open it again"):
            bank.classify(features(1, 1))
        bank.predict(features(1, 1))
    twin.step(features(1, 1))
    with DurableBank.open(tmp_path / "bank") as bank:
        assert bank.digest() == twin.digest()


def test_a_bank_that_was_changed_from_outside_is_not_written_to(tmp_path: Path) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        bank._classifier.step(features(1, 1))
        for ask in (lambda: bank.classify(features(1, 1)), lambda: bank.apply(Veto((0,)))):
            with pytest.raises(LogWriteError, match="is at position 2 and its log at 1, since it was changed outside"):
                ask()


def test_a_closed_bank_is_not_asked(tmp_path: Path) -> None:
    bank = DurableBank.create(tmp_path / "bank", classifier())
    waiting = [bank.submit(features(number, 1)) for number in range(20)]
    assert bank.ready
    bank.close()
    assert not bank.ready
    bank.close()
    assert all(answer.done() for answer in waiting)  # what was asked before is answered
    for ask in (lambda: bank.classify(features(1, 1)), lambda: bank.apply(Veto((0,)))):
        with pytest.raises(UnavailableError, match="the bank is closed: open it again"):
            ask()


# Snapshots


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshot_every": 0}, "snapshot_every must be at least 1, got 0"),
        ({"snapshots_every": 5}, "create has no argument 'snapshots_every'; it has: .*; did you mean 'snapshot_every'"),
    ],
)
def test_a_refused_option_leaves_no_folder(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AdaNPCError, match=message):
        DurableBank.create(tmp_path / "bank", classifier(), **options)
    assert not (tmp_path / "bank").exists()


def newest_first(folder: Path) -> list[Path]:
    return sorted((folder / "snapshots").iterdir(), reverse=True)


def test_snapshots_are_taken_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    with DurableBank.create(tmp_path / "bank", classifier(), snapshot_every=3) as bank:
        for number in range(9):
            bank.classify(features(number, 1))
            while bank.position % 3 == 1 and bank._snapshot_position < bank.position:
                time.sleep(0.001)
        assert bank.log.snapshots() == [10, 7, 1]
        bank.classify(features(9, 1))
        digest = bank.digest()
    with DurableBank.open(tmp_path / "bank") as bank:
        assert bank.log.snapshots() == [11, 10, 1]
        assert bank.digest() == digest
        bank.snapshot()  # there is nothing new
        bank.compact(keep=1)
        assert bank.log.snapshots() == [11]
        assert bank.digest() == digest
    with DurableBank.open(tmp_path / "bank") as bank:
        assert bank.digest() == digest


def test_a_snapshot_that_cannot_be_taken_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = DurableBank.create(tmp_path / "bank", classifier(), snapshot_every=1)

    def fail(*_: Any) -> None:
        raise adanpc.store.BankFileError("the disk is full")

    monkeypatch.setattr(sqlite, "write_state", fail)
    bank.classify(features(1, 1))
    digest = bank.digest()
    bank.close()
    assert bank.notices[-1] == "no snapshot was taken: the disk is full"
    monkeypatch.undo()
    with DurableBank.open(tmp_path / "bank") as bank:
        assert bank.log.snapshots() == [1]
        assert bank.digest() == digest


def test_a_snapshot_that_fails_again_and_again_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def fail(state: dict[str, Any], *_: Any) -> None:
        tried.append(state["document"]["position"])
        raise adanpc.store.BankFileError("the disk is full")

    with DurableBank.create(tmp_path / "bank", classifier(), snapshot_every=10) as bank:
        with monkeypatch.context() as patches:
            patches.setattr(sqlite, "write_state", fail)
            for number in range(35):
                bank.classify(features(number, 1))
                if bank._snapshot_thread is not None:
                    bank._snapshot_thread.join()
            assert len(tried) == 3  # not once for every change since the first failed
            assert bank.notices == ["no snapshot was taken: the disk is full"]
        for number in range(10):
            bank.classify(features(number, 1))
        assert bank._snapshot_thread is not None
        bank._snapshot_thread.join()
        assert not bank.notices  # by now there is one


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_forked_process_leaves_the_bank_to_the_one_that_opened_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer does not live on in the fork, so whoever asked there would wait for ever."""
    program = f"""
import os, sys, torch
from adanpc import Veto
from adanpc.errors import UnavailableError
from adanpc.store import DurableBank
bank = DurableBank.open({str(tmp_path / "bank")!r})
bank.apply(Veto((0,)))
child = os.fork()
if not child:
    try:
        bank.apply(Veto((1,)))
    except UnavailableError as error:
        bank.close()
        sys.stdout.write(str(error))
        sys.stdout.flush()
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert len(bank.log.snapshots()) == 1, "the fork closed it"
bank.apply(Veto((2,)))
bank.close()
"""
    DurableBank.create(tmp_path / "bank", classifier()).close()
    said = subprocess.check_output([sys.executable, "-W", "ignore", "-c", program], text=True)
    assert said == "the bank was opened by another process, of which this is a fork: open it in one of them alone"
    with DurableBank.open(tmp_path / "bank") as bank:
        assert list(bank.contents.vetoed) == [0, 2]
        with monkeypatch.context() as patches:
            patches.setattr(os, "getpid", lambda: 0)  # the same in this process, whose lines are counted
            with pytest.raises(UnavailableError, match="the bank was opened by another process"):
                bank.apply(Veto((3,)))
            bank.close()
        bank.apply(Veto((3,)))
    assert not verify(tmp_path / "bank").problems


def test_too_many_threads_are_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DurableBank.create(tmp_path / "bank", classifier(), snapshot_every=1) as bank:

        def fail(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", fail)
        bank.classify(features(1, 1))
        bank.classify(features(2, 1))
        monkeypatch.undo()
        assert bank.notices == ["no snapshot was taken: can't start new thread"]
    assert not bank.notices  # there was one at the end


def test_a_damaged_snapshot_costs_nothing_and_is_noticed(tmp_path: Path) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        for number in range(4):
            bank.classify(features(number, 1))
            bank.snapshot()
        digest = bank.digest()
    first, second, third = newest_first(tmp_path / "bank")
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    with DurableBank.open(tmp_path / "bank") as bank:
        (notice,) = bank.notices
        assert notice.startswith(f"{first} was not loaded: ")
        assert bank.digest() == digest
    with DurableBank.open(tmp_path / "bank") as bank:
        assert not bank.notices  # a whole one has taken its place
    first.write_bytes(b"")
    second.unlink()
    third.write_bytes(b"")
    with pytest.raises(LogError, match="no snapshot can be read: .*was not loaded.* .*was not loaded"):
        DurableBank.open(tmp_path / "bank")
    shutil.rmtree(tmp_path / "bank" / "snapshots")
    (tmp_path / "bank" / "snapshots").mkdir()
    with pytest.raises(LogError, match="no snapshot can be read: there is none"):
        DurableBank.open(tmp_path / "bank")


def test_a_snapshot_of_a_newer_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DurableBank.create(tmp_path / "bank", classifier()) as bank:
        bank.classify(features(1, 1))
    monkeypatch.setattr(check, "VERSION", 1)
    with pytest.raises(adanpc.store.BankFileError, match="it was written by a newer adanpc, in format 2 after 1"):
        DurableBank.open(tmp_path / "bank")


def test_an_entry_that_does_not_fit_its_bank(tmp_path: Path) -> None:
    DurableBank.create(tmp_path / "bank", classifier()).close()
    log = SqliteLog(tmp_path / "bank")
    log.append(Veto((99,)))
    log.close()
    with pytest.raises(LogError, match="entry at position 2 does not fit its bank: row 99 is not in the bank"):
        DurableBank.open(tmp_path / "bank")
    assert any("row 99 is not in the bank" in problem for problem in verify(tmp_path / "bank").problems)
    SqliteLog(tmp_path / "bank").close()  # nobody holds it


def test_a_rule_of_ones_own_cannot_be_kept(tmp_path: Path) -> None:
    class Own(Admission):
        pass

    with pytest.raises(LogWriteError, match="bank was not created: no file can keep an admission of type Own; use an"):
        DurableBank.create(tmp_path / "bank", AdaNPC(MemoryBank(DIM, CLASSES), admission=Own()))
    assert not list(tmp_path.iterdir())


def test_a_wrapped_model_and_a_saved_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, CLASSES))
    wrapped = Wrapped(model, classifier(), "input of 2", "scale")
    with DurableBank.create(tmp_path / "bank", wrapped) as bank:
        bank.classify(features(1, 1))
        assert bank.recipe == wrapped.recipe
        bank.save(tmp_path / "file")
        digest = bank.digest()
    loaded, recipe = read(tmp_path / "file")
    assert (loaded.digest(), recipe) == (digest, wrapped.recipe)
    with DurableBank.open(tmp_path / "bank") as bank:
        assert bank.recipe == wrapped.recipe


def test_the_example_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "DurableBank" in block]
    exec(code, {})
    assert capsys.readouterr().out == "5 42\n"


def test_what_is_logged_is_what_is_applied_to_the_bit(tmp_path: Path) -> None:
    """Features in other types are rounded before they are applied, not only when they are logged."""
    with DurableBank.create(tmp_path / "bank", classifier("paper")) as bank:
        rows = features(3, 5).double() * (1 + 1e-9)
        bank.apply(Append(rows, torch.zeros(5, dtype=torch.int64), confidence=torch.rand(5, dtype=torch.float64)))
        (change,) = bank.log.read(1)
        assert replay([change], classifier("paper")).digest() == bank.digest()


def test_signs_and_questions_are_the_classifiers(tmp_path: Path) -> None:
    classifier = adanpc.AdaNPC(adanpc.MemoryBank(4, 2, soft=True), preset="safe")
    features = torch.eye(4)[[0, 1] * 10] + 0.1
    classifier.learn(features, torch.tensor([0, 1] * 10))
    with adanpc.DurableBank.create(tmp_path / "signs", classifier) as bank:
        assert bank.signs() == classifier.signs()
        assert bank.ask(features, most=3) == classifier.ask(features, most=3)
        assert bank.waiting == 0
