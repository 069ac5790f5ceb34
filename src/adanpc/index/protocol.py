"""Index: what a bank asks of whatever stores and searches its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from adanpc.index.grid import Columns, array_if_on_cpu
from adanpc.index.unread import StoredRows

Wanted = tuple[int, int | None]  # how many rows, and of which group; None for all that are not hidden


class Found(NamedTuple):
    """The nearest rows of each query, most similar first, ties to the lowest id.

    K is k, or the number of slots in use if that is less. Where fewer than K rows may be found, slot and id are -1 and
    the similarity is -inf.
    """

    slots: Tensor  # (B, K) int64
    ids: Tensor  # (B, K) int64
    similarity: Tensor  # (B, K) float64

    @property
    def complete(self) -> bool:
        """Whether there are K rows for every query."""
        last = array_if_on_cpu(self.slots)[:, -1:]  # who is missing is missing at the end
        return bool((last >= 0).all())


def one_after_another(parts: Sequence[Found]) -> Found:
    """What was found for all queries, those of the first part first."""
    if len(parts) == 1:
        return parts[0]
    slots, ids, similarity = zip(*parts, strict=True)
    return Found(torch.cat(slots), torch.cat(ids), torch.cat(similarity))


class Index(Protocol):
    """Unit rows in numbered slots, and the exact nearest of them.

    An index is a value: ``put``, ``hide`` and ``show`` return the changed index and leave this one as it was, so that
    a bank publishes a change by one assignment, and readers of the old index go on undisturbed. The two may share
    memory. Only the newest index is ever changed, and a slot is written again only when it is hidden in every index
    that somebody still reads; the bank sees to both.

    Every row belongs to a group, a number from 1 to 255; a search may be confined to one of them.
    ``adanpc.testing.check_index`` says whether a class keeps these promises.
    """

    dim: int
    storage: str
    device: torch.device

    @property
    def slots(self) -> int:
        """How many slots are in use: one more than the highest that was ever put."""

    @property
    def visible(self) -> Tensor:
        """The slots (n,) whose rows can be found, in rising order."""

    @property
    def count(self) -> int:
        """How many rows can be found."""

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use."""

    def encode(self, rows: Tensor) -> Columns:
        """Unit rows (n, D) as this index stores them."""

    def stored(self, rows: Tensor) -> Tensor:
        """What unit rows are read back as once they are put, (n, D) float32."""

    def put(self, slots: Tensor, ids: Tensor, columns: Columns, group: Tensor) -> Index:
        """With encoded rows in these slots (n,), each under its id (n,) and in its group (n,); group 0 is hidden."""

    def hide(self, slots: Tensor) -> Index:
        """With the rows in these slots no longer to be found."""

    def show(self, slots: Tensor, group: Tensor) -> Index:
        """With the rows in these slots to be found again, each in its group (n,)."""

    def search(self, queries: Tensor, k: int, *, group: int | None = None, exclude: Tensor | None = None) -> Found:
        """The k nearest rows of unit queries (B, D), of one group if given, without the ids in ``exclude`` (B, E)."""

    def search_groups(self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None) -> list[Found]:
        """What ``search`` finds for each of several numbers of rows and groups; all rows are read once for all."""

    def ids(self, slots: Tensor) -> Tensor:
        """The ids (n,) of the rows in these slots."""

    def rows(self, slots: Tensor) -> Tensor:
        """The rows in these slots, (n, D) float32."""

    def state(self, slots: Tensor) -> Columns:
        """The encoded rows in these slots, as ``put`` takes them."""


@runtime_checkable
class Accounting(Protocol):
    """An index that says what its bytes are for; of others, a bank knows ``nbytes`` alone."""

    def memory(self, slots: int) -> dict[str, int]:
        """Bytes that so many slots need, by what they are for; those under ``FILE`` are on a disk."""


@runtime_checkable
class Finding(Protocol):
    """An index that finds rows by their ids; of others, a bank sorts all ids to find one."""

    def find(self, ids: Sequence[int]) -> list[int]:
        """The slots of the rows under these ids; -1 where no row under it can be found."""


class Kept(NamedTuple):
    """What an index has kept of its rows."""

    codes: Columns
    rows: StoredRows | None = None  # from which rows are read when they are needed; None if they are given


@runtime_checkable
class Coding(Protocol):
    """An index that derives codes from its rows, which take long to make and can be kept in a file."""

    def codes(self, slots: Tensor) -> Columns:
        """The codes of the rows in these slots (n,), their slots included; nothing if it has none worth keeping."""

    def put_kept(self, ids: Tensor, columns: Columns, group: Tensor, kept: Kept) -> Index:
        """``Index.put`` for an index without rows: in the slots that ``codes`` gave, without making codes."""


FILE = "rows in a file"
