"""Contents: all that a bank holds at one moment, as a value that readers keep while the bank goes on changing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from reprlib import repr as brief
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor

from adanpc import require
from adanpc.core.centering import Statistics
from adanpc.core.changes import Judgment
from adanpc.core.codec import (
    NAMES,
    PREFIX_OF_TRANSFORM,
    TRANSFORM,
    canonical,
    judgments_to_json,
    transform_tensors,
)
from adanpc.core.estimate import Calibration
from adanpc.core.eviction import POLICIES, Eviction
from adanpc.core.guard import Stream
from adanpc.core.table import ACTIVE, VETOED, TableError, check_judgments
from adanpc.core.transform import Transform
from adanpc.core.types import Neighbors, Origin
from adanpc.errors import AdaNPCError, EmptyBankError, LabelError, RowError
from adanpc.index import STORAGE, Found, Index, check_features, unit
from adanpc.index.blocks import Blocks
from adanpc.index.grid import Columns, tensor_of
from adanpc.index.protocol import FILE, Accounting, Coding, Finding, Kept

LARGEST = 2**53  # up to here every JSON reader keeps whole numbers exactly
WIDEST = 2**24  # the most dimensions, classes and neighbors
FEW = 16  # rows that are looked up one by one
MOST_PADDED = 4096  # results have k columns, however few rows there are, up to this k
BESIDE_ROWS = (  # the tensors of a state that have no value for each row
    "source_mean", "stream_total", "stream", *(PREFIX_OF_TRANSFORM + name for name in TRANSFORM)
)  # fmt: skip
SOURCE_GROUP, OTHER_GROUP = 1, 2  # the groups of rows in the index


class Pool(NamedTuple):
    """Some of the rows that vote for a query: the k nearest of a side of the bank."""

    k: int
    source: bool | None = None  # source rows only; False: all others only; None: all
    soft: bool = True  # with soft labels, which may be large, if the bank keeps them

    @property
    def group(self) -> int | None:
        """The group of the index to search; None searches all."""
        if self.source is None:
            return None
        return SOURCE_GROUP if self.source else OTHER_GROUP


class State(TypedDict):
    """All of a bank or a classifier in plain values: what is saved, pickled, copied and compared."""

    document: dict[str, Any]  # as JSON can hold it
    tensors: dict[str, Tensor]
    kept: NotRequired[Kept]  # what an index derived from the rows, and could make again


@dataclass(frozen=True)
class BankSettings:
    """The settings that belong to a bank's identity; see ``MemoryBank``."""

    dim: int
    classes: int
    storage: str = "float32"
    capacity: int | None = None
    evict: str = "fifo"
    soft: bool = False
    seed: int = 0
    names: tuple[str, ...] = ()  # of the classes, if they have any

    def __post_init__(self) -> None:
        for name in ("dim", "classes"):
            object.__setattr__(self, name, require.whole(name, getattr(self, name), least=1, most=WIDEST))
        if self.capacity is not None:
            object.__setattr__(self, "capacity", require.whole("capacity", self.capacity, least=1, most=LARGEST))
        object.__setattr__(self, "seed", require.whole("seed", self.seed, least=0, most=LARGEST))
        object.__setattr__(self, "soft", bool(self.soft))
        require.one_of("storage", self.storage, STORAGE)
        require.one_of("evict", self.evict, POLICIES)

    def arguments(self) -> dict[str, Any]:
        """The settings as keyword arguments of a bank, in values that JSON can hold."""
        arguments = asdict(self)
        names = list(arguments.pop("names"))
        if names:
            arguments["classes"] = names
        return arguments


