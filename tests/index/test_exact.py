"""Search is exact: for every storage, scan, batch size, tie and shape."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adanpc.errors import AdaNPCError, FeatureError
from adanpc.index import STORAGE, ExactIndex, batch, blocks, check_features, exact, grid, kernels, single, unit
from adanpc.index import batch as batch_search
from adanpc.index import scan as scans
from adanpc.index.grid import Columns, decode, encode, fine_weight, hidden_from_both
from adanpc.testing import check_index

CPU = torch.device("cpu")
STORAGES = list(STORAGE)


def build(
    features: torch.Tensor,
    storage: str,
    usable: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> ExactIndex:
    """An index of these features in slots 0, 1, …, of which only the usable ones can be found."""
    slots = torch.arange(len(features))
    group = torch.ones(len(features), dtype=torch.uint8) if usable is None else usable.to(torch.uint8)
    index = ExactIndex(features.shape[1], storage, CPU)
    return index.put(slots, slots if ids is None else ids, encode(unit(features), storage), group)


def oracle(index: ExactIndex, queries: torch.Tensor, k: int, usable: np.ndarray) -> list[list[int]]:
    rows = index.rows(torch.arange(len(usable))).double().numpy()
    answers = []
    for query in queries.double().numpy():
        score = [float(np.dot(row, query)) if ok else -np.inf for row, ok in zip(rows, usable, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: (-score[i], i))[:k]
        answers.append([i if usable[i] else -1 for i in order])
    return answers


COMPILED = [path for path in kernels.paths() if path != "numpy"]


@pytest.fixture(params=[*kernels.paths(), *[f"{path} by bytes" for path in COMPILED], "numkong", "torch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    path, _, by_bytes = request.param.partition(" ")
    if path in kernels.paths():
        monkeypatch.setattr(kernels, "WANTED", path)
        monkeypatch.setattr(scans, "MULTIPLYING", COMPILED)
        if by_bytes:  # however few rows there are
            monkeypatch.setattr(single, "LEAST_BYTES", 0)
        return str(path)
    monkeypatch.setattr(kernels, "WANTED", "numpy")
    if request.param == "torch":
        monkeypatch.setattr(scans, "numkong", None)
        monkeypatch.setattr(scans, "CACHED", 0)
        monkeypatch.setattr(scans, "multiplies_integers", lambda: False)
    else:
        assert scans.numkong is not None, "the tests run with the extra `fast`"
    return str(request.param)


def test_a_query_may_lie_scattered_in_memory(engine: str) -> None:
    features = torch.randn(130, 8, generator=torch.Generator().manual_seed(1))
    index = build(features, "float32")
    queries = unit(features[:1])
    scattered = queries.repeat(2, 1).T.contiguous().T[:1]
    assert scattered.stride(1) == 2
    for found, expected in zip(index.search(scattered, 5), index.search(queries, 5), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.no_cover
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("batch", [1, 3, 9])
@pytest.mark.parametrize("spread", [1.0, 1e-4])
def test_search_finds_what_a_loop_finds(storage: str, batch: int, spread: float, engine: str) -> None:
    torch.manual_seed(1)
    features = torch.randn(1, 24) + spread * torch.randn(300, 24)  # a small spread: neighbors differ in the last bits
    queries = unit(torch.randn(1, 24) * spread + features[:batch])
    usable = torch.rand(300) < 0.8
    index = build(features, storage, usable)
    slots, ids, similarity = index.search(queries, 12)
    assert torch.equal(slots, ids)
    assert slots.tolist() == oracle(index, queries, 12, usable.numpy())
    rows = index.rows(slots.flatten()).double().view(batch, 12, 24)
    assert torch.equal(similarity, (rows * queries.double()[:, None]).sum(2))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_one_query_finds_what_a_batch_and_a_loop_find(data: st.DataObject) -> None:
    dim, count = data.draw(st.integers(1, 6) | st.just(33)), data.draw(st.integers(1, 400))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    spread = data.draw(st.sampled_from([1.0, 1e-4, 0.0]))  # ties among few directions, near ties, and all the same
    directions = torch.randn(1, dim, generator=generator) + spread * torch.randn(40, dim, generator=generator)
    features = directions[torch.randint(0, 40, (count,), generator=generator)]
    usable = torch.rand(count, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    ids = torch.randperm(count, generator=generator)
    k = data.draw(st.integers(1, 20) | st.integers(1, 500))
    index = build(features, data.draw(st.sampled_from(STORAGES)), usable, ids)
    query = unit(torch.randn(1, dim, generator=generator))
    rows, name = index.rows(torch.arange(count)).double().numpy(), ids.tolist()
    score = [float(np.dot(row, query[0].double().numpy())) for row in rows]
    order = sorted(usable.nonzero()[:, 0].tolist(), key=lambda slot: (-score[slot], name[slot]))
    taken = data.draw(st.none() | st.integers(0, 5))  # so many of the best are excluded, and an id that nobody has
    exclude = None
    if taken is not None:
        exclude = torch.tensor([[-1] + [name[slot] for slot in order[:taken]]])
        order = order[taken:]
    width = min(k, count)
    order = order[:width]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "LEAST_BYTES", data.draw(st.sampled_from([0, single.LEAST_BYTES])))
        found = index.search(query, k, exclude=exclude)
    for count in (2, 9):  # in NumPy as one is, and in torch
        many = index.search(query.repeat(count, 1), k, exclude=None if exclude is None else exclude.repeat(count, 1))
        for alone, all_of_them in zip(found, many, strict=True):
            assert torch.equal(alone, all_of_them[:1])
            assert torch.equal(alone, all_of_them[-1:])
    missing = width - len(order)
    assert found.slots[0].tolist() == order + [-1] * missing
    assert found.ids[0].tolist() == [name[slot] for slot in order] + [-1] * missing
    assert found.similarity[0].tolist() == [score[slot] for slot in order] + [-np.inf] * missing


@pytest.mark.no_cover
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("long", [batch.LONG, 1])  # many candidates are scored at once, or query by query
def test_what_lies_in_slots_that_were_never_written_is_not_looked_at(
    storage: str, count: int, long: int, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    monkeypatch.setattr(batch, "LONG", long)
    index = build(torch.randn(70, 8), storage)
    queries = unit(torch.randn(count, 8))
    expected = index.search(queries, 9)
    for waste in (float("nan"), float("inf"), -3e38):
        for name, (column,) in index.blocks.columns.items():
            if name not in ("id", "hash"):
                column[70:] = 77 if column.dtype == torch.int8 else torch.tensor(waste).to(column.dtype)
        index._groups[70:] = 1
        for k in (9, 128):  # the second reaches for more candidates than there are rows
            found = index.search(queries, k)
            assert torch.equal(found.slots[:, :9], expected.slots)
            assert torch.equal(found.similarity[:, :9], expected.similarity)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ties_go_to_the_lowest_id(data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 4))
    vector = st.lists(st.integers(-1, 1), min_size=dim, max_size=dim).filter(any)
    features = torch.tensor(data.draw(st.lists(vector, min_size=1, max_size=150)), dtype=torch.float32)
    queries = unit(torch.tensor(data.draw(st.lists(vector, min_size=1, max_size=10)), dtype=torch.float32))
    k = data.draw(st.integers(1, 20))
    index = build(features, data.draw(st.sampled_from(list(STORAGE))))
    slots = index.search(queries, k).slots
    expected = oracle(index, queries, k, np.ones(len(features), bool))
    assert [[slot for slot in row if slot >= 0] for row in slots.tolist()] == [
        [slot for slot in row if slot >= 0] for row in expected
    ]


def test_ties_follow_ids_not_slots() -> None:
    index = build(torch.ones(5, 3), "float32", ids=torch.tensor([40, 10, 30, 0, 20]))
    found = index.search(unit(torch.ones(1, 3)), 3)
    assert found.slots.tolist() == [[3, 1, 4]]
    assert found.ids.tolist() == [[0, 10, 20]]


@pytest.mark.parametrize("storage", STORAGE)
def test_a_thousand_equal_rows_are_all_looked_at(storage: str) -> None:
    features = torch.ones(1000, 8)
    features[::2] *= 3.0  # the same direction
    index = build(features, storage, torch.arange(1000) >= 990)
    assert index.search(unit(torch.ones(2, 8)), 5).slots.tolist() == [[990, 991, 992, 993, 994]] * 2


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_copies_of_a_row_are_scored_only_as_often_as_they_can_be_found(
    storage: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(9)
    features = torch.randn(6000, 8)
    features[:5000] = features[0]  # the same image, sent again and again
    ids = torch.randperm(6000)
    index = build(features, storage, ids=ids)
    scored = 0
    take = blocks.Blocks.take
    read = blocks.Blocks.read

    def counted_take(held: blocks.Blocks, slots: torch.Tensor, *names: str) -> Columns:
        nonlocal scored
        if "row" in names:
            scored += slots.numel()
        return take(held, slots, *names)

    def counted_read(held: blocks.Blocks, slots: grid.Array, *names: str) -> dict[str, grid.Array]:
        nonlocal scored
        if "row" in names:
            scored += slots.size
        return read(held, slots, *names)

    def counted_scores(*given: Any) -> grid.Array:
        nonlocal scored
        slots = given[3]
        scored += slots.size
        return kernels.score_rows(*given)

    monkeypatch.setattr(blocks.Blocks, "take", counted_take)
    monkeypatch.setattr(blocks.Blocks, "read", counted_read)
    monkeypatch.setattr(single, "score_rows", counted_scores)
    found = index.search(unit(features[:1]).repeat(batch, 1), 7, exclude=ids[:2].repeat(batch, 1))
    copies = sorted(ids[2:5000].tolist())
    assert found.ids.tolist() == [copies[:7]] * batch
    assert 0 < scored < 600 * batch


@pytest.mark.parametrize("storage", STORAGE)
def test_a_query_near_many_copies_of_a_row_finds_the_first_of_them(storage: str) -> None:
    """There are too many candidates for the kernel that serves single queries."""
    row = torch.tensor([[3.0, 4.0, 0.0]])
    features = torch.cat([torch.tensor([[0.0, 0.0, 1.0]]), row.expand(1000, 3)])
    found = build(features, storage).search(unit(row), 2)
    assert found.ids.tolist() == [[1, 2]]
    assert torch.allclose(found.similarity, torch.ones(1, 2, dtype=torch.float64), atol=1e-2)


@pytest.mark.parametrize("dominance", [0.0, 4.0])  # of one coordinate, which leaves little of a byte to the others
def test_bytes_that_are_read_first_change_no_answer(dominance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(3000, 96, generator=generator)
    features[:900] = features[0]
    features[:, 5] += dominance * 96**0.5
    queries = unit(torch.cat([features[:3], torch.randn(20, 96, generator=generator)]))
    group = torch.randint(0, 3, (3000,), generator=generator).to(torch.uint8)
    slots = torch.arange(3000)
    index = ExactIndex(96).put(slots, slots.flip(0), encode(unit(features), "float32"), group)
    worthwhile = dominance == 0 and kernels.chosen() in scans.MULTIPLYING
    assert single.reads_bytes(index) == worthwhile
    monkeypatch.setattr(exact, "MOST_LEFT_OUT", 100.0)
    assert single.reads_bytes(index) == (kernels.chosen() in scans.MULTIPLYING)
    by_bytes = index.search_groups(queries, [(9, None), (40, 2)])
    monkeypatch.setattr(single, "LEAST_BYTES", 1 << 40)
    for ours, theirs in zip(by_bytes, index.search_groups(queries, [(9, None), (40, 2)]), strict=True):
        for found, expected in zip(ours, theirs, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("path", kernels.paths())
def test_bytes_are_those_nearest_to_the_coordinates(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WANTED", path)
    rows = unit(torch.randn(50, 30, generator=torch.Generator().manual_seed(0))).numpy()
    made = grid.coarse(rows)
    assert np.abs(made["coarse"]).max(1).tolist() == [127] * 50
    step = np.abs(rows).max(1, keepdims=True) / 127
    np.testing.assert_allclose(made["scale"], step, rtol=1e-6)
    assert (np.abs(made["coarse"] * step - rows) <= 0.5001 * step).all()
    length = np.linalg.norm(made["coarse"] * made["scale"].astype(float) - rows, axis=1)
    assert (made["residual"][:, 0] >= length).all()
    np.testing.assert_allclose(made["residual"][:, 0], length, rtol=2e-4)


def test_rows_that_are_hidden_are_not_found_until_they_are_shown() -> None:
    whole = build(torch.eye(5), "float32")
    hidden = whole.hide(torch.tensor([1, 3]))
    again = hidden.show(torch.tensor([3]), torch.tensor([2], dtype=torch.uint8))
    for index, expected in ((whole, [0, 1, 2, 3, 4]), (hidden, [0, 2, 4]), (again, [0, 2, 3, 4])):
        assert index.visible.tolist() == expected
        assert index.count == len(expected)
        found = index.search(torch.ones(1, 5) / 5**0.5, 5).slots[0].tolist()
        assert sorted(slot for slot in found if slot >= 0) == expected
    assert again.search(torch.eye(5)[:1], 5, group=2).slots[0].tolist() == [3, -1, -1, -1, -1]


def test_putting_rows_into_new_slots_leaves_the_index_before_as_it_was() -> None:
    before = build(torch.eye(4), "float32")
    after = before.put(
        torch.tensor([4, 5]),
        torch.tensor([4, 5]),
        encode(torch.eye(4)[:2], "float32"),
        torch.ones(2, dtype=torch.uint8),
    )
    assert before.slots == 4
    assert before.search(torch.eye(4)[:1], 9).slots.tolist() == [[0, 1, 2, 3]]
    assert after.search(torch.eye(4)[:1], 3).slots.tolist() == [[0, 4, 1]]
    assert after.put(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), {}, torch.zeros(0)) is after


def test_a_full_tile_needs_no_mask() -> None:
    index = build(torch.eye(64), "float32")
    assert index.slots == index.padded == 64
    assert index.search(torch.eye(64), 1).slots[:, 0].tolist() == list(range(64))


def test_excluded_ids_are_not_found() -> None:
    index = build(torch.eye(6), "float32")
    exclude = torch.tensor([[0, 3], [-1, -1]])
    slots, _, similarity = index.search(torch.eye(6)[:2], 6, exclude=exclude)
    assert slots.tolist() == [[1, 2, 4, 5, -1, -1], [1, 0, 2, 3, 4, 5]]
    assert similarity[0, 4:].isneginf().all()


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_many_blocks_and_small_chunks_change_nothing(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    features, queries = torch.randn(1000, 16), unit(torch.randn(20, 16))
    whole = build(features, storage)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64 * whole.blocks.slot_bytes * 2)
    monkeypatch.setattr(exact, "BOUNDS_AT_ONCE", 9000)  # bounds of eight queries
    monkeypatch.setattr(exact, "HASHED_AT_ONCE", 50)
    monkeypatch.setattr(batch, "COORDINATES", 500)
    cut = ExactIndex(16, storage, CPU)
    for start in range(0, 1000, 7):  # grow a little at a time
        slots = torch.arange(start, min(1000, start + 7))
        group = torch.ones(len(slots), dtype=torch.uint8)
        cut = cut.put(slots, slots, encode(unit(features[slots]), storage), group)
    assert len(cut.blocks.columns["row"]) == 8
    expected = whole.search(queries, 9)
    for long in (batch.LONG, 1):  # many candidates are scored at once, or those of one query after another's
        monkeypatch.setattr(batch, "LONG", long)
        found = cut.search(queries, 9)
        assert torch.equal(expected.slots, found.slots)
        assert torch.equal(expected.similarity, found.similarity)
    monkeypatch.setattr(single, "COORDINATES", 50)  # three candidates at once
    for number, query in enumerate(queries):
        for exclude in (None, torch.tensor([[-1]])):  # with an id to exclude, which nobody has, no kernel is asked
            alone = cut.search(query[None], 9, exclude=exclude)
            assert torch.equal(alone.slots[0], expected.slots[number])
            assert torch.equal(alone.similarity[0], expected.similarity[number])


def test_rows_are_kept_on_the_device_that_was_asked_for() -> None:
    made = blocks.Blocks({"row": ((4,), torch.int8), "id": ((), torch.int64)}, torch.device("meta"))
    made.reserve(100)
    assert {(part.device.type, len(part)) for (part,) in made.columns.values()} == {("meta", 128)}
    made.reserve(200)  # what is there already is copied
    assert {(part.device.type, len(part)) for (part,) in made.columns.values()} == {("meta", 256)}


def test_growing_copies_no_more_than_a_small_block() -> None:
    made = blocks.Blocks({"row": ((64,), torch.float32)}, CPU)
    sizes = []
    for slots in (1, 100, 2_000, 20_000, 900_000):
        made.reserve(slots)
        assert made.room >= slots
        sizes.append([len(part) for part in made.columns["row"]])
    assert sizes[:3] == [[64], [128], [2_048]]  # as many as are needed, or twice as many as before
    assert sizes[3] == [made.block]  # then at once a whole block, which is never copied
    assert sizes[4] == [made.block, made.block]


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rows_are_made_in_pieces_and_in_numpy_to_the_bits_of_all_of_them_in_torch(
    storage: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)).pow(3) * scale
    whole = encode(unit(check_features(features, 300)), storage)
    turned = encode(unit(check_features(features.T.contiguous().T, 300)), storage)
    with monkeypatch.context() as patch:
        patch.setattr(grid, "PIECE", 2000)  # six rows
        cut = encode(unit(check_features(features, 300)), storage)
        with pytest.raises(FeatureError, match="feature row 7 is the zero vector"):
            check_features(features * (torch.arange(50) != 7)[:, None], 300)
    in_torch = encode(grid._unit_tensor(features), storage)
    if storage == "int8":
        in_torch = grid._int8_tensor(grid._unit_tensor(features))
    for name, column in in_torch.items():
        assert torch.equal(whole[name], column)
        assert torch.equal(turned[name], column)
        assert torch.equal(cut[name], column)
    assert grid._magnitudes(features) == grid._magnitudes_of_tensor(features)


@pytest.mark.parametrize("storage", STORAGE)
def test_rows_on_another_device_are_made_there(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_magnitudes_of_tensor", lambda values: [1.0] * len(values))  # this device has no numbers
    features = check_features(torch.ones(3, 4, device="meta"), 4)
    columns = encode(unit(features), storage)
    assert {column.device.type for column in columns.values()} == {"meta"}
    assert {len(column) for column in columns.values()} == {3}


def test_what_is_made_in_main_memory_is_brought_to_another_device() -> None:
    places = batch._places_of_highest(torch.empty(2, 5, device="meta"), 3)
    assert places.shape == (2, 3)
    assert places.device.type == "meta"


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 3]), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_the_places_of_the_highest_are_found_among_ties(seed: int, levels: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, levels + 1, (3, width), generator=generator).float()
    values[values == 0] = -torch.inf
    for count in {1, (width + 1) // 2, width}:
        places = batch._places_of_highest(values, count)
        assert all(len(set(row)) == count for row in places.tolist())
        found = values.gather(1, places).sort(1).values
        assert torch.equal(found, values.sort(1).values[:, -count:])


@pytest.mark.parametrize("storage", STORAGE)
@given(st.integers(0, 2**31), st.sampled_from([1, 3, 64, 700]), st.floats(1e-30, 1e30))
@settings(max_examples=25, deadline=None)
def test_rows_are_on_the_grid_and_of_length_one(storage: str, seed: int, dim: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(5, dim, generator=generator).double().pow(3).mul(scale).float()
    rows = unit(features)
    read = decode(encode(rows, storage)).double()
    assert torch.equal((read * 2**24).round(), read * 2**24)
    length = {"float32": 2e-6, "float16": 2e-3, "int8": 2e-4, "progressive": 2e-3}[storage]
    torch.testing.assert_close(read.norm(dim=1), torch.ones(5).double(), atol=length, rtol=0)
    torch.testing.assert_close(read, rows.double(), atol={"float32": 0.0}.get(storage, 3e-4), rtol=0)


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 7, 512, 9000]), st.integers(-38, 30), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_unit_gives_one_row_the_bits_it_has_in_a_batch(seed: int, dim: int, exponent: int, power: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = (torch.randn(3, dim, generator=generator).double().pow(power) * 10.0**exponent).float()
    features[2] = 0
    alone = torch.cat([unit(feature[None]) for feature in features])
    assert alone.numpy().tobytes() == unit(features).numpy().tobytes()


def test_unit_matches_the_textbook_and_ignores_batch_mates() -> None:
    torch.manual_seed(3)
    features = torch.randn(50, 300) * 7
    rows = unit(features)
    torch.testing.assert_close(rows, torch.nn.functional.normalize(features, dim=1), atol=2e-6, rtol=0)
    assert torch.equal(rows, torch.cat([unit(feature[None]) for feature in features]))
    assert torch.equal(unit(torch.zeros(1, 3)), torch.zeros(1, 3))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_a_lower_matmul_precision_changes_no_answer(precision: str) -> None:
    torch.manual_seed(4)
    features, queries = torch.randn(1, 32) + 1e-3 * torch.randn(500, 32), unit(torch.randn(10, 32))
    index = build(features, "float32")
    torch.set_float32_matmul_precision(precision)
    try:
        slots = index.search(queries, 10).slots
    finally:
        torch.set_float32_matmul_precision("highest")
    assert slots.tolist() == oracle(index, queries, 10, np.ones(500, bool))


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("batch", [1, 2, 5, 12])
@pytest.mark.parametrize("dim", [30, 32, 200])
def test_the_bound_of_a_scan_holds(storage: str, batch: int, dim: int, engine: str) -> None:
    torch.manual_seed(5)
    rows, queries = unit(torch.randn(640, dim).pow(5)), unit(torch.randn(batch, dim).pow(5))  # far from even
    columns = encode(rows, storage)
    out = torch.empty(10, batch, 64)
    slack = scans.scan([columns["row"][:320].contiguous(), columns["row"][320:].contiguous()], queries, out)
    codes = columns["row"].double()
    error = (queries.double() @ codes.T - out.transpose(0, 1).reshape(batch, 640).double()).abs()
    assert (error / codes.norm(dim=1) <= slack.double()[:, None]).all()


def with_a_dominant_coordinate(count: int, dim: int) -> torch.Tensor:
    """Features of which one byte a coordinate says next to nothing."""
    features = torch.randn(count, dim)
    features[:, 3] = 200 + torch.randn(count)
    return features


@pytest.mark.parametrize("batch", [1, 3, 9, 40])
@pytest.mark.parametrize("exclude", [False, True])
def test_int8_rows_with_a_dominant_coordinate_are_found_exactly(batch: int, exclude: bool, engine: str) -> None:
    torch.manual_seed(6)
    features = with_a_dominant_coordinate(700, 48)
    usable = torch.rand(700) < 0.9
    index = build(features, "int8", usable)
    queries = unit(features[:batch] + 0.3 * torch.randn(batch, 48))
    allowed = usable.clone()
    without = None
    if exclude:
        without = torch.arange(20).expand(batch, -1)
        allowed[:20] = False
    found = index.search(queries, 12, exclude=without)
    assert found.slots.tolist() == oracle(index, queries, 12, allowed.numpy())
    rows = index.rows(found.slots.flatten()).double().view(batch, 12, 48)
    assert torch.equal(found.similarity, (rows * queries.double()[:, None]).sum(2))


@pytest.mark.parametrize("batch", [1, 9])
def test_the_second_byte_of_int8_rows_is_read_where_the_first_says_little(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    scored: list[int] = []
    score = single.exact

    def counted(index: ExactIndex, slots: Any, query: Any) -> Any:
        scored.append(len(slots))
        return score(index, slots, query)

    monkeypatch.setattr(single, "exact", counted)
    monkeypatch.setattr(batch_search, "LONG", 0)
    index = build(with_a_dominant_coordinate(2000, 48), "int8", torch.ones(2000, dtype=torch.bool))
    index.search_groups(unit(with_a_dominant_coordinate(batch, 48)), [(10, None), (10, 1)])
    assert max(scored) < 200  # of 2,000, nearly all of which are within reach by their first byte


@pytest.mark.parametrize("anything", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("batch", [1, 9])
def test_slots_without_int8_rows_are_never_found(batch: int, anything: float) -> None:
    torch.manual_seed(9)
    index = build(with_a_dominant_coordinate(400, 48), "int8")  # the last tile has room for more
    for name in ("scale", "residual"):
        index.blocks.columns[name][0][400:] = anything
    queries = unit(with_a_dominant_coordinate(batch, 48))
    assert index.search(queries, 12).slots.tolist() == oracle(index, queries, 12, np.ones(400, bool))


@pytest.mark.parametrize("dim", [3, 48, 700])
def test_what_both_bytes_of_int8_rows_hide_is_bounded(dim: int) -> None:
    torch.manual_seed(8)
    for features in (
        torch.randn(300, dim),
        with_a_dominant_coordinate(300, max(dim, 4))[:, :dim],
        torch.eye(dim)[:300],
    ):
        columns = encode(unit(features), "int8")
        scale = columns["scale"].double()
        both = columns["row"] * scale + columns["fine"] * fine_weight(columns["scale"]).double()
        hidden = (decode(columns).double() - both).norm(dim=1)
        assert (hidden <= hidden_from_both(dim)).all()


def test_the_fast_scan_is_used_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(scans, "kernel_scan", lambda *_: called.append("kernel"))
    monkeypatch.setattr(scans, "numkong_scan", lambda *_: called.append("numkong"))
    monkeypatch.setattr(scans, "torch_scan", lambda *_: called.append("torch"))
    monkeypatch.setattr(scans, "numpy_scan", lambda *_: called.append("numpy"))
    monkeypatch.setattr(scans, "integer_scan", lambda *_: called.append("integer"))
    monkeypatch.setattr(scans, "multiplies_integers", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(scans, "chosen", lambda: "numpy")

    def scan(dtype: torch.dtype, batch: int, dim: int = 32) -> str:
        scans.scan([torch.zeros(64, dim, dtype=dtype)], torch.zeros(batch, dim), torch.zeros(1, batch, 64))
        return called.pop()

    asked = ((torch.int8, 1), (torch.float16, 7), (torch.int8, 8), (torch.float16, 8), (torch.float32, 3))
    assert [scan(*each) for each in asked] == ["numkong", "numkong", "integer", "torch", "torch"]
    with monkeypatch.context() as patch:
        patch.setattr(scans, "multiplies_integers", lambda: False)
        assert scan(torch.int8, 8) == "torch"
    assert scan(torch.int8, 8, dim=31) == "torch"
    assert scan(torch.float32, 1) == scan(torch.float32, 2) == "numpy"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 3)
        assert scan(torch.float32, 1) == "torch"
    with monkeypatch.context() as patch:
        patch.setattr(scans, "chosen", lambda: "avx2")
        asked = ((torch.int8, 1), (torch.float16, 7), (torch.float32, 3), (torch.float32, 7), (torch.int8, 8))
        assert [scan(*each) for each in asked] == ["kernel", "kernel", "kernel", "kernel", "integer"]
        assert scan(torch.int8, 1, dim=2**16 + 1) == "torch"
        assert scan(torch.int8, 8, dim=2**16 + 1) == "torch"
        patch.setattr(torch, "get_num_threads", lambda: 3)
        assert scan(torch.float32, 1) == "torch"
        patch.setattr(torch, "get_num_threads", lambda: 1)
        patch.setattr(scans, "CACHED", 64 * 32 - 1)
        assert scan(torch.float32, 1) == "kernel"
    monkeypatch.setattr(scans, "CACHED", 64 * 32 - 1)  # one number less than there are
    assert scan(torch.float32, 1) == "torch"


def test_products_of_whole_numbers_are_used_only_where_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    right = scans.multiplies_integers.__wrapped__
    if torch.backends.mkldnn.is_available():
        monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.double() @ b.double()).to(torch.int32))
        assert right()
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.double() @ b.double()).clamp(max=2**15 - 1).to(torch.int32))
    assert not right()  # as on processors that clip sums
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not right()


@pytest.mark.parametrize("queries", [1, 8])
def test_sums_of_long_int8_rows_do_not_overflow(queries: int) -> None:
    dim = 140_000  # 127 * 127 * dim does not fit into 32 bits
    rows = torch.full((64, dim), 127, dtype=torch.int8)
    query = unit(torch.ones(queries, dim))
    products = torch.empty(1, queries, 64)
    errors = scans.scan([rows], query, products)
    exact = 127.0 * query.double().sum(1)
    length = 127.0 * dim**0.5
    assert ((products[0].double() - exact[:, None]).abs() <= errors[:, None] * length).all()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.ones(3), r"shape \(B, 4\), got \(3,\)"),
        (torch.ones(4), r"shape \(B, 4\), got \(4,\): pass features\[None\] for a single one"),
        (torch.ones(2, 3), r"shape \(B, 4\), got \(2, 3\)"),
        (torch.ones(1, 4, dtype=torch.complex64), "real numbers, got torch.complex64"),
        (torch.eye(4).to_sparse(), "dense, got torch.sparse_coo: pass features.to_dense()"),
        (torch.tensor([[1.0, 1, 1, 1], [1, float("nan"), 1, 1]]), "row 1 holds NaN"),
        (torch.tensor([[float("inf"), 1, 1, 1]]), "row 0 holds NaN or a value infinite"),
        (torch.tensor([[1e300, 1, 1, 1]], dtype=torch.float64), "infinite in float32"),
        (torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0]]), "row 1 is the zero vector"),
    ],
)
def test_features_that_cannot_be_used_are_named(features: torch.Tensor, message: str) -> None:
    with pytest.raises(FeatureError, match=message):
        check_features(features, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool])
def test_other_number_types_are_taken_as_float32(dtype: torch.dtype) -> None:
    checked = check_features(torch.tensor([[1, 0, 1, 1]]).to(dtype), 4)
    assert checked.dtype == torch.float32
    assert checked.tolist() == [[1, 0, 1, 1]]


def test_features_that_torch_negates_when_they_are_read() -> None:
    features = torch.tensor([[1 + 2j, 3 - 4j]]).conj().imag
    assert features.is_neg()
    assert unit(check_features(features, 2)).equal(unit(torch.tensor([[-2.0, 4.0]])))


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="storage must be one of float32, float16, int8, progressive, got 'int4'"):
        ExactIndex(4, "int4", CPU)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_can_search_too() -> None:
    program = """
