"""Log: what a durable bank asks of the place in which its changes outlive the process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from adanpc.core import AdaNPC, Change, State
from adanpc.errors import AdaNPCError


class LogError(AdaNPCError):
    """A log that cannot be read: damaged, incomplete, of a newer format, or no log at all."""

    code = "bad-log"


class LogWriteError(AdaNPCError):
    """A change that could not be made durable, and so did not happen; after a failed sync, nobody knows."""

    code = "log-not-written"


class BankInUseError(AdaNPCError):
    """A second writer; a log has one at a time."""

    code = "bank-in-use"


class Answered(NamedTuple):
    """The answer to a request, kept so that the same request gets the same answer again."""

    request: str  # the id that the caller gave to it
    answer: bytes


class Log(Protocol):
    """Changes in the order in which they happened, and snapshots of the classifier between them.

    What ``append`` has returned for survives a crash of the process and a loss of power. A change is there whole or
    not at all, and one that is damaged or missing is noticed by whoever reads it. One writer at a time.

    Positions are those of the bank: the change at position n leads from n - 1 changes to n.
    ``adanpc.testing.check_log`` says whether a class keeps these promises.
    """

    @property
    def start(self) -> int:
        """The position after which changes are held: 0, or that of the snapshot to which the log was compacted."""
        ...

    @property
    def position(self) -> int:
        """The position of the last change."""
        ...

    @property
    def notices(self) -> Sequence[str]:
        """What was found to be damaged and was not needed, each in a sentence."""
        ...

    def append(self, change: Change | None, answers: Sequence[Answered] = ()) -> int:
        """Adds a change and the answers that came with it; the new position, once all of it is safe.

        A LogWriteError says that nothing of it was added, or, if a sync has failed, that this cannot be known until the
        log is opened again; until then nothing more is written. Without a change, answers alone are kept.
        """
        ...

    def answer(self, request: str) -> bytes | None:
        """The answer to a request that was given before, if it is still kept."""
        ...

    def read(self, after: int) -> Iterator[Change]:
        """All changes behind a position, in order; a LogError where one is damaged or missing."""
        ...

    def snapshot(self, state: State, recipe: dict[str, str]) -> None:
        """Keeps the state of a classifier, whose position the log has reached, and how its features are made."""
        ...

    def snapshots(self) -> list[int]:
        """The positions of all snapshots, the newest first."""
        ...

    def load(self, position: int) -> tuple[AdaNPC, dict[str, str]]:
        """What ``snapshot`` kept at a position; an error in one sentence if it is damaged."""
        ...

    def compact(self, keep: int) -> None:
        """Forgets all but the newest snapshots, and the changes before the oldest of these."""
        ...

    def close(self) -> None:
        """Lets others write."""
        ...
