"""MemoryBank: changes as values, eviction, vetoes, identity."""

from __future__ import annotations

import copy
import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adanpc.core import AdaNPC, Append, Delete, MemoryBank, Origin, Relabel, Restore, Veto
from adanpc.core.codec import decode, encode
from adanpc.core.contents import Pool
from adanpc.core.eviction import random_rank
from adanpc.errors import AdaNPCError, ChangeError, EmptyBankError, FeatureError, LabelError, RowError
from adanpc.index import ExactIndex, ProgressiveIndex, unit
from adanpc.index.protocol import Multiplying


def bank(rows: int = 4, **options: Any) -> MemoryBank:
    made = MemoryBank(3, 2, **options)
    made.apply(Append(torch.eye(3)[torch.arange(rows) % 3] + 0.1, torch.arange(rows) % 2))
    return made


class PlainBank:
    """What a bank must do, in plain Python: a dictionary of rows and loops."""

    def __init__(self, capacity: int | None, evict: str, seed: int) -> None:
        self.capacity, self.evict, self.seed = capacity, evict, seed
        self.rows: dict[int, list[Any]] = {}  # label, origin, vetoed
        self.history: dict[int, list[str]] = {}
        self.arrived = 0

    def append(self, labels: list[int], origin: Origin) -> None:
        for label in labels:
            self.rows[self.arrived] = [label, origin, False]
            self.arrived += 1
            self.make_room(set())

    def voting(self) -> dict[int, int]:
        """The labels of admitted rows that may vote."""
        return {row: label for row, (label, origin, vetoed) in self.rows.items() if origin == 1 and not vetoed}

    def make_room(self, protected: set[int]) -> None:
        if self.capacity is None:
            return
        spared: list[int] = []
        while len(self.voting()) > self.capacity:
            candidates = {row: label for row, label in self.voting().items() if row not in spared}
            leaver = self.next_to_leave(candidates) if candidates else spared.pop(0)
            if candidates and leaver in protected:
                spared.append(leaver)
            else:
                self.drop(leaver)

    def next_to_leave(self, rows: dict[int, int]) -> int:
        if self.evict == "reservoir":
            return min(rows, key=lambda row: random_rank(row, self.seed))
        if self.evict == "balanced":
            counts = {label: list(rows.values()).count(label) for label in rows.values()}
            largest = min(counts, key=lambda label: (-counts[label], label))
            return min(row for row, label in rows.items() if label == largest)
        return min(rows)

    def drop(self, row: int) -> None:
        self.rows.pop(row)
        self.history.pop(row, None)

    def judge(self, rows: tuple[int, ...], verdict: str) -> None:
        for row in dict.fromkeys(rows):
            self.history.setdefault(row, []).append(verdict)
        returning = {row for row in rows if self.rows[row][2]}
        for row in rows:
            self.rows[row][2] = verdict == "veto"
        if verdict == "restore":
            self.make_room(returning)

    def relabel(self, rows: tuple[int, ...], label: int) -> None:
        for row in dict.fromkeys(rows):
            self.history.setdefault(row, []).append("relabel")
            origin = self.rows[row][1]
            self.rows[row][:2] = [label, Origin.EXPERT if origin == Origin.ADMITTED else origin]


