"""Where everything stands in a bank file: the document, the header around it, the columns behind it.

The header is written and read here, not by the safetensors library, because the trailer seals the header's own bytes,
and because a column so goes straight from memory to disk, and back by one read of one open file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from reprlib import repr as brief
from typing import Any, BinaryIO

import torch

from adanpc.core import MemoryBank
from adanpc.index.grid import Columns
from adanpc.store.check import ContentsError, check_document, parse

KEY = "adanpc"  # of the one metadata entry
TRAILER = "trailer.sha256"
MOST_HEADER = 100_000_000  # bytes; the safetensors library reads no more
DTYPES = {  # widest first, so that each column is aligned
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
}

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def layout(document: dict[str, Any]) -> Layout:
    """The type and shape of each column in the order of the file; they follow from the document alone."""
    config, rows, order = document["bank"], document["rows"], list(DTYPES)
    columns = {name: (column.dtype, (rows, *column.shape[1:])) for name, column in MemoryBank(**config).table().items()}
    names = ["centring.mean", "centring.total"] if document["centring"]["mean"] else ["centring.total"]
    columns |= dict.fromkeys(names, (torch.float64, (config["dim"],)))
    by_type = sorted(columns.items(), key=lambda item: (order.index(item[1][0]), item[0]))
    return {**dict(by_type), TRAILER: (torch.uint8, (32,))}


def _places(columns: Layout) -> dict[str, tuple[int, int]]:
    """The first byte of each column behind the header, and the one after its last."""
    places, end = {}, 0
    for name, (dtype, shape) in columns.items():
        start, end = end, end + dtype.itemsize * prod(shape)
        places[name] = (start, end)
    return places


def _entries(columns: Layout) -> dict[str, dict[str, Any]]:
    """What the header says about each column."""
    return {
        name: {"dtype": DTYPES[columns[name][0]], "shape": [*columns[name][1]], "data_offsets": [*place]}
        for name, place in _places(columns).items()
    }


def header(document: dict[str, Any]) -> bytes:
    """All bytes before the first column."""
    text = json.dumps(
        {"__metadata__": {KEY: json.dumps(document, allow_nan=False)}, **_entries(layout(document))},
        separators=(",", ":"),
    ).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER:
        raise ContentsError(
            f"its vetoes and recipe need {len(text)} bytes, more than {MOST_HEADER}", "shorten their texts"
        )
    return len(text).to_bytes(8, "little") + text


def contents(document: dict[str, Any], tensors: Columns) -> Iterator[Any]:
    """The buffers that make up a file, in order; tensors are not copied."""
    seal = hashlib.sha256()
    columns = [tensors[name].flatten().view(torch.uint8).numpy() for name in layout(document) if name in tensors]
    parts: list[Any] = [header(document), *columns]
    for part in parts:
        seal.update(part)
        yield part
    yield seal.digest()


def read(path: Path) -> tuple[dict[str, Any], Columns]:
    """The checked document of a file and its columns, which are parts of one buffer and as yet unchecked."""
    if not path.is_file():
        what = "it is a folder or a device" if path.exists() else "there is no such file"
        raise ContentsError(what, "give the path of a file that adanpc saved")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = _read_head(file, size)
        document = _read_document(head)
        places = _places(layout(document))
        wanted = len(head) + places[TRAILER][1]
        if size != wanted:
            raise ContentsError(f"it has {size} bytes instead of {wanted}")
        buffer = bytearray(size)
        buffer[: len(head)] = head
        file.readinto(memoryview(buffer)[len(head) :])
    if hashlib.sha256(memoryview(buffer)[:-32]).digest() != buffer[-32:]:
        raise ContentsError("its bytes do not have the checksum at its end")
    data = torch.frombuffer(buffer, dtype=torch.uint8)[len(head) :]
    return document, {
        name: data[slice(*places[name])].view(dtype).view(shape) for name, (dtype, shape) in layout(document).items()
    }


def _read_head(file: BinaryIO, size: int) -> bytes:
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if not size:
        raise ContentsError("it is empty")
    if length > size - 8:
        raise ContentsError("it is cut short or not a safetensors file")
    if length > MOST_HEADER or length % 8:
        raise ContentsError(f"its header has {length} bytes, which is not a multiple of 8 up to {MOST_HEADER}")
    return first + file.read(length)


def _read_document(head: bytes) -> dict[str, Any]:
    """The checked document, once the rest of the header agrees with it."""
    entries = parse(head[8:], "header")
    about = entries.pop("__metadata__", None) if isinstance(entries, dict) else None
    text = about.get(KEY) if isinstance(about, dict) else None
    document: dict[str, Any] = parse(text, "document") if isinstance(text, str) else {}
    check_document(document)
    expected = _entries(layout(document))
    for name in [*sorted(expected.keys() ^ entries.keys()), *expected]:
        found, wanted = entries.get(name, "absent"), expected.get(name, "absent")
        if found != wanted:
            raise ContentsError(f"its column {brief(name)} is {brief(found)} and should be {brief(wanted)}")
    return document
