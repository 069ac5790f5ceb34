"""Log: the interface of the storage to which a durable bank writes its changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from adanpc.core import AdaNPC, Change, State
from adanpc.errors import AdaNPCError


class LogError(AdaNPCError):
    """A log cannot be read: it is damaged, incomplete, in a newer format, or not a log at all."""

    code = "bad-log"


class LogWriteError(AdaNPCError):
    """A change could not be made durable and so did not happen; after a failed sync, its fate is unknown."""

    code = "log-not-written"


class BankInUseError(AdaNPCError):
    """A second writer tried to open a log, which has only one writer at a time."""

    code = "bank-in-use"


class Answered(NamedTuple):
    """The answer to a request, kept so that the same request gets the same answer again."""

    request: str  # the id that the caller chose
    answer: bytes


class Log(Protocol):
    """Changes in the order in which they happened, and snapshots of the classifier in between.

    Once ``append`` has returned, what it added survives a crash of the process and a loss of power. A change is stored
    as a whole or not at all, and reading detects one that is damaged or missing. There is one writer at a time.

    Positions are those of the bank: the change at position n takes it from n - 1 changes to n.
    ``adanpc.testing.check_log`` tests whether a class keeps these promises.
    """

    @property
    def start(self) -> int:
        """The position after which changes are kept: 0, or that of the snapshot to which the log was compacted."""
        ...

    @property
    def position(self) -> int:
        """The position of the last change."""
        ...

    @property
    def notices(self) -> Sequence[str]:
        """Damage that was found in what was not needed, one sentence each."""
        ...

    def append(self, change: Change | None, answers: Sequence[Answered] = ()) -> int:
        """Adds a change together with its answers, and returns the new position once all of it is safe.

        A LogWriteError means that nothing was added, or, if a sync failed, that this is unknown until the log is
        opened again; until then, nothing more is written. Without a change, only the answers are added.
        """
        ...

    def answer(self, request: str) -> bytes | None:
        """Returns the answer that a request was given before, or None if it is not kept."""
        ...

    def read(self, after: int) -> Iterator[Change]:
        """Yields all changes after a position in order, and raises a LogError where one is damaged or missing."""
        ...

    def snapshot(self, state: State, recipe: dict[str, str]) -> None:
        """Stores the state of a classifier, at a position that the log has reached, and how its features are made."""
        ...

    def snapshots(self) -> list[int]:
        """Returns the positions of all snapshots, newest first."""
        ...

    def load(self, position: int) -> tuple[AdaNPC, dict[str, str]]:
        """Returns what ``snapshot`` stored at a position; raises a one-sentence error if it is damaged."""
        ...

    def compact(self, keep: int) -> None:
        """Discards all but the newest ``keep`` snapshots, and the changes before the oldest of these."""
        ...

    def close(self) -> None:
        """Releases the log, so that others can write to it."""
        ...
