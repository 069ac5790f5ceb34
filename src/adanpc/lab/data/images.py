"""Images in files, decoded when they are needed: the only place where Pillow reads them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adanpc.lab.data.contents import ContentError, check_regular, check_size, read_at_most, read_contents
from adanpc.lab.data.domain import DataError, DataSet, Domain, Images, Joined, View
from adanpc.lab.data.loading import cores
from adanpc.printable import spelled_out
from adanpc.progress import track

try:
    from PIL import Image, UnidentifiedImageError
except ImportError:
    Image = None  # type: ignore[assignment]

CHUNK = 32  # images that a thread decodes at a time; it matters for speed only
# Pillow goes by the content of a file, not by its name, and for some formats it starts other programs: it passes
# PostScript to Ghostscript. These formats it decodes itself. GIF is among them, since data sets have some named .jpg.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
# A few bytes can claim billions of pixels. This is Pillow's own limit, a quarter of a gibibyte of RGB, but Pillow only
# warns.
MOST_PIXELS = 89_478_485
UNREADABLE = "skipped as unreadable"


class ImageFiles:
    """Images (3, H, W) uint8 in the files of a folder or of a zip file, each decoded when it is needed.

    Images in gray, with a palette or with transparency become RGB. As in the published pipelines, a rotation in the
    EXIF data is not applied. Forked or spawned worker processes may share an instance: each opens the zip file itself.

    Args:
        root: the folder or the zip file.
        names: the names of the files below it, with ``/`` between folders.
    """

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        if Image is None:
            raise DataError("images are decoded by pillow, which is not installed: pip install 'adanpc[vision]'")
        self.root = root
        self.zipped = root.is_file()
        # One block of bytes: a forked worker would copy a list of strings page by page, by counting references to them.
        self.names = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)

    def __len__(self) -> int:
        return len(self.names)

    def file(self, index: int) -> str:
        """Returns the path of an image; inside a zip file, it starts with the path of the zip file."""
        return f"{self.root}/{os.fsdecode(self.names[index])}"

    def __getitem__(self, index: int) -> Tensor:
        file = self.file(index)
        try:
            pixels = _decode(self._read(index))
        except MemoryError:
            raise
        except Exception as error:  # every decoder raises errors of its own
            reason = spelled_out(str(error))
            raise DataError(
                f"{file!r} cannot be read ({reason}): copy it again, or use `skip_unreadable` to skip such files"
            ) from error
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def _read(self, index: int) -> bytes:
        """Returns the bytes of an image file.

        Decoders get a copy of them and never the file: some map it into memory, and a mapped file that is truncated
        while it is decoded kills the process.
        """
        if not self.zipped:
            return read_contents(self.file(index))
        check_regular(self.root)
        archive = _open_zip(self.root, self.root.stat().st_mtime_ns, os.getpid())
        member = archive.getinfo(os.fsdecode(self.names[index]))
        check_size(member.file_size, "unpacks to")
        with archive.open(member) as file:
            return read_at_most(file, member.file_size)  # at most, since the stated size may be wrong


@lru_cache(maxsize=4)
def _open_zip(path: Path, changed: int, process: int) -> ZipFile:
    """Returns an open zip file for this process alone: forked processes would move each other's position in it.

    The time of the last change and the number of the process are only keys of the cache.
    """
    return ZipFile(path)


def _decode(content: bytes) -> NDArray[np.uint8]:
    """Returns the pixels (H, W, 3) of an image file."""
    try:
        opened = Image.open(BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ContentError(f"it is none of {', '.join(FORMATS)}") from error
    with opened as image:
        # Pillow knows the size from the first bytes, and allocates memory for the pixels when they are converted.
        if image.width * image.height > MOST_PIXELS:
            raise ContentError(f"it claims {image.width} x {image.height} pixels, more than {MOST_PIXELS:,}")
        # Without the detour over RGBA, Pillow warns about transparent palettes; the colors are the same.
        opaque = image.convert("RGBA") if image.mode == "P" else image
        return np.array(opaque.convert("RGB"))


class FileRow(NamedTuple):
    """One image file: a row of a collection."""

    files: ImageFiles
    row: int


def unreadable(data: DataSet | Domain) -> tuple[str, ...]:
    """Returns the files that cannot be decoded, found by decoding every file on all cores; see ``without``."""
    domains = data.domains if isinstance(data, DataSet) else (data,)
    unique_files: dict[FileRow, None] = {}  # a dict keeps their order
    for domain in domains:
        for row in range(len(domain)):
            file = file_behind(domain.images, row)
            if file is not None:
                unique_files[file] = None
    files = list(unique_files)
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    pool = ThreadPoolExecutor(cores())  # threads are enough: Pillow releases the interpreter's lock while it decodes
    try:
        checked = chain.from_iterable(pool.map(_check_files, chunks))
        return tuple(path for path in track(checked, "reading every image", len(files)) if path)
    finally:
        pool.shutdown(cancel_futures=True)


def _check_files(chunk: list[FileRow]) -> list[str]:
    """Returns, for each image, the path of its file if it cannot be decoded, else an empty text."""
    paths = []
    for files, row in chunk:
        try:
            files[row]
        except DataError:
            paths.append(files.file(row))
        else:
            paths.append("")
    return paths


def without(data: DataSet, files: Collection[str], why: str = "dropped by request") -> DataSet:
    """Returns the data set without these files; the notice counts the images left out.

    Args:
        data: the data set.
        files: paths as ``unreadable`` returns them.
        why: how the notice continues after the number of images.
    """
    unwanted = set(files)
    present: set[str] = set()  # those of the unwanted files that the data set has
    domains = []
    dropped = 0
    for domain in data.domains:
        paths = _paths(domain)
        present.update(unwanted.intersection(paths))
        kept = [row for row, path in enumerate(paths) if path not in unwanted]
        dropped += len(paths) - len(kept)
        if len(kept) < len(paths):
            domain = domain.subset(kept)
        domains.append(domain)
    unknown = sorted(unwanted - present)
    if unknown:
        raise DataError(f"{data.name} has no file {unknown[0]!r}: give the paths as adanpc.lab.data.unreadable does")
    clauses = [data.notice] if data.notice else []
    if dropped:
        images = "1 image was" if dropped == 1 else f"{dropped:,} images were"
        clauses.append(f"{images} {why}")
    return replace(data, domains=tuple(domains), notice="; ".join(clauses))


def _paths(domain: Domain) -> list[str]:
    """Returns the path of each image's file; an empty text for an image that is not in a file."""
    paths = []
    for row in range(len(domain)):
        file = file_behind(domain.images, row)
        if file is None:
            paths.append("")
        else:
            paths.append(file.files.file(file.row))
    return paths


def file_behind(images: Tensor | Images, row: int) -> FileRow | None:
    """Returns the file that an image is read or generated from; None if there is none."""
    if isinstance(images, ImageFiles):
        return FileRow(images, row)
    if isinstance(images, View):
        return file_behind(images.images, int(images.rows[row]))
    if isinstance(images, Joined):
        part, part_row = images.locate(row)
        return file_behind(images.parts[part], part_row)
    if hasattr(images, "images"):  # images generated from others, row by row, keep the originals under this name
        return file_behind(images.images, row)
    return None
