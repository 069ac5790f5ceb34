"""CIFAR-10-C, from the published arrays or generated from CIFAR-10."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adanpc.lab.data.cifar import CLASSES, cifar10
from adanpc.lab.data.corrupted import CONDITIONS, MADE, corrupted, part_of, title
from adanpc.lab.data.domain import DataError, DataSet, Domain
from adanpc.lab.data.npy import ArrayLayout, read_array, read_layout, read_row
from adanpc.lab.data.scan import candidate_folders, join_clauses

NAME = "cifar-10-c"
FOLDERS = ("CIFAR-10-C", "cifar-10-c", "cifar10-c", "CIFAR10-C")
SEVERITIES = 5


def cifar10_c(root: Path, seed: int) -> DataSet | None:
    """Returns CIFAR-10-C with a domain for each corruption and severity, the fifteen standard corruptions first.

    The published arrays are read image by image, never as a whole. Without them, images are generated from CIFAR-10
    when they are needed, and the notice says so. Returns None if CIFAR-10's test images are missing, too.
    """
    for place in candidate_folders(root, FOLDERS):
        if any(_file(place, corruption).is_file() for corruption, _ in CONDITIONS):
            return _published(place)
    clean = cifar10(root)
    if clean is None or "test" not in [domain.name for domain in clean.domains]:
        return None
    return DataSet(NAME, corrupted(clean["test"], seed), CLASSES, join_clauses(MADE, clean.notice))


class ArrayRows:
    """Rows of an array (N, H, W, 3) in a ``.npy`` file as images (3, H, W), each read when it is needed.

    Args:
        path: the file.
        layout: the layout of the array in the file.
        rows: the rows to use.
    """

    def __init__(self, path: Path, layout: ArrayLayout, rows: range) -> None:
        self.path = path
        self.layout = layout
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        pixels = read_row(self.path, self.layout, self.rows[index])
        return torch.from_numpy(pixels).permute(2, 0, 1)


def _published(place: Path) -> DataSet:
    """Returns the data set of the corruptions whose arrays exist."""
    labels = _read_labels(place / "labels.npy")
    layouts: dict[str, ArrayLayout] = {}
    conditions = []
    domains = []
    for corruption, severity in CONDITIONS:
        path = _file(place, corruption)
        if not path.is_file():
            continue
        if corruption not in layouts:  # one file holds all severities, so check it once
            layouts[corruption] = _check_layout(path, len(labels))
        conditions.append((corruption, severity))
        domains.append(_domain(path, layouts[corruption], labels, title(corruption, severity), severity))
    return DataSet(NAME, tuple(domains), CLASSES, part_of(conditions))


def _domain(path: Path, layout: ArrayLayout, labels: Tensor, name: str, severity: int) -> Domain:
    """Returns the domain of one severity, which is a part of the corruption's file."""
    count = len(labels) // SEVERITIES
    rows = range((severity - 1) * count, severity * count)
    return Domain(name, ArrayRows(path, layout, rows), labels[rows.start : rows.stop], version=layout.stamp)


def _check_layout(path: Path, count: int) -> ArrayLayout:
    """Returns the layout of a file; refuses it unless it holds ``count`` color images."""
    layout = read_layout(path)
    is_images = layout.dtype == np.uint8 and len(layout.shape) == 4
    if not is_images or (layout.shape[0], layout.shape[3]) != (count, 3):
        raise DataError(
            f"{str(path)!r} holds {layout.dtype} {layout.shape} where uint8 ({count}, 32, 32, 3) fits the labels: "
            "unpack it again"
        )
    return layout


def _read_labels(path: Path) -> Tensor:
    """Returns the labels of all severities, one severity after another."""
    if not path.is_file():
        raise DataError(f"{str(path)!r} is missing beside the corrupted images: unpack it again")
    labels = read_array(path)
    if labels.ndim != 1 or len(labels) % SEVERITIES or not np.isin(labels, range(len(CLASSES))).all():
        raise DataError(f"{str(path)!r} holds no labels 0 to 9 for {SEVERITIES} severities: unpack it again")
    return torch.from_numpy(labels.astype(np.int64))


def _file(place: Path, corruption: str) -> Path:
    """Returns the path of a corruption's array."""
    return place / f"{corruption}.npy"
