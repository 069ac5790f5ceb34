"""MemoryBank: (feature, label) rows, exact nearest-neighbor search, and changes as values."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from reprlib import repr as brief
from threading import RLock
from typing import Any
from weakref import ReferenceType, ref

import numpy
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from adanpc import require
from adanpc.core.arrivals import columns_of, with_whole_numbers
from adanpc.core.centering import Statistics
from adanpc.core.changes import (
    Append,
    Change,
    Delete,
    Feedback,
    Judgment,
    Relabel,
    Restore,
    Rollback,
    Veto,
)
from adanpc.core.codec import judgments_from_json, take_transform
from adanpc.core.contents import (
    OTHER_GROUP,
    SOURCE_GROUP,
    BankSettings,
    Contents,
    State,
    class_names,
    digest_of,
)
from adanpc.core.eviction import Eviction
from adanpc.core.export import knn_graph, to_pandas
from adanpc.core.guard import completed
from adanpc.core.ledger import Ledger
from adanpc.core.table import (
    ACTIVE,
    DECIDING,
    check_kinds,
    check_mean,
    check_rows,
    check_stream,
    check_transform,
    pairs,
)
from adanpc.core.types import Neighbors, Origin, with_fields
from adanpc.errors import AdaNPCError, ChangeError, LabelError, RowError
from adanpc.index import ApproximateIndex, Index, check_features, index_for, unit
from adanpc.index.blocks import Blocks, Kind
from adanpc.index.grid import Columns, to_main_memory

IndexFactory = Callable[[int, str, torch.device], Index]
ADMITTED = int(Origin.ADMITTED)  # as a plain number, which torch compares faster
GROUP_OF_ORIGIN = numpy.full(max(Origin) + 1, OTHER_GROUP, numpy.uint8)
GROUP_OF_ORIGIN[Origin.SOURCE] = SOURCE_GROUP


@require.names_its_arguments
class MemoryBank:
    """Unit rows with labels, searched exactly and changed only by ``apply``.

    Any number of threads may read while one changes it: readers see the bank as it was before a change or after it,
    never in between, and an interruption leaves it as it was before.

    Args:
        dim: length of a feature vector.
        classes: number of classes, or their names; labels are 0 … classes - 1.
        storage: ``float32``; ``float16``, half the memory; ``int8``, the memory of float16 and the fastest search of
            few rows: one byte a coordinate finds candidates, a second one re-ranks them at 16 bits; or
            ``progressive``, for 20,000 rows and more: float16, and codes that take a third of its memory and by which
            a search reads a few bits of most rows. It may miss a neighbor with a probability below 2e-6 for each
            query of k = 50; see ``adanpc.index.ProgressiveIndex``, which can also keep rows in a file.
        capacity: the most admitted rows that may vote; source, expert and vetoed rows always stay and do not count.
        evict: who leaves a full bank: ``fifo``, ``balanced`` (oldest of the largest class) or ``reservoir``.
        soft: rows keep class probabilities beside their label.
        seed: of the ranks by which ``reservoir`` chooses; by default drawn at random, so that nobody can foresee which
            rows will stay.
        device: any torch device with float64.
        max_memory: the most bytes that the bank may need, as ``memory`` counts them; a change that would need more is
            refused, and nothing has happened. It is not saved.
        index: makes what stores and searches the rows, from dim, storage and device; or, for an approximate search,
            "faiss:" and a factory string of faiss, such as "faiss:IVF1024,SQ8"; see ``adanpc.index.ApproximateIndex``.
    """

    @torch.inference_mode(False)  # what is allocated here must stay writable outside of it
    def __init__(
        self,
        dim: int,
        classes: int | Sequence[str],
        *,
        storage: str = "float32",
        capacity: int | None = None,
        evict: str = "fifo",
        soft: bool = False,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        max_memory: int | None = None,
        index: IndexFactory | str = index_for,
    ) -> None:
        if seed is None:
            seed = secrets.randbits(53) if evict == "reservoir" else 0  # every JSON reader keeps 53 bits
        names = class_names(classes)
        count: Any = len(names) if names else classes
        settings = BankSettings(dim, count, storage, capacity, evict, soft, seed, names)
        self.device = checked_device(device)
        self._make_index = _index_factory(index)
        self._max_memory = max_memory
        if max_memory is not None:
            self._max_memory = require.whole("max_memory", max_memory, least=1)
        self._lock = RLock()
        self._ledger: Ledger | None = None  # made of the contents when it is needed
        self._version = 0
        self._published: list[tuple[int, ReferenceType[Contents]]] = []  # versions that may still be read
        self._slots_used = 0  # the most of any version so far; slots below may still have readers
        self._publish(self._empty(settings))

    def _empty(self, settings: BankSettings) -> Contents:
        kinds: dict[str, Kind] = {
            "label": ((), torch.int64),
            "domain": ((), torch.int64),
            "key": ((), torch.int64),
            "confidence": ((), torch.float32),
            "origin": ((), torch.uint8),
        }
        if settings.soft:
            kinds["soft"] = ((settings.classes,), torch.float32)
        return Contents(
            settings=settings,
            index=self._make_index(settings.dim, settings.storage, self.device),
            columns=Blocks(kinds, self.device),
            vetoed={},
            judgments={},
            deleted=frozenset(),
            admitted=torch.zeros(settings.classes, dtype=torch.int64, device=self.device),
            next_id=0,
            position=0,
            statistics=Statistics(),
        )

    # What it is

    @property
    def contents(self) -> Contents:
        """All that the bank holds now, as a value that later changes do not touch."""
        return self._contents

    @property
    def settings(self) -> BankSettings:
        """The settings that belong to the bank's identity."""
        return self._contents.settings

    @property
    def dim(self) -> int:
        """Length of a feature vector."""
        return self.settings.dim

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.settings.classes

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes; empty if they have none."""
        return self.settings.names

    @property
    def soft(self) -> bool:
        """Whether rows keep class probabilities."""
        return self.settings.soft

    @property
    def capacity(self) -> int | None:
        """The most admitted rows that may vote."""
        return self.settings.capacity

    def config(self) -> dict[str, Any]:
        """The settings as keyword arguments of another bank."""
        return self.settings.arguments()

    @property
    def position(self) -> int:
        """How many changes have been applied."""
        return self._contents.position

    @property
    def next_id(self) -> int:
        """The id that the next row will get."""
        return self._contents.next_id

    @property
    def admitted(self) -> Tensor:
        """Admitted rows that may vote, by class (C,)."""
        return self._contents.admitted

    @property
    def vetoes(self) -> dict[int, Judgment]:
        """The rows that may not vote, each with who vetoed it, why and when."""
        contents = self._contents
        vetoes = {}
        for row in sorted(contents.vetoed):
            vetoes[row] = [judgment for judgment in contents.judgments[row] if judgment.verdict == "veto"][-1]
        return vetoes

    def history(self, row: int) -> tuple[Judgment, ...]:
        """What people decided about a row, oldest first."""
        contents = self._contents
        if not 0 <= row < contents.next_id:
            raise RowError(f"row {row} is not in the bank: it never existed")
        self._slots(contents, [row])  # refuses a row that has left
        return contents.judgments.get(row, ())

    def __len__(self) -> int:
        """How many rows are held, vetoed ones included."""
        return len(self._contents)

    def __repr__(self) -> str:
        contents = self._contents
        settings = ", ".join(f"{name}={brief(value)}" for name, value in contents.settings.arguments().items())
        return f"<MemoryBank of {contents.summary}: {settings}>"

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use."""
        return self._contents.nbytes

    def memory(self) -> dict[str, int]:
        """Bytes of the slots in use, by what they are for; the total is of those in memory, without a file's.

        Vetoes, judgments and the order of evictions are not counted: they are Python's, a few hundred bytes each.
        """
        return self._contents.memory(self._contents.index.slots)

    # Reading

    def search(
        self, queries: Tensor, k: int, *, exclude: Tensor | None = None, source: bool | None = None
    ) -> Neighbors:
        """The k most similar rows of each query (B, D); changes nothing.

        Args:
            queries: of any length but zero.
            k: at least 1.
            exclude: (B, E) ids that may not vote for that query, such as the query's own row.
            source: True for source rows only, False for all others only.
        """
        return self._contents.search(queries, k, exclude, source)

    def rows(self, ids: Tensor) -> Tensor:
        """The stored unit rows of these ids, (n, D) float32."""
        return self._contents.rows(ids)

    def stored(self, queries: Tensor) -> Tensor:
        """What ``unit`` queries are read back as once they are appended, (B, D) float32."""
        return self._contents.index.stored(queries)

    def table(self, *names: str) -> Columns:
        """The named columns, or all with the encoded rows, of all held rows in the order of ids."""
        return self._contents.table(*names)

    def digest(self) -> str:
        """A hash of settings, rows, their history and statistics: equal digests mean equal banks."""
        return digest_of(self._contents.state())

    def state(self) -> State:
        """All of the bank in plain values; ``MemoryBank.load`` makes it again."""
        return self._contents.state()

    @classmethod
    def load(
        cls, state: State, *, device: torch.device | str = "cpu", index: IndexFactory | str = index_for
    ) -> MemoryBank:
        """The bank that ``state`` described. Files are checked by ``store`` before they come here."""
        document = state["document"]
        bank = cls(**document["bank"], device=device, index=index)
        bank._load_state(state)
        return bank

    @torch.inference_mode(False)
    def _load_state(self, state: State) -> None:
        document = state["document"]
        tensors = {name: tensor.to(self.device) for name, tensor in state["tensors"].items()}
        mean = tensors.pop("source_mean", None)
        total = tensors.pop("stream_total", None)
        stream = tensors.pop("stream", None)
        transform = take_transform(tensors)
        statistics = Statistics(mean, total, document["stream_count"], transform, stream).to(self.device)
        contents = self._with_rows(
            self._contents,
            self._take_ledger(),
            tensors,
            judgments=judgments_from_json(document["judgments"]),
            deleted=frozenset(document["deleted"]),
            next_id=document["next_id"],
            position=document["position"],
            statistics=statistics,
        )
        self._publish(contents)

    def __getstate__(self) -> dict[str, Any]:
        """What pickles and copies hold: the rows in use, not the slots that are reserved.

        Arrays rather than tensors: torch would send a tensor to another process as a piece of shared memory.
        """
        state = self.state()
        arrays = {name: tensor.cpu().numpy() for name, tensor in state["tensors"].items()}
        return {
            "document": state["document"],
            "arrays": arrays,
            "device": str(self.device),
            "max_memory": self._max_memory,
            "index": self._make_index,
        }

    def __setstate__(self, saved: Mapping[str, Any]) -> None:
        document = saved["document"]
        self.__init__(  # type: ignore[misc]
            **document["bank"], device=saved["device"], max_memory=saved["max_memory"], index=saved["index"]
        )
        tensors = {name: torch.from_numpy(array) for name, array in saved["arrays"].items()}
        self._load_state({"document": document, "tensors": tensors})

    # Changing

    def apply(
        self, change: Change, *, rows: Tensor | None = None, log: Callable[[Change], object] | None = None
    ) -> range:
        """Carries out one change, whole or not at all; the ids that it gave to the rows it appended.

        Args:
            change: to be carried out.
            rows: the features of an ``Append`` normalized by ``unit``, if the caller has them; otherwise computed here.
            log: called once the change is known to be valid, before readers see it. If it raises, the change is
                abandoned.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # what is allocated here must stay writable outside of it
                return self._apply(change, rows, log)
        return self._apply(change, rows, log)

    def _apply(self, change: Change, rows: Tensor | None, log: Callable[[Change], object] | None) -> range:
        with self._lock:
            before = self._contents
            # The ledger is derived from the contents and altered below. It is detached first: if anything interrupts
            # the change, it is dropped, and made again from the contents, which are published by one assignment.
            ledger = self._take_ledger()
            after = self._changed(change, rows, ledger)
            if log is not None:
                log(change)
            self._publish(with_fields(after, position=before.position + 1))
            self._ledger = ledger
            return range(before.next_id, after.next_id)

    def writing(self) -> AbstractContextManager[Any]:
        """The lock that a change takes: its holder can look and then change, with no other change in between."""
        return self._lock

    def queue_of(self, contents: Contents) -> Eviction | None:
        """A queue of these contents' admitted rows to simulate evictions with; None without a capacity."""
        with self._lock:
            ledger = self._ledger
            if contents is self._contents and ledger is not None and ledger.queue is not None:
                return ledger.queue.copy()
        return contents.queue()

    def revert(self, contents: Contents) -> None:
        """Puts contents that this bank had before, or those of a bank with the same settings, in place of its own.

        It takes constant time and is not recorded as a change: for callers that only tried something, or that start
        again. Afterward both banks share memory, so do not change the other one.
        """
        with self._lock:
            self._ledger = None
            if contents.columns is not self._contents.columns:
                self._slots_used = contents.index.slots
            # Hiding nothing copies what tells which slots are in use: later versions may have extended it in place.
            nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
            self._publish(with_fields(contents, index=contents.index.hide(nothing)))

    def _publish(self, contents: Contents) -> None:
        self._version += 1
        self._published.append((self._version, ref(contents)))
        self._slots_used = max(self._slots_used, contents.index.slots)
        self._contents = contents

    def _take_ledger(self) -> Ledger:
        ledger = self._ledger
        self._ledger = None
        if ledger is None:
            ledger = Ledger(self._contents, self._version, self._slots_used)
        self._published = [(version, contents) for version, contents in self._published if contents() is not None]
        ledger.reclaim([version for version, _ in self._published])
        return ledger

    def _changed(self, change: Change, rows: Tensor | None, ledger: Ledger) -> Contents:
        """The contents after a change."""
        contents = self._contents
        match change:
            case Append():
                return self._append(contents, ledger, change, rows)
            case Veto():
                return self._veto(contents, ledger, change)
            case Restore():
                return self._restore(contents, ledger, change)
            case Relabel():
                return self._relabel(contents, ledger, change)
            case Delete():
                ids = sorted(set(change.ids))
                self._slots(contents, ids)  # refuses rows that are not there
                without = self._without(contents, ledger, ids)
                return with_fields(without, deleted=contents.deleted.union(ids))
            case Feedback():
                return self._judge_answers(contents, change)
            case Rollback():
                return self._roll_back(contents, ledger, change)
            case _:
                kinds = "an Append, Veto, Restore, Relabel, Delete, Feedback or Rollback"
                raise ChangeError(f"a change must be {kinds}, got a {type(change).__name__}")

    def _append(self, contents: Contents, ledger: Ledger, change: Append, rows: Tensor | None) -> Contents:
        table = self._checked(change, rows)
        if change.source_mean is not None:
            check_mean("source_mean", change.source_mean, self.dim)
        if change.observed is not None:
            check_mean("observed total", change.observed.total, self.dim)
        if change.transform is not None:
            check_transform(change.transform, self.dim)
        if change.stream is not None:
            change = replace(change, stream=self._checked_stream(change.stream))
        first = contents.next_id
        count = len(table["label"])
        table["id"] = torch.from_numpy(numpy.arange(first, first + count)).to(self.device)
        statistics = contents.statistics.after(change)
        if change.origin == Origin.ADMITTED and ledger.queue is not None:
            leaving = [ledger.queue.push(row, label)[0] for row, label in pairs(table)]
            evicted_on_arrival = [row - first for row in leaving if row >= first]
            if evicted_on_arrival:
                stays = torch.ones(count, dtype=torch.bool, device=self.device)
                stays[evicted_on_arrival] = False
                table = {name: column[stays] for name, column in table.items()}
            evicted = [row for row in leaving if 0 <= row < first]  # push returns -1 where nobody leaves
            contents = self._without(contents, ledger, evicted, queued=False)
        return self._with_rows(contents, ledger, table, next_id=first + count, statistics=statistics)

    def _checked_stream(self, packed: Tensor) -> Tensor:
        """What a change says of the stream, if it can be believed; a log may hold what an earlier version packed."""
        packed = completed(packed, self.dim, self.classes)
        check_stream(packed, self.dim, self.classes)
        return packed

    def _veto(self, contents: Contents, ledger: Ledger, change: Veto) -> Contents:
        slots = self._slots(contents, change.ids)
        judgments = _judged(contents, slots, "veto", change)
        newly_vetoed = [row for row in dict.fromkeys(change.ids) if row not in contents.vetoed]
        their_slots = self._slots(contents, newly_vetoed)
        table = contents.table_of(their_slots, *DECIDING)
        ledger.leave_queue(table)
        vetoed = {**contents.vetoed, **dict(zip(newly_vetoed, their_slots.tolist(), strict=True))}
        return with_fields(
            contents,
            index=contents.index.hide(their_slots),
            vetoed=vetoed,
            judgments=judgments,
            admitted=_recounted(contents.admitted, table, -1),
        )

    def _restore(self, contents: Contents, ledger: Ledger, change: Restore) -> Contents:
        slots = self._slots(contents, change.ids)
        judgments = _judged(contents, slots, "restore", change)
        returning = [row for row in dict.fromkeys(change.ids) if row in contents.vetoed]
        slots_returning = self._slots(contents, returning)
        table = contents.table_of(slots_returning, *DECIDING)
        ledger.enter_queue(table)
        contents = with_fields(
            contents,
            index=contents.index.show(slots_returning, _groups(table)),
            vetoed={row: slot for row, slot in contents.vetoed.items() if row not in returning},
            judgments=judgments,
            admitted=_recounted(contents.admitted, table),
        )
        if ledger.queue is None:
            return contents
        # Rows come back within the capacity: others leave for them, and they themselves only if there are none.
        return self._without(contents, ledger, ledger.queue.overflow(set(returning)), queued=False)

    def _relabel(self, contents: Contents, ledger: Ledger, change: Relabel) -> Contents:
        stated = change.label
        if isinstance(stated, int):
            stated = (stated,)
        for label in stated:
            if not 0 <= label < self.classes:
                raise LabelError(f"labels must be between 0 and {self.classes - 1}, got {label}")
        labels = change.labels
        slots = self._slots(contents, sorted(labels))
        judgments = _judged(contents, slots, "relabel", change)
        table = contents.table_of(slots)  # a copy
        new_labels = [labels[row] for row in table["id"].tolist()]
        table["label"][:] = torch.tensor(new_labels, dtype=torch.int64)
        table["origin"][table["origin"] == Origin.ADMITTED] = Origin.EXPERT
        if self.soft:
            table["soft"] = one_hot(table["label"], self.classes).float()
        return with_fields(self._replaced(contents, ledger, table), judgments=judgments)

    def _judge_answers(self, contents: Contents, change: Feedback) -> Contents:
        for label in (change.label, change.frozen, change.adapted):
            if not 0 <= label < self.classes:
                raise LabelError(f"labels must be between 0 and {self.classes - 1}, got {label}")
        if contents.statistics.transform is None:
            raise ChangeError("feedback is for banks of the preset 'safe' that have learned source rows")
        stream = contents.stream().with_verdict(
            adapted_right=change.adapted == change.label, frozen_right=change.frozen == change.label
        )
        packed = stream.packed().to(self.device)
        return with_fields(contents, statistics=replace(contents.statistics, stream=packed))

    def _roll_back(self, contents: Contents, ledger: Ledger, change: Rollback) -> Contents:
        if change.at != contents.position:
            here = contents.position
            raise ChangeError(
                f"a rollback that was made at position {change.at} cannot be applied at {here}: make a new one"
            )
        # A rollback may come from a log, so its rows are believed no more than those of a file.
        table = {name: column.to(self.device) for name, column in change.rows.items()}
        check_kinds(table, like=contents.table_of(self._slots(contents, [])))
        check_rows(table, self.classes, contents.next_id)
        forgotten = contents.deleted.intersection(table["id"].tolist())
        if forgotten:
            raise ChangeError(f"row {min(forgotten)} was deleted for good and cannot come back")
        for name in ("source_mean", "stream_total"):
            if getattr(change, name) is not None:
                check_mean(name, getattr(change, name), self.dim)
        stream = change.stream
        if stream is not None:
            stream = self._checked_stream(stream)
        if change.transformed and contents.statistics.transform is None:
            raise ChangeError("a rollback cannot bring back a transform: learn the source rows again")
        transform = contents.statistics.transform if change.transformed else None
        removed = sorted(set(change.removed))
        if len(removed) != len(change.removed):
            raise ChangeError("a rollback must not remove the same row twice")
        self._slots(contents, removed)  # refuses rows that are not there
        contents = self._without(contents, ledger, removed)
        contents = self._replaced(contents, ledger, table)
        judgments = {row: history for row, history in contents.judgments.items() if row not in change.judgments}
        statistics = Statistics(change.source_mean, change.stream_total, change.stream_count, transform, stream)
        contents = with_fields(
            contents,
            judgments=judgments | {row: history for row, history in change.judgments.items() if history},
            statistics=statistics.to(self.device),
        )
        contents.check()
        return contents

    def _replaced(self, contents: Contents, ledger: Ledger, table: Columns) -> Contents:
        """With the rows of a table in place of those that are held under the same ids.

        They get other slots, since readers may still look at the old ones. Nothing is evicted for them.
        """
        held = set(contents.index.ids(contents.held_slots()).tolist())
        contents = self._without(contents, ledger, [row for row in table["id"].tolist() if row in held])
        contents = self._with_rows(contents, ledger, table)
        ledger.enter_queue(_active(table))
        return contents

    def _without(self, contents: Contents, ledger: Ledger, ids: list[int], *, queued: bool = True) -> Contents:
        """With these rows gone: their slots, vetoes and history.

        Args:
            contents: of the bank.
            ledger: of these contents.
            ids: of the rows that leave.
            queued: False if the queue of evictions has already dropped them.
        """
        if not ids:
            return contents
        slots = ledger.slots(contents, ids)
        voting = contents.table_of(slots, *DECIDING)
        if contents.vetoed:
            voting = _active(voting)
        if queued:
            ledger.leave_queue(voting)
        ledger.retire(ids, slots, version=self._version + 1)
        gone = set(ids)
        vetoed = contents.vetoed
        judgments = contents.judgments
        if gone & judgments.keys():  # rows without judgments are not vetoed either, and both maps stay as they are
            vetoed = {row: slot for row, slot in vetoed.items() if row not in gone}
            judgments = {row: history for row, history in judgments.items() if row not in gone}
        return with_fields(
            contents,
            index=contents.index.hide(slots),
            vetoed=vetoed,
            judgments=judgments,
            admitted=_recounted(contents.admitted, voting, -1),
        )

    def _with_rows(self, contents: Contents, ledger: Ledger, table: Columns, **others: Any) -> Contents:
        """With the rows of a table, each under its id, in slots that nobody reads, and other fields changed as well.

        Where the table names no states, all its rows may vote.
        """
        places = ledger.allocate(len(table["id"]))
        if not places:
            return with_fields(contents, **others)
        self._check_memory(contents, max(contents.index.slots, max(places) + 1))
        slots = torch.from_numpy(numpy.array(places)).to(self.device)
        contents.columns.reserve(max(places) + 1)
        contents.columns.write(slots, table)
        ledger.enter(table, slots, version=self._version + 1)
        group = _groups(table)
        voting = table
        vetoed = contents.vetoed
        if "state" in table:
            active = table["state"] == ACTIVE
            group[~active] = 0
            voting = _active(table)
            silenced_ids = table["id"][~active].tolist()
            their_slots = slots[~active].tolist()
            vetoed = {**vetoed, **dict(zip(silenced_ids, their_slots, strict=True))}
        return with_fields(
            contents,
            index=contents.index.put(slots, table["id"], table, group),
            vetoed=vetoed,
            admitted=_recounted(contents.admitted, voting),
            **others,
        )

    def _check_memory(self, contents: Contents, slots: int) -> None:
        """Refuses so many slots if they need more memory than the bank may have."""
        if self._max_memory is None:
            return
        needed = contents.memory(slots)["total"]
        if needed > self._max_memory:
            raise ChangeError(
                f"the bank would need {needed} bytes, more than max_memory={self._max_memory}: "
                "raise it, give a capacity, or delete rows"
            )

    def _slots(self, contents: Contents, ids: Sequence[int]) -> Tensor:
        """The slots (n,) of these rows, or a RowError."""
        return contents.slots_of(torch.tensor(ids, dtype=torch.int64, device=self.device))

    def _checked(self, change: Append, rows: Tensor | None) -> Columns:
        """The rows of a change as a table without ids and states, or an error that names what is wrong with them."""
        if rows is None:
            rows = unit(check_features(change.features, self.dim).to(self.device))
        columns = columns_of(change, rows.shape[0], self.settings, self.device)
        return columns | self._contents.index.encode(rows)

    def with_whole_numbers(self, change: Append, count: int) -> Append:
        """The change with labels and domains that a preset can count on: whole numbers, (n,) int64."""
        return with_whole_numbers(change, count, self.settings, self.device)

    # Looking at it with other libraries

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one line for each row: its id, label and class name, origin, state, domain, …"""
        return to_pandas(self._contents)

    def knn_graph(self, k: int = 10) -> Any:
        """The k most similar rows of each row, as a SciPy CSR array (n, n) of similarities, in the order of ids."""
        return knn_graph(self._contents, k)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to set a setting: it would change answers without leaving a trace."""
        if name in BankSettings.__dataclass_fields__:
            raise AdaNPCError(f"{name} of a bank cannot be changed to {brief(value)}: {_remedy(name)}")
        require.known_attribute("a bank", self, name, "device", BankSettings.__dataclass_fields__)
        super().__setattr__(name, value)


