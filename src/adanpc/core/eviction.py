"""Which admitted row leaves when a bank with a capacity is full."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush

POLICIES = ("fifo", "balanced", "reservoir")


class Eviction:
    """Admitted rows that may vote, in the order in which they leave: a function of ids and labels, so never saved.

    ``fifo``: the oldest leaves. ``balanced``: the oldest of the largest class, ties to the lowest class.
    ``reservoir``: a uniform sample of all rows ever admitted stays, since the one with the lowest random rank leaves.

    Args:
        policy: one of these.
        capacity: how many rows may stay.
        seed: of the random ranks. Whoever knows it can tell which rows will stay.
    """

    def __init__(self, policy: str, capacity: int, seed: int = 0) -> None:
        self.policy = policy
        self.capacity = capacity
        self.seed = seed
        self._heaps: dict[int, list[tuple[int, int, int]]] = {}  # (rank, id, label), by class if balanced, else one
        self._count = 0

    def push(self, row: int, label: int) -> tuple[int, int]:
        """Takes in one row; the id and label of the row that leaves for it, perhaps itself, or -1 and -1."""
        self.add(row, label)
        if self._count <= self.capacity:
            return -1, -1
        return self._pop()

    def add(self, row: int, label: int) -> None:
        """Takes in one row, whatever the capacity."""
        rank = row
        if self.policy == "reservoir":
            rank = random_rank(row, self.seed)
        heappush(self._heaps.setdefault(self._heap_of(label), []), (rank, row, label))
        self._count += 1

    def overflow(self, protected: Collection[int]) -> list[int]:
        """The ids of the rows that leave until the capacity is kept, protected ones only if no others are left."""
        leaving: list[int] = []
        set_aside: list[tuple[int, int]] = []  # protected rows whose turn had come
        while self._count + len(set_aside) > self.capacity:
            if not self._count:  # only protected rows are left: the first in turn leaves
                row, _ = set_aside.pop(0)
                leaving.append(row)
                continue
            row, label = self._pop()
            if row in protected:
                set_aside.append((row, label))
            else:
                leaving.append(row)
        for row, label in set_aside:
            self.add(row, label)
        return leaving

    def discard(self, row: int, label: int) -> None:
        """Forgets a row that may no longer vote or is no longer held."""
        key = self._heap_of(label)
        heap = [(rank, other, of_class) for rank, other, of_class in self._heaps[key] if other != row]
        heapify(heap)
        self._heaps[key] = heap
        self._count -= 1

    def copy(self) -> Eviction:
        """An independent queue of the same rows."""
        other = Eviction(self.policy, self.capacity, self.seed)
        other._heaps = {key: heap.copy() for key, heap in self._heaps.items()}
        other._count = self._count
        return other

    def _heap_of(self, label: int) -> int:
        return label if self.policy == "balanced" else 0

    def _pop(self) -> tuple[int, int]:
        """The id and label of the row that leaves next."""
        largest = min(self._heaps, key=lambda key: (-len(self._heaps[key]), key))
        _, row, label = heappop(self._heaps[largest])
        self._count -= 1
        return row, label


def random_rank(row: int, seed: int) -> int:
    """A fixed pseudo-random 64-bit number for each id: the id-th output of SplitMix64 with this seed."""
    mask = (1 << 64) - 1
    value = (seed + (row + 1) * 0x9E3779B97F4A7C15) & mask
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return value ^ (value >> 31)
