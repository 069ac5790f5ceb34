"""CIFAR-10-C: the published arrays, or the same conditions made of CIFAR-10."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adanpc.lab.data.cifar import CLASSES, cifar10
from adanpc.lab.data.corrupted import CONDITIONS, MADE, corrupted, part_of, title
from adanpc.lab.data.domain import DataError, DataSet, Domain
from adanpc.lab.data.scan import notice, places

NAME = "cifar-10-c"
FOLDERS = ("CIFAR-10-C", "cifar-10-c", "cifar10-c", "CIFAR10-C")
SEVERITIES = 5


def cifar10_c(root: Path, seed: int) -> DataSet | None:
    """CIFAR-10-C with a domain for each corruption and severity, the fifteen standard corruptions first.

    The published arrays are mapped, never read whole. Without them the images are made of CIFAR-10's when they are
    asked for, and the notice says so; None if that is missing too.
    """
    for place in places(root, FOLDERS):
        if any(_file(place, corruption).is_file() for corruption, _ in CONDITIONS):
            return _published(place)
    clean = cifar10(root)
    if clean is None:
        return None
    return DataSet(NAME, corrupted(clean["test"], seed), CLASSES, notice(MADE, clean.notice))


class ArrayRows:
    """Rows of an array (N, H, W, 3) in a ``.npy`` file as images (3, H, W), each read when it is asked for.

    Args:
        path: of the file.
        rows: which.
    """

    def __init__(self, path: Path, rows: range) -> None:
        self.path, self.rows = path, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        pixels = _mapped(self.path, self.path.stat().st_mtime_ns)[self.rows[index]]
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


@lru_cache(maxsize=32)
def _mapped(path: Path, changed: int) -> np.ndarray[Any, np.dtype[Any]]:
    """The array, mapped once in each process."""
    try:
        array: np.ndarray[Any, np.dtype[Any]] = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{str(path)!r} is no array ({error}): unpack it again") from error
    return array


def _published(place: Path) -> DataSet:
    labels = _labels(place / "labels.npy")
    conditions = [condition for condition in CONDITIONS if _file(place, condition[0]).is_file()]
    domains = tuple(_domain(place, corruption, severity, labels) for corruption, severity in conditions)
    return DataSet(NAME, domains, CLASSES, part_of(conditions))


def _domain(place: Path, corruption: str, severity: int, labels: Tensor) -> Domain:
    path = _file(place, corruption)
    status, array = path.stat(), _mapped(path, path.stat().st_mtime_ns)
    if array.dtype != np.uint8 or array.ndim != 4 or (len(array), array.shape[3]) != (len(labels), 3):
        raise DataError(
            f"{str(path)!r} holds {array.dtype} {array.shape} where uint8 ({len(labels)}, 32, 32, 3) fits the labels: "
            "unpack it again"
        )
    count = len(labels) // SEVERITIES
    rows = range((severity - 1) * count, severity * count)
    source = f"{path.name} {status.st_size} {status.st_mtime_ns}"
    return Domain(title(corruption, severity), ArrayRows(path, rows), labels[rows.start : rows.stop], source=source)


def _labels(path: Path) -> Tensor:
    if not path.is_file():
        raise DataError(f"{str(path)!r} is missing beside the corrupted images: unpack it again")
    labels = np.array(_mapped(path, path.stat().st_mtime_ns))
    if labels.ndim != 1 or len(labels) % SEVERITIES or not np.isin(labels, range(len(CLASSES))).all():
        raise DataError(f"{str(path)!r} holds no labels 0 to 9 for {SEVERITIES} severities: unpack it again")
    return torch.from_numpy(labels.astype(np.int64))


def _file(place: Path, corruption: str) -> Path:
    return place / f"{corruption}.npy"
