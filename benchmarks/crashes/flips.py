"""Flipped bytes: one byte after another of what a bank keeps is altered, and each time it is noticed."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from adanpc.errors import AdaNPCError
from adanpc.store import DurableBank, SqliteLog, verify
from adanpc.store.sqlite import DATABASE, HEAD, SNAPSHOTS
from benchmarks.crashes.life import ask, judge, small_bank

WAL = DATABASE + "-wal"


def closed_bank(folder: Path) -> None:
    """A bank that was closed in order, with a few changes and two snapshots."""
    small_bank(folder)
    chance = random.Random(1)
    with DurableBank.open(folder) as bank:
        key = ask(bank, chance, "one", 0, lambda *_: None)
        judge(bank, chance)
        bank.snapshot()
        ask(bank, chance, "two", key, lambda *_: None)


def crashed_bank(folder: Path, aside: Path) -> None:
    """A bank as a crash leaves it, with changes that are in the WAL alone."""
    small_bank(aside)
    chance = random.Random(1)
    with DurableBank.open(aside) as bank:
        key = 0
        for turn in range(4):
            key = ask(bank, chance, str(turn), key, lambda *_: None)
        shutil.copytree(aside, folder)
    (folder / f"{DATABASE}-shm").unlink()  # of a running system, not of a disk


@contextmanager
def flipped(path: Path, place: int, mask: int) -> Iterator[None]:
    """Alters one byte for a while."""
    data = path.read_bytes()
    path.write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
    try:
        yield
    finally:
        path.write_bytes(data)


def masks(path: Path, step: int) -> Iterator[tuple[int, int]]:
    """Which byte to alter, and how."""
    chance = random.Random(0)
    for place in range(0, path.stat().st_size, step):
        yield place, 1 << chance.randrange(8)


def flips_of_a_closed_bank(place: Path, step: int = 1) -> dict[str, int]:
    """Alters bytes of all files; how many of each, every one of which was noticed by whoever opens the bank."""
    folder = place / "closed"
    closed_bank(folder)
    counts = {}
    for path in [folder / DATABASE, folder / HEAD, *sorted((folder / SNAPSHOTS).iterdir())]:
        tried = 0
        for byte, mask in masks(path, step):
            with flipped(path, byte, mask):
                assert noticed(folder, path), f"byte {byte} of {path.name} was altered by {mask}, and nobody noticed"
            tried += 1
        counts[path.name.partition("-")[0]] = tried
    return counts


def noticed(folder: Path, path: Path) -> bool:
    """Whether opening a bank, and reading a snapshot of it, says that something is wrong."""
    try:
        log = SqliteLog(folder, read_only=True)
    except AdaNPCError:
        return True
    with closing(log):
        if path.parent.name == SNAPSHOTS:
            try:
                log.load(int(path.name[:18]))
            except AdaNPCError:
                return True
        return bool(log.notices)


def flips_of_a_crashed_bank(place: Path, step: int = 1) -> dict[str, tuple[int, int]]:
    """Alters bytes of a log that was not closed; how many were noticed, and how many had no effect at all."""
    folder = place / "crashed"
    crashed_bank(folder, place / "running")
    shutil.copytree(folder, place / "original")
    expected = _held(folder)
    report = verify(folder)
    assert not report.problems, report.problems
    counts = {}
    for name in (DATABASE, WAL):
        seen = 0
        without_effect = 0
        for byte, mask in masks(place / "original" / name, step):
            shutil.rmtree(folder)
            shutil.copytree(place / "original", folder)
            with flipped(folder / name, byte, mask):
                if _is_noticed(folder):
                    seen += 1
                else:
                    assert _held(folder) == expected, f"byte {byte} of {name} was altered by {mask}, and nobody noticed"
                    assert verify(folder).digest == report.digest
                    without_effect += 1
        counts[name] = (seen, without_effect)
    return counts


def _is_noticed(folder: Path) -> bool:
    try:
        return bool(verify(folder).problems)
    except AdaNPCError:
        return True


def _held(folder: Path) -> Sequence[tuple[object, ...]]:
    """All rows of the database, read by SQLite alone."""
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        rows: list[tuple[object, ...]] = []
        for table in ("start", "entry", "answer"):
            rows += connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
        return rows
