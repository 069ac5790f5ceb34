"""Start: what ``Wrapped.reset`` needs to know about the bank as it was when its model was wrapped or loaded."""

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
    """What a stream can change about a bank, as it was at one moment: the rows that may be evicted, and the statistics.

    The contents themselves are not kept, because a bank never reuses memory that earlier contents show.
    """

    position: int
    next_id: int
    capacity: int | None
    admitted: Columns  # the table of admitted rows; empty without a capacity, because then no row is evicted
    judgments: Mapping[int, tuple[Judgment, ...]]  # what people decided about these rows, by id
    stream_total: Tensor | None
    stream_count: int
    stream: Tensor | None

    @classmethod
    def of(cls, contents: Contents) -> Start:
        """The start that these contents represent."""
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
            position=contents.position,
            next_id=contents.next_id,
            capacity=capacity,
            admitted=admitted,
            judgments=judgments,
            stream_total=statistics.stream_total,
            stream_count=statistics.stream_count,
            stream=statistics.stream,
        )

    def rollback(self, now: Contents, *, who: str, why: str, when: float | None) -> Rollback:
        """The change that undoes what the stream has done to a bank since this start; what people decided stays.

        Args:
            now: the contents of the bank now.
            who, why, when: as in every change.
        """
        present = now.table("id", "origin", "state")
        admitted = present["origin"] == Origin.ADMITTED
        active = present["state"] == ACTIVE
        since = present["id"] >= self.next_id
        staying = int((admitted & active & ~since).sum())
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
        """The table of the rows that were evicted since this start and can come back within the capacity.

        Args:
            held: (n,) ids of the rows that are held now.
            deleted: ids of rows that may never come back.
            staying: how many admitted rows that vote now will stay. If people have restored rows since, there may not
                be room for all that were evicted; then the oldest stay away.
        """
        ids = self.admitted["id"]
        forgotten = torch.tensor(sorted(deleted), dtype=torch.int64, device=ids.device)
        was_active = self.admitted["state"] == ACTIVE
        gone = ~torch.isin(ids, held)
        evicted = was_active & gone & ~torch.isin(ids, forgotten)
        places = evicted.nonzero()[:, 0]
        if self.capacity is not None:
            room = max(self.capacity - staying, 0)
            too_many = max(len(places) - room, 0)
            places = places[too_many:]
        return {name: column[places] for name, column in self.admitted.items()}
