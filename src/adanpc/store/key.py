"""A secret key of this account, with which it recognizes what it wrote itself.

Whoever can change a file can also change a seal that is a plain hash, but nobody else can make a signature that needs
a secret. Signatures are for contents that cannot be checked in any other way, such as the codes of rows, which would
have to be computed again.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

LENGTH = 32  # bytes
PRIVATE = 0o600
OTHERS = 0o077  # the permissions of everybody but the owner


def signed(text: str) -> str:
    """Returns this account's signature of a text in hexadecimal; "" if it has no secret and cannot keep one."""
    key = _key()
    if key is None:
        return ""
    return hmac.digest(key, text.encode(), "sha256").hex()


def is_own(signature: str, text: str) -> bool:
    """Returns whether a signature of a text was made by this account."""
    expected = signed(text)
    return bool(expected) and hmac.compare_digest(signature.encode(), expected.encode())


def _key() -> bytes | None:
    """Returns the secret, creating it if there is none; None if it cannot be kept, or if others can read it."""
    try:
        path = _path()
        if not path.exists():
            _make(path)
        return _read(path)
    except (OSError, RuntimeError):  # a read-only folder, or an account without a home directory
        return None


def _path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "adanpc" / "key"


def _make(path: Path) -> None:
    """Creates the secret unless another process is faster; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
            file.write(secrets.token_bytes(LENGTH))
        with suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    # Opening a pipe would block until somebody writes to it. So open without blocking, and check what it is first.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode) or mode & OTHERS:
            return None
        key = os.read(number, LENGTH + 1)
    finally:
        os.close(number)
    if len(key) != LENGTH:
        return None
    return key