import os, torch
from adanpc import Append, MemoryBank
bank = MemoryBank(8, 2, storage="int8")
bank.apply(Append(torch.rand(500, 8), torch.zeros(500, dtype=torch.int64)))
before = bank.search(torch.ones(1, 8), 3).ids.tolist()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if bank.search(torch.ones(1, 8), 3).ids.tolist() == before else 1)
print(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "0", done.stderr


def test_a_group_that_all_rows_are_in_hides_nothing() -> None:
    index = build(torch.eye(64), "float32")
    for count in (1, 9):
        found = index.search(torch.eye(64)[:count], 3, group=1)
        assert torch.equal(found.slots, index.search(torch.eye(64)[:count], 3).slots)


def test_an_earlier_reader_sees_the_blocks_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64 * 4)
    made = blocks.Blocks({"row": ((1,), torch.float32)}, CPU)
    made.reserve(200)
    assert [len(part) for part in made.used("row", 64)] == [64]
    assert [len(part) for part in made.used("row", 128)] == [64, 64]


def test_rows_may_be_kept_in_a_file_that_has_no_name(tmp_path: Path) -> None:
    torch.manual_seed(3)
    features = torch.randn(300, 24)
    in_memory = build(features, "float16")
    index = ExactIndex(24, "float16", CPU, folder=tmp_path)
    slots = torch.arange(300)
    in_file = index.put(slots, slots, index.encode(unit(features)), torch.ones(300, dtype=torch.uint8))
    queries = unit(torch.randn(9, 24))
    for count in (1, 9):
        for ours, theirs in zip(in_file.search(queries[:count], 7), in_memory.search(queries[:count], 7), strict=True):
            assert torch.equal(ours, theirs)
    assert list(tmp_path.iterdir()) == []
    check_index(partial(ExactIndex, folder=tmp_path), "int8")


