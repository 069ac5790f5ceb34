"""ApproximateIndex: candidates from any index of faiss, scored exactly."""

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

LEAST = 9984  # rows to train on: 39 for each of 256 centroids, below which faiss complains
ROWS_A_CELL = 39  # rows to train on for each cell of an inverted file, likewise
CELLS_READ = 16  # one of so many cells of an inverted file is read; faiss itself reads a single cell
SPARE = 64  # candidates beyond twice the wanted number
BREADTH = 256  # of the search in a graph; faiss itself has 16, fewer than the candidates that are wanted


class ApproximateIndex:
    """Rows as an ``ExactIndex`` holds them, and an index of faiss that says which of them are worth an exact look.

    Similarities are exact, and rows that are hidden, excluded or of another group are never found. What is not
    promised: a nearest row that faiss does not name is missed; of equal rows, the lowest ids may be missed; and an
    older version may miss rows for which faiss names newer ones. A batch finds what its queries find one by one.

    Until there are enough rows to train on, every row is searched. So are queries for which faiss names fewer rows
    than are wanted.

    Args:
        dim: length of a row.
        storage: of the exact rows, see ``MemoryBank``.
        device: main memory alone.
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
        self._exact = ExactIndex(dim, storage, device)
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
        """Bytes of the slots in use, without those that faiss keeps beside them."""
        return self._exact.nbytes

    def memory(self, slots: int) -> dict[str, int]:
        """Bytes that so many slots need, by what they are for, without those that faiss keeps beside them."""
        return self._exact.memory(slots)

    def encode(self, rows: Tensor) -> Columns:
        """Unit rows (n, D) as they are stored."""
        return self._exact.encode(rows)

    def stored(self, rows: Tensor) -> Tensor:
        """What unit rows are read back as once they are put, (n, D) float32."""
        return self._exact.stored(rows)

    def ids(self, slots: Tensor) -> Tensor:
        """The ids (n,) of the rows in these slots."""
        return self._exact.ids(slots)

    def find(self, ids: Sequence[int]) -> list[int]:
        """The slots of the rows under these ids; -1 where no row under it can be found."""
        return self._exact.find(ids)

    def rows(self, slots: Tensor) -> Tensor:
        """The rows in these slots, (n, D) float32."""
        return self._exact.rows(slots)

    def state(self, slots: Tensor) -> Columns:
        """The encoded rows in these slots, as ``put`` takes them."""
        return self._exact.state(slots)

    def put(self, slots: Tensor, ids: Tensor, columns: Columns, group: Tensor) -> ApproximateIndex:
        """With encoded rows in these slots (n,), each under its id (n,) and in its group (n,); group 0 is hidden."""
        exact = self._exact.put(slots, ids, columns, group)
        self._candidates.add(exact, slots.numpy())
        return self._with(exact)

    def hide(self, slots: Tensor) -> ApproximateIndex:
        """With the rows in these slots no longer to be found."""
        return self._with(self._exact.hide(slots))

    def show(self, slots: Tensor, group: Tensor) -> ApproximateIndex:
        """With the rows in these slots to be found again, each in its group (n,)."""
        return self._with(self._exact.show(slots, group))

    def search(self, queries: Tensor, k: int, *, group: int | None = None, exclude: Tensor | None = None) -> Found:
        """The k nearest rows that faiss names for unit queries (B, D); arguments as in ``ExactIndex.search``."""
        if not self._candidates.trained or not len(queries):
            return self._exact.search(queries, k, group=group, exclude=exclude)
        found = []
        for number in range(len(queries)):  # one by one: faiss multiplies batches in another order
            excluded = None
            if exclude is not None:
                excluded = exclude[number : number + 1]
            found.append(self._search_one(queries[number : number + 1], k, group, excluded))
        return one_after_another(found)

    def search_groups(self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None) -> list[Found]:
        """What ``search`` finds for each of several numbers of rows and groups."""
        return [self.search(queries, k, group=group, exclude=exclude) for k, group in wanted]

    def _search_one(self, query: Tensor, k: int, group: int | None, exclude: Tensor | None) -> Found:
        """``search`` for one query (1, D)."""
        excluded = single.NOBODY
        if exclude is not None:
            excluded = exclude[0].numpy()
        k = min(k, self.slots)
        wanted = k + len(excluded)
        near = self._candidates.near(query.numpy(), 2 * wanted + SPARE)
        near = near[near < self.slots]  # later versions have more
        usable = self._exact.usable(group)
        if usable is not None:
            near = near[usable[near]]
        if len(near) < wanted:
            return self._exact.search(query, k, group=group, exclude=exclude)
        return single.ranked(self._exact, query.numpy()[0], near, k, excluded)

    def _with(self, exact: ExactIndex) -> ApproximateIndex:
        """The same candidates for another version of the rows."""
        changed = copy(self)
        changed._exact = exact
        return changed


class _Candidates:
    """An index of faiss over all rows that were ever put, shared by all versions of the rows.

    Nothing is removed from it, since not every index of faiss can: what it names is looked up in the rows.

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
        self._slots: Array = numpy.zeros(0, numpy.int64)  # of what was put, in the order of faiss
        self._count = 0
        self._least = 0
        if not self._index.is_trained:
            self._least = LEAST
        self._prepare()

    @property
    def trained(self) -> bool:
        """Whether it can name candidates; it learns to from the first rows."""
        return bool(self._index.is_trained and self._index.ntotal)

    def add(self, exact: ExactIndex, slots: Array) -> None:
        """Takes in the rows in these slots (n,), and trains once there are enough of them."""
        with self._lock:
            if self._count + len(slots) > len(self._slots):
                larger = numpy.empty(2 * (self._count + len(slots)), numpy.int64)
                larger[: self._count] = self._slots[: self._count]
                self._slots = larger
            self._slots[self._count : self._count + len(slots)] = slots
            self._count += len(slots)
            if self._count < self._least:
                return
            missing = self._slots[self._index.ntotal : self._count]
            rows = exact.rows(torch.from_numpy(missing)).numpy()
            if not self._index.is_trained:
                self._index.train(rows)
            self._index.add(rows)

    def near(self, query: Array, count: int) -> Array:
        """The slots (n,) of at most so many rows that seem nearest to a query (1, D), each once."""
        with self._lock:
            _, places = self._index.search(query, min(count, self._index.ntotal))
            return numpy.unique(self._slots[places[places >= 0]])

    def _prepare(self) -> None:
        """Reads more cells, and more of a graph, than faiss does unless it is told."""
        cells = self._faiss.try_extract_index_ivf(self._index)
        if cells is not None:
            cells.nprobe = max(1, cells.nlist // CELLS_READ)
            self._least = max(self._least, ROWS_A_CELL * cells.nlist)
        graph = self._faiss.downcast_index(self._index)
        if hasattr(graph, "hnsw"):
            graph.hnsw.efSearch = BREADTH
