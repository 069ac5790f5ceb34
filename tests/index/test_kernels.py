"""Every path of the kernels gives the same bits, which are those of plain arithmetic, and refuses what does not fit."""

from __future__ import annotations

import runpy
import shutil
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adanpc.errors import AdaNPCError
from adanpc.index import grid, kernels
from adanpc.index.codes import Coder
from adanpc.index.kernels import LANES, ByteQueries, Codes, HeadAndBits, Hunt, Nibbles, Queries, Rows

Array = np.ndarray[Any, Any]
ALL = 2**32 - 1  # bits of a word
COMPILED = [path for path in kernels.paths() if path != "numpy"]


def tile_codes(random: np.random.Generator, tiles: int, pairs: int, words: int) -> dict[str, Array]:
    return {
        "head": random.integers(-127, 128, (tiles, pairs, LANES, 2)).astype(np.int8),
        "bits": random.integers(0, 2**32, (tiles, words, LANES), dtype=np.uint32),
        "weights": random.random((tiles, 3, LANES)).astype(np.float32),
    }


def tile_query(random: np.random.Generator, pairs: int, words: int, spans: int) -> HeadAndBits:
    return HeadAndBits(
        random.integers(-32000, 32001, (pairs, 2)).astype(np.int16),
        random.integers(0, 2**32, (words, 4), dtype=np.uint32),
        random.standard_normal(spans).astype(np.float32),
        *random.random(7).tolist(),
    )


def row_query(random: np.random.Generator, width: int) -> Nibbles:
    high = random.integers(-125, 126, (2, width)).astype(np.int8)
    low = random.integers(-128, 128, (2, width)).astype(np.int8)
    return Nibbles(high, low, *random.random(4).tolist())


def scanned(path: str, codes: dict[str, Array], first: int, span: int, query: HeadAndBits) -> tuple[Array, Array]:
    tiles = len(codes["head"])
    base = np.full(tiles * LANES, np.nan, np.float32)
    upper = np.full(tiles * LANES, np.nan, np.float32)
    kernels.scan_tiles(path, codes, tiles, first, span, query, base, upper)
    return base, upper


