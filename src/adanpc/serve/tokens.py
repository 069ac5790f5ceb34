"""Tokens: who may do what. The token file holds only hashes, so that reading it does not give access."""

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

ROLES = ("predict", "expert", "admin")  # each includes the rights of those before it
BYTES = 32  # in a token: too many to guess, so a fast hash is enough
LONGEST_NAME = 100
LONGEST_ID = 200  # of a request


class TokenError(AdaNPCError):
    """A token file cannot be used."""

    code = "bad-tokens"


@dataclass(frozen=True)
class Caller:
    """The name and the role of whoever makes a request."""

    name: str = ""
    role: str = "admin"

    def may(self, role: str) -> bool:
        """Returns whether the caller has the rights of a role: it is the caller's own role or a lower one."""
        return ROLES.index(role) <= ROLES.index(self.role)

    def own_id(self, request: str) -> str:
        """Returns the id of a request as the bank keeps it, so that callers with names may use the same ids."""
        if len(request) > LONGEST_ID:
            raise AdaNPCError(f"the id of a request has at most {LONGEST_ID} characters, got {len(request)}")
        if not request or not self.name:
            return request
        return f"{self.name}\n{request}"  # no name has a line break


@dataclass(frozen=True)
class Entry:
    """One entry of a token file."""

    name: str
    role: str
    sha256: str


class Tokens:
    """The tokens in a file. The file is read again whenever it changes, so a removed token is refused at once.

    Args:
        path: a file that ``add_token`` wrote.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: object = None
        self._entries: Sequence[Entry] = ()
        self._refresh()

    def caller(self, token: str) -> Caller | None:
        """Returns the owner of a token, or None; always compares all entries, each in constant time."""
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
    """Returns a new token and adds its hash to a file; the token itself is not stored anywhere."""
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
        path.chmod(0o600)  # the names are nobody else's business; later writes keep the permissions the file then has
    return token


def remove_token(path: Path, name: str) -> None:
    """Removes the token with a name from a file; it is refused from then on."""
    entries = read_tokens(path)
    kept = [entry for entry in entries if entry.name != name]
    if len(kept) == len(entries):
        raise AdaNPCError(f"{path} has no token of {name!r}; it has: {', '.join(entry.name for entry in entries)}")
    _write(path, kept)


def read_tokens(path: Path) -> list[Entry]:
    """Returns the entries of a token file."""
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
    try:
        replace(path, lambda file: _fill(file, text))
    except OSError as error:
        raise TokenError(
            f"{path} was not written ({error.strerror}): check the path, its rights and the disk"
        ) from None


def _fill(file: Path, text: str) -> None:
    file.write_text(text)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
