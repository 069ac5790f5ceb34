"""Products that are kept: a search by them finds what a search that reads all rows finds, for any query."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adanpc.errors import AdaNPCError
from adanpc.index import STORAGE, ExactIndex, Found, exact, products, unit
from adanpc.index.protocol import Multiplying

DIM = 96
ROWS = 700


def filled(storage: str, *, hidden: bool = True) -> ExactIndex:
    """An index in which some rows are equal, most are in group 1 and a few in group 2; by default some are hidden."""
    generator = torch.Generator().manual_seed(1)
    rows = unit(torch.randn(ROWS, DIM, generator=generator))
    rows[100:140] = rows[99]
    group = torch.ones(ROWS, dtype=torch.uint8)
    group[600:] = 2
    index = ExactIndex(DIM, storage)
    index = index.put(torch.arange(ROWS), torch.arange(ROWS).flip(0), index.encode(rows), group)
    if hidden:
        index = index.hide(torch.arange(0, ROWS, 9))
    return index


def vectors(count: int) -> torch.Tensor:
    return unit(torch.randn(count, DIM, generator=torch.Generator().manual_seed(2)))


def queries_of(kind: str, given: torch.Tensor, index: ExactIndex) -> torch.Tensor:
    """Nine queries that are related to the given vectors (J, D) in one of several ways."""
    generator = torch.Generator().manual_seed(3)
    if kind == "the vectors":
        return given[:9]
    if kind == "sums of the vectors":
        return unit(torch.randn(9, len(given), generator=generator) @ given)
    if kind == "equal to a row":
        return index.rows(torch.arange(95, 104))
    return unit(torch.randn(9, DIM, generator=generator))


def same(one: list[Found], other: list[Found]) -> bool:
    """Whether two searches found the same, to the bit."""
    for left, right in zip(one, other, strict=True):
        for column, expected in zip(left, right, strict=True):
            if not torch.equal(column, expected):
                return False
    return True


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("kind", ["the vectors", "sums of the vectors", "equal to a row", "unrelated"])
@pytest.mark.parametrize("storage", STORAGE)
def test_a_search_by_products_finds_what_a_search_of_all_rows_finds(storage: str, kind: str, exclude: bool) -> None:
    index = filled(storage)
    given = vectors(20)
    queries = queries_of(kind, given, index)
    excluded = torch.arange(18).view(9, 2) if exclude else None
    kept = index.products(given)
    assert kept is not None
    wanted = [(30, 1), (5, 2), (12, None), (ROWS + 5, None)]
    for _ in range(2):  # the first search leaves the products as they were
        assert same(
            kept.search(queries, wanted, exclude=excluded), index.search_groups(queries, wanted, exclude=excluded)
        )


def test_products_find_all_rows_of_an_index_that_hides_none() -> None:
    index = filled("float32", hidden=False)
    given = vectors(20)
    kept = index.products(given)
    assert kept is not None
    queries = queries_of("sums of the vectors", given, index)
    assert same(kept.search(queries, [(8, None), (ROWS, 2)]), index.search_groups(queries, [(8, None), (ROWS, 2)]))


def test_vectors_that_are_equal_or_zero_are_no_harm() -> None:
    index = filled("float32")
    given = vectors(20)
    given[5:15] = given[4]
    given[15] = 0
    kept = index.products(given)
    assert kept is not None
    queries = queries_of("sums of the vectors", given, index)
    assert same(kept.search(queries, [(10, None)]), index.search_groups(queries, [(10, None)]))


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("kind", ["sums of the vectors", "unrelated"])
def test_the_error_of_a_sum_of_products_is_bounded(kind: str, precision: Any) -> None:
    index = filled("float32")
    given = vectors(20)
    queries = queries_of(kind, given, index)
    torch.set_float32_matmul_precision(precision)
    try:
        kept = index.products(given)
        assert kept is not None
        found, errors = kept._products_with(queries)
    finally:
        torch.set_float32_matmul_precision("highest")
    by_slot = found.transpose(0, 1).flatten(1)[:, :ROWS].double()
    exactly = queries.double() @ index.rows(torch.arange(ROWS)).double().T
    assert ((by_slot - exactly).abs() <= errors[:, None] * 1.0001).all()
    if kind == "sums of the vectors" and precision == "highest":
        assert errors.max() < 1e-3  # far below what a query outside of the span has


def test_what_is_not_near_the_vectors_has_a_large_error() -> None:
    index = filled("float32")
    kept = index.products(vectors(20))
    assert kept is not None
    assert kept._products_with(queries_of("unrelated", vectors(20), index))[1].min() > 0.5


def test_products_are_kept_only_where_they_save_work(monkeypatch: pytest.MonkeyPatch) -> None:
    index = filled("float32")
    assert isinstance(index, Multiplying)
    assert isinstance(index.products(vectors(32)), products.ExactProducts)
    assert index.products(vectors(33)) is None  # more than a third of the coordinates
    assert ExactIndex(DIM).products(vectors(20)) is None  # no rows
    monkeypatch.setattr(exact, "BOUNDS_AT_ONCE", 20 * index.padded - 1)
    assert index.products(vectors(20)) is None  # too much memory


def test_what_is_excluded_is_checked() -> None:
    kept = filled("float32").products(vectors(20))
    assert kept is not None
    with pytest.raises(AdaNPCError, match="exclude must be whole numbers"):
        kept.search(vectors(20), [(3, None)], exclude=torch.ones(3))
