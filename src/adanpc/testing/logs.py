"""check_log: whether a log keeps what ``adanpc.store.Log`` promises, as far as one process can tell."""

from __future__ import annotations

from collections.abc import Callable

import torch

from adanpc.core import AdaNPC, Append, Change, MemoryBank, Origin, State, Veto, everyone
from adanpc.core.codec import encode
from adanpc.errors import AdaNPCError
from adanpc.store import Answered, BankInUseError, Log, LogError, LogWriteError

DIM = 4
CLASSES = 3
RECIPE = {"layer": "fc", "preprocessing": "none", "weights": "features:0"}


def check_log(create: Callable[[State, dict[str, str]], Log], reopen: Callable[[], Log]) -> None:
    """Asserts that a log gives back what it was given, after it was closed too, and has one writer.

    What a crash leaves of it cannot be told from within: ``python -m benchmarks.crashes`` shows how to find out.

    Args:
        create: makes a log that begins with a classifier of this state, and is told how its features are made.
        reopen: opens the same log; it is called again after that was closed.
    """
    classifier = _classifier()
    begin = classifier.position
    log = create(classifier.state(), RECIPE)
    assert log.start == log.position == begin, "a log begins at the position of the classifier that it was made with"
    assert log.snapshots() == [begin], "a log begins with a snapshot"
    changes = _changes(classifier)
    _append_all(log, classifier, changes)
    _check_held(log, begin, changes)
    _check_refusals(log, begin)
    try:
        reopen().close()
    except BankInUseError:
        pass
    else:
        raise AssertionError("a second writer must be refused with a BankInUseError")
    _check_snapshot(log, classifier)
    log.close()
    log.close()
    _check_closed(log)
    log = reopen()
    assert log.position == classifier.position, "a log that is opened again must be where it was"
    assert not log.notices, f"nothing is damaged, and yet it says: {log.notices}"
    _check_held(log, begin, changes)
    _check_snapshot(log, classifier)
    log.compact(1)
    assert log.start == log.position == classifier.position, "a compacted log begins with its oldest snapshot"
    assert log.snapshots() == [classifier.position], "compacting must remove older snapshots"
    _check_refusals(log, log.start)
    _append_all(log, classifier, changes[:1])
    log.close()
    log = reopen()
    assert log.answer("0") == b"\0", "answers must outlive compacting"
    restored, _ = log.load(log.start)
    for change in log.read(log.start):
        restored.apply(change)
    assert restored.digest() == classifier.digest(), "snapshot and changes must lead to the same classifier"
    log.close()


def _classifier() -> AdaNPC:
    classifier = AdaNPC(MemoryBank(DIM, CLASSES), k=3, admission=everyone)
    classifier.learn(torch.eye(DIM)[:CLASSES], torch.arange(CLASSES))
    return classifier


def _changes(classifier: AdaNPC) -> list[Change]:
    rows = torch.randn(150, DIM, generator=torch.Generator().manual_seed(0))
    changes: list[Change] = []
    for number, row in enumerate(rows):
        label = torch.tensor([number % CLASSES])
        changes.append(Append(row[None], label, Origin.ADMITTED, keys=torch.tensor([number]), who="Ann", when=1.5))
    changes.append(Veto((0,), "Bob", "blurred “photo” \n\0", 2.5))
    return changes


def _append_all(log: Log, classifier: AdaNPC, changes: list[Change]) -> None:
    for change in changes:
        classifier.apply(change)
        number = classifier.position
        answers = [] if log.answer("0") is not None else [Answered("0", b"\0"), Answered("\ud800", b"")]
        assert log.append(change, answers) == number, "append must return the position after the change"
        assert log.position == number


def _check_held(log: Log, begin: int, changes: list[Change]) -> None:
    expected = [encode(change) for change in changes]
    for after in (0, 1, len(changes) // 2, len(changes)):
        found = [encode(change) for change in log.read(begin + after)]
        assert found == expected[after:], f"reading behind {after} changes must give all others, in order"
    assert log.answer("0") == b"\0", "an answer that was kept must be given back"
    assert log.answer("\ud800") == b"", "a request's id is any text"
    assert log.answer("1") is None, "a request that nobody sent has no answer"
    position = log.append(None, [])
    assert position == log.position == begin + len(changes), "without a change, the position stays"


def _check_refusals(log: Log, begin: int) -> None:
    for after in (begin - 1, log.position + 1):
        try:
            list(log.read(after))
        except LogError:
            continue
        raise AssertionError("changes that are not there must be refused with a LogError, not passed over")
    try:
        log.load(log.position + 1)
    except AdaNPCError:
        return
    raise AssertionError("a snapshot that is not there must be refused")


def _check_snapshot(log: Log, classifier: AdaNPC) -> None:
    log.snapshot(classifier.state(), RECIPE)
    assert log.snapshots()[0] == classifier.position, "the newest snapshot must come first"
    loaded, recipe = log.load(classifier.position)
    assert loaded.digest() == classifier.digest(), "a snapshot must be what it was taken of"
    assert recipe == RECIPE


def _check_closed(log: Log) -> None:
    try:
        log.append(Veto((0,)))
    except LogWriteError:
        return
    raise AssertionError("a closed log must refuse changes with a LogWriteError")
