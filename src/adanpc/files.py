"""Writes files so that a crash at any moment leaves them intact: by replacing them whole, or by appending lines."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import Any

fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None  # not on Windows

STALE = 3600.0  # seconds; no save takes that long, so what is older was left by a writer that was killed


def replace(target: Path, write: Callable[[Path], None]) -> None:
    """Replaces the target by the file that ``write`` makes, or changes nothing. The new file is on the disk afterward.

    It is written in a temporary folder next to the target, which no other writer touches; whatever else ``write``
    creates there is removed with the folder. The new file gets the permissions of the file that it replaces.

    Links are not followed. If the target is a symbolic link, the link is replaced, and the file that it points to stays
    as it is; to replace that file instead, pass ``os.path.realpath(target)``. Other hard links keep the old file.

    Args:
        target: the file to replace; it need not exist.
        write: called with the path of an empty file to fill.
    """
    with temporary_sibling(target) as folder:
        new = folder / "new"
        new.touch()  # with the permissions that the umask gives
        mode = _permissions(target, new)
        write(new)
        with new.open("rb+") as file:
            new.chmod(mode)
            os.fsync(file.fileno())
        os.replace(new, target)
    sync_folder(target.parent)


@contextmanager
def temporary_sibling(target: Path) -> Iterator[Path]:
    """A temporary folder next to the target, in which its replacement can be made.

    The folder is removed at the end with everything in it, and so are folders that killed writers of the same target
    left behind more than an hour ago.
    """
    folder = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        folder.mkdir(0o700)
        _sweep(target, folder.stat().st_mtime - STALE)
        yield folder
    finally:  # also after Ctrl-C
        shutil.rmtree(folder, ignore_errors=True)


def add_entry(path: Path, entry: Mapping[str, Any]) -> None:
    """Appends a line of JSON to a file; it is on the disk when the function returns.

    If a crash has cut off the last line, the new entry starts on a line of its own. A symbolic link is refused, because
    whoever can place a link could otherwise choose which file is written.
    """
    with open(open_no_link(path, os.O_APPEND), "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in (b"", b"\n")  # the last line does not end
        line = json.dumps(entry) + "\n"
        if torn:
            line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """The entries that ``add_entry`` wrote, in order; none if there is no file. Other lines are skipped."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # cut off by a crash, or written by somebody else
            continue
        if isinstance(entry, dict):
            yield entry


@contextmanager
def held(path: Path, *, wait: bool) -> Iterator[bool]:
    """Holds a lock against other processes of this machine; yields False if another process holds it.

    The lock of a process that is killed is released. On a platform without such locks, nothing is held. What the file
    contains is left alone. A symbolic link is refused, as by ``add_entry``.

    Args:
        path: the file to lock, which is created if there is none.
        wait: whether to wait until no other process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(open_no_link(path), "rb+") as file:
        if fcntl is not None:
            operation = fcntl.LOCK_EX
            if not wait:
                operation |= fcntl.LOCK_NB
            try:
                fcntl.flock(file, operation)
            except BlockingIOError:
                yield False
                return
        yield True


def open_no_link(path: Path, flags: int = 0) -> int:
    """The descriptor of a file, which is created if there is none; raises an OSError if the path is a symbolic link."""
    refusal = f"{path} is a symbolic link, and is not followed: give the path of the file itself"
    no_follow = getattr(os, "O_NOFOLLOW", None)
    if no_follow is None:
        if path.is_symlink():
            raise OSError(refusal)
        no_follow = 0
    binary = getattr(os, "O_BINARY", 0)  # on Windows only
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | binary | no_follow | flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise OSError(refusal) from error
        raise


def _permissions(target: Path, new: Path) -> int:
    """The permissions for the new file: those of the file that it replaces, or else those that it has."""
    try:
        status = target.lstat()
    except FileNotFoundError:
        return S_IMODE(new.stat().st_mode)
    if S_ISREG(status.st_mode):
        return S_IMODE(status.st_mode)
    return S_IMODE(new.stat().st_mode)


def _sweep(target: Path, before: float) -> None:
    """Removes temporary folders that killed writers of the target left before that time, by the clock of its disk."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.\d+-[0-9a-f]+\.tmp")
    # Another writer may be removing the same folders, or the parent may not be readable: no reason not to save.
    with suppress(OSError):
        for path in target.parent.iterdir():
            if pattern.fullmatch(path.name) and path.lstat().st_mtime < before:
                shutil.rmtree(path, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Creates a folder and any missing parents; they are on the disk when the function returns."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for created in reversed(missing):
        created.mkdir(exist_ok=True)
        sync_folder(created.parent)


def sync_folder(folder: Path) -> None:
    """Forces the names in a folder to the disk, where the platform can do so."""
    if os.name == "posix":  # Windows cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
