"""Every log keeps its contract, and one that does not is found out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from adanpc.core import AdaNPC, Change, State
from adanpc.store import Answered, LogError, SqliteLog
from adanpc.testing import check_log


def run(folder: Path, kind: type[SqliteLog]) -> None:
    opened: list[SqliteLog] = []

    def create(state: State, recipe: dict[str, str]) -> SqliteLog:
        opened.append(kind.create(folder, state, recipe))
        return opened[-1]

    def reopen() -> SqliteLog:
        opened.append(kind(folder))
        return opened[-1]

    try:
        check_log(create, reopen)
    finally:
        for log in opened:
            log.close()


def test_the_log_in_a_folder(tmp_path: Path) -> None:
    run(tmp_path / "bank", SqliteLog)


class WithoutLast(SqliteLog):
    """Loses the last change."""

    def read(self, after: int) -> Iterator[Change]:
        return islice(super().read(after), max(self.position - after - 1, 0))


class Silent(SqliteLog):
    """Passes over what it does not have."""

    def entries(self, after: int) -> Iterator[tuple[int, bytes]]:
        return super().entries(min(max(after, self.start), self.position))


class Forgetful(SqliteLog):
    """Keeps no answers."""

    def append(self, change: Change | None, answers: Sequence[Answered] = ()) -> int:
        return super().append(change)


class Generous(SqliteLog):
    """Lets anybody write."""

    def _hold(self, resources: Any) -> None:
        pass


class Mixed(SqliteLog):
    """Gives the oldest snapshot, whichever is asked for."""

    def load(self, position: int) -> tuple[AdaNPC, dict[str, str]]:
        if position > self.position:
            raise LogError("it is not there")
        return super().load(self.snapshots()[-1])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WithoutLast, "must give all later ones"),
        (Silent, "not skip them"),
        (Forgetful, "an answer that was appended must be returned"),
        (Generous, "a second writer must be refused"),
        (Mixed, "a snapshot must equal the classifier that it was taken of"),
    ],
)
def test_a_log_that_breaks_a_promise(tmp_path: Path, kind: type[SqliteLog], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run(tmp_path / "bank", kind)
