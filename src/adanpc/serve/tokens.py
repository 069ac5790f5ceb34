"""Tokens: who may do what. A file holds the hash of each, so that nobody who reads it can use one."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adanpc import require
from adanpc.errors import AdaNPCError
from adanpc.files import replace

ROLES = ("predict", "expert", "admin")  # each may do what those before it may
BYTES = 32  # of a token: nobody finds one by trying, so a fast hash is enough
LONGEST_NAME = 100


class TokenError(AdaNPCError):
    """A file of tokens that cannot be used."""

    code = "bad-tokens"


@dataclass(frozen=True)
class Caller:
    """Who makes a request, and what they may do."""

    name: str = ""
    role: str = "admin"

    def may(self, role: str) -> bool:
        """Whether this role is the caller's or below it."""
        return ROLES.index(role) <= ROLES.index(self.role)


@dataclass(frozen=True)
class Entry:
    """One token of a file."""

    name: str
    role: str
    sha256: str


class Tokens:
    """The tokens of a file, which is read again when it has changed: a token that was removed is refused at once.

    Args:
        path: that ``add`` wrote.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: object = None
        self._entries: Sequence[Entry] = ()
        self._refresh()

    def caller(self, token: str) -> Caller | None:
        """Whose token this is; all entries are compared, each in constant time."""
        self._refresh()
        digest = _hash(token)
        found = None
        for entry in self._entries:
            if hmac.compare_digest(entry.sha256, digest):
                found = Caller(entry.name, entry.role)
        return found

    def _refresh(self) -> None:
        try:
            status = os.stat(self._path)
        except OSError as error:
            raise _unreadable(self._path, error) from None
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if version != self._version:
            self._entries = read_tokens(self._path)
            self._version = version


def add_token(path: Path, name: str, role: str) -> str:
    """A new token, which is in no file: its hash is added to this one."""
    require.one_of("role", role, ROLES)
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise AdaNPCError(f"name must be 1 to {LONGEST_NAME} printable characters, got {name!r}")
    is_new = not path.exists()
    entries = [] if is_new else read_tokens(path)
    if name in [entry.name for entry in entries]:
        raise AdaNPCError(f"{path} has a token of {name!r} already: remove that first, or choose another name")
    token = secrets.token_urlsafe(BYTES)
    _write(path, [*entries, Entry(name, role, _hash(token))])
    if is_new:
        path.chmod(0o600)  # nobody else has to know who there is; later changes keep it, or what it was changed to
    return token


def remove_token(path: Path, name: str) -> None:
    """Removes a token, which is refused from then on."""
    entries = read_tokens(path)
    kept = [entry for entry in entries if entry.name != name]
    if len(kept) == len(entries):
        raise AdaNPCError(f"{path} has no token of {name!r}; it has: {', '.join(entry.name for entry in entries)}")
    _write(path, kept)


def read_tokens(path: Path) -> list[Entry]:
    """The entries of a file of tokens."""
    try:
        document = json.loads(path.read_bytes())
        entries = [Entry(**entry) for entry in document["tokens"]]
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, TypeError, KeyError):
        raise TokenError(f"{path} is not a file of tokens: make it by adanpc token add") from None
    for entry in entries:
        _check(path, entry)
    return entries


def _unreadable(path: Path, error: OSError) -> TokenError:
    return TokenError(f"{path} cannot be read ({error.strerror}): make it by adanpc token add")


def _check(path: Path, entry: Any) -> None:
    texts = isinstance(entry.name, str) and isinstance(entry.sha256, str)
    if not texts or entry.role not in ROLES or len(entry.sha256) != 64:
        raise TokenError(f"{path} has an entry that is no token, {entry.name!r}: make the file by adanpc token add")


def _write(path: Path, entries: Sequence[Entry]) -> None:
    document = {"tokens": [asdict(entry) for entry in entries]}
    text = json.dumps(document, indent=1) + "\n"
    replace(path, lambda file: _fill(file, text))


def _fill(file: Path, text: str) -> None:
    file.write_text(text)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
