"""SqliteLog: a folder with the changes in an SQLite database and snapshots as bank files; docs/store.md has the format.

In WAL mode with synchronous=FULL, SQLite has a transaction on disk once it is committed, and ignores one that a crash
cut off. It does not notice damage to what it has written, however. So every entry has a seal: a hash of the change and
of the previous seal. An entry that is altered, missing or out of place breaks the chain.

A file next to the database, the head, records how far the log has come. It is written after every commit and not
synced. So it never claims more than is there, yet reveals the loss of a commit later on, for example by a flipped bit
in the WAL.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple
from urllib.parse import quote

from adanpc import require
from adanpc.core import AdaNPC, Change, State
from adanpc.core.codec import decode, encode
from adanpc.core.contents import digest_of
from adanpc.errors import ChangeError
from adanpc.files import held, make_folder, open_no_link, sync_folder, temporary_sibling
from adanpc.store.check import BankFileError
from adanpc.store.file import Location, read, write_state
from adanpc.store.log import Answered, BankInUseError, LogError, LogWriteError

DATABASE = "log.sqlite"
HEAD = "head"
LOCK = "lock"
SNAPSHOTS = "snapshots"
APPLICATION = 0x41444E50  # "ADNP", in the header of the database
VERSION = 1  # of the log format, in the same header
SCHEMA = (
    "CREATE TABLE start (position INTEGER NOT NULL, seal BLOB NOT NULL)",
    "CREATE TABLE entry (position INTEGER PRIMARY KEY, change BLOB NOT NULL, seal BLOB NOT NULL)",
    "CREATE TABLE answer (number INTEGER PRIMARY KEY, request BLOB UNIQUE, answer BLOB NOT NULL, seal BLOB NOT NULL)",
)
MOST_ANSWERS = 10_000  # kept for requests that are sent again
MOST_ANSWER_BYTES = 64 * 2**20
KEPT_SNAPSHOTS = 2  # in addition to the oldest, so that later damage to one of them costs nothing
ENTRIES_AT_ONCE = 64  # read from the database at a time
UNCERTAIN = ("SQLITE_IOERR_FSYNC", "SQLITE_IOERR_DIR_FSYNC")  # after these errors, what is on disk is unknown
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # the latter if a message from SQLite quotes damaged bytes
ADVICE = "take a copy from a backup, or create another bank from one of its snapshots"
NAME = re.compile(r"(\d{18})-([0-9a-f]{16})\.safetensors")
LEFT = re.compile(rf"\.{NAME.pattern}\.\d+-[0-9a-f]{{16}}\.tmp")  # folders left by killed writers, see ``files``
HEAD_LINE = re.compile(rb"(\d{18}) ([0-9a-f]{64}) ([0-9a-f]{64}) ([0-9a-f]{16})\n")
HEAD_READS = 3  # attempts, because another process may be writing it
NOT_CLOSED = "0" * 64  # stands in for the hash of the database in a head


class Place(NamedTuple):
    """A position in the log, and the seal of everything up to it."""

    position: int
    seal: bytes


class Head(NamedTuple):
    """How far the log has come, and a hash of the database if the log was closed at that point."""

    position: int
    seal: bytes
    closed: str = NOT_CLOSED

    @classmethod
    def of(cls, line: bytes) -> Head | None:
        """Returns the head that a line describes, or None if the line is not exactly as ``line`` writes it."""
        found = HEAD_LINE.fullmatch(line)
        if found is None:
            return None
        head = cls(int(found[1]), bytes.fromhex(found[2].decode()), found[3].decode())
        if head.line() != line:  # its own hash does not fit
            return None
        return head

    def line(self) -> bytes:
        """Returns the head as it is written to the file; its length is always the same."""
        text = f"{self.position:018d} {self.seal.hex()} {self.closed}"
        return f"{text} {_short_hash(text.encode())}\n".encode()


class KeptAnswers:
    """The sizes of the kept answers by number, oldest first. The newest are kept, up to a count and a total size."""

    def __init__(self, sizes: Iterable[tuple[int, int]]) -> None:
        self._sizes = dict(sizes)
        self._bytes = sum(self._sizes.values())
        self._last = max(self._sizes, default=0)

    def next_numbers(self, count: int) -> range:
        """Returns the numbers that the next ``count`` answers get."""
        return range(self._last + 1, self._last + 1 + count)

    def leaving(self, added: Mapping[int, int]) -> list[int]:
        """Returns the numbers of the oldest answers that must go so that answers of these sizes can be added."""
        count = len(self._sizes) + len(added)
        size = self._bytes + sum(added.values())
        numbers = []
        for number, size_of_answer in chain(self._sizes.items(), added.items()):  # oldest first, until the rest fits
            if count <= MOST_ANSWERS and size <= MOST_ANSWER_BYTES:
                break
            numbers.append(number)
            count -= 1
            size -= size_of_answer
        return numbers

    def note(self, added: Mapping[int, int], left: Iterable[int]) -> None:
        """Updates the counts after answers were added and others left."""
        self._sizes |= added
        self._bytes += sum(added.values())
        self._last = max(added, default=self._last)
        for number in left:
            self._bytes -= self._sizes.pop(number)


class SqliteLog:
    """A log in a folder; see ``Log``.

    Args:
        folder: a folder that ``create`` made.
        read_only: True to take no lock, so that the log can be read while another process writes to it, or from a
            read-only disk.
    """

    def __init__(self, folder: Location, *, read_only: bool = False) -> None:
        self.folder = Path(folder)
        self.read_only = read_only
        self.notices: list[str] = []
        self._lock = RLock()
        self._failure = ""
        if not (self.folder / DATABASE).is_file():
            raise LogError(f"{self.folder} is not a durable bank: it has no {DATABASE}; create one there first")
        for name in (DATABASE, SNAPSHOTS):
            refuse_link(self.folder / name)
        with ExitStack() as resources:
            if not read_only:
                self._hold(resources)
            with self._one_sentence():
                self._open(resources)
                if not read_only:
                    self._prepare_to_write(resources)
            self._resources = resources.pop_all()

    @classmethod
    def create(cls, folder: Location, state: State, recipe: dict[str, str]) -> SqliteLog:
        """Creates a log that begins with a classifier in this state; the folder must not exist, or must be empty.

        The log is written to a temporary folder and then renamed, so that a crash never leaves half of it.
        """
        target = Path(os.path.abspath(folder))
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise LogWriteError(f"{target} was not created: something is there already; give the path of a new folder")
        try:
            make_folder(target.parent)
            with temporary_sibling(target) as folder_aside:
                _fill(folder_aside, state, recipe)
                os.replace(folder_aside, target)
            sync_folder(target.parent)
        except (OSError, sqlite3.Error) as error:
            raise LogWriteError(f"{target} was not created: {_cause(error)}; check the path and the disk") from error
        return cls(target)

    # Positions

    @property
    def start(self) -> int:
        """See ``Log.start``."""
        return self._start.position

    @property
    def position(self) -> int:
        """See ``Log.position``."""
        return self._end.position

    # Opening

    def _hold(self, resources: ExitStack) -> None:
        try:
            alone = resources.enter_context(held(self.folder / LOCK, wait=False))
        except OSError as error:
            raise LogWriteError(
                f"{self.folder} cannot be written to: {_cause(error)}; open it read-only, or check its rights and disk"
            ) from error
        if not alone:
            raise BankInUseError(
                f"{self.folder} is in use: a bank has one writer at a time; stop the other one, or ask it instead"
            )

    def _open(self, resources: ExitStack) -> None:
        """Connects to the database, reads where the log begins and ends, and checks that nothing is lost."""
        if not self.read_only:
            self._sweep()
        claimed = self._read_head()
        if claimed is not None:
            self._compare_with(claimed)
        # Listed before the end of the log is read: another process may be writing and take a snapshot at any time.
        newest = max((_position_in(name) for name in self._names()), default=0)
        self._connection = resources.enter_context(closing(self._connected()))
        _check_format(self._connection)
        self._start = self._read_start()
        last = self._connection.execute("SELECT position, seal FROM entry ORDER BY position DESC LIMIT 1").fetchall()
        self._end = self._start
        if last:
            position, seal = last[0]
            self._end = Place(position, _bytes(seal))
        self._check_ends(claimed, newest)
        query = "SELECT number, length(answer) FROM answer ORDER BY number"
        sizes = [(number, int(size or 0)) for number, size in self._connection.execute(query)]
        self._kept = KeptAnswers(sizes)

    def _prepare_to_write(self, resources: ExitStack) -> None:
        """Replaces the head: the database may change from here on, so the hash of it in the old head must be gone."""
        self._remove_older(self.start)  # left by a crash during compaction
        self._head_file = open_no_link(self.folder / HEAD)
        resources.callback(os.close, self._head_file)
        self._write_head()
        os.fsync(self._head_file)

    def _connected(self) -> sqlite3.Connection:
        """Returns a connection that loses no commit and executes nothing but the statements of this module."""
        path = self.folder / DATABASE
        mode = "rw"
        if self.read_only:
            mode = "ro"
        connection = connect(path, mode)
        try:
            for setting in ("trusted_schema=OFF", "cell_size_check=ON", "synchronous=FULL"):
                connection.execute(f"PRAGMA {setting}").fetchall()
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        except sqlite3.OperationalError:
            connection.close()
            waiting = path.with_name(DATABASE + "-wal")
            if not self.read_only or (waiting.exists() and waiting.stat().st_size):
                raise
            # The index of the WAL cannot be created on this disk. There is no WAL either, so the file is the whole log.
            return connect(path, "ro&immutable=1")
        except BaseException:
            connection.close()
            raise
        return connection

    def _read_head(self) -> Head | None:
        """Returns the head, or None if there is none or it is damaged."""
        path = self.folder / HEAD
        if path.is_symlink() or not path.is_file():
            return None
        for _ in range(HEAD_READS):
            head = Head.of(path.read_bytes())
            if head is not None:
                return head
        self.notices.append(f"{path} was damaged, and is written anew")
        return None

    def _compare_with(self, claimed: Head) -> None:
        """Adds a notice if the database was altered since it was closed."""
        if claimed.closed == NOT_CLOSED or claimed.closed == _hash_of(self.folder / DATABASE):
            return
        if self._read_head() == claimed:  # nobody has opened it for writing in the meantime
            self.notices.append(f"{self.folder / DATABASE} is not as it was closed: verify the bank")

    def _check_ends(self, claimed: Head | None, newest: int) -> None:
        """Raises a LogError if the head or the newest snapshot shows that acknowledged changes are lost."""
        position = self.position
        if claimed is not None and claimed.position < self.start:
            claimed = None  # a power loss brought back a head from before compaction, which is meaningless now
        if claimed is not None and self._seal_at(self._connection, claimed.position) != claimed.seal:
            raise LogError(
                f"{self.folder} has lost changes: its log ends at {position} and came to {claimed.position}; "
                f"{ADVICE}, or delete {self.folder / HEAD} to go on without them"
            )
        if newest > position:
            raise LogError(
                f"{self.folder} has lost changes: its log ends at {position}, and there is a snapshot of {newest}; "
                f"{ADVICE}, or delete that snapshot to go on without them"
            )

    def _sweep(self) -> None:
        """Removes what killed writers left among the snapshots; the lock rules out other writers."""
        folder = self.folder / SNAPSHOTS
        for path in folder.iterdir():
            if LEFT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    # Changes

    def append(self, change: Change | None, answers: Sequence[Answered] = ()) -> int:
        """See ``Log.append``."""
        with self._lock:
            self._check_writable()
            end = self._end
            numbers = self._kept.next_numbers(len(answers))
            added = {}
            for number, answered in zip(numbers, answers, strict=True):
                added[number] = len(answered.answer)
            leaving = self._kept.leaving(added)
            with self._transaction():
                if change is not None:
                    data = encode(change)
                    position = end.position + 1
                    end = Place(position, _next_seal(end.seal, position, data))
                    self._connection.execute("INSERT INTO entry VALUES (?, ?, ?)", (position, data, end.seal))
                for number, answered in zip(numbers, answers, strict=True):
                    self._insert(number, answered)
                for number in leaving:
                    self._connection.execute("DELETE FROM answer WHERE number = ?", (number,))
            self._end = end
            self._kept.note(added, leaving)
            self._write_head()
            return end.position

    def read(self, after: int) -> Iterator[Change]:
        """See ``Log.read``."""
        for position, data in self.entries(after):
            try:
                change = decode(data)
            except ChangeError as error:
                raise LogError(f"{self.folder} has an entry that cannot be read, {position}: {error}") from None
            yield change

    def entries(self, after: int) -> Iterator[tuple[int, bytes]]:
        """Yields the position and the bytes of each change after a position, once its seal has been checked."""
        start = self.start
        end = self.position
        if not start <= after <= end:
            raise LogError(f"{self.folder} holds changes from {start} to {end}, so none can be read from {after} on")
        with self._one_sentence(), closing(self._connected()) as connection:
            seal = self._seal_at(connection, after)
            while after < end:
                page = connection.execute(
                    "SELECT position, change, seal FROM entry WHERE position > ? AND position <= ? ORDER BY position "
                    "LIMIT ?",
                    (after, end, ENTRIES_AT_ONCE),
                ).fetchall()
                if not page or page[0][0] != after + 1:
                    raise self._missing(connection, after + 1)
                for position, data, stated in page:
                    if position != after + 1:
                        raise self._damaged(after + 1, "is missing")
                    seal = _next_seal(seal, position, _bytes(data))
                    if seal != stated:
                        raise self._damaged(position, "does not have the seal that it states")
                    after = position
                    yield position, data

    def _missing(self, connection: sqlite3.Connection, position: int) -> LogError:
        """Returns the error for a missing entry: it is lost, or the log has just been compacted."""
        ((start,),) = connection.execute("SELECT position FROM start").fetchall()
        if start >= position:
            return LogError(f"{self.folder} was compacted to {start} meanwhile: open it again")
        return self._damaged(position, "is missing")

    def _damaged(self, position: int, what: str) -> LogError:
        return LogError(f"{self.folder} is damaged: the entry at position {position} {what}; {ADVICE}")

    def _seal_at(self, connection: sqlite3.Connection, position: int) -> bytes:
        """Returns the seal stored for a position, in its entry or as the start of the log; empty if there is none."""
        query = "SELECT seal FROM start WHERE position = ? UNION ALL SELECT seal FROM entry WHERE position = ?"
        found = connection.execute(query, (position, position)).fetchall()
        if not found:
            return b""
        return _bytes(found[0][0])

    # Answers

    def answer(self, request: str) -> bytes | None:
        """See ``Log.answer``."""
        key = _key(request)
        with self._lock, self._one_sentence():
            found = self._connection.execute("SELECT answer, seal FROM answer WHERE request = ?", (key,)).fetchall()
        if not found:
            return None
        answer, seal = found[0]
        if _seal_of_answer(key, _bytes(answer)) != seal:
            raise LogError(f"{self.folder} is damaged: its answer to the request {request!r} does not have its seal")
        return _bytes(answer)

    def _insert(self, number: int, answered: Answered) -> None:
        key = _key(answered.request)
        row = (number, key, answered.answer, _seal_of_answer(key, answered.answer))
        self._connection.execute("INSERT INTO answer VALUES (?, ?, ?, ?)", row)

    # Snapshots

    def snapshot(self, state: State, recipe: dict[str, str]) -> None:
        """See ``Log.snapshot``."""
        position = require.whole("position", state["document"]["position"], least=self.start, most=self.position)
        self._check_writable()
        with self._one_sentence(), closing(self._connected()) as connection:
            name = _snapshot_name(position, self._seal_at(connection, position))
        write_state(state, recipe, self.folder / SNAPSHOTS / name)
        oldest_first = self.snapshots()[::-1]
        self._remove(oldest_first[1:-KEPT_SNAPSHOTS])

    def snapshots(self) -> list[int]:
        """See ``Log.snapshots``."""
        positions = [_position_in(name) for name in self._names()]
        return sorted((position for position in positions if position >= self.start), reverse=True)

    def load(self, position: int) -> tuple[AdaNPC, dict[str, str]]:
        """See ``Log.load``."""
        with self._one_sentence(), closing(self._connected()) as connection:
            name = _snapshot_name(position, self._seal_at(connection, position))
        path = self.folder / SNAPSHOTS / name
        if name not in self._names():
            raise LogError(f"{path} is not there: the snapshot of {position} is missing, or of another log")
        classifier, recipe = read(path)
        if classifier.position != position:
            raise BankFileError(f"{path} was not loaded: it is a snapshot of {classifier.position}; {ADVICE}")
        return classifier, recipe

    def compact(self, keep: int) -> None:
        """See ``Log.compact``."""
        keep = require.whole("keep", keep, least=1)
        with self._lock:
            self._check_writable()
            kept = self.snapshots()[:keep]
            if not kept:
                raise LogError(f"{self.folder} has no snapshot that could be kept: take one first")
            for position in kept:
                self.load(position)  # what follows cannot be undone, so every kept snapshot must be readable
            oldest = kept[-1]
            start = Place(oldest, self._seal_at(self._connection, oldest))
            with self._transaction():
                self._connection.execute("UPDATE start SET position = ?, seal = ?", start)
                self._connection.execute("DELETE FROM entry WHERE position <= ?", (oldest,))
            self._start = start
            self._remove_older(oldest)
            try:
                self._connection.execute("VACUUM")
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except SQLITE_ERRORS as error:
                raise LogWriteError(
                    f"{self.folder} was compacted, but its file is as large as before: {_cause(error)}; make room for "
                    "a copy of it, and compact again"
                ) from error

    def _names(self) -> list[str]:
        """Returns the names of all snapshots, including those from before the start of the log."""
        return [name for name in os.listdir(self.folder / SNAPSHOTS) if NAME.fullmatch(name)]

    def _remove(self, positions: Sequence[int]) -> None:
        for name in self._names():
            if _position_in(name) in positions:
                (self.folder / SNAPSHOTS / name).unlink(missing_ok=True)

    def _remove_older(self, position: int) -> None:
        positions = [_position_in(name) for name in self._names()]
        self._remove([each for each in positions if each < position])

    # Checking and closing

    def flaws(self) -> list[str]:
        """Returns what is wrong with the database apart from its entries: its pages and the kept answers."""
        found = []
        try:
            for (flaw,) in self._connection.execute("PRAGMA integrity_check"):
                if flaw != "ok":
                    found.append(f"{self.folder / DATABASE} is damaged: {flaw}")
            for key, answer, seal in self._connection.execute("SELECT request, answer, seal FROM answer"):
                if _seal_of_answer(_bytes(key), _bytes(answer)) != seal:
                    found.append(f"{self.folder} is damaged: its answer to the request {key!r} does not have its seal")
        except SQLITE_ERRORS as error:
            found.append(f"{self.folder / DATABASE} is damaged: {_cause(error)}")
        return found

    def close(self) -> None:
        """See ``Log.close``."""
        with self._lock:
            if not self.read_only and not self._failure:
                with suppress(*SQLITE_ERRORS, OSError):  # every commit is safe already, and the next open does the same
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                    self._connection.close()
                    self._write_head(_hash_of(self.folder / DATABASE))
            self._failure = f"{self.folder} is closed: open it again"
            self._resources.close()

    # Internals

    def _check_writable(self) -> None:
        if self.read_only:
            raise LogWriteError(f"{self.folder} was opened read-only: open it for writing")
        if self._failure:
            raise LogWriteError(self._failure)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commits everything done inside the block to disk, or rolls all of it back and raises a LogWriteError.

        If the sync itself failed, what is on disk is unknown, and the log accepts nothing more until it is reopened.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except BaseException as error:
            with suppress(sqlite3.Error):
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            if isinstance(error, SQLITE_ERRORS):
                if error_name(error) in UNCERTAIN:
                    self._failure = (
                        f"{self.folder} could not be synced to the disk ({_cause(error)}), so nobody knows whether the "
                        "last change is there: check the disk, and open it again"
                    )
                    raise LogWriteError(self._failure) from error
                raise LogWriteError(
                    f"{self.folder} was not written to, and nothing has changed: {_cause(error)}; "
                    "make room on the disk or check its rights, then try again"
                ) from error
            raise

    @contextmanager
    def _one_sentence(self) -> Iterator[None]:
        """Turns errors of SQLite and the operating system into a one-sentence LogError."""
        try:
            yield
        except (*SQLITE_ERRORS, OSError) as error:
            raise LogError(f"{self.folder} cannot be read: {_cause(error)}; {ADVICE}") from error

    def _read_start(self) -> Place:
        """Returns where the log starts; raises a LogError if the database does not say so exactly once."""
        rows = self._connection.execute("SELECT position, seal FROM start").fetchall()
        if len(rows) != 1:
            raise LogError(f"{self.folder} is damaged: its table start has {len(rows)} rows; {ADVICE}")
        position, seal = rows[0]
        if not isinstance(position, int) or not isinstance(seal, bytes):
            raise LogError(f"{self.folder} is damaged: its start is {rows[0]!r}; {ADVICE}")
        return Place(position, seal)

    def _write_head(self, closed: str = NOT_CLOSED) -> None:
        with suppress(OSError):  # an outdated head reveals fewer losses, but claims nothing that is not there
            os.pwrite(self._head_file, Head(self.position, self._end.seal, closed).line(), 0)


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Returns a connection that any thread may use, with explicit transactions; ``mode`` is that of an SQLite URI."""
    address = f"file:{quote(os.path.abspath(path))}?mode={mode}"
    return sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)


