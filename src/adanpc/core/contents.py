"""Contents: everything a bank holds at one moment, as a value that readers can keep while the bank goes on changing."""

from __future__ import annotations

import hashlib
import math
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
from adanpc.index.protocol import AHEAD, FILE, Accounting, Coding, Finding, Kept, Multiplying, Products

LARGEST = 2**53  # up to here every JSON reader keeps whole numbers exactly
WIDEST = 2**24  # the most dimensions, classes and neighbors
FEW = 16  # up to this many rows are looked up one by one
MOST_PADDED = 4096  # up to this k, results have k columns even if there are fewer rows
BESIDE_ROWS = (  # the tensors of a state that are not columns of rows
    "source_mean", "stream_total", "stream", *(PREFIX_OF_TRANSFORM + name for name in TRANSFORM)
)  # fmt: skip
SOURCE_GROUP, OTHER_GROUP = 1, 2  # the groups of rows in the index


class Pool(NamedTuple):
    """A request for neighbors: the k nearest of all rows, of the source rows, or of all other rows."""

    k: int
    source: bool | None = None  # True for source rows only, False for all other rows only, None for all rows
    soft: bool = True  # whether to return soft labels, which may be large, if the bank keeps them

    @property
    def group(self) -> int | None:
        """The group of the index to search; None to search all."""
        if self.source is None:
            return None
        if self.source:
            return SOURCE_GROUP
        return OTHER_GROUP


class State(TypedDict):
    """A whole bank or classifier in plain values, to be saved, pickled, copied or compared."""

    document: dict[str, Any]  # values that JSON can hold
    tensors: dict[str, Tensor]
    kept: NotRequired[Kept]  # what an index derived from the rows, and could make again


@dataclass(frozen=True)
class BankSettings:
    """The settings that are saved with a bank and enter its digest; see ``MemoryBank``."""

    dim: int
    classes: int
    storage: str = "float32"
    capacity: int | None = None
    evict: str = "fifo"
    soft: bool = False
    seed: int = 0
    names: tuple[str, ...] = ()  # of the classes, if they have any

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "dim": require.whole("dim", self.dim, least=1, most=WIDEST),
            "classes": require.whole("classes", self.classes, least=1, most=WIDEST),
        }
        if self.capacity is not None:
            checked["capacity"] = require.whole("capacity", self.capacity, least=1, most=LARGEST)
        checked["seed"] = require.whole("seed", self.seed, least=0, most=LARGEST)
        checked["soft"] = bool(self.soft)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        require.one_of("storage", self.storage, STORAGE)
        require.one_of("evict", self.evict, POLICIES)

    def arguments(self) -> dict[str, Any]:
        """The settings as keyword arguments of ``MemoryBank``, in values that JSON can hold."""
        arguments = asdict(self)
        names = list(arguments.pop("names"))
        if names:
            arguments["classes"] = names
        return arguments