class Life(RuleBasedStateMachine):
    """Any sequence of changes keeps the bank equal to plain Python."""

    @initialize(
        storage=st.sampled_from(["float32", "float16", "int8"]),
        capacity=st.sampled_from([None, 1, 5]),
        evict=st.sampled_from(["fifo", "balanced", "reservoir"]),
        soft=st.booleans(),
    )
    def start(self, storage: str, capacity: int | None, evict: str, soft: bool) -> None:
        self.bank = MemoryBank(3, 4, storage=storage, capacity=capacity, evict=evict, soft=soft, seed=9)
        self.plain = PlainBank(capacity, evict, 9)
        self.earlier = [(self.bank.contents, copy.deepcopy(self.plain))]
        self.deleted: set[int] = set()

    @rule(labels=st.lists(st.integers(0, 3), max_size=6), origin=st.sampled_from(list(Origin)))
    def append(self, labels: list[int], origin: Origin) -> None:
        features = torch.rand(len(labels), 3) + 0.1
        ids = self.bank.apply(Append(features, torch.tensor(labels, dtype=torch.int64), origin))
        assert ids == range(self.plain.arrived, self.plain.arrived + len(labels))
        self.plain.append(labels, origin)

    def some_rows(self, data: st.DataObject) -> tuple[int, ...]:
        return tuple(data.draw(st.lists(st.sampled_from(sorted(self.plain.rows)), max_size=3)))

    @rule(data=st.data(), verdict=st.sampled_from(["veto", "restore"]))
    def judge(self, data: st.DataObject, verdict: str) -> None:
        if self.plain.rows:
            rows = self.some_rows(data)
            kind = Veto if verdict == "veto" else Restore
            self.bank.apply(kind(rows, "me", "why", 7.5))
            self.plain.judge(rows, verdict)

    @rule(data=st.data(), label=st.integers(0, 3))
    def relabel(self, data: st.DataObject, label: int) -> None:
        if self.plain.rows:
            rows = self.some_rows(data)
            self.bank.apply(Relabel(rows, label, "me"))
            self.plain.relabel(rows, label)

    @rule(data=st.data())
    def relabel_each(self, data: st.DataObject) -> None:
        if self.plain.rows:
            rows = tuple(dict.fromkeys(self.some_rows(data)))
            labels = tuple(data.draw(st.integers(0, 3)) for _ in rows)
            self.bank.apply(Relabel(rows, labels, "me"))
            for row, label in zip(rows, labels, strict=True):
                self.plain.relabel((row,), label)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.plain.rows:
            rows = self.some_rows(data)
            self.bank.apply(Delete(rows))
            for row in set(rows):
                self.plain.drop(row)
            self.deleted.update(rows)

    @rule()
    def remember(self) -> None:
        self.earlier.append((self.bank.contents, copy.deepcopy(self.plain)))

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        contents, plain = data.draw(st.sampled_from(self.earlier))
        change = AdaNPC(self.bank).rollback(contents)
        self.bank.apply(decode(encode(change)))
        arrived = self.plain.arrived
        self.plain = copy.deepcopy(plain)
        self.plain.arrived = arrived
        for row in self.deleted.intersection(self.plain.rows):  # for good
            self.plain.drop(row)
        then = [entry for entry in contents.state()["document"]["judgments"] if entry[0] not in self.deleted]
        assert self.bank.state()["document"]["judgments"] == then

    @rule()
    def unknown_rows_change_nothing(self) -> None:
        before = self.bank.digest()
        with pytest.raises(RowError, match="never existed"):
            self.bank.apply(Veto((self.plain.arrived + 3,)))
        assert self.bank.digest() == before

    @invariant()
    def is_the_plain_bank(self) -> None:
        if not hasattr(self, "bank"):
            return
        rows = self.plain.rows
        table = self.bank.table()
        assert table["id"].tolist() == sorted(rows)
        assert table["label"].tolist() == [rows[row][0] for row in sorted(rows)]
        assert table["origin"].tolist() == [rows[row][1] for row in sorted(rows)]
        assert table["state"].tolist() == [2 if rows[row][2] else 1 for row in sorted(rows)]
        if self.bank.soft:
            assert table["soft"].argmax(1).tolist() == table["label"].tolist()
        assert set(self.bank.vetoes) == {row for row, (_, _, vetoed) in rows.items() if vetoed}
        for row in rows:
            verdicts = [judgment.verdict for judgment in self.bank.history(row)]
            assert verdicts == self.plain.history.get(row, [])
        assert len(self.bank) == len(rows)
        assert self.bank.next_id == self.plain.arrived
        near = self.bank.search(torch.ones(1, 3), len(rows) + 2)
        found = {
            row: label for row, label in zip(near.ids[0].tolist(), near.labels[0].tolist(), strict=True) if row >= 0
        }
        assert found == {row: label for row, (label, _, vetoed) in rows.items() if not vetoed}
        voting = list(self.plain.voting().values())
        assert self.bank.admitted.tolist() == [voting.count(label) for label in range(4)]

    @invariant()
    def survives_a_round_trip(self) -> None:
        if not hasattr(self, "bank"):
            return
        other = MemoryBank.load(self.bank.state())
        assert other.digest() == self.bank.digest()
        assert other.position == self.bank.position
        mine, theirs = self.bank.queue_of(self.bank.contents), other.queue_of(other.contents)
        if mine is None or theirs is None:
            assert mine is theirs
            return
        for row in range(6):
            new = self.plain.arrived + row
            assert mine.push(new, row % 4) == theirs.push(new, row % 4)

    @invariant()
    def earlier_contents_stay_as_they_were(self) -> None:
        if not hasattr(self, "bank"):
            return
        for contents, plain in self.earlier:
            assert contents.table("id")["id"].tolist() == sorted(plain.rows)
            assert contents.table("label")["label"].tolist() == [plain.rows[row][0] for row in sorted(plain.rows)]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_may_be_whole_numbers_of_any_type(dtype: torch.dtype) -> None:
    made = MemoryBank(3, 2)
    made.apply(Append(torch.eye(3), torch.tensor([0, 1, 1]).to(dtype)))
    assert made.table("label")["label"].tolist() == [0, 1, 1]
    assert made.table("label")["label"].dtype == torch.int64


