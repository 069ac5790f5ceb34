"""How many whole pieces hold a number of things."""

from __future__ import annotations


def ceil_div(count: int, size: int) -> int:
    """Returns how many pieces of this size hold ``count`` things: their quotient, rounded up."""
    return -(-count // size)


def rounded_up(count: int, size: int) -> int:
    """Returns the room in as many pieces of this size as hold ``count`` things: the next multiple of the size."""
    return -(-count // size) * size
