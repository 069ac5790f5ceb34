"""Every path of the kernels gives the same bits, which are those of plain arithmetic, and refuses what does not fit."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adanpc.errors import AdaNPCError
from adanpc.index import kernels
from adanpc.index.kernels import LANES, HeadAndBits, Nibbles

Array = np.ndarray[Any, Any]
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
    words = data.draw(st.sampled_from([4, 32, 33]))
    first = data.draw(st.integers(0, 9))
    span = data.draw(st.integers(1, 5))
    codes = tile_codes(random, tiles, pairs, words)
    query = tile_query(random, pairs, words, (first + tiles) // span + 1)
    if data.draw(st.booleans()):  # the largest numbers that there are
        codes["head"][:] = 127
        codes["bits"][:] = 2**32 - 1
        query.head[:] = data.draw(st.sampled_from([-32000, 32000]))
        query.bits[:] = data.draw(st.sampled_from([[0, 0, 0, 2**32 - 1], [2**32 - 1] * 4]))
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


def test_an_unknown_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = tile_codes(np.random.default_rng(0), 1, 2, 2)
    query = tile_query(np.random.default_rng(0), 2, 2, 1)
    with pytest.raises(ValueError, match="no kernels 'sse9' run on this machine"):
        scanned("sse9", codes, 0, 1, query)
    monkeypatch.setenv(kernels.VARIABLE, "avx1024")
    with pytest.raises(AdaNPCError, match="ADANPC_KERNELS must be one of"):
        kernels.chosen()


def test_the_environment_chooses_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    assert kernels.chosen() == kernels.paths()[0]
    for path in kernels.paths():
        monkeypatch.setenv(kernels.VARIABLE, path)
        assert kernels.chosen() == path


def test_without_a_compiler_there_is_numpy() -> None:
    assert kernels.paths(None) == ["numpy"]