def test_a_bank_starts_empty() -> None:
    made = MemoryBank(3, 2)
    near = made.search(torch.ones(2, 3), 4)
    assert len(made) == 0
    assert near.ids.tolist() == [[-1] * 4] * 2
    assert near.labels.tolist() == [[-1] * 4] * 2
    assert near.similarity.isneginf().all()
    assert near.soft is None
    soft = MemoryBank(3, 2, soft=True).search(torch.ones(2, 3), 4).soft
    assert soft is not None
    assert soft.shape == (2, 4, 2)


@pytest.mark.parametrize("batch", [1, 2])
def test_where_no_row_is_left_nobody_votes(batch: int) -> None:
    made = MemoryBank(3, 2, soft=True)
    for held in range(1, 200):  # through several enlargements
        made.apply(Append(torch.rand(1, 3) + 0.1, torch.tensor([held % 2])))
        near = made.search(torch.ones(batch, 3), held + 2)
        assert sorted(near.ids[-1].tolist()) == [-1, -1, *range(held)]
        assert near.ids[:, -2:].eq(-1).all()
        assert near.labels[:, -2:].eq(-1).all()
        assert near.soft is not None
        assert near.soft.sum(2).tolist() == [[1.0] * held + [0.0, 0.0]] * batch


def test_search_is_pure() -> None:
    made = bank()
    before = made.digest()
    made.search(torch.rand(5, 3), 2)
    made.search(torch.rand(5, 3), 9, exclude=torch.zeros(5, 1, dtype=torch.int64), source=True)
    assert made.digest() == before


