"""check_index: whether an index keeps what ``adanpc.index.Index`` promises."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adanpc.index import Index, unit

DIM = 6


def check_index(make: Callable[[int, str, torch.device], Index], storage: str = "float32", seed: int = 0) -> None:
    """Asserts that an index finds what a loop over its rows finds, and that changing it leaves older ones alone.

    Args:
        make: gives an empty index, from dim, storage and device, as ``MemoryBank(index=make)`` takes it.
        storage: of the rows.
        seed: of the rows and queries.
    """
    generator = torch.Generator().manual_seed(seed)
    empty = make(DIM, storage, torch.device("cpu"))
    assert empty.slots == empty.count == 0
    assert empty.search(_rows(generator, 2), 3).ids.shape == (2, 0), "an empty index finds nothing"
    assert [found.ids.shape for found in empty.search_groups(_rows(generator, 2), [(3, None), (4, 1)])] == [(2, 0)] * 2
    rows = _rows(generator, 150)
    rows[40:60] = rows[0]  # ties
    ids = torch.randperm(500, generator=generator)[:150]
    slots = torch.arange(150)
    group = 1 + torch.randint(0, 2, (150,), generator=generator).to(torch.uint8)
    whole = empty.put(slots, ids, empty.encode(rows), group)
    _check_searches(whole, ids, group, generator)
    hidden = whole.hide(slots[::3])
    silenced = group.clone()
    silenced[::3] = 0
    _check_searches(hidden, ids, silenced, generator)
    back = hidden.show(slots[:9:3], group[:9:3])
    restored = silenced.clone()
    restored[:9:3] = group[:9:3]
    _check_searches(back, ids, restored, generator)
    more = _rows(generator, 80)
    more_ids = torch.arange(1000, 1080)
    more_slots = torch.cat([slots[9::3][:10], torch.arange(150, 220)])  # hidden slots are used again
    grown = back.put(more_slots, more_ids, back.encode(more), torch.ones(80, dtype=torch.uint8))
    all_ids = torch.cat([ids, torch.zeros(70, dtype=torch.int64)])
    all_groups = torch.cat([restored, torch.zeros(70, dtype=torch.uint8)])
    all_ids[more_slots] = more_ids
    all_groups[more_slots] = 1
    _check_searches(grown, all_ids, all_groups, generator)
    assert torch.equal(grown.rows(more_slots), grown.stored(more)), "rows must be read back as stored() says"
    copied = empty.put(torch.arange(220), grown.ids(torch.arange(220)), grown.state(torch.arange(220)), all_groups)
    _check_searches(copied, all_ids, all_groups, generator)
    assert torch.equal(back.visible, restored.nonzero()[:, 0]), "put() must leave the index before as it was"
    assert torch.equal(hidden.visible, silenced.nonzero()[:, 0]), "show() must leave the index before as it was"


def _rows(generator: torch.Generator, count: int) -> Tensor:
    return unit(torch.randn(count, DIM, generator=generator))


def _check_searches(index: Index, ids: Tensor, group: Tensor, generator: torch.Generator) -> None:
    """Asserts that searches of all kinds find what a loop finds."""
    assert index.slots == len(ids)
    assert index.count == int((group > 0).sum())
    rows = index.rows(torch.arange(index.slots))
    queries = torch.cat([_rows(generator, 4), rows[:3]])
    exclude = ids[torch.randint(0, len(ids), (len(queries), 2), generator=generator)]
    _check_searches_at_once(index, queries, exclude)
    for k in (1, 7, 400):
        for wanted in (None, 1, 2):
            for excluded in (None, exclude):
                found = index.search(queries, k, group=wanted, exclude=excluded)
                assert found.ids.shape == (len(queries), min(k, index.slots)), "K is k or the slots in use"
                for number, query in enumerate(queries):
                    hidden = [] if excluded is None else excluded[number].tolist()
                    _check_one(found.ids[number], found.similarity[number], rows, query, ids, group, wanted, hidden)
                    alone = index.search(
                        query[None], k, group=wanted, exclude=None if excluded is None else excluded[number][None]
                    )
                    assert torch.equal(alone.ids[0], found.ids[number]), "a query alone finds what it finds in a batch"


def _check_searches_at_once(index: Index, queries: Tensor, exclude: Tensor) -> None:
    """Asserts that several searches at once find what each of them finds, for few queries and for many."""
    wanted = [(3, 1), (7, None), (400, 2), (1, 1)]
    for count in (0, 1, 2, len(queries), 3 * len(queries)):
        some = queries.repeat(3, 1)[:count]
        for excluded in (None, exclude.repeat(3, 1)[:count]):
            together = index.search_groups(some, wanted, exclude=excluded)
            assert len(together) == len(wanted), "search_groups() answers each of the searches"
            for found, (k, group) in zip(together, wanted, strict=True):
                alone = index.search(some, k, group=group, exclude=excluded)
                same = all(torch.equal(ours, theirs) for ours, theirs in zip(found, alone, strict=True))
                assert same, "search_groups() must find what search() finds"


def _check_one(
    found: Tensor,
    similarity: Tensor,
    rows: Tensor,
    query: Tensor,
    ids: Tensor,
    group: Tensor,
    wanted: int | None,
    hidden: list[int],
) -> None:
    scored = []
    for slot in range(len(ids)):
        usable = group[slot] > 0 if wanted is None else group[slot] == wanted
        if usable and int(ids[slot]) not in hidden:
            scored.append((-float(rows[slot].double() @ query.double()), int(ids[slot])))
    expected = sorted(scored)[: len(found)]
    missing = len(found) - len(expected)
    assert found.tolist() == [row for _, row in expected] + [-1] * missing, "search must be exact, ties by id"
    assert similarity.tolist() == [-score for score, _ in expected] + [-torch.inf] * missing
