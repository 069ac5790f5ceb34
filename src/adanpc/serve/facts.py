"""RowFacts: where rows came from and what their keys are, looked up without reading all rows each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adanpc.core import Contents, Origin

MOST_RECENT = 10_000  # rows that may join before the table is made again


class Fact(NamedTuple):
    """The origin and the key of a row."""

    origin: str  # source, admitted or expert; "left" if it is gone
    key: int | None


JOINED = Fact("admitted", None)
LEFT = Fact("left", None)


class Table(NamedTuple):
    """Columns of all rows, in the order of ids."""

    ids: NDArray[np.int64]
    origins: NDArray[np.uint8]
    keys: NDArray[np.int64]

    def find(self, row: int) -> Fact | None:
        """Returns what the table says about a row, or None if it does not contain the row."""
        place = int(self.ids.searchsorted(row))
        if place == len(self.ids) or self.ids[place] != row:
            return None
        key = int(self.keys[place])
        known_key = key if key >= 0 else None
        return Fact(Origin(int(self.origins[place])).name.lower(), known_key)


NO_ROWS = Table(np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64))


class RowFacts:
    """The origins and keys of rows, kept in a table and, for rows that joined after it was made, in a dictionary."""

    def __init__(self) -> None:
        self._table = NO_ROWS
        self._recent: dict[int, Fact] = {}

    def note_joined(self, ids: Sequence[int]) -> None:
        """Records the ids of queries that have joined."""
        for row in ids:
            self._recent[row] = JOINED

    def forget(self) -> None:
        """Discards the table after rows were changed; it is made again when it is needed."""
        self._table = NO_ROWS
        self._recent = {}

    def of(self, ids: Sequence[int], contents: Contents) -> list[Fact]:
        """Returns what is known about these rows, some of which may have left the bank since."""
        found = [self._find(row) for row in ids]
        if None in found or len(self._recent) > MOST_RECENT:
            self._read(contents)
            found = [self._find(row) for row in ids]
        return [fact or LEFT for fact in found]

    def _find(self, row: int) -> Fact | None:
        return self._recent.get(row) or self._table.find(row)

    def _read(self, contents: Contents) -> None:
        table = contents.table("id", "origin", "key")
        self._table = Table(table["id"].cpu().numpy(), table["origin"].cpu().numpy(), table["key"].cpu().numpy())
        self._recent = {}
