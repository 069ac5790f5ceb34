"""Thumbnails: small pictures of queries, kept next to a durable bank for people who look at its rows.

No answer depends on them, so they are not part of the log: they may be lost in a crash or on a full disk, they expire
after a while, and a damaged file is replaced by an empty one.
"""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.store.file import Location
from adanpc.store.sqlite import SQLITE_ERRORS, connect, refuse_link

FILE = "thumbnails.sqlite"
LARGEST = 2**16  # bytes in one picture
MOST_BYTES = 100 * 2**20  # in all pictures
MOST_DAYS = 30.0
INDEX = "CREATE INDEX IF NOT EXISTS age ON picture (kept)"  # finds old pictures without reading all
TABLE = "CREATE TABLE IF NOT EXISTS picture (row INTEGER PRIMARY KEY, image BLOB NOT NULL, kept REAL NOT NULL)"


class Thumbnails:
    """Pictures by the id of the row that a query became; the newest are kept, up to a total size and an age.

    Args:
        folder: the folder of the durable bank.
        most_bytes: the total size of all pictures, beyond which the oldest are removed.
        most_days: the number of days after which a picture is removed.
    """

    def __init__(self, folder: Location, *, most_bytes: int = MOST_BYTES, most_days: float = MOST_DAYS) -> None:
        self._most_bytes = require.whole("most_bytes", most_bytes, least=LARGEST)
        self._most_seconds = 24 * 3600 * require.positive("most_days", most_days)
        self._path = Path(folder) / FILE
        refuse_link(self._path)
        self._lock = Lock()
        try:
            self._connection = _opened(self._path)
        except SQLITE_ERRORS:
            for suffix in ("", "-wal", "-shm"):
                self._path.with_name(FILE + suffix).unlink(missing_ok=True)
            self._connection = _opened(self._path)
        self._bytes = _total(self._connection)

    def keep(self, row: int, image: bytes) -> None:
        """Stores the picture of a row, in any format, and removes pictures that are too old or exceed the total size.

        If that is not possible, for example because the disk is full, the picture is lost.
        """
        if len(image) > LARGEST:
            raise AdaNPCError(f"a thumbnail has at most {LARGEST:,} bytes, got {len(image):,}: make it smaller")
        now = time.time()
        with self._lock, suppress(*SQLITE_ERRORS):
            self._connection.execute("INSERT OR REPLACE INTO picture VALUES (?, ?, ?)", (row, image, now))
            self._connection.execute("DELETE FROM picture WHERE kept < ?", (now - self._most_seconds,))
            self._bytes += len(image)
            if self._bytes > self._most_bytes:
                self._make_room()

    def find(self, row: int) -> bytes | None:
        """Returns the picture of a row, or None if there is none or it is too old."""
        found = None
        with self._lock, suppress(*SQLITE_ERRORS):
            query = "SELECT image FROM picture WHERE row = ? AND kept >= ?"
            found = self._connection.execute(query, (row, time.time() - self._most_seconds)).fetchone()
        if found is None:
            return None
        return bytes(found[0])

    def forget(self, rows: Iterable[int]) -> None:
        """Removes the pictures of deleted rows; raises if that fails, because whoever deletes rows must know."""
        try:
            with self._lock:
                self._connection.executemany("DELETE FROM picture WHERE row = ?", [(row,) for row in rows])
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # the WAL has them, too
        except SQLITE_ERRORS as error:
            raise AdaNPCError(f"the pictures were not removed ({error}): delete {self._path}") from error

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def _make_room(self) -> None:
        """Removes the oldest pictures until a tenth of the space is free, so that not every new one has to do this."""
        self._bytes = _total(self._connection)
        query = "SELECT row, length(image) FROM picture ORDER BY kept, row"
        oldest = deque(self._connection.execute(query).fetchall())
        while oldest and self._bytes > 0.9 * self._most_bytes:
            row, size = oldest.popleft()
            self._connection.execute("DELETE FROM picture WHERE row = ?", (row,))
            self._bytes -= size


def _opened(path: Path) -> sqlite3.Connection:
    connection = connect(path, "rwc")
    try:
        connection.execute("PRAGMA secure_delete=ON").fetchall()  # removed pictures are overwritten
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.execute("PRAGMA synchronous=NORMAL").fetchall()
        connection.execute(TABLE)
        connection.execute(INDEX)
        connection.execute("SELECT row, image, kept FROM picture LIMIT 1").fetchall()
        _total(connection)  # reads all rows, and so notices damage
    except BaseException:
        connection.close()
        raise
    return connection


def _total(connection: sqlite3.Connection) -> int:
    """Returns the size of all pictures in bytes."""
    (total,) = connection.execute("SELECT coalesce(sum(length(image)), 0) FROM picture").fetchone()
    return int(total)
