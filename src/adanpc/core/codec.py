"""The codec that turns changes into bytes, for a log, and back. It uses no pickle and decodes only what it wrote.

An encoded change is a header and the bytes of its tensors:

    4 bytes   "ADNC"
    1 byte    version: 2 of a relabel with a label for each row, 1 of everything else
    4 bytes   length of the header, little-endian
    header    JSON, names sorted, no blanks, ASCII: everything that is not a tensor, and for each tensor
              [name, type, shape] in the order in which their bytes follow
    rest      the tensors, little-endian, with nothing between or after them
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields
from math import prod
from typing import Any

import torch
from torch import Tensor

from adanpc import require
from adanpc.core.changes import (
    VERDICTS,
    Append,
    Change,
    Delete,
    Feedback,
    Judgment,
    Observed,
    Relabel,
    Restore,
    Rollback,
    Veto,
    checked_time,
)
from adanpc.core.transform import Transform
from adanpc.core.types import Origin
from adanpc.errors import AdaNPCError, ChangeError

MAGIC = b"ADNC"
VERSION = 1
WITH_LABELS = 2  # the version of a relabel with a label for each row; to earlier releases it says: upgrade
PREFIX = struct.Struct("<4sBI")  # magic, version, length of the header
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
KINDS: dict[str, type[Any]] = {
    "append": Append,
    "veto": Veto,
    "restore": Restore,
    "relabel": Relabel,
    "delete": Delete,
    "feedback": Feedback,
    "rollback": Rollback,
}
APPEND_TENSORS = {  # with the types in which a bank stores them
    "features": torch.float32,
    "labels": torch.int64,
    "soft": torch.float32,
    "domain": torch.int64,
    "confidence": torch.float32,
    "keys": torch.int64,
    "source_mean": torch.float64,
    "stream": torch.float64,
}
TRANSFORM = tuple(part.name for part in fields(Transform))  # the names of a transform's tensors
PREFIX_OF_TRANSFORM = "transform."  # stands before these names in changes and files
ROLLBACK_TENSORS = ("source_mean", "stream_total", "stream")
ROW = "row."  # stands before the names of columns among a rollback's tensors


def encode(change: Change) -> bytes:
    """The change as bytes, for a log; ``decode`` turns them into an equal change."""
    header: dict[str, Any] = {"who": change.who, "why": change.why, "when": change.when}
    tensors: dict[str, Tensor] = {}
    match change:
        case Append():
            _describe_append(change, header, tensors)
        case Veto():
            header |= {"kind": "veto", "ids": change.ids}
        case Restore():
            header |= {"kind": "restore", "ids": change.ids}
        case Relabel():
            header |= {"kind": "relabel", "ids": change.ids, "label": change.label}
        case Delete():
            header |= {"kind": "delete", "ids": change.ids}
        case Feedback():
            header |= {"kind": "feedback", "label": change.label, "frozen": change.frozen, "adapted": change.adapted}
        case Rollback():
            _describe_rollback(change, header, tensors)
        case _:
            raise ChangeError(f"{type(change).__name__} is not a change")
    return _packed(header, tensors)


def _describe_append(change: Append, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Adds what an append holds to the header and the tensors."""
    header |= {"kind": "append", "origin": int(change.origin), "centered": bool(change.centered)}
    for name, dtype in APPEND_TENSORS.items():
        value = getattr(change, name)
        if value is not None:
            tensors[name] = _as_stored(name, torch.as_tensor(value), dtype)
    if change.transform is not None:
        tensors |= transform_tensors(change.transform)
    if change.observed is not None:
        header["observed_count"] = change.observed.count
        tensors["observed_total"] = change.observed.total


