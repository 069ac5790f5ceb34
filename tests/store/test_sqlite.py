"""SqliteLog: what is damaged, missing, newer or in use is noticed; what cannot be written did not happen."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from adanpc.core import AdaNPC, Append, MemoryBank, Origin, Veto, everyone
from adanpc.errors import AdaNPCError
from adanpc.store import Answered, BankInUseError, LogError, LogWriteError, SqliteLog, sqlite, verify
from adanpc.store.file import write_state
from adanpc.store.recovery import recovered

DIM, CLASSES = 4, 3


def classifier() -> AdaNPC:
    made = AdaNPC(MemoryBank(DIM, CLASSES), k=3, admission=everyone)
    made.learn(torch.eye(DIM)[:CLASSES], torch.arange(CLASSES))
    return made


def change(number: int) -> Append:
    row = torch.eye(DIM)[number % DIM][None] + 0.1
    return Append(row, torch.tensor([0]), Origin.ADMITTED, keys=torch.tensor([number]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of five changes behind the first, one answer, and two snapshots; closed."""
    made = classifier()
    path = tmp_path / "bank"
    log = SqliteLog.create(path, made.state(), {})
    for number in range(5):
        made.apply(change(number))
        log.append(change(number), [Answered(f"request {number}", b"answer")] if number == 2 else [])
        if number == 3:
            log.snapshot(made.state(), {})
    log.close()
    return path


def edit(folder: Path, *statements: str) -> None:
    """Changes the database behind the log's back, and closes it in order, as somebody who knows the head would."""
    with closing(sqlite3.connect(folder / "log.sqlite")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    (folder / "head").unlink()


def refusal(folder: Path) -> str:
    with pytest.raises(AdaNPCError) as caught:
        everything(folder)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def everything(folder: Path) -> None:
    with closing(SqliteLog(folder)) as log:
        list(log.read(log.start))


# Opening


def test_a_folder_without_a_log(tmp_path: Path) -> None:
    assert "is not a durable bank: it has no log.sqlite; create one there first" in refusal(tmp_path)


def test_what_is_there_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LogWriteError, match="bank was not created: something is there already"):
        SqliteLog.create(folder, classifier().state(), {})
    (tmp_path / "file").touch()
    with pytest.raises(LogWriteError, match="something is there already"):
        SqliteLog.create(tmp_path / "file", classifier().state(), {})
    with pytest.raises(
        LogWriteError, match="was not created: (Not a directory|File exists); check the path and the disk"
    ):
        SqliteLog.create(tmp_path / "file" / "bank", classifier().state(), {})
    empty = tmp_path / "empty"
    empty.mkdir()
    SqliteLog.create(empty, classifier().state(), {}).close()


def test_a_creation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object, __: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(os, "replace", fail)
        with pytest.raises(AdaNPCError, match="No space left on device"):
            SqliteLog.create(tmp_path / "bank", classifier().state(), {})
    assert os.listdir(tmp_path) == []
    SqliteLog.create(tmp_path / "bank", classifier().state(), {}).close()


def test_a_second_writer_is_refused_in_one_sentence(folder: Path) -> None:
    with closing(SqliteLog(folder)) as log:
        with pytest.raises(BankInUseError, match="bank is in use: a bank has one writer at a time"):
            SqliteLog(folder)
        code = f"from adanpc.store import SqliteLog; SqliteLog({str(folder)!r})"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "BankInUseError" in other.stderr
        log.append(change(5))
    SqliteLog(folder).close()


def test_a_log_is_read_while_another_writes(folder: Path) -> None:
    with closing(SqliteLog(folder)) as writer, closing(SqliteLog(folder, read_only=True)) as reader:
        writer.append(change(5))
        assert len(list(reader.read(1))) == 5  # what there was when it was opened
        for refused in (lambda: reader.append(change(6)), lambda: reader.snapshot(classifier().state(), {})):
            with pytest.raises(LogWriteError, match="was opened read-only: open it for writing"):
                refused()
    with closing(SqliteLog(folder, read_only=True)) as reader:
        assert len(list(reader.read(1))) == 6


