"""Sealed files: tensors by name and one JSON document, refused on read if a single bit has changed.

A sealed file is a safetensors file, so any safetensors reader opens it:

* its only metadata entry, ``adanpc``, is the seal: the SHA-256, in hex, of every byte of the file except the seal;
* the tensor ``document`` holds the JSON document as UTF-8 bytes, which unlike metadata may have any length;
* all other tensors are the contents.

The safetensors library writes the metadata first, so the seal is always at the same position. It is checked there,
over the raw bytes, before anything else in the file is parsed.

The seal detects damage, not fraud: whoever can write a file can seal it. Nothing in a file is ever executed.
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
LENGTH_BYTES = 8  # a safetensors file starts with the length of its header
HEADER_START = b'{"__metadata__":{"adanpc":"'
SEAL_START = LENGTH_BYTES + len(HEADER_START)
SEAL_LENGTH = 64
SEAL_END = SEAL_START + SEAL_LENGTH
CHUNK = 2**20  # bytes hashed at once


class SealError(UnavailableError):
    """A file that is damaged, or that is not a sealed file at all."""

    code = "broken-seal"


def write_sealed(path: Path, tensors: Mapping[str, Tensor], document: Any) -> None:
    """Writes the file, completely or not at all.

    Args:
        path: an existing file is replaced.
        tensors: tensors by name; the name ``document`` is reserved.
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
    """Returns the tensors, on the CPU, and the document of a file; raises SealError if its seal is broken."""
    if path.is_symlink() or not path.is_file():  # a named pipe is no file, and opening it would wait for a writer
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
    """Writes the contents with a placeholder for the seal, then replaces it by the seal."""
    save_file(dict(contents), path, {METADATA: "0" * SEAL_LENGTH})
    with path.open("rb+") as file:
        start = file.read(SEAL_START)
        if not start.endswith(HEADER_START):
            raise SealError("this version of safetensors does not write metadata first: install another one")
        # Hash everything before and after the placeholder, then write the hash over it.
        digest = hashlib.sha256(start)
        file.seek(SEAL_END)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        file.seek(SEAL_START)
        file.write(digest.hexdigest().encode())


def _system_error(path: Path, error: SafetensorError) -> OSError:
    """Returns the error of the operating system that kept safetensors from writing.

    safetensors mentions its number only in the text of its own error.
    """
    match = re.search(r"\(os error (\d+)\)", str(error))
    number = errno.EIO
    if match is not None:
        number = int(match[1])
    return OSError(number, os.strerror(number), str(path))


def _check_seal(path: Path, data: bytes) -> None:
    """Raises SealError unless the seal in the contents of a file is that of all its other bytes."""
    if data[LENGTH_BYTES:SEAL_START] != HEADER_START or len(data) < SEAL_END:
        raise SealError(f"{path} is damaged, or was not written by adanpc: it does not begin with a seal")
    view = memoryview(data)
    digest = hashlib.sha256(view[:SEAL_START])
    digest.update(view[SEAL_END:])
    if digest.hexdigest().encode() != data[SEAL_START:SEAL_END]:
        raise SealError(f"{path} is damaged: its contents do not match its seal")


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors on the CPU, contiguous, with no memory shared between them, which safetensors requires."""
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
