"""Files that a crash at any moment leaves whole: replaced at once, or added to line by line."""

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
    """Puts the file that ``write`` makes in place of the target, on the disk when it returns, or changes nothing.

    It is made in a folder of its own beside the target: whatever ``write`` creates on its way goes with that folder,
    and no other writer ever touches it. It keeps the permissions of the file that it replaces.

    Links are not followed. If the target is a symbolic link, the link is replaced, and the file that it led to stays as
    it is; to replace that file instead, give ``os.path.realpath(target)``. Other hard links keep the old file.
    """
    with temporary_sibling(target) as folder:
        new = folder / "new"
        new.touch()  # gets the permissions of the umask
        mode = _permissions(target, new)
        write(new)
        with new.open("rb+") as file:
            new.chmod(mode)
            os.fsync(file.fileno())
        os.replace(new, target)
    sync_folder(target.parent)


@contextmanager
def temporary_sibling(target: Path) -> Iterator[Path]:
    """A folder beside the target in which something is made that is then put in the target's place.

    Whatever is left in it goes with it. What killed writers of the target left an hour ago or earlier goes, too.
    """
    folder = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        folder.mkdir(0o700)
        _sweep(target, folder.stat().st_mtime - STALE)
        yield folder
    finally:  # after Ctrl-C too
        shutil.rmtree(folder, ignore_errors=True)


def add_entry(path: Path, entry: Mapping[str, Any]) -> None:
    """Adds a line of JSON to a file, on the disk when it returns; a line that a crash cut off before stays behind.

    A symbolic link is refused, lest whoever may plant one chooses which file is written to.
    """
    with open(open_no_link(path, os.O_APPEND), "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in (b"", b"\n")
        line = json.dumps(entry) + "\n"
        if torn:
            line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """What ``add_entry`` added, in order; nothing if there is no file. Lines that are no entries are passed over."""
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
    """Holds a lock file against other processes of this machine; a killed process holds nothing.

    Without waiting, False says that another process holds it. Where the platform has no such locks, nothing is held.
    What is in the file stays in it. A symbolic link is refused, as by ``add_entry``.
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
    """The descriptor of a file that is made if there is none; an OSError in one sentence if the path is a link."""
    refusal = f"{path} is a symbolic link, and is not followed: give the path of the file itself"
    no_follow = getattr(os, "O_NOFOLLOW", None)
    if no_follow is None:
        if path.is_symlink():
            raise OSError(refusal)
        no_follow = 0
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | no_follow | flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise OSError(refusal) from error
        raise


def _permissions(target: Path, new: Path) -> int:
    """The permissions that the new file gets: those of the file that it replaces, or else of the umask."""
    try:
        status = target.lstat()
    except FileNotFoundError:
        return S_IMODE(new.stat().st_mode)
    if S_ISREG(status.st_mode):
        return S_IMODE(status.st_mode)
    return S_IMODE(new.stat().st_mode)


def _sweep(target: Path, before: float) -> None:
    """Removes what killed writers of the target left before that time, on the clock of the target's disk."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.\d+-[0-9a-f]+\.tmp")
    with suppress(OSError):  # another writer sweeps too, or the folder may not be listed: no reason not to save
        for path in target.parent.iterdir():
            if pattern.fullmatch(path.name) and path.lstat().st_mtime < before:
                shutil.rmtree(path, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, on the disk when it returns."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        made.mkdir(exist_ok=True)
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Forces the names in a folder to the disk, where the platform can."""
    if os.name == "posix":  # Windows opens no folders
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
