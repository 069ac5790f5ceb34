"""verify: whether all that a durable bank keeps is whole, and whether its parts agree with each other."""

from __future__ import annotations

from dataclasses import dataclass

from adanpc.core import AdaNPC
from adanpc.core.codec import decode
from adanpc.errors import AdaNPCError
from adanpc.store.file import Location
from adanpc.store.sqlite import SqliteLog


@dataclass(frozen=True)
class Report:
    """What was found."""

    problems: list[str]  # each in a sentence
    start: int
    position: int
    snapshots: list[int]  # positions, the newest first
    digest: str  # of the bank at the last position; empty if that cannot be told


def verify(folder: Location) -> Report:
    """Reads all of a durable bank: every entry, answer and snapshot, and the whole way from the oldest to the newest.

    It changes nothing, and may be used while another process writes. A folder that is no durable bank, or one of a
    newer format, is refused.
    """
    log = SqliteLog(folder, read_only=True)
    try:
        problems = [*log.notices, *log.flaws()]
        snapshots = log.snapshots()
        digests: dict[int, str] = {}
        oldest: AdaNPC | None = None
        for position in reversed(snapshots):
            try:
                classifier, _ = log.load(position)
            except AdaNPCError as error:
                if position in log.snapshots():  # else a process that writes has just removed it
                    problems.append(str(error))
                continue
            digests[position] = classifier.digest()
            if oldest is None:
                oldest = classifier
        if log.start not in digests:
            problems.append(f"{log.folder} has no snapshot of position {log.start}, where its log begins")
        digest = ""
        if oldest is not None:
            digest = _replayed(log, oldest, digests, problems)
        return Report(problems, log.start, log.position, snapshots, digest)
    finally:
        log.close()


def _replayed(log: SqliteLog, classifier: AdaNPC, digests: dict[int, str], problems: list[str]) -> str:
    """The digest after all changes; snapshots that differ from what their changes lead to are problems."""
    try:
        for position, data in log.entries(classifier.position):
            classifier.apply(decode(data))
            if position in digests and digests[position] != classifier.digest():
                problems.append(f"{log.folder} has a snapshot of {position} to which its changes do not lead")
    except AdaNPCError as error:
        problems.append(str(error))
        return ""
    return classifier.digest()