@pytest.mark.parametrize("count", [0, 1, 3, 12])
@pytest.mark.parametrize("soft", [True, False])
def test_several_pools_at_once_hold_what_each_search_finds(count: int, soft: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    made = MemoryBank(4, 3, soft=soft)
    for origin in (Origin.SOURCE, Origin.ADMITTED):
        made.apply(Append(torch.randn(30, 4, generator=generator), torch.arange(30) % 3, origin))
    made.apply(Veto(tuple(range(0, 60, 7))))
    queries = unit(torch.randn(count, 4, generator=generator))
    exclude = torch.arange(2 * count).view(count, 2)
    pools = [Pool(5, source=True, soft=False), Pool(40, source=False), Pool(7)]
    together = made.contents.nearest_of(queries, pools, exclude)
    for pool, near in zip(pools, together, strict=True):
        alone = made.contents.nearest(queries, pool.k, exclude, pool.source)
        assert torch.equal(near.ids, alone.ids)
        assert torch.equal(near.similarity, alone.similarity)
        assert torch.equal(near.labels, alone.labels)
        assert (near.soft is not None) == (soft and pool.soft)
        if near.soft is not None:
            assert alone.soft is not None
            assert torch.equal(near.soft, alone.soft)


def test_source_rows_and_others_can_be_asked_for_alone() -> None:
    made = bank(3)
    made.apply(Append(torch.ones(1, 3), torch.tensor([1]), Origin.ADMITTED))
    made.apply(Append(torch.ones(1, 3), torch.tensor([1]), Origin.EXPERT))
    assert sorted(made.search(torch.ones(1, 3), 3, source=True).ids[0].tolist()) == [0, 1, 2]
    assert made.search(torch.ones(1, 3), 3, source=False).ids[0].tolist() == [3, 4, -1]


def test_rows_come_back_by_id_after_their_slots_were_reused() -> None:
    made = MemoryBank(3, 2, capacity=2)
    vectors = torch.rand(7, 3) + 0.1
    for vector in vectors:
        made.apply(Append(vector[None], torch.tensor([0]), Origin.ADMITTED))
    expected = torch.nn.functional.normalize(vectors[[6, 5]], dim=1)
    torch.testing.assert_close(made.rows(torch.tensor([6, 5])), expected, atol=1e-6, rtol=0)
    with pytest.raises(RowError, match="row 4 is not in the bank: it has left"):
        made.rows(torch.tensor([6, 4]))
    with pytest.raises(RowError, match="row 7 is not in the bank: it never existed"):
        made.rows(torch.tensor([7]))


def test_balanced_eviction_protects_the_rare_class() -> None:
    made = MemoryBank(2, 3, capacity=4, evict="balanced")
    for label in [2, 0, 0, 0, 0, 1, 0]:
        made.apply(Append(torch.rand(1, 2) + 0.1, torch.tensor([label]), Origin.ADMITTED))
    assert sorted(made.table()["label"].tolist()) == [0, 0, 1, 2]
    assert made.table()["id"].tolist() == [0, 4, 5, 6]


def test_reservoir_keeps_a_uniform_sample() -> None:
    kept: list[int] = []
    for seed in range(40):
        made = MemoryBank(1, 1, capacity=20, evict="reservoir", seed=seed * 7919)
        made.apply(Append(torch.ones(200, 1), torch.zeros(200, dtype=torch.int64), Origin.ADMITTED))
        kept += made.table("id")["id"].tolist()
    quarters = [sum(start <= row < start + 50 for row in kept) for start in range(0, 200, 50)]
    assert sum(quarters) == 800
    assert all(150 < count < 250 for count in quarters), quarters  # 200 expected, standard deviation about 12


def test_a_batch_larger_than_the_capacity_leaves_its_last_rows() -> None:
    made = MemoryBank(2, 2, capacity=3)
    made.apply(Append(torch.rand(10, 2) + 0.1, torch.arange(10) % 2, Origin.ADMITTED))
    assert made.table()["id"].tolist() == [7, 8, 9]
    assert made.next_id == 10


def test_a_veto_keeps_who_and_why_until_it_is_lifted() -> None:
    made = bank()
    made.apply(Veto((1, 2), "Ada", "blurred"))
    assert made.vetoes[1].who == "Ada"
    assert made.vetoes[2].why == "blurred"
    assert len(made) == 4
    made.apply(Restore((1,)))
    assert set(made.vetoes) == {2}


def test_equal_banks_have_equal_digests_however_they_came_about() -> None:
    features, labels = torch.rand(9, 3) + 0.1, torch.arange(9) % 2
    whole, pieces = MemoryBank(3, 2), MemoryBank(3, 2)
    whole.apply(Append(features, labels))
    for i in range(9):
        pieces.apply(Append(features[i : i + 1], labels[i : i + 1]))
    assert whole.digest() == pieces.digest()


@pytest.mark.parametrize(
    "change",
    [
        Append(torch.ones(1, 3), torch.tensor([0])),
        Veto((0,)),
    ],
)
def test_every_change_changes_the_digest(change: Append | Veto) -> None:
    made = bank()
    before = made.digest()
    made.apply(change)
    assert made.digest() != before


def test_the_digest_sees_every_column() -> None:
    rows, digests = torch.ones(1, 3), set()
    for extra in (
        {},
        {"domain": 1},
        {"keys": torch.tensor([5])},
        {"confidence": torch.tensor([0.5])},
        {"origin": Origin.EXPERT},
    ):
        made = MemoryBank(3, 2)
        made.apply(Append(rows, torch.tensor([0]), **extra))
        digests.add(made.digest())
    vetoed = MemoryBank(3, 2)
    vetoed.apply(Append(rows, torch.tensor([0])))
    vetoed.apply(Veto((0,), "a"))
    digests.add(vetoed.digest())
    assert len(digests) == 6


def test_a_copy_lives_its_own_life() -> None:
    made = bank(capacity=5)
    twin = copy.deepcopy(made)
    twin.apply(Append(torch.ones(9, 3), torch.zeros(9, dtype=torch.int64), Origin.ADMITTED))
    assert made.digest() == bank(capacity=5).digest()


def test_the_caller_may_reuse_its_tensors() -> None:
    features, labels = torch.rand(2, 3) + 0.1, torch.tensor([0, 1])
    made = MemoryBank(3, 2)
    made.apply(Append(features, labels))
    before = made.digest()
    features.zero_()
    labels.zero_()
    assert made.digest() == before


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_bytes_per_row(storage: str) -> None:
    made = MemoryBank(512, 10, storage=storage)
    made.apply(Append(torch.rand(6400, 512), torch.zeros(6400, dtype=torch.int64)))
    coordinate = {"float32": 5, "float16": 2, "int8": 2}[storage]  # float32 and int8: one of them to scan
    assert made.nbytes / 6400 == pytest.approx(512 * coordinate + 64, rel=0.05)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (Append(torch.ones(1, 3), torch.tensor([2])), LabelError, r"labels must be between 0 and 1, got 2"),
        (Append(torch.ones(1, 3), torch.tensor([-1])), LabelError, "got -1"),
        (Append(torch.ones(1, 3), torch.tensor([0.0])), LabelError, "labels must be whole numbers, got torch.float32"),
        (Append(torch.ones(2, 3), torch.tensor([0])), LabelError, r"labels must have shape \(2,\)"),
        (Append(torch.ones(1, 3), torch.tensor([0]), domain=torch.tensor([1, 2])), LabelError, "domain must have"),
        (Append(torch.ones(1, 3), torch.tensor([0]), keys=torch.tensor([0.5])), LabelError, "keys must be whole"),
        (Append(torch.ones(1, 3), torch.tensor([0]), soft=torch.ones(1, 2)), LabelError, "create it with soft=True"),
        (
            Append(torch.ones(1, 3), torch.tensor([0]), confidence=torch.tensor([torch.nan])),
            LabelError,
            "confidence must be finite",
        ),
        (Append(torch.ones(1, 3), torch.tensor([0]), origin=7), ValueError, "7 is not a valid Origin"),  # type: ignore[arg-type]
        (Append(torch.ones(1, 4), torch.tensor([0])), FeatureError, r"shape \(B, 3\), got \(1, 4\)"),
        (Append(torch.zeros(1, 3), torch.tensor([0])), FeatureError, "zero vector"),
        (Append(torch.full((1, 3), float("nan")), torch.tensor([0])), FeatureError, "NaN"),
        (Veto((9,)), RowError, "row 9 is not in the bank: it never existed"),
        (Restore((-1,)), RowError, "row -1 is not in the bank"),
        (Relabel((0,), 2), LabelError, "labels must be between 0 and 1, got 2"),
    ],
)
def test_a_refused_change_says_why_and_changes_nothing(
    change: Append | Veto | Restore | Relabel, error: type[ValueError], message: str
) -> None:
    made = bank()
    before = made.digest()
    with pytest.raises(error, match=message):
        made.apply(change)
    assert made.digest() == before