@dataclass(frozen=True, eq=False)
class Contents:
    """Rows, their history, and the statistics of source and stream. Nothing here ever changes.

    A reader needs no lock, because a slot stays as it is while any contents show it: a row that is relabeled moves to
    another slot, and a slot is used again only after the last contents that show it are gone.
    """

    settings: BankSettings
    index: Index  # the features, by slot
    columns: Blocks  # label, domain, key, confidence, origin, and soft labels, by slot
    vetoed: Mapping[int, int]  # the slot of each row that may not vote, by id
    judgments: Mapping[int, tuple[Judgment, ...]]  # what people decided, by id, for rows that were ever judged
    deleted: frozenset[int]  # ids of rows that may never come back
    admitted: Tensor  # (C,) int64, how many admitted rows of each class may vote
    next_id: int
    position: int  # how many changes were applied to get here
    statistics: Statistics

    def __len__(self) -> int:
        """How many rows are held, vetoed ones included."""
        return self.index.count + len(self.vetoed)

    def __repr__(self) -> str:
        return f"<Contents at position {self.position}: {self.summary}>"

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use."""
        index = self.index
        return index.nbytes + index.slots * self.columns.slot_bytes

    def memory(self, slots: int) -> dict[str, int]:
        """Bytes that this many slots need, by purpose; see ``MemoryBank.memory``."""
        index = self.index
        if isinstance(index, Accounting):
            parts = index.memory(slots)
        else:
            slot_bytes = math.ceil(index.nbytes / max(index.slots, 1))
            parts = {"rows": slots * slot_bytes}
        parts["labels and the like"] = slots * self.columns.slot_bytes
        ahead = parts.get(AHEAD, 0) + self.columns.bytes_ahead(slots)
        if ahead:
            parts[AHEAD] = ahead
        in_memory = sum(parts.values()) - parts.get(FILE, 0)
        return {**parts, "total": in_memory}

    @property
    def summary(self) -> str:
        """How many rows there are, admitted and vetoed ones also counted apart."""
        admitted = int(self.admitted.sum())
        return f"{len(self)} rows, {admitted} admitted, {len(self.vetoed)} vetoed"

    def search(self, queries: Tensor, k: int, exclude: Tensor | None, source: bool | None) -> Neighbors:
        """See ``MemoryBank.search``."""
        require.whole("k", k, least=1)
        features = check_features(queries, self.settings.dim).to(self.index.device)
        excluded = excluded_ids(exclude, len(features))
        return self.nearest(unit(features), k, excluded, source)

    def nearest(
        self,
        queries: Tensor,
        k: int,
        exclude: Tensor | None = None,
        source: bool | None = None,
        *,
        with_soft: bool = True,
    ) -> Neighbors:
        """The result of ``search`` for queries that ``unit`` returned, with soft labels only if they are wanted."""
        pool = Pool(k, source, with_soft)
        return self.nearest_of(queries, [pool], exclude)[0]

    def nearest_of(
        self,
        queries: Tensor,
        pools: Sequence[Pool],
        exclude: Tensor | None = None,
        products: Products | None = None,
    ) -> list[Neighbors]:
        """The result of ``nearest`` for each pool, by one search that reads the rows once for all of them.

        Args:
            queries: (B, D) features as ``unit`` returned them.
            pools: which rows to search, and for how many.
            exclude: (B, E) ids of rows that may not vote for that query.
            products: of the index with vectors near whose span the queries lie, see ``products``.
        """
        wanted = [(pool.k, pool.group) for pool in pools]
        if products is None:
            results = self.index.search_groups(queries, wanted, exclude=exclude)
        else:
            results = products.search(queries, wanted, exclude=exclude)
        return [self._neighbors(found, pool) for found, pool in zip(results, pools, strict=True)]

    def products(self, vectors: Tensor) -> Products | None:
        """The products of all rows with vectors (J, D) at length one, for several searches near their span.

        None if the index does not keep products, or if nothing is gained by them.
        """
        if isinstance(self.index, Multiplying):
            return self.index.products(vectors)
        return None

    def _neighbors(self, found: Found, pool: Pool) -> Neighbors:
        """The rows that the index found, with their labels."""
        names = ["label"]
        if self.settings.soft and pool.soft:
            names.append("soft")
        slots = found.slots
        complete = found.complete
        if not complete:
            slots = slots.clamp(min=0)  # a missing neighbor, slot -1, reads slot 0; the result is masked below
        columns = self.columns.take(slots, *names)
        near = Neighbors(found.ids, found.similarity, columns["label"], columns.get("soft"))
        if not complete:
            near = near.without(found.slots < 0)
        # A file may hold an absurdly large k; it must not cost more memory than the rows themselves would.
        width = min(pool.k, max(MOST_PADDED, len(self)))
        return near.padded(width)

    def held_slots(self) -> Tensor:
        """The slots (n,) of all rows, vetoed ones included, in the order of their ids."""
        index = self.index
        vetoed = torch.tensor(list(self.vetoed.values()), dtype=torch.int64, device=index.device)
        slots = torch.cat([index.visible, vetoed])
        order = index.ids(slots).argsort()
        return slots[order]

    def slots_of(self, ids: Tensor) -> Tensor:
        """The slots (n,) of the rows with these ids; raises a RowError that names the first one that is not held."""
        if len(ids) <= FEW and isinstance(self.index, Finding) and self.index.device.type == "cpu":
            found = self._few_slots(ids.tolist(), self.index)
            if -1 not in found:
                return torch.tensor(found, dtype=torch.int64)
        slots = self.held_slots()
        known = self.index.ids(slots)
        position = torch.searchsorted(known, ids)
        # An id larger than all known ones gets position len(known), for which an id is added that no row has.
        known_or_none = torch.cat([known, known.new_full((1,), -1)])
        missing = ids[(known_or_none[position] != ids) | (ids < 0)]
        if len(missing):
            row = int(missing[0])
            fate = "it never existed"
            if 0 <= row < self.next_id:
                fate = "it has left"
            raise RowError(f"row {row} is not in the bank: {fate}")
        return slots[position]

    def _few_slots(self, ids: list[int], index: Finding) -> list[int]:
        """The slots of the rows with these ids, found without sorting all ids; -1 for rows that are not held."""
        active = [row for row in ids if row not in self.vetoed]
        slot_of = dict(zip(active, index.find(active), strict=True))
        for row in ids:
            if row in self.vetoed:
                slot_of[row] = self.vetoed[row]
        return [slot_of[row] for row in ids]

    def rows(self, ids: Tensor) -> Tensor:
        """The stored unit rows with these ids, (n, D) float32."""
        slots = self.slots_of(ids.to(self.index.device))
        return self.index.rows(slots)

    def table(self, *names: str) -> Columns:
        """The named columns of all rows, ordered by id; without names, all columns and the encoded rows."""
        return self.table_of(self.held_slots(), *names)

    def table_of(self, slots: Tensor, *names: str) -> Columns:
        """The same as ``table``, for the rows in these slots (n,) and in their order."""
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
        """Raises a TableError if parts of the contents contradict each other, which only forged changes can cause."""
        held = set(self.index.ids(self.held_slots()).tolist())
        check_judgments(self.judgments, held, set(self.vetoed), self.settings.classes)
        admitted = int(self.admitted.sum())
        capacity = self.settings.capacity
        if capacity is not None and admitted > capacity:
            raise TableError(f"it holds {admitted} admitted rows, more than its capacity of {capacity}")
        if self.statistics.stream_count and self.statistics.stream_total is None:
            raise TableError("it counts the queries of a stream but has no sum of them")

    def transform(self) -> Transform:
        """The transform that the preset "safe" has fitted to the source features."""
        transform = self.statistics.transform
        if transform is None:
            raise EmptyBankError("no row of the bank may vote: learn source rows first")
        return transform

    def stream(self) -> Stream:
        """What the preset "safe" knows about the stream so far; source rows must have been learned."""
        transform = self.transform()
        packed = self.statistics.stream
        if packed is None:
            return Stream.none(transform.origin, self.settings.classes)
        return Stream.unpacked(packed, self.settings.dim, self.settings.classes)

    def calibration(self) -> Calibration:
        """How errors and agreement are related on the source rows, as the preset "safe" has measured it."""
        return Calibration.unpacked(self.transform().calibration)

    def queue(self) -> Eviction | None:
        """The admitted rows that may vote, in the order in which they will leave; None without a capacity."""
        if self.settings.capacity is None:
            return None
        queue = Eviction(self.settings.evict, self.settings.capacity, self.settings.seed)
        table = self.table_of(self.index.visible, "id", "label", "origin")
        admitted = table["origin"] == Origin.ADMITTED
        ids = table["id"][admitted].tolist()
        labels = table["label"][admitted].tolist()
        for row, label in zip(ids, labels, strict=True):
            queue.add(row, label)
        return queue

    def state(self, *, codes: bool = False) -> State:
        """The contents in plain values, all of them copies that the caller may change.

        Args:
            codes: True to include the codes of an index that has any.
        """
        statistics = self.statistics.to(self.index.device)  # copies
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
            made = self.index.codes(self.held_slots())
            if made:
                state["kept"] = Kept(made)
        return state


def excluded_ids(given: Any, queries: int) -> Tensor | None:
    """The argument ``exclude`` as a tensor (B, E) for ``queries`` queries; None if there is none."""
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
    """The names of the classes; empty if only their number is given."""
    if isinstance(classes, str | bytes):
        raise LabelError(f"classes must be a whole number or a list of names, got {classes!r}")
    if not isinstance(classes, Iterable):
        return ()
    names = []
    for name in classes:
        names.append(str(require.text("each of the classes", name)))
    if len(set(names)) < len(names):
        repeated = max(names, key=names.count)
        raise LabelError(f"classes must have different names, got {repeated!r} more than once")
    return tuple(names)


def digest_of(state: State) -> str:
    """A hash of everything that decides later answers, so of all but the number of changes that were applied."""
    document = dict(state["document"])
    document.pop("position", None)
    hasher = hashlib.sha256(canonical(document).encode())
    for name, tensor in sorted(state["tensors"].items()):
        header = canonical([name, NAMES[tensor.dtype], list(tensor.shape)])
        hasher.update(header.encode())
        array: Any = tensor.cpu().contiguous().numpy()
        hasher.update(array)
    return hasher.hexdigest()
