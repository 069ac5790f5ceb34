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
from stat import S_IMODE
from typing import Any

fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None  # not on Windows

STALE = 3600.0  # seconds; no save takes that long, so what is older was left by a writer that was killed


def replace(target: Path, write: Callable[[Path], None]) -> None:
    """Puts the file that ``write`` makes in place of the target, on the disk when it returns, or changes nothing.

    It is made in a folder of its own beside the target: whatever ``write`` creates on its way goes with that folder,
    and no other writer ever touches it.
    """
    folder = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        folder.mkdir(0o700)
        _sweep(target, folder.stat().st_mtime - STALE)
        new = folder / "new"
        new.touch()  # gets the permissions of the umask
        mode = S_IMODE((target if target.exists() else new).stat().st_mode)
        write(new)
        with new.open("rb+") as file:
            new.chmod(mode)
            os.fsync(file.fileno())
        os.replace(new, target)
    finally:  # after Ctrl-C too
        shutil.rmtree(folder, ignore_errors=True)
    _sync(target.parent)


def add_entry(path: Path, entry: Mapping[str, Any]) -> None:
    """Adds a line of JSON to a file, on the disk when it returns; a line that a crash cut off before stays behind."""
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write(("\n" * torn + json.dumps(entry) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """What ``add_entry`` added, in order, without lines that were cut off; nothing if there is no file."""
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry


@contextmanager
def held(path: Path, *, wait: bool) -> Iterator[bool]:
    """Holds a lock file against other processes of this machine; a killed process holds nothing.

    Without waiting, False says that another process holds it. Where the platform has no such locks, nothing is held.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def _sweep(target: Path, before: float) -> None:
    """Removes what killed writers of the target left before that time, on the clock of the target's disk."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.\d+-[0-9a-f]+\.tmp")
    with suppress(OSError):  # another writer sweeps too, or the folder may not be listed: no reason not to save
        for path in target.parent.iterdir():
            if pattern.fullmatch(path.name) and path.lstat().st_mtime < before:
                shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Forces the names in a folder to the disk, where the platform can."""
    if os.name == "posix":  # Windows opens no folders
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
