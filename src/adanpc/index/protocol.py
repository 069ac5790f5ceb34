"""Index: the protocol of whatever stores and searches the rows of a bank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy
import torch
from torch import Tensor

from adanpc.index.grid import Columns, array_if_on_cpu
from adanpc.index.unread import StoredRows

Wanted = tuple[int, int | None]  # how many rows to find, and in which group; None for all groups
AHEAD = "ahead of growth"  # the entry for memory that was requested for later rows
FILE = "rows in a file"  # the entry of ``Accounting.memory`` for bytes on a disk, not in memory


class Found(NamedTuple):
    """The rows nearest to each query, most similar first, ties to the lowest id.

    K is k, or the number of slots in use if that is less. Where fewer than K rows can be found, the last slots and ids
    are -1 and the similarities -inf.
    """

    slots: Tensor  # (B, K) int64
    ids: Tensor  # (B, K) int64
    similarity: Tensor  # (B, K) float64

    @property
    def complete(self) -> bool:
        """Whether K rows were found for every query."""
        last = array_if_on_cpu(self.slots)[:, -1:]  # missing rows are always at the end
        return bool((last >= 0).all())


def one_after_another(parts: Sequence[Found]) -> Found:
    """The results for several batches of queries as those of one batch, in the same order."""
    if len(parts) == 1:
        return parts[0]
    slots, ids, similarity = zip(*parts, strict=True)
    return Found(torch.cat(slots), torch.cat(ids), torch.cat(similarity))


class Index(Protocol):
    """Unit rows in numbered slots, and an exact search for the nearest of them.

    An index is a value: ``put``, ``hide`` and ``show`` return a changed index and leave the original as it was. So a
    bank can publish a change by one assignment, while readers of the old index are not disturbed. The two may share
    memory, because the bank promises two things: it changes the newest index only, and it reuses a slot only when the
    slot is hidden in every index that somebody still reads.

    Every row belongs to a group, a number from 1 to 255, and a search may be restricted to one group. Rows in group 0
    are hidden: no search finds them. ``adanpc.testing.check_index`` tells whether a class keeps these promises.
    """

    dim: int
    storage: str
    device: torch.device

    @property
    def slots(self) -> int:
        """How many slots are in use: one more than the highest slot that was ever written."""

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
        """The rows (n, D) float32 that would be read back if these unit rows were stored."""

    def put(self, slots: Tensor, ids: Tensor, columns: Columns, group: Tensor) -> Index:
        """The index with rows added.

        Args:
            slots: (n,) where the rows are stored.
            ids: (n,) their ids.
            columns: the rows as ``encode`` returned them.
            group: (n,) uint8, their groups; 0 to store rows that are hidden.
        """

    def hide(self, slots: Tensor) -> Index:
        """The index with the rows in these slots (n,) hidden."""

    def show(self, slots: Tensor, group: Tensor) -> Index:
        """The index with the rows in these slots (n,) no longer hidden, each in its group (n,)."""

    def search(self, queries: Tensor, k: int, *, group: int | None = None, exclude: Tensor | None = None) -> Found:
        """The k rows nearest to each query.

        Args:
            queries: (B, D) as ``unit`` returned them.
            k: how many rows to find for each query.
            group: the only group to search; by default all groups are searched.
            exclude: (B, E) ids of rows that may not be found for that query.
        """

    def search_groups(self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None) -> list[Found]:
        """The result of ``search`` for each pair of a number of rows and a group; all rows are read only once."""

    def ids(self, slots: Tensor) -> Tensor:
        """The ids (n,) of the rows in these slots."""

    def rows(self, slots: Tensor) -> Tensor:
        """The rows in these slots, (n, D) float32."""

    def state(self, slots: Tensor) -> Columns:
        """The encoded rows in these slots, as ``put`` takes them."""


@runtime_checkable
class Accounting(Protocol):
    """An index that can tell what its memory is used for. Without this, a bank knows only ``nbytes``."""

    def memory(self, slots: int) -> dict[str, int]:
        """Bytes that this many slots need, by purpose; those under ``FILE`` are on a disk."""


@runtime_checkable
class Finding(Protocol):
    """An index that finds rows by their ids. Without this, a bank sorts all ids to find a few."""

    def find(self, ids: Sequence[int]) -> list[int]:
        """The slots of the rows with these ids; -1 for a row that is hidden or not there."""


class Products(Protocol):
    """The products of all rows with some vectors, kept for further searches. They are those of one index, unchanged."""

    def search(self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None) -> list[Found]:
        """The result of ``Index.search_groups`` for queries (B, D), found faster if they lie near the vectors' span."""


@runtime_checkable
class Multiplying(Protocol):
    """An index that can keep products for further searches. Without this, every search reads all rows."""

    def products(self, vectors: Tensor) -> Products | None:
        """The products of all rows with vectors (J, D) as ``unit`` returns them; None if nothing is gained by them."""


class Kept(NamedTuple):
    """What an index has kept of its rows."""

    codes: Columns
    rows: StoredRows | None = None  # from which rows are read when they are needed; None if they are given
    given_away: bool = False  # whether nobody else uses the memory of codes and rows, so that an index may keep it

    def with_rows(self, columns: Columns) -> Columns:
        """The columns (n, …) of all rows, the rows themselves included: read now if they are stored."""
        if self.rows is None:
            return columns
        return {**columns, **self.rows.read(numpy.arange(len(self.codes["slot"])))}


@runtime_checkable
class Coding(Protocol):
    """An index that derives codes from its rows, which take long to make and can be kept in a file."""

    def codes(self, slots: Tensor) -> Columns:
        """The codes of the rows in these slots (n,), their slots included; nothing if it has none worth keeping."""

    def put_kept(self, ids: Tensor, columns: Columns, group: Tensor, kept: Kept) -> Index:
        """``Index.put`` for an index without rows: in the slots that ``codes`` gave, without making codes."""
