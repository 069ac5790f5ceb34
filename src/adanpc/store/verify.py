"""verify: checks that everything a durable bank keeps is intact, and that its parts agree with each other."""

from __future__ import annotations

from dataclasses import dataclass

from adanpc.core import AdaNPC
from adanpc.core.codec import decode
from adanpc.errors import AdaNPCError
from adanpc.store.file import Location
from adanpc.store.sqlite import SqliteLog


@dataclass(frozen=True)
class Report:
    """The findings of ``verify``."""

    problems: list[str]  # one sentence each
    start: int
    position: int
    snapshots: list[int]  # positions, newest first
    digest: str  # of the bank at the last position; empty if it cannot be determined


def verify(folder: Location) -> Report:
    """Checks every entry, answer and snapshot of a durable bank, and replays all changes from the oldest snapshot on.

    It changes nothing, and may be used while another process is writing. It raises an error if the folder is not a
    durable bank, or has a newer format.
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
                if position in log.snapshots():  # otherwise, the writing process has just removed it
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
    """Returns the digest after all changes, and adds a problem for every snapshot that the changes do not lead to."""
    try:
        for position, data in log.entries(classifier.position):
            classifier.apply(decode(data))
            if position in digests and digests[position] != classifier.digest():
                problems.append(f"{log.folder} has a snapshot of {position} to which its changes do not lead")
    except AdaNPCError as error:
        problems.append(str(error))
        return ""
    return classifier.digest()
