"""A progressive search finds what exact search finds, to the bit, for whatever rows and queries there are."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adanpc.core import Append, Delete, MemoryBank
from adanpc.errors import AdaNPCError
from adanpc.index import (
    ExactIndex,
    Index,
    ProgressiveIndex,
    blocks,
    codes,
    hunt,
    index_for,
    kernels,
    progressive,
    row_codes,
    single,
    unit,
)
from adanpc.index.codes import Coder
from adanpc.testing import check_index

CPU = torch.device("cpu")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of few rows already, in many small blocks and spans."""
    make_eager(monkeypatch)


def make_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_codes, "ROWS_FOR_CODES", 24)
    monkeypatch.setattr(progressive, "ROWS_PER_WANTED", 1)
    monkeypatch.setattr(progressive, "LEAST_REREAD", 8)
    monkeypatch.setattr(row_codes, "SPAN", 32)
    monkeypatch.setattr(progressive, "SAMPLED_BOUNDS", 32)
    monkeypatch.setattr(row_codes, "ENCODED_AT_ONCE", 24)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)


def same(ours: Any, theirs: Any) -> bool:
    """Whether two results are equal in all they say."""
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def both(dim: int, rows: Tensor, **options: Any) -> tuple[ProgressiveIndex, ExactIndex]:
    """The same rows in both indexes."""
    slots = torch.arange(len(rows))
    group = torch.ones(len(rows), dtype=torch.uint8)
    fast = ProgressiveIndex(dim, **options)
    plain = ExactIndex(dim, "progressive")
    columns = plain.encode(rows)
    return fast.put(slots, slots, columns, group), plain.put(slots, slots, columns, group)


