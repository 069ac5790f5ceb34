"""An index of faiss names candidates; what is found among them is exact."""

from __future__ import annotations

import pickle

import pytest
import torch

from adanpc.core import Append, Delete, MemoryBank, Origin, Restore, Veto
from adanpc.errors import AdaNPCError, UnavailableError
from adanpc.index import ApproximateIndex, ExactIndex, faiss, unit
from adanpc.testing import check_index


def clustered(count: int, dim: int, seed: int) -> torch.Tensor:
    centers = torch.randn(20, dim, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    cluster = torch.randint(0, 20, (count,), generator=generator)
    return centers[cluster] + 0.5 * torch.randn(count, dim, generator=generator)


@pytest.mark.parametrize("storage", ["float32", "int8"])
@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat"])  # one that is searched in full, one without enough rows
def test_the_contract_holds_where_faiss_names_all_that_is_near(factory: str, storage: str) -> None:
    def make(dim: int, storage: str, device: torch.device) -> ApproximateIndex:
        return ApproximateIndex(dim, storage, device, factory=factory)

    check_index(make, storage)


@pytest.fixture(params=["IVF16,SQ8", "HNSW16", "PCA8,IVF8,Flat"])
def banks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[MemoryBank, MemoryBank]:
    """The same rows behind faiss, which has been trained on them, and searched exactly."""
    monkeypatch.setattr(faiss, "LEAST", 640)
    rows = clustered(1200, 16, 1)
    labels = torch.arange(1200) % 3
    approximate = MemoryBank(16, 3, index=f"faiss:{request.param}")
    exact = MemoryBank(16, 3)
    for bank in (approximate, exact):
        bank.apply(Append(rows[:300], labels[:300]))
        bank.apply(Append(rows[300:], labels[300:]))
    return approximate, exact


def test_similarities_are_exact_and_few_neighbors_are_missed(banks: tuple[MemoryBank, MemoryBank]) -> None:
    approximate, exact = banks
    queries = clustered(60, 16, 2)
    found = approximate.search(queries, 5)
    true = exact.search(queries, 5)
    assert approximate.digest() == exact.digest()
    rows = exact.rows(found.ids.flatten()).view(60, 5, 16)
    expected = (rows.double() * unit(queries).double()[:, None]).sum(2)
    assert torch.equal(found.similarity, expected)
    same = (found.ids[:, :, None] == true.ids[:, None]).any(2).double().mean()
    assert same > 0.7


def test_a_batch_finds_what_its_queries_find_one_by_one(banks: tuple[MemoryBank, MemoryBank]) -> None:
    approximate, _ = banks
    queries = clustered(30, 16, 3)
    together = approximate.search(queries, 7).ids
    alone = [approximate.search(query[None], 7).ids for query in queries]
    assert torch.equal(together, torch.cat(alone))
    assert approximate.search(queries[:0], 7).ids.shape == (0, 7)


def test_rows_that_may_not_vote_are_never_found(banks: tuple[MemoryBank, MemoryBank]) -> None:
    approximate, _ = banks
    query = clustered(1, 16, 4)
    first, second, third = approximate.search(query, 3).ids[0].tolist()
    before = approximate.contents
    approximate.apply(Veto((first,)))
    approximate.apply(Delete((second,)))
    assert not {first, second} & set(approximate.search(query, 50).ids[0].tolist())
    excluded = approximate.search(query, 50, exclude=torch.tensor([[third]])).ids[0].tolist()
    assert not {first, second, third} & set(excluded)
    approximate.apply(Restore((first,)))
    assert approximate.search(query, 1).ids.tolist() == [[first]]
    assert first in before.search(query, 3, None, None).ids[0].tolist(), "older contents stay as they were"
    assert second in before.search(query, 3, None, None).ids[0].tolist()


def test_rows_that_join_later_are_found(banks: tuple[MemoryBank, MemoryBank]) -> None:
    approximate, _ = banks
    query = clustered(1, 16, 5)
    before = approximate.contents
    added = approximate.apply(Append(query, torch.tensor([2])))
    assert approximate.search(query, 1).ids.tolist() == [[added[0]]]
    assert added[0] not in before.search(query, 5, None, None).ids[0].tolist()


def test_where_faiss_names_too_few_rows_all_are_searched(banks: tuple[MemoryBank, MemoryBank]) -> None:
    approximate, exact = banks
    queries = clustered(4, 16, 6)
    for bank in (approximate, exact):
        bank.apply(Append(clustered(3, 16, 7), torch.tensor([0, 1, 2]), Origin.EXPERT))
    for source in (None, False):
        found = approximate.search(queries, 700, source=source)
        true = exact.search(queries, 700, source=source)
        if source is None:
            assert (found.similarity[:, 0] <= true.similarity[:, 0]).all()
        else:
            assert torch.equal(found.ids, true.ids)


def test_a_bank_keeps_the_name_of_its_index_in_copies(banks: tuple[MemoryBank, MemoryBank]) -> None:
    approximate, _ = banks
    copy = pickle.loads(pickle.dumps(approximate))
    assert isinstance(copy.contents.index, ApproximateIndex)
    assert copy.digest() == approximate.digest()
    loaded = MemoryBank.load(approximate.state(), index="faiss:Flat")
    assert isinstance(loaded.contents.index, ApproximateIndex)
    assert type(MemoryBank.load(approximate.state()).contents.index) is ExactIndex


def test_the_size_counts_what_is_stored() -> None:
    index = ApproximateIndex(4, "float16")
    rows = unit(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    filled = index.put(torch.arange(3), torch.arange(3), index.encode(rows), torch.ones(3, dtype=torch.uint8))
    assert (filled.dim, filled.storage, filled.device.type) == (4, "float16", "cpu")
    assert filled.nbytes == 3 * (4 * 2 + 8 + 8 + 1)
    assert filled.memory(3) == {"rows": 3 * 8, "beside rows": 3 * 17}
    assert filled.visible.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["faiss", "faiss:", "hnswlib:16", ""])
def test_an_unknown_name_of_an_index_is_refused(name: str) -> None:
    with pytest.raises(AdaNPCError, match="index must be a class or a name such as 'faiss:IVF1024,SQ8', got"):
        MemoryBank(4, 2, index=name)


def test_without_faiss_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="which is not installed: pip install"):
        MemoryBank(4, 2, index="faiss:Flat")


def test_what_faiss_cannot_make_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="faiss has no index 'Nothing' for 4 dimensions"):
        MemoryBank(4, 2, index="faiss:Nothing")
    with pytest.raises(AdaNPCError, match="works in main memory: pass device='cpu' instead of meta"):
        ApproximateIndex(4, device="meta")
