"""Replacing a file so that a crash at any moment leaves the old one or the new one, whole."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE

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