def test_an_index_of_codes_has_no_products() -> None:
    contents = MemoryBank(3, 2, storage="progressive").contents
    assert not isinstance(contents.index, Multiplying)
    assert contents.products(torch.eye(3)) is None


def test_soft_labels_must_fit() -> None:
    with pytest.raises(LabelError, match=r"soft labels must have shape \(1, 2\), one for each row, got \(1, 3\)"):
        MemoryBank(3, 2, soft=True).apply(Append(torch.ones(1, 3), torch.tensor([0]), soft=torch.ones(1, 3)))
    with pytest.raises(LabelError, match="soft labels must be finite"):
        MemoryBank(3, 1, soft=True).apply(Append(torch.ones(1, 3), torch.tensor([0]), soft=torch.tensor([[torch.inf]])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"classes": 0}, "classes must be at least 1, got 0"),
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"evict": "random"}, "evict must be one of fifo, balanced, reservoir, got 'random'"),
        ({"storage": "float8"}, "storage must be one of"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AdaNPCError, match=message):
        MemoryBank(**{"dim": 3, "classes": 2, **options})


def test_k_must_be_at_least_one() -> None:
    with pytest.raises(AdaNPCError, match="k must be at least 1, got 0"):
        bank().search(torch.ones(1, 3), 0)


def test_int8_votes_agree_with_float32() -> None:
    # Classes that overlap, so that many votes are close: the hard case for a coarser storage.
    torch.manual_seed(0)
    random.seed(0)
    centers = torch.randn(40, 64)
    near = torch.randint(0, 40, (6000,))
    features, labels = centers[near] + 2.5 * torch.randn(6000, 64), near % 10
    queries = centers[torch.randint(0, 40, (2000,))] + 2.5 * torch.randn(2000, 64) + torch.randn(64)
    votes = {}
    for storage in ("float32", "int8"):
        made = MemoryBank(64, 10, storage=storage)
        made.apply(Append(features, labels))
        near_labels = made.search(queries, 25).labels
        votes[storage] = torch.nn.functional.one_hot(near_labels, 10).sum(1).argmax(1)
    assert float((votes["int8"] == votes["float32"]).float().mean()) >= 0.995


