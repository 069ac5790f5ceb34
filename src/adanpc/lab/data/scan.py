"""Folders and zip files of images, listed: nothing is decoded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

import torch

from adanpc.lab.data.domain import DataError, DataSet, Domain
from adanpc.lab.data.images import ImageFiles

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class File(NamedTuple):
    """A file of a class: its name below the root, and a text that changes when the file does."""

    label: str
    name: str
    stamp: str


@dataclass(frozen=True)
class Scan:
    """The images of one domain.

    Args:
        images: class by class.
        counts: how many there are of each class, in the same order.
        source: a hash of names below the root, sizes and times. It is the same for a copy that keeps the times.
        passed: how many files were passed over since they are hidden or no images.
        dropped: how many images were left out since they were not wanted.
    """

    images: ImageFiles
    counts: Mapping[str, int]
    source: str
    passed: int
    dropped: int


def places(root: Path, folders: Iterable[str]) -> list[Path]:
    """The root and those of the folders that exist below it: where a data set may lie."""
    return [place for place in (root, *(root / folder for folder in folders)) if place.is_dir()]


def scan(root: Path, folder: str, unwanted: Collection[str] = ()) -> Scan:
    """The images of ``root/folder/<class>/<image>``, without the unwanted ones."""
    return collect(root, _walk(root, folder), unwanted)


def collect(root: Path, files: Iterable[File], unwanted: Collection[str] = ()) -> Scan:
    """The images among the files, which come class by class."""
    names, counts, passed, dropped, digest = list[str](), Counter[str](), 0, 0, sha256()
    for label, name, stamp in files:
        if not is_image(name):
            passed += 1
        elif name in unwanted:
            dropped += 1
        else:
            names.append(name)
            counts[label] += 1
            digest.update(os.fsencode(f"{name}\0{stamp}\0"))
    return Scan(ImageFiles(root, names), counts, digest.hexdigest()[:16], passed, dropped)


def assemble(name: str, scans: Mapping[str, Scan], *notes: str) -> DataSet:
    """A data set of scanned domains; its classes are those of all domains, sorted, so that labels agree."""
    classes = class_names(scans)
    domains = tuple(_domain(title, found, classes) for title, found in scans.items())
    passed = sum(found.passed for found in scans.values())
    over = f"{passed:,} files were passed over since they are hidden or no images" if passed else ""
    return DataSet(name, domains, classes, notice(over, *notes))


def class_names(scans: Mapping[str, Scan]) -> tuple[str, ...]:
    """The classes of all domains, sorted."""
    return tuple(sorted({label for found in scans.values() for label in found.counts}))


def notice(*clauses: str) -> str:
    """One sentence of those clauses that say something."""
    return "; ".join(filter(None, clauses))


def compared(what: str, here: int, published: int) -> str:
    """A clause that says by how much this copy differs from the published data; nothing if it does not."""
    return "" if here == published else f"{here:,} {what} where {published:,} are published"


def is_image(name: str) -> bool:
    """Whether the name is that of an image: not hidden, and with a known suffix."""
    file = name.rpartition("/")[2]
    return not file.startswith(".") and os.path.splitext(file)[1].lower() in SUFFIXES


def members(path: Path) -> list[File]:
    """The files of a zip file that lie as ``<class>/<file>``, in any folder; the stamp is their checksum."""
    try:
        with ZipFile(path) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir() and info.filename.count("/")]
    except BadZipFile as error:
        raise DataError(f"{str(path)!r} cannot be read ({error}): copy it again") from error
    named = [(PurePosixPath(info.filename).parts[-2], info) for info in infos]
    return sorted(File(label, info.filename, f"{info.file_size} {info.CRC}") for label, info in named)


def _domain(name: str, found: Scan, classes: tuple[str, ...]) -> Domain:
    number = {label: position for position, label in enumerate(classes)}
    numbers = torch.tensor([number[label] for label in found.counts], dtype=torch.int64)
    labels = numbers.repeat_interleave(torch.tensor(list(found.counts.values()), dtype=torch.int64))
    return Domain(name, found.images, labels, source=found.source)


def _walk(root: Path, folder: str) -> Iterator[File]:
    """The files of ``root/folder/<class>``, sorted; whatever is not laid out so is refused."""
    top = root / folder
    if not top.is_dir():
        raise DataError(f"the folder {str(top)!r} is missing: images are expected in {folder}/<class>/<image>")
    classes = 0
    for entry in _entries(top):
        if entry.is_dir() and not entry.name.startswith("."):
            classes += 1
            yield from _class(folder, entry)
        elif is_image(entry.name):
            raise DataError(f"{entry.path!r} lies in no class: images are expected in {folder}/<class>/<image>")
        else:
            yield File("", f"{folder}/{entry.name}", "")
    if not classes:
        raise DataError(f"{str(top)!r} has no classes: images are expected in {folder}/<class>/<image>")


def _class(folder: str, group: os.DirEntry[str]) -> Iterator[File]:
    images = 0
    for entry in _entries(group.path):
        if entry.is_dir() and not entry.name.startswith("."):
            raise DataError(f"{entry.path!r} is a folder: images are expected in {folder}/<class>/<image>")
        images += is_image(entry.name)
        yield File(group.name, f"{folder}/{group.name}/{entry.name}", _stamp(entry))
    if not images:
        raise DataError(f"the class {group.path!r} has no images: fill it, or remove the folder")


def _entries(path: Path | str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _stamp(entry: os.DirEntry[str]) -> str:
    try:
        status = entry.stat()
    except OSError as error:  # a link that leads nowhere
        raise DataError(f"{entry.path!r} cannot be read ({error.strerror}): copy it again, or remove it") from error
    return f"{status.st_size} {status.st_mtime_ns}"
