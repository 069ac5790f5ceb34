"""Write an index for a bank: three tensors, and a search that compares every query with every row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adanpc import Append, MemoryBank, Veto
from adanpc.index import Found, Wanted
from adanpc.testing import check_index


class PlainIndex:
    """Keeps every promise of `adanpc.index.Index`, for float32. It is a value: a change returns another index."""

    def __init__(self, dim: int, storage: str, device: torch.device) -> None:
        if storage != "float32":
            raise ValueError(f"PlainIndex stores rows as float32 only, got storage={storage!r}")
        self.dim = dim
        self.storage = storage
        self.device = device
        self._rows = torch.zeros(0, dim, device=device)  # (slots, D)
        self._ids = torch.zeros(0, dtype=torch.int64, device=device)  # (slots,)
        self._groups = torch.zeros(0, dtype=torch.uint8, device=device)  # (slots,); rows of group 0 are hidden

    @property
    def slots(self) -> int:
        return len(self._ids)

    @property
    def visible(self) -> Tensor:
        return self._groups.nonzero()[:, 0]

    @property
    def count(self) -> int:
        return len(self.visible)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._ids.nbytes + self._groups.nbytes

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        return {"row": rows}

    def stored(self, rows: Tensor) -> Tensor:
        return rows

    def ids(self, slots: Tensor) -> Tensor:
        return self._ids[slots]

    def rows(self, slots: Tensor) -> Tensor:
        return self._rows[slots]

    def state(self, slots: Tensor) -> dict[str, Tensor]:
        return {"row": self._rows[slots]}

    def put(self, slots: Tensor, ids: Tensor, columns: dict[str, Tensor], group: Tensor) -> PlainIndex:
        used = max([self.slots, *(slots + 1).tolist()])
        changed = type(self)(self.dim, self.storage, self.device)
        changed._rows = _resized(self._rows, used).index_copy(0, slots, columns["row"])
        changed._ids = _resized(self._ids, used).index_copy(0, slots, ids)
        changed._groups = _resized(self._groups, used).index_copy(0, slots, group)
        return changed

    def hide(self, slots: Tensor) -> PlainIndex:
        return self.show(slots, torch.zeros_like(slots, dtype=torch.uint8))

    def show(self, slots: Tensor, group: Tensor) -> PlainIndex:
        return self.put(slots, self.ids(slots), self.state(slots), group)

    def search(self, queries: Tensor, k: int, *, group: int | None = None, exclude: Tensor | None = None) -> Found:
        # Coordinates are multiples of 2**-24, so float64 adds up their products without rounding.
        similarity = queries.double() @ self._rows.double().T  # (B, slots)
        hidden = self._groups == 0
        if group is not None:
            hidden = self._groups != group
        similarity = similarity.masked_fill(hidden, -torch.inf)
        if exclude is not None:
            excluded = (self._ids[:, None] == exclude[:, None, :]).any(2)  # (B, slots)
            similarity = similarity.masked_fill(excluded, -torch.inf)
        by_id = self._ids.argsort()  # a stable sort leaves ties in this order: the lowest id first
        similarity, order = similarity[:, by_id].sort(dim=1, descending=True, stable=True)
        similarity = similarity[:, :k]
        slots = by_id[order[:, :k]]
        missing = similarity == -torch.inf  # where there are fewer than k rows
        return Found(slots.masked_fill(missing, -1), self._ids[slots].masked_fill(missing, -1), similarity)

    def search_groups(self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None) -> list[Found]:
        return [self.search(queries, k, group=group, exclude=exclude) for k, group in wanted]


def _resized(column: Tensor, slots: int) -> Tensor:
    """A copy of the column, filled up with zeros to this many slots."""
    larger = column.new_zeros(slots, *column.shape[1:])
    larger[: len(column)] = column
    return larger


if __name__ == "__main__":
    check_index(PlainIndex)  # exact, ties to the lowest id, and older indexes stay as they were

    bank = MemoryBank(dim=2, classes=2, index=PlainIndex)
    bank.apply(Append(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]), labels=torch.tensor([0, 0, 1])))
    query = torch.tensor([[1.0, 0.02]])
    print(f"nearest rows: {bank.search(query, k=2).ids[0].tolist()}")
    bank.apply(Veto((0,)))
    print(f"without row 0: {bank.search(query, k=2).ids[0].tolist()}")
