"""ExactIndex: stores unit rows in slots and finds the exact nearest ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.index import batch, single
from adanpc.index.blocks import TILE, Blocks, Kind
from adanpc.index.counting import rounded_up
from adanpc.index.grid import (
    COARSE,
    LARGEST_BYTE,
    STORAGE,
    Array,
    Columns,
    array_if_on_cpu,
    coarse,
    decode,
    encode,
    to_main_memory,
)
from adanpc.index.kernels import LONGEST
from adanpc.index.products import ExactProducts
from adanpc.index.protocol import AHEAD, FILE, Found, Wanted, one_after_another
from adanpc.index.unread import scattered_memory

BOUNDS_AT_ONCE = 1 << 25  # bounds held in memory at once: 128 MiB
HASHED_AT_ONCE = 1 << 16  # coordinates hashed at once, few enough to stay in the cache
WORD = {
    "float32": torch.int32,
    "float16": torch.int16,
    "int8": torch.int8,
    "progressive": torch.int16,
}  # the integer type for hashing the bits of a coordinate
MOST_LEFT_OUT = 0.03  # what bytes may leave out of a row, as a share of the energy beside its largest coordinate
BESIDE_COARSE = 8  # bytes of the scale and the residual of a row, beside those of its coordinates
COORDINATES_PER_VECTOR = 3  # with fewer coordinates than this for each vector, multiplying again is as fast as products
ROWS_PER_VECTOR = 8  # as it is with fewer rows than this for each vector
MOST_IN_NUMPY = 7  # up to this many queries in main memory, NumPy is faster than torch


class ExactIndex:
    """An index that reads every row once for each batch of queries.

    A search computes a bound on the similarity of every row, then scores exactly all rows whose bound could reach the
    k-th best. The result is that of exact arithmetic for every storage, device, batch size and scan.

    Args:
        dim: length of a row.
        storage: how rows are stored, see ``MemoryBank``.
        device: where rows are stored and searched.
        folder: if given, rows are stored in a temporary file in this folder, which disappears with the process.
        coarse: whether float32 rows in main memory also get a byte for each coordinate, which searches read first.
    """

    def __init__(
        self,
        dim: int,
        storage: str = "float32",
        device: torch.device | str = "cpu",
        *,
        folder: str | os.PathLike[str] | None = None,
        coarse: bool = True,
    ) -> None:
        self.dim = dim
        self.storage = require.one_of("storage", storage, STORAGE)
        self.device = torch.device(device)
        in_memory = self.device.type == "cpu" and folder is None
        self.coarse = coarse and in_memory and storage == "float32" and dim <= LONGEST
        self.residual = 0.0  # the largest residual of any row
        kinds: dict[str, Kind] = {"row": ((dim,), STORAGE[storage]), "id": ((), torch.int64), "hash": ((), torch.int64)}
        if storage == "int8":
            kinds |= {"fine": ((dim,), torch.int8), "scale": ((1,), torch.float32), "residual": ((1,), torch.float32)}
        self.encoded = [name for name in kinds if name not in ("id", "hash")]
        self.scanned: tuple[str, ...] = ()  # columns of bytes that a search may read before it scores rows
        if storage == "int8" and in_memory and dim <= LONGEST:
            self.scanned = ("row", "scale", "residual")
        if self.coarse:
            self.scanned = COARSE
            kinds |= {"coarse": ((dim,), torch.int8), "scale": ((1,), torch.float32), "residual": ((1,), torch.float32)}
        self._rounded = 0  # how many rows with such bytes were ever added
        self._left_out = 0.0  # the sum of the lengths of what the bytes leave out of them
        self._scales = 0.0  # the sum of the values of one unit of the bytes
        folders = {}
        if folder is not None:
            folders["row"] = folder
        self.blocks = Blocks(kinds, self.device, folders)
        self._used = 0
        self._hidden = 0  # slots in use whose rows cannot be found
        self._groups = torch.zeros(TILE, dtype=torch.uint8, device=self.device)  # the group of each slot; 0 is hidden
        # The keys are random and secret, so that nobody can craft different rows with equal hashes.
        hash_keys = torch.randint(-(2**62), 2**62, (2, dim), generator=_secret())
        self._hash_keys = array_if_on_cpu(hash_keys.to(self.device))

    def __repr__(self) -> str:
        return (
            f"<ExactIndex of {self.count} rows: dim={self.dim}, storage={self.storage!r}, device={str(self.device)!r}>"
        )

    @property
    def slots(self) -> int:
        """How many slots are in use."""
        return self._used

    @property
    def padded(self) -> int:
        """How many slots a scan reads: the slots in use, rounded up to whole tiles."""
        return rounded_up(self._used, TILE)

    @property
    def visible(self) -> Tensor:
        """The slots (n,) whose rows can be found, in rising order."""
        return self._groups[: self._used].nonzero()[:, 0]

    @property
    def count(self) -> int:
        """How many rows can be found."""
        return self._used - self._hidden

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use."""
        return self._used * (self.blocks.slot_bytes + 1)

    def memory(self, slots: int) -> dict[str, int]:
        """Returns the bytes that this many slots need, by purpose; those under ``FILE`` are on a disk."""
        row = self.dim * STORAGE[self.storage].itemsize
        where = "rows"
        if self.blocks.folders:
            where = FILE
        parts = {where: slots * row, "beside rows": slots * (self.blocks.slot_bytes + 1 - row)}
        if self.coarse:
            parts["codes"] = slots * (self.dim + BESIDE_COARSE)
            parts["beside rows"] -= parts["codes"]
        ahead = self.blocks.bytes_ahead(slots)
        if ahead:
            parts[AHEAD] = ahead
        return parts

    def encode(self, rows: Tensor) -> Columns:
        """Returns unit rows (n, D) as they are stored."""
        return encode(rows, self.storage)

    def stored(self, rows: Tensor) -> Tensor:
        """Returns the rows (n, D) float32 that would be read back if these unit rows were stored."""
        return decode(encode(rows, self.storage)).float()

    def put(self, slots: Tensor, ids: Tensor, columns: Columns, group: Tensor) -> ExactIndex:
        """Returns the index with rows added; see ``Index.put``."""
        places = slots.tolist()
        if not places:
            return self
        used = max(self._used, max(places) + 1)
        self.blocks.reserve(used)
        written = {**columns, "id": ids, "hash": self._hash(columns)}
        if self.coarse:
            written |= coarse(columns["row"].numpy())
        self.blocks.write(slots, written)
        groups = self._grown_groups(used)
        all_new = min(places) >= self._used
        if not all_new:
            # Other versions of the index may be reading these slots; nobody reads beyond the slots in use.
            groups = _copied(groups)
        if not all_new or len(places) < used - self._used:
            array_if_on_cpu(groups)[self._used : used] = 0  # new slots that are not written stay empty
        found_before = 0
        if not all_new:
            found_before = _count(array_if_on_cpu(groups)[array_if_on_cpu(slots)])
        changed = self._regrouped(groups, used, slots, group, found_before)
        if self.scanned:
            changed._rounded = self._rounded + len(places)
            changed._left_out = self._left_out + _sum(written["residual"])
            changed._scales = self._scales + _sum(written["scale"])
        if "residual" in columns:
            changed.residual = max(self.residual, float(columns["residual"].max()))
        return changed

    def put_all(self, ids: Tensor, columns: Columns, group: Tensor) -> ExactIndex:
        """Returns the index with rows added in slots 0 … n - 1, reusing the memory of the columns; see ``put``.

        The index must have no rows yet and must be in main memory.
        """
        encoded = {name: columns[name] for name in self.encoded}
        hashes = torch.as_tensor(self._hash(columns))
        self.blocks.adopt({**encoded, "id": ids, "hash": hashes})
        count = len(ids)
        groups = self._grown_groups(count)
        every_slot = torch.arange(count)
        return self._regrouped(groups, count, every_slot, group, 0)

    def put_unread(self, slots: Tensor, ids: Tensor, group: Tensor) -> ExactIndex:
        """Returns the index with slots in use whose rows are still missing, until ``fill`` writes them; see ``put``.

        The index must have no rows yet and must be in main memory.
        """
        used = int(slots.max()) + 1
        room = rounded_up(used, self.blocks.block)  # whole blocks, because ``adopt`` does not copy those
        shape, dtype = self.blocks.kinds["row"]
        rows = torch.from_numpy(scattered_memory(room * self.dim * dtype.itemsize))
        all_ids = torch.zeros(room, dtype=torch.int64)
        all_ids[slots] = ids
        hashes = torch.zeros(room, dtype=torch.int64)
        self.blocks.adopt({"row": rows.view(dtype).view(room, *shape), "id": all_ids, "hash": hashes})
        groups = self._grown_groups(used)
        groups[:used] = 0
        return self._regrouped(groups, used, slots, group, 0)

    def fill(self, slots: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Writes encoded rows into slots (n,) that ``put_unread`` left without rows."""
        encoded = dict(columns)
        self.blocks.write(slots, {**encoded, "id": self.ids(slots), "hash": self._hash(encoded)})

    def hide(self, slots: Tensor) -> ExactIndex:
        """Returns the index with the rows in these slots (n,) hidden."""
        return self.show(slots, torch.zeros_like(slots, dtype=torch.uint8))

    def show(self, slots: Tensor, group: Tensor) -> ExactIndex:
        """Returns the index with the rows in these slots (n,) no longer hidden, each in its group (n,)."""
        groups = _copied(self._groups)
        found_before = _count(array_if_on_cpu(groups)[array_if_on_cpu(slots)])
        return self._regrouped(groups, self._used, slots, group, found_before)

    def _grown_groups(self, slots: int) -> Tensor:
        """Returns the groups with room for this many slots, copied only if they have to grow."""
        room = len(self._groups)
        if slots <= room:
            return self._groups
        return _copied(self._groups, max(2 * room, rounded_up(slots, TILE)))

    def _regrouped(self, groups: Tensor, used: int, slots: Tensor, group: Tensor, found_before: int) -> ExactIndex:
        """Returns the index with other groups and another number of slots in use.

        Args:
            groups: the groups of all slots; changed in place and used by the returned index.
            used: how many slots are in use.
            slots: (n,) the slots whose group changes.
            group: (n,) their new groups.
            found_before: how many of the rows in ``slots`` could be found until now.
        """
        new_values = array_if_on_cpu(group)
        array_if_on_cpu(groups)[array_if_on_cpu(slots)] = new_values
        changed = object.__new__(type(self))  # a shallow copy, in a fifth of the time that copy.copy takes
        changed.__dict__.update(self.__dict__)
        changed._groups = groups
        changed._used = used
        changed._hidden = used - (self.count - found_before + _count(new_values))
        return changed

    def _hash(self, columns: Columns) -> Any:
        """Returns the hashes (n,) of encoded rows: equal for equal rows, and almost certainly different for others."""
        row = array_if_on_cpu(columns["row"].view(WORD[self.storage]))
        keys = self._hash_keys
        hashes: list[Any] = []
        step = max(1, HASHED_AT_ONCE // self.dim)
        for start in range(0, row.shape[0], step):
            piece = slice(start, start + step)
            total = numpy.vecdot(row[piece], keys[0])  # modulo 2**64
            if "fine" in columns:
                total = total + numpy.vecdot(array_if_on_cpu(columns["fine"])[piece], keys[1])
                total = total ^ array_if_on_cpu(columns["scale"].view(torch.int32))[piece, 0]
            hashes.append(total)
        if len(hashes) == 1:
            return hashes[0]
        return torch.cat([torch.as_tensor(total) for total in hashes])

    def ids(self, slots: Tensor) -> Tensor:
        """Returns the ids (n,) of the rows in these slots."""
        return self.blocks.take(slots, "id")["id"]

    def find(self, ids: Sequence[int]) -> list[int]:
        """Returns the slots of the rows with these ids; -1 for a row that is hidden or not there."""
        arrays = self.blocks.arrays()["id"]
        groups = array_if_on_cpu(self._groups)
        return [self._slot_of(row, arrays, groups) for row in ids]

    def _slot_of(self, row: int, arrays: list[Any], groups: Any) -> int:
        """Returns the slot of the row with this id, or -1."""
        size = self.blocks.block
        low = 0
        high = self._used
        while low < high:  # binary search first: ids rise from slot to slot until a slot is reused
            middle = (low + high) // 2
            if arrays[middle // size][middle % size] < row:
                low = middle + 1
            else:
                high = middle
        if low < self._used and arrays[low // size][low % size] == row and groups[low]:
            return low
        for number, array in enumerate(arrays):
            same = array[: max(0, self._used - number * size)] == row
            for place in same.nonzero()[0].tolist():
                if groups[number * size + place]:
                    return number * size + int(place)
        return -1

    def rows(self, slots: Tensor) -> Tensor:
        """Returns the rows in these slots, (n, D) float32."""
        return decode(self.state(slots)).float()

    def state(self, slots: Tensor) -> Columns:
        """Returns the encoded rows in these slots, as ``put`` takes them."""
        return self.blocks.take(slots, *self.encoded)

    def search(self, queries: Tensor, k: int, *, group: int | None = None, exclude: Tensor | None = None) -> Found:
        """Returns the k rows nearest to each query; see ``Index.search``."""
        return self.search_groups(queries, [(k, group)], exclude=exclude)[0]

    def search_groups(self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None) -> list[Found]:
        """Returns the result of ``search`` for each pair of a number of rows and a group; reads all rows only once."""
        count = len(queries)
        exclude = self.checked_exclude(exclude, count)
        wanted = [(min(k, self._used), group) for k, group in wanted]
        if not self._used or not count:
            return [self._nothing(count, k) for k, _ in wanted]
        nearest: Callable[..., list[Found]] = batch.nearest
        by_bytes = exclude is None and single.reads_bytes(self)
        if queries.is_cpu and (count <= MOST_IN_NUMPY or by_bytes):
            nearest = single.nearest
        size = max(1, BOUNDS_AT_ONCE // self.padded)
        if count <= size:
            return nearest(self, queries, wanted, exclude)
        parts = []
        for start in range(0, count, size):
            part = slice(start, start + size)
            excluded = None if exclude is None else exclude[part]
            parts.append(nearest(self, queries[part], wanted, excluded))
        return [one_after_another(pieces) for pieces in zip(*parts, strict=True)]

    def products(self, vectors: Tensor) -> ExactProducts | None:
        """Returns the products of all rows with vectors (J, D); see ``Multiplying.products``."""
        count = len(vectors)
        if count * self.padded > BOUNDS_AT_ONCE:
            return None
        if count * COORDINATES_PER_VECTOR > self.dim or count * ROWS_PER_VECTOR > self._used:
            return None
        return ExactProducts(self, vectors)

    @property
    def bytes_tell(self) -> bool:
        """Whether rows have bytes that are worth reading first: if one coordinate dominates, they say too little."""
        if not self._rounded:
            return False
        left_out = self._left_out / self._rounded
        largest = LARGEST_BYTE * self._scales / self._rounded  # the largest coordinate of a row
        return left_out <= MOST_LEFT_OUT * (1 - largest**2)

    def _nothing(self, queries: int, k: int) -> Found:
        """Returns a result in which no rows were found."""
        nothing = torch.full((queries, k), -1, device=self.device)
        lowest = torch.full((queries, k), -torch.inf, dtype=torch.float64, device=self.device)
        return Found(nothing, nothing, lowest)

    def usable(self, group: int | None) -> Any:
        """Returns a mask (slots,) of the slots in use whose rows can be found in a group; None if all of them can.

        The mask is a NumPy array in main memory and a tensor on any other device.
        """
        if group is None and not self._hidden:
            return None
        groups = array_if_on_cpu(self._groups)[: self._used]
        return groups != 0 if group is None else groups == group

    @property
    def groups(self) -> Array:
        """The group of each slot in use (slots,), 0 where the row is hidden; the index must be in main memory."""
        return self._groups.numpy()[: self._used]

    def count_of(self, group: int | None) -> int:
        """Returns how many rows of a group can be found; None counts all groups."""
        if group is None:
            return self.count
        return int(numpy.count_nonzero(self.groups == group))

    def group_code(self, group: int | None) -> int:
        """Returns a group as kernels expect it: 0 for all rows that are not hidden, -1 for all rows if none is."""
        if group is not None:
            return group
        if self._hidden:
            return 0
        return -1

    def shows(self, slots: Array) -> Array:
        """Returns whether each of these slots (n,) holds a row that can be found; slots not in use are allowed."""
        used = slots < self._used
        shown = numpy.zeros(len(slots), bool)
        shown[used] = self._groups.numpy()[slots[used]] != 0
        return shown

    def hidden_from(self, group: int | None) -> Tensor | None:
        """Returns a mask (padded,) of the slots that must not be found; None if all rows in use can be found."""
        if group is None and not self._hidden:
            return None
        groups = self._groups[: self.padded]
        hidden = groups == 0 if group is None else groups != group
        hidden[self._used :] = True
        return hidden

    def checked_exclude(self, exclude: Tensor | None, queries: int) -> Tensor | None:
        """Returns the ids to exclude on this device.

        Raises:
            AdaNPCError: if they are not whole numbers, with one row of ids for each query.
        """
        if exclude is None:
            return None
        if exclude.ndim != 2 or len(exclude) != queries or exclude.is_floating_point():
            shape = f"{exclude.dtype} of shape {tuple(exclude.shape)}"
            raise AdaNPCError(f"exclude must be whole numbers of shape ({queries}, E), ids for each query, got {shape}")
        return exclude.to(self.device)


def _count(groups: Any) -> int:
    """Returns how many of these groups (n,) are not hidden."""
    return int(numpy.count_nonzero(to_main_memory(groups)))


def _sum(numbers: Any) -> float:
    """Returns the sum of numbers (n, 1); of a single one, in a fifth of the time that an array takes for it."""
    total: float = sum(numbers.ravel().tolist())
    return total


def _copied(groups: Tensor, room: int = 0) -> Tensor:
    """Returns a copy of these groups with room for at least this many slots; the added room is uninitialized."""
    copied = groups.new_empty(max(room, len(groups)))
    array_if_on_cpu(copied)[: len(groups)] = array_if_on_cpu(groups)
    return copied


def _secret() -> torch.Generator:
    """Returns a generator seeded by the operating system, which leaves torch's global random state untouched."""
    generator = torch.Generator()
    generator.seed()
    return generator