def refuse_link(path: Path) -> None:
    """Raises a LogError for a symbolic link: whoever planted it could choose which files are written or swept."""
    if path.is_symlink():
        raise LogError(f"{path} is a symbolic link, and is not followed: give the folder that holds the log itself")


def error_name(error: BaseException) -> str:
    """Returns SQLite's name for an error, such as SQLITE_FULL; empty if it has none."""
    return str(getattr(error, "sqlite_errorname", ""))


def _check_format(connection: sqlite3.Connection) -> None:
    """Raises a LogError if the database is not a log, or has a newer format."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise LogError(f"{DATABASE} is a database but not a log of adanpc: give the folder of a durable bank")
    if version > VERSION:
        raise LogError(
            f"{DATABASE} was written by a newer adanpc, in log format {version} after {VERSION}: upgrade adanpc"
        )
    found = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")]
    if version < 1 or Counter(found) != Counter(SCHEMA):  # what is damaged may not be text, and so have no order
        raise LogError(f"{DATABASE} does not have the tables of log format {VERSION}; {ADVICE}")


def _fill(folder: Path, state: State, recipe: dict[str, str]) -> None:
    """Writes a new log to an empty folder; all of it is on disk when this returns."""
    position = state["document"]["position"]
    seal = hashlib.sha256(f"adanpc-log {digest_of(state)}".encode()).digest()
    (folder / SNAPSHOTS).mkdir()
    write_state(state, recipe, folder / SNAPSHOTS / _snapshot_name(position, seal))
    (folder / HEAD).write_bytes(Head(position, seal).line())
    with closing(connect(folder / DATABASE, "rwc")) as connection:
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.execute("PRAGMA synchronous=FULL").fetchall()
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA application_id={APPLICATION}")
        connection.execute(f"PRAGMA user_version={VERSION}")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO start VALUES (?, ?)", (position, seal))
        connection.execute("COMMIT")
    for name in (HEAD, DATABASE):
        with (folder / name).open("rb+") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _snapshot_name(position: int, seal: bytes) -> str:
    """Returns the file name of a snapshot; the seal in it ties the snapshot to its log."""
    return f"{position:018d}-{seal.hex()[:16]}.safetensors"


def _position_in(name: str) -> int:
    """Returns the position in the file name of a snapshot."""
    return int(name[:18])


def _next_seal(before: bytes, position: int, data: bytes) -> bytes:
    """Returns the seal of an entry, given the seal of the entry before it."""
    total = hashlib.sha256(before)
    total.update(position.to_bytes(8, "little"))
    total.update(data)
    return total.digest()


def _seal_of_answer(key: bytes, answer: bytes) -> bytes:
    total = hashlib.sha256(len(key).to_bytes(8, "little"))
    total.update(key)
    total.update(answer)
    return total.digest()


def _bytes(value: Any) -> bytes:
    """Returns the value of a BLOB column; empty bytes, which match no seal, if it holds another type."""
    return value if isinstance(value, bytes) else b""


def _key(request: str) -> bytes:
    """Returns a request id as bytes; this works for every string, including lone surrogates."""
    return request.encode("utf-8", "surrogatepass")


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cause(error: BaseException) -> str:
    """Returns the cause of an error in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())