def test_empty_bank_error_is_an_adanpc_error_and_a_value_error() -> None:
    assert issubclass(EmptyBankError, AdaNPCError)
    assert issubclass(AdaNPCError, ValueError)


def test_more_rows_than_the_capacity_come_back_as_far_as_it_goes() -> None:
    made = MemoryBank(2, 2, capacity=1)
    for _ in range(2):
        (row,) = made.apply(Append(torch.rand(1, 2) + 0.1, torch.tensor([0]), Origin.ADMITTED))
        made.apply(Veto((row,)))
    made.apply(Restore((0, 1)))
    assert made.table("id")["id"].tolist() == [1]
    assert made.admitted.tolist() == [1, 0]


def test_a_bank_says_what_it_is() -> None:
    made = bank(capacity=5)
    made.apply(Veto((0,)))
    assert repr(made).startswith("<MemoryBank of 4 rows, 0 admitted, 1 vetoed: dim=3, classes=2")
    assert repr(AdaNPC(made)).startswith("<AdaNPC with PaperSettings(k=10")


@pytest.mark.parametrize("row", [-1, 4, 2**70])
def test_a_row_that_never_existed_has_no_history(row: int) -> None:
    with pytest.raises(RowError, match="never existed"):
        bank().history(row)


@pytest.mark.parametrize("extra", [{"domain": 2**70}, {"keys": object()}])
def test_columns_that_are_no_numbers_are_named(extra: dict[str, Any]) -> None:
    with pytest.raises(LabelError, match="must be numbers, one for each row, got"):
        bank().apply(Append(torch.ones(1, 3), torch.tensor([0]), **extra))


