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
    """Asserts that a log returns what was appended to it, even after it was closed, and has only one writer.

    What a crash would leave of it cannot be tested from within the process; ``python -m benchmarks.crashes`` shows how
    to find out.

    Args:
        create: creates a log, given the state of the classifier that it begins with and the recipe of its features.
        reopen: opens the same log again. It is called several times, once while the log is open.
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
    log.close()  # closing twice must do no harm
    _check_closed(log)
    log = reopen()
    assert log.position == classifier.position, "a log that is opened again must be where it was"
    assert not log.notices, f"a log that is not damaged must have no notices, got {log.notices}"
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
    """A classifier with one source row of each class."""
    classifier = AdaNPC(MemoryBank(DIM, CLASSES), k=3, admission=everyone)
    classifier.learn(torch.eye(DIM)[:CLASSES], torch.arange(CLASSES))
    return classifier


def _changes(classifier: AdaNPC) -> list[Change]:
    """More changes than a log might keep in memory, and one with a text that is hard to store."""
    rows = torch.randn(150, DIM, generator=torch.Generator().manual_seed(0))
    changes: list[Change] = []
    for number, row in enumerate(rows):
        label = torch.tensor([number % CLASSES])
        changes.append(Append(row[None], label, Origin.ADMITTED, keys=torch.tensor([number]), who="Ann", when=1.5))
    changes.append(Veto((0,), "Bob", "blurred “photo” \n\0", 2.5))
    return changes


def _append_all(log: Log, classifier: AdaNPC, changes: list[Change]) -> None:
    """Applies changes and appends them to the log, the first of them with the answers to two requests."""
    for change in changes:
        classifier.apply(change)
        position = classifier.position
        answers: list[Answered] = []
        if log.answer("0") is None:
            answers = [Answered("0", b"\0"), Answered("\ud800", b"")]
        assert log.append(change, answers) == position, "append must return the position after the change"
        assert log.position == position


def _check_held(log: Log, begin: int, changes: list[Change]) -> None:
    """Asserts that a log returns all changes and answers that were appended to it."""
    expected = [encode(change) for change in changes]
    for skipped in (0, 1, len(changes) // 2, len(changes)):
        found = [encode(change) for change in log.read(begin + skipped)]
        assert found == expected[skipped:], f"reading after {skipped} changes must give all later ones, in order"
    assert log.answer("0") == b"\0", "an answer that was appended must be returned"
    assert log.answer("\ud800") == b"", "any text may be the id of a request"
    assert log.answer("1") is None, "a request that nobody sent has no answer"
    position = log.append(None, [])
    assert position == log.position == begin + len(changes), "without a change, the position stays"


def _check_refusals(log: Log, begin: int) -> None:
    """Asserts that a log refuses to read what it does not have."""
    for position in (begin - 1, log.position + 1):
        try:
            list(log.read(position))
        except LogError:
            continue
        raise AssertionError("reading changes that are not there must raise a LogError, not skip them")
    try:
        log.load(log.position + 1)
    except AdaNPCError:
        return
    raise AssertionError("loading a snapshot that is not there must raise an AdaNPCError")


def _check_snapshot(log: Log, classifier: AdaNPC) -> None:
    """Asserts that a snapshot can be taken and loaded again."""
    log.snapshot(classifier.state(), RECIPE)
    assert log.snapshots()[0] == classifier.position, "the newest snapshot must come first"
    loaded, recipe = log.load(classifier.position)
    assert loaded.digest() == classifier.digest(), "a snapshot must equal the classifier that it was taken of"
    assert recipe == RECIPE


def _check_closed(log: Log) -> None:
    """Asserts that a closed log takes no changes."""
    try:
        log.append(Veto((0,)))
    except LogWriteError:
        return
    raise AssertionError("a closed log must refuse changes with a LogWriteError")
