"""A bank under attack: interruptions anywhere, threads, other processes, inputs made to do harm."""

from __future__ import annotations

import multiprocessing
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch

from adanpc.core import (
    AdaNPC,
    Admission,
    Append,
    Change,
    Delete,
    MemoryBank,
    Origin,
    Relabel,
    Restore,
    Veto,
    everyone,
)

DIM, CLASSES = 6, 3


def classifier(**bank: Any) -> AdaNPC:
    made = AdaNPC(MemoryBank(DIM, CLASSES, **bank), k=5, admission=everyone, centering="stream")
    made.learn(features(40, 0), torch.arange(40) % CLASSES)
    return made


def features(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


class Interrupted(BaseException):
    """What Ctrl-C or a lack of memory raises, at a line that the test chooses."""


def interrupt_after(lines: int, work: Callable[[], Any]) -> bool:
    """Runs work and raises in the midst of it, after so many lines of the library; False if it ended before."""
    left = lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if "adanpc" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


CHANGES: dict[str, Callable[[AdaNPC], Change]] = {
    "append source": lambda made: Append(features(3, 1), torch.tensor([0, 1, 2])),
    "append admitted": lambda made: Append(features(4, 2), torch.tensor([0, 0, 1, 2]), Origin.ADMITTED, centered=True),
    "many": lambda made: Append(features(150, 2), torch.arange(150) % CLASSES, Origin.ADMITTED, centered=True),
    "veto": lambda made: Veto((1, newest(made))),
    "restore": lambda made: Restore(tuple(made.bank.vetoes)),
    "relabel": lambda made: Relabel((2, newest(made)), 1, "Ada"),
    "delete": lambda made: Delete((3, newest(made))),
}


def newest(made: AdaNPC) -> int:
    return int(made.bank.table("id")["id"].max())


@pytest.mark.no_cover
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "bank", [{}, {"capacity": 4, "evict": "balanced", "storage": "int8", "soft": True}], ids=["", "full"]
)
def test_a_change_that_is_interrupted_anywhere_did_not_happen(name: str, bank: dict[str, Any]) -> None:
    made = classifier(**bank)
    made.step(features(9, 3))
    start = made.state()
    veto = Veto((0, newest(made) - 1))

    def prepared() -> AdaNPC:
        again = AdaNPC.load(start)
        again.apply(veto)  # a bank that has been changed knows who leaves next and which slots are free
        return again

    made = prepared()
    change = CHANGES[name](made)
    before = made.digest()
    made.apply(change)
    after = made.digest()
    made.step(features(8, 4))
    later = made.digest()
    made = prepared()
    lines = 0
    while interrupt_after(lines, lambda: made.apply(change)):  # noqa: B023 - called at once
        assert made.digest() in (before, after)
        if made.digest() == before:
            made.apply(change)
        assert made.digest() == after
        made.step(features(8, 4))  # and life goes on: the rows that leave next are the same
        assert made.digest() == later
        made = prepared()
        lines += 3 + lines // 30
    assert lines > 20


@pytest.mark.no_cover
def test_a_step_that_is_interrupted_leaves_whole_changes() -> None:
    made = classifier(capacity=6)
    stream = features(30, 5)
    rng = random.Random(0)
    for _ in range(40):
        interrupt_after(rng.randrange(900), lambda: made.step(stream))
        twin = AdaNPC.load(made.state())
        assert twin.digest() == made.digest()
        assert torch.equal(twin.predict(stream).probs, made.predict(stream).probs)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ["step", "learn"])
def test_the_preset_safe_may_be_interrupted_anywhere(name: str) -> None:
    fresh = AdaNPC(MemoryBank(DIM, CLASSES, soft=True, capacity=6), preset="safe")
    fresh.learn(features(40, 0), torch.arange(40) % CLASSES)
    fresh.step(features(9, 3))
    start = fresh.state()
    stream = features(12, 5)

    def work(made: AdaNPC) -> None:
        if name == "step":
            made.step(stream)
        else:
            made.learn(stream, torch.arange(12) % CLASSES)

    before = fresh.digest()
    work(fresh)
    after = fresh.digest()
    expected = fresh.predict(stream).probs
    made = AdaNPC.load(start)
    lines = 0
    while interrupt_after(lines, lambda: work(made)):  # noqa: B023 - called at once
        assert made.digest() in (before, after)
        if made.digest() == before:
            work(made)  # what was interrupted left nothing behind that the second attempt could see
        assert made.digest() == after
        assert torch.equal(made.predict(stream).probs, expected)
        made = AdaNPC.load(start)
        lines += 7 + lines // 15
    assert lines > 100