def test_arrays_and_lists_are_taken_as_they_are() -> None:
    made = bank()
    rows: Any = [[1.0, 0.0, 0.0]]
    assert made.search(rows, 2).ids.tolist() == made.search(torch.tensor(rows), 2).ids.tolist()
    odd: Any
    for odd in (["a"], object()):
        with pytest.raises(FeatureError, match="features must"):
            made.search(odd, 1)


def test_a_bank_can_take_up_the_contents_of_another() -> None:
    made, other = bank(4), bank(70)
    made.revert(other.contents)
    assert made.digest() == other.digest()
    made.apply(Append(torch.ones(1, 3), torch.tensor([1])))
    assert made.table("id")["id"].tolist() == list(range(71))


@pytest.mark.parametrize("setting", ["capacity", "classes", "dim", "evict", "names", "seed", "soft", "storage"])
def test_a_setting_is_not_changed_after_the_fact(setting: str) -> None:
    made = bank()
    before = made.digest()
    with pytest.raises(AdaNPCError, match=f"{setting} of a bank cannot be changed to 10: "):
        setattr(made, setting, 10)
    assert made.digest() == before


def test_one_hot_labels_are_refused_with_the_remedy() -> None:
    with pytest.raises(LabelError, match=r"got \(2, 2\): pass labels.argmax\(1\) if they are one-hot"):
        bank().apply(Append(torch.rand(2, 3), torch.eye(2)))


def test_classes_may_have_names() -> None:
    made = MemoryBank(3, tuple(np.array(["cat", "dog"])))
    assert made.classes == 2
    assert made.names == ("cat", "dog")
    assert MemoryBank(**made.config()).names == ("cat", "dog")
    assert MemoryBank.load(made.state()).names == ("cat", "dog")
    assert pickle.loads(pickle.dumps(made)).names == ("cat", "dog")
    assert made.digest() != MemoryBank(3, 2).digest()
    assert MemoryBank(3, 2).names == ()


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["cat", "cat"], "classes must have different names, got 'cat' more than once"),
        ([0, 1], "each of the classes must be a string, got 0"),
        ("cat", "classes must be a whole number or a list of names, got 'cat'"),
        ([], r"classes must be a whole number, got \[\]"),
    ],
)
def test_names_that_cannot_be_told_apart_are_refused(classes: Any, message: str) -> None:
    with pytest.raises(AdaNPCError, match=message):
        MemoryBank(3, classes)


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.bool])
def test_labels_of_other_whole_numbers_are_stored_as_int64(kind: torch.dtype) -> None:
    bank = MemoryBank(2, 2)
    bank.apply(Append(torch.eye(2), torch.tensor([0, 1], dtype=kind)))
    assert bank.table("label")["label"].dtype == torch.int64
    assert bank.table("label")["label"].tolist() == [0, 1]


@pytest.mark.parametrize("storage", ["float32", "float16", "int8", "progressive"])
def test_memory_says_what_bytes_are_for(storage: str) -> None:
    bank = MemoryBank(20, 3, storage=storage, soft=True)
    assert bank.memory()["total"] == 0
    bank.apply(Append(torch.eye(20), torch.arange(20) % 3))
    parts = bank.memory()
    total = parts.pop("total")
    assert total == sum(parts.values()) == bank.nbytes
    width = {"float32": 4, "float16": 2, "int8": 1, "progressive": 2}[storage]
    assert parts["rows"] == 20 * 20 * width
    assert parts.get("codes", 0) == (20 * (20 + 8) if storage == "float32" else 0)
    assert parts["labels and the like"] == 20 * (3 * 8 + 4 + 1 + 3 * 4)


