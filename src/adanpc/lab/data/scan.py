"""Folders and zip files of images, listed: nothing is decoded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import torch

from adanpc.lab.data.contents import ContentError, blaming, check_regular
from adanpc.lab.data.domain import DataError, DataSet, Domain
from adanpc.lab.data.images import ImageFiles
from adanpc.lab.data.printable import printable

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
MAC_METADATA = "__MACOSX"  # macOS adds a folder of this name to zip files, with a shadow of every file
# Names are kept in an array as wide as the longest one, so a single name of 64 KiB would cost gigabytes.
LONGEST_NAME = 1_024


class ListedFile(NamedTuple):
    """A file of a class.

    Args:
        label: the class: the name of the folder that holds the file.
        name: the path below the root.
        stamp: a text that changes when the file does.
    """

    label: str
    name: str
    stamp: str


@dataclass(frozen=True)
class Scan:
    """The images of one domain.

    Args:
        images: class by class.
        counts: how many there are of each class, in the same order.
        fingerprint: a hash of names below the root, sizes and times. It is the same for a copy that keeps the times.
        skipped: how many files were skipped because they are hidden or are not images.
        left_out: how many images were left out because they were not wanted.
    """

    images: ImageFiles
    counts: Mapping[str, int]
    fingerprint: str
    skipped: int
    left_out: int


def candidate_folders(root: Path, names: Iterable[str]) -> list[Path]:
    """Where a data set may be: the root, and those of the named folders that exist below it."""
    folders = [root]
    for name in names:
        folders.append(root / name)
    return [folder for folder in folders if folder.is_dir()]


def scan_folder(root: Path, folder: str, unwanted: Collection[str] = ()) -> Scan:
    """The images of ``root/folder/<class>/<image>``, without the unwanted ones; the folder may be an empty text."""
    return collect_images(root, _list_domain(root, folder), unwanted)


def collect_images(root: Path, files: Iterable[ListedFile], unwanted: Collection[str] = ()) -> Scan:
    """The images among the files, which come class by class."""
    names: list[str] = []
    counts: Counter[str] = Counter()
    skipped = 0
    left_out = 0
    fingerprint = sha256()
    for file in files:
        if not has_image_name(file.name):
            skipped += 1
        elif file.name in unwanted:
            left_out += 1
        else:
            names.append(file.name)
            counts[file.label] += 1
            fingerprint.update(os.fsencode(f"{file.name}\0{file.stamp}\0"))
    return Scan(ImageFiles(root, names), counts, fingerprint.hexdigest()[:16], skipped, left_out)


def build_data_set(
    name: str, scans: Mapping[str, Scan], *clauses: str, classes: tuple[str, ...] | None = None
) -> DataSet:
    """A data set of scanned domains; its classes are those of all domains, so that labels agree.

    Args:
        name: of the data set.
        scans: by the names of the domains.
        clauses: what to add to the notice.
        classes: in the order of their labels; by default sorted.
    """
    if classes is None:
        classes = class_names(scans)
    domains = tuple(_build_domain(domain, found, classes) for domain, found in scans.items())
    skipped = sum(found.skipped for found in scans.values())
    skipped_clause = ""
    if skipped:
        skipped_clause = f"{skipped:,} files were skipped because they are hidden or are not images"
    return DataSet(name, domains, classes, join_clauses(skipped_clause, *clauses))


def class_names(scans: Mapping[str, Scan]) -> tuple[str, ...]:
    """The classes of all domains, sorted."""
    names: set[str] = set()
    for found in scans.values():
        names.update(found.counts)
    return tuple(sorted(names))


def join_clauses(*clauses: str) -> str:
    """One sentence made of those clauses that are not empty."""
    return "; ".join(clause for clause in clauses if clause)


def size_difference(what: str, here: int, published: int) -> str:
    """A clause that says how this copy differs in size from the published data; empty if it does not."""
    if here == published:
        return ""
    return f"{here:,} {what} where {published:,} are published"


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is none of the data: hidden by a dot, or added by macOS."""
    if name == ".":  # zip files may name their members ./train/…
        return False
    return name.startswith(".") or name == MAC_METADATA


def has_image_name(name: str) -> bool:
    """Whether a path below the root names an image: with a known suffix, and neither hidden nor in a hidden folder."""
    parts = name.split("/")  # a PurePath would take seconds for the million images of ImageNet
    suffix = os.path.splitext(parts[-1])[1].lower()
    return suffix in SUFFIXES and not any(is_hidden(part) for part in parts)


