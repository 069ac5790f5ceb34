"""Lists the images in folders and zip files, without decoding any."""

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
from adanpc.printable import spelled_out

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
MAC_METADATA = "__MACOSX"  # macOS adds a folder of this name to zip files, with metadata of every file
# Names are stored in an array that is as wide as the longest one, so a single name of 64 KiB would cost gigabytes.
LONGEST_NAME = 1_024


class ListedFile(NamedTuple):
    """A file of a class.

    Args:
        label: the class, which is the name of the folder that contains the file.
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
        images: the images, class by class.
        counts: the number of images of each class, in the same order.
        fingerprint: a hash of names below the root, sizes and times. It is the same for a copy that keeps the times.
        skipped: the number of files skipped because they are hidden or are not images.
        left_out: the number of images left out because they are unwanted.
    """

    images: ImageFiles
    counts: Mapping[str, int]
    fingerprint: str
    skipped: int
    left_out: int


def candidate_folders(root: Path, names: Iterable[str]) -> list[Path]:
    """Returns where a data set may be: the root, and those of the named folders that exist below it."""
    folders = [root]
    for name in names:
        folders.append(root / name)
    return [folder for folder in folders if folder.is_dir()]


def scan_folder(root: Path, folder: str, unwanted: Collection[str] = ()) -> Scan:
    """Returns the images of ``root/folder/<class>/<image>`` without unwanted ones; ``folder`` may be an empty text."""
    return collect_images(root, _list_domain(root, folder), unwanted)


def collect_images(root: Path, files: Iterable[ListedFile], unwanted: Collection[str] = ()) -> Scan:
    """Returns the images among files that are listed class by class."""
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
            fingerprint.update(os.fsencode(f"{file.name}\0{file.stamp}\0"))  # no name contains a zero byte
    return Scan(ImageFiles(root, names), counts, fingerprint.hexdigest()[:16], skipped, left_out)


def build_data_set(
    name: str, scans: Mapping[str, Scan], *clauses: str, classes: tuple[str, ...] | None = None
) -> DataSet:
    """Returns a data set of scanned domains; its classes are those of all domains, so that labels agree.

    Args:
        name: the name of the data set.
        scans: the images of each domain, by its name.
        clauses: clauses to add to the notice.
        classes: the classes in the order of their labels; by default sorted.
    """
    if classes is None:
        classes = class_names(scans)
    domains = tuple(_build_domain(domain, scan, classes) for domain, scan in scans.items())
    skipped = sum(scan.skipped for scan in scans.values())
    skipped_clause = ""
    if skipped:
        skipped_clause = f"files that are hidden or are not images were skipped: {skipped:,}"
    return DataSet(name, domains, classes, join_clauses(skipped_clause, *clauses))


def class_names(scans: Mapping[str, Scan]) -> tuple[str, ...]:
    """Returns the classes of all domains, sorted."""
    names: set[str] = set()
    for scan in scans.values():
        names.update(scan.counts)
    return tuple(sorted(names))


def join_clauses(*clauses: str) -> str:
    """Returns one sentence made of the clauses that are not empty."""
    return "; ".join(clause for clause in clauses if clause)


def size_difference(what: str, here: int, published: int) -> str:
    """Returns a clause about how this copy differs in size from the published data; empty if it does not."""
    if here == published:
        return ""
    return f"{here:,} {what} where {published:,} are published"


def is_hidden(name: str) -> bool:
    """Returns whether a file or folder of this name does not belong to the data: hidden by a dot, or added by macOS."""
    if name == ".":  # zip files may name their members ./train/…
        return False
    return name.startswith(".") or name == MAC_METADATA


def has_image_name(name: str) -> bool:
    """Returns whether a path is that of an image: it has a known suffix, and no part of it is hidden."""
    parts = name.split("/")  # a PurePath would take seconds for the million images of ImageNet
    suffix = os.path.splitext(parts[-1])[1].lower()
    return suffix in SUFFIXES and not any(is_hidden(part) for part in parts)


