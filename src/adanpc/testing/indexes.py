"""check_index: whether an index keeps what ``adanpc.index.Index`` promises."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from adanpc.index import Index, unit

DIM = 6
MORE_THAN_ALL = 400  # neighbors; an index of a few hundred rows does not have as many


class _Slots(NamedTuple):
    """What the slots of an index must hold."""

    ids: Tensor  # (n,) int64
    groups: Tensor  # (n,) uint8; 0 is hidden


def check_index(make: Callable[[int, str, torch.device], Index], storage: str = "float32", seed: int = 0) -> None:
    """Asserts that an index finds what a loop over its rows finds, and that changing it leaves older ones alone.

    Args:
        make: returns an empty index for dim, storage and device; what ``MemoryBank(index=make)`` takes.
        storage: how rows are stored.
        seed: seed of the rows and queries.
    """
    generator = torch.Generator().manual_seed(seed)
    empty = make(DIM, storage, torch.device("cpu"))
    _check_empty(empty, generator)

    rows = _rows(generator, 150)
    rows[40:60] = rows[0]  # ties
    ids = torch.randperm(500, generator=generator)[:150]
    slots = torch.arange(150)
    groups = 1 + torch.randint(0, 2, (150,), generator=generator).to(torch.uint8)
    full = empty.put(slots, ids, empty.encode(rows), groups)
    _check_searches(full, _Slots(ids, groups), generator)

    every_third = slots[::3]
    hidden = full.hide(every_third)
    groups_hidden = groups.clone()
    groups_hidden[every_third] = 0
    _check_searches(hidden, _Slots(ids, groups_hidden), generator)

    shown_again = every_third[:3]
    shown = hidden.show(shown_again, groups[shown_again])
    groups_shown = groups_hidden.clone()
    groups_shown[shown_again] = groups[shown_again]
    _check_searches(shown, _Slots(ids, groups_shown), generator)

    more = _rows(generator, 80)
    more_ids = torch.arange(1000, 1080)
    reused = every_third[3:13]  # these are still hidden
    more_slots = torch.cat([reused, torch.arange(150, 220)])
    grown = shown.put(more_slots, more_ids, shown.encode(more), torch.ones(80, dtype=torch.uint8))
    all_ids = torch.cat([ids, torch.zeros(70, dtype=torch.int64)])
    all_ids[more_slots] = more_ids
    all_groups = torch.cat([groups_shown, torch.zeros(70, dtype=torch.uint8)])
    all_groups[more_slots] = 1
    expected = _Slots(all_ids, all_groups)
    _check_searches(grown, expected, generator)
    assert torch.equal(grown.rows(more_slots), grown.stored(more)), "rows must be read back as stored() says"

    all_slots = torch.arange(220)
    copied = empty.put(all_slots, grown.ids(all_slots), grown.state(all_slots), all_groups)
    _check_searches(copied, expected, generator)
    assert torch.equal(shown.visible, groups_shown.nonzero()[:, 0]), "put() must leave the index before as it was"
    assert torch.equal(hidden.visible, groups_hidden.nonzero()[:, 0]), "show() must leave the index before as it was"


def _rows(generator: torch.Generator, count: int) -> Tensor:
    return unit(torch.randn(count, DIM, generator=generator))


def _check_empty(index: Index, generator: torch.Generator) -> None:
    """Asserts that an empty index finds nothing."""
    assert index.slots == index.count == 0
    queries = _rows(generator, 2)
    assert index.search(queries, 3).ids.shape == (2, 0), "an empty index finds nothing"
    for found in index.search_groups(queries, [(3, None), (4, 1)]):
        assert found.ids.shape == (2, 0), "an empty index finds nothing in any group"


def _check_searches(index: Index, expected: _Slots, generator: torch.Generator) -> None:
    """Asserts that searches of all kinds find what a loop finds, for queries alone and in a batch."""
    ids = expected.ids
    assert index.slots == len(ids)
    assert index.count == int((expected.groups > 0).sum())
    rows = index.rows(torch.arange(index.slots))
    queries = torch.cat([_rows(generator, 4), rows[:3]])
    exclude = ids[torch.randint(0, len(ids), (len(queries), 2), generator=generator)]
    _check_searches_at_once(index, queries, exclude)
    for k, group, excluded in product((1, 7, MORE_THAN_ALL), (None, 1, 2), (None, exclude)):
        found = index.search(queries, k, group=group, exclude=excluded)
        assert found.ids.shape == (len(queries), min(k, index.slots)), "K is k or the slots in use"
        for number, query in enumerate(queries):
            excluded_here = None
            if excluded is not None:
                excluded_here = excluded[number : number + 1]
            near_ids, near_similarity = _by_loop(rows, query, expected, group, excluded_here)
            missing = found.ids.shape[1] - len(near_ids[:k])
            all_ids = near_ids[:k] + [-1] * missing
            all_similarity = near_similarity[:k] + [-torch.inf] * missing
            assert found.ids[number].tolist() == all_ids, "search must be exact, ties by id"
            assert found.similarity[number].tolist() == all_similarity, "similarities must be exact"
            alone = index.search(query[None], k, group=group, exclude=excluded_here)
            assert torch.equal(alone.ids[0], found.ids[number]), "a query alone finds what it finds in a batch"


def _check_searches_at_once(index: Index, queries: Tensor, exclude: Tensor) -> None:
    """Asserts that several searches at once find what each of them finds, for few queries and for many."""
    wanted = [(3, 1), (7, None), (MORE_THAN_ALL, 2), (1, 1)]
    many_queries = queries.repeat(3, 1)
    many_exclude = exclude.repeat(3, 1)
    for count in (0, 1, 2, len(queries), len(many_queries)):
        some = many_queries[:count]
        for excluded in (None, many_exclude[:count]):
            together = index.search_groups(some, wanted, exclude=excluded)
            assert len(together) == len(wanted), "search_groups() answers each of the searches"
            for found, (k, group) in zip(together, wanted, strict=True):
                alone = index.search(some, k, group=group, exclude=excluded)
                same = all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
                assert same, "search_groups() must find what search() finds"


def _by_loop(
    rows: Tensor, query: Tensor, expected: _Slots, wanted_group: int | None, excluded: Tensor | None
) -> tuple[list[int], list[float]]:
    """The ids and similarities of all rows that may be found, most similar first, ties to the lowest id."""
    excluded_ids: list[int] = []
    if excluded is not None:
        excluded_ids = excluded.flatten().tolist()
    scored = []
    for slot, (row, group) in enumerate(zip(expected.ids.tolist(), expected.groups.tolist(), strict=True)):
        if group == 0 or row in excluded_ids:
            continue
        if wanted_group is None or group == wanted_group:
            similarity = float(rows[slot].double() @ query.double())
            scored.append((-similarity, row))
    scored.sort()
    return [row for _, row in scored], [-negated for negated, _ in scored]