def test_snapshots_that_come_and_go_while_a_log_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process that writes may take and remove them at any time."""
    with closing(SqliteLog(folder)) as writer:
        made, _ = writer.load(5)
        for step in writer.read(5):
            made.apply(step)
        check_format = sqlite._check_format

        def meanwhile(connection: sqlite3.Connection) -> None:
            check_format(connection)
            (position,) = connection.execute("SELECT max(position) FROM entry").fetchone()
            monkeypatch.undo()
            made.apply(change(position))
            writer.append(change(position))
            writer.snapshot(made.state(), {})

        monkeypatch.setattr(sqlite, "_check_format", meanwhile)
        with closing(SqliteLog(folder, read_only=True)) as reader:
            assert reader.position == 7
        load = SqliteLog.load

        removed = [5, 7]

        def too_late(log: SqliteLog, position: int) -> Any:
            if position == removed[0]:
                for path in (folder / "snapshots").glob(f"{removed.pop(0):018d}-*"):
                    path.unlink()
            return load(log, position)

        monkeypatch.setattr(SqliteLog, "load", too_late)
        with closing(SqliteLog(folder, read_only=True)) as reader:
            assert recovered(reader, 6).notices == []
        assert not verify(folder).problems


def test_a_disk_that_cannot_be_written_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lock can be made there, and SQLite cannot make the index of a WAL."""

    def refuse_lock(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    true_connect = sqlite.connect

    class Refusing(sqlite3.Connection):
        def execute(self, *_: Any) -> Any:
            raise sqlite3.OperationalError("unable to open database file")

    def connect(path: Path, mode: str) -> sqlite3.Connection:
        if "immutable" in mode:
            return true_connect(path, mode)
        return sqlite3.connect(path, factory=Refusing)

    monkeypatch.setattr(sqlite, "held", refuse_lock)
    monkeypatch.setattr(sqlite, "connect", connect)
    with pytest.raises(LogWriteError, match="cannot be written to: Read-only file system; open it read-only, or"):
        SqliteLog(folder)
    with closing(SqliteLog(folder, read_only=True)) as log:
        assert len(list(log.read(1))) == 5
    (folder / "log.sqlite-wal").write_bytes(b"changes that are nowhere else")
    with pytest.raises(LogError, match="cannot be read: unable to open database file"):
        SqliteLog(folder, read_only=True)


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    for name in ("log.sqlite", "head", "lock", "snapshots"):
        shutil.move(folder / name, tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        assert "is a symbolic link, and is not followed" in refusal(folder), name
        (folder / name).unlink()
        shutil.move(tmp_path / name, folder / name)
    everything(folder)


def test_a_planted_link_costs_nobody_a_folder(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "key").write_text("secret")
    shutil.rmtree(folder / "snapshots")
    (folder / "snapshots").symlink_to(home)
    for read_only in (False, True):
        with pytest.raises(LogError, match="snapshots is a symbolic link, and is not followed"):
            SqliteLog(folder, read_only=read_only)
    assert (home / ".ssh" / "key").read_text() == "secret"


def test_only_what_writers_leave_is_swept(folder: Path, tmp_path: Path) -> None:
    left = folder / "snapshots" / ".000000000000000003-0123456789abcdef.safetensors.77-0123456789abcdef.tmp"
    left.mkdir()
    (left / "half").write_bytes(b"a snapshot")
    (folder / "snapshots" / ".mine").mkdir()
    everything(folder)
    assert not left.exists()
    assert (folder / "snapshots" / ".mine").is_dir()


def test_a_planted_wal_is_not_written_through(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"of somebody else")
    (folder / "log.sqlite-wal").unlink(missing_ok=True)
    (folder / "log.sqlite-wal").symlink_to(victim)
    assert "cannot be read" in refusal(folder)
    assert victim.read_bytes() == b"of somebody else"


# Formats


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("PRAGMA user_version = 2", "was written by a newer adanpc, in log format 2 after 1: upgrade adanpc"),
        ("PRAGMA user_version = 0", "does not have the tables of log format 1"),
        ("PRAGMA application_id = 5", "is a database but not a log of adanpc"),
        ("CREATE TRIGGER more AFTER INSERT ON entry BEGIN DELETE FROM entry; END", "does not have the tables of log"),
        ("DROP TABLE answer", "does not have the tables of log"),
        ("INSERT INTO start VALUES (3, x'00')", "its table start has 2 rows"),
        ("UPDATE start SET seal = 'text'", "its start is "),
    ],
)
def test_a_database_that_is_not_a_log_of_this_format(folder: Path, statement: str, words: str) -> None:
    edit(folder, statement)
    assert words in refusal(folder)


