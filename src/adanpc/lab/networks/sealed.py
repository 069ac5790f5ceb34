"""Sealed files: tensors by name and one JSON document, refused on read if a single bit has changed.

A sealed file is a safetensors file, so any safetensors reader opens it:

* its only metadata entry, ``adanpc``, is the seal: the SHA-256, in hex, of every byte of the file but the seal's own;
* the tensor ``document`` holds the JSON document as UTF-8 bytes, which unlike metadata may have any length;
* all other tensors are the contents.

The safetensors library writes the metadata first, so the seal always stands at the same place. It is checked there,
over the raw bytes, before anything else in the file is looked at.

The seal finds damage, not fraud: whoever writes a file can seal it. Nothing in a file is ever executed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from adanpc.errors import UnavailableError
from adanpc.files import replace

DOCUMENT = "document"
METADATA = "adanpc"
LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
HEADER_START = b'{"__metadata__":{"adanpc":"'
SEAL_START = LENGTH_BYTES + len(HEADER_START)
SEAL_LENGTH = 64
SEAL_END = SEAL_START + SEAL_LENGTH
CHUNK = 2**20


class SealError(UnavailableError):
    """A file that is damaged, or that is not a sealed file at all."""

    code = "broken-seal"


def write_sealed(path: Path, tensors: Mapping[str, Tensor], document: Any) -> None:
    """Writes the file, whole or not at all.

    Args:
        path: a file that is there is replaced.
        tensors: by name; ``document`` is taken.
        document: anything that JSON can hold.
    """
    if DOCUMENT in tensors:
        raise SealError(f"the tensor name {DOCUMENT!r} is taken by the document: choose another")
    contents = _unshared(tensors)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    contents[DOCUMENT] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    try:
        replace(path, lambda new: _write(new, contents))
    except SafetensorError as error:
        raise _system_error(path, error) from error


def read_sealed(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors, on the CPU, and the document of a file whose seal is unbroken; otherwise a SealError."""
    if path.is_symlink() or not path.is_file():  # opening a pipe would wait for its writer
        raise SealError(f"{path} is not a regular file")
    data = path.read_bytes()
    _check_seal(path, data)
    try:
        tensors = load(data)
        document = json.loads(tensors.pop(DOCUMENT).numpy().tobytes())
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise SealError(f"{path} is sealed, but was not written by adanpc ({type(error).__name__})") from None
    return tensors, document


def _write(path: Path, contents: Mapping[str, Tensor]) -> None:
    save_file(dict(contents), path, {METADATA: "0" * SEAL_LENGTH})
    with path.open("rb+") as file:
        start = file.read(SEAL_START)
        if not start.endswith(HEADER_START):
            raise SealError("this version of safetensors does not write metadata first: install another one")
        digest = hashlib.sha256(start)
        file.seek(SEAL_END)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        file.seek(SEAL_START)
        file.write(digest.hexdigest().encode())


def _system_error(path: Path, error: SafetensorError) -> OSError:
    """What the system said when safetensors could not write; it puts the number of the error at the end of a text."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = errno.EIO
    if found is not None:
        number = int(found[1])
    return OSError(number, os.strerror(number), str(path))


def _check_seal(path: Path, data: bytes) -> None:
    if data[LENGTH_BYTES:SEAL_START] != HEADER_START or len(data) < SEAL_END:
        raise SealError(f"{path} is damaged, or was not written by adanpc: it does not begin with a seal")
    view = memoryview(data)
    digest = hashlib.sha256(view[:SEAL_START])
    digest.update(view[SEAL_END:])
    if digest.hexdigest().encode() != data[SEAL_START:SEAL_END]:
        raise SealError(f"{path} is damaged: its contents do not match its seal")


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, none sharing memory with another, which safetensors would refuse."""
    contents: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        if storage in storages:
            plain = plain.clone()
        storages.add(storage)
        contents[name] = plain
    return contents
