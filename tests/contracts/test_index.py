"""Every index keeps the promises of the protocol."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from adanpc.core import Append, MemoryBank
from adanpc.index import STORAGE, ExactIndex, Found, Wanted
from adanpc.index import scan as scans
from adanpc.testing import check_index


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("engine", ["numkong", "torch"])
def test_the_exact_index(storage: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "torch":
        monkeypatch.setattr(scans, "numkong", None)
        monkeypatch.setattr(scans, "CACHED", 0)
    check_index(ExactIndex, storage)


def test_the_check_sees_an_index_that_is_nearly_exact() -> None:
    class Careless(ExactIndex):
        def search(self, queries: Tensor, k: int, *, group: int | None = None, exclude: Tensor | None = None) -> Found:
            found = super().search(queries, k, group=group, exclude=exclude)
            order = found.similarity.half().argsort(dim=1, descending=True, stable=False)
            return Found(found.slots.gather(1, order), found.ids.gather(1, order), found.similarity.gather(1, order))

    with pytest.raises(AssertionError):
        check_index(Careless)


def test_the_check_sees_an_index_that_changes_under_its_readers() -> None:
    class Shared(ExactIndex):
        def show(self, slots: Tensor, group: Tensor) -> ExactIndex:
            shown = super().show(slots, group)
            self._groups[slots] = group
            return shown

    with pytest.raises(AssertionError, match="leave the index before as it was"):
        check_index(Shared)


def test_the_check_sees_an_index_that_forgets_something_in_several_searches() -> None:
    class Forgetful(ExactIndex):
        def search_groups(
            self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None
        ) -> list[Found]:
            if len(wanted) > 1:
                exclude = None
            return super().search_groups(queries, wanted, exclude=exclude)

    with pytest.raises(AssertionError, match=r"search_groups\(\) must find what search\(\) finds"):
        check_index(Forgetful)


def test_an_index_of_ones_own_serves_a_bank() -> None:
    class Own(ExactIndex):
        pass

    bank = MemoryBank(3, 2, index=Own)
    bank.apply(Append(torch.eye(3), torch.tensor([0, 1, 1])))
    assert type(bank.contents.index) is Own
    assert bank.search(torch.eye(3)[:1], 1).ids.tolist() == [[0]]