def list_zip(path: Path) -> list[ListedFile]:
    """Returns the sorted files ``<class>/<file>`` in any folder of a zip file; the stamp is their size and checksum."""
    files = []
    with blaming(path, "cannot be read", "copy it again"):
        for member in _list_members(path):
            parts = PurePosixPath(member.filename).parts
            if len(parts) > 1 and not member.is_dir():  # in this order, since is_dir() fails for an empty name
                _check_member(member)
                files.append(ListedFile(parts[-2], member.filename, f"{member.file_size} {member.CRC}"))
    return sorted(files)


def list_folder(path: Path | str) -> list[os.DirEntry[str]]:
    """Returns everything in a folder, sorted by name."""
    with _blaming_system(path), os.scandir(path) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Returns whether this is a folder that may contain data, or a link to one."""
    with _blaming_system(entry.path):
        return entry.is_dir() and not is_hidden(entry.name)


def are_classes(folders: Iterable[os.DirEntry[str]]) -> bool:
    """Returns whether these are the folders of classes, not of domains: some have images, and none has folders."""
    some_images = False
    for folder in folders:
        for entry in list_folder(folder.path):
            if is_folder(entry):
                return False
            some_images = some_images or has_image_name(entry.name)
    return some_images


def _list_members(path: Path) -> list[ZipInfo]:
    """Returns the members of a zip file."""
    check_regular(path)
    try:
        with ZipFile(path) as archive:
            return archive.infolist()
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can make its reader raise anything
        raise ContentError(error) from error


def _check_member(member: ZipInfo) -> None:
    """Refuses a member that could cost too much memory."""
    # Other methods of compression may allocate gigabytes before the first byte is unpacked.
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise ContentError(f"it is packed by method {member.compress_type} instead of deflate")
    if len(os.fsencode(member.filename)) > LONGEST_NAME:
        raise ContentError(f"it has a file name of more than {LONGEST_NAME:,} bytes")


def _build_domain(name: str, scan: Scan, classes: tuple[str, ...]) -> Domain:
    """Returns a domain with the scanned images."""
    # Images are listed class by class, so their labels follow from the counts.
    numbers = {label: number for number, label in enumerate(classes)}
    labels = [torch.zeros(0, dtype=torch.int64)]
    for label, count in scan.counts.items():
        labels.append(torch.full((count,), numbers[label]))
    return Domain(name, scan.images, torch.cat(labels), version=scan.fingerprint)


def _list_domain(root: Path, folder: str) -> Iterator[ListedFile]:
    """Yields the files of ``root/folder/<class>``, sorted; refuses any other layout."""
    top = root / folder
    prefix = f"{folder}/" if folder else ""
    layout = f"images are expected in {spelled_out(prefix)}<class>/<image>"
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
            yield ListedFile("", f"{prefix}{entry.name}", "")  # counted among the files that are skipped
    if not has_classes:
        raise DataError(f"{str(top)!r} has no classes: {layout}")


def _list_class(prefix: str, class_folder: os.DirEntry[str], layout: str) -> Iterator[ListedFile]:
    """Yields the files of one class, sorted.

    Args:
        prefix: the path of the domain's folder below the root, with a final ``/`` unless it is empty.
        class_folder: the folder of the class.
        layout: a clause about the expected layout, for messages.
    """
    has_images = False
    for entry in list_folder(class_folder.path):
        if is_folder(entry):
            raise DataError(f"{entry.path!r} is a folder: {layout}")
        with _blaming_system(entry.path):
            status = entry.stat()
        if has_image_name(entry.name):
            has_images = True
            if not S_ISREG(status.st_mode):  # reading a pipe or a device may take forever
                raise DataError(f"{entry.path!r} is not a regular file: copy it again, or remove it")
        stamp = f"{status.st_size} {status.st_mtime_ns}"
        yield ListedFile(class_folder.name, f"{prefix}{class_folder.name}/{entry.name}", stamp)
    if not has_images:
        raise DataError(f"the class {class_folder.path!r} has no images: fill it, or remove the folder")


@contextmanager
def _blaming_system(path: Path | str) -> Iterator[None]:
    """Turns an OSError, as for a broken link or a folder without permission, into a ``DataError`` with its path."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read ({error.strerror}): copy it again, or remove it") from error
