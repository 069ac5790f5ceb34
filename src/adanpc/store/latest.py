"""The latest answers of a service, kept next to a durable bank so that people can look at them after a restart.

No later answer depends on them, so they are not part of the log: a crash may lose the last few, and a damaged file is
ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from adanpc import files
from adanpc.core import Prediction
from adanpc.core.contents import BankSettings
from adanpc.core.types import answered_in_turn
from adanpc.store.answers import decode_answer, encode_answer
from adanpc.store.file import Location
from adanpc.store.sqlite import refuse_link

FILE = "latest"
SEAL = 32  # bytes at the beginning of the file: the SHA-256 of the rest
MOST_BYTES = 256 * 2**20  # the largest file that is read
MOST_QUERIES = 2**53  # the bound on query numbers: every JSON reader tells whole numbers apart up to here


class Latest(NamedTuple):
    """Queries that were answered, oldest first."""

    numbers: Tensor  # (n,) int64, which name the queries, in ascending order
    features: Tensor  # (n, D) float32
    times: Tensor  # (n,) float64, seconds since 1970
    answers: Prediction  # for n queries
    pictures: Sequence[bytes | None]  # one for each query
    next_number: int  # the number of the first query that is not here
    ended: bool  # whether the service shut down cleanly; if not, it may have used numbers from next_number on


def write_latest(folder: Location, latest: Latest | None) -> None:
    """Writes the latest queries of a service, replacing earlier ones; None only removes those."""
    target = Path(folder) / FILE
    refuse_link(target)
    if latest is None:
        target.unlink(missing_ok=True)
        return
    sizes = [-1 if picture is None else len(picture) for picture in latest.pictures]
    together = b"".join(picture for picture in latest.pictures if picture is not None)
    answers = replace(latest.answers, neighbors=replace(latest.answers.neighbors, soft=None))  # nobody looks at soft
    tensors = {
        "numbers": latest.numbers,
        "features": latest.features,
        "times": latest.times,
        "answers": _tensor(encode_answer(answers)),
        "pictures": _tensor(together),
        "picture_sizes": torch.tensor(sizes, dtype=torch.int64),
        "next": torch.tensor([latest.next_number, int(latest.ended)]),
    }
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    sealed = hashlib.sha256(data).digest() + data
    files.replace(target, lambda path: _fill(path, sealed))


def read_latest(folder: Location, settings: BankSettings) -> Latest | None:
    """Returns what ``write_latest`` wrote; None if it is missing or damaged, or does not fit these settings."""
    path = Path(folder) / FILE
    refuse_link(path)
    with suppress(OSError):
        # Opening a pipe would block until somebody writes to it.
        if path.is_file() and path.stat().st_size <= MOST_BYTES:
            sealed = path.read_bytes()
            if hashlib.sha256(sealed[SEAL:]).digest() == sealed[:SEAL]:
                return _parsed(sealed[SEAL:], settings)
    return None


def _parsed(data: bytes, settings: BankSettings) -> Latest | None:
    """Returns the queries that bytes encode; None if they were written for another bank, or by another program.

    The seal shows that the bytes are as they were written, not who wrote them: anybody can make a valid one.
    """
    try:
        latest = _unpacked(load(data))
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError):
        return None
    if not _fits(latest, settings):
        return None
    return latest


def _unpacked(tensors: Mapping[str, Tensor]) -> Latest:
    """Returns the queries that the tensors of a file describe."""
    together = tensors["pictures"].numpy().tobytes()
    pictures: list[bytes | None] = []
    begin = 0
    for size in tensors["picture_sizes"].tolist():
        if size < 0:
            pictures.append(None)
            continue
        pictures.append(together[begin : begin + size])
        begin += size
    next_number, ended = tensors["next"].tolist()
    answers = decode_answer(tensors["answers"].numpy().tobytes())
    return Latest(
        tensors["numbers"], tensors["features"], tensors["times"], answers, pictures, next_number, bool(ended)
    )


def _fits(latest: Latest, settings: BankSettings) -> bool:
    """Returns whether all parts have the same number of queries, and a bank with these settings could have answered."""
    count = len(latest.pictures)
    answers = latest.answers
    near = answers.neighbors
    if near.soft is not None or answers.provisional is not None:
        return False  # neither is ever written
    if near.ids.ndim != 2 or near.similarity.dtype != torch.float64:
        return False
    of_classes = (count, settings.classes)
    of_voters = (count, near.ids.shape[1])
    required = (
        (latest.numbers, torch.int64, (count,)),
        (latest.features, torch.float32, (count, settings.dim)),
        (latest.times, torch.float64, (count,)),
        (answers.probs, torch.float32, of_classes),
        (answers.joined, torch.int64, (count,)),
        (answers.weights, torch.float32, of_voters),
        (near.ids, torch.int64, of_voters),
        (near.labels, torch.int64, of_voters),
        (near.similarity.clamp(min=-2), torch.float64, of_voters),  # an absent neighbor is infinitely far away
    )
    of_the_preset_safe = (
        (answers.trust, torch.float32, (count,)),
        (answers.frozen, torch.float32, of_classes),
        (answers.novelty, torch.float32, (count,)),
    )
    optional = tuple(each for each in of_the_preset_safe if each[0] is not None)
    if not all(_is_column(*each) for each in required + optional):
        return False
    return _are_numbered(latest) and bool(((near.labels >= -1) & (near.labels < settings.classes)).all())


def _is_column(values: Any, kind: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Returns whether a tensor has this type and shape, and only finite values."""
    if values.dtype != kind or values.shape != shape:
        return False
    return bool(values.isfinite().all())


def _are_numbered(latest: Latest) -> bool:
    """Returns whether the numbers ascend and the next one, a whole number, is above them: names must not be reused."""
    if not isinstance(latest.next_number, int):
        return False
    numbers = [0, *latest.numbers.tolist(), latest.next_number]
    return numbers[-1] < MOST_QUERIES and all(one < other for one, other in pairwise(numbers))


def latest_of(
    numbers: Sequence[int],
    features: Sequence[Tensor],
    times: Sequence[float],
    answers: Sequence[Prediction],
    pictures: Sequence[bytes | None],
    next_number: int,
    *,
    ended: bool,
) -> Latest:
    """Returns one or more queries combined; ``features`` has one vector (D,) and ``answers`` one answer for each."""
    return Latest(
        torch.tensor(numbers, dtype=torch.int64),
        torch.stack(list(features)),
        torch.tensor(times, dtype=torch.float64),
        answered_in_turn(answers),
        pictures,
        next_number,
        ended,
    )


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(numpy.frombuffer(data, numpy.uint8).copy())


def _fill(path: Path, data: bytes) -> None:
    path.write_bytes(data)
