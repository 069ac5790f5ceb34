"""ApproximateIndex: any index of faiss finds candidates, which are then scored exactly."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy
import torch
from torch import Tensor

from adanpc.errors import AdaNPCError, UnavailableError
from adanpc.index import single
from adanpc.index.exact import ExactIndex
from adanpc.index.grid import Array, Columns
from adanpc.index.protocol import Found, Wanted, one_after_another

LEAST = 9984  # training rows: 39 for each of 256 centroids; faiss complains about fewer
ROWS_A_CELL = 39  # training rows for each cell of an inverted file; faiss complains about fewer
CELLS_READ = 16  # one in this many cells of an inverted file is read; by default faiss reads a single cell
SPARE = 64  # candidates beyond twice the wanted number
BREADTH = 256  # efSearch of a graph; the default of faiss is 16, fewer than the candidates that are needed


class ApproximateIndex:
    """An ``ExactIndex``, and an index of faiss that says which of its rows are worth an exact look.

    Similarities are exact; rows that are hidden, excluded or in another group are never found; and a batch finds what
    its queries would find one by one. What is not promised: a nearest row is missed if faiss does not name it; among
    equal rows, those with the lowest ids may be missed; and an older version of the index may miss rows in whose place
    faiss names newer ones.

    Until there are enough rows to train on, and for queries for which faiss names too few rows, all rows are searched.

    Args:
        dim: length of a row.
        storage: how the exact rows are stored, see ``MemoryBank``.
        device: only the CPU is supported.
        factory: a factory string of faiss, such as "IVF1024,SQ8".
    """

    def __init__(
        self, dim: int, storage: str = "float32", device: torch.device | str = "cpu", *, factory: str = "Flat"
    ) -> None:
        if torch.device(device).type != "cpu":
            raise AdaNPCError(f"an index of faiss works in main memory: pass device='cpu' instead of {device!s}")
        self.dim = dim
        self.storage = storage
        self.device = torch.device(device)
        self._exact = ExactIndex(dim, storage, device, coarse=False)
        self._candidates = _Candidates(dim, factory)

    @property
    def slots(self) -> int:
        """How many slots are in use."""
        return self._exact.slots

    @property
    def visible(self) -> Tensor:
        """The slots (n,) whose rows can be found, in rising order."""
        return self._exact.visible

    @property
    def count(self) -> int:
        """How many rows can be found."""
        return self._exact.count

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use, without the memory of faiss."""
        return self._exact.nbytes

    def memory(self, slots: int) -> dict[str, int]:
        """Bytes that this many slots need, by purpose, without the memory of faiss."""
        return self._exact.memory(slots)

    def encode(self, rows: Tensor) -> Columns:
        """Unit rows (n, D) as they are stored."""
        return self._exact.encode(rows)

    def stored(self, rows: Tensor) -> Tensor:
        """The rows (n, D) float32 that would be read back if these unit rows were stored."""
        return self._exact.stored(rows)

    def ids(self, slots: Tensor) -> Tensor:
        """The ids (n,) of the rows in these slots."""
        return self._exact.ids(slots)

    def find(self, ids: Sequence[int]) -> list[int]:
        """The slots of the rows with these ids; -1 for a row that is hidden or not there."""
        return self._exact.find(ids)

    def rows(self, slots: Tensor) -> Tensor:
        """The rows in these slots, (n, D) float32."""
        return self._exact.rows(slots)

    def state(self, slots: Tensor) -> Columns:
        """The encoded rows in these slots, as ``put`` takes them."""
        return self._exact.state(slots)

    def put(self, slots: Tensor, ids: Tensor, columns: Columns, group: Tensor) -> ApproximateIndex:
        """The index with rows added; see ``Index.put``."""
        exact = self._exact.put(slots, ids, columns, group)
        self._candidates.add(exact, slots.numpy())
        return self._with(exact)

    def hide(self, slots: Tensor) -> ApproximateIndex:
        """The index with the rows in these slots (n,) hidden."""
        return self._with(self._exact.hide(slots))

    def show(self, slots: Tensor, group: Tensor) -> ApproximateIndex:
        """The index with the rows in these slots (n,) no longer hidden, each in its group (n,)."""
        return self._with(self._exact.show(slots, group))

    def search(self, queries: Tensor, k: int, *, group: int | None = None, exclude: Tensor | None = None) -> Found:
        """The k nearest of the rows that faiss names for each query; for the arguments, see ``Index.search``."""
        if not self._candidates.trained or not len(queries):
            return self._exact.search(queries, k, group=group, exclude=exclude)
        found = []
        for number in range(len(queries)):  # one by one, because faiss rounds differently in batches
            here = slice(number, number + 1)
            excluded = None
            if exclude is not None:
                excluded = exclude[here]
            found.append(self._search_one(queries[here], k, group, excluded))
        return one_after_another(found)

    def search_groups(self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None) -> list[Found]:
        """The result of ``search`` for each pair of a number of rows and a group."""
        return [self.search(queries, k, group=group, exclude=exclude) for k, group in wanted]

    def _search_one(self, query: Tensor, k: int, group: int | None, exclude: Tensor | None) -> Found:
        """The result of ``search`` for one query (1, D)."""
        excluded = single.NOBODY
        if exclude is not None:
            excluded = exclude[0].numpy()
        k = min(k, self.slots)
        wanted = k + len(excluded)
        near = self._candidates.near(query.numpy(), 2 * wanted + SPARE)
        near = near[near < self.slots]  # faiss may also name rows that only later versions of this index have
        usable = self._exact.usable(group)
        if usable is not None:
            near = near[usable[near]]
        if len(near) < wanted:
            return self._exact.search(query, k, group=group, exclude=exclude)
        return single.ranked(self._exact, query.numpy()[0], near, k, excluded)

    def _with(self, exact: ExactIndex) -> ApproximateIndex:
        """The index with another version of the rows, and the same candidates."""
        changed = copy(self)
        changed._exact = exact
        return changed


