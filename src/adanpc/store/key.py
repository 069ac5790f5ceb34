"""A secret of this account, by which it knows what it wrote itself.

Whoever can change a file can also change a seal that is a plain hash. A seal that is made with a secret is another
matter: nobody else can make it. It is for what cannot be checked in any other way, such as codes of rows, which would
have to be made again.
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
OTHERS = 0o077  # permissions of anybody but the owner


def signed(text: str) -> str:
    """The signature of this account under a text, in hexadecimal; "" where it has no secret and can keep none."""
    key = _key()
    if key is None:
        return ""
    return hmac.digest(key, text.encode(), "sha256").hex()


def is_own(signature: str, text: str) -> bool:
    """Whether this account has signed a text."""
    expected = signed(text)
    return bool(expected) and hmac.compare_digest(signature.encode(), expected.encode())


def _key() -> bytes | None:
    """The secret, made if there is none; None where it cannot be kept, or others can read it."""
    try:
        path = _path()
        if not path.exists():
            _make(path)
        return _read(path)
    except (OSError, RuntimeError):  # a folder that cannot be written to, or an account without a home
        return None


def _path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "adanpc" / "key"


def _make(path: Path) -> None:
    """Makes the secret, unless another process is faster: it is there as a whole, or not at all."""
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
    # Opening a pipe would wait for its writer, so it is opened without waiting, and looked at before it is read.
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