def test_kernels_are_built_where_there_is_a_compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no compiler")
    assert COMPILED, "build them: pip install -e ."


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_paths_scan_to_the_same_bits(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tiles = data.draw(st.integers(0, 3) | st.integers(60, 140))
    pairs = data.draw(st.sampled_from([1, 32]))
    words = data.draw(st.sampled_from([2, 4, 32, 33, 256, 258]))
    first = data.draw(st.integers(0, 9))
    span = data.draw(st.integers(1, 5))
    codes = tile_codes(random, tiles, pairs, words)
    query = tile_query(random, pairs, words, (first + tiles) // span + 1)
    if data.draw(st.booleans()):  # the largest numbers that there are
        codes["head"][:] = 127
        codes["bits"][:] = 2**32 - 1
        query.head[:] = data.draw(st.sampled_from([-32000, 32000]))
        query.bits[:] = data.draw(st.sampled_from([[0, 0, 0, ALL], [ALL, ALL, ALL, 0], [ALL] * 4]))
    expected = scanned("numpy", codes, first, span, query)
    for path in COMPILED:
        for ours, theirs in zip(scanned(path, codes, first, span, query), expected, strict=True):
            assert ours.tobytes() == theirs.tobytes(), path


@pytest.mark.parametrize("path", kernels.paths())
def test_a_scan_is_what_a_loop_computes(path: str) -> None:
    random = np.random.default_rng(1)
    codes = tile_codes(random, 3, 2, 2)
    query = tile_query(random, 2, 2, 2)
    base, upper = scanned(path, codes, 1, 2, query)
    for row in range(3 * LANES):
        tile, lane = divmod(row, LANES)
        head = sum(int(codes["head"][tile, p, lane, i]) * int(query.head[p, i]) for p in range(2) for i in range(2))
        tail = 0
        for bit in range(64):
            if int(codes["bits"][tile, bit // 32, lane]) >> bit % 32 & 1:
                digits = [int(query.bits[bit // 32, plane]) >> bit % 32 & 1 for plane in range(4)]
                tail += digits[0] + 2 * digits[1] + 4 * digits[2] - 8 * digits[3]
        scale, weight, left_out = codes["weights"][tile, :, lane].astype(float)
        known = scale * (head * query.head_step + query.head_slack) + float(query.centers[(1 + tile) // 2])
        deviation = (left_out**2 * query.spread + weight**2 * query.rounding) ** 0.5
        bound = known + weight * (tail * query.bit_step - query.bit_shift) + query.sigmas * deviation
        assert base[row] == pytest.approx(known, rel=1e-5, abs=1e-4)
        assert upper[row] == pytest.approx(bound, rel=1e-5, abs=1e-2)


def bounded(path: str, codes: dict[str, Array], slots: Array, first: int, query: Nibbles, base: Array) -> Array:
    upper = np.full(len(slots), np.nan, np.float32)
    kernels.bound_rows(path, codes, slots, first, query, base, upper)
    return upper


def row_codes(random: np.random.Generator, rows: int, width: int) -> dict[str, Array]:
    return {
        "nibbles": random.integers(0, 256, (rows, width)).astype(np.uint8),
        "factors": random.random((rows, 2)).astype(np.float32),
    }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_paths_bound_rows_to_the_same_bits(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = data.draw(st.integers(1, 150))
    first = data.draw(st.sampled_from([0, 64]))
    width = data.draw(st.sampled_from([64, 128, 1024]))
    codes = row_codes(random, rows, width)
    query = row_query(random, width)
    if data.draw(st.booleans()):
        codes["nibbles"][:] = 255
        query.high[:] = data.draw(st.sampled_from([-125, 125]))
    base = random.standard_normal(first + rows).astype(np.float32)
    slots = first + random.permutation(rows)[: data.draw(st.integers(0, rows))]
    expected = bounded("numpy", codes, slots, first, query, base)
    for path in COMPILED:
        assert bounded(path, codes, slots, first, query, base).tobytes() == expected.tobytes(), path


@pytest.mark.parametrize("path", kernels.paths())
def test_bounds_of_rows_are_what_a_loop_computes(path: str) -> None:
    random = np.random.default_rng(2)
    codes = row_codes(random, 5, 64)
    query = row_query(random, 64)
    base = random.standard_normal(12).astype(np.float32)
    slots = np.array([11, 8])
    for slot, upper in zip(slots, bounded(path, codes, slots, 7, query, base), strict=True):
        total = 0
        for place, both in enumerate(codes["nibbles"][slot - 7].tolist()):
            for side, nibble in enumerate((both & 15, both >> 4)):
                total += nibble * (256 * int(query.high[side, place]) + int(query.low[side, place]))
        weight, left_out = codes["factors"][slot - 7].astype(float)
        bound = base[slot] + weight * (total * query.step - query.shift)
        bound += left_out * query.spread + weight * query.rounding
        assert upper == pytest.approx(bound, rel=1e-5, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_that_reach_are_those_whose_two_bounds_do(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = data.draw(st.integers(1, 200))
    first = data.draw(st.sampled_from([0, 64]))
    codes = row_codes(random, rows + 3, 64)
    query = row_query(random, 64)
    base = random.standard_normal(first + rows).astype(np.float32)
    upper = random.standard_normal(first + rows).astype(np.float32)
    upper[first::7] = np.nan  # as in slots that were never written
    slots = first + np.arange(rows)
    tighter = bounded("numpy", codes, slots, first, query, base)
    first_least = data.draw(st.sampled_from([-np.inf, 0.3, float(upper[-1])]))
    least = float(np.median(tighter))
    usable = np.zeros(0, bool)
    reaching = (upper[first:] >= first_least) & (tighter >= least)
    if data.draw(st.booleans()):
        usable = random.random(first + rows) < 0.7
        reaching &= usable[first:]
    for path in kernels.paths():
        found = kernels.reach_rows(path, codes, first, rows, query, base, upper, usable, first_least, least)
        assert found.tolist() == slots[reaching].tolist(), path


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("flaw", ["nibbles", "factors", "low", "width", "base", "upper", "usable", "rows", "first"])
def test_reaching_what_does_not_fit_is_refused(path: str, flaw: str) -> None:
    random = np.random.default_rng(0)
    codes = row_codes(random, 4, 64)
    query = row_query(random, 64)
    numbers = {"first": 2, "rows": 4}
    of_slots = {"base": np.zeros(6, np.float32), "upper": np.zeros(6, np.float32), "usable": np.ones(6, bool)}
    if flaw in codes:
        codes[flaw] = codes[flaw][:-1]
    elif flaw in of_slots:
        of_slots[flaw] = of_slots[flaw][:-1]
    elif flaw == "low":
        query = query._replace(low=query.low[:1])
    elif flaw == "width":
        query = row_query(random, 32)
    else:
        numbers[flaw] = -1
    with pytest.raises(ValueError, match="does not fit|negative dimensions"):
        kernels.reach_rows(
            path, codes, numbers["first"], numbers["rows"], query, of_slots["base"], of_slots["upper"],
            of_slots["usable"], 0.0, 0.0,
        )  # fmt: skip


def on_grid(random: np.random.Generator, count: int, dim: int, dtype: Any) -> Array:
    """Rows of about length one, subnormal numbers of 16 bits included."""
    rows = random.standard_normal((count, dim)) / np.sqrt(dim)
    rows[:, ::3] *= 2.0**-12
    snapped: Array = np.rint(rows * 2**24) / 2**24
    return snapped.astype(dtype)


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("dim", [1, 7, 16, 33, 512])
def test_scores_are_exact(path: str, dtype: Any, dim: int) -> None:
    random = np.random.default_rng(dim)
    blocks = [on_grid(random, 5, dim, dtype), on_grid(random, 5, dim, dtype), on_grid(random, 2, dim, dtype)]
    queries = on_grid(random, 3, dim, np.float64)
    slots = np.array([0, 11, 4, 5, 5, 9])
    owners = np.array([0, 2, 1, 1, 0, 2])
    expected = []
    for slot, owner in zip(slots, owners, strict=True):
        row = [Fraction(float(value)) for value in blocks[slot // 5][slot % 5]]
        total = sum(value * Fraction(float(other)) for value, other in zip(row, queries[owner], strict=True))
        expected.append(float(total))
    assert kernels.score_rows(path, blocks, 5, slots, owners, queries).tolist() == expected


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("flaw", ["before", "after", "query", "width", "owners", "no blocks"])
def test_scores_of_what_does_not_fit_are_refused(path: str, flaw: str) -> None:
    blocks: list[Any] = [np.zeros((5, 8), np.float16), np.zeros((2, 8), np.float16)]
    slots = np.array([0, 6])
    owners = np.array([0, 1])
    if flaw == "before":
        slots[0] = -1
    elif flaw == "after":
        slots[1] = 7
    elif flaw == "query":
        owners[0] = 2
    elif flaw == "width":
        blocks[0] = blocks[0].astype(np.float64)
    elif flaw == "owners":
        owners = owners[:1]
    else:
        blocks = [np.zeros((5, 8), np.float16), None]
    with pytest.raises((ValueError, TypeError)):
        kernels.score_rows(path, blocks, 5, slots, owners, np.zeros((2, 8)))


def searched(path: str, rows: Rows, query: Array, k: int, group: int, groups: Array, crowd: int) -> Any:
    found = kernels.nearest_rows(path, rows, query[None], [(k, group)], groups, crowd=crowd, slack=1e-5)
    assert found.all_settled == found.settled[0]
    if not found.all_settled:
        return None
    there = found.slots[0, 0] >= 0
    return [column[0, 0, there].tolist() for column in found[:3]]


def in_blocks(column: Array) -> list[Array]:
    return list(column.reshape(4, 64, *column.shape[1:]))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_nearest_rows_are_those_that_a_loop_finds(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dim = data.draw(st.sampled_from([1, 7, 16, 33]))
    storage = data.draw(st.sampled_from(["float16", "float32", "float32 with bytes", "int8"]))
    slots = data.draw(st.integers(1, 200))
    drawn = on_grid(random, 256, dim, np.float16 if storage == "float16" else np.float32)
    queries = on_grid(random, data.draw(st.sampled_from([1, 3, 9])), dim, np.float32)
    if storage in ("float32 with bytes", "int8"):  # whose bounds hold for rows and queries of length one
        drawn = grid.unit(torch.from_numpy(drawn)).numpy()
        queries = grid.unit(torch.from_numpy(queries)).numpy()
    copies = data.draw(st.integers(0, 100))
    drawn[:copies] = drawn[0]
    ids = random.permutation(256)
    groups = random.integers(0, 3, 256).astype(np.uint8)
    shows_all = data.draw(st.booleans())
    wanted = [(data.draw(st.sampled_from([1, 5, 60])), 0)]
    shown = {0: np.ones(slots, bool)}
    some_groups = groups[:0]
    if not shows_all:
        wanted.append((data.draw(st.sampled_from([1, 5, 60])), 2))
        drawn[groups == 0] = np.nan  # as in slots that were never written
        shown = {0: groups[:slots] != 0, 2: groups[:slots] == 2}
        some_groups = groups
    lists = [in_blocks(drawn), in_blocks(ids)]
    with np.errstate(all="ignore"):
        if storage == "float32 with bytes":
            lists += [in_blocks(column) for column in grid._coarse_array(drawn).values()]
        if storage == "int8":
            columns = {name: column.numpy() for name, column in grid._int8_array(drawn).items()}
            drawn = grid.decode(columns)
            lists[0] = in_blocks(columns["fine"])
            lists += [in_blocks(columns[name]) for name in ("row", "scale", "residual")]
    rows = Rows(lists, 64, slots)
    for path in COMPILED:
        found = kernels.nearest_rows(path, rows, queries, wanted, some_groups, crowd=400, slack=1e-5)
        assert found.settled.all()
        assert found.all_settled
        for number, query in enumerate(queries):
            similarity = drawn[:slots].astype(float) @ query.astype(float)  # exact on the grid
            for pair, (k, group) in enumerate(wanted):
                there = shown[group].nonzero()[0]
                order = there[np.lexsort((ids[there], -similarity[there]))][:k]
                missing = found.slots.shape[2] - len(order)
                assert found.slots[number, pair].tolist() == [*order, *[-1] * missing], path
                assert found.ids[number, pair].tolist() == [*ids[order], *[-1] * missing], path
                assert found.similarity[number, pair].tolist() == [*similarity[order], *[-np.inf] * missing], path


@pytest.mark.parametrize("path", COMPILED)
def test_more_candidates_than_are_wanted_at_all_are_not_scored(path: str) -> None:
    rows = Rows([[np.ones((64, 1), np.float32)], [np.arange(64)]], 64, 64)
    query = np.ones(1, np.float32)
    nobody = np.zeros(0, np.uint8)
    assert searched(path, rows, query, 3, 0, nobody, 63) is None
    assert searched(path, rows, query, 3, 0, nobody, 64) == [[0, 1, 2], [0, 1, 2], [1.0, 1.0, 1.0]]


@pytest.mark.parametrize("path", COMPILED)
def test_where_bytes_say_little_the_rows_are_read(path: str) -> None:
    random = np.random.default_rng(1)
    drawn = grid.unit(torch.from_numpy(0.001 * random.standard_normal((64, 9)) + 10.0 * np.eye(9)[0])).numpy()
    bytes_of_rows = grid._coarse_array(drawn)
    assert len(np.unique(bytes_of_rows["coarse"], axis=0)) == 1
    lists = [[drawn], [np.arange(64)], *[[column] for column in bytes_of_rows.values()]]
    query = np.eye(9, dtype=np.float32)[1]
    similarity = drawn.astype(float) @ query.astype(float)
    nearest = np.argsort(-similarity)[:3].tolist()
    found = searched(path, Rows(lists, 64, 64), query, 3, 0, np.zeros(0, np.uint8), 20)
    assert found == [nearest, nearest, similarity[nearest].tolist()]


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("dim", [1, 8, 37, 512])
def test_a_kernel_rounds_to_bytes_as_numpy_does(path: str, dim: int) -> None:
    random = np.random.default_rng(dim)
    rows = grid.unit(torch.from_numpy(random.standard_normal((40, dim)).astype(np.float32))).numpy()
    rows[3] = 0
    whole, scales, residuals = kernels.coarse_rows(path, rows)
    expected = grid._coarse_array(rows)
    assert np.array_equal(whole, expected["coarse"])
    assert np.array_equal(scales, expected["scale"])
    np.testing.assert_allclose(residuals, expected["residual"], rtol=1e-6)
    hidden = rows - whole.astype(float) * scales
    assert (residuals[:, 0] >= np.linalg.norm(hidden, axis=1)).all()


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("flaw", ["rows", "dim", "bytes", "residuals"])
def test_rows_that_do_not_fit_are_not_rounded_to_bytes(path: str, flaw: str) -> None:
    given: dict[str, Any] = {
        "rows": np.zeros((2, 3), np.float32), "dim": 3, "bytes": np.zeros((2, 3), np.int8),
        "scales": np.zeros(2, np.float32), "residuals": np.zeros(2, np.float32),
    }  # fmt: skip
    if flaw == "dim":
        given["dim"] = 0
    else:
        given[flaw] = given[flaw][:1]
    with pytest.raises(ValueError, match="does not fit"):
        kernels._compiled.coarse_rows(path, *given.values())


BLOCK = np.zeros((64, 3), np.float32)
IDS = np.arange(64)
ONES = np.ones((64, 1), np.float32)
MISFITS: dict[str, dict[str, Any]] = {
    "fewer rows": {"rows": [BLOCK, BLOCK[:-1]]},
    "two bytes without the first": {"rows": [BLOCK.astype(np.int8)] * 2, "lists": 2},
    "wider rows": {"rows": [BLOCK.astype(np.float64), BLOCK]},
    "not a block": {"rows": [BLOCK, None]},
    "fewer ids": {"ids": [IDS, IDS[:30]]},
    "no ids": {"ids": [IDS]},
    "fewer bytes": {"bytes": [BLOCK.astype(np.int8), BLOCK.astype(np.int8)[:-1]]},
    "fewer scales": {"scales": [ONES]},
    "fewer residuals": {"residuals": [ONES, ONES[:-1]]},
    "half a tile": {"size": 65},
    "more slots": {"slots": 129},
    "no slots": {"slots": 0},
    "a narrow query": {"queries": np.ones((1, 3), np.float16)},
    "fewer groups": {"groups": np.ones(99, np.uint8)},
    "room for fewer than k": {"crowd": 2},
    "nothing wanted": {"wanted": np.array([[0, 1]])},
    "more wanted than there is room for": {"wanted": np.array([[4, 1]])},
    "no search": {"wanted": np.zeros((0, 2), np.int64)},
    "room for fewer slots": {"found": np.zeros((1, 1, 2), np.int64)},
}


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("misfit", MISFITS)
def test_a_search_among_what_does_not_fit_is_refused(path: str, misfit: str) -> None:
    given: dict[str, Any] = {
        "rows": [BLOCK, BLOCK], "ids": [IDS, IDS], "bytes": [BLOCK.astype(np.int8)] * 2, "scales": [ONES] * 2,
        "residuals": [ONES] * 2, "size": 64, "slots": 100, "queries": np.ones((1, 3), np.float32),
        "groups": np.ones(100, np.uint8), "wanted": np.array([[3, 1]]), "crowd": 10, "lists": 5,
        "found": np.zeros((1, 1, 3), np.int64),
    }  # fmt: skip
    given |= MISFITS[misfit]
    lists = [given[name] for name in ("rows", "ids", "bytes", "scales", "residuals")]
    lists = lists[: given["lists"]]
    width = given["rows"][0].itemsize
    with pytest.raises((ValueError, TypeError)):
        kernels._compiled.nearest_rows(
            path, lists, given["size"], 3, width, given["slots"], given["queries"], given["groups"], given["wanted"], 3,
            given["crowd"], 0.0, given["found"], np.zeros((1, 1, 3), np.int64), np.zeros((1, 1, 3)), np.zeros(1, bool),
        )  # fmt: skip


@pytest.mark.parametrize("path", COMPILED)
def test_a_search_among_lists_of_another_number_is_refused(path: str) -> None:
    rows = Rows([[BLOCK], [IDS], [BLOCK.astype(np.int8)]], 64, 64)
    with pytest.raises(ValueError, match="does not fit"):
        searched(path, rows, np.ones(3, np.float32), 3, 0, np.zeros(0, np.uint8), 10)


class Tiles(NamedTuple):
    """Codes and queries for a hunt."""

    codes: Codes
    queries: Queries
    groups: Array
    slots: int
    units: Array  # (B, 2, width)
    heads: Array  # (B, pairs * 2)


def drawn_tiles(random: np.random.Generator, tiles: int, width: int, queries: int) -> Tiles:
    pairs = 3
    units = random.integers(-127, 128, (queries, 2, width)).astype(np.int8)
    heads = random.integers(-300, 301, (queries, pairs, 2)).astype(np.int16)
    numbers = random.random((queries, 6)).astype(np.float32)
    numbers[:, [0, 2]] *= 1e-3
    return Tiles(
        Codes(
            random.integers(-127, 128, (tiles, pairs, LANES, 2)).astype(np.int8),
            random.random((tiles, 3, LANES)).astype(np.float32),
            random.integers(0, 256, (tiles * LANES, width)).astype(np.uint8),
            random.random((tiles * LANES, 2)).astype(np.float32),
        ),
        Queries(
            kernels.side_by_side(units.reshape(queries, 2, -1, 4).swapaxes(1, 2)),
            kernels.side_by_side(heads),
            random.standard_normal((queries, 2 + tiles // 2)).astype(np.float32),
            numbers,
        ),
        random.integers(0, 3, LANES + tiles * LANES).astype(np.uint8),
        LANES + tiles * LANES - int(random.integers(0, LANES)),
        units,
        heads.reshape(queries, -1),
    )


def hunted(path: str, given: Tiles, room: int, stride: int = 1) -> Hunt:
    count = len(given.queries.numbers)
    hunt = Hunt(
        np.array([[4, -1], [3, 0], [2, 1]]),
        np.full((count, 3, 4), -np.inf, np.float32),
        np.full((count, 3), -np.inf, np.float32),
        np.zeros((count, 3), np.int64),
        np.zeros((count, 3, room), np.int64),
        np.zeros((count, 3, room), np.float32),
    )
    tiles = len(given.codes.head)
    kernels.hunt_tiles(
        path, given.codes, tiles, 1, 2, given.groups, given.slots, given.queries, hunt, stride=stride, caution=1.5
    )
    return hunt


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_paths_hunt_to_the_same_bits(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    given = drawn_tiles(
        random, data.draw(st.integers(1, 9)), data.draw(st.sampled_from([64, 128])), data.draw(st.integers(1, 18))
    )
    room = data.draw(st.sampled_from([1, 9, 500]))
    stride = data.draw(st.sampled_from([1, 2]))
    expected = hunted(COMPILED[0], given, room, stride)
    for path in COMPILED[1:]:
        found = hunted(path, given, room, stride)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.tobytes() == theirs.tobytes(), path


@pytest.mark.parametrize("path", COMPILED)
def test_a_hunt_is_what_a_loop_finds(path: str) -> None:
    random = np.random.default_rng(3)
    given = drawn_tiles(random, 5, 64, 11)
    hunt = hunted(path, given, 200)
    for query, numbers in enumerate(given.queries.numbers.astype(float)):
        head_step, head_slack, step, shift, spread, rounding = numbers
        upper = np.zeros(given.slots - LANES)
        width = np.zeros(given.slots - LANES)
        for row in range(given.slots - LANES):
            tile, lane = divmod(row, LANES)
            nibbles = given.codes.nibbles[row].astype(int)
            total = ((nibbles & 15) * given.units[query, 0]).sum() + ((nibbles >> 4) * given.units[query, 1]).sum()
            head = (given.codes.head[tile, :, lane].reshape(-1).astype(int) * given.heads[query]).sum()
            scale = float(given.codes.weights[tile, 0, lane])
            weight, left_out = given.codes.factors[row].astype(float)
            width[row] = left_out * spread + scale * head_slack + rounding
            middle = scale * head * head_step + float(given.queries.centers[query, (1 + tile) // 2])
            upper[row] = middle + weight * (total * step - shift) + width[row]
        shown = given.groups[LANES : given.slots]
        for which, usable in enumerate([shown >= 0, shown != 0, shown == 1]):
            k = int(hunt.wanted[which, 0])
            floor = np.sort((upper - 1.5 * width)[usable])[-k]
            assert hunt.floor[query, which] == pytest.approx(floor, abs=1e-3)
            listed = hunt.slots[query, which, : hunt.counts[query, which]]
            expected = LANES + (usable & (upper >= hunt.floor[query, which])).nonzero()[0]
            assert listed.tolist() == expected.tolist()
            assert hunt.upper[query, which, : len(listed)] == pytest.approx(upper[listed - LANES], abs=1e-3)


@pytest.mark.parametrize("path", COMPILED)
def test_a_sample_looks_at_some_tiles_and_lists_nobody(path: str) -> None:
    given = drawn_tiles(np.random.default_rng(4), 6, 64, 9)
    hunt = hunted(path, given, 1, stride=3)
    assert not hunt.counts.any()
    every_third = given._replace(
        codes=Codes(
            *[
                np.concatenate([part[: len(part) // 6], part[len(part) // 2 :][: len(part) // 6]])
                for part in given.codes
            ]
        ),
        groups=np.concatenate([given.groups[: 2 * LANES], given.groups[4 * LANES : 5 * LANES]]),
        slots=3 * LANES,
        queries=given.queries._replace(centers=np.ascontiguousarray(given.queries.centers[:, [0, 2]])),
    )
    expected = hunted(path, every_third, 500)
    assert hunt.floor.tolist() == expected.floor.tolist()


FLAWS = [
    "head", "weights", "nibbles", "factors", "groups", "query nibbles", "query heads", "centers", "numbers", "wanted",
    "nobody wanted", "nothing wanted", "best", "floor", "counts", "slots", "upper", "tiles", "no queries",
]  # fmt: skip


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("flaw", FLAWS)
def test_a_hunt_in_what_does_not_fit_is_refused(path: str, flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn_tiles(np.random.default_rng(5), 2, 64, 9)
    compiled = kernels._compiled

    class Altered:
        @staticmethod
        def hunt_tiles(name: str, sampling: bool, *arguments: Any) -> None:
            codes = list(arguments[:4])
            tiles, first, span, stride, groups, slots = arguments[4:10]
            queries = list(arguments[10:14])
            count, width, caution = arguments[14:17]
            hunt = list(arguments[17:23])
            room = arguments[23]
            if flaw in Codes._fields:
                place = Codes._fields.index(flaw)
                codes[place] = codes[place][:-1]
            elif flaw == "groups":
                groups = groups[: slots - 1]
            elif flaw in ("query nibbles", "query heads", "centers", "numbers"):
                place = ["query nibbles", "query heads", "centers", "numbers"].index(flaw)
                queries[place] = queries[place][:-1]
            elif flaw == "nobody wanted":
                hunt[0][0, 0] = 0
            elif flaw == "nothing wanted":
                hunt = [hunt[0][:0], *(column[:, :0] for column in hunt[1:])]
            elif flaw == "wanted":
                hunt[0][0, 0] = 5
            elif flaw in Hunt._fields:
                place = Hunt._fields.index(flaw)
                hunt[place] = hunt[place][:-1]
            elif flaw == "tiles":
                tiles = 0
            else:
                count = 0
            compiled.hunt_tiles(
                name, sampling, *codes, tiles, first, span, stride, groups, slots, *queries, count, width, caution,
                *hunt, room,
            )  # fmt: skip

    monkeypatch.setattr(kernels, "_compiled", Altered)
    with pytest.raises(ValueError, match="does not fit"):
        hunted(path, given, 50)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_features_become_the_rows_that_numpy_makes_of_them(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dim = data.draw(st.integers(1, 40) | st.sampled_from([512, kernels.LONGEST_SQUARES]))
    features = random.standard_normal((data.draw(st.integers(0, 5)), dim)) ** data.draw(st.sampled_from([0, 1, 5]))
    features = (features * data.draw(st.sampled_from([1e-44, 1e-38, 1, 1e25]))).astype(np.float32)
    features[: data.draw(st.integers(0, 1))] = 0
    features[:, ::2] *= data.draw(st.sampled_from([1, -0.0]))
    expected = grid._unit_array(features).astype(np.float32)
    for path in COMPILED:
        made = kernels.unit_rows(path, features)
        assert made is not None
        assert made.tobytes() == expected.tobytes(), path


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_features_without_a_direction_are_seen(path: str, dim: int) -> None:
    features = np.random.default_rng(0).standard_normal((3, 2 * dim)).astype(np.float32)[:, ::2]  # not contiguous
    assert kernels.have_direction(path, features)
    for flaw in (np.nan, np.inf, -np.inf):
        flawed = features.copy()
        flawed[1, -1] = flaw
        assert not kernels.have_direction(path, flawed)
        assert kernels.unit_rows(path, flawed) is None
    for flaw in (0.0, -0.0, 1e-40):
        flawed = features.copy()
        flawed[2] = flaw
        assert not kernels.have_direction(path, flawed)


@pytest.mark.parametrize("path", COMPILED)
def test_features_that_do_not_fit_are_refused(path: str) -> None:
    compiled = kernels._compiled
    features = np.ones((2, 8), np.float32)
    long = np.ones((1, kernels.LONGEST_SQUARES + 1), np.float32)
    for dim in (0, 3):
        with pytest.raises(ValueError, match="the features does not fit"):
            compiled.have_direction(path, features, dim)
        with pytest.raises(ValueError, match="the features does not fit"):
            compiled.unit_rows(path, features, dim, features.copy())
    with pytest.raises(ValueError, match="the features does not fit"):
        compiled.unit_rows(path, long, long.shape[1], long.copy())
    with pytest.raises(ValueError, match="what is written does not fit"):
        compiled.unit_rows(path, features, 8, features[:1].copy())


def multiplied(path: str, rows: Array, queries: Array | ByteQueries, count: int) -> Array:
    out = np.full((len(rows) // 64, count, 64), np.nan, np.float32)
    kernels.multiply_rows(path, rows, queries, out)
    return out.swapaxes(1, 2).reshape(len(rows), count)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_products_are_within_their_rounding_of_exact_ones(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tiles = data.draw(st.integers(0, 3))
    dim = data.draw(st.integers(1, 70) | st.sampled_from([128, 1280]))
    count = data.draw(st.integers(1, 8))
    kind = data.draw(st.sampled_from([np.float16, np.float32]))
    rows = (random.standard_normal((tiles * 64, dim)) ** 3).astype(kind)
    queries = (random.standard_normal((count, dim)) ** 3).astype(np.float32)
    exact = rows.astype(np.float64) @ queries.astype(np.float64).T
    sizes = np.abs(rows).astype(np.float64) @ np.abs(queries).astype(np.float64).T
    rounded = kernels.roundings(dim) * 2.0**-24
    for path in COMPILED:
        error = np.abs(multiplied(path, rows, queries, count) - exact)
        assert (error <= sizes * rounded / (1 - rounded)).all(), path


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_products_with_bytes_are_exact_on_all_paths(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tiles = data.draw(st.integers(0, 3))
    dim = data.draw(st.integers(1, 150) | st.just(1280))
    count = data.draw(st.integers(1, 8))
    rows = random.integers(-128, 128, (tiles * 64, dim)).astype(np.int8)
    queries = ByteQueries.of(random.standard_normal((count, dim)).astype(np.float32))
    if data.draw(st.booleans()):  # the largest numbers that there are
        rows[:] = data.draw(st.sampled_from([-128, 127]))
        queries.parts[:] = data.draw(st.sampled_from([-128, 127]))
    whole = 256 * queries.parts[:, 0].astype(np.int64) + queries.parts[:, 1]
    expected = ((rows.astype(np.int64) @ whole.T) * queries.steps).astype(np.float32)
    for path in COMPILED:
        assert multiplied(path, rows, queries, count).tobytes() == expected.tobytes(), path


@pytest.mark.parametrize("path", COMPILED)
def test_the_longest_products_with_bytes_do_not_overflow(path: str) -> None:
    rows = np.full((64, kernels.LONGEST), -128, np.int8)
    queries = ByteQueries(np.full((1, 2, kernels.LONGEST), -128, np.int8), np.ones(1))
    assert (multiplied(path, rows, queries, 1) == 2.0**14 * 257 * kernels.LONGEST).all()


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32))
def test_queries_in_two_bytes_are_close_to_what_they_were(count: int, dim: int, seed: int) -> None:
    queries = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    queries[0] = 0
    made = ByteQueries.of(queries)
    largest = np.abs(queries).max(1, keepdims=True)
    assert (np.abs(made.read() - queries) <= 0.501 * largest / kernels.LARGEST_WHOLE).all()


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("flaw", ["rows", "queries", "no queries", "steps", "long", "out", "width", "tiles", "dim"])
def test_products_of_what_does_not_fit_are_refused(path: str, flaw: str) -> None:
    rows = np.zeros((64, 8), np.int8)
    numbers = {"width": 1, "tiles": 1, "dim": 8, "queries": 2}
    parts = np.zeros((2, 2, 8), np.int8)
    steps = np.zeros(2)
    out = np.zeros((1, 2, 64), np.float32)
    if flaw == "rows":
        rows = rows[:-1]
    elif flaw == "queries":
        parts = parts[:1]
    elif flaw == "no queries":
        numbers["queries"] = 0
        parts = parts[:0]
    elif flaw == "steps":
        steps = steps[:1]
    elif flaw == "long":
        numbers["dim"] = kernels.LONGEST + 1
        rows = np.zeros((64, kernels.LONGEST + 1), np.int8)
        parts = np.zeros((2, 2, kernels.LONGEST + 1), np.int8)
    elif flaw == "out":
        out = out[:, :1]
    else:
        numbers[flaw] = {"width": 3, "tiles": -1, "dim": 0}[flaw]
    with pytest.raises(ValueError, match="does not fit"):
        kernels._compiled.multiply_rows(path, rows, *numbers.values(), parts, steps, np.ascontiguousarray(out))


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("flaw", ["head", "bits", "weights", "centers", "base", "upper", "tiles", "first", "span"])
def test_a_scan_of_what_does_not_fit_is_refused(path: str, flaw: str) -> None:
    random = np.random.default_rng(0)
    codes = tile_codes(random, 4, 2, 2)
    query = tile_query(random, 2, 2, 4)
    numbers = {"tiles": 4, "first": 0, "span": 1}
    room = {"base": np.zeros(4 * LANES, np.float32), "upper": np.zeros(4 * LANES, np.float32)}
    if flaw in codes:
        codes[flaw] = codes[flaw][:-1]
    elif flaw in room:
        room[flaw] = room[flaw][:-1]
    elif flaw == "centers":
        query = query._replace(centers=query.centers[:-1])
    else:
        numbers[flaw] = -1
    with pytest.raises(ValueError, match="does not fit"):
        kernels.scan_tiles(
            path, codes, numbers["tiles"], numbers["first"], numbers["span"], query, room["base"], room["upper"]
        )


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("flaw", ["factors", "low", "width", "upper", "before", "after", "without base"])
def test_bounds_of_what_does_not_fit_are_refused(path: str, flaw: str) -> None:
    random = np.random.default_rng(0)
    codes = row_codes(random, 4, 64)
    query = row_query(random, 64)
    slots = np.array([2, 4])
    base = np.zeros(6, np.float32)
    upper = np.zeros(2, np.float32)
    if flaw == "factors":
        codes["factors"] = codes["factors"][:-1]
    elif flaw == "low":
        query = query._replace(low=query.low[:1])
    elif flaw == "width":
        query = row_query(random, 32)
    elif flaw == "upper":
        upper = upper[:1]
    else:
        slots[0] = {"before": 1, "after": 6, "without base": 3}[flaw]
        base = base[:5]
        slots = slots[:1]
        if flaw == "without base":
            base = base[:3]
    with pytest.raises(ValueError, match="does not fit"):
        kernels.bound_rows(path, codes, slots, 2, query, base, upper)


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("dim", [3, 100, 256, 300, 640])
def test_a_kernel_encodes_as_numpy_does(path: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(dim)
    rows = random.standard_normal((300, dim)) / np.sqrt(dim)
    coder = Coder.fitted(rows, seed=1)
    center = 0.1 * random.standard_normal(coder.padded) / np.sqrt(dim)
    rows = np.concatenate([rows[:7], np.zeros((1, dim)), np.eye(dim)[:1]])
    monkeypatch.setattr(kernels, "WANTED", path)
    for ours, theirs in zip(coder.split(rows), coder._split(rows), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-14)
    made = coder.encode(rows, center)
    expected = coder._encoded(rows, center)
    np.testing.assert_allclose(made.tails, expected.tails, atol=1e-14)
    np.testing.assert_allclose(made.weights, expected.weights, rtol=1e-6)
    np.testing.assert_allclose(made.factors, expected.factors, rtol=1e-6)
    assert made.longest == pytest.approx(expected.longest)
    # A number that lies between two codes, but for rounding, may have either.
    assert (made.head != expected.head).mean() < 0.01
    assert (made.nibbles != expected.nibbles).mean() < 0.01
    assert (made.bits != expected.bits).mean() < 0.01


@pytest.mark.parametrize("dim", [100, 300])
def test_all_paths_encode_to_the_same_bits(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(dim)
    rows = random.standard_normal((40, dim)) / np.sqrt(dim)
    coder = Coder.fitted(rows, seed=1)
    rows[3] = np.nan  # as a slot may hold that was never written
    rows[4] = 1e308
    made = []
    for path in COMPILED:
        monkeypatch.setattr(kernels, "WANTED", path)
        made.append(coder.encode(rows[:16], np.zeros(coder.padded)))
    for others in made[1:]:
        for name in ("head", "bits", "nibbles"):
            assert getattr(others, name).tobytes() == getattr(made[0], name).tobytes()
        for name in ("weights", "factors", "tails"):
            np.testing.assert_array_equal(getattr(others, name), getattr(made[0], name))


ENCODER_FLAWS = ["rows", "directions", "scales", "rotation", "center", "signs", "head", "tails", "split heads"]


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("flaw", ENCODER_FLAWS)
def test_rows_that_do_not_fit_are_not_encoded(path: str, flaw: str) -> None:
    frame = kernels.Frame(np.zeros((64, 100)), np.ones(64), np.zeros((128, 128)), np.zeros(0), np.zeros(0), np.zeros(0))
    made = [np.zeros(shape, kind) for shape, kind in [
        ((2, 64), np.int8), ((2, 4), np.uint32), ((2, 3), np.float32), ((2, 64), np.uint8), ((2, 2), np.float32),
        (2, np.float64),
    ]]  # fmt: skip
    split = [np.zeros((2, 64)), np.zeros((2, 128))]
    rows = np.zeros((2, 100))
    center = np.zeros(128)
    signs = 128
    if flaw == "rows":
        rows = rows.reshape(-1)[:-1]
    elif flaw == "directions":
        frame = frame._replace(directions=frame.directions[:-1])
    elif flaw == "scales":
        frame = frame._replace(scales=frame.scales[:0])
    elif flaw == "rotation":
        frame = frame._replace(dense=frame.dense[:-1])
    elif flaw == "center":
        center = center[:-1]
    elif flaw == "signs":
        signs = 160
    elif flaw == "head":
        made[0] = made[0][:-1]
    else:
        place = ["split heads", "tails"].index(flaw)
        split[place] = split[place][:-1]
    with pytest.raises(ValueError, match="does not fit"):
        kernels._compiled.encode_rows(path, 100, 128, rows, *frame, *split, center, signs, 0.3, 0.1, *made)
    if flaw not in ("center", "signs", "head"):
        with pytest.raises(ValueError, match="does not fit"):
            kernels._compiled.split_rows(path, 100, 128, rows, *frame, *split)


def test_an_unknown_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = tile_codes(np.random.default_rng(0), 1, 2, 2)
    query = tile_query(np.random.default_rng(0), 2, 2, 1)
    with pytest.raises(ValueError, match="no kernels 'sse9' run on this machine"):
        scanned("sse9", codes, 0, 1, query)
    monkeypatch.setattr(kernels, "WANTED", "avx1024")
    with pytest.raises(AdaNPCError, match="ADANPC_KERNELS must be one of"):
        kernels.chosen()


def test_the_environment_chooses_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADANPC_KERNELS", "numpy")
    assert runpy.run_path(str(kernels.__file__))["chosen"]() == "numpy"
    monkeypatch.setattr(kernels, "WANTED", None)
    assert kernels.chosen() == kernels.paths()[0]
    for path in kernels.paths():
        monkeypatch.setattr(kernels, "WANTED", path)
        assert kernels.chosen() == path


def test_without_a_compiler_there_is_numpy() -> None:
    assert kernels.paths(None) == ["numpy"]


@pytest.mark.parametrize("path", kernels.paths())
def test_units_of_what_is_not_finite_are_those_of_numpy(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WANTED", path)
    features = torch.tensor([[1.0, 2.0], [torch.nan, 1.0]])
    made = grid.unit(features)
    assert torch.equal(made[:1], grid.unit(features[:1]))
    assert made[1].isnan().all()