def list_zip(path: Path) -> list[ListedFile]:
    """The files of a zip file that are ``<class>/<file>`` in any folder, sorted; the stamp is their checksum."""
    files = []
    with blaming(path, "cannot be read", "copy it again"):
        for member in _list_members(path):
            parts = PurePosixPath(member.filename).parts
            if len(parts) > 1 and not member.is_dir():  # in this order: a name may be empty, and is_dir() fails then
                _check_member(member)
                files.append(ListedFile(parts[-2], member.filename, f"{member.file_size} {member.CRC}"))
    return sorted(files)


def list_folder(path: Path | str) -> list[os.DirEntry[str]]:
    """Everything in a folder, sorted by name."""
    with _blaming_system(path), os.scandir(path) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether this is a folder that may hold data, or a link to one."""
    with _blaming_system(entry.path):
        return entry.is_dir() and not is_hidden(entry.name)


def are_classes(folders: Iterable[os.DirEntry[str]]) -> bool:
    """Whether these are the folders of classes, not of domains: some have images, and none has folders."""
    some_images = False
    for folder in folders:
        for entry in list_folder(folder.path):
            if is_folder(entry):
                return False
            some_images = some_images or has_image_name(entry.name)
    return some_images


def _list_members(path: Path) -> list[ZipInfo]:
    check_regular(path)
    try:
        with ZipFile(path) as archive:
            return archive.infolist()
    except MemoryError:
        raise
    except Exception as error:  # a damaged file raises whatever it makes the reader run into
        raise ContentError(error) from error


def _check_member(member: ZipInfo) -> None:
    # The other methods may claim gigabytes of working memory before the first byte is unpacked.
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise ContentError(f"it is packed by method {member.compress_type} instead of deflate")
    if len(os.fsencode(member.filename)) > LONGEST_NAME:
        raise ContentError(f"it has a file name of more than {LONGEST_NAME:,} bytes")


def _build_domain(name: str, found: Scan, classes: tuple[str, ...]) -> Domain:
    # Images are listed class by class, so counts are enough to tell their labels.
    numbers = {label: number for number, label in enumerate(classes)}
    labels = [torch.zeros(0, dtype=torch.int64)]
    for label, count in found.counts.items():
        labels.append(torch.full((count,), numbers[label]))
    return Domain(name, found.images, torch.cat(labels), version=found.fingerprint)


def _list_domain(root: Path, folder: str) -> Iterator[ListedFile]:
    """The files of ``root/folder/<class>``, sorted; any other layout is refused."""
    top = root / folder
    prefix = f"{folder}/" if folder else ""
    layout = f"images are expected in {printable(prefix)}<class>/<image>"
    if not top.is_dir():
        raise DataError(f"the folder {str(top)!r} is missing: {layout}")
    has_classes = False
    for entry in list_folder(top):
        if is_folder(entry):
            has_classes = True
            yield from _list_class(prefix, entry, layout)
        elif has_image_name(entry.name):
            raise DataError(f"{entry.path!r} is not in the folder of a class: {layout}")
        else:
            yield ListedFile("", f"{prefix}{entry.name}", "")
    if not has_classes:
        raise DataError(f"{str(top)!r} has no classes: {layout}")


def _list_class(prefix: str, class_folder: os.DirEntry[str], layout: str) -> Iterator[ListedFile]:
    has_images = False
    for entry in list_folder(class_folder.path):
        if is_folder(entry):
            raise DataError(f"{entry.path!r} is a folder: {layout}")
        with _blaming_system(entry.path):
            status = entry.stat()
        if has_image_name(entry.name):
            has_images = True
            if not S_ISREG(status.st_mode):  # a pipe or a device: to read it may take forever
                raise DataError(f"{entry.path!r} is not a regular file: copy it again, or remove it")
        stamp = f"{status.st_size} {status.st_mtime_ns}"
        yield ListedFile(class_folder.name, f"{prefix}{class_folder.name}/{entry.name}", stamp)
    if not has_images:
        raise DataError(f"the class {class_folder.path!r} has no images: fill it, or remove the folder")


@contextmanager
def _blaming_system(path: Path | str) -> Iterator[None]:
    """Names what the system does not show: a link that leads nowhere or to itself, a folder without permission."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read ({error.strerror}): copy it again, or remove it") from error