def test_a_folder_without_room_is_refused_and_nothing_has_happened(tmp_path: Path) -> None:
    index = ExactIndex(4, folder=tmp_path / "missing")
    with pytest.raises(AdaNPCError, match=r"bytes of rows cannot be kept in .*missing: No such file .*; give another"):
        index.put(torch.arange(2), torch.arange(2), index.encode(torch.eye(4)[:2]), torch.ones(2, dtype=torch.uint8))
    assert index.slots == 0
    limited = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True)
    assert limited.stdout == "refused, and 64 rows answer\n", limited.stderr


FULL_DISK = """
import resource, signal, sys, torch
from adanpc.errors import AdaNPCError
from adanpc.index import ExactIndex, unit
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # no file may be larger: as if the disk were full
torch.manual_seed(0)
index = ExactIndex(32, folder=sys.argv[1])
rows = unit(torch.randn(5000, 32))
slots = torch.arange(5000)
group = torch.ones(5000, dtype=torch.uint8)
few = index.put(slots[:64], slots[:64], index.encode(rows[:64]), group[:64])
try:
    few.put(slots[64:], slots[64:], index.encode(rows[64:]), group[64:])
except AdaNPCError as error:
    assert "cannot be kept in" in str(error), error
    assert few.search(rows[:5], 1).ids[:, 0].tolist() == [0, 1, 2, 3, 4]
    print("refused, and", few.count, "rows answer")
"""


