"""Source rows that are learned piece by piece give the bank that they would give at once, or nearly so if many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from presets import safe
from torch import Tensor

from adanpc.core import AdaNPC, MemoryBank
from adanpc.core import large as large_module
from adanpc.core import source as source_module
from adanpc.core.source import Source
from adanpc.errors import AdaNPCError, FeatureError, LabelError

DIM = 24
CLASSES = 5


def drawn(count: int, domains: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features around class centers, moved by a shift of their domain, with labels and domains."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    places = torch.randint(0, domains, (count,), generator=generator)
    shifts = torch.randn(domains, DIM, generator=torch.Generator().manual_seed(98))
    noise = torch.randn(count, DIM, generator=generator)
    return centers[labels] + noise + shifts[places], labels, places


def empty(preset: str = "safe", **options: Any) -> AdaNPC:
    return AdaNPC(MemoryBank(DIM, CLASSES, soft=preset == "safe"), preset=preset, **options)


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform is fitted to 150 rows, and no more than 32 are processed at once."""
    monkeypatch.setattr(large_module, "AT_ONCE", 150 * DIM)
    monkeypatch.setattr(source_module, "AT_A_TIME", 32 * DIM)


@pytest.mark.parametrize(
    ("preset", "options"), [("safe", {}), ("paper", {}), ("paper", {"centering": "source"}), ("safe", {"guard": False})]
)
def test_few_rows_are_learned_as_if_at_once(preset: str, options: dict[str, Any]) -> None:
    features, labels, domains = drawn(200, 2)
    whole = empty(preset, **options)
    whole.learn(features, labels, domain=domains, keys=torch.arange(200))
    parts = empty(preset, **options)
    ids = parts.learn_in_pieces(features.split(33), labels, domain=domains, keys=torch.arange(200))
    assert ids == range(200)
    assert parts.digest() == whole.digest()


def test_lists_and_a_single_domain_are_taken_too() -> None:
    features, labels, _ = drawn(40, 1)
    whole = empty()
    whole.learn(features, labels, domain=3)
    parts = empty()
    parts.learn_in_pieces([features], labels.tolist(), domain=3)
    assert parts.digest() == whole.digest()
    assert empty().learn_in_pieces([], torch.zeros(0, dtype=torch.int64)) == range(0)


@pytest.mark.parametrize("domains", [1, 3])
def test_where_the_sample_is_everything_the_rows_are_the_same(domains: int) -> None:
    features, labels, places = drawn(300, domains)
    whole = empty()
    whole.learn(features, labels, domain=places)
    parts = empty()
    source = Source(features.split(70), labels, places, torch.full((300,), -1))
    for change in large_module.appending(source, parts.bank.contents, safe(parts)):
        parts.apply(change)
    ours = parts.bank.contents
    theirs = whole.bank.contents
    for name, column in theirs.table().items():
        assert torch.equal(ours.table()[name], column), name
    for name in ("power", "origin", "directions", "damped", "telling", "amplified", "span", "voters"):
        assert torch.equal(getattr(ours.transform(), name), getattr(theirs.transform(), name)), name
    assert torch.allclose(ours.transform().foreign, theirs.transform().foreign, rtol=0, atol=1e-6)
    assert torch.allclose(ours.transform().calibration, theirs.transform().calibration, rtol=0, atol=1e-6)


@pytest.mark.no_cover
@pytest.mark.parametrize("domains", [1, 3])
def test_many_rows_give_the_same_bank_however_they_are_cut(few_at_once: None, domains: int) -> None:
    features, labels, places = drawn(700, domains)
    digests = set()
    for size in (1, 64, 700):
        parts = empty()
        parts.learn_in_pieces(features.split(size), labels, domain=places)
        digests.add(parts.digest())
        assert len(parts.bank) == 700
    assert len(digests) == 1


@pytest.mark.parametrize("few_in_the_sample", [True, False])
def test_as_many_rows_are_compared_as_the_smallest_class_has_in_all(
    monkeypatch: pytest.MonkeyPatch, few_in_the_sample: bool
) -> None:
    sampled = 60 if few_in_the_sample else 600
    monkeypatch.setattr(large_module, "AT_ONCE", sampled * DIM)
    features, labels, places = drawn(700, 1)
    parts = empty()
    parts.learn_in_pieces(features.split(100), labels, domain=places)
    assert parts.bank.contents.transform().per_class == 15


