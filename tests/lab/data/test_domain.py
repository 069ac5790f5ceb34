"""Domains: subsets, splits, digests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adanpc.lab.data.domain import DataError, DataSet, Domain, Images, Joined, View, join, split
from adanpc.lab.data.loading import chunks
from adanpc.lab.seeds import seed_of


class Lazy:
    """Images that count how often they are read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        return torch.full((1, 2, 2), float(index))


def numbered(count: int = 50, images: Images | None = None) -> Domain:
    """A domain whose images and labels are their own row."""
    values = torch.arange(float(count)).reshape(count, 1, 1, 1)
    return Domain("numbers", values if images is None else images, torch.arange(count), version="test")


def double(images: Tensor) -> Tensor:
    return images * 2


def test_take_gives_the_rows_in_order_and_transformed() -> None:
    rows = numbered().with_transform(double).take([3, 1, 1])
    assert rows.flatten().tolist() == [6, 2, 2]
    lazy = Lazy(9)
    domain = numbered(9, lazy).with_transform(double)
    assert domain.take(torch.tensor([8, 0]))[:, 0, 0, 0].tolist() == [16, 0]
    assert lazy.read == 2


def test_bytes_become_numbers_up_to_one() -> None:
    domain = Domain("bytes", torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(3, 1, 1, 1), torch.zeros(3))
    assert domain.take([0, 1, 2]).flatten().tolist() == pytest.approx([0, 0.2, 1])


@given(st.lists(st.integers(0, 8), max_size=6), st.lists(st.integers(0, 5), max_size=4))
def test_subsets_of_subsets_read_only_what_is_taken(first: list[int], second: list[int]) -> None:
    second = [place for place in second if place < len(first)]
    lazy = Lazy(9)
    part = numbered(9, lazy).subset(first).subset(second)
    assert (lazy.read, len(part)) == (0, len(second))
    expected = [first[place] for place in second]
    assert part.labels.tolist() == expected
    if expected:
        assert part.take(range(len(part)))[:, 0, 0, 0].tolist() == expected


@given(st.integers(0, 60), st.integers(0, 5), st.floats(0.05, 0.95))
def test_a_split_is_disjoint_and_complete(count: int, seed: int, share: float) -> None:
    large, small = split(numbered(count), seed, share)
    assert len(large) == int(count * share)
    assert sorted([*large.labels.tolist(), *small.labels.tolist()]) == list(range(count))


def test_splits_depend_on_the_seed_and_the_name_alone() -> None:
    domain = numbered()
    held_out = split(domain, 0)[1].labels
    assert torch.equal(held_out, split(numbered(), 0)[1].labels)
    assert not torch.equal(held_out, split(domain, 1)[1].labels)
    other = Domain("others", domain.images, domain.labels)
    assert not torch.equal(held_out, split(other, 0)[1].labels)
    with pytest.raises(DataError, match="share must be between 0 and 1, got 1"):
        split(domain, 0, 1.0)


def test_images_of_unequal_size_are_refused_with_a_remedy() -> None:
    class Ragged(Lazy):
        def __getitem__(self, index: int) -> Tensor:
            return torch.zeros(1, 2 + index, 2)

    with pytest.raises(DataError, match=r"shapes \(1, 2, 2\) and \(1, 3, 2\): give a transform"):
        numbered(3, Ragged(3)).take([0, 1])


def test_joined_domains_are_one_after_another() -> None:
    both = [numbered(3, Lazy(3)), Domain("tensor", torch.full((2, 1, 2, 2), 7.0), torch.tensor([8, 9]))]
    joined = join("all", both)
    assert joined.labels.tolist() == [0, 1, 2, 8, 9]
    assert joined.take(range(5))[:, 0, 0, 0].tolist() == [0, 1, 2, 7, 7]
    images = joined.images
    assert isinstance(images, Joined)
    assert torch.equal(images[-1], images[4])
    with pytest.raises(IndexError):
        images[5]
    other = [both[0], Domain("tensor", torch.full((2, 1, 2, 2), 6.0), torch.tensor([8, 9]))]
    assert join("all", other).digest() != joined.digest()
    assert isinstance(join("all", both[1:] * 2).images, Tensor)


def test_seeds_are_fixed_for_ever() -> None:
    assert seed_of(0, "weights") == 68722259856022489
    assert seed_of("a", "b") != seed_of("ab") != seed_of("a b")


def test_the_digest_follows_everything_that_matters() -> None:
    domain = numbered()
    images = domain.images
    assert isinstance(images, Tensor)
    same = numbered().digest()
    others = [
        Domain("other", images, domain.labels),
        Domain("numbers", images + 1, domain.labels),
        Domain("numbers", images, domain.labels + 1),
        domain.with_transform(double),
        domain.subset(range(49)),
        numbered(images=Lazy(50)),
        Domain("numbers", Lazy(50), domain.labels, version="changed"),
        numbered(images=Lazy(50)).subset([*range(49), 48]),
    ]
    digests = {other.digest() for other in others}
    assert domain.digest() == same
    assert same not in digests
    assert len(digests) == len(others)
    assert DataSet("set", (domain,), ("a",)).digest() != DataSet("set", (others[0],), ("a",)).digest()


def test_a_missing_domain_is_refused_with_the_names_there_are() -> None:
    data = DataSet("set", (numbered(),), ("a",))
    assert data["numbers"] is data.domains[0]
    with pytest.raises(DataError, match="set has no domain 'letters'; it has: numbers"):
        data["letters"]
    with pytest.raises(DataError, match="it has: numbers; did you mean 'numbers'?"):
        data["number"]


@pytest.mark.parametrize("workers", [0, 2])
def test_chunks_are_the_domain_in_its_order(workers: int) -> None:
    domain = numbered(10, View(Lazy(20), torch.arange(10, 20)))
    parts = list(chunks(domain, 4, workers))
    assert [len(labels) for _, labels in parts] == [4, 4, 2]
    assert torch.cat([images for images, _ in parts])[:, 0, 0, 0].tolist() == list(range(10, 20))
    assert list(chunks(numbered(0), 4)) == []