@pytest.mark.no_cover
@pytest.mark.parametrize("path", kernels.paths())
def test_the_contract_holds_on_every_path(path: str, eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WANTED", path)
    check_index(ProgressiveIndex, "progressive")


@pytest.mark.no_cover
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_the_contract_holds_for_other_storages_and_certified(storage: str, eager: None) -> None:
    check_index(partial(ProgressiveIndex, certified=True), storage)


def test_the_contract_holds_before_there_are_codes() -> None:
    check_index(ProgressiveIndex, "progressive")


class Life:
    """Both indexes through the same changes, as a bank makes them."""

    def __init__(self, dim: int, certified: bool) -> None:
        self.fast: Index = ProgressiveIndex(dim, certified=certified)
        self.plain: Index = ExactIndex(dim, "progressive")
        self.ids = 0

    def put(self, slots: Tensor, rows: Tensor, group: Tensor) -> None:
        ids = torch.arange(self.ids, self.ids + len(rows)).flip(0)
        self.ids += len(rows)
        self.fast = self.fast.put(slots, ids, self.fast.encode(rows), group)
        self.plain = self.plain.put(slots, ids, self.plain.encode(rows), group)

    def hide(self, slots: Tensor) -> None:
        self.fast = self.fast.hide(slots)
        self.plain = self.plain.hide(slots)

    def show(self, slots: Tensor, group: Tensor) -> None:
        self.fast = self.fast.show(slots, group)
        self.plain = self.plain.show(slots, group)

    def check(self, queries: Tensor, wanted: list[tuple[int, int | None]], exclude: Tensor | None) -> None:
        found = self.fast.search_groups(queries, wanted, exclude=exclude)
        expected = self.plain.search_groups(queries, wanted, exclude=exclude)
        assert self.fast.count == self.plain.count
        for ours, theirs in zip(found, expected, strict=True):
            assert same(ours, theirs)


def drawn_rows(kind: str, count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Unit rows of a kind that is hard for some way to bound them."""
    noise = torch.randn(count, dim, generator=generator)
    if kind == "isotropic":
        return unit(noise)
    centers = torch.randn(5, dim, generator=generator)
    cluster = torch.randint(0, 5, (count,), generator=generator)
    if kind == "copies":
        return unit(centers[cluster])
    if kind == "nearly equal":
        return unit(centers[0] + 1e-3 * noise)
    if kind == "outliers":  # one coordinate that rules the rest
        noise[:, 0] += 60 * torch.randn(count, generator=generator)
        return unit(noise)
    if kind == "axes":
        return unit(torch.eye(dim)[torch.randint(0, dim, (count,), generator=generator)])
    return unit(centers[cluster] + 0.4 * noise)


KINDS = ["isotropic", "copies", "nearly equal", "outliers", "axes", "clustered"]


@pytest.mark.no_cover
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_whatever_happens_the_answers_are_those_of_exact_search(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_eager(monkeypatch)
        monkeypatch.setattr(kernels, "WANTED", data.draw(st.sampled_from(kernels.paths())))
        monkeypatch.setattr(progressive, "LEAST_TOGETHER", data.draw(st.sampled_from([1, 8])))
        monkeypatch.setattr(progressive, "MOST_TOGETHER", data.draw(st.sampled_from([2, 64])))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        dim = data.draw(st.sampled_from([1, 3, 70, 130]))
        life = Life(dim, certified=data.draw(st.booleans()))
        for _ in range(data.draw(st.integers(1, 4))):  # each with rows of its own kind: drift
            count = data.draw(st.integers(1, 90))
            rows = drawn_rows(data.draw(st.sampled_from(KINDS)), count, dim, generator)
            used = life.plain.slots
            hidden = sorted(set(range(used)) - set(life.plain.visible.tolist()))
            reused = hidden[: data.draw(st.integers(0, len(hidden)))][:count]
            fresh = torch.arange(used, used + count - len(reused))
            slots = torch.cat([torch.tensor(reused, dtype=torch.int64), fresh])
            group = torch.randint(0, 3, (count,), generator=generator).to(torch.uint8)
            life.put(slots[torch.randperm(count, generator=generator)], rows, group)
            some = torch.randperm(life.plain.slots, generator=generator)[: data.draw(st.integers(0, 20))]
            if data.draw(st.booleans()):
                life.hide(some)
            else:
                life.show(some, torch.ones(len(some), dtype=torch.uint8))
            queries = torch.cat([drawn_rows(data.draw(st.sampled_from(KINDS)), 2, dim, generator), rows[:1]])
            exclude = None
            if data.draw(st.booleans()):
                exclude = torch.randint(0, life.ids, (3, data.draw(st.integers(0, 3))), generator=generator)
            k = data.draw(st.integers(1, 12) | st.integers(1, 400))
            life.check(queries, [(k, None), (3, 1), (k, 2)], exclude)


@pytest.mark.no_cover
@pytest.mark.parametrize("dim", [128, 640, 1100])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_many_dimensions(dim: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_codes, "ROWS_FOR_CODES", 900)
    monkeypatch.setattr(progressive, "LEAST_REREAD", 64)
    generator = torch.Generator().manual_seed(dim)
    rows = drawn_rows(kind, 2000, dim, generator)
    fast, plain = both(dim, rows)
    queries = torch.cat([drawn_rows(kind, 6, dim, generator), rows[:3]])
    for k in (1, 50):
        expected = plain.search(queries, k)
        assert same(fast.search(queries, k), expected)
        assert same(fast.search(queries[:7], k), [column[:7] for column in expected])  # one by one


def spread_rows(count: int, dim: int, seed: int) -> Tensor:
    """Rows with a falling spectrum around a mean, as features have."""
    generator = torch.Generator().manual_seed(seed)
    scales = (1 + torch.arange(dim)) ** -0.5
    classes = torch.randn(40, dim, generator=torch.Generator().manual_seed(0)) * scales
    cluster = torch.randint(0, 40, (count,), generator=generator)
    noise = torch.randn(count, dim, generator=generator) * scales
    return unit(classes[cluster] + 0.7 * noise + torch.ones(dim) * 0.05)


def test_most_rows_are_never_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    exact = single.exact

    def counting(index: ExactIndex, slots: Any, query: Any) -> Any:
        scored.append(len(slots))
        return exact(index, slots, query)

    rows = spread_rows(20000, 512, 1)
    fast, plain = both(512, rows)
    few = progressive.LEAST_TOGETHER - 1  # one by one
    queries = spread_rows(few, 512, 2)
    expected = plain.search(queries, 50)
    monkeypatch.setattr(single, "exact", counting)
    assert same(fast.search(queries, 50), expected)
    assert max(scored) < 2000
    assert sum(scored) / few < 600


COMPILED = [path for path in kernels.paths() if path != "numpy"]


def counting_scores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts from now on how many rows a batch scores at once."""
    scored: list[int] = []
    scores = single.scores

    def counting(index: ExactIndex, slots: Any, owners: Any, queries: Any) -> Any:
        scored.append(len(slots))
        return scores(index, slots, owners, queries)

    monkeypatch.setattr(single, "scores", counting)
    return scored


@pytest.mark.parametrize("path", COMPILED)
def test_queries_that_share_a_pass_look_at_few_rows_and_nearly_all_are_certain(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WANTED", path)
    monkeypatch.setattr(Coder, "fitted", partial(Coder.fitted, seed=0))  # the same codes in every run
    rows = spread_rows(17000, 128, 1)
    fast, plain = both(128, rows)
    queries = spread_rows(20, 128, 2)
    expected = plain.search(queries, 10)
    scored = counting_scores(monkeypatch)
    searched_again: list[int] = []
    one_by_one = ProgressiveIndex._one_by_one

    def counting(index: ProgressiveIndex, *arguments: Any) -> Any:
        searched_again.append(1)
        return one_by_one(index, *arguments)

    monkeypatch.setattr(ProgressiveIndex, "_one_by_one", counting)
    assert same(fast.search(queries, 10), expected)
    assert scored[0] / 20 < 600
    assert len(searched_again) < 10  # now and then a query is not settled by a pass


@pytest.mark.skipif(not COMPILED, reason="there are no kernels")
@pytest.mark.parametrize("flaw", ["a guess that is too high", "no room"])
def test_what_a_pass_cannot_be_certain_of_is_searched_again(
    flaw: str, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progressive, "LEAST_TOGETHER", 1)
    rows = drawn_rows("clustered", 300, 70, torch.Generator().manual_seed(3))
    if flaw == "a guess that is too high":
        monkeypatch.setattr(hunt, "CAUTION", -50.0)
    else:
        monkeypatch.setattr(hunt, "ROOM", 1)
    fast, plain = both(70, rows)
    searched_again: list[int] = []
    nearest = ProgressiveIndex._nearest

    def counting(index: ProgressiveIndex, *arguments: Any) -> Any:
        searched_again.append(1)
        return nearest(index, *arguments)

    monkeypatch.setattr(ProgressiveIndex, "_nearest", counting)
    queries = drawn_rows("clustered", 9, 70, torch.Generator().manual_seed(4))
    assert same(fast.search(queries, 20), plain.search(queries, 20))
    assert searched_again


@pytest.mark.parametrize("certified", [False, True])
def test_queries_share_no_pass_that_could_not_settle_them(
    certified: bool, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hunt, "Pass", None)
    rows = drawn_rows("clustered", 300, 70, torch.Generator().manual_seed(6))
    fast, plain = both(70, rows, certified=certified)
    queries = drawn_rows("clustered", 9, 70, torch.Generator().manual_seed(7))
    k = 7 if certified else 301
    assert same(fast.search(queries, k), plain.search(queries, k))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_that_share_queries_find_the_same(threads: int, eager: None) -> None:
    rows = drawn_rows("clustered", 300, 70, torch.Generator().manual_seed(6))
    fast, plain = both(70, rows)
    queries = drawn_rows("clustered", 37, 70, torch.Generator().manual_seed(7))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert same(fast.search(queries, 7), plain.search(queries, 7))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_queries_share_a_pass_over_rows_of_other_storages(
    storage: str, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = drawn_rows("clustered", 300, 70, torch.Generator().manual_seed(6))
    plain = ExactIndex(70, storage)
    fast = ProgressiveIndex(70, storage)
    slots = torch.arange(300)
    group = torch.ones(300, dtype=torch.uint8)
    columns = plain.encode(rows)
    plain = plain.put(slots, slots, columns, group)
    fast = fast.put(slots, slots, columns, group)
    queries = drawn_rows("clustered", 9, 70, torch.Generator().manual_seed(7))
    assert same(fast.search(queries, 7), plain.search(queries, 7))


@pytest.mark.skipif(not COMPILED, reason="there are no kernels")
def test_many_equal_rows_are_not_all_scored_for_a_batch(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progressive, "LEAST_TOGETHER", 1)
    monkeypatch.setattr(hunt, "CROWD", 0)
    rows = drawn_rows("copies", 300, 70, torch.Generator().manual_seed(5))
    fast, plain = both(70, rows)
    scored = counting_scores(monkeypatch)
    exclude = torch.arange(10)[:, None]
    for excluded in (None, exclude):
        assert same(fast.search(rows[:10], 3, exclude=excluded), plain.search(rows[:10], 3, exclude=excluded))
    assert scored == [0, 0]  # they were ranked without their copies


def test_errors_are_as_likely_as_the_bound_says() -> None:
    """The bound is 6 standard deviations: errors must have that deviation, over rotations, and none may pass it."""
    rows = spread_rows(3000, 640, 3).double().numpy()
    query = spread_rows(1, 640, 4).double().numpy()[0]
    shares = []
    for seed in range(8):
        coder = Coder.fitted(rows[:500], seed=seed)
        tail = coder.split(query[None])[1][0]
        coded = coder.encode(rows, np.zeros(coder.padded))
        true = coded.tails @ tail
        signs = np.unpackbits(coded.bits.view(np.uint8), axis=1, bitorder="little") * 2.0 - 1
        estimate = coded.weights[:, 1] * (signs @ tail[: coder.signs])
        deviation = coded.weights[:, 2] * np.linalg.norm(tail) / np.sqrt(coder.padded - 1)
        shares.append((true - estimate) / deviation)
    errors = np.concatenate(shares)
    assert 0.9 < errors.std() < 1.1
    assert abs(errors.mean()) < 0.1
    assert np.abs(errors).max() < 6


@pytest.mark.parametrize("path", kernels.paths())
@pytest.mark.parametrize("kind", KINDS)
def test_no_bound_is_below_the_similarity(kind: str, path: str, eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WANTED", path)
    generator = torch.Generator().manual_seed(9)
    rows = drawn_rows(kind, 300, 200, generator)
    fast, plain = both(200, rows)
    stored = plain.rows(torch.arange(300)).double().numpy()
    for query in torch.cat([drawn_rows(kind, 3, 200, generator), rows[:2]]).double().numpy():
        for certified in (False, True):
            coder = fast._codes.coder
            assert coder is not None
            bounds = progressive._Bounds(fast._codes, coder, query, 300, certified=certified)
            assert (bounds._upper >= stored @ query).all()
            assert (bounds.of_rows(np.arange(300)) >= stored @ query).all()


def test_nibbles_bound_for_certain_whatever_the_rotation() -> None:
    """A query that lies where the code of a row is worst: only certified bounds hold there."""
    rows = spread_rows(600, 256, 5).double().numpy()
    coder = Coder.fitted(rows, seed=0)
    none = np.zeros((1, coder.padded))
    coded = coder.encode(rows[:1], none[0])
    levels = np.concatenate([coded.nibbles & 15, coded.nibbles >> 4], axis=1)[0] - 7.5
    left_out = coded.tails[0] - coded.factors[0, 0] * levels
    dense = coder._rotation._dense
    assert dense is not None
    query = dense @ (left_out / np.linalg.norm(left_out))
    query -= coder.directions.T @ (coder.directions @ query)
    query /= np.linalg.norm(query)
    true = float(rows[0] @ query)
    bounds = {}
    for certified in (False, True):
        scan, nibbles = coder.prepare(query, none, certified=certified)
        base = np.zeros(kernels.LANES, np.float32)
        upper = np.zeros(kernels.LANES, np.float32)
        tile: dict[str, Any] = {
            "head": np.zeros((1, codes.HEAD // 2, kernels.LANES, 2), np.int8),
            "bits": np.zeros((1, coder.signs // 32, kernels.LANES), np.uint32),
            "weights": np.zeros((1, 3, kernels.LANES), np.float32),
        }
        tile["head"][0, :, 0] = coded.head[0].reshape(-1, 2)
        tile["bits"][0, :, 0] = coded.bits[0]
        tile["weights"][0, :, 0] = coded.weights[0]
        kernels.scan_tiles("numpy", tile, 1, 0, 1, scan, base, upper)
        row = {"nibbles": coded.nibbles, "factors": coded.factors}
        kernels.bound_rows("numpy", row, np.zeros(1, np.int64), 0, nibbles, base, upper)
        bounds[certified] = float(upper[0])
    assert bounds[False] < true <= bounds[True]


@pytest.mark.parametrize("size", [128, 256, 640, 2048])
def test_a_rotation_keeps_lengths_and_angles(size: int) -> None:
    random = np.random.default_rng(0)
    rotation = codes._Rotation(codes._random_rotation(size, random))
    rows = random.standard_normal((5, size))
    turned = rotation.turned(rows)
    assert np.allclose(turned @ turned.T, rows @ rows.T, rtol=1e-12, atol=1e-9)
    spike = rotation.turned(np.eye(size)[:1])[0]
    assert np.abs(spike).max() < 8 / np.sqrt(size), "one coordinate is spread over all"


def test_directions_are_those_of_the_most_energy() -> None:
    rows = spread_rows(1000, 200, 6).double().numpy()
    directions = Coder.fitted(rows, seed=1).directions
    assert np.allclose(directions @ directions.T, np.eye(codes.HEAD), atol=1e-12)
    kept = np.square(rows @ directions.T).sum()
    best = np.linalg.eigvalsh(rows.T @ rows)[-codes.HEAD :].sum()
    assert kept > 0.98 * best
    few = Coder.fitted(rows[:, :10], seed=1).directions
    assert np.allclose(few @ few.T, np.diag([1.0] * 10 + [0.0] * 54), atol=1e-12)


def test_later_rows_are_coded_around_the_mean_of_those_before(eager: None) -> None:
    """After a drift, what codes leave out of a row shrinks as soon as a span knows where rows are now."""
    generator = torch.Generator().manual_seed(1)
    first = unit(torch.randn(64, 128, generator=generator))
    drift = torch.randn(1, 128, generator=generator)
    later = unit(2 * drift + torch.randn(96, 128, generator=generator))
    plain = both(128, torch.cat([first, later]))[1]
    slots = torch.arange(64, 160)
    fast = both(128, first)[0]
    fast = fast.put(slots, slots, fast.encode(later), torch.ones(96, dtype=torch.uint8))
    arrays = fast._codes._tiles.arrays()["weights"]
    left_out = np.concatenate([part[:, 2].reshape(-1) for part in arrays])[:160]
    assert left_out[128:].mean() < 0.6 * left_out[64:96].mean()
    assert same(fast.search(later[:5], 7), plain.search(later[:5], 7))


def test_a_span_that_nothing_was_put_in_hands_its_center_on(eager: None) -> None:
    rows = drawn_rows("clustered", 40, 8, torch.Generator().manual_seed(2))
    fast, plain = both(8, rows)
    far = torch.tensor([200, 201])
    more = drawn_rows("clustered", 2, 8, torch.Generator().manual_seed(3))
    ones = torch.ones(2, dtype=torch.uint8)
    fast = fast.put(far, far, fast.encode(more), ones)
    plain = plain.put(far, far, plain.encode(more), ones)
    centers = fast._codes.centers(202)
    assert np.array_equal(centers[2], centers[6])
    assert np.abs(centers[2]).max() > 0
    assert same(fast.search(more, 9), plain.search(more, 9))


def test_nothing_put_changes_nothing(eager: None) -> None:
    fast, plain = both(8, drawn_rows("clustered", 40, 8, torch.Generator().manual_seed(2)))
    nothing = torch.zeros(0, dtype=torch.int64)
    again = fast.put(nothing, nothing, fast.encode(torch.zeros(0, 8)), nothing.to(torch.uint8))
    assert same(again.search(torch.eye(8), 5), plain.search(torch.eye(8), 5))


def test_older_versions_find_what_they_found_when_codes_are_made(eager: None) -> None:
    generator = torch.Generator().manual_seed(4)
    rows = drawn_rows("clustered", 60, 16, generator)
    older, plain = both(16, rows[:20])
    assert not older.coded
    hidden = older.hide(torch.arange(5))
    newest = hidden.put(
        torch.arange(20, 60), torch.arange(20, 60), hidden.encode(rows[20:]), torch.ones(40, dtype=torch.uint8)
    )
    assert newest.coded
    queries = drawn_rows("clustered", 9, 16, generator)
    assert same(older.search(queries, 4), plain.search(queries, 4))
    back = newest.show(torch.arange(5), torch.ones(5, dtype=torch.uint8))
    assert same(back.search(queries, 4), both(16, rows)[1].search(queries, 4))


def test_what_other_versions_hold_is_coded_too(eager: None) -> None:
    """A version with more rows than the one that first has enough is still searched right."""
    generator = torch.Generator().manual_seed(5)
    rows = drawn_rows("clustered", 60, 16, generator)
    slots = torch.arange(60)
    ones = torch.ones(60, dtype=torch.uint8)
    empty = ProgressiveIndex(16)
    columns = empty.encode(rows)
    few = empty.put(slots[:20], slots[:20], {"row": columns["row"][:20]}, ones[:20])
    hidden = torch.zeros(40, dtype=torch.uint8)
    wide = few.put(slots[20:], slots[20:], {"row": columns["row"][20:]}, hidden)  # too few that can be found
    read = wide.show(slots[40:], ones[40:])
    assert not read.coded
    few = few.hide(slots[:3])
    few.put(slots[20:40], slots[20:40], {"row": columns["row"][20:40]}, ones[:20])
    assert read.coded
    plain = both(16, rows)[1].hide(slots[20:40])
    queries = drawn_rows("clustered", 6, 16, generator)
    assert same(read.search(queries, 6), plain.search(queries, 6))


def test_what_was_never_written_is_not_looked_at(eager: None) -> None:
    rows = drawn_rows("clustered", 40, 16, torch.Generator().manual_seed(6))
    slots = torch.arange(0, 80, 2)
    ones = torch.ones(40, dtype=torch.uint8)
    queries = drawn_rows("clustered", 4, 16, torch.Generator().manual_seed(7))
    expected = ExactIndex(16, "progressive").put(slots, slots, ExactIndex(16, "progressive").encode(rows), ones)
    for waste in (float("nan"), float("inf"), 6e4):
        index = ProgressiveIndex(16)
        index._exact.blocks.reserve(80)
        for part in index._exact.blocks.columns["row"]:
            part[:] = waste
        filled = index.put(slots, slots, index.encode(rows), ones)
        assert same(filled.search(queries, 5), expected.search(queries, 5))


def test_rows_of_zeros_have_codes(eager: None) -> None:
    rows = torch.cat([torch.zeros(3, 8), drawn_rows("clustered", 40, 8, torch.Generator().manual_seed(8))])
    fast, plain = both(8, rows)
    queries = torch.cat([torch.zeros(1, 8), torch.eye(8)])
    assert same(fast.search(queries, 43), plain.search(queries, 43))
    assert same(fast.search(queries, 5), plain.search(queries, 5))


def test_longer_rows_than_codes_are_made_of_are_all_read(monkeypatch: pytest.MonkeyPatch, eager: None) -> None:
    monkeypatch.setattr(row_codes, "WIDEST", 7)
    fast, plain = both(8, drawn_rows("clustered", 40, 8, torch.Generator().manual_seed(2)))
    assert not fast.coded
    assert same(fast.search(torch.eye(8), 5), plain.search(torch.eye(8), 5))


def test_the_sums_of_the_longest_rows_do_not_overflow() -> None:
    rows = np.full((2, codes.WIDEST), codes.WIDEST**-0.5)
    coder = Coder.__new__(Coder)
    coder.padded = codes.padded_length(codes.WIDEST)
    nibbles = coder._nibbles(rows[0], 1.0)
    whole = 256 * nibbles.high.astype(int) + nibbles.low
    assert 15 * np.abs(whole).sum() < 2**31
    assert np.abs(whole).max() > 7000


def test_threads_search_while_rows_are_appended(eager: None) -> None:
    generator = torch.Generator().manual_seed(11)
    rows = drawn_rows("clustered", 1200, 32, generator)
    labels = torch.zeros(1200, dtype=torch.int64)
    bank = MemoryBank(32, 2, storage="progressive")
    bank.apply(Append(rows[:200], labels[:200]))
    stop = Event()

    def read() -> int:
        checked = 0
        while not stop.is_set() or not checked:
            contents = bank.contents
            count = len(contents)
            query = rows[checked % 1200][None]
            found = contents.nearest(query, 5)
            held = contents.index.rows(contents.held_slots()).double()
            best = (held @ query[0].double()).topk(5).values
            assert count == len(contents)
            assert torch.equal(found.similarity[0], best)
            checked += 1
        return checked

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for start in range(200, 1200, 20):
                bank.apply(Append(rows[start : start + 20], labels[:20]))
                bank.apply(Delete((start - 200,)))
        finally:
            stop.set()
        assert all(reader.result() for reader in readers)


def test_a_bank_takes_it_by_its_storage(eager: None) -> None:
    rows = drawn_rows("clustered", 60, 16, torch.Generator().manual_seed(12))
    bank = MemoryBank(16, 3, storage="progressive")
    other = MemoryBank(16, 3, storage="progressive", index=ExactIndex)
    for made in (bank, other):
        made.apply(Append(rows, torch.arange(60) % 3))
    assert isinstance(bank.contents.index, ProgressiveIndex)
    assert bank.digest() == other.digest()
    assert torch.equal(bank.search(rows, 5).ids, other.search(rows, 5).ids)
    loaded = MemoryBank.load(bank.state())
    assert isinstance(loaded.contents.index, ProgressiveIndex)
    assert loaded.digest() == bank.digest()
    assert type(index_for(4, "progressive", torch.device("meta"))) is ExactIndex
    assert type(index_for(4, "float16", CPU)) is ExactIndex


def test_its_size_counts_rows_codes_and_what_makes_them(eager: None) -> None:
    few, _ = both(128, drawn_rows("clustered", 20, 128, torch.Generator().manual_seed(1)))
    assert few.nbytes == 20 * (2 * 128 + 8 + 8 + 1)
    fast, _ = both(128, drawn_rows("clustered", 64, 128, torch.Generator().manual_seed(1)))
    in_tiles = 64 * (64 + 128 // 8 + 3 * 4)
    in_rows = 64 * (128 // 2 + 2 * 4)
    centers = (2 + 1) * 128 * 8
    made = in_tiles + in_rows + centers + codes.bytes_of_coder(128)
    assert fast.nbytes == 64 * (2 * 128 + 8 + 8 + 1) + made
    assert fast.memory(64) == {
        "rows": 64 * 256,
        "beside rows": 64 * 17,
        "codes": made,
        "a search": 64 * 16 + 64 * 4097 * 12,
    }
    assert few.memory(20) == {"rows": 20 * 256, "beside rows": 20 * 17}
    assert few.memory(64) == fast.memory(64), "codes that are still to be made are counted"
    assert repr(fast) == "<ProgressiveIndex of 64 rows: dim=128, storage='progressive'>"
    assert "certified=True" in repr(ProgressiveIndex(4, certified=True))
    assert (fast.dim, fast.storage, fast.device) == (128, "progressive", CPU)


@pytest.mark.parametrize("dim", [100, 300, 1100])
def test_the_size_of_a_coder_is_that_of_its_arrays(dim: int) -> None:
    coder = Coder.fitted(np.random.default_rng(0).standard_normal((80, dim)), seed=0)
    arrays = [value for value in vars(coder).values() if isinstance(value, np.ndarray)]
    rotation = vars(coder._rotation)
    arrays += [part for parts in rotation["_rounds"] for part in parts]
    if rotation["_dense"] is not None:
        arrays.append(rotation["_dense"])
    assert sum(array.nbytes for array in arrays) == codes.bytes_of_coder(dim)


def test_rows_may_be_in_a_file(eager: None, tmp_path: Path) -> None:
    check_index(partial(ProgressiveIndex, folder=tmp_path), "progressive")
    rows = drawn_rows("clustered", 400, 16, torch.Generator().manual_seed(12))
    bank = MemoryBank(16, 3, storage="progressive", index=partial(ProgressiveIndex, folder=tmp_path))
    other = MemoryBank(16, 3, storage="progressive")
    for made in (bank, other):
        made.apply(Append(rows, torch.arange(400) % 3))
    assert bank.digest() == other.digest()
    assert torch.equal(bank.search(rows, 5).ids, other.search(rows, 5).ids)
    assert bank.memory()["rows in a file"] == 400 * 32
    assert bank.memory()["total"] == other.memory()["total"] - 400 * 32
    assert pickle.loads(pickle.dumps(bank)).digest() == bank.digest()


@pytest.mark.parametrize(("sample", "compared"), [(0.0, 0), (0.25, 5), (1.0, 20)])
def test_an_audit_compares_a_share_of_the_queries(sample: float, compared: int, eager: None) -> None:
    rows = drawn_rows("clustered", 60, 16, torch.Generator().manual_seed(13))
    fast, plain = both(16, rows, sample=sample)
    queries = drawn_rows("clustered", 20, 16, torch.Generator().manual_seed(14))
    exclude = torch.arange(20)[:, None]
    assert same(fast.search(queries, 4, exclude=exclude), plain.search(queries, 4, exclude=exclude))
    assert fast.audit == (compared, 0)


def test_an_audit_notices_what_was_missed_and_corrects_it(
    eager: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = drawn_rows("clustered", 60, 16, torch.Generator().manual_seed(13))
    fast, plain = both(16, rows, sample=1.0)
    queries = drawn_rows("clustered", 3, 16, torch.Generator().manual_seed(14))
    reaching = progressive._Bounds.reaching

    def careless(bounds: progressive._Bounds, least: float, usable: Any) -> Any:
        return reaching(bounds, least, usable)[1:]

    monkeypatch.setattr(progressive._Bounds, "reaching", careless)
    assert same(fast.search(queries, 60), plain.search(queries, 60))
    assert fast.audit == (3, 3)
    assert "missed a neighbor: Audit(queries=3, differing=3)" in caplog.text
    with pytest.raises(AdaNPCError, match="sample must be a number from 0 to 1, got 2"):
        ProgressiveIndex(4, sample=2)


def test_other_devices_and_false_exclusions_are_refused() -> None:
    with pytest.raises(AdaNPCError, match="works in main memory: pass device='cpu' instead of meta"):
        ProgressiveIndex(4, device="meta")
    with pytest.raises(AdaNPCError, match="exclude must be whole numbers"):
        ProgressiveIndex(4).search(torch.eye(4), 2, exclude=torch.zeros(3, 1))