@pytest.mark.parametrize("storage", ["float32", "int8", "progressive"])
def test_memory_that_is_requested_for_later_rows_is_counted(storage: str) -> None:
    bank = MemoryBank(64, 3, storage=storage)
    bank.apply(Append(torch.eye(64), torch.arange(64) % 3))
    few = bank.memory()
    assert "ahead of growth" not in few, "blocks that still double are counted by their slots"
    many = bank.contents.memory(1 << 16)
    row_bytes = {"float32": 5, "int8": 2, "progressive": 2}[storage] * 64
    assert many["ahead of growth"] >= min(1 << 16, (16 << 20) // (row_bytes + 24)) * row_bytes
    assert many["total"] == sum(size for name, size in many.items() if name != "total")
    assert bank.contents.memory(1 << 24)["ahead of growth"] <= 4 * 16 << 20, "it does not grow with the bank"


def test_nothing_is_requested_ahead_for_rows_in_a_file(tmp_path: Path) -> None:
    made = []
    for index in (ProgressiveIndex, partial(ProgressiveIndex, folder=tmp_path)):
        bank = MemoryBank(64, 3, storage="progressive", index=index)
        made.append(bank.contents.memory(1 << 16)["ahead of growth"])
    assert made[0] - made[1] == min(1 << 16, (16 << 20) // (2 * 64 + 16)) * 2 * 64


def test_the_memory_of_an_index_of_ones_own_is_what_it_says() -> None:
    bank = MemoryBank(20, 3, index=lambda dim, storage, device: Plain(ExactIndex(dim, storage, device)))
    bank.apply(Append(torch.eye(20), torch.arange(20) % 3))
    assert bank.memory() == {"rows": bank.contents.index.nbytes, "labels and the like": 20 * 29, "total": bank.nbytes}


class Plain:
    """Only what the protocol asks for, as an index of one's own has it."""

    def __init__(self, exact: ExactIndex) -> None:
        self._exact = exact

    def __getattr__(self, name: str) -> Any:
        if name == "memory":
            raise AttributeError(name)
        return getattr(self._exact, name)

    def put(self, *args: Any) -> Plain:
        return Plain(self._exact.put(*args))


@pytest.mark.parametrize("storage", ["float32", "progressive"])
def test_a_change_that_needs_too_much_memory_is_refused_before_it_happens(storage: str) -> None:
    needed = MemoryBank(4, 2, storage=storage)
    needed.apply(Append(torch.eye(4), torch.zeros(4).long()))
    most = needed.memory()["total"]
    bank = MemoryBank(4, 2, storage=storage, max_memory=most)
    bank.apply(Append(torch.eye(4)[:3], torch.zeros(3).long()))
    before = bank.digest()
    logged: list[object] = []
    with pytest.raises(ChangeError, match=rf"would need \d+ bytes, more than max_memory={most}: raise it, give a"):
        bank.apply(Append(torch.eye(4)[:2], torch.zeros(2).long()), log=logged.append)
    assert (bank.digest(), bank.position, logged) == (before, 1, [])
    bank.apply(Append(torch.eye(4)[3:], torch.zeros(1).long()))
    copied = pickle.loads(pickle.dumps(bank))
    for made in (bank, copied):
        with pytest.raises(ChangeError, match="max_memory"):
            made.apply(Append(torch.eye(4)[:1], torch.zeros(1).long()))
    bank.apply(Delete((0,)))
    bank.apply(Append(torch.eye(4)[:1], torch.zeros(1).long()))  # in the slot that is free now
    assert len(bank) == 4
    with pytest.raises(AdaNPCError, match="max_memory must be at least 1, got 0"):
        MemoryBank(4, 2, max_memory=0)


def test_few_rows_are_looked_up_as_many_are() -> None:
    bank = MemoryBank(4, 3)
    bank.apply(
        Append(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(60, dtype=torch.int64))
    )
    bank.apply(Veto((5, 9), who="anna", why="blurred"))
    bank.apply(Delete((30,)))
    bank.apply(Relabel((7,), 1, who="anna", why="a cat"))  # which moves it to another slot
    ids = torch.tensor([7, 5, 9, 5, 0, 59, 7])
    many = torch.cat([ids, torch.arange(20)])
    assert torch.equal(bank.contents.slots_of(ids), bank.contents.slots_of(many)[:7])
    assert torch.equal(bank.rows(ids), bank.rows(many)[:7])
    with pytest.raises(RowError, match="row 30 is not in the bank: it has left"):
        bank.rows(torch.tensor([0, 30]))