@pytest.mark.no_cover
def test_threads_that_answer_see_whole_changes_and_their_own_answers() -> None:
    made = classifier(capacity=30, evict="reservoir", seed=1)
    queries = features(200, 7)
    stop = threading.Event()
    flaws: list[str] = []

    def read(start: int) -> None:
        turn = start
        while not stop.is_set():
            turn = (turn + 1) % len(queries)
            contents = made.bank.contents
            answer = made.predict(queries[turn : turn + 1])
            if not torch.allclose(answer.probs.sum(), torch.ones(())):
                flaws.append("probabilities that do not sum to one")
            held = set(contents.table("id")["id"].tolist())
            near = contents.nearest(torch.nn.functional.normalize(queries[turn : turn + 1]), 5)
            if not set(near.ids[0].tolist()) - {-1} <= held:
                flaws.append("a neighbor that is not held")
            rows = contents.rows(near.ids[0])
            if ((rows.norm(dim=1) - 1).abs() > 1e-3).any():
                flaws.append("a row that was overwritten while it was read")

    with ThreadPoolExecutor(5) as pool:
        readers = [pool.submit(read, start) for start in (0, 50, 100, 150)]
        for turn in range(120):
            made.step(queries[turn : turn + 3])
            if turn % 10 == 0:
                made.apply(Veto((turn % 40,)))
                made.apply(Relabel((turn % 40,), turn % CLASSES))
        stop.set()
        for reader in readers:
            reader.result()
    assert not flaws


def test_threads_that_learn_take_turns() -> None:
    made = classifier()
    stream = features(160, 8)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda turn: made.step(stream[turn : turn + 2]), range(0, 160, 2)))
    joined = torch.cat([answer.joined for answer in answers]).tolist()
    assert sorted(joined) == list(range(40, 200))
    assert made.bank.table("id")["id"].tolist() == list(range(200))
    assert made.position == 1 + 80
    assert made.bank.contents.statistics.stream_count == 160
    assert AdaNPC.load(made.state()).digest() == made.digest()


def test_proposals_made_at_once_get_their_ids_when_they_are_applied() -> None:
    made = classifier()
    proposals = [made.propose(features(3, seed)) for seed in range(4)]
    settled = []
    for answer, change in reversed(proposals):
        assert change is not None
        settled.append(answer.settled(made.apply(change).start))
    assert [answer.joined.tolist() for answer in settled] == [[40 + 3 * i + j for j in range(3)] for i in range(4)]
    for answer in settled:
        known = made.bank.table("id")["id"].tolist()
        assert set(answer.neighbors.ids.flatten().tolist()) <= set(known)
        later = answer.neighbors.ids >= 40  # earlier rows of the same proposal, under the ids that they got
        assert set(answer.neighbors.ids[later].tolist()) <= set(answer.joined.tolist())
    assert made.bank.contents.statistics.stream_count == 12


def _answer_elsewhere(made: AdaNPC, queue: Any) -> None:
    made.step(features(5, 9))
    queue.put(made.digest())


def test_a_bank_can_be_sent_to_a_new_process() -> None:
    made = classifier(storage="int8", capacity=4)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_answer_elsewhere, args=(made, queue))
    child.start()
    elsewhere = queue.get(timeout=600)
    child.join()
    assert child.exitcode == 0
    made.step(features(5, 9))
    assert elsewhere == made.digest()


def test_nobody_can_foresee_which_rows_a_reservoir_keeps() -> None:
    kept = set()
    for _ in range(5):
        bank = MemoryBank(2, 2, capacity=10, evict="reservoir")
        bank.apply(Append(torch.rand(300, 2) + 0.1, torch.zeros(300, dtype=torch.int64), Origin.ADMITTED))
        kept.add(tuple(bank.table("id")["id"].tolist()))
    assert len(kept) == 5


def test_an_image_sent_a_thousand_times_gets_few_votes() -> None:
    made = AdaNPC(MemoryBank(DIM, CLASSES), k=10, admission=everyone & Admission(max_copies=3))
    made.learn(features(60, 0), torch.arange(60) % CLASSES)
    wrong = features(1, 99)
    made.step(wrong.repeat(1000, 1))
    made.step(wrong + 1e-5 * features(200, 5))  # and nearly the same, too
    assert len(made.bank) == 63