def test_another_process_is_known_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = ExactIndex(4, folder=tmp_path)
    monkeypatch.setattr(blocks.os, "getpid", lambda: -1)  # type: ignore[attr-defined]
    with pytest.raises(
        AdaNPCError, match="cannot be changed in a forked process, which shares the file: build or load"
    ):
        index.put(torch.arange(2), torch.arange(2), index.encode(torch.eye(4)[:2]), torch.ones(2, dtype=torch.uint8))


@pytest.mark.parametrize("count", [0, 1, 5, blocks.ONE_BY_ONE, blocks.ONE_BY_ONE + 1])
def test_few_slots_and_many_are_read_alike(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    torch.manual_seed(5)
    index = build(torch.randn(700, 6), "int8")
    slots = torch.randperm(700)[:count]
    read = index.blocks.read(slots.numpy(), "id", "row", "scale")
    taken = index.blocks.take(slots, "id", "row", "scale")
    assert read.keys() == taken.keys()
    for name, column in read.items():
        assert column.dtype == taken[name].numpy().dtype
        assert np.array_equal(column, taken[name].numpy())


def test_a_forked_process_cannot_write_into_the_file_of_its_parent(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORK_AND_WRITE, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "refused in the child\nthe parent goes on\n", done.stderr


FORK_AND_WRITE = """
import os, sys, torch
from adanpc.errors import AdaNPCError
from adanpc.index import ExactIndex
index = ExactIndex(4, folder=sys.argv[1])
ones = torch.ones(2, dtype=torch.uint8)
index = index.put(torch.arange(2), torch.arange(2), index.encode(torch.eye(4)[:2]), ones)
child = os.fork()
if not child:
    assert index.search(torch.eye(4)[:1], 1).ids.tolist() == [[0]]
    try:
        index.put(torch.arange(2, 4), torch.arange(2, 4), index.encode(torch.eye(4)[2:]), ones)
    except AdaNPCError as error:
        assert "cannot be changed in a forked process" in str(error), error
        print("refused in the child", flush=True)
    os._exit(0)
os.waitpid(child, 0)
index = index.put(torch.arange(2, 4), torch.arange(2, 4), index.encode(torch.eye(4)[2:]), ones)
assert index.search(torch.eye(4), 1).ids.flatten().tolist() == [0, 1, 2, 3]
print("the parent goes on")
"""


@pytest.mark.parametrize("block", [None, 64])
def test_rows_are_found_by_their_ids(block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if block is not None:
        monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    index = ExactIndex(3)
    rows = index.encode(unit(torch.randn(150, 3, generator=torch.Generator().manual_seed(0))))
    slots = torch.arange(150)
    group = torch.ones(150, dtype=torch.uint8)
    index = index.put(slots, 2 * slots, rows, group)
    assert index.find([0, 298, 140, 7, 300, -1, 140]) == [0, 149, 70, -1, -1, -1, 70]
    older = index.hide(torch.tensor([70, 90]))
    first = {name: column[:2] for name, column in rows.items()}
    newer = older.put(torch.tensor([70, 150]), torch.tensor([180, 299]), first, group[:2])  # a row that moved
    assert older.find([140, 180]) == [-1, -1]
    assert newer.find([140, 180, 299, 298]) == [-1, 70, 150, 149]
    assert ExactIndex(3).find([0]) == [-1]
