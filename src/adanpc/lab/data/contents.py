"""The contents of files, read with limits: the only place where the bytes of a data set are read.

Data sets are packed, downloaded and copied by others, so nothing about a file is trusted: not that it is a file at all,
not its length, and not that the length stays the same while it is read. Files are copied into memory and never mapped:
if someone truncates a mapped file, a process that accesses it dies.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import IO, BinaryIO

from adanpc.lab.data.domain import DataError
from adanpc.printable import spelled_out

MEBIBYTE = 2**20
# More than any published file that is read as a whole: the largest, the digits of MNIST, unpacks to 45 MiB.
MOST_BYTES = 256 * MEBIBYTE
CHUNK = MEBIBYTE
# Without O_NONBLOCK, opening a named pipe waits for a writer. Windows lacks that flag, but needs O_BINARY.
OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class ContentError(ValueError):
    """The reason why a file is refused, a clause such as "it is cut off"; ``blaming`` turns it into a ``DataError``."""


@contextmanager
def blaming(path: str | Path, problem: str, remedy: str) -> Iterator[None]:
    """Turns a ``ContentError`` into a ``DataError`` that names the file, the problem, the reason and the remedy."""
    try:
        yield
    except ContentError as error:
        raise DataError(f"{str(path)!r} {problem} ({spelled_out(str(error))}): {remedy}") from error


@contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a file for reading; refuses anything but a regular file or a link to one."""
    check_regular(path)
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except OSError as error:
        raise ContentError(error.strerror) from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        # Check again: the file may have been replaced since check_regular() looked at it.
        _check_mode(os.fstat(descriptor))
        yield file


def check_regular(path: str | Path) -> None:
    """Refuses pipes, sockets, devices and folders without opening them: reading them may take forever."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ContentError(error.strerror) from error
    _check_mode(status)


def read_contents(path: str | Path) -> bytes:
    """Returns all bytes of a regular file."""
    with open_regular(path) as file:
        check_size(os.fstat(file.fileno()).st_size)
        contents = read_at_most(file, MOST_BYTES + 1)
    check_size(len(contents))  # the file may have grown while it was read
    return contents


def read_at_most(file: IO[bytes], count: int) -> bytes:
    """Returns up to ``count`` bytes; memory is allocated as they arrive, not for ``count`` bytes in advance."""
    chunks = []
    missing = count
    try:
        while missing > 0:
            chunk = file.read(min(CHUNK, missing))
            if not chunk:
                break
            chunks.append(chunk)
            missing -= len(chunk)
    except OSError as error:
        raise ContentError(error.strerror) from error
    return b"".join(chunks)


def unpack_gzip(packed: bytes) -> bytes:
    """Returns the unpacked bytes of a gzip file."""
    chunks: list[bytes] = []
    size = 0
    try:
        with gzip.GzipFile(fileobj=BytesIO(packed)) as file:
            while True:
                chunk = file.read(CHUNK)
                if not chunk:
                    return b"".join(chunks)
                chunks.append(chunk)
                size += len(chunk)
                check_size(size, "unpacks to")  # on the way, since a few bytes may unpack to gigabytes
    except (EOFError, OSError, zlib.error) as error:
        raise ContentError(error) from error


def check_size(size: int, verb: str = "holds") -> None:
    """Refuses more bytes than any file of a data set has."""
    if size > MOST_BYTES:
        raise ContentError(f"it {verb} more than {MOST_BYTES // MEBIBYTE} MiB, the most that is read")


def _check_mode(status: os.stat_result) -> None:
    """Refuses the status of anything but a regular file."""
    if not S_ISREG(status.st_mode):
        raise ContentError("it is not a regular file")
