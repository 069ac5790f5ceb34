"""Streams: every sample once, in an order that the seed decides and the size of batches does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adanpc.lab.data.domain import DataError, Domain
from adanpc.lab.data.streams import (
    STREAMS,
    Arrival,
    Correlated,
    Gradual,
    Iid,
    LabelShift,
    Mixed,
    OneClass,
    Recurring,
    Sorted,
    Stream,
    Successive,
    fetch,
    labels_of,
)


def domain(name: str, labels: Sequence[int] | Tensor, side: int = 2) -> Domain:
    """A domain whose images tell their row in every pixel."""
    values = torch.arange(len(labels), dtype=torch.float32).reshape(-1, 1, 1, 1) / 1000
    return Domain(name, values.expand(-1, 3, side, side), torch.as_tensor(labels, dtype=torch.int64))


def balanced(name: str, classes: int, each: int) -> Domain:
    return domain(name, torch.arange(classes).repeat(each))


def samples(order: Tensor) -> list[tuple[int, int]]:
    return [(position, row) for position, row in order.tolist()]


def joined(batches: Sequence[Arrival]) -> Tensor:
    """The order that the batches were cut from."""
    domains = torch.cat([batch.domains for batch in batches])
    rows = torch.cat([batch.rows for batch in batches])
    return torch.stack([domains, rows], dim=1)


def some_domains(*severities: int) -> list[Domain]:
    return [balanced(f"fog-{severity}", 4, 10 + severity) for severity in severities or (1, 2, 3)]


streams = st.one_of(
    *(st.builds(kind, seed=st.integers(0, 9)) for kind in (Iid, Successive, Mixed, Gradual, Sorted, OneClass)),
    st.builds(Recurring, seed=st.integers(0, 9), visits=st.integers(1, 9)),
    st.builds(LabelShift, seed=st.integers(0, 9), imbalance=st.floats(1, 100)),
    st.builds(
        Correlated,
        seed=st.integers(0, 9),
        concentration=st.sampled_from([1e-9, 0.01, 0.1, 1, 1e9]),
        slots=st.none() | st.integers(1, 40),
    ),
)
labeled = st.lists(st.integers(0, 4), max_size=30)


@settings(max_examples=150, deadline=None)
@given(stream=streams, contents=st.lists(labeled, max_size=5), size=st.integers(1, 40))
def test_every_sample_arrives_once_and_batches_are_cuts_of_the_order(
    stream: Stream, contents: list[list[int]], size: int
) -> None:
    domains = [domain(f"{'fog' if i % 2 else 'snow'}-{i}", labels) for i, labels in enumerate(contents)]
    order = stream.order(domains)
    assert order.shape == (len(order), 2)
    assert order.dtype == torch.int64
    everything = {(position, row) for position, labels in enumerate(contents) for row in range(len(labels))}
    assert len(set(samples(order))) == len(order)
    if isinstance(stream, LabelShift | OneClass):
        assert set(samples(order)) <= everything
    else:
        assert set(samples(order)) == everything
    assert sum(stream.left_out(domains)) == len(everything) - len(order)
    batches = list(stream.batches(domains, size))
    assert all(1 <= len(batch.rows) <= size for batch in batches)
    if batches:
        assert joined(batches).equal(order)
    if not stream.mixes:
        assert all(len(batch.domains.unique()) == 1 for batch in batches)
        assert all(
            len(batch.rows) == size for batch, after in pairwise(batches) if batch.domains[0] == after.domains[0]
        )


@pytest.mark.parametrize("kind", STREAMS.values())
def test_any_batch_size_gives_the_same_order(kind: type[Stream]) -> None:
    domains = some_domains()
    order = kind().order(domains)
    for size in range(1, len(order) + 2):
        assert joined(list(kind().batches(domains, size))).equal(order)


@pytest.mark.parametrize("kind", STREAMS.values())
def test_the_seed_decides(kind: type[Stream]) -> None:
    domains = some_domains()
    assert kind(seed=1).order(domains).equal(kind(seed=1).order(domains))
    assert not kind(seed=1).order(domains).equal(kind(seed=2).order(domains))


def test_a_domain_is_shuffled_by_its_name_not_by_its_company() -> None:
    first, second, third = some_domains()
    alone = Iid().order([second])[:, 1]
    beside = Iid().order([first, second, third])
    assert alone.equal(beside[beside[:, 0] == 1, 1])
    twin = balanced("rain-2", 4, 12)
    assert not alone.equal(Iid().order([twin])[:, 1])


def test_a_stream_is_a_value_that_can_be_written_down_and_made_again() -> None:
    for made in (*(kind() for kind in STREAMS.values()), Correlated(concentration=0.5, slots=7, seed=3)):
        described = json.loads(json.dumps(made.describe()))
        assert STREAMS[described.pop("stream")](**described) == made
        assert hash(made) == hash(type(made)(**described))
    assert Correlated(seed=3).describe() == {"stream": "correlated", "seed": 3, "concentration": 0.1, "slots": None}
    assert repr(LabelShift(imbalance=5.0)) == "LabelShift(seed=0, imbalance=5.0)"


def test_only_the_separate_domains_reset_and_only_the_mixture_mixes() -> None:
    assert [name for name, kind in STREAMS.items() if kind.resets] == ["iid"]
    assert [name for name, kind in STREAMS.items() if kind.mixes] == ["mixed"]
    assert all(kind.name == name for name, kind in STREAMS.items())


def test_separate_and_successive_domains_come_in_the_same_order() -> None:
    domains = some_domains()
    order = Successive(seed=4).order(domains)
    assert order.equal(Iid(seed=4).order(domains))
    assert [position for position, _ in groupby(order[:, 0].tolist())] == [0, 1, 2]
    assert order[:, 1].tolist() != sorted(order[:, 1].tolist())


def test_a_mixture_has_every_domain_in_every_large_batch() -> None:
    domains = [balanced(str(i), 2, 200) for i in range(4)]
    for batch in Mixed().batches(domains, 200):
        counts = batch.domains.bincount(minlength=4)
        assert counts.min() > 50 - 5 * (200 * 0.25 * 0.75) ** 0.5


def test_severity_rises_and_falls_for_each_corruption_in_turn() -> None:
    names = ["fog-5", "snow-2", "fog-1", "fog-3", "snow-1", "jpeg_compression-4"]
    domains = [balanced(name, 3, 3) for name in names]
    order = Gradual().order(domains)
    visits = [(names[position], len(list(group))) for position, group in groupby(order[:, 0].tolist())]
    assert visits == [
        *(("fog-1", 5), ("fog-3", 5), ("fog-5", 9), ("fog-3", 4), ("fog-1", 4)),
        *(("snow-1", 5), ("snow-2", 9), ("snow-1", 4)),
        ("jpeg_compression-4", 9),
    ]


@pytest.mark.parametrize("name", ["photo", "fog", "fog-", "fog-x", "-3"])
def test_domains_without_severities_cannot_be_gradual(name: str) -> None:
    with pytest.raises(DataError, match=f"named like 'fog-3', got '{name}'; use Successive"):
        Gradual().order([balanced("fog-1", 2, 2), balanced(name, 2, 2)])


@pytest.mark.parametrize(("imbalance", "classes"), [(1, 5), (10, 5), (100, 10), (50, 2), (7, 1)])
def test_the_long_tail_follows_its_formula(imbalance: float, classes: int) -> None:
    each = 300
    source = balanced("a", classes, each)
    stream = LabelShift(imbalance=imbalance)
    rows = stream.order([source])[:, 1]
    kept = Counter(source.labels[rows].tolist())
    wanted = [max(1, int(each * imbalance ** (-r / max(classes - 1, 1)) + 1e-9)) for r in range(classes)]
    assert sorted(kept.values(), reverse=True) == wanted
    assert stream.left_out([source]) == (classes * each - sum(wanted),)


def test_the_long_tail_keeps_its_proportions_whatever_the_data_has() -> None:
    labels = [0] * 40 + [1] * 1000 + [2] * 300
    for seed in range(10):
        rows = LabelShift(imbalance=16, seed=seed).order([domain("a", labels)])[:, 1]
        kept = torch.tensor(labels)[rows].bincount(minlength=3).sort(descending=True).values
        assert (kept[0] / torch.tensor([1, 4, 16]) - kept).abs().max() < 1.01
        # No larger stream has these proportions: one class is used up.
        assert (torch.tensor(labels)[rows].bincount() == torch.tensor(labels).bincount()).any()


def test_each_domain_draws_its_own_frequent_classes() -> None:
    domains = [balanced(str(i), 10, 50) for i in range(30)]
    order = LabelShift(imbalance=100).order(domains)
    heads = {int(domains[0].labels[order[order[:, 0] == i, 1]].mode().values) for i in range(30)}
    assert len(heads) > 5


def neighbors_alike(labels: Tensor) -> float:
    """The share of samples whose class is that of the sample before."""
    return float((labels[1:] == labels[:-1]).double().mean())


def unevenness(labels: Tensor, classes: int, size: int = 100) -> float:
    """How far batches are from the mean class frequencies: total variation, averaged."""
    counts = torch.stack([part.bincount(minlength=classes) for part in labels.split(size)]) / size
    return float((counts - 1 / classes).abs().sum(dim=1).mean() / 2)


def test_the_long_tail_is_shuffled() -> None:
    source = balanced("a", 5, 400)
    labels = source.labels[LabelShift(imbalance=10).order([source])[:, 1]]
    frequencies = labels.bincount() / len(labels)
    assert neighbors_alike(labels) == pytest.approx(float(frequencies.square().sum()), abs=0.06)


def test_concentration_leads_from_runs_of_one_class_to_even_batches() -> None:
    source = balanced("a", 10, 200)
    shuffled = unevenness(source.labels[Iid().order([source])[:, 1]], 10)
    found = []
    for concentration in (1e-6, 0.001, 0.01, 0.1, 1, 1e6):
        order = Correlated(concentration=concentration, slots=100).order([source])
        found.append(unevenness(source.labels[order[:, 1]], 10))
    assert found[0] > 0.85  # of at most 0.9, which is one class to a batch
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1.2 * shuffled < 0.2


def test_at_no_concentration_every_class_is_one_run() -> None:
    source = balanced("a", 10, 50)
    for seed in range(5):
        labels = source.labels[Correlated(concentration=1e-12, seed=seed).order([source])[:, 1]]
        assert len(list(groupby(labels.tolist()))) == 10
    assert neighbors_alike(source.labels[Iid().order([source])[:, 1]]) == pytest.approx(0.1, abs=0.05)


def test_classes_are_dealt_over_slots_in_dirichlet_proportions() -> None:
    """With two slots, a class's share of the first is Beta(a, a): its variance is 1 / (4 (2 a + 1))."""
    each = 100
    shares = []
    for seed in range(60):
        labels = np.repeat(np.arange(10), each)
        order = Correlated(concentration=2.0, slots=2, seed=seed).order([domain("a", labels.tolist())])
        runs = [(label, len(list(group))) for label, group in groupby(labels[order[:, 1]].tolist())]
        first: dict[int, int] = {}
        for label, length in runs:
            first.setdefault(label, length)
        shares += [length / each for length in first.values() if length < each]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.04)
    assert np.var(shares) == pytest.approx(1 / 20, rel=0.2)


