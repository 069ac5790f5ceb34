"""What a bank held when its model was wrapped or loaded, as far as a stream can change it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from adanpc.core import Origin, Rollback
from adanpc.core.changes import Judgment
from adanpc.core.contents import Contents
from adanpc.core.table import ACTIVE
from adanpc.index.grid import Columns


@dataclass(frozen=True, eq=False)
class Start:
    """The rows that a full bank may evict, and the stream's statistics, at one moment.

    The contents themselves are not kept: a bank does not use memory again that earlier contents may show.
    """

    position: int
    next_id: int
    capacity: int | None
    admitted: Columns  # the table of admitted rows; empty without a capacity, since none leaves then
    judgments: Mapping[int, tuple[Judgment, ...]]  # of these rows
    stream_total: Tensor | None
    stream_count: int
    stream: Tensor | None

    @classmethod
    def of(cls, contents: Contents) -> Start:
        """The start that these contents are."""
        capacity = contents.settings.capacity
        slots = contents.held_slots()
        may_leave = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
        if capacity is not None:
            may_leave = contents.table_of(slots, "origin")["origin"] == Origin.ADMITTED
        admitted = contents.table_of(slots[may_leave])
        judgments = {}
        for row in admitted["id"].tolist():
            if row in contents.judgments:
                judgments[row] = contents.judgments[row]
        statistics = contents.statistics
        return cls(
            contents.position,
            contents.next_id,
            capacity,
            admitted,
            judgments,
            statistics.stream_total,
            statistics.stream_count,
            statistics.stream,
        )

    def rollback(self, now: Contents, *, who: str, why: str, when: float | None) -> Rollback:
        """The change that takes a bank from its contents now back to this start."""
        present = now.table("id", "origin", "state")
        admitted = present["origin"] == Origin.ADMITTED
        since = present["id"] >= self.next_id
        staying = int((admitted & ~since & (present["state"] == ACTIVE)).sum())
        rows = self._evicted(present["id"], now.deleted, staying)
        returning = rows["id"].tolist()
        return Rollback(
            to=self.position,
            at=now.position,
            removed=tuple(present["id"][admitted & since].tolist()),
            rows=rows,
            judgments={row: self.judgments[row] for row in returning if row in self.judgments},
            source_mean=now.statistics.source_mean,
            stream_total=self.stream_total,
            stream_count=self.stream_count,
            stream=self.stream,
            transformed=now.statistics.transform is not None,
            who=who,
            why=why,
            when=when,
        )

    def _evicted(self, held: Tensor, deleted: Collection[int], staying: int) -> Columns:
        """The table of the rows that were evicted, without the oldest if a restored row has taken their place."""
        ids = self.admitted["id"]
        forgotten = torch.tensor(sorted(deleted), dtype=torch.int64, device=ids.device)
        evicted = ~torch.isin(ids, held) & ~torch.isin(ids, forgotten) & (self.admitted["state"] == ACTIVE)
        places = evicted.nonzero()[:, 0]
        if self.capacity is not None:
            free = max(self.capacity - staying, 0)
            places = places[max(len(places) - free, 0) :]
        return {name: column[places] for name, column in self.admitted.items()}
