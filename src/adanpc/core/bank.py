"""MemoryBank: rows of features with labels, searched exactly and changed by applying one change after another.

A bank is a reference to its current ``Contents``, which never change. ``apply`` computes the next contents from the
current ones and a change, and publishes them by one assignment; so readers need no lock.
"""

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
from adanpc.index.protocol import Coding, Kept

IndexFactory = Callable[[int, str, torch.device], Index]
Histories = Mapping[int, tuple[Judgment, ...]]  # what people decided about each row, by id, oldest first
ADMITTED = int(Origin.ADMITTED)  # a plain number, because torch compares with it faster
GROUP_OF_ORIGIN = numpy.full(max(Origin) + 1, OTHER_GROUP, numpy.uint8)
GROUP_OF_ORIGIN[Origin.SOURCE] = SOURCE_GROUP


@require.names_its_arguments
class MemoryBank:
    """Unit rows with labels, searched exactly and changed only by ``apply``.

    Any number of threads may read while one changes it: readers see the bank as it was before a change or after it,
    never in between. A change that is interrupted has no effect.

    Example::

        bank = MemoryBank(dim=2, classes=["cat", "dog"])
        bank.apply(Append(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])))
        bank.search(torch.tensor([[3.0, 1.0]]), k=1).labels  # tensor([[0]])

    Args:
        dim: length of a feature vector.
        classes: number of classes, or their names; labels are 0 … classes - 1.
        storage: how rows are stored.

            * ``float32``: 4 bytes a coordinate, and a fifth one that a search in main memory reads first.
            * ``float16``: 2 bytes a coordinate.
            * ``int8``: 2 bytes a coordinate, too, and searched as fast as float32: one byte finds candidates, the
              second one re-ranks them at 16 bits.
            * ``progressive``, for 20,000 rows and more: float16 and, in a third as much memory, codes that let a
              search read only a few bits of most rows. It may miss a neighbor, with a probability below 2e-6 for each
              query of k = 50. See ``adanpc.index.ProgressiveIndex``, which can also keep rows in a file.
        capacity: the most admitted rows that may vote; source, expert and vetoed rows always stay and do not count.
        evict: which admitted row leaves when the capacity is exceeded: the oldest (``fifo``), the oldest of the
            largest class (``balanced``), or one chosen at random (``reservoir``).
        soft: whether rows keep class probabilities in addition to their label.
        seed: seed of the random ranks by which ``reservoir`` chooses; drawn at random by default, so that nobody can
            foresee which rows will stay.
        device: any torch device with float64.
        max_memory: the most bytes that the bank may need, as counted by ``memory``. A change that would need more is
            refused and has no effect. This limit is not saved with the bank.
        index: a function of dim, storage and device that creates the index; or, for an approximate search,
            "faiss:" and a factory string of faiss, such as "faiss:IVF1024,SQ8"; see ``adanpc.index.ApproximateIndex``.
    """

    @torch.inference_mode(False)  # tensors that are allocated in inference mode could not be written outside of it
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
            seed = 0
            if evict == "reservoir":
                seed = secrets.randbits(53)  # the most bits that every JSON reader keeps
        names = class_names(classes)
        count: Any = len(names) if names else classes
        settings = BankSettings(dim, count, storage, capacity, evict, soft, seed, names)
        self.device = checked_device(device)
        self._make_index = _index_factory(index)
        self._max_memory = max_memory
        if max_memory is not None:
            self._max_memory = require.whole("max_memory", max_memory, least=1)
        self._lock = RLock()
        self._ledger: Ledger | None = None  # derived from the contents when a change needs it
        self._version = 0  # how many contents have been published
        self._published: list[tuple[int, ReferenceType[Contents]]] = []  # versions that may still have readers
        self._slots_used = 0  # the most slots of any version so far; each of them may still have readers
        self._publish(self._empty(settings))

    def _empty(self, settings: BankSettings) -> Contents:
        """The contents of a bank without rows."""
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
        """The settings that are saved with the bank and enter its digest."""
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
        """How many admitted rows of each class may vote, (C,) int64."""
        return self._contents.admitted

    @property
    def vetoes(self) -> dict[int, Judgment]:
        """The rows that may not vote, by id, each with its last veto: who vetoed it, why and when."""
        contents = self._contents
        last_vetoes = {}
        for row in sorted(contents.vetoed):
            vetoes_of_row = [judgment for judgment in contents.judgments[row] if judgment.verdict == "veto"]
            last_vetoes[row] = vetoes_of_row[-1]
        return last_vetoes

    def history(self, row: int) -> tuple[Judgment, ...]:
        """What people decided about a row, oldest first."""
        contents = self._contents
        if not 0 <= row < contents.next_id:  # also if it is too large for a tensor
            raise RowError(f"row {row} is not in the bank: it never existed")
        self._slots(contents, [row])  # raises for a row that has left
        return contents.judgments.get(row, ())

    def __len__(self) -> int:
        """How many rows are held, vetoed ones included."""
        return len(self._contents)

    def __repr__(self) -> str:
        contents = self._contents
        arguments = contents.settings.arguments()
        settings = ", ".join(f"{name}={brief(value)}" for name, value in arguments.items())
        return f"<MemoryBank of {contents.summary}: {settings}>"

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use."""
        return self._contents.nbytes

    def memory(self) -> dict[str, int]:
        """Bytes of the slots in use, by purpose. The total does not include rows that an index keeps in a file.

        Vetoes, judgments and the order of evictions are not counted; each is a Python object of a few hundred bytes.
        """
        contents = self._contents
        return contents.memory(contents.index.slots)

    # Reading

    def search(
        self, queries: Tensor, k: int, *, exclude: Tensor | None = None, source: bool | None = None
    ) -> Neighbors:
        """The k rows most similar to each query; changes nothing.

        Args:
            queries: (B, D) features; only their direction counts, so none may be zero.
            k: how many neighbors to find for each query, at least 1.
            exclude: (B, E) ids of rows that may not vote for that query, such as the query's own row.
            source: True to search source rows only, False to search all other rows only.
        """
        return self._contents.search(queries, k, exclude, source)

    def rows(self, ids: Tensor) -> Tensor:
        """The stored unit rows of these ids, (n, D) float32."""
        return self._contents.rows(ids)

    def stored(self, queries: Tensor) -> Tensor:
        """The rows (B, D) float32 that would be read back if these queries, as ``unit`` returned them, were stored."""
        return self._contents.index.stored(queries)

    def table(self, *names: str) -> Columns:
        """The named columns of all rows, ordered by id; without names, all columns and the encoded rows."""
        return self._contents.table(*names)

    def digest(self) -> str:
        """A hash of settings, rows, their history and statistics: equal digests mean equal banks."""
        return digest_of(self._contents.state())

    def state(self) -> State:
        """The whole bank in plain values, from which ``MemoryBank.load`` makes an equal bank."""
        return self._contents.state()

    @classmethod
    def load(
        cls, state: State, *, device: torch.device | str = "cpu", index: IndexFactory | str = index_for
    ) -> MemoryBank:
        """The bank whose ``state`` is given. It is believed: ``store`` checks what comes from a file."""
        document = state["document"]
        bank = cls(**document["bank"], device=device, index=index)
        bank._load_state(state)
        return bank

    @torch.inference_mode(False)
    def _load_state(self, state: State) -> None:
        """Fills this bank, which must be new, with the rows and statistics of a state."""
        document = state["document"]
        kept = state.get("kept")
        given = state["tensors"]
        if kept is not None and not isinstance(self._contents.index, Coding):
            given = kept.with_rows(given)
            kept = None
        tensors = {name: tensor.to(self.device) for name, tensor in given.items()}
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
            kept=kept,
            next_id=document["next_id"],
            position=document["position"],
            statistics=statistics,
        )
        self._publish(contents)

    def __getstate__(self) -> dict[str, Any]:
        """What pickles and copies hold: the rows, without the free and reserved slots between and behind them.

        They are arrays, because torch would send tensors to another process as handles of shared memory.
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
        """Carries out one change, completely or not at all, and returns the ids of the rows that it appended.

        Args:
            change: the change to carry out.
            rows: the features of an ``Append`` as ``unit`` normalizes them, for a caller that already has them.
            log: called with the change once it is known to be valid, before readers see its effect. If the call
                raises, the bank stays as it was.
        """
        if torch.is_inference_mode_enabled():
            # Tensors that are allocated in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                return self._apply(change, rows, log)
        return self._apply(change, rows, log)

    def _apply(self, change: Change, rows: Tensor | None, log: Callable[[Change], object] | None) -> range:
        with self._lock:
            before = self._contents
            # Computing the next contents alters the ledger. It is therefore detached first: if anything interrupts
            # this method, the altered ledger is lost, and the next change derives a new one from the contents.
            ledger = self._take_ledger()
            after = self._changed(change, rows, ledger)
            if log is not None:
                log(change)
            self._publish(with_fields(after, position=before.position + 1))
            self._ledger = ledger
            return range(before.next_id, after.next_id)

    def writing(self) -> AbstractContextManager[Any]:
        """The lock that changes take: whoever holds it can read and then change, with no other change in between."""
        return self._lock

    def queue_of(self, contents: Contents) -> Eviction | None:
        """The admitted rows of these contents in a queue on which evictions can be simulated; None without a capacity.

        Copying the ledger's queue is faster than deriving one, but only the current contents have a ledger.
        """
        with self._lock:
            ledger = self._ledger
            if contents is self._contents and ledger is not None and ledger.queue is not None:
                return ledger.queue.copy()
        return contents.queue()

    def revert(self, contents: Contents) -> None:
        """Replaces the contents by earlier ones of this bank, or by those of a bank with the same settings.

        It takes constant time and is not recorded as a change, for callers that only tried something or start over.
        Contents of another bank share its memory, so that bank must not be changed afterward.
        """
        with self._lock:
            self._ledger = None
            if contents.columns is not self._contents.columns:  # another bank's, with slots of its own
                self._slots_used = contents.index.slots
            # Later versions of the index share its table of groups and may have extended it. Hiding no rows returns an
            # index with a table of its own.
            nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
            self._publish(with_fields(contents, index=contents.index.hide(nothing)))

    def _publish(self, contents: Contents) -> None:
        """Makes these the current contents, from the last assignment on."""
        self._version += 1
        # Weak, so that this list does not keep a version alive: a version that is gone has no readers.
        self._published.append((self._version, ref(contents)))
        self._slots_used = max(self._slots_used, contents.index.slots)
        self._contents = contents

    def _take_ledger(self) -> Ledger:
        """The ledger of the current contents, detached from the bank, with every slot free that has no readers."""
        ledger = self._ledger
        self._ledger = None
        if ledger is None:
            ledger = Ledger(self._contents, self._version, self._slots_used)
        self._published = [(version, contents) for version, contents in self._published if contents() is not None]
        ledger.reclaim([version for version, _ in self._published])
        return ledger

    def _changed(self, change: Change, rows: Tensor | None, ledger: Ledger) -> Contents:
        """The contents after a change; the ledger is altered to match them."""
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
                self._slots(contents, ids)  # raises for a row that is not there
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
            change = with_fields(change, stream=self._checked_stream(change.stream))
        first = contents.next_id
        count = table["label"].shape[0]
        table["id"] = torch.from_numpy(numpy.arange(first, first + count)).to(self.device)
        statistics = contents.statistics.after(change)
        if change.origin == Origin.ADMITTED and ledger.queue is not None:
            # The row that leaves when each new row enters, -1 if none does.
            leaving = [ledger.queue.push(row, label)[0] for row, label in pairs(table)]
            # A row of this very change may have to leave again at once; it keeps its id but is never stored.
            evicted_on_arrival = [row - first for row in leaving if row >= first]
            if evicted_on_arrival:
                stays = torch.ones(count, dtype=torch.bool, device=self.device)
                stays[evicted_on_arrival] = False
                table = {name: column[stays] for name, column in table.items()}
            evicted = [row for row in leaving if 0 <= row < first]
            contents = self._without(contents, ledger, evicted, queued=False)
        return self._with_rows(contents, ledger, table, next_id=first + count, statistics=statistics)

    def _checked_stream(self, packed: Tensor) -> Tensor:
        """The packed stream of a change, checked, and completed if an earlier version of the library packed it."""
        packed = completed(packed, self.dim, self.classes)
        check_stream(packed, self.dim, self.classes)
        return packed

    def _veto(self, contents: Contents, ledger: Ledger, change: Veto) -> Contents:
        slots = self._slots(contents, change.ids)
        judgments = _judged(contents, slots, "veto", change)
        newly_vetoed = [row for row in dict.fromkeys(change.ids) if row not in contents.vetoed]
        newly_hidden = self._slots(contents, newly_vetoed)
        table = contents.table_of(newly_hidden, *DECIDING)
        ledger.leave_queue(table)
        vetoed = dict(contents.vetoed)
        vetoed.update(zip(newly_vetoed, newly_hidden.tolist(), strict=True))
        return with_fields(
            contents,
            index=contents.index.hide(newly_hidden),
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
        # The capacity holds for restored rows, too. Other rows leave to make room for them; only if there are no
        # others left does a restored row leave.
        overflow = ledger.queue.overflow(set(returning))
        return self._without(contents, ledger, overflow, queued=False)

    def _relabel(self, contents: Contents, ledger: Ledger, change: Relabel) -> Contents:
        stated = change.label
        if isinstance(stated, int):
            stated = (stated,)
        for label in stated:
            if not 0 <= label < self.classes:
                raise LabelError(f"labels must be between 0 and {self.classes - 1}, got {label}")
        labels = change.labels
        slots = self._slots(contents, sorted(labels))
        judgments = _judged(contents, slots, "relabel", change)  # with the old labels, which the history keeps
        table = contents.table_of(slots)  # a copy, which may be altered
        new_labels = [labels[row] for row in table["id"].tolist()]
        table["label"][:] = torch.tensor(new_labels, dtype=torch.int64)
        # A person has vouched for the label, so the row must not be evicted.
        was_admitted = table["origin"] == Origin.ADMITTED
        table["origin"][was_admitted] = Origin.EXPERT
        if self.soft:
            table["soft"] = one_hot(table["label"], self.classes).float()
        return with_fields(self._replaced(contents, ledger, table), judgments=judgments)

    def _judge_answers(self, contents: Contents, change: Feedback) -> Contents:
        for label in (change.label, change.frozen, change.adapted):
            if not 0 <= label < self.classes:
                raise LabelError(f"labels must be between 0 and {self.classes - 1}, got {label}")
        if contents.statistics.transform is None:
            raise ChangeError("feedback needs a bank of the preset 'safe' that has learned source rows")
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
        # A rollback may come from a log, so its rows are checked like those of a file.
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
        transform = None
        if change.transformed:
            transform = contents.statistics.transform
        removed = sorted(set(change.removed))
        if len(removed) != len(change.removed):
            raise ChangeError("a rollback must not remove the same row twice")
        self._slots(contents, removed)  # raises for a row that is not there
        contents = self._without(contents, ledger, removed)
        contents = self._replaced(contents, ledger, table)
        statistics = Statistics(change.source_mean, change.stream_total, change.stream_count, transform, stream)
        contents = with_fields(
            contents,
            judgments=_rolled_back(contents.judgments, change.judgments),
            statistics=statistics.to(self.device),
        )
        contents.check()
        return contents

    def _replaced(self, contents: Contents, ledger: Ledger, table: Columns) -> Contents:
        """The contents with the rows of a table instead of the rows that have the same ids.

        The new rows get new slots, since readers may still be looking at the old ones. Nothing is evicted.
        """
        held = set(contents.index.ids(contents.held_slots()).tolist())
        replaced = [row for row in table["id"].tolist() if row in held]
        contents = self._without(contents, ledger, replaced)
        contents = self._with_rows(contents, ledger, table)
        ledger.enter_queue(_active(table))
        return contents

    def _without(self, contents: Contents, ledger: Ledger, ids: list[int], *, queued: bool = True) -> Contents:
        """The contents without these rows, their vetoes and their history.

        Args:
            contents: the contents that hold the rows.
            ledger: the ledger of these contents, which is altered to match the result.
            ids: the ids of the rows that leave.
            queued: False if the ledger's queue has already dropped the rows.
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
        if gone & judgments.keys():  # a vetoed row has a judgment; otherwise neither map needs to be copied
            vetoed = {row: slot for row, slot in vetoed.items() if row not in gone}
            judgments = {row: history for row, history in judgments.items() if row not in gone}
        return with_fields(
            contents,
            index=contents.index.hide(slots),
            vetoed=vetoed,
            judgments=judgments,
            admitted=_recounted(contents.admitted, voting, -1),
        )

    def _with_rows(
        self, contents: Contents, ledger: Ledger, table: Columns, *, kept: Kept | None = None, **others: Any
    ) -> Contents:
        """The contents with the rows of a table added, in slots that nobody reads, and with other fields changed.

        Args:
            contents: the contents that the rows are added to.
            ledger: the ledger of these contents, which is altered to match the result.
            table: the new rows with their ids. Without a column of states, all of them may vote.
            kept: what the index kept of these rows in a file. If given, the contents must be empty, and the rows go
                back to the slots that they had.
            **others: fields of the contents that change as well.
        """
        if not len(table["id"]):
            return with_fields(contents, **others)
        if kept is None:
            allocated = ledger.allocate(len(table["id"]))
            slots = torch.from_numpy(numpy.array(allocated)).to(self.device)
            end = max(allocated) + 1
        else:
            slots = kept.codes["slot"]
            end = int(slots.max()) + 1
        self._check_memory(contents, max(contents.index.slots, end))
        contents.columns.reserve(end)
        contents.columns.write(slots, table)
        ledger.enter(table, slots, version=self._version + 1)
        group = _groups(table)
        voting = table
        vetoed = contents.vetoed
        if "state" in table:
            active = table["state"] == ACTIVE
            group[~active] = 0  # hidden from every search
            voting = _active(table)
            vetoed_ids = table["id"][~active].tolist()
            vetoed_slots = slots[~active].tolist()
            vetoed = {**vetoed, **dict(zip(vetoed_ids, vetoed_slots, strict=True))}
        index = contents.index
        if kept is not None and isinstance(index, Coding):
            index = index.put_kept(table["id"], table, group, kept)
        else:
            index = index.put(slots, table["id"], table, group)
        return with_fields(
            contents,
            index=index,
            vetoed=vetoed,
            admitted=_recounted(contents.admitted, voting),
            **others,
        )

    def _check_memory(self, contents: Contents, slots: int) -> None:
        """Raises a ChangeError if this many slots would need more than ``max_memory``."""
        if self._max_memory is None:
            return
        needed = contents.memory(slots)["total"]
        if needed > self._max_memory:
            raise ChangeError(
                f"the bank would need {needed} bytes, more than max_memory={self._max_memory}: "
                "raise it, give a capacity, or delete rows"
            )

    def _slots(self, contents: Contents, ids: Sequence[int]) -> Tensor:
        """The slots (n,) of the rows with these ids; raises a RowError that names the first one that is not held."""
        wanted = torch.tensor(ids, dtype=torch.int64, device=self.device)
        return contents.slots_of(wanted)

    def _checked(self, change: Append, rows: Tensor | None) -> Columns:
        """The rows of a change, checked and encoded, as a table without ids and states."""
        if rows is None:
            rows = unit(check_features(change.features, self.dim).to(self.device))
        columns = columns_of(change, rows.shape[0], self.settings, self.device)
        return columns | self._contents.index.encode(rows)

    def with_whole_numbers(self, change: Append, count: int) -> Append:
        """The change with its labels, and domains given for each row, as checked tensors (n,) int64."""
        return with_whole_numbers(change, count, self.settings, self.device)

    # Exporting to other libraries

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one line for each row: its id, label and class name, origin, state, domain, …"""
        return to_pandas(self._contents)

    def knn_graph(self, k: int = 10) -> Any:
        """The k rows most similar to each row: a SciPy CSR array (n, n) of similarities, ordered by id."""
        return knn_graph(self._contents, k)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to assign to a setting, which would alter answers without leaving a trace in the log."""
        if name.startswith("_"):
            super().__setattr__(name, value)  # the bank's own, several times in every change
            return
        if name in BankSettings.__dataclass_fields__:
            raise AdaNPCError(f"{name} of a bank cannot be changed to {brief(value)}: {_remedy(name)}")
        require.known_attribute("a bank", self, name, ["device"], BankSettings.__dataclass_fields__)
        super().__setattr__(name, value)


def checked_device(given: Any) -> torch.device:
    """The torch device of this name, which must be there and compute in float64."""
    try:
        device = torch.device(given)
        torch.zeros(1, dtype=torch.float64, device=device).cpu()
    # Torch without CUDA fails an assertion; the device "meta" holds no values; MPS has no float64.
    except (RuntimeError, TypeError, AssertionError, NotImplementedError):
        message = f"device must be one that torch can use here, with float64, such as 'cpu', got {brief(given)}"
        raise AdaNPCError(message) from None
    return device


def _index_factory(given: IndexFactory | str) -> IndexFactory:
    """The function that creates an index, given itself or by a name such as ``faiss:IVF1024,SQ8``."""
    if not isinstance(given, str):
        return given
    engine, _, factory = given.partition(":")
    if engine != "faiss" or not factory:
        raise AdaNPCError(f"index must be a class or a name such as 'faiss:IVF1024,SQ8', got {given!r}")
    return partial(ApproximateIndex, factory=factory)


def _remedy(name: str) -> str:
    """What a user can do instead of assigning to a setting."""
    if name == "capacity":
        return "adanpc.with_capacity gives a classifier with the same rows and another capacity"
    if name in ("classes", "names"):
        return "adanpc.with_classes gives a classifier with the same rows and more classes"
    return "create a new MemoryBank with it, and learn the rows again"


def _judged(contents: Contents, slots: Tensor, verdict: str, change: Veto | Restore | Relabel) -> Histories:
    """The histories of all rows, with a new verdict added for the rows in these slots."""
    judgments = dict(contents.judgments)
    label_of = dict(pairs(contents.table_of(slots, "id", "label")))  # each row once, even if it was named twice
    for row, label in label_of.items():
        judgment = Judgment(verdict, label, change.who, change.why, change.when)
        judgments[row] = (*judgments.get(row, ()), judgment)
    return judgments


def _rolled_back(judgments: Histories, earlier: Histories) -> Histories:
    """The histories of all rows, with those of some rows as they were earlier; an empty one is dropped."""
    result = dict(judgments)
    for row, history in earlier.items():
        if history:
            result[row] = history
        else:
            result.pop(row, None)
    return result


def _active(table: Columns) -> Columns:
    """The rows of a table that may vote, with the columns DECIDING only: the features would be costly to copy."""
    active = table["state"] == ACTIVE
    return {name: table[name][active] for name in DECIDING}


def _recounted(counts: Tensor, table: Columns, sign: int = 1) -> Tensor:
    """The numbers of admitted rows by class (C,), with those of a table added or, with sign -1, taken away."""
    labels = table["label"]
    if labels.is_cpu and labels.shape[0] == 1:
        recounted = counts.numpy().copy()
        if table["origin"].item() == ADMITTED:
            recounted[int(labels.item())] += sign
        return torch.from_numpy(recounted)
    admitted = table["origin"].eq(ADMITTED)
    return counts.index_add(0, labels, admitted.long(), alpha=sign)


def _groups(table: Columns) -> Tensor:
    """The group of the index that each row of a table belongs to, (n,) uint8."""
    origin = table["origin"]
    groups = torch.from_numpy(GROUP_OF_ORIGIN[to_main_memory(origin)])
    return groups.to(origin.device)