def _as_stored(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the type in which a bank stores it.

    A conversion must not make acceptable what a bank would refuse, such as labels that are not whole numbers.
    """
    if value.is_floating_point() != dtype.is_floating_point and name != "features":
        raise ChangeError(f"{name} of a change cannot be {value.dtype}")
    return value.to(dtype)


def _describe_rollback(change: Rollback, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Adds what a rollback holds to the header and the tensors."""
    header |= {
        "kind": "rollback",
        "to": change.to,
        "at": change.at,
        "removed": change.removed,
        "stream_count": change.stream_count,
    }
    header["judgments"] = judgments_to_json(change.judgments)
    for name, column in change.rows.items():
        tensors[ROW + name] = column
    if change.transformed:
        header["transformed"] = True
    for name in ROLLBACK_TENSORS:
        value = getattr(change, name)
        if value is not None:
            tensors[name] = value


def transform_tensors(transform: Transform) -> dict[str, Tensor]:
    """The tensors of a transform, by the names that they have in changes and files."""
    return {PREFIX_OF_TRANSFORM + name: getattr(transform, name) for name in TRANSFORM}


def take_transform(tensors: dict[str, Tensor]) -> Transform | None:
    """Removes the tensors of a transform from ``tensors``, and returns the transform; None if there are none."""
    found = {name: tensors.pop(PREFIX_OF_TRANSFORM + name, None) for name in TRANSFORM}
    parts = {name: tensor for name, tensor in found.items() if tensor is not None}
    if not parts:
        return None
    missing = found.keys() - parts.keys()
    if missing:
        raise ChangeError(f"a transform needs {PREFIX_OF_TRANSFORM}{min(missing)}")
    return Transform(**parts)


def decode(data: bytes) -> Change:
    """The change that ``encode`` wrote; raises a ChangeError for any other bytes."""
    header, tensors = _unpacked(data)
    kind = header.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ChangeError(f"there is no kind of change {kind!r}: upgrade adanpc, unless the bytes are damaged")
    try:
        if kind == "append":
            return _append(header, tensors)
        if kind == "rollback":
            return _rollback(header, tensors)
        if tensors:
            raise ChangeError(f"a {kind} has no tensors")
        change: Change = KINDS[kind](**header)
    except (TypeError, KeyError, AdaNPCError) as error:
        raise ChangeError(f"the bytes do not hold a valid {kind}: {error}") from None
    return change


def _append(header: dict[str, Any], tensors: dict[str, Tensor]) -> Append:
    """The append that a header and tensors describe."""
    count = header.pop("observed_count", None)
    total = tensors.pop("observed_total", None)
    if (count is None) != (total is None):
        raise ChangeError("observed needs both a total and a count")
    if total is not None:
        header["observed"] = Observed(total, require.whole("observed_count", count, least=0))
    try:
        header["origin"] = Origin(require.whole("origin", header["origin"]))
    except ValueError:
        raise ChangeError(f"there is no origin {header['origin']!r}") from None
    if not isinstance(header["centered"], bool):
        raise ChangeError(f"centered must be true or false, got {header['centered']!r}")
    header["transform"] = take_transform(tensors)
    unknown = tensors.keys() - APPEND_TENSORS.keys()
    if unknown:
        raise ChangeError(f"an append has no tensor {min(unknown)!r}")
    given: dict[str, Any] = header | tensors
    return Append(**given)


def _rollback(header: dict[str, Any], tensors: dict[str, Tensor]) -> Rollback:
    """The rollback that a header and tensors describe."""
    columns = [name for name in tensors if name.startswith(ROW)]
    rows = {name.removeprefix(ROW): tensors.pop(name) for name in columns}
    header["judgments"] = judgments_from_json(header["judgments"])
    header["stream_count"] = require.whole("stream_count", header["stream_count"], least=0)
    if not isinstance(header.get("transformed", False), bool):
        raise ChangeError(f"transformed must be true or false, got {header['transformed']!r}")
    unknown = tensors.keys() - set(ROLLBACK_TENSORS)
    if unknown:
        raise ChangeError(f"a rollback has no tensor {min(unknown)!r}")
    given: dict[str, Any] = header | tensors
    return Rollback(**given, rows=rows)


def judgments_to_json(judgments: Mapping[int, tuple[Judgment, ...]]) -> list[Any]:
    """Judgments as [row, [[verdict, label, who, why, when], …]] in the order of rows, which JSON can hold."""
    entries = []
    for row in sorted(judgments):
        history = [list(judgment) for judgment in judgments[row]]
        entries.append([row, history])
    return entries


def judgments_from_json(entries: Any) -> dict[int, tuple[Judgment, ...]]:
    """The judgments that ``judgments_to_json`` wrote; raises a ChangeError for anything else."""
    judgments: dict[int, tuple[Judgment, ...]] = {}
    try:
        for row, history in entries:
            number = require.whole("row", row, least=0)
            if number in judgments:
                raise ChangeError(f"judgments name row {number} twice")
            judgments[number] = tuple(_judgment(values) for values in history)
    except TypeError:
        raise ChangeError("judgments must be [row, [[verdict, label, who, why, when], …]]") from None
    except ValueError as error:
        raise ChangeError(f"judgments must be [row, [[verdict, label, who, why, when], …]]: {error}") from None
    return judgments


def _judgment(values: Any) -> Judgment:
    """One judgment from a list of its checked values."""
    verdict, label, who, why, when = values
    return Judgment(
        require.one_of("verdict", verdict, VERDICTS),
        require.whole("label", label, least=0),
        require.text("who", who),
        require.text("why", why),
        checked_time(when),
    )


def canonical(document: Any) -> str:
    """The document as JSON in its one canonical form: names sorted, no blanks, only ASCII, no NaN."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _packed(header: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """The header and tensors as bytes, in the format described above."""
    parts = []
    described = []
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        described.append([name, NAMES[tensor.dtype], list(tensor.shape)])
        parts.append(tensor.numpy().tobytes())
    text = canonical({**header, "tensors": described}).encode()
    prefix = PREFIX.pack(MAGIC, _version_of(header), len(text))
    return b"".join([prefix, text, *parts])


def _version_of(header: Mapping[str, Any]) -> int:
    """The version that a change with this header has."""
    if header.get("kind") == "relabel" and isinstance(header.get("label"), list | tuple):
        return WITH_LABELS
    return VERSION


def _header(text: bytes, version: int) -> dict[str, Any]:
    """A header, if it is written as ``_packed`` would write it in a change of this version."""
    header: dict[str, Any] = json.loads(text)
    # Only the canonical form is accepted, so that equal changes have equal bytes.
    if canonical(header).encode() != text:
        raise ChangeError("the header of a change is not written as adanpc writes it")
    if version != _version_of(header):
        raise ChangeError(f"a change with this header has version {_version_of(header)}, got {version}")
    return header


def _unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and tensors of packed bytes, which need not be trusted: no more is allocated than they hold."""
    if len(data) < PREFIX.size:
        raise ChangeError(f"a change has at least {PREFIX.size} bytes, got {len(data)}")
    magic, version, length = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ChangeError(f"a change must begin with {MAGIC!r}, got {magic!r}")
    if version not in (VERSION, WITH_LABELS):
        raise ChangeError(f"this adanpc reads changes up to version {WITH_LABELS}, got {version}: upgrade adanpc")
    start = PREFIX.size + length
    text = data[PREFIX.size : start]
    try:
        header = _header(text, version)
        described = header.pop("tensors")
        tensors = {}
        for name, kind, shape in described:
            tensor, start = _tensor(data, start, kind, shape)
            tensors[require.text("name", name)] = tensor
        if len(tensors) != len(described):
            raise ChangeError("a change names a tensor twice")
    except ChangeError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError) as error:
        raise ChangeError(f"the header of a change cannot be read: {error}") from None
    if start != len(data):
        raise ChangeError(f"a change must end after {start} bytes, got {len(data)}")
    return header, tensors


def _tensor(data: bytes, start: int, kind: str, shape: list[int]) -> tuple[Tensor, int]:
    """The tensor whose bytes begin at ``start``, and the place where they end."""
    dtype = DTYPES[kind]
    sizes = [require.whole("shape", size, least=0) for size in shape]
    if len(sizes) > 2:
        raise ChangeError(f"a tensor of a change has at most two dimensions, got {sizes}")
    end = start + prod(sizes) * dtype.itemsize
    if end > len(data):
        raise ChangeError(f"a change is cut off: its header announces {end} bytes or more, got {len(data)}")
    if end == start:  # frombuffer refuses an empty buffer
        return torch.zeros(sizes, dtype=dtype), end
    copied = bytearray(data[start:end])  # tensors must be writable, and bytes are not
    return torch.frombuffer(copied, dtype=dtype).view(sizes), end
