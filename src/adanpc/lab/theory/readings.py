"""Functions that read numbers from simulation records, group the records, and average over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from adanpc.lab.show.exhibit import Value, value

Record = dict[str, Any]
Group = Sequence[Record]
Reading = Callable[[Record], float]


def mean(group: Group, read: Reading) -> Value:
    """Returns the mean of a reading over a group of at least one record, with its standard error."""
    result = value([read(record) for record in group])
    assert result is not None, "a group has records"
    return result


def excess(name: str) -> Reading:
    """Returns a function that reads the excess error of a vote."""
    return lambda record: float(record["excess"][name])


def bound(name: str) -> Reading:
    """Returns a function that reads the bound of Proposition ``2``, ``3`` or, for the half split, ``3 half``."""
    return lambda record: float(record["bound"][name])


def divergence(name: str) -> Reading:
    """Returns a function that reads a quantity of Proposition 1."""
    return lambda record: float(record["divergence"][name])


def by(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Returns the records in groups that share a key, in order of appearance."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups
