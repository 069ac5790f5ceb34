"""Replacing a file so that a crash at any moment leaves the old one or the new one, whole. Needs POSIX."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from stat import S_IMODE
from typing import Any, BinaryIO


def replace(target: Path, parts: Iterable[Any]) -> None:
    """Puts these buffers, one after another, in place of the target, on the disk when it returns, or changes nothing.

    They are first written beside it, under one fixed name that is locked while in use. So two writers take turns, and
    what a killed one leaves behind is written over by the next: at most one such file exists, and none is ever deleted
    but by the writer that holds it.
    """
    temp = target.with_name(f".{target.name}.tmp")
    with _locked(temp) as file:
        try:
            file.truncate()
            if target.exists():
                os.fchmod(file.fileno(), S_IMODE(target.stat().st_mode))
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temp, target)
        except BaseException:  # Ctrl-C too
            if _is_at(temp, file):
                temp.unlink()
            raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name is on the disk only now
    finally:
        os.close(folder)


def _locked(temp: Path) -> BinaryIO:
    """The file at ``temp``, which nobody else is writing."""
    while True:
        # A link planted there is not followed: it could lead to any file.
        file = open(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "wb")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(temp, file):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # the writer we waited for has put it in place: it is the target now


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
