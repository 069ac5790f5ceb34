"""CIFAR-10, from the published batches or from image files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from adanpc.lab.data.cifar_pickle import parse_batch
from adanpc.lab.data.contents import blaming, read_contents
from adanpc.lab.data.domain import DataError, DataSet, Domain
from adanpc.lab.data.scan import (
    ListedFile,
    Scan,
    build_data_set,
    candidate_folders,
    class_names,
    collect_images,
    join_clauses,
    list_zip,
    scan_folder,
    size_difference,
)

NAME = "cifar-10"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGE = (3, 32, 32)
FOLDERS = ("CIFAR-10", "cifar-10", "cifar10", "CIFAR10")
PICKLED = "cifar-10-batches-py"
BATCHES = {
    "train": ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
    "test": ("test_batch",),
}
PUBLISHED = {"train": 50_000, "test": 10_000}  # how many images were published


def cifar10(root: Path) -> DataSet | None:
    """Returns CIFAR-10 with the domains train and test, as far as they exist; None if neither does.

    It may be at the root or in a usual folder below. The pickled batches are preferred, then the folders
    ``train/<class>/<image>`` and ``test/<class>/<image>``, then a zip file of these folders with cifar in its name.
    """
    for place in candidate_folders(root, FOLDERS):
        data = _read_batches(place) or _read_folders(place) or _read_zip(place)
        if data is not None:
            found = {domain.name: len(domain) for domain in data.domains}
            differences = []
            for domain, count in PUBLISHED.items():
                differences.append(size_difference(f"{domain} images", found.get(domain, 0), count))
            return replace(data, notice=join_clauses(data.notice, *differences))
    return None


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Returns the images (n, 3, 32, 32) uint8 and labels (n,) of one pickled batch; nothing in it is executed."""
    with blaming(path, "is not a batch of CIFAR-10", "unpack it again"):
        batch = parse_batch(read_contents(path))
    count = len(batch.labels)
    labels_fit = all(0 <= label < len(CLASSES) for label in batch.labels)
    if batch.pixels.shape != (count, math.prod(IMAGE)) or not labels_fit:
        raise DataError(f"{str(path)!r} holds no images of 3 x 32 x 32 with labels up to 9: unpack it again")
    images = torch.from_numpy(batch.pixels.copy()).reshape(count, *IMAGE)
    return images, torch.tensor(batch.labels, dtype=torch.int64)


def _read_batches(place: Path) -> DataSet | None:
    """Returns the data set of the pickled batches; None if none of them exists."""
    folder = place / PICKLED
    if not folder.is_dir():
        folder = place
    found = []
    for domain, names in BATCHES.items():
        missing = [name for name in names if not (folder / name).is_file()]
        if len(missing) == len(names):
            continue
        if missing:
            raise DataError(f"{str(folder)!r} lacks {', '.join(missing)}: unpack the archive again")
        found.append(domain)
    if not found:
        return None
    domains = tuple(_join_batches(folder, domain) for domain in found)
    return DataSet(NAME, domains, CLASSES)


def _join_batches(folder: Path, domain: str) -> Domain:
    """Returns a domain with all of its batches."""
    images = []
    labels = []
    for name in BATCHES[domain]:
        batch_images, batch_labels = read_batch(folder / name)
        images.append(batch_images)
        labels.append(batch_labels)
    return Domain(domain, torch.cat(images), torch.cat(labels))


def _read_folders(place: Path) -> DataSet | None:
    """Returns the data set of class folders; None if no folder of a class of CIFAR-10 exists."""
    scans = {}
    for domain in PUBLISHED:
        if any((place / domain / label).is_dir() for label in CLASSES):
            scans[domain] = scan_folder(place, domain)
    if not scans:
        return None
    return _build(place, scans)


def _read_zip(place: Path) -> DataSet | None:
    """Returns the data set of the first zip file with cifar in its name and files in train or test; else None."""
    for path in sorted(place.glob("*.zip")):
        if "cifar" not in path.name.lower():
            continue
        files_by_domain: dict[str, list[ListedFile]] = {domain: [] for domain in PUBLISHED}
        for file in list_zip(path):
            domain = PurePosixPath(file.name).parent.parent.name  # the folder above the class
            if domain in files_by_domain:
                files_by_domain[domain].append(file)
        scans = {domain: collect_images(path, files) for domain, files in files_by_domain.items() if files}
        if scans:
            return _build(path, scans)
    return None


def _build(place: Path, scans: dict[str, Scan]) -> DataSet:
    """Returns the data set; refuses it unless every domain has the ten classes."""
    for domain, scan in scans.items():
        if class_names({domain: scan}) != CLASSES:
            classes = ", ".join(CLASSES)
            raise DataError(f"{str(place)!r} has other classes in {domain} than {classes}: copy it again")
    return build_data_set(NAME, scans)