def test_a_table_whose_description_is_no_text(folder: Path) -> None:
    """As one flipped bit leaves it."""
    edit(folder, "PRAGMA writable_schema = 1", "UPDATE sqlite_schema SET sql = CAST(sql AS BLOB) WHERE name = 'answer'")
    assert "does not have the tables of log format 1" in refusal(folder)


def test_a_file_that_is_no_database(folder: Path) -> None:
    (folder / "log.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    assert "cannot be read: " in refusal(folder)


@pytest.mark.parametrize("damaged", [b"CREATE \xee\xff\xee\xff\xee", b"CREATE TABLE \xee "])
def test_a_message_of_sqlite_that_quotes_damaged_bytes(folder: Path, damaged: bytes) -> None:
    data = (folder / "log.sqlite").read_bytes()
    (folder / "log.sqlite").write_bytes(data.replace(b"CREATE TABLE e"[: len(damaged)], damaged))
    assert "bank cannot be read: " in refusal(folder)


# Damage


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("DELETE FROM entry WHERE position = 3", "the entry at position 3 is missing"),
        ("UPDATE entry SET change = zeroblob(40) WHERE position = 4", "position 4 does not have the seal"),
        ("UPDATE entry SET seal = zeroblob(32) WHERE position = 4", "position 4 does not have the seal"),
        (
            "UPDATE entry SET change = (SELECT change FROM entry WHERE position = 5) WHERE position = 2",
            "position 2 does not have the seal",
        ),
        ("UPDATE entry SET position = 9 WHERE position = 6", "position 6 is missing"),
        ("DELETE FROM entry WHERE position > 4", "its log ends at 4, and there is a snapshot of 5"),
    ],
)
def test_an_entry_that_is_damaged_or_missing(folder: Path, statement: str, words: str) -> None:
    edit(folder, statement)
    assert words in refusal(folder)


def test_entries_that_changed_places(folder: Path) -> None:
    edit(
        folder,
        "UPDATE entry SET position = 99 WHERE position = 3",
        "UPDATE entry SET position = 3 WHERE position = 4",
        "UPDATE entry SET position = 4 WHERE position = 99",
    )
    assert "position 3 does not have the seal" in refusal(folder)


def test_entries_that_vanish_while_they_are_read(folder: Path) -> None:
    with closing(SqliteLog(folder)) as log:
        with closing(sqlite3.connect(folder / "log.sqlite")) as connection:
            connection.execute("DELETE FROM entry")
            connection.commit()
        with pytest.raises(LogError, match="the entry at position 2 is missing"):
            list(log.read(1))


def test_an_entry_with_a_right_seal_that_holds_no_change(folder: Path) -> None:
    with closing(SqliteLog(folder)) as log:
        seal = sqlite._next_seal(log._end.seal, 7, b"nothing")
        log._connection.execute("INSERT INTO entry VALUES (7, x'6e6f7468696e67', ?)", (seal,))
    (folder / "head").unlink()
    assert "has an entry that cannot be read, 7: a change has at least 9 bytes" in refusal(folder)


