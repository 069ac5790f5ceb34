"""Memories of images against slow bookkeeping."""

from __future__ import annotations

import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.exemplars import BalancedReservoir, Exemplar, Exemplars, TimelyMemory

Offer = tuple[int, float]  # label and uncertainty
OFFERS = st.lists(st.tuples(st.integers(0, 3), st.floats(0, math.log(4))), max_size=60)


def offer(memory: Exemplars, offers: list[Offer], first: int = 0) -> None:
    """Adds images that hold their own number."""
    for number, (label, uncertainty) in enumerate(offers, start=first):
        memory.add(Exemplar(torch.tensor([float(number)]), label, uncertainty))


def numbers(memory: Exemplars) -> list[int]:
    return [int(one.image) for one in memory.kept]


class SlowTimely:
    """The paper's Algorithm 1, with one list of items for each class."""

    def __init__(self, capacity: int, classes: int, timeliness: float, uncertainty: float) -> None:
        self.capacity = capacity
        self.classes = classes
        self.weights = (timeliness, uncertainty)
        self.lists: list[list[dict[str, float]]] = [[] for _ in range(classes)]

    def score(self, item: dict[str, float]) -> float:
        age = 1 / (1 + math.exp(-item["age"] / self.capacity))
        return self.weights[0] * age + self.weights[1] * item["uncertainty"] / math.log(self.classes)

    def dropped(self, classes: list[int], new: dict[str, float]) -> bool:
        """Drops the item with the highest score in these classes, if it is higher than the new one's."""
        place = (-1, -1)
        highest = -math.inf
        for label in classes:
            for index, item in enumerate(self.lists[label]):
                if self.score(item) >= highest:
                    place = (label, index)
                    highest = self.score(item)
        if highest > self.score(new):
            self.lists[place[0]].pop(place[1])
            return True
        return False

    def add(self, number: int, label: int, uncertainty: float) -> None:
        new = {"number": number, "uncertainty": uncertainty, "age": 0}
        held = [len(items) for items in self.lists]
        if held[label] >= self.capacity / self.classes:
            room = self.dropped([label], new)
        elif sum(held) < self.capacity:
            room = True
        else:
            room = self.dropped([other for other in range(self.classes) if held[other] == max(held)], new)
        if room:
            self.lists[label].append(new)
        for items in self.lists:
            for item in items:
                item["age"] += 1


@settings(max_examples=100, deadline=None)
@given(offers=OFFERS, capacity=st.integers(1, 9), timeliness=st.sampled_from([0.0, 1.0]))
def test_timely_memory_is_that_of_the_lists(offers: list[Offer], capacity: int, timeliness: float) -> None:
    memory = TimelyMemory(capacity, 4, timeliness=timeliness, uncertainty=0.5)
    offer(memory, offers)
    slow = SlowTimely(capacity, 4, timeliness, 0.5)
    for number, (label, uncertainty) in enumerate(offers):
        slow.add(number, label, uncertainty)
    for label, items in enumerate(slow.lists):
        kept = [(int(one.image), one.age) for one in memory.kept if one.label == label]
        assert kept == [(item["number"], item["age"]) for item in items]
    assert len(memory.kept) <= capacity


def test_timely_memory_prefers_the_recent_and_the_certain() -> None:
    memory = TimelyMemory(4, 2)
    offer(memory, [(0, 0.1), (0, 0.6), (0, 0.1), (0, 0.69)])
    assert numbers(memory) == [0, 2]  # the unsure one left; a newcomer less certain than all stays outside
    offer(memory, [(0, 0.1)], first=4)
    assert numbers(memory) == [2, 4]  # equally certain, but the oldest


def test_timely_memory_gives_no_class_more_than_its_share() -> None:
    memory = TimelyMemory(8, 4)
    offer(memory, [(0, 0.1)] * 20 + [(2, 0.2)] * 20)
    assert memory.held() == [2, 0, 2, 0]


@settings(max_examples=100, deadline=None)
@given(offers=OFFERS, capacity=st.integers(1, 9), seed=st.integers(0, 9))
def test_the_reservoir_is_as_balanced_as_its_stream_allows(offers: list[Offer], capacity: int, seed: int) -> None:
    torch.manual_seed(seed)
    memory = BalancedReservoir(capacity, 4)
    came = [0] * 4
    for number, (label, uncertainty) in enumerate(offers):
        before = memory.held()
        largest = memory.largest()
        offer(memory, [(label, uncertainty)], first=number)
        came[label] += 1
        after = memory.held()
        assert sum(after) == min(number + 1, capacity)
        if sum(before) == capacity:
            changes = [now - then for now, then in zip(after, before, strict=True)]
            if label in largest:
                assert changes == [0, 0, 0, 0]  # it took the place of its like, or stayed outside
            else:
                assert changes[label] == 1
                assert [changes[other] for other in largest].count(-1) == 1
    assert memory.seen == came
    assert all(offers[number][0] == one.label for number, one in zip(numbers(memory), memory.kept, strict=True))


def test_a_full_reservoir_comes_to_hold_equally_many_of_each_class() -> None:
    torch.manual_seed(0)
    memory = BalancedReservoir(9, 3)
    offer(memory, [(0, 0.0)] * 50)
    assert memory.held() == [9, 0, 0]
    offer(memory, [(1, 0.0)] * 50 + [(2, 0.0)] * 50)
    assert memory.held() == [3, 3, 3]


def test_of_one_class_every_moment_is_kept_equally_often() -> None:
    torch.manual_seed(0)
    runs = 1200
    length = 12
    capacity = 3
    counts = [0] * length
    for _ in range(runs):
        memory = BalancedReservoir(capacity, 2)
        offer(memory, [(1, 0.0)] * length)
        for number in numbers(memory):
            counts[number] += 1
    expected = runs * capacity / length
    spread = math.sqrt(expected * (1 - capacity / length))
    assert all(abs(count - expected) < 4 * spread for count in counts), counts


@pytest.mark.parametrize("kind", [BalancedReservoir, TimelyMemory])
def test_a_memory_goes_on_from_its_state(kind: type[BalancedReservoir | TimelyMemory]) -> None:
    torch.manual_seed(3)
    labels = torch.randint(4, (80,)).tolist()
    unsure = torch.rand(80).tolist()
    offers = list(zip(labels, unsure, strict=True))
    whole = kind(7, 4)
    file = io.BytesIO()
    offer(whole, offers[:50])
    torch.save(whole.state(), file)
    file.seek(0)
    other = kind(7, 4)
    offer(other, offers[60:])
    other.load(torch.load(file, weights_only=True), torch.device("cpu"))
    for memory in (whole, other):
        torch.manual_seed(4)
        offer(memory, offers[50:], first=50)
    assert numbers(whole) == numbers(other)
    assert torch.equal(whole.images(), other.images())
    assert {**whole.state(), "image": 0} == {**other.state(), "image": 0}


@pytest.mark.parametrize("kind", [BalancedReservoir, TimelyMemory])
def test_no_room_is_refused(kind: type[BalancedReservoir | TimelyMemory]) -> None:
    with pytest.raises(AdaNPCError, match="capacity must be at least 1, got 0"):
        kind(0, 4)
