"""Search is exact: for every storage, scan, batch size, tie and shape."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adanpc.errors import AdaNPCError, FeatureError
from adanpc.index import STORAGE, ExactIndex, batch, check_features, exact, single, unit
from adanpc.index import scan as scans
from adanpc.index.grid import decode, encode

CPU = torch.device("cpu")
STORAGES = list(STORAGE)


def build(features: torch.Tensor, storage: str) -> ExactIndex:
    index = ExactIndex(features.shape[1], storage, CPU)
    index.grow(len(features))
    index.put(torch.arange(len(features)), encode(unit(features), storage))
    return index


def oracle(index: ExactIndex, queries: torch.Tensor, k: int, usable: np.ndarray) -> list[list[int]]:
    rows = index.rows(torch.arange(len(usable))).double().numpy()
    answers = []
    for query in queries.double().numpy():
        score = [float(np.dot(row, query)) if ok else -np.inf for row, ok in zip(rows, usable, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: (-score[i], i))[:k]
        answers.append([i if usable[i] else -1 for i in order])
    return answers


@pytest.fixture(params=["numkong", "torch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(scans, "numkong", None)
        monkeypatch.setattr(scans, "CACHED", 0)
    else:
        assert scans.numkong is not None, "the tests run with the extra `fast`"
    return str(request.param)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("batch", [1, 3, 9])
@pytest.mark.parametrize("spread", [1.0, 1e-4])
def test_search_finds_what_a_loop_finds(storage: str, batch: int, spread: float, engine: str) -> None:
    torch.manual_seed(1)
    features = torch.randn(1, 24) + spread * torch.randn(300, 24)  # a small spread: neighbors differ in the last bits
    queries = unit(torch.randn(1, 24) * spread + features[:batch])
    index = build(features, storage)
    usable = torch.rand(index.slots) < 0.8
    usable[300:] = False
    slots, similarity = index.search(queries, 12, usable, torch.arange(index.slots))
    assert slots.tolist() == oracle(index, queries, 12, usable.numpy())
    rows = index.rows(slots.flatten()).double().view(batch, 12, 24)
    assert torch.equal(similarity, (rows * queries.double()[:, None]).sum(2))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_one_query_finds_what_a_batch_and_a_loop_find(data: st.DataObject) -> None:
    dim, count = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 400))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    spread = data.draw(st.sampled_from([1.0, 1e-4, 0.0]))  # ties among few directions, near ties, and all the same
    directions = torch.randn(1, dim, generator=generator) + spread * torch.randn(40, dim, generator=generator)
    index = build(directions[torch.randint(0, 40, (count,), generator=generator)], data.draw(st.sampled_from(STORAGES)))
    usable = torch.rand(index.slots, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    usable[count:] = False
    ids, k = torch.randperm(index.slots, generator=generator), data.draw(st.integers(1, 20) | st.integers(1, 500))
    query = unit(torch.randn(1, dim, generator=generator))
    rows, name = index.rows(torch.arange(count)).double().numpy(), ids.tolist()
    score = [float(np.dot(row, query[0].double().numpy())) for row in rows]
    order = sorted(usable.nonzero()[:, 0].tolist(), key=lambda slot: (-score[slot], name[slot]))
    taken = data.draw(st.none() | st.integers(0, 5))  # so many of the best are excluded, and an id that nobody has
    order, exclude = order[taken:], None if taken is None else torch.tensor([[-1] + [name[i] for i in order[:taken]]])
    order = order[:k]

    slots, similarity = index.search(query, k, usable, ids, exclude)
    pair = index.search(query.repeat(2, 1), k, usable, ids, None if exclude is None else exclude.repeat(2, 1))
    assert torch.equal(slots, pair[0][:1])
    assert torch.equal(similarity, pair[1][1:])
    assert slots[0].tolist() == order + [-1] * (k - len(order))
    assert similarity[0].tolist() == [score[slot] for slot in order] + [-np.inf] * (k - len(order))


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("batch", [1, 2, 9])
def test_what_lies_in_slots_that_were_never_written_is_not_looked_at(storage: str, batch: int, engine: str) -> None:
    torch.manual_seed(7)
    index = build(torch.randn(70, 8), storage)
    usable, queries = torch.arange(index.slots) < 70, unit(torch.randn(batch, 8))
    expected = index.search(queries, 9, usable, torch.arange(index.slots))
    for waste in (float("nan"), float("inf"), -3e38):
        for column in index.columns.values():
            column[0][70:] = 77 if column[0].dtype == torch.int8 else torch.tensor(waste).to(column[0].dtype)
        found = index.search(queries, 9, usable, torch.arange(index.slots))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ties_go_to_the_lowest_id(data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 4))
    vector = st.lists(st.integers(-1, 1), min_size=dim, max_size=dim).filter(any)
    features = torch.tensor(data.draw(st.lists(vector, min_size=1, max_size=150)), dtype=torch.float32)
    queries = unit(torch.tensor(data.draw(st.lists(vector, min_size=1, max_size=10)), dtype=torch.float32))
    k = data.draw(st.integers(1, 20))
    index = build(features, data.draw(st.sampled_from(list(STORAGE))))
    usable = torch.arange(index.slots) < len(features)
    slots, _ = index.search(queries, k, usable, torch.arange(index.slots))
    expected = oracle(index, queries, k, usable.numpy())
    assert [[slot for slot in row if slot >= 0] for row in slots.tolist()] == [
        [slot for slot in row if slot >= 0] for row in expected
    ]


def test_ties_follow_ids_not_slots() -> None:
    index = build(torch.ones(5, 3), "float32")
    ids = torch.zeros(index.slots, dtype=torch.int64)
    ids[:5] = torch.tensor([40, 10, 30, 0, 20])
    slots, _ = index.search(unit(torch.ones(1, 3)), 3, torch.arange(index.slots) < 5, ids)
    assert slots.tolist() == [[3, 1, 4]]


@pytest.mark.parametrize("storage", STORAGE)
def test_a_thousand_equal_rows_are_all_looked_at(storage: str) -> None:
    features = torch.ones(1000, 8)
    features[::2] *= 3.0  # the same direction
    index = build(features, storage)
    usable = torch.arange(index.slots) < 1000
    usable[:990] = False
    slots, _ = index.search(unit(torch.ones(2, 8)), 5, usable, torch.arange(index.slots))
    assert slots.tolist() == [[990, 991, 992, 993, 994]] * 2


def test_a_full_tile_needs_no_mask() -> None:
    index = build(torch.eye(64), "float32")
    assert index.slots == 64
    slots, _ = index.search(torch.eye(64), 1, torch.ones(64, dtype=torch.bool), torch.arange(64))
    assert slots[:, 0].tolist() == list(range(64))


def test_excluded_ids_are_not_found() -> None:
    index = build(torch.eye(6), "float32")
    usable = torch.arange(index.slots) < 6
    exclude = torch.tensor([[0, 3], [-1, -1]])
    slots, similarity = index.search(torch.eye(6)[:2], 6, usable, torch.arange(index.slots), exclude)
    assert slots.tolist() == [[1, 2, 4, 5, -1, -1], [1, 0, 2, 3, 4, 5]]
    assert similarity[0, 4:].isneginf().all()


def test_many_blocks_and_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    features, queries = torch.randn(1000, 16), unit(torch.randn(20, 16))
    whole = build(features, "float32")
    monkeypatch.setattr(exact, "BLOCK_BYTES", 64 * 16 * 4 * 2)
    monkeypatch.setattr(exact, "SCORES", 3000)
    monkeypatch.setattr(batch, "COORDINATES", 500)
    cut = ExactIndex(16, "float32", CPU)
    for start in range(0, 1000, 7):  # grow a little at a time
        cut.grow(min(1000, start + 7))
        slots = torch.arange(start, min(1000, start + 7))
        cut.put(slots, encode(unit(features[slots]), "float32"))
    assert len(cut.columns["row"]) == 8
    found = [
        index.search(queries, 9, torch.arange(index.slots) < 1000, torch.arange(index.slots)) for index in (whole, cut)
    ]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    monkeypatch.setattr(single, "COORDINATES", 50)  # three candidates at once
    for number, query in enumerate(queries):
        alone = cut.search(query[None], 9, torch.arange(cut.slots) < 1000, torch.arange(cut.slots))
        assert torch.equal(alone[0][0], found[0][0][number])
        assert torch.equal(alone[1][0], found[0][1][number])


def test_rows_are_kept_on_the_device_that_was_asked_for() -> None:
    index = ExactIndex(4, "int8", torch.device("meta"))
    index.grow(100)
    assert {(name, part[0].device.type, len(part[0])) for name, part in index.columns.items()} == {
        (name, "meta", 128) for name in ("row", "fine", "scale", "residual")
    }


def test_growing_leaves_little_room_unused() -> None:
    index = ExactIndex(4, "float32", CPU)
    index.grow(100_000)
    assert index.slots == 100_032  # all at once: to the next 64
    grown = ExactIndex(4, "float32", CPU)
    for rows in range(1, 5000):
        grown.grow(rows)
        assert rows <= grown.slots <= max(64, rows * 5 / 4 + 64)


@pytest.mark.parametrize("storage", STORAGE)
@given(st.integers(0, 2**31), st.sampled_from([1, 3, 64, 700]), st.floats(1e-30, 1e30))
@settings(max_examples=25, deadline=None)
def test_rows_are_on_the_grid_and_of_length_one(storage: str, seed: int, dim: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(5, dim, generator=generator).double().pow(3).mul(scale).float()
    rows = unit(features)
    read = decode(encode(rows, storage)).double()
    assert torch.equal((read * 2**24).round(), read * 2**24)
    length = {"float32": 2e-6, "float16": 2e-3, "int8": 2e-4}[storage]
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
    usable = torch.arange(index.slots) < 500
    torch.set_float32_matmul_precision(precision)
    try:
        slots, _ = index.search(queries, 10, usable, torch.arange(index.slots))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert slots.tolist() == oracle(index, queries, 10, usable.numpy())


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("batch", [1, 5, 12])
def test_the_bound_of_a_scan_holds(storage: str, batch: int, engine: str) -> None:
    torch.manual_seed(5)
    rows, queries = unit(torch.randn(640, 200).pow(5)), unit(torch.randn(batch, 200).pow(5))  # far from even
    columns = encode(rows, storage)
    out = torch.empty(10, batch, 64)
    slack = scans.scan([columns["row"][:320].contiguous(), columns["row"][320:].contiguous()], queries, out)
    codes = columns["row"].double()
    error = (queries.double() @ codes.T - out.transpose(0, 1).reshape(batch, 640).double()).abs()
    assert (error / codes.norm(dim=1) <= slack.double()[:, None]).all()


def test_the_fast_scan_is_used_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(scans, "numkong_scan", lambda *_: called.append("numkong"))
    monkeypatch.setattr(scans, "torch_scan", lambda *_: called.append("torch"))
    monkeypatch.setattr(scans, "numpy_scan", lambda *_: called.append("numpy"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def scan(dtype: torch.dtype, batch: int) -> str:
        scans.scan([torch.zeros(64, 4, dtype=dtype)], torch.zeros(batch, 4), torch.zeros(1, batch, 64))
        return called.pop()

    asked = ((torch.int8, 1), (torch.float16, 7), (torch.int8, 8), (torch.float32, 2))
    assert [scan(*each) for each in asked] == ["numkong", "numkong", "torch", "torch"]
    assert scan(torch.float32, 1) == "numpy"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 3)
        assert scan(torch.float32, 1) == "torch"
    monkeypatch.setattr(scans, "CACHED", 255)  # one number less than there are
    assert scan(torch.float32, 1) == "torch"


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.ones(3), r"shape \(B, 4\), got \(3,\)"),
        (torch.ones(2, 3), r"shape \(B, 4\), got \(2, 3\)"),
        (torch.ones(1, 4, dtype=torch.complex64), "real numbers, got torch.complex64"),
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


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="storage must be one of float32, float16, int8, got 'int4'"):
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0", done.stderr