def checked_device(given: Any) -> torch.device:
    """The device of this name."""
    try:
        return torch.device(given)
    except (RuntimeError, TypeError):
        raise AdaNPCError(f"device must be one that torch knows, such as 'cpu', got {brief(given)}") from None


def _index_factory(given: IndexFactory | str) -> IndexFactory:
    """What makes an index, by itself or by its name."""
    if not isinstance(given, str):
        return given
    engine, _, factory = given.partition(":")
    if engine != "faiss" or not factory:
        raise AdaNPCError(f"index must be a class or a name such as 'faiss:IVF1024,SQ8', got {given!r}")
    return partial(ApproximateIndex, factory=factory)


def _remedy(name: str) -> str:
    """How to get a bank with another value of a setting."""
    if name == "capacity":
        return "adanpc.with_capacity gives a classifier with the same rows and another capacity"
    if name in ("classes", "names"):
        return "adanpc.with_classes gives a classifier with the same rows and more classes"
    return "give it to MemoryBank, and learn the rows again"


def _judged(
    contents: Contents, slots: Tensor, verdict: str, change: Veto | Restore | Relabel
) -> dict[int, tuple[Judgment, ...]]:
    """The history of all rows, with this verdict on the rows in these slots."""
    judgments = dict(contents.judgments)
    for row, label in dict(pairs(contents.table_of(slots, "id", "label"))).items():
        judgment = Judgment(verdict, label, change.who, change.why, change.when)
        judgments[row] = (*judgments.get(row, ()), judgment)
    return judgments


def _active(table: Columns) -> Columns:
    """The rows of a table that may vote, with the columns DECIDING only, so that features are not copied."""
    active = table["state"] == ACTIVE
    return {name: table[name][active] for name in DECIDING}


def _recounted(counts: Tensor, table: Columns, sign: int = 1) -> Tensor:
    """How many admitted rows of each class there are (C,) once those of a table have come, or with -1 have gone."""
    admitted = table["origin"].eq(ADMITTED)
    return counts.index_add(0, table["label"], admitted.long(), alpha=sign)


def _groups(table: Columns) -> Tensor:
    """The groups (n,) of rows in the index."""
    origin = table["origin"]
    groups = torch.from_numpy(GROUP_OF_ORIGIN[to_main_memory(origin)])
    return groups.to(origin.device)