def test_the_last_entry_is_missed_by_the_head(folder: Path) -> None:
    head = (folder / "head").read_bytes()
    edit(folder, "DELETE FROM entry WHERE position = 6")
    everything(folder)  # without a head, nobody can know
    (folder / "head").write_bytes(head)
    assert "has lost changes: its log ends at 5 and came to 6; take a copy from a backup" in refusal(folder)


def test_a_head_that_is_damaged_is_noticed_and_written_anew(folder: Path) -> None:
    line = (folder / "head").read_bytes()
    for damaged in (b"", b"x" + line[1:], line.replace(b"6 ", b"5 ", 1), line[:-3] + b"00\n"):
        (folder / "head").write_bytes(damaged)
        with closing(SqliteLog(folder)) as log:
            assert log.notices == [f"{folder / 'head'} was damaged, and is written anew"]
        with closing(SqliteLog(folder)) as log:
            assert not log.notices


def test_a_head_from_before_the_log_was_compacted_says_nothing(folder: Path) -> None:
    """A loss of power may bring one back, since heads are not synced."""
    head = sqlite.Head(3, b"x" * 32).line()
    (folder / "head").write_bytes(head)
    assert "its log ends at 6 and came to 3" in refusal(folder)
    (folder / "head").unlink()
    with closing(SqliteLog(folder)) as log:
        log.compact(1)
        assert log.start == 5
    (folder / "head").write_bytes(head)
    with closing(SqliteLog(folder)) as log:
        assert not log.notices


def test_a_database_that_is_not_as_it_was_closed(folder: Path) -> None:
    data = bytearray((folder / "log.sqlite").read_bytes())
    data[2000] ^= 1  # where a page has nothing
    (folder / "log.sqlite").write_bytes(data)
    with closing(SqliteLog(folder)) as log:
        assert log.notices == [f"{folder / 'log.sqlite'} is not as it was closed: verify the bank"]


def test_a_database_that_somebody_opens_while_it_is_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_hash = sqlite._hash_of

    def meanwhile(path: Path) -> str:
        monkeypatch.undo()
        with closing(SqliteLog(folder)) as writer:
            writer.append(change(5))
        return true_hash(path)

    monkeypatch.setattr(sqlite, "_hash_of", meanwhile)
    with closing(SqliteLog(folder, read_only=True)) as log:
        assert not log.notices


def test_a_snapshot_of_another_log(folder: Path, tmp_path: Path) -> None:
    (name,) = [path.name for path in (folder / "snapshots").iterdir() if path.name.startswith("000000000000000005")]
    path = folder / "snapshots" / name
    path.rename(path.with_name(name.replace("-", "-0")[:-13] + ".safetensors"))
    with closing(SqliteLog(folder)) as log:
        assert log.snapshots()[0] == 5
        with pytest.raises(LogError, match="the snapshot of 5 is missing, or of another log"):
            log.load(5)
    shutil.copy(next((folder / "snapshots").glob("000000000000000001*")), path)
    with closing(SqliteLog(folder)) as log, pytest.raises(AdaNPCError, match="it is a snapshot of 1"):
        log.load(5)


# Leftovers


def test_what_a_crash_left_blocks_nothing(folder: Path) -> None:
    leftover = folder / "snapshots" / ".000000000000000009-0123456789abcdef.safetensors.7-0123456789abcdef.tmp"
    leftover.mkdir()
    (leftover / "new").write_bytes(b"half a snapshot")
    older = folder / "snapshots" / f"{0:018d}-{'0' * 16}.safetensors"  # of a compaction that was cut short
    older.write_bytes(b"anything")
    everything(folder)
    assert not leftover.exists()
    assert not older.exists()


# Answers