@dataclass(frozen=True, eq=False)
class Contents:
    """Rows, their history and the statistics beside them. Nothing here ever changes.

    What a slot holds does not change while any contents show it: a row that is relabeled moves to another slot, and a
    slot is used again only when the last contents that show it are gone. So a reader needs no lock.
    """

    settings: BankSettings
    index: Index
    columns: Blocks  # label, domain, key, confidence, origin, and soft labels, by slot
    vetoed: Mapping[int, int]  # the slots of rows that may not vote, by id
    judgments: Mapping[int, tuple[Judgment, ...]]  # by id, for rows that were ever judged
    deleted: frozenset[int]  # ids of rows that may never come back
    admitted: Tensor  # (C,) admitted rows that may vote, by class
    next_id: int
    position: int  # how many changes led here
    statistics: Statistics

    def __len__(self) -> int:
        """How many rows are held, vetoed ones included."""
        return self.index.count + len(self.vetoed)

    def __repr__(self) -> str:
        return f"<Contents at position {self.position}: {self.summary}>"

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use."""
        return self.index.nbytes + self.index.slots * self.columns.slot_bytes

    def memory(self, slots: int) -> dict[str, int]:
        """Bytes that so many slots need, by what they are for; see ``MemoryBank.memory``."""
        index = self.index
        if isinstance(index, Accounting):
            parts = index.memory(slots)
        else:
            parts = {"rows": slots * -(-index.nbytes // max(index.slots, 1))}
        parts["labels and the like"] = slots * self.columns.slot_bytes
        return {**parts, "total": sum(parts.values()) - parts.get(FILE, 0)}

    @property
    def summary(self) -> str:
        """How many rows there are, and of what kinds."""
        return f"{len(self)} rows, {int(self.admitted.sum())} admitted, {len(self.vetoed)} vetoed"

    def search(self, queries: Tensor, k: int, exclude: Tensor | None, source: bool | None) -> Neighbors:
        """See ``MemoryBank.search``."""
        require.whole("k", k, least=1)
        checked = check_features(queries, self.settings.dim).to(self.index.device)
        return self.nearest(unit(checked), k, excluded_ids(exclude, len(checked)), source)

    def nearest(
        self,
        queries: Tensor,
        k: int,
        exclude: Tensor | None = None,
        source: bool | None = None,
        *,
        with_soft: bool = True,
    ) -> Neighbors:
        """``search`` for queries that ``unit`` returned; soft labels, which may be large, only if they are wanted."""
        return self.nearest_of(queries, [Pool(k, source, with_soft)], exclude)[0]

    def nearest_of(self, queries: Tensor, pools: Sequence[Pool], exclude: Tensor | None = None) -> list[Neighbors]:
        """What ``nearest`` finds in each pool, in one search.

        Args:
            queries: (B, D) as ``unit`` returned them.
            pools: in which to search. Rows are read once for all of them.
            exclude: (B, E) ids that may not vote for that query.
        """
        found = self.index.search_groups(queries, [(pool.k, pool.group) for pool in pools], exclude=exclude)
        return [self._neighbors(near, pool) for near, pool in zip(found, pools, strict=True)]

    def _neighbors(self, found: Found, pool: Pool) -> Neighbors:
        """What the index found, with labels."""
        names = ["label"]
        if self.settings.soft and pool.soft:
            names.append("soft")
        slots = found.slots
        complete = found.complete
        if not complete:
            slots = slots.clamp(min=0)  # where a neighbor is absent, that of slot 0 is read, and masked below
        columns = self.columns.take(slots, *names)
        near = Neighbors(found.ids, found.similarity, columns["label"], columns.get("soft"))
        if not complete:
            near = near.without(found.slots < 0)
        # An absurd k, which a file may hold, must not cost more than the rows that there are.
        width = min(pool.k, max(MOST_PADDED, len(self)))
        return near.padded(width)

    def held_slots(self) -> Tensor:
        """The slots (n,) of all rows, in the order of their ids."""
        vetoed = torch.tensor(list(self.vetoed.values()), dtype=torch.int64, device=self.index.device)
        slots = torch.cat([self.index.visible, vetoed])
        return slots[self.index.ids(slots).argsort()]

    def slots_of(self, ids: Tensor) -> Tensor:
        """The slots (n,) of these rows; a RowError names the first that is not held."""
        if len(ids) <= FEW and isinstance(self.index, Finding) and self.index.device.type == "cpu":
            found = self._few_slots(ids.tolist(), self.index)
            if -1 not in found:
                return torch.tensor(found, dtype=torch.int64)
        slots = self.held_slots()
        known = self.index.ids(slots)
        position = torch.searchsorted(known, ids)
        known_or_end = torch.cat([known, known.new_full((1,), -1)])  # searchsorted may return len(known)
        missing = ids[(known_or_end[position] != ids) | (ids < 0)]
        if len(missing):
            row = int(missing[0])
            fate = "it never existed"
            if 0 <= row < self.next_id:
                fate = "it has left"
            raise RowError(f"row {row} is not in the bank: {fate}")
        return slots[position]

    def _few_slots(self, ids: list[int], index: Finding) -> list[int]:
        """The slots of these rows, without all ids being sorted; -1 for those that are not held."""
        active = [row for row in ids if row not in self.vetoed]
        found = dict(zip(active, index.find(active), strict=True))
        return [found.get(row, self.vetoed.get(row, -1)) for row in ids]

    def rows(self, ids: Tensor) -> Tensor:
        """The stored unit rows of these ids, (n, D) float32."""
        return self.index.rows(self.slots_of(ids.to(self.index.device)))

    def table(self, *names: str) -> Columns:
        """The named columns, or all with the encoded rows, of all held rows in the order of ids."""
        return self.table_of(self.held_slots(), *names)

    def table_of(self, slots: Tensor, *names: str) -> Columns:
        """The table of the rows in these slots (n,)."""
        wanted = names or ("id", "state", *self.columns.kinds)
        stored = [name for name in wanted if name in self.columns.kinds]
        known = {}
        if stored:
            known = self.columns.take(slots, *stored)
        known["id"] = self.index.ids(slots)
        known["state"] = torch.full_like(known["id"], ACTIVE, dtype=torch.uint8)
        if self.vetoed:
            vetoed = torch.tensor(list(self.vetoed), dtype=torch.int64, device=slots.device)
            known["state"][torch.isin(known["id"], vetoed)] = VETOED
        table = {name: known[name] for name in wanted}
        if not names:
            table |= self.index.state(slots)
        return table

    def check(self) -> None:
        """Refuses contents whose parts contradict each other, as only forged changes could leave them."""
        held = set(self.index.ids(self.held_slots()).tolist())
        check_judgments(self.judgments, held, set(self.vetoed), self.settings.classes)
        admitted = int(self.admitted.sum())
        capacity = self.settings.capacity
        if capacity is not None and admitted > capacity:
            raise TableError(f"it holds {admitted} admitted rows, more than its capacity of {capacity}")
        if self.statistics.stream_count and self.statistics.stream_total is None:
            raise TableError("it counts the queries of a stream but has no sum of them")

    def transform(self) -> Transform:
        """What the preset "safe" has learned of the source features."""
        transform = self.statistics.transform
        if transform is None:
            raise EmptyBankError("no row of the bank may vote: learn source rows first")
        return transform

    def stream(self) -> Stream:
        """What the preset "safe" knows of the stream so far, once source rows have been learned."""
        transform = self.transform()
        packed = self.statistics.stream
        if packed is None:
            return Stream.none(transform.origin, self.settings.classes)
        return Stream.unpacked(packed, self.settings.dim, self.settings.classes)

    def calibration(self) -> Calibration:
        """How errors and agreement go together on the source of the preset "safe"."""
        return Calibration.unpacked(self.transform().calibration)

    def queue(self) -> Eviction | None:
        """The admitted rows that may vote in the order in which they leave; None without a capacity."""
        if self.settings.capacity is None:
            return None
        queue = Eviction(self.settings.evict, self.settings.capacity, self.settings.seed)
        table = self.table_of(self.index.visible, "id", "label", "origin")
        admitted = table["origin"] == Origin.ADMITTED
        for row, label in zip(table["id"][admitted].tolist(), table["label"][admitted].tolist(), strict=True):
            queue.add(row, label)
        return queue

    def state(self, *, codes: bool = False) -> State:
        """All of it, in tensors of its own and plain values; with the codes of an index that has any, if wanted."""
        statistics = self.statistics.to(self.index.device)  # copies, which the caller may change
        document = {
            "bank": self.settings.arguments(),
            "next_id": self.next_id,
            "position": self.position,
            "judgments": judgments_to_json(self.judgments),
            "deleted": sorted(self.deleted),
            "stream_count": statistics.stream_count,
        }
        tensors = dict(self.table())
        if statistics.source_mean is not None:
            tensors["source_mean"] = statistics.source_mean
        if statistics.stream_total is not None:
            tensors["stream_total"] = statistics.stream_total
        if statistics.transform is not None:
            tensors |= transform_tensors(statistics.transform)
        if statistics.stream is not None:
            tensors["stream"] = statistics.stream
        state: State = {"document": document, "tensors": tensors}
        if codes and isinstance(self.index, Coding):
            state["kept"] = Kept(self.index.codes(self.held_slots()))
        return state


def excluded_ids(given: Any, queries: int) -> Tensor | None:
    """Ids (B, E) that may not vote for each of so many queries, if there are any."""
    if given is None:
        return None
    wanted = f"exclude must be whole numbers of shape ({queries}, E), ids for each query"
    try:
        ids = tensor_of(given)
    except (TypeError, ValueError, RuntimeError):
        raise AdaNPCError(f"{wanted}, got {brief(given)}") from None
    if ids.ndim != 2 or len(ids) != queries or ids.is_floating_point():
        raise AdaNPCError(f"{wanted}, got {ids.dtype} of shape {tuple(ids.shape)}")
    return ids


def class_names(classes: Any) -> tuple[str, ...]:
    """The names of classes that were given by name; none if there is only their number."""
    if isinstance(classes, str | bytes) or not isinstance(classes, Iterable):
        return ()
    names = []
    for name in classes:
        names.append(str(require.text("each of the classes", name)))
    if len(set(names)) < len(names):
        repeated = max(names, key=names.count)
        raise LabelError(f"classes must have different names, got {repeated!r} more than once")
    return tuple(names)


def digest_of(state: State) -> str:
    """A hash of all that decides later answers: of everything but the number of changes that led here."""
    document = dict(state["document"])
    document.pop("position", None)
    hasher = hashlib.sha256(canonical(document).encode())
    for name, tensor in sorted(state["tensors"].items()):
        kind = canonical([name, NAMES[tensor.dtype], list(tensor.shape)])
        hasher.update(kind.encode())
        array: Any = tensor.cpu().contiguous().numpy()
        hasher.update(array)
    return hasher.hexdigest()