class _Candidates:
    """An index of faiss over all rows that were ever added, shared by all versions of an ``ApproximateIndex``.

    Nothing is removed from it, because not every index of faiss can do that. Whether a candidate may be found is
    decided later.

    Args:
        dim: length of a row.
        factory: a factory string of faiss.
    """

    def __init__(self, dim: int, factory: str) -> None:
        if not find_spec("faiss"):
            raise UnavailableError("an index of faiss needs faiss, which is not installed: pip install 'adanpc[faiss]'")
        self._faiss: Any = import_module("faiss")
        try:
            self._index = self._faiss.index_factory(dim, factory, self._faiss.METRIC_INNER_PRODUCT)
        except RuntimeError:
            raise AdaNPCError(
                f"faiss has no index {factory!r} for {dim} dimensions: pass a factory string such as 'IVF1024,SQ8'"
            ) from None
        self._lock = Lock()  # faiss crashes if one thread adds while another searches
        self._slots: Array = numpy.zeros(
            0, numpy.int64
        )  # the slot of each row in the order of faiss, with room to grow
        self._count = 0  # how many of these are in use
        self._least = 0  # how many rows are needed to train
        if not self._index.is_trained:
            self._least = LEAST
        self._prepare()

    @property
    def trained(self) -> bool:
        """Whether it can name candidates, which it cannot before it was trained on the first rows."""
        return bool(self._index.is_trained and self._index.ntotal)

    def add(self, exact: ExactIndex, slots: Array) -> None:
        """Adds the rows in these slots (n,), and trains the index once there are enough of them."""
        with self._lock:
            count = self._count + len(slots)
            if count > len(self._slots):
                larger = numpy.empty(2 * count, numpy.int64)
                larger[: self._count] = self._slots[: self._count]
                self._slots = larger
            self._slots[self._count : count] = slots
            self._count = count
            if self._count < self._least:
                return
            missing = self._slots[self._index.ntotal : self._count]
            rows = exact.rows(torch.from_numpy(missing)).numpy()
            if not self._index.is_trained:
                self._index.train(rows)
            self._index.add(rows)

    def near(self, query: Array, count: int) -> Array:
        """The different slots of at most ``count`` rows that seem nearest to a query (1, D)."""
        with self._lock:
            _, places = self._index.search(query, min(count, self._index.ntotal))
            found = places[places >= 0]
            return numpy.unique(self._slots[found])

    def _prepare(self) -> None:
        """Makes faiss read more cells of an inverted file, and more of a graph, than it does by default."""
        cells = self._faiss.try_extract_index_ivf(self._index)
        if cells is not None:
            cells.nprobe = max(1, cells.nlist // CELLS_READ)
            self._least = max(self._least, ROWS_A_CELL * cells.nlist)
        graph = self._faiss.downcast_index(self._index)
        if hasattr(graph, "hnsw"):
            graph.hnsw.efSearch = BREADTH