def test_answers_are_kept_within_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "MOST_ANSWERS", 3)
    monkeypatch.setattr(sqlite, "MOST_ANSWER_BYTES", 100)
    for opening in range(2):
        with closing(SqliteLog(folder)) as log:
            for number in range(3):
                log.append(None, [Answered(f"{opening} {number}", b"x" * 10)])
            assert log.answer("request 2") is None
            assert [log.answer(f"{opening} {number}") for number in range(3)] == [b"x" * 10] * 3
            log.append(None, [Answered(f"{opening} large", b"x" * 95)])
            assert log.answer(f"{opening} 2") is None
            assert log.answer(f"{opening} large") == b"x" * 95
            log.append(None, [Answered(f"{opening} huge", b"x" * 200)])
            assert log.answer(f"{opening} huge") is None


def test_an_answer_that_is_damaged(folder: Path) -> None:
    edit(folder, "UPDATE answer SET answer = x'00'")
    with closing(SqliteLog(folder)) as log:
        with pytest.raises(LogError, match="its answer to the request 'request 2' does not have its seal"):
            log.answer("request 2")
        assert any("does not have its seal" in problem for problem in verify(folder).problems)


# What cannot be written


class Failing:
    """A connection on which a statement fails."""

    def __init__(self, connection: sqlite3.Connection, statement: str, error: BaseException) -> None:
        self.connection = connection
        self.statement = statement
        self.error = error

    def execute(self, statement: str, *values: Any) -> Any:
        if statement.startswith(self.statement):
            raise self.error
        return self.connection.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


def test_a_database_that_may_not_grow(folder: Path) -> None:
    with closing(SqliteLog(folder)) as log:
        (pages,) = log._connection.execute("PRAGMA page_count").fetchone()
        log._connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()
        large = Append(torch.ones(900, DIM), torch.zeros(900, dtype=torch.int64), Origin.ADMITTED)
        with pytest.raises(LogWriteError, match="nothing has changed: database or disk is full; make room on the disk"):
            log.append(large, [Answered("large", b"answer")])
        assert log.position == 6
        assert log.answer("large") is None
        log._connection.execute("PRAGMA max_page_count = 100000").fetchall()
        assert log.append(large, [Answered("large", b"answer")]) == 7
    everything(folder)


def test_after_a_sync_that_failed_nothing_more_is_written(folder: Path) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
    with closing(SqliteLog(folder)) as log:
        log._connection = Failing(log._connection, "COMMIT", error)  # type: ignore[assignment]
        with pytest.raises(LogWriteError, match=r"could not be synced to the disk \(disk I/O error\), so nobody knows"):
            log.append(change(5))
        with pytest.raises(LogWriteError, match="whether the last change is there: check the disk, and open it again"):
            log.append(change(5))
    everything(folder)


def test_an_interruption_is_not_a_failure_of_the_disk(folder: Path) -> None:
    with closing(SqliteLog(folder)) as log:
        whole = log._connection
        log._connection = Failing(whole, "INSERT", KeyboardInterrupt())  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            log.append(change(5))
        log._connection = whole
        assert log.append(change(5)) == 7


def test_a_head_that_cannot_be_written_does_no_harm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with closing(SqliteLog(folder)) as log:
        monkeypatch.setattr(os, "pwrite", fail)
        log.append(change(5))
        monkeypatch.undo()
    everything(folder)


# Snapshots


def test_the_oldest_snapshot_and_the_newest_two_are_kept(folder: Path) -> None:
    with closing(SqliteLog(folder)) as log:
        made, _ = log.load(5)
        for step in log.read(5):
            made.apply(step)
        for number in range(6, 10):
            made.apply(change(number))
            log.append(change(number))
            log.snapshot(made.state(), {})
        assert log.snapshots() == [10, 9, 1]
        made.apply(change(11))
        with pytest.raises(AdaNPCError, match="position must be at most 10, got 11"):
            log.snapshot(made.state(), {})
        log.compact(5)
        assert (log.start, log.snapshots()) == (1, [10, 9, 1])
        log.compact(2)
        assert (log.start, log.snapshots()) == (9, [10, 9])
        assert len(list(log.read(9))) == 1
        with pytest.raises(LogError, match="holds changes from 9 to 10, so none can be read from 1 on"):
            list(log.read(1))
    assert not verify(folder).problems


