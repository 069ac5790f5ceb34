"""Power cuts: everything that a bank does to its files is recorded, and then cut off anywhere.

SQLite is watched through a VFS of ``apsw``; the files that Python writes, through the functions of ``os``. What was
written and not yet synced when the power goes may be lost, torn at a sector, or there without what came before it; a
name that was changed may be the old or the new one until its folder is synced.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

import apsw

from adanpc.core.codec import encode
from adanpc.store import DurableBank, SqliteLog, sqlite
from benchmarks.crashes.life import Account, ask, hash_of, judge, small_bank

SECTOR = 512
VFS = "adanpc-recorder"
FLAGS = {"ro": apsw.SQLITE_OPEN_READONLY, "rw": apsw.SQLITE_OPEN_READWRITE}


@dataclass
class Recorder:
    """All that was done to the files of a folder, and all that was acknowledged, in order."""

    folder: Path
    operations: list[tuple[Any, ...]] = field(default_factory=list)
    lock: Any = field(default_factory=Lock)

    def note(self, what: str, path: str | Path, *details: Any) -> None:
        """Notes an operation on a path of the folder."""
        path = Path(os.path.abspath(path))
        if path == self.folder or self.folder in path.parents:
            with self.lock:
                self.operations.append((what, path.relative_to(self.folder).as_posix(), *details))


class RecordedFile(apsw.VFSFile):
    """A file of SQLite's, with notes of what is written."""

    def __init__(self, recorder: Recorder, name: Any, flags: list[int]) -> None:
        self.recorder = recorder
        self.path = name.filename() if isinstance(name, apsw.URIFilename) else name
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        self.recorder.note("write", self.path, offset, bytes(data))
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:  # noqa: N802
        self.recorder.note("truncate", self.path, size)
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:  # noqa: N802
        super().xSync(flags)
        self.recorder.note("sync", self.path)
        self.recorder.note("sync names", self.path)  # of a file that is new, SQLite syncs the folder, too


