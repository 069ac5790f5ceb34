"""Other classifiers of the same rows: another capacity, more classes, fewer rows, two in one. The given ones stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import adanpc
from adanpc import (
    AdaNPC,
    Delete,
    MemoryBank,
    Relabel,
    Restore,
    Veto,
    everyone,
    merged,
    reduced,
    with_capacity,
    with_classes,
)
from adanpc.core.eviction import random_rank
from adanpc.errors import AdaNPCError, LabelError
from adanpc.models import RecipeError

STORAGE = ["float32", "float16", "int8"]


def filled(which: int = 0, **options: Any) -> AdaNPC:
    """Four source rows, some that were admitted, one that was vetoed, and one that was deleted."""
    random = torch.Generator().manual_seed(which)
    made = AdaNPC(MemoryBank(3, 2, **options), k=3, admission=everyone)
    made.learn(torch.randn(5, 3, generator=random), torch.tensor([0, 1, 0, 1, 0]), keys=torch.arange(5))
    made.step(torch.randn(6, 3, generator=random))
    made.apply(Veto((1,), who="me"))
    made.apply(Delete((2,)))
    return made


def queries() -> torch.Tensor:
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(9))


class TestCapacity:
    @pytest.mark.parametrize("storage", STORAGE)
    @pytest.mark.parametrize("evict", ["fifo", "balanced", "reservoir"])
    def test_rows_leave_by_the_policy_of_the_bank(self, storage: str, evict: str) -> None:
        options: dict[str, Any] = {"storage": storage, "evict": evict, "seed": 3}
        made = filled(**options)
        before = made.digest()
        smaller = with_capacity(made, 4)
        assert int(smaller.bank.admitted.sum()) == 4
        assert smaller.bank.capacity == 4
        assert made.digest() == before
        ids = range(5, 11)
        expected = {"fifo": [7, 8, 9, 10], "reservoir": sorted(sorted(ids, key=lambda row: random_rank(row, 3))[2:])}
        if evict in expected:
            assert smaller.bank.table("id")["id"].tolist() == [0, 1, 3, 4, *expected[evict]]
        smaller.step(queries())
        assert int(smaller.bank.admitted.sum()) == 4

    def test_more_room_and_none_at_all(self) -> None:
        made = filled(capacity=3)
        assert with_capacity(made, None).bank.capacity is None
        larger = with_capacity(made, 100)
        torch.testing.assert_close(larger.predict(queries()).probs, made.predict(queries()).probs)
        larger.step(queries())
        assert int(larger.bank.admitted.sum()) == 10

    def test_the_history_of_rows_that_leave_goes_with_them(self) -> None:
        made = filled()
        made.apply(Veto((5,)))
        made.apply(Restore((5,)))
        smaller = with_capacity(made, 1)
        assert set(smaller.bank.contents.judgments) == {1}
        assert smaller.bank.history(1) == made.bank.history(1)

    @pytest.mark.parametrize("capacity", [0, 2.5, "many"])
    def test_a_capacity_that_makes_no_sense_is_refused(self, capacity: Any) -> None:
        with pytest.raises(AdaNPCError, match="capacity must be"):
            with_capacity(filled(), capacity)


class TestClasses:
    @pytest.mark.parametrize("soft", [False, True])
    def test_a_class_is_added(self, soft: bool) -> None:
        made = filled(soft=soft)
        larger = with_classes(made, ["cat", "dog", "bird"])
        assert larger.bank.names == ("cat", "dog", "bird")
        before = made.predict(queries()).probs
        torch.testing.assert_close(larger.predict(queries()).probs[:, :2], before)
        (row,) = larger.learn(queries()[:1], torch.tensor([2]))
        assert int(larger.predict(queries()[:1]).neighbors.ids[0, 0]) == row
        larger.apply(Relabel((0,), 2))
        again = with_classes(larger, ["cat", "dog", "bird", "fish"])
        assert again.bank.classes == 4

    def test_a_number_is_enough(self) -> None:
        assert with_classes(filled(), 3).bank.classes == 3
        assert with_classes(filled(), ["cat", "dog"]).bank.names == ("cat", "dog")

    def test_classes_are_neither_lost_nor_moved(self) -> None:
        with pytest.raises(LabelError, match="classes must be at least 2, as many as the bank has, got 1"):
            with_classes(filled(), 1)
        named = with_classes(filled(), ["cat", "dog"])
        for classes in (["dog", "cat", "bird"], 3):
            with pytest.raises(LabelError, match=r"must begin with the names that the bank has, \['cat', 'dog'\]"):
                with_classes(named, classes)
        with pytest.raises(AdaNPCError, match="classes must be a whole number, got 2.5"):
            with_classes(filled(), 2.5)  # type: ignore[arg-type]


class TestMerge:
    @pytest.mark.parametrize("storage", STORAGE)
    def test_all_rows_vote(self, storage: str) -> None:
        one = filled(0, storage=storage)
        two = filled(1, storage=storage)
        before = one.digest(), two.digest()
        both = merged(one, two)
        assert len(both.bank) == len(one.bank) + len(two.bank)
        assert both.bank.next_id == one.bank.next_id + two.bank.next_id
        assert both.position == one.position + two.position
        shift = one.bank.next_id
        near = both.bank.search(queries(), 4)
        for query in range(len(queries())):
            candidates = []
            for bank, first in ((one.bank, 0), (two.bank, shift)):
                found = bank.search(queries(), 4)
                pairs = zip(found.similarity[query].tolist(), (found.ids[query] + first).tolist(), strict=True)
                candidates += list(pairs)
            expected = [row for _, row in sorted(candidates, key=lambda pair: (-pair[0], pair[1]))[:4]]
            assert near.ids[query].tolist() == expected
        assert sorted(both.bank.vetoes) == [1, 1 + shift]
        assert both.bank.contents.deleted == {2, 2 + shift}
        assert (one.digest(), two.digest()) == before
        assert AdaNPC.load(both.state()).digest() == both.digest()

    def test_source_rows_that_both_hold_are_kept_once(self) -> None:
        start = filled(0)
        one = AdaNPC.load(start.state())
        two = AdaNPC.load(start.state())
        one.step(torch.randn(3, 3, generator=torch.Generator().manual_seed(4)))
        two.step(torch.randn(4, 3, generator=torch.Generator().manual_seed(5)))
        both = merged(one, two)
        origins = both.bank.to_pandas()["origin"].value_counts()
        assert origins["source"] == 4 + 1  # the vetoed row of the second keeps its history
        assert origins["admitted"] == (6 + 3) + (6 + 4)
        assert sorted(both.bank.vetoes) == [1, 1 + one.bank.next_id]

    @staticmethod
    def safe(stream: int, source: int = 0) -> AdaNPC:
        made = AdaNPC(MemoryBank(8, 3, soft=True), preset="safe")
        random = torch.Generator().manual_seed(source)
        made.learn(torch.randn(60, 8, generator=random), torch.arange(60) % 3)
        made.step(torch.randn(40, 8, generator=torch.Generator().manual_seed(stream)))
        return made

    def test_two_copies_of_a_safe_bank_become_one(self) -> None:
        one = self.safe(1)
        two = self.safe(2)
        both = merged(one, two)
        assert len(both.bank) == 60 + 40 + 40
        stored = both.bank.rows(both.bank.table("id")["id"])
        assert torch.equal(stored[:100], one.bank.rows(torch.arange(100)))
        assert torch.equal(stored[100:], two.bank.rows(torch.arange(60, 100)))
        asked = torch.randn(9, 8)
        torch.testing.assert_close(both.predict(asked).frozen, one.predict(asked).frozen, rtol=0, atol=0)
        again = AdaNPC.load(both.state())
        assert torch.equal(again.step(asked).probs, both.step(asked).probs)

    def test_safe_banks_of_other_sources_are_refused(self) -> None:
        with pytest.raises(AdaNPCError, match="can be merged only if they began with the same source rows"):
            merged(self.safe(1), self.safe(1, source=5))
        with pytest.raises(AdaNPCError, match="can be merged only if they began with the same source rows"):
            merged(self.safe(1), AdaNPC(MemoryBank(8, 3, soft=True), preset="safe"))
        with pytest.raises(AdaNPCError, match="must have the same preset, got 'safe' and 'paper'"):
            merged(self.safe(1), AdaNPC(MemoryBank(8, 3, soft=True)))

    def test_the_capacity_of_the_first_is_kept(self) -> None:
        both = merged(filled(0, capacity=7), filled(1, capacity=20))
        assert int(both.bank.admitted.sum()) == 7

    @pytest.mark.parametrize(
        ("other", "name"),
        [
            (AdaNPC(MemoryBank(4, 2)), "dim"),
            (AdaNPC(MemoryBank(3, 3)), "classes"),
            (AdaNPC(MemoryBank(3, ["cat", "dog"])), "names"),
            (AdaNPC(MemoryBank(3, 2, storage="int8")), "storage"),
            (AdaNPC(MemoryBank(3, 2, soft=True)), "soft"),
        ],
    )
    def test_banks_that_differ_are_refused(self, other: AdaNPC, name: str) -> None:
        with pytest.raises(AdaNPCError, match=f"banks that are merged must have the same {name}, got"):
            merged(filled(), other)

    def test_rows_without_their_means_are_refused(self) -> None:
        centered = AdaNPC(MemoryBank(3, 2), centering="source")
        with pytest.raises(AdaNPCError, match=r"banks with centering \('source'\) cannot be merged, since"):
            merged(filled(), centered)

    def test_something_else_is_refused(self) -> None:
        other: Any = MemoryBank(3, 2)
        with pytest.raises(AdaNPCError, match="expected an AdaNPC or a wrapped model, got MemoryBank"):
            merged(filled(), other)


class TestReduced:
    @staticmethod
    def learned(count: int = 60, **options: Any) -> AdaNPC:
        """Two classes in two domains: of class 0 twice as many rows as of class 1."""
        made = AdaNPC(MemoryBank(6, 2, **options), k=3, admission=everyone)
        rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
        made.learn(rows, (torch.arange(count) % 3 == 2).long(), domain=torch.arange(count) % 2)
        return made

    @pytest.mark.parametrize("storage", STORAGE)
    def test_of_each_class_and_domain_the_same_share_stays(self, storage: str) -> None:
        made = self.learned(storage=storage)
        before = made.digest()
        smaller = reduced(made, 0.3)
        table = smaller.bank.table("id", "label", "domain")
        kinds = list(zip(table["label"].tolist(), table["domain"].tolist(), strict=True))
        assert sorted((kind, kinds.count(kind)) for kind in set(kinds)) == [
            ((0, 0), 6), ((0, 1), 6), ((1, 0), 3), ((1, 1), 3),
        ]  # fmt: skip
        assert torch.equal(smaller.bank.rows(table["id"]), made.bank.rows(table["id"]))
        assert smaller.bank.next_id == made.bank.next_id
        assert made.digest() == before

    def test_the_rows_are_always_the_same_and_not_the_first(self) -> None:
        stays = reduced(self.learned(), 0.5).bank.table("id")["id"].tolist()
        assert stays == reduced(self.learned(), 0.5).bank.table("id")["id"].tolist()
        assert stays != list(range(30))

    def test_what_was_admitted_or_judged_stays(self) -> None:
        made = self.learned()
        made.step(torch.randn(6, 6, generator=torch.Generator().manual_seed(3)))
        made.apply(Veto((1,), who="me"))
        made.apply(Relabel((3,), 1))
        smaller = reduced(made, 0.01)
        ids = smaller.bank.table("id")["id"].tolist()
        assert len(ids) == 4 + 2 + 6  # one of each class and domain, those that were judged, those that were admitted
        assert {1, 3, *range(60, 66)} < set(ids)
        assert smaller.bank.history(3) == made.bank.history(3)

    def test_all_of_it_is_the_same_classifier(self) -> None:
        made = self.learned()
        assert reduced(made, 1).digest() == made.digest()

    def test_the_transform_of_the_preset_safe_stays(self) -> None:
        made = AdaNPC(MemoryBank(6, 2, soft=True), preset="safe")
        labels = torch.arange(80) % 2
        made.learn(torch.randn(80, 6, generator=torch.Generator().manual_seed(4)) + 3 * labels[:, None], labels)
        smaller = reduced(made, 0.25)
        assert len(smaller.bank) == 20
        ours = smaller.state()["tensors"]
        theirs = made.state()["tensors"]
        assert torch.equal(ours["transform.origin"], theirs["transform.origin"])
        smaller.step(torch.randn(5, 6, generator=torch.Generator().manual_seed(5)))

    @pytest.mark.parametrize("share", [0, -0.1, 1.5, float("nan"), "half"])
    def test_a_share_that_makes_no_sense_is_refused(self, share: Any) -> None:
        with pytest.raises(AdaNPCError, match="share must be"):
            reduced(self.learned(), share)

    def test_of_a_wrapped_model(self) -> None:
        wrapped = TestWrapped.wrapped()
        smaller = reduced(wrapped, 0.5)
        assert smaller.model is wrapped.model
        assert len(smaller.classifier.bank) == 4


class TestWrapped:
    @staticmethod
    def wrapped(seed: int = 0) -> adanpc.Wrapped:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        torch.manual_seed(seed)
        return adanpc.wrap(model, [(torch.randn(6, 3), torch.arange(6) % 2)], preset="paper", k=3, encode_size=2)

    def test_the_model_comes_along(self) -> None:
        wrapped = self.wrapped()
        smaller = with_capacity(wrapped, 5)
        assert smaller.model is wrapped.model
        assert smaller.encode_size == 2
        assert smaller.recipe == wrapped.recipe
        answer = smaller.predict(torch.randn(2, 3))
        assert answer.probs.shape == (2, 2)
        smaller.step(torch.randn(9, 3))
        smaller.reset()
        assert len(smaller.classifier.bank) == 6

    def test_models_that_differ_are_not_merged(self) -> None:
        wrapped = self.wrapped()
        assert len(merged(wrapped, self.wrapped(1)).classifier.bank) == 12
        other = self.wrapped()
        nn.init.zeros_(other.model[0].weight)  # type: ignore[index]
        with pytest.raises(RecipeError, match="weights"):
            merged(wrapped, other)