def test_the_sample_says_how_many_rows_are_compared(few_at_once: None) -> None:
    """Classes of many small clusters, so that all but the nearest rows of a class say nothing."""
    generator = torch.Generator().manual_seed(0)
    clusters = torch.arange(700) % 60
    centers = torch.randn(60, DIM, generator=generator)
    features = centers[clusters] + 0.5 * torch.randn(700, DIM, generator=generator)
    parts = empty()
    parts.learn_in_pieces(features.split(100), clusters % CLASSES, domain=-1)
    assert parts.bank.contents.transform().per_class == 3


@pytest.mark.parametrize("domains", [1, 3])
def test_many_rows_answer_like_a_bank_that_was_fitted_to_all(few_at_once: None, domains: int) -> None:
    features, labels, places = drawn(1500, domains)
    whole = empty()
    whole.learn(features, labels, domain=places)
    parts = empty()
    parts.learn_in_pieces(features.split(100), labels, domain=places)
    queries, truth, _ = drawn(400, domains, seed=1)
    right = []
    for classifier in (whole, parts):
        right.append(float((classifier.step(queries + 0.5).labels == truth).float().mean()))
    assert abs(right[0] - right[1]) <= 0.03
    known = [classifier.bank.contents.calibration() for classifier in (whole, parts)]
    assert known[1].rows > 100
    assert abs(known[0].accuracy - known[1].accuracy) <= 0.1
    foreign = [classifier.bank.contents.transform().foreign.mean() for classifier in (whole, parts)]
    assert abs(foreign[0] - foreign[1]) <= 0.03, "all rows are compared, not only those of the sample"


def test_a_rare_class_is_in_the_sample(few_at_once: None) -> None:
    features, labels, places = drawn(1000, 2)
    labels[labels == 4] = 3
    labels[500] = 4
    places[500] = 1
    parts = empty()
    parts.learn_in_pieces(features.split(100), labels, domain=places)
    assert len(parts.bank) == 1000


def test_more_rows_join_by_the_transform_that_is_there(few_at_once: None) -> None:
    features, labels, places = drawn(400, 2)
    parts = empty()
    parts.learn_in_pieces(features.split(100), labels, domain=places)
    before = parts.bank.contents.transform()
    ids = parts.learn_in_pieces((features + 1).split(100), labels, domain=places)
    assert ids == range(400, 800)
    assert parts.bank.contents.transform() is before
    table = parts.bank.table()
    assert table["row"][400:].mean(0).norm() < 0.1, "the new rows are centered by their own domains"


def test_pieces_that_do_not_fit_the_labels_change_nothing(few_at_once: None) -> None:
    features, labels, places = drawn(400, 2)
    parts = empty()
    parts.learn(features, labels, domain=places)
    before = parts.digest()
    with pytest.raises(FeatureError, match="the pieces hold 350 features or more, and there are 300 labels"):
        parts.learn_in_pieces(features.split(50), labels[:300])
    with pytest.raises(FeatureError, match="the pieces hold 350 features or more, and there are 400 labels"):
        parts.learn_in_pieces(features[:350].split(50), labels)
    with pytest.raises(AdaNPCError, match="not an iterator"):
        parts.learn_in_pieces(iter(features.split(50)), labels)
    with pytest.raises(LabelError, match="labels must be between 0 and 4"):
        parts.learn_in_pieces(features.split(50), labels + 1)
    assert parts.digest() == before


def test_what_is_interrupted_has_not_happened(few_at_once: None) -> None:
    features, labels, places = drawn(400, 2)

    class Interrupted:
        passes = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.passes += 1
            yield from features[:200].split(50)
            if self.passes == 3:
                assert len(parts.bank) == 200, "some rows are there already"
                raise KeyboardInterrupt
            yield from features[200:].split(50)

    parts = empty()
    before = parts.digest()
    with pytest.raises(KeyboardInterrupt):
        parts.learn_in_pieces(Interrupted(), labels, domain=places)
    assert parts.digest() == before
    parts.learn_in_pieces(features.split(50), labels, domain=places)
    assert len(parts.bank) == 400
