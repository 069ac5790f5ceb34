"""What a bank derives from its contents to change them quickly: who is evicted next, and which slots are free."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from adanpc.core.contents import Contents
from adanpc.core.table import DECIDING, pairs
from adanpc.core.types import Origin
from adanpc.index.grid import Columns


class Retired(NamedTuple):
    """A slot whose row is gone, and the versions of the contents that show it still."""

    slot: int
    since: int  # the first version that shows it; 0 if it is not known
    until: int  # the first version that no longer does


class Ledger:
    """What a bank derives from its contents to change them quickly: who is evicted next, and which slots are free.

    Args:
        contents: from which all of it is made.
        version: of the contents.
        slots_used: that any version has shown. Those that these contents do not show may still be read by others.
    """

    def __init__(self, contents: Contents, version: int, slots_used: int) -> None:
        self.queue = contents.queue()
        self._next_slot = slots_used
        self._slot_of: dict[int, int] = {}  # of admitted rows, where there is a capacity
        self._shown_since: dict[int, int] = {}  # the first version that shows a slot; 0 if it is not known
        self._free: list[int] = []
        self._retired: list[Retired] = []
        self._still_shown: list[Retired] = []  # those of them that somebody reads
        self._older_readers: list[int] = []  # versions that were read when this was last looked at
        shown = contents.held_slots()
        if self.queue is not None:
            self.enter(contents.table_of(shown, *DECIDING), shown, version=0)
        unused = torch.ones(slots_used, dtype=torch.bool, device=shown.device)
        unused[shown] = False
        self._retired += [Retired(slot, 0, version) for slot in unused.nonzero()[:, 0].tolist()]

    def reclaim(self, readers: list[int]) -> None:
        """Frees the slots that no version shows of those that somebody still reads, the newest included."""
        older = readers[:-1]
        waiting = self._retired
        if older != self._older_readers:  # else what was shown to somebody still is
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
        """So many slots that nobody reads: free ones first."""
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = count - len(slots)
        slots += range(self._next_slot, self._next_slot + fresh)
        self._next_slot += fresh
        return slots

    def slots(self, contents: Contents, ids: list[int]) -> Tensor:
        """The slots (n,) of these rows."""
        whole_numbers = partial(torch.tensor, dtype=torch.int64, device=contents.index.device)
        known = [self._slot_of[row] for row in ids if row in self._slot_of]
        if len(known) == len(ids):
            return whole_numbers(known)
        return contents.slots_of(whole_numbers(ids))

    def enter(self, table: Columns, slots: Tensor, *, version: int) -> None:
        """Notes where rows are that may be evicted, and since which version."""
        if self.queue is not None:
            for row, slot, origin in zip(table["id"].tolist(), slots.tolist(), table["origin"].tolist(), strict=True):
                if origin == Origin.ADMITTED:
                    self._slot_of[row] = slot
                    self._shown_since[slot] = version

    def retire(self, ids: list[int], slots: Tensor, *, version: int) -> None:
        """Takes back the slots of rows that are gone from this version on."""
        for slot in slots.tolist():
            self._retired.append(Retired(slot, self._shown_since.pop(slot, 0), version))
        for row in ids:
            self._slot_of.pop(row, None)

    def enter_queue(self, table: Columns) -> None:
        """Makes the admitted rows of a table candidates for eviction."""
        if self.queue is not None:
            for row, label in pairs(_admitted(table)):
                self.queue.add(row, label)

    def leave_queue(self, table: Columns) -> None:
        """Makes the admitted rows of a table no longer candidates for eviction."""
        if self.queue is not None:
            for row, label in pairs(_admitted(table)):
                self.queue.discard(row, label)


def _admitted(table: Columns) -> Columns:
    """The rows of a table that were admitted: their ids and labels."""
    admitted = table["origin"] == Origin.ADMITTED
    return {"id": table["id"][admitted], "label": table["label"][admitted]}
