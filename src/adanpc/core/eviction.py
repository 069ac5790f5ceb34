"""Which admitted row leaves when a bank with a capacity is full."""

from __future__ import annotations

from heapq import heappop, heappush

POLICIES = ("fifo", "balanced", "reservoir")


class Eviction:
    """Admitted rows in the order in which they leave: a function of their ids and labels, so never saved.

    ``fifo``: the oldest leaves. ``balanced``: the oldest of the largest class, ties to the lowest class.
    ``reservoir``: a uniform sample of all rows ever admitted stays, since the one with the lowest random rank leaves.
    """

    def __init__(self, policy: str, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        self.heaps: dict[int, list[tuple[int, int, int]]] = {}  # (rank, id, label), by class if balanced, else one

    def __len__(self) -> int:
        return sum(map(len, self.heaps.values()))

    def push(self, row: int, label: int) -> tuple[int, int]:
        """Takes in one row; the id and label of the row that leaves for it, perhaps itself, or -1 and -1."""
        rank = _random_rank(row) if self.policy == "reservoir" else row
        heappush(self.heaps.setdefault(label if self.policy == "balanced" else 0, []), (rank, row, label))
        if len(self) <= self.capacity:
            return -1, -1
        largest = min(self.heaps, key=lambda name: (-len(self.heaps[name]), name))
        _, row, label = heappop(self.heaps[largest])
        return row, label

    def copy(self) -> Eviction:
        """An independent queue of the same rows."""
        other = Eviction(self.policy, self.capacity)
        other.heaps = {name: heap.copy() for name, heap in self.heaps.items()}
        return other


def _random_rank(row: int) -> int:
    """A fixed pseudo-random 64-bit number for each id (splitmix64)."""
    mask = (1 << 64) - 1
    value = (row + 1) * 0x9E3779B97F4A7C15 & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31
