"""Which admitted row leaves when a bank with a capacity is full."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush

POLICIES = ("fifo", "balanced", "reservoir")


class Eviction:
    """A queue of the admitted rows that may vote, in the order in which they leave.

    The order depends on ids, labels and the settings alone, so the queue need not be saved. The policies:

    * ``fifo``: the oldest row leaves.
    * ``balanced``: the oldest row of the largest class leaves, ties to the lowest class.
    * ``reservoir``: the row with the lowest random rank leaves, so that a uniform sample of all rows ever admitted
      stays.

    Args:
        policy: the name of a policy.
        capacity: how many rows may stay.
        seed: seed of the random ranks. Whoever knows it can tell which rows will stay.
    """

    def __init__(self, policy: str, capacity: int, seed: int = 0) -> None:
        self.policy = policy
        self.capacity = capacity
        self.seed = seed
        # Entries are (rank, id, label), so that the lowest rank comes first. One heap for each class if the policy is
        # balanced, else a single one.
        self._heaps: dict[int, list[tuple[int, int, int]]] = {}
        self._count = 0

    def push(self, row: int, label: int) -> tuple[int, int]:
        """Adds a row, and returns the id and label of the row that leaves, perhaps that same row; -1, -1 if none."""
        self.add(row, label)
        if self._count <= self.capacity:
            return -1, -1
        return self._pop()

    def add(self, row: int, label: int) -> None:
        """Adds a row, even beyond the capacity."""
        rank = row
        if self.policy == "reservoir":
            rank = random_rank(row, self.seed)
        heap = self._heaps.setdefault(self._heap_of(label), [])
        heappush(heap, (rank, row, label))
        self._count += 1

    def overflow(self, protected: Collection[int]) -> list[int]:
        """Removes rows until the capacity is no longer exceeded, and returns their ids.

        Protected rows leave only when no others are left.
        """
        leaving: list[int] = []
        set_aside: list[tuple[int, int]] = []  # protected rows that were passed over, with their labels
        while self._count + len(set_aside) > self.capacity:
            if not self._count:  # only protected rows are left: the one that was passed over first leaves
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
        """Removes a row that may no longer vote or is no longer held."""
        key = self._heap_of(label)
        heap = [entry for entry in self._heaps[key] if entry[1] != row]
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
        """The key of the heap for rows of this label."""
        if self.policy == "balanced":
            return label
        return 0

    def _pop(self) -> tuple[int, int]:
        """Removes the row that leaves next, and returns its id and label."""
        key = self._largest_heap()
        _, row, label = heappop(self._heaps[key])
        self._count -= 1
        return row, label

    def _largest_heap(self) -> int:
        """The key of the heap with the most rows, ties to the lowest key."""
        return min(self._heaps, key=lambda key: (-len(self._heaps[key]), key))


def random_rank(row: int, seed: int) -> int:
    """A fixed pseudo-random 64-bit number for each id: the id-th output of SplitMix64 with this seed."""
    mask = (1 << 64) - 1  # arithmetic is modulo 2**64
    value = (seed + (row + 1) * 0x9E3779B97F4A7C15) & mask
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return value ^ (value >> 31)