class RecordingVFS(apsw.VFS):
    """SQLite's way to the disk, with notes."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        super().__init__(VFS, "")

    def xOpen(self, name: Any, flags: list[int]) -> RecordedFile:  # noqa: N802
        return RecordedFile(self.recorder, name, flags)

    def xDelete(self, name: str, sync: bool) -> None:  # noqa: N802
        super().xDelete(name, sync)
        self.recorder.note("delete", name)


class RecordingFunctions:
    """The functions of ``os`` by which Python's files are changed, with notes."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.true_fsync = os.fsync
        self.true_replace = os.replace
        self.true_unlink = os.unlink
        self.true_pwrite = os.pwrite

    def fsync(self, number: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if stat.S_ISDIR(os.fstat(number).st_mode):
            self.true_fsync(number)
            self.recorder.note("sync folder", path)
        else:
            self.recorder.note("write", path, 0, path.read_bytes())
            self.true_fsync(number)
            self.recorder.note("sync", path)

    def replace(self, old: Any, new: Any) -> None:
        folder = self.recorder.folder
        if ("sync", Path(old).relative_to(folder).as_posix()) not in self.recorder.operations:
            self.recorder.note("write", old, 0, Path(old).read_bytes())
        self.true_replace(old, new)
        self.recorder.note("rename", old, Path(new).relative_to(folder).as_posix())

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.true_unlink(path, dir_fd=dir_fd)
        if dir_fd is None:  # else it is what a writer leaves behind that is removed
            self.recorder.note("delete", path)

    def pwrite(self, number: int, data: bytes, offset: int) -> int:
        self.recorder.note("write", os.readlink(f"/proc/self/fd/{number}"), offset, bytes(data))
        return self.true_pwrite(number, data, offset)


def recorded_connection(path: Path, mode: str) -> apsw.Connection:
    """A connection to the database through the recording VFS."""
    return apsw.Connection(f"file:{path}?mode={mode}", flags=FLAGS[mode] | apsw.SQLITE_OPEN_URI, vfs=VFS)


@contextmanager
def recording(folder: Path) -> Iterator[Recorder]:
    """Records what happens in a folder."""
    recorder = Recorder(folder)
    vfs = RecordingVFS(recorder)
    functions = RecordingFunctions(recorder)
    with ExitStack() as patches:
        patches.callback(vfs.unregister)
        patches.enter_context(patch.object(sqlite, "connect", recorded_connection))
        for name in ("fsync", "replace", "unlink", "pwrite"):
            patches.enter_context(patch.object(os, name, getattr(functions, name)))
        yield recorder


@dataclass(eq=False)
class DiskFile:
    """A file as programs see it, as the disk has it, and what lies between."""

    seen: bytearray
    safe: bytes
    pending: list[tuple[Any, ...]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        """Writes without syncing."""
        _write(self.seen, offset, data)
        self.pending.append(("write", offset, data))

    def truncate(self, size: int) -> None:
        """Cuts without syncing."""
        del self.seen[size:]
        self.pending.append(("truncate", size))

    def sync(self) -> None:
        """Makes safe what was written."""
        self.safe = bytes(self.seen)
        self.pending = []

    def after_the_cut(self, chance: random.Random) -> bytes:
        """What is on the disk: what was safe, and of the rest some, torn and in any order."""
        content = bytearray(self.safe)
        pending = list(self.pending)
        if chance.randrange(2):
            chance.shuffle(pending)
        for kind, place, *data in pending:
            fate = chance.randrange(3)  # lost, whole or torn
            if kind == "truncate":
                if fate:
                    del content[place:]
            elif fate == 1:
                _write(content, place, data[0])
            elif fate == 2:
                for begin in range(0, len(data[0]), SECTOR):
                    if chance.randrange(2):
                        _write(content, place + begin, data[0][begin : begin + SECTOR])
        return bytes(content)


def _write(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


class Disk:
    """A folder on a disk whose power may be cut.

    Args:
        files: what is safe at first, by path.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.seen = {path: DiskFile(bytearray(data), data) for path, data in files.items()}
        self.safe = dict(self.seen)
        self.renamed: list[tuple[str, DiskFile | None]] = []  # names since the last sync of their folder

    def run(self, operations: list[tuple[Any, ...]]) -> None:
        """Carries out what was recorded."""
        for what, path, *details in operations:
            match what:
                case "write":
                    self._file(path).write(*details)
                case "truncate":
                    self._file(path).truncate(*details)
                case "sync":
                    self._file(path).sync()
                case "sync names" | "sync folder":
                    self._sync_names(path, of_folder=what == "sync folder")
                case "rename":
                    self._name(details[0], self.seen.pop(path))
                    self.renamed.append((path, None))
                case "delete":
                    self.seen.pop(path, None)
                    self.renamed.append((path, None))

    def after_the_cut(self, chance: random.Random) -> dict[str, bytes]:
        """The files that are found when the power is back."""
        names = dict(self.safe)
        for path, file in self.renamed:
            if chance.randrange(2):
                _rename(names, path, file)
        return {path: file.after_the_cut(chance) for path, file in names.items()}

    def _file(self, path: str) -> DiskFile:
        if path not in self.seen:
            self._name(path, DiskFile(bytearray(), b""))
        return self.seen[path]

    def _name(self, path: str, file: DiskFile) -> None:
        self.seen[path] = file
        self.renamed.append((path, file))

    def _sync_names(self, path: str, *, of_folder: bool) -> None:
        waiting = []
        for name, file in self.renamed:
            inside = name == path
            if of_folder:
                inside = Path(name).parent == Path(path)
            if inside:
                _rename(self.safe, name, file)
            else:
                waiting.append((name, file))
        self.renamed = waiting


def _rename(names: dict[str, DiskFile], path: str, file: DiskFile | None) -> None:
    if file is None:
        names.pop(path, None)
    else:
        names[path] = file


def files_of(folder: Path) -> dict[str, bytes]:
    """All files of a folder, by path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def written_to(folder: Path, files: dict[str, bytes]) -> None:
    """Makes a folder of exactly these files."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / sqlite.SNAPSHOTS).mkdir(parents=True)
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def recorded_life(folder: Path, account: Account, seed: int) -> Recorder:
    """Lets a bank do everything it can, twice, and records it; the account follows."""
    changes: list[bytes] = []
    append = SqliteLog.append

    def overheard(log: SqliteLog, change: Any, answers: Any = ()) -> int:
        position = append(log, change, answers)
        if change is not None:
            changes.append(encode(change))
        return position

    chance = random.Random(seed)
    key = 0
    with recording(folder) as recorder, patch.object(SqliteLog, "append", overheard):

        def acknowledge(request: str, keys: list[int], answer: str) -> None:
            recorder.note("acknowledged", folder, request, answer, bank.position)

        for part in range(2):
            with DurableBank.open(folder, snapshot_every=10**6) as bank:
                for turn in range(12):
                    key = ask(bank, chance, f"{part}-{turn}", key, acknowledge)
                    if turn % 4 == 3:
                        judge(bank, chance)
                    if turn == 5:
                        bank.snapshot()
                    if turn == 8 and part:
                        bank.compact(keep=2)
    for data in changes:
        account.add(data)
    return recorder


def power_cuts(count: int, place: Path, seed: int = 0) -> dict[str, int]:
    """Cuts the power at so many moments; how many operations and acknowledgments there were, and what was found."""
    original = place / "original"
    small_bank(original)
    account = Account(original)
    start = account.classifier.position
    before = files_of(original)
    recorder = recorded_life(original, account, seed)
    operations = recorder.operations
    chance = random.Random(seed)
    found = {"operations": len(operations), "acknowledged": 0, "beyond": 0, "leftovers": 0}
    for number in range(count):
        cut = number * len(operations) // count + chance.randrange(max(1, len(operations) // count))
        disk = Disk(before)
        disk.run(operations[:cut])
        image = disk.after_the_cut(chance)
        folder = place / "bank"
        written_to(folder, image)
        acknowledged = [operation for operation in operations[:cut] if operation[0] == "acknowledged"]
        try:
            found["beyond"] += check_image(folder, account, start, acknowledged)
        except Exception as error:
            error.add_note(f"cut {number}, seed {seed}, after {cut} of {len(operations)} operations")
            raise
        found["acknowledged"] += len(acknowledged)
        found["leftovers"] += any(Path(path).name == "new" for path in image)
    return found


def check_image(folder: Path, account: Account, start: int, acknowledged: list[tuple[Any, ...]]) -> int:
    """Asserts that a bank came back with all that was acknowledged; how many changes it has beyond that."""
    with DurableBank.open(folder) as bank:
        assert not bank.notices, bank.notices
        least = max((position for *_, position in acknowledged), default=start)
        assert bank.position >= least, f"{least - bank.position} acknowledged changes are lost"
        assert bank.digest() == account.digests[bank.position - start], "it is not what its changes lead to"
        for _, _, request, answer, _ in acknowledged:
            kept = bank.log.answer(request)
            assert kept is not None, f"{request} was acknowledged and is lost"
            assert hash_of(kept) == answer
        return bank.position - least
