"""Changes: every way in which a bank may become another, as values that can be logged and replayed.

A change holds effects: the rows that enter, who vetoed what. It is a value, not an action: ``MemoryBank.apply`` and
``AdaNPC.apply`` carry it out, and replaying all changes on an empty bank gives the same bank again.

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
    """What a person decided about a row, kept with the row for as long as it is held."""

    verdict: str  # one of VERDICTS
    label: int  # of the row before
    who: str = ""
    why: str = ""
    when: float | None = None  # seconds since 1970


@dataclass(frozen=True, eq=False)
class Observed:
    """What queries add to the statistics of the stream, whether they join or not."""

    total: Tensor  # (D,) float64, the sum of their features
    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", require.whole("count", self.count, least=0))


@require.names_its_arguments
@dataclass(frozen=True, eq=False)  # tensors have no single answer to whether they are equal
class Append:
    """Rows to be stored, in this order. Features need not have unit length.

    Args:
        features: (n, D).
        labels: (n,).
        origin: where the rows come from.
        soft: (n, C) class probabilities, for banks with soft labels.
        domain: (n,) or one for all; -1 is unknown.
        confidence: (n,); 1 when absent.
        keys: (n,) the user's own row numbers; -1 when absent.
        centered: whether a classifier's centering has been applied to the features; if not, ``AdaNPC.apply`` does.
        source_mean: (D,) float64, becomes the mean of the source.
        observed: what the stream's statistics gain.
        transform: becomes the transform of the preset "safe".
        stream: float64, becomes what that preset knows of the stream, as ``guard.Stream`` packs it.
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
    """Rows that may no longer vote. They keep their place and can be restored."""

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
    """Vetoed rows that may vote again."""

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
    """Rows that get another label; the old one stays in their history.

    A relabeled row is a person's word: an admitted row becomes an expert's, which is never evicted.

    Args:
        ids: of the rows.
        label: of all of them, or a label for each, in the order of ids, which are then different.
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
    """Rows that leave for good, with their history: for data that must no longer be kept."""

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
    """A person's label for a query to which the frozen and the adapted answer of the preset "safe" differ.

    It decides which of the two is given from then on, see ``AdaNPC.ask``. The query itself does not join.

    Args:
        label: the true class.
        frozen: what was answered without anything learned from the stream.
        adapted: what was answered with all that was learned from it.
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
    """The return to an earlier position, written as what that takes now; ``AdaNPC.rollback`` makes it.

    Args:
        to: the position that is returned to. Ids that were given since are not given again.
        at: the position at which it was made; at any other, it would undo too little, and is refused.
        removed: rows that arrived since.
        rows: the table of rows that left or were changed since, as they were; see ``MemoryBank.table``.
        judgments: of these rows, as they were.
        source_mean, stream_total, stream_count, stream: the statistics, as they were.
        transformed: whether there was a transform; it never changes once it is there.
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
        what = f"{len(self.removed)} rows leave, {restored} are as they were"
        return f"<Rollback from position {self.at} to {self.to}: {what}{_signature(self)}>"


Change = Append | Veto | Restore | Relabel | Delete | Feedback | Rollback


def _ids(name: str, given: Any) -> tuple[int, ...]:
    """Row ids as a tuple of ints, or an error that shows how they are given."""
    wanted = f"{name} must be a sequence of row ids such as [3, 5], got {brief(given)}"
    if isinstance(given, str | bytes | Mapping):
        raise ChangeError(wanted)
    try:
        rows = tuple(given)
    except TypeError:  # a number; a tensor of one number has the methods of a sequence, and is none
        raise ChangeError(wanted) from None
    try:
        ids = tuple(index(row) for row in rows)
    except TypeError:
        raise ChangeError(f"{name} must be whole numbers, the ids of rows, got {brief(rows)}") from None
    for row, number in zip(rows, ids, strict=True):
        if isinstance(row, bool) or not -LARGEST_ID <= number <= LARGEST_ID:
            raise ChangeError(f"{name} must be ids of rows, got {brief(row)}")
    return ids


def _take_ids(change: Any) -> None:
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
    """Who made a change, why and when, as far as it is known."""
    known = ""
    for name in ("who", "why", "when"):
        value = getattr(change, name)
        if value not in ("", None):
            known += f", {name}={brief(value)}"
    return known


def _check_signature(change: Any) -> None:
    """Refuses a who, why or when that no log could keep, at once rather than when it is saved."""
    require.text("who", change.who)
    require.text("why", change.why)
    object.__setattr__(change, "when", checked_time(change.when))


def checked_time(when: Any) -> float | None:
    """A time in seconds since 1970, or None where nobody knows it."""
    if when is None:
        return None
    seconds = require.number("when", when)
    if not isfinite(seconds):
        raise ChangeError(f"when must be a finite number of seconds since 1970, got {brief(when)}")
    return seconds
