"""What files hold, read within bounds: the one door to the bytes of a data set.

Data sets are packed, downloaded and copied by others, so nothing about a file is taken on trust: that it is a file at
all, how long it is, or that it stays that long while it is read. Files are copied into memory and never mapped: if
somebody else cuts a mapped file short, the process that looks at it dies.
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
from adanpc.lab.data.printable import printable

MEBIBYTE = 2**20
# More than any published file that is read whole: the largest, the digits of MNIST, unpacks to 45 MiB.
MOST_BYTES = 256 * MEBIBYTE
CHUNK = MEBIBYTE
# Without O_NONBLOCK, opening a pipe waits for somebody to write to it. Windows lacks the flag, but has one for bytes.
OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class ContentError(ValueError):
    """The reason why a file is refused, a clause such as "it is cut"; ``blaming`` makes a ``DataError`` of it."""


@contextmanager
def blaming(path: str | Path, problem: str, remedy: str) -> Iterator[None]:
    """Turns a ``ContentError`` into a ``DataError`` that names the file, the problem, the reason and the remedy."""
    try:
        yield
    except ContentError as error:
        raise DataError(f"{str(path)!r} {problem} ({printable(str(error))}): {remedy}") from error


@contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """The file, open for reading; anything but a regular file, or a link to one, is refused."""
    check_regular(path)
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except OSError as error:
        raise ContentError(error.strerror) from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        # Something else may have taken the place of the file since it was looked at.
        _check_mode(os.fstat(descriptor))
        yield file


def check_regular(path: str | Path) -> None:
    """Refuses pipes, sockets, devices and folders without opening them: to read them may take forever."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ContentError(error.strerror) from error
    _check_mode(status)


def read_contents(path: str | Path) -> bytes:
    """All bytes of a regular file."""
    with open_regular(path) as file:
        check_size(os.fstat(file.fileno()).st_size)
        contents = read_at_most(file, MOST_BYTES + 1)
    check_size(len(contents))  # it may have grown while it was read
    return contents


def read_at_most(file: IO[bytes], count: int) -> bytes:
    """Up to ``count`` bytes; memory is taken as they arrive, not as they are announced."""
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
    """The bytes that a gzip file was made from."""
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
                check_size(size, "unpacks to")
    except (EOFError, OSError, zlib.error) as error:
        raise ContentError(error) from error


def check_size(size: int, verb: str = "holds") -> None:
    """Refuses more bytes than any data set has in one file."""
    if size > MOST_BYTES:
        raise ContentError(f"it {verb} more than {MOST_BYTES // MEBIBYTE} MiB, the most that is read")


def _check_mode(status: os.stat_result) -> None:
    if not S_ISREG(status.st_mode):
        raise ContentError("it is not a regular file")
