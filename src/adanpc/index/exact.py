"""ExactIndex: unit rows in slots, and the exact nearest of them."""

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
from adanpc.index.grid import STORAGE, Array, Columns, array_if_on_cpu, decode, encode, to_main_memory
from adanpc.index.protocol import FILE, Found, Wanted, one_after_another
from adanpc.index.unread import scattered_memory

SCORES = 1 << 25  # bounds held at once: 128 MiB
WORDS = 1 << 16  # coordinates hashed at once: what the cache holds
WORD = {
    "float32": torch.int32,
    "float16": torch.int16,
    "int8": torch.int8,
    "progressive": torch.int16,
}  # as which the bits of one are hashed
FEW = 7  # queries in main memory that NumPy answers faster than torch


class ExactIndex:
    """The index that reads every row once for each batch of queries.

    A search bounds the similarity of every row, then scores exactly all rows whose bound could reach the k-th best. The
    result is that of exact arithmetic, for every storage, device, batch size and scan.

    Args:
        dim: length of a row.
        storage: see ``MemoryBank``.
        device: where rows are kept and searched.
        folder: where rows are kept in a file instead, which is gone with the process.
    """

    def __init__(
        self,
        dim: int,
        storage: str = "float32",
        device: torch.device | str = "cpu",
        *,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.dim = dim
        self.storage = require.one_of("storage", storage, STORAGE)
        self.device = torch.device(device)
        self.residual = 0.0  # the largest of any row
        kinds: dict[str, Kind] = {"row": ((dim,), STORAGE[storage]), "id": ((), torch.int64), "hash": ((), torch.int64)}
        if storage == "int8":
            kinds |= {"fine": ((dim,), torch.int8), "scale": ((1,), torch.float32), "residual": ((1,), torch.float32)}
        folders = {}
        if folder is not None:
            folders["row"] = folder
        self.blocks = Blocks(kinds, self.device, folders)
        self.encoded = [name for name in kinds if name not in ("id", "hash")]
        self._used = 0
        self._hidden = 0  # slots in use whose row is not to be found
        self._groups = torch.zeros(TILE, dtype=torch.uint8, device=self.device)  # of each slot; 0 is hidden
        # Random numbers that nobody outside knows: rows that are not equal but have equal hashes cannot be crafted.
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
        """How many slots a scan reads: whole tiles."""
        return -(-self._used // TILE) * TILE

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
        """Bytes that so many slots need, by what they are for."""
        row = self.dim * STORAGE[self.storage].itemsize
        where = "rows"
        if self.blocks.folders:
            where = FILE
        return {where: slots * row, "beside rows": slots * (self.blocks.slot_bytes + 1 - row)}

    def encode(self, rows: Tensor) -> Columns:
        """Unit rows (n, D) as they are stored."""
        return encode(rows, self.storage)

    def stored(self, rows: Tensor) -> Tensor:
        """What unit rows are read back as once they are put, (n, D) float32."""
        return decode(encode(rows, self.storage)).float()

    def put(self, slots: Tensor, ids: Tensor, columns: Columns, group: Tensor) -> ExactIndex:
        """With encoded rows in these slots (n,), each under its id (n,) and in its group (n,); group 0 is hidden."""
        places = slots.tolist()
        if not places:
            return self
        used = max(self._used, max(places) + 1)
        self.blocks.reserve(used)
        self.blocks.write(slots, {**columns, "id": ids, "hash": self._hash(columns)})
        groups = self._with_room(used)
        all_new = min(places) >= self._used
        if not all_new:
            groups = _copied(groups)  # others may read these; what lies beyond the slots in use is read by nobody
        if not all_new or len(places) < used - self._used:
            array_if_on_cpu(groups)[self._used : used] = 0  # slots that are not among these stay empty
        found_before = 0
        if not all_new:
            found_before = _count(array_if_on_cpu(groups)[array_if_on_cpu(slots)])
        changed = self._regrouped(groups, used, slots, group, found_before)
        if "residual" in columns:
            changed.residual = max(self.residual, float(columns["residual"].max()))
        return changed

    def put_all(self, ids: Tensor, columns: Columns, group: Tensor) -> ExactIndex:
        """``put`` in slots 0 … n - 1 of an index in main memory that has no rows; it takes over the columns' memory."""
        encoded = {name: columns[name] for name in self.encoded}
        self.blocks.adopt({**encoded, "id": ids, "hash": torch.as_tensor(self._hash(columns))})
        count = len(ids)
        return self._regrouped(self._with_room(count), count, torch.arange(count), group, 0)

    def put_unread(self, slots: Tensor, ids: Tensor, group: Tensor) -> ExactIndex:
        """``put`` for an index in main memory that has no rows, without the rows, which ``fill`` adds later."""
        used = int(slots.max()) + 1
        room = -(-used // self.blocks.block) * self.blocks.block  # whole blocks, which are not copied
        shape, dtype = self.blocks.kinds["row"]
        rows = torch.from_numpy(scattered_memory(room * self.dim * dtype.itemsize))
        all_ids = torch.zeros(room, dtype=torch.int64)
        all_ids[slots] = ids
        hashes = torch.zeros(room, dtype=torch.int64)
        self.blocks.adopt({"row": rows.view(dtype).view(room, *shape), "id": all_ids, "hash": hashes})
        groups = self._with_room(used)
        groups[:used] = 0
        return self._regrouped(groups, used, slots, group, 0)

    def fill(self, slots: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Writes the encoded rows of slots (n,) that were put without them."""
        encoded = dict(columns)
        self.blocks.write(slots, {**encoded, "id": self.ids(slots), "hash": self._hash(encoded)})

    def hide(self, slots: Tensor) -> ExactIndex:
        """With the rows in these slots no longer to be found."""
        return self.show(slots, torch.zeros_like(slots, dtype=torch.uint8))

    def show(self, slots: Tensor, group: Tensor) -> ExactIndex:
        """With the rows in these slots to be found again, each in its group (n,)."""
        groups = _copied(self._groups)
        found_before = _count(array_if_on_cpu(groups)[array_if_on_cpu(slots)])
        return self._regrouped(groups, self._used, slots, group, found_before)

    def _with_room(self, slots: int) -> Tensor:
        """The groups, with room for so many slots."""
        room = len(self._groups)
        if slots <= room:
            return self._groups
        return _copied(self._groups, max(2 * room, -(-slots // TILE) * TILE))

    def _regrouped(self, groups: Tensor, used: int, slots: Tensor, group: Tensor, found_before: int) -> ExactIndex:
        """With so many slots in use, in these groups but for those slots (n,), which are in others (n,).

        Args:
            groups: of all slots, which become those of the index.
            used: how many slots are in use.
            slots: whose group changes.
            group: of each of these.
            found_before: how many of their rows could be found until now.
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
        """A number (n,) for each encoded row that equal rows share, and others by no chance worth mentioning."""
        row = array_if_on_cpu(columns["row"].contiguous().view(WORD[self.storage]))
        keys = self._hash_keys
        hashes: list[Any] = []
        step = max(1, WORDS // self.dim)
        for start in range(0, row.shape[0], step):
            piece = slice(start, start + step)
            total = (row[piece] * keys[0]).sum(1)  # modulo 2**64
            if "fine" in columns:
                total = total + (array_if_on_cpu(columns["fine"])[piece] * keys[1]).sum(1)
                total = total ^ array_if_on_cpu(columns["scale"].contiguous().view(torch.int32))[piece, 0]
            hashes.append(total)
        if len(hashes) == 1:
            return hashes[0]
        return torch.cat([torch.as_tensor(total) for total in hashes])

    def ids(self, slots: Tensor) -> Tensor:
        """The ids (n,) of the rows in these slots."""
        return self.blocks.take(slots, "id")["id"]

    def find(self, ids: Sequence[int]) -> list[int]:
        """The slots of the rows under these ids; -1 where no row under it can be found."""
        arrays = self.blocks.arrays()["id"]
        groups = array_if_on_cpu(self._groups)
        return [self._slot_of(row, arrays, groups) for row in ids]

    def _slot_of(self, row: int, arrays: list[Any], groups: Any) -> int:
        """The slot of one row, or -1."""
        size = self.blocks.block
        low = 0
        high = self._used
        while low < high:  # as if ids rose from slot to slot, which they do until a slot is used again
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
        """The rows in these slots, (n, D) float32."""
        return decode(self.state(slots)).float()

    def state(self, slots: Tensor) -> Columns:
        """The encoded rows in these slots, as ``put`` takes them."""
        return self.blocks.take(slots, *self.encoded)

    def search(self, queries: Tensor, k: int, *, group: int | None = None, exclude: Tensor | None = None) -> Found:
        """The k nearest rows of unit queries (B, D), of one group if given, without the ids in ``exclude`` (B, E)."""
        return self.search_groups(queries, [(k, group)], exclude=exclude)[0]

    def search_groups(self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None) -> list[Found]:
        """What ``search`` finds for each of several numbers of rows and groups; all rows are read once for all."""
        count = len(queries)
        exclude = self.checked_exclude(exclude, count)
        wanted = [(min(k, self._used), group) for k, group in wanted]
        if not self._used or not count:
            return [self._nothing(count, k) for k, _ in wanted]
        nearest: Callable[..., list[Found]] = batch.nearest
        if count <= FEW and queries.is_cpu:
            nearest = single.nearest
        size = max(1, SCORES // self.padded)
        if count <= size:
            return nearest(self, queries, wanted, exclude)
        parts = []
        for start in range(0, count, size):
            part = slice(start, start + size)
            excluded = None if exclude is None else exclude[part]
            parts.append(nearest(self, queries[part], wanted, excluded))
        return [one_after_another(pieces) for pieces in zip(*parts, strict=True)]

    def _nothing(self, queries: int, k: int) -> Found:
        nothing = torch.full((queries, k), -1, device=self.device)
        return Found(nothing, nothing, nothing.double() * torch.inf)

    def usable(self, group: int | None) -> Any:
        """Which of the slots in use may be found (slots,), as NumPy reads them; None if all may be."""
        if group is None and not self._hidden:
            return None
        groups = array_if_on_cpu(self._groups)[: self._used]
        return groups != 0 if group is None else groups == group

    @property
    def groups(self) -> Array:
        """The group of each slot in use (slots,), 0 where the row is hidden: of an index in main memory."""
        return self._groups.numpy()[: self._used]

    def count_of(self, group: int | None) -> int:
        """How many rows of a group can be found, or of all."""
        if group is None:
            return self.count
        return int(numpy.count_nonzero(self.groups == group))

    def group_code(self, group: int | None) -> int:
        """A group as kernels take it: 0 for all rows that are not hidden, -1 for all if none is."""
        if group is not None:
            return group
        if self._hidden:
            return 0
        return -1

    def shows(self, slots: Array) -> Array:
        """Whether each of these slots (n,), which may not be in use, holds a row that can be found."""
        used = slots < self._used
        shown = numpy.zeros(len(slots), bool)
        shown[used] = self._groups.numpy()[slots[used]] != 0
        return shown

    def hidden_from(self, group: int | None) -> Tensor | None:
        """Which of the slots that a scan reads may not be found (padded,); None if all in use may be."""
        if group is None and not self._hidden:
            return None
        groups = self._groups[: self.padded]
        hidden = groups == 0 if group is None else groups != group
        hidden[self._used :] = True
        return hidden

    def checked_exclude(self, exclude: Tensor | None, queries: int) -> Tensor | None:
        """Ids to exclude on this device, or an error unless there is a row of them for each query."""
        if exclude is None:
            return None
        if exclude.ndim != 2 or len(exclude) != queries or exclude.is_floating_point():
            shape = f"{exclude.dtype} of shape {tuple(exclude.shape)}"
            raise AdaNPCError(f"exclude must be whole numbers of shape ({queries}, E), ids for each query, got {shape}")
        return exclude.to(self.device)


def _count(groups: Any) -> int:
    """How many of these groups (n,) are not hidden."""
    return int(numpy.count_nonzero(to_main_memory(groups)))


def _copied(groups: Tensor, room: int = 0) -> Tensor:
    """A copy of these groups, with room for so many slots; what is added holds anything."""
    copied = groups.new_empty(max(room, len(groups)))
    array_if_on_cpu(copied)[: len(groups)] = array_if_on_cpu(groups)
    return copied


def _secret() -> torch.Generator:
    """A generator seeded by the operating system, apart from torch's own random state."""
    generator = torch.Generator()
    generator.seed()
    return generator