def test_nothing_is_dropped_for_a_snapshot_that_cannot_be_read(folder: Path) -> None:
    (newest,) = (folder / "snapshots").glob("000000000000000005*")
    newest.write_bytes(b"damaged")
    with closing(SqliteLog(folder)) as log:
        with pytest.raises(AdaNPCError, match="was not loaded"):
            log.compact(1)
        assert len(list(log.read(1))) == 5


def test_a_log_that_has_no_room_to_be_made_smaller(folder: Path) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    with closing(SqliteLog(folder)) as log:
        whole = log._connection
        log._connection = Failing(whole, "VACUUM", error)  # type: ignore[assignment]
        with pytest.raises(LogWriteError, match="was compacted, but its file is as large as before: database or disk"):
            log.compact(1)
        log._connection = whole
        assert (log.start, log.snapshots()) == (5, [5])
        before = (folder / "log.sqlite").stat().st_size
        log.compact(1)
        assert (folder / "log.sqlite").stat().st_size <= before
    everything(folder)


def test_a_log_whose_snapshots_are_gone_is_not_compacted(folder: Path) -> None:
    with closing(SqliteLog(folder)) as log:
        shutil.rmtree(folder / "snapshots")
        (folder / "snapshots").mkdir()
        with pytest.raises(LogError, match="has no snapshot that could be kept: take one first"):
            log.compact(2)
        assert len(list(log.read(1))) == 5


def test_a_log_that_is_compacted_while_it_is_read_is_not_called_damaged(folder: Path) -> None:
    with closing(SqliteLog(folder, read_only=True)) as reader:
        with closing(SqliteLog(folder)) as log:
            log.compact(1)
        with pytest.raises(LogError, match="was compacted to 5 meanwhile: open it again") as caught:
            list(reader.read(1))
        assert "damaged" not in str(caught.value)
        with pytest.raises(LogError, match="was compacted to 5 meanwhile: open it again"):
            list(reader.read(2))
        assert len(list(reader.read(5))) == 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are named through /proc")
