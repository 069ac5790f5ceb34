"""Ledger: which row of a bank is evicted next, and which slots are free for new rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adanpc.core.contents import Contents
from adanpc.core.table import DECIDING, pairs
from adanpc.core.types import Origin
from adanpc.index.grid import Columns


class Retired(NamedTuple):
    """A slot whose row is gone, and the versions of the contents that still show the row."""

    slot: int
    since: int  # the first version that shows the row; 0 if unknown
    until: int  # the first version that no longer shows it


class Ledger:
    """Which row of a bank is evicted next, and which slots are free for new rows.

    All of it follows from the contents. A bank keeps it between changes only because deriving it takes time.

    Args:
        contents: what the ledger is derived from.
        version: the version number of these contents.
        slots_used: the number of slots that any version has shown. Readers of an older version may still be looking
            at slots that these contents do not show.
    """

    def __init__(self, contents: Contents, version: int, slots_used: int) -> None:
        self.queue = contents.queue()
        self._next_slot = slots_used
        self._slot_of: dict[int, int] = {}  # the slot of each admitted row, by id; empty without a capacity
        self._shown_since: dict[int, int] = {}  # the first version that shows the row in a slot; 0 if unknown
        self._free: list[int] = []
        self._retired: list[Retired] = []  # not yet examined by reclaim
        self._still_shown: list[Retired] = []  # examined, and found to have readers
        self._older_readers: list[int] = []  # the older versions that had readers at the last reclaim
        shown = contents.held_slots()
        if self.queue is not None:
            self.enter(contents.table_of(shown, *DECIDING), shown, version=0)
        unused = torch.ones(slots_used, dtype=torch.bool, device=shown.device)
        unused[shown] = False
        for slot in unused.nonzero()[:, 0].tolist():
            self._retired.append(Retired(slot, 0, version))

    def reclaim(self, readers: list[int]) -> None:
        """Frees every retired slot that nobody can see any more.

        Args:
            readers: the versions that somebody still reads, in rising order; the last one is the current version,
                which shows no retired slot.
        """
        older = readers[:-1]
        waiting = self._retired
        # As long as the same versions are being read, a slot that had readers still has them.
        if older != self._older_readers:
            waiting = waiting + self._still_shown
            self._still_shown = []
        for retired in waiting:
            if any(retired.since <= version < retired.until for version in older):
                self._still_shown.append(retired)
            else:
                self._free.append(retired.slot)
        self._retired = []
        self._older_readers = older

    def allocate(self, count: int) -> list[int]:
        """``count`` slots that nobody reads: freed ones first, then slots that were never used."""
        reused = min(count, len(self._free))
        slots = [self._free.pop() for _ in range(reused)]
        fresh = count - reused
        slots += range(self._next_slot, self._next_slot + fresh)
        self._next_slot += fresh
        return slots

    def slots(self, contents: Contents, ids: list[int]) -> Tensor:
        """The slots (n,) of the rows with these ids."""
        device = contents.index.device
        known = [self._slot_of[row] for row in ids if row in self._slot_of]
        if len(known) == len(ids):
            return torch.tensor(known, dtype=torch.int64, device=device)
        return contents.slots_of(torch.tensor(ids, dtype=torch.int64, device=device))

    def enter(self, table: Columns, slots: Tensor, *, version: int) -> None:
        """Notes the slots of admitted rows and the version that first shows them; does nothing without a capacity."""
        if self.queue is not None:
            ids = table["id"].tolist()
            origins = table["origin"].tolist()
            for row, slot, origin in zip(ids, slots.tolist(), origins, strict=True):
                if origin == Origin.ADMITTED:
                    self._slot_of[row] = slot
                    self._shown_since[slot] = version

    def retire(self, ids: list[int], slots: Tensor, *, version: int) -> None:
        """Takes back the slots of rows that ``version`` no longer shows; older versions may still be showing them."""
        for slot in slots.tolist():
            since = self._shown_since.pop(slot, 0)
            self._retired.append(Retired(slot, since, version))
        for row in ids:
            self._slot_of.pop(row, None)

    def enter_queue(self, table: Columns) -> None:
        """Adds the admitted rows of a table to the candidates for eviction."""
        if self.queue is not None:
            for row, label in pairs(_admitted(table)):
                self.queue.add(row, label)

    def leave_queue(self, table: Columns) -> None:
        """Removes the admitted rows of a table from the candidates for eviction."""
        if self.queue is not None:
            for row, label in pairs(_admitted(table)):
                self.queue.discard(row, label)


def _admitted(table: Columns) -> Columns:
    """The ids and labels of the admitted rows of a table."""
    admitted = table["origin"] == Origin.ADMITTED
    return {"id": table["id"][admitted], "label": table["label"][admitted]}