def test_slots_are_as_many_as_classes_unless_told() -> None:
    source = balanced("a", 6, 60)
    orders = [Correlated(concentration=1e9, slots=slots).order([source]) for slots in (None, 6, 30)]
    alike = [neighbors_alike(source.labels[order[:, 1]]) for order in orders]
    assert orders[0].equal(orders[1])
    assert alike[0] == alike[1] > alike[2]
    many = balanced("a", 120, 5)
    assert Correlated().order([many]).equal(Correlated(slots=100).order([many]))


def test_classes_come_in_another_order_in_every_slot() -> None:
    source = balanced("a", 5, 20)
    labels = source.labels[Correlated(concentration=1e9, slots=20).order([source])[:, 1]].tolist()
    slots = [tuple(labels[start : start + 5]) for start in range(5, 95, 5)]
    assert len(set(slots)) > 9


def test_a_sorted_domain_has_each_class_once_and_every_domain_its_own_sequence() -> None:
    domains = [balanced(str(i), 6, 20) for i in range(8)]
    order = Sorted().order(domains)
    sequences = []
    for position in range(8):
        labels = domains[position].labels[order[order[:, 0] == position, 1]].tolist()
        runs = [(label, len(list(group))) for label, group in groupby(labels)]
        assert sorted(runs) == [(label, 20) for label in range(6)]
        sequences.append(tuple(label for label, _ in runs))
    assert len(set(sequences)) > 4
    rows = order[order[:, 0] == 0, 1].tolist()[:20]
    assert rows != sorted(rows)


