"""MemoryBank: (feature, label) rows, exact nearest-neighbor search, and changes as values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from adanpc.core.eviction import POLICIES, Eviction
from adanpc.core.types import Append, Change, Neighbors, Origin, Veto
from adanpc.errors import AdaNPCError, LabelError, RowError
from adanpc.index import ExactIndex, check_features, unit
from adanpc.index.grid import Columns, encode

FREE, ACTIVE, VETOED = 0, 1, 2
NOBODY = dict.fromkeys(("id", "label", "domain", "key"), torch.tensor([-1]))  # what stands where there is no row
NOBODY |= {"confidence": torch.zeros(1).float(), "origin": torch.zeros(1).byte(), "state": torch.zeros(1).byte()}


class MemoryBank:
    """Unit rows with labels, searched exactly and changed only by ``apply``.

    Args:
        dim: length of a feature vector.
        classes: number of classes; labels are 0 … classes - 1.
        storage: ``float32``; ``float16``, half the memory; or ``int8``, the memory of float16 and the fastest search:
            one byte a coordinate finds candidates, a second one re-ranks them at 16 bits.
        capacity: the most admitted rows kept; source and expert rows always stay and do not count.
        evict: who leaves a full bank: ``fifo``, ``balanced`` (oldest of the largest class) or ``reservoir``.
        soft: rows keep class probabilities beside their label.
        device: any torch device with float64.
    """

    @torch.inference_mode(False)  # what is allocated here and in apply must stay writable outside of it
    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        storage: str = "float32",
        capacity: int | None = None,
        evict: str = "fifo",
        soft: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        dim, classes, capacity = index(dim), index(classes), None if capacity is None else index(capacity)
        for name, value in (("dim", dim), ("classes", classes), ("capacity", 1 if capacity is None else capacity)):
            if value < 1:
                raise AdaNPCError(f"{name} must be at least 1, got {value}")
        if evict not in POLICIES:
            raise AdaNPCError(f"evict must be one of {', '.join(POLICIES)}, got {evict!r}")
        self.dim, self.classes, self.storage, self.soft = dim, classes, storage, bool(soft)
        self.capacity, self.evict, self.device = capacity, evict, torch.device(device)
        self.next_id = 0
        self.vetoes: dict[int, Veto] = {}
        self.admitted = torch.zeros(classes, dtype=torch.int64, device=self.device)  # admitted rows held, by class
        self._index = ExactIndex(dim, storage, self.device)
        self._columns = {name: column.to(self.device, copy=True) for name, column in NOBODY.items()}
        if soft:
            self._columns["soft"] = torch.zeros(1, classes, dtype=torch.float32, device=self.device)
        self._queue = None if capacity is None else Eviction(evict, capacity)
        self._where: dict[int, int] = {}  # the slots of rows that may be evicted
        self._free: list[int] = []  # slots of evicted rows, used before new ones
        self._used = 0

    def __len__(self) -> int:
        """How many rows are held, vetoed ones included."""
        return self._used - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use."""
        return self._index.nbytes + sum(self._column(name).nbytes for name in self._columns)

    def search(
        self, queries: Tensor, k: int, *, exclude: Tensor | None = None, source: bool | None = None
    ) -> Neighbors:
        """The k most similar rows of each query (B, D); changes nothing.

        Args:
            exclude: (B, E) ids that may not vote for that query, such as the query's own row.
            source: True for source rows only, False for all others only.
        """
        if k < 1:
            raise AdaNPCError(f"k must be at least 1, got {k}")
        return self.nearest(unit(check_features(queries, self.dim).to(self.device)), k, exclude, source)

    def nearest(self, queries: Tensor, k: int, exclude: Tensor | None = None, source: bool | None = None) -> Neighbors:
        """``search`` for queries that ``unit`` returned."""
        usable = self._column("state") == ACTIVE  # (slots,)
        if source is not None:
            usable &= (self._column("origin") == Origin.SOURCE) == source
        slots, similarity = self._index.search(queries, k, usable, self._column("id"), exclude)
        ids, labels = self._columns["id"][slots], self._columns["label"][slots]  # nobody at slot -1, the last one
        return Neighbors(ids, similarity, labels, self._columns["soft"][slots] if self.soft else None)

    def _column(self, name: str) -> Tensor:
        """A column of all slots in use; it has room for at least one more, where nobody is."""
        return self._columns[name][: self._index.slots]

    def rows(self, ids: Tensor) -> Tensor:
        """The stored unit rows of these ids, (n, D) float32."""
        return self._index.rows(self._slots(ids.to(self.device)))

    def stored(self, queries: Tensor) -> Tensor:
        """What ``unit`` queries are read back as once they are appended, (B, D) float32."""
        return self._index.stored(queries)

    def _slots(self, ids: Tensor) -> Tensor:
        held = (self._column("state") != FREE).nonzero()[:, 0]
        known, order = self._columns["id"][held].sort()
        position = torch.searchsorted(known, ids)
        missing = ids[(torch.cat([known, known.new_full((1,), -1)])[position] != ids) | (ids < 0)]
        if len(missing):
            fate = "was evicted" if 0 <= int(missing[0]) < self.next_id else "never existed"
            raise RowError(f"row {int(missing[0])} is not in the bank: it {fate}")
        return held[order[position]]

    @torch.inference_mode(False)
    def apply(self, change: Change) -> None:
        """Carries out one change, whole or not at all."""
        if isinstance(change, Append):
            self._append(change)
            return
        rows = [index(row) for row in change.ids]
        slots = self._slots(torch.tensor(rows, dtype=torch.int64, device=self.device))
        self._columns["state"][slots] = VETOED if isinstance(change, Veto) else ACTIVE
        kept = {row: veto for row, veto in self.vetoes.items() if row not in rows}
        self.vetoes = kept | dict.fromkeys(rows, change) if isinstance(change, Veto) else kept

    def plan(self, labels: Sequence[int]) -> list[tuple[int, int]]:
        """The id and label that leave, or (-1, -1), as each of these labels is admitted next; changes nothing."""
        if self._queue is None:
            return [(-1, -1)] * len(labels)
        queue = self._queue.copy()
        return [queue.push(self.next_id + position, label) for position, label in enumerate(labels)]

    def _append(self, change: Append) -> None:
        values = self._checked(change)
        self._make_room(len(values["id"]))  # what may fail comes first
        first, self.next_id = self.next_id, self.next_id + len(values["id"])
        if change.origin == Origin.ADMITTED and self._queue is not None:
            arriving = zip(values["id"].tolist(), values["label"].tolist(), strict=True)
            leaving = [self._queue.push(row, label)[0] for row, label in arriving]
            self._release([row for row in leaving if 0 <= row < first])
            stay = ~torch.isin(values["id"], torch.tensor(leaving, device=self.device))
            values = {name: column[stay] for name, column in values.items()}
        self._store(values)

    def _checked(self, change: Append) -> Columns:
        """The change as columns, ids given."""
        features = check_features(change.features, self.dim).to(self.device)
        count = len(features)

        def column(name: str, value: Tensor | float, dtype: torch.dtype, *width: int) -> Tensor:
            if isinstance(value, int):
                return torch.full((count,), value, dtype=dtype, device=self.device)
            value = torch.as_tensor(value, device=self.device).detach()
            value = value if value.ndim else value.expand(count)
            if value.shape != (count, *width):
                raise LabelError(f"{name} must have shape {(count, *width)}, a row for each, got {tuple(value.shape)}")
            if dtype.is_floating_point != value.is_floating_point() or not value.to(dtype).isfinite().all():
                kind = "finite" if dtype.is_floating_point else "whole"
                raise LabelError(f"{name} must be {kind} numbers, got {value.dtype} with {value[:3].tolist()}, …")
            return value.to(dtype)

        labels = column("labels", change.labels, torch.int64)
        bad = labels[labels.clamp(0, self.classes - 1) != labels]
        if len(bad):
            raise LabelError(f"labels must lie in 0 … {self.classes - 1}, got {int(bad[0])}")
        if change.soft is not None and not self.soft:
            raise LabelError("this bank keeps hard labels: build it with soft=True to store soft ones")
        columns = {
            "id": torch.arange(self.next_id, self.next_id + count, device=self.device),
            "label": labels,
            "domain": column("domain", change.domain, torch.int64),
            "key": column("keys", -1 if change.keys is None else change.keys, torch.int64),
            "confidence": column("confidence", 1.0 if change.confidence is None else change.confidence, torch.float32),
            "origin": column("origin", Origin(change.origin), torch.uint8),
            "state": column("state", ACTIVE, torch.uint8),
            **encode(unit(features), self.storage),
        }
        if self.soft:
            soft = torch.nn.functional.one_hot(labels, self.classes).float() if change.soft is None else change.soft
            columns["soft"] = column("soft labels", soft, torch.float32, self.classes)
            if (columns["soft"] < 0).any() or ((columns["soft"].sum(1) - 1).abs() > 1e-3).any():
                raise LabelError(f"soft labels must be probabilities that sum to 1, got {soft[:3].tolist()}, …")
        return columns

    def _release(self, rows: list[int]) -> None:
        slots = [self._where.pop(row) for row in rows]
        self.admitted -= self._columns["label"][slots].bincount(minlength=self.classes)
        self._columns["state"][slots] = FREE
        self._free += slots
        for row in rows:
            self.vetoes.pop(row, None)

    def _make_room(self, count: int) -> None:
        self._index.grow(self._used + count)
        if (more := self._index.slots + 1 - len(self._columns["id"])) > 0:
            more = max(more, len(self._columns["id"]) // 4)
            self._columns = {n: torch.cat([c, c[-1:].expand(more, *c.shape[1:])]) for n, c in self._columns.items()}

    def _store(self, values: Columns) -> None:
        count = len(values["id"])
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = range(self._used, self._used + count - len(reused))
        self._used += len(fresh)
        slots = torch.tensor([*reused, *fresh], dtype=torch.int64, device=self.device)
        self._index.put(slots, values)
        for name, column in self._columns.items():
            column.index_copy_(0, slots, values[name])
        admitted = values["origin"] == Origin.ADMITTED
        self.admitted.index_add_(0, values["label"], admitted.long())
        if self._queue is not None:
            self._where.update(zip(values["id"][admitted].tolist(), slots[admitted].tolist(), strict=True))

    def config(self) -> dict[str, Any]:
        """The settings that belong to the bank's identity, as keyword arguments."""
        return {name: getattr(self, name) for name in ("dim", "classes", "storage", "capacity", "evict", "soft")}

    def table(self, *names: str) -> Columns:
        """The named columns, or all with the encoded rows, of all held rows in the order of ids."""
        slots = (self._column("state") != FREE).nonzero()[:, 0]
        slots = slots[self._columns["id"][slots].argsort()]
        known = {name: self._columns[name][slots] for name in names or self._columns}
        return known if names else {**known, **self._index.take(slots)}

    def fill(self, table: Columns, next_id: int, vetoes: dict[int, Veto]) -> None:
        """Makes this new, empty bank the one that ``table`` was read from."""
        self._make_room(len(table["id"]))
        self._store({name: column.to(self.device) for name, column in table.items()})
        self.next_id, self.vetoes = next_id, vetoes
        if self._queue is not None:
            admitted = table["origin"] == Origin.ADMITTED
            for row, label in zip(table["id"][admitted].tolist(), table["label"][admitted].tolist(), strict=True):
                self._queue.push(row, label)

    def digest(self) -> str:
        """A hash of settings and rows: equal digests mean equal banks."""
        vetoes = [[row, veto.who, veto.why] for row, veto in sorted(self.vetoes.items())]
        total = hashlib.sha256(json.dumps([self.config(), self.next_id, vetoes]).encode())
        for name, column in sorted(self.table().items()):
            array: Any = column.cpu().contiguous().numpy()
            total.update(name.encode())
            total.update(array)
        return total.hexdigest()