def test_folders_that_are_made_for_a_log_are_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a loss of power takes the folder above, and all that was acknowledged with it."""
    synced = []
    sync = os.fsync

    def overheard(number: int) -> None:
        sync(number)
        synced.append(Path(os.readlink(f"/proc/self/fd/{number}")))

    monkeypatch.setattr(os, "fsync", overheard)
    with closing(SqliteLog.create(tmp_path / "a" / "b" / "bank", classifier().state(), {})):
        pass
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)


def test_what_was_compacted_is_gone_from_the_files(tmp_path: Path) -> None:
    """Rows that must no longer be kept are in no entry, no snapshot, and no free page."""
    made = classifier()
    secret = Append(torch.tensor([[0.123, 0.456, 0.789, 0.321]]), torch.tensor([0]), why="a patient's name")
    with closing(SqliteLog.create(tmp_path / "bank", made.state(), {})) as log:
        made.apply(secret)
        log.append(secret)
        made.apply(Veto((0,)))
        log.append(Veto((0,)))
        log.snapshot(made.state(), {})
        log.compact(1)
        contents = [path.read_bytes() for path in (tmp_path / "bank").rglob("*") if path.is_file()]
    assert not any(b"a patient's name" in content for content in contents)


# The format


def test_the_reader_in_the_docs_needs_no_adanpc(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def read_log" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    with closing(SqliteLog(folder)) as log:
        assert list(names["read_log"](folder)) == list(log.entries(1))
    edit(folder, "UPDATE entry SET change = zeroblob(40) WHERE position = 4")
    with pytest.raises(AssertionError, match="the entry at 4 is damaged or missing"):
        list(names["read_log"](folder))


def test_the_bytes_of_a_small_log(tmp_path: Path) -> None:
    made = classifier()
    with closing(SqliteLog.create(tmp_path / "bank", made.state(), {})) as log:
        log.append(Veto((0,), "Ann", "no", 1.5), [Answered("é", b"yes")])
    first = hashlib.sha256(f"adanpc-log {made.digest()}".encode()).digest()
    header = b'{"ids":[0],"kind":"veto","tensors":[],"when":1.5,"who":"Ann","why":"no"}'
    data = b"ADNC\x01" + len(header).to_bytes(4, "little") + header
    seal = hashlib.sha256(first + (2).to_bytes(8, "little") + data).digest()
    kept = hashlib.sha256((2).to_bytes(8, "little") + "é".encode() + b"yes").digest()
    with closing(sqlite3.connect(tmp_path / "bank" / "log.sqlite")) as connection:
        assert connection.execute("SELECT * FROM start").fetchall() == [(1, first)]
        assert connection.execute("SELECT * FROM entry").fetchall() == [(2, data, seal)]
        assert connection.execute("SELECT * FROM answer").fetchall() == [(1, "é".encode(), b"yes", kept)]
        assert connection.execute("PRAGMA application_id").fetchone() == (0x41444E50,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database = hashlib.sha256((tmp_path / "bank" / "log.sqlite").read_bytes()).hexdigest()
    text = f"{2:018d} {seal.hex()} {database}"
    line = f"{text} {hashlib.sha256(text.encode()).hexdigest()[:16]}\n"
    assert (tmp_path / "bank" / "head").read_text() == line
    (snapshot,) = (tmp_path / "bank" / "snapshots").iterdir()
    assert snapshot.name == f"{1:018d}-{first.hex()[:16]}.safetensors"


# Verifying


def damage_newest(folder: Path) -> None:
    max((folder / "snapshots").iterdir()).write_bytes(b"damaged")


def damage_oldest(folder: Path) -> None:
    min((folder / "snapshots").iterdir()).write_bytes(b"damaged")


def remove_all(folder: Path) -> None:
    for path in (folder / "snapshots").iterdir():
        path.unlink()


def damage_entry(folder: Path) -> None:
    edit(folder, "UPDATE entry SET seal = zeroblob(32) WHERE position = 3")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_newest, "was not loaded"),
        (damage_oldest, "has no snapshot of position 1, where its log begins"),
        (remove_all, "has no snapshot of position 1"),
        (damage_entry, "position 3 does not have"),
    ],
)
def test_verify_finds_what_is_damaged(folder: Path, damage: Callable[[Path], None], words: str) -> None:
    report = verify(folder)
    assert (report.problems, report.start, report.position, report.snapshots) == ([], 1, 6, [5, 1])
    damage(folder)
    assert any(words in problem for problem in verify(folder).problems)


def test_verify_finds_a_snapshot_to_which_no_changes_lead(folder: Path) -> None:
    (newest,) = (folder / "snapshots").glob("000000000000000005*")
    other = classifier()
    for number in (7, 8, 9, 10):
        other.apply(change(number))
    write_state(other.state(), {}, newest)
    assert verify(folder).problems == [f"{folder} has a snapshot of 5 to which its changes do not lead"]


def test_verify_finds_pages_that_are_damaged(folder: Path) -> None:
    path = folder / "log.sqlite"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"request 2", b"request 3", 1))  # in the table or in its index
    assert any("log.sqlite is damaged: row 1 missing from index" in problem for problem in verify(folder).problems)
    page = data.rindex(b"request 2") // 4096 * 4096
    path.write_bytes(data[:page] + b"\xff" * 4096 + data[page + 4096 :])
    assert any("log.sqlite is damaged: " in problem for problem in verify(folder).problems)
