"""Changes: everything that can be done to a bank, as values that can be logged and replayed.

A change is a value, not an action: it describes an effect, such as which rows enter or who vetoed which rows.
``MemoryBank.apply`` and ``AdaNPC.apply`` carry it out, and replaying all changes on an empty bank gives the same bank
again.

Every change says who made it, why, and when, as far as the caller knows; the core reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from operator import index
from reprlib import repr as brief
from typing import Any, NamedTuple

from torch import Tensor

from adanpc import require
from adanpc.core.transform import Transform
from adanpc.core.types import Origin
from adanpc.errors import ChangeError

VERDICTS = ("veto", "restore", "relabel")
LARGEST_ID = 2**63 - 1


class Judgment(NamedTuple):
    """What a person decided about a row; it is kept for as long as the row is held."""

    verdict: str  # one of VERDICTS
    label: int  # the label that the row had until then
    who: str = ""
    why: str = ""
    when: float | None = None  # seconds since 1970


@dataclass(frozen=True, eq=False)
class Observed:
    """What queries add to the statistics of the stream, whether or not they join."""

    total: Tensor  # (D,) float64, the sum of their features
    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", require.whole("count", self.count, least=0))


@require.names_its_arguments
@dataclass(frozen=True, eq=False)  # comparing tensors gives a tensor, not a single answer
class Append:
    """Rows are stored, in this order. Features need not have unit length.

    Users give the first few arguments. Those from ``centered`` to ``stream`` are filled in by the classifier, so that
    the change alone says everything that it does.

    Args:
        features: (n, D) features.
        labels: (n,) whole numbers from 0 to C - 1.
        origin: where the rows come from.
        soft: (n, C) class probabilities, for banks with soft labels.
        domain: (n,) domain numbers, or one number for all rows; -1 means unknown.
        confidence: (n,) how confident the answers were that made these labels; 1 by default.
        keys: (n,) the user's own numbers for the rows; -1 by default.
        centered: whether the features are already as the bank is to store them; if not, ``AdaNPC.apply`` centers or
            transforms them.
        source_mean: (D,) float64, the new mean of the source.
        observed: what to add to the statistics of the stream.
        transform: the new transform of the preset "safe".
        stream: float64, what that preset now knows about the stream, as ``guard.Stream`` packs it.
        who, why, when: who makes the change, for what reason, and when, in seconds since 1970.
    """

    features: Tensor
    labels: Tensor
    origin: Origin = Origin.SOURCE
    soft: Tensor | None = None
    domain: Tensor | int = -1
    confidence: Tensor | None = None
    keys: Tensor | None = None
    centered: bool = False
    source_mean: Tensor | None = None
    observed: Observed | None = None
    transform: Transform | None = None
    stream: Tensor | None = None
    who: str = ""
    why: str = ""
    when: float | None = None

    def __post_init__(self) -> None:
        _check_signature(self)

    def __repr__(self) -> str:
        shape = tuple(getattr(self.features, "shape", ()))
        return f"<Append of features {shape}, origin {brief(self.origin)}{_signature(self)}>"


@require.names_its_arguments
@dataclass(frozen=True)
class Veto:
    """Rows may no longer vote. They stay in the bank and can be restored."""

    ids: tuple[int, ...]
    who: str = ""
    why: str = ""
    when: float | None = None

    def __post_init__(self) -> None:
        _take_ids(self)
        _check_signature(self)


@require.names_its_arguments
@dataclass(frozen=True)
class Restore:
    """Vetoed rows may vote again."""

    ids: tuple[int, ...]
    who: str = ""
    why: str = ""
    when: float | None = None

    def __post_init__(self) -> None:
        _take_ids(self)
        _check_signature(self)


@require.names_its_arguments
@dataclass(frozen=True)
class Relabel:
    """Rows get another label; the old one stays in their history.

    An admitted row that is relabeled becomes an expert's row, because a person has vouched for its label; so it will
    never be evicted.

    Args:
        ids: the rows.
        label: one label for all rows, or one for each, in the order of ids; then no id may occur twice.
        who, why, when: as in every change.
    """

    ids: tuple[int, ...]
    label: int | tuple[int, ...]
    who: str = ""
    why: str = ""
    when: float | None = None

    def __post_init__(self) -> None:
        _take_ids(self)
        if isinstance(self.label, list | tuple):
            object.__setattr__(self, "label", _label_of_each(self.ids, self.label))
        else:
            object.__setattr__(self, "label", require.whole("label", self.label))
        _check_signature(self)

    @property
    def labels(self) -> dict[int, int]:
        """The new label of each row."""
        if isinstance(self.label, int):
            return dict.fromkeys(self.ids, self.label)
        return dict(zip(self.ids, self.label, strict=True))


@require.names_its_arguments
@dataclass(frozen=True)
class Delete:
    """Rows leave for good, and so does their history: for data that must no longer be kept."""

    ids: tuple[int, ...]
    who: str = ""
    why: str = ""
    when: float | None = None

    def __post_init__(self) -> None:
        _take_ids(self)
        _check_signature(self)


@require.names_its_arguments
@dataclass(frozen=True)
class Feedback:
    """A person has labeled a query for which the frozen and the adapted answer of the preset "safe" differ.

    Such labels decide which of the two answers is given from then on; see ``AdaNPC.ask``. The query does not join.

    Args:
        label: the true class.
        frozen: the class that was answered without anything learned from the stream.
        adapted: the class that was answered with everything learned from it.
        who, why, when: as in every change.
    """

    label: int
    frozen: int
    adapted: int
    who: str = ""
    why: str = ""
    when: float | None = None

    def __post_init__(self) -> None:
        for name in ("label", "frozen", "adapted"):
            object.__setattr__(self, name, require.whole(name, getattr(self, name)))
        _check_signature(self)


@require.names_its_arguments
@dataclass(frozen=True, eq=False)
class Rollback:
    """The bank returns to an earlier position. ``AdaNPC.rollback`` makes such a change.

    It holds the difference between the two positions, so that it can be replayed without the contents it returns to.

    Args:
        to: the position to return to. Ids that were given since then are not given again.
        at: the position at which the change was made. It is refused at any other position, where it would not undo
            everything.
        removed: ids of the rows that arrived since then.
        rows: the table of the rows that left or changed since then, as they were; see ``MemoryBank.table``.
        judgments: the histories of rows whose history changed since then, as they were.
        source_mean, stream_total, stream_count, stream: the statistics as they were.
        transformed: whether there was a transform; once there is one, it never changes.
        who, why, when: as in every change.
    """

    to: int
    at: int
    removed: tuple[int, ...]
    rows: Mapping[str, Tensor]
    judgments: Mapping[int, tuple[Judgment, ...]] = field(default_factory=dict)
    source_mean: Tensor | None = None
    stream_total: Tensor | None = None
    stream_count: int = 0
    stream: Tensor | None = None
    transformed: bool = False
    who: str = ""
    why: str = ""
    when: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", require.whole("to", self.to, least=0))
        object.__setattr__(self, "at", require.whole("at", self.at, least=self.to))
        object.__setattr__(self, "removed", _ids("removed", self.removed))
        _check_signature(self)

    def __repr__(self) -> str:
        restored = len(self.rows.get("id", ()))
        effect = f"removes {len(self.removed)} rows, restores {restored}"
        return f"<Rollback from position {self.at} to {self.to}: {effect}{_signature(self)}>"


Change = Append | Veto | Restore | Relabel | Delete | Feedback | Rollback


def _ids(name: str, given: Any) -> tuple[int, ...]:
    """Row ids as a tuple of ints; raises a ChangeError for anything that is not a sequence of ids."""
    message = f"{name} must be a sequence of row ids such as [3, 5], got {brief(given)}"
    if isinstance(given, str | bytes | Mapping):
        raise ChangeError(message)
    try:
        rows = tuple(given)
    except TypeError:  # a number, or a tensor of one number, which looks like a sequence but cannot be iterated
        raise ChangeError(message) from None
    try:
        ids = tuple(index(row) for row in rows)
    except TypeError:
        raise ChangeError(f"{name} must be whole numbers, the ids of rows, got {brief(rows)}") from None
    for row, number in zip(rows, ids, strict=True):
        if isinstance(row, bool) or not -LARGEST_ID <= number <= LARGEST_ID:
            raise ChangeError(f"{name} must be ids of rows, got {brief(row)}")
    return ids


def _take_ids(change: Any) -> None:
    """Replaces the ids of a change by a checked tuple of ints."""
    object.__setattr__(change, "ids", _ids("ids", change.ids))


def _label_of_each(ids: tuple[int, ...], given: Sequence[Any]) -> tuple[int, ...]:
    """A label for each of these rows, none of which may be named twice: it would have two labels."""
    labels = tuple(require.whole("label", label) for label in given)
    if len(labels) != len(ids) or len(set(ids)) != len(ids):
        raise ChangeError(
            f"a label for each row needs as many labels as there are different ids, got {len(labels)} labels and "
            f"ids {brief(ids)}"
        )
    return labels


def _signature(change: Any) -> str:
    """Who made a change, why and when, for ``repr``; what is unknown is left out."""
    known = ""
    for name in ("who", "why", "when"):
        value = getattr(change, name)
        if value not in ("", None):
            known += f", {name}={brief(value)}"
    return known


def _check_signature(change: Any) -> None:
    """Raises an error for a who, why or when that no log could hold: now rather than when the change is saved."""
    require.text("who", change.who)
    require.text("why", change.why)
    object.__setattr__(change, "when", checked_time(change.when))


def checked_time(when: Any) -> float | None:
    """A time in seconds since 1970, or None if it is unknown."""
    if when is None:
        return None
    seconds = require.number("when", when)
    if not isfinite(seconds):
        raise ChangeError(f"when must be a finite number of seconds since 1970, got {brief(when)}")
    return seconds