def test_as_many_seeds_as_classes_meet_each_class_once() -> None:
    source = domain("a", [0] * 3 + [2] * 5 + [7] * 4)
    met = [set(source.labels[OneClass(seed=seed).order([source])[:, 1]].tolist()) for seed in range(6)]
    assert met == [{0}, {2}, {7}, {0}, {2}, {7}]
    assert OneClass(seed=1).left_out([source]) == (7,)
    rows = OneClass(seed=1).order([source])[:, 1].tolist()
    assert sorted(rows) == [3, 4, 5, 6, 7]


def test_domains_come_back_after_the_others_with_samples_that_have_not_been_met() -> None:
    domains = [balanced("a", 2, 6), balanced("b", 2, 2), balanced("c", 1, 2)]
    order = Recurring(visits=3).order(domains)
    visits = [(position, len(list(group))) for position, group in groupby(order[:, 0].tolist())]
    assert visits == [(0, 4), (1, 2), (2, 1), (0, 4), (1, 1), (2, 1), (0, 4), (1, 1)]
    once = Recurring(visits=1, seed=3).order(domains)
    assert once.equal(Successive(seed=3).order(domains))


def test_images_and_labels_are_fetched_in_the_order_of_arrival() -> None:
    doubled = [
        Domain(f"d{i}", (torch.rand(7, 3, 2, 2) + i) / 10, torch.arange(7) + 10 * i, lambda images: images * 2)
        for i in range(3)
    ]
    for batch in Mixed(seed=1).batches(doubled, 5):
        pairs = list(zip(batch.domains.tolist(), batch.rows.tolist(), strict=True))
        wanted = torch.stack([doubled[position].images[row] * 2 for position, row in pairs])
        assert fetch(doubled, batch).equal(wanted)
        assert labels_of(doubled, batch).tolist() == [10 * position + row for position, row in pairs]