def test_a_huge_k_costs_no_more_than_the_rows_there_are() -> None:
    made = AdaNPC(MemoryBank(DIM, CLASSES), k=2**24)
    made.learn(features(60, 0), torch.arange(60) % CLASSES)
    answer = made.predict(features(2, 1))
    assert answer.neighbors.ids.shape[1] <= 4096
    assert sorted(row for row in answer.neighbors.ids[0].tolist() if row >= 0) == list(range(60))


def test_what_no_log_could_keep_is_refused_when_it_is_given() -> None:
    bad: Any
    for bad in (
        lambda: Veto((1,), who=None),  # type: ignore[arg-type]
        lambda: Veto(3),  # type: ignore[arg-type]
        lambda: Veto("12"),  # type: ignore[arg-type]
        lambda: Veto((1,), when=float("nan")),
        lambda: Restore((1.5,)),  # type: ignore[arg-type]
        lambda: Relabel((1,), 0.5),  # type: ignore[arg-type]
        lambda: AdaNPC(MemoryBank(2, 2), prior=1.5),
        lambda: AdaNPC(MemoryBank(2, 2), k=2.5),
        lambda: AdaNPC(MemoryBank(2, 2), admission=0.9),
    ):
        with pytest.raises(ValueError, match="must be"):
            bad()


def test_what_is_not_a_change_is_refused() -> None:
    made = classifier()
    before = made.digest()

    class Looks:
        ids = (1,)
        who = why = ""
        when = None

    for odd in (Looks(), None, "veto", {"ids": (1,)}):
        with pytest.raises(ValueError, match="a change must be an Append, .* or Rollback, got a "):
            made.apply(odd)  # type: ignore[arg-type]
    assert made.digest() == before


def test_vetoed_rows_fill_neither_capacity_nor_quota() -> None:
    made = AdaNPC(MemoryBank(2, 2, capacity=3), k=1, admission=Admission(class_quota=3))
    made.learn(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    ids = made.step(torch.tensor([[1.0, 0.1], [1.0, 0.2], [1.0, 0.3]])).joined.tolist()
    assert made.step(torch.tensor([[1.0, 0.4]])).joined.tolist() == [-1]
    made.apply(Veto(tuple(ids), "Ada", "all wrong"))
    again = made.step(torch.tensor([[1.0, 0.4], [1.0, 0.5]])).joined.tolist()
    assert -1 not in again
    assert len(made.bank) == 7
    made.apply(Restore(tuple(ids[:2]), "Ada", "two were right"))
    voting = [row for row in made.bank.table("id")["id"].tolist() if row not in made.bank.vetoes]
    assert voting == [0, 1, *ids[:2], again[1]]  # three of them are admitted: the oldest of the others left


def test_a_rollback_forgets_what_came_since_and_nothing_else() -> None:
    made = classifier(capacity=5)
    made.step(features(4, 1))
    made.apply(Veto((1,), "Ada", "blurred", 5.0))
    earlier = made.bank.contents
    expected = made.predict(features(20, 2))
    made.step(features(30, 3))  # evicts all that was admitted before
    made.apply(Restore((1,), "mallory"))
    made.apply(Relabel((2,), 0, "mallory"))
    made.apply(made.rollback(earlier, who="guard", why="answers fell apart"))
    answer = made.predict(features(20, 2))
    assert torch.equal(answer.probs, expected.probs)
    assert made.bank.vetoes[1].why == "blurred"
    assert made.bank.next_id > earlier.next_id  # ids are never given twice


def test_earlier_contents_stay_whatever_happens_later() -> None:
    made = classifier(capacity=5)
    made.step(features(5, 1))
    first = made.bank.contents
    made.step(features(5, 2))
    second = made.bank.contents
    tables = [{name: column.clone() for name, column in contents.table().items()} for contents in (first, second)]
    made.bank.revert(first)
    made.step(features(9, 3))
    made.apply(Relabel((1,), 0))
    for contents, table in zip((first, second), tables, strict=True):
        for name, column in contents.table().items():
            assert torch.equal(column, table[name]), name


def test_who_keeps_earlier_contents_does_not_make_a_bank_grow() -> None:
    made = classifier(capacity=5)
    earlier = made.bank.contents
    for seed in range(200):
        made.step(features(1, seed))
    assert len(earlier) == 40
    assert made.bank.contents.index.slots < 60