def test_images_of_two_sizes_cannot_share_a_batch() -> None:
    domains = [domain("a", [0, 1], side=2), domain("b", [0, 1], side=4)]
    with pytest.raises(DataError, match=r"differ in shape: \[\(3, 2, 2\), \(3, 4, 4\)\]; give the domains a common"):
        fetch(domains, next(Mixed().batches(domains, 4)))
    assert [fetch(domains, batch).shape[-1] for batch in Iid().batches(domains, 4)] == [2, 4]


@pytest.mark.parametrize("kind", STREAMS.values())
def test_nothing_comes_of_nothing(kind: type[Stream]) -> None:
    assert list(kind().batches([], 3)) == []
    assert list(kind().batches([domain("fog-1", [])], 3)) == []
    assert kind().left_out([domain("fog-1", [])]) == (0,)


def test_what_makes_no_stream_is_refused() -> None:
    with pytest.raises(DataError, match="size must be at least 1, got 0"):
        Iid().batches(some_domains(), 0)
    for imbalance in (0.5, 0, -1, float("inf"), float("nan")):
        with pytest.raises(DataError, match=f"imbalance must be at least 1 and finite, got {imbalance}"):
            LabelShift(imbalance=imbalance)
    for concentration in (0, -1, float("inf"), float("nan")):
        with pytest.raises(DataError, match=f"concentration must be above 0 and finite, got {concentration}"):
            Correlated(concentration=concentration)
    with pytest.raises(DataError, match="visits must be at least 1, got 0"):
        Recurring(visits=0)
    with pytest.raises(DataError, match="slots must be at least 1, or None for one for each class, got 0"):
        Correlated(slots=0)
