"""Images in files, decoded when they are asked for: the one door to PIL."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from itertools import chain
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor

from adanpc.lab.data.domain import DataError, DataSet, Domain, Images, Joined, View
from adanpc.lab.data.loading import cores
from adanpc.progress import track

try:
    from PIL import Image
except ImportError:
    Image = None  # type: ignore[assignment]

AT_ONCE = 32  # images that a thread decodes before it asks for more; a matter of speed only


class ImageFiles:
    """Images (3, H, W) uint8 in the files of a folder or of a zip file, each decoded when it is asked for.

    Gray, palettes and transparency become RGB. A turn noted in the EXIF data is not made, as in the published
    pipelines. Worker processes may share it, forked or spawned: each opens the zip file for itself.

    Args:
        root: the folder or the zip file.
        names: of the files below it, with ``/`` between folders.
    """

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        if Image is None:
            raise DataError("images are decoded by pillow, which is not installed: pip install 'adanpc[vision]'")
        self.root, self.zipped = root, root.is_file()
        # One block of bytes: a forked worker would copy a list of texts page by page, as it counts references.
        self.names = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)

    def __len__(self) -> int:
        return len(self.names)

    def file(self, index: int) -> str:
        """The path of an image; in a zip file, that of the zip file goes before."""
        return f"{self.root}/{os.fsdecode(self.names[index])}"

    def __getitem__(self, index: int) -> Tensor:
        file = self.file(index)
        try:
            pixels = _decode(self._member(index) if self.zipped else file)
        except MemoryError:
            raise
        except Exception as error:  # every decoder has errors of its own
            raise DataError(
                f"{file!r} cannot be read ({error}): copy it again, or drop it by adanpc.lab.data.without; "
                "adanpc.lab.data.unreadable lists all such files"
            ) from error
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def _member(self, index: int) -> BytesIO:
        archive = _archive(self.root, self.root.stat().st_mtime_ns, os.getpid())
        return BytesIO(archive.read(os.fsdecode(self.names[index])))


@lru_cache(maxsize=4)
def _archive(path: Path, changed: int, process: int) -> ZipFile:
    """An open zip file for this process alone: forked processes would move each other's position in it."""
    return ZipFile(path)


def _decode(file: str | BytesIO) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Pixels (H, W, 3)."""
    with Image.open(file) as image:
        # Without the step over RGBA pillow warns of transparent palettes; the colors are the same.
        opaque = image.convert("RGBA") if image.mode == "P" else image
        return np.array(opaque.convert("RGB"))


def unreadable(data: DataSet | Domain) -> tuple[str, ...]:
    """The files that cannot be decoded, found by decoding every one on all cores; see ``without``."""
    domains = data.domains if isinstance(data, DataSet) else (data,)
    found = (_file(domain.images, row) for domain in domains for row in range(len(domain)))
    files = list(dict.fromkeys(file for file in found if file is not None))
    parts = [files[start : start + AT_ONCE] for start in range(0, len(files), AT_ONCE)]
    pool = ThreadPoolExecutor(cores())  # threads do: pillow decodes without holding the interpreter
    try:
        checked = track(chain.from_iterable(pool.map(_bad, parts)), "reading every image", len(files))
        return tuple(file for file in checked if file)
    finally:
        pool.shutdown(cancel_futures=True)


def _bad(part: list[tuple[ImageFiles, int]]) -> list[str]:
    """For each image its file if that cannot be decoded, otherwise nothing."""
    return ["" if _readable(files, row) else files.file(row) for files, row in part]


def _readable(files: ImageFiles, row: int) -> bool:
    try:
        files[row]
    except DataError:
        return False
    return True


def without(data: DataSet, files: Collection[str]) -> DataSet:
    """The data set without these files, as ``unreadable`` names them; the notice says how many images went."""
    unwanted, met = set(files), set[str]()
    domains = tuple(_spared(domain, unwanted, met) for domain in data.domains)
    if unknown := sorted(unwanted - met):
        raise DataError(f"{data.name} has no file {unknown[0]!r}: give the paths as adanpc.lab.data.unreadable does")
    dropped = sum(map(len, data.domains)) - sum(map(len, domains))
    clauses = [data.notice, f"{dropped:,} images were dropped by request"] if dropped else [data.notice]
    return replace(data, domains=domains, notice="; ".join(filter(None, clauses)))


def _spared(domain: Domain, unwanted: set[str], met: set[str]) -> Domain:
    """The domain without the unwanted files; adds those that it had to ``met``."""
    found = [_file(domain.images, row) for row in range(len(domain))]
    names = ["" if file is None else file[0].file(file[1]) for file in found]
    met |= unwanted & set(names)
    kept = [row for row, name in enumerate(names) if name not in unwanted]
    return domain if len(kept) == len(names) else domain.subset(kept)


def _file(images: Tensor | Images, row: int) -> tuple[ImageFiles, int] | None:
    """The file behind an image, as its place among others; None if the image is in no file."""
    if isinstance(images, ImageFiles):
        return images, row
    if isinstance(images, View):
        return _file(images.images, int(images.rows[row]))
    if isinstance(images, Joined):
        part = bisect_right(images.ends, row)
        return _file(images.parts[part], row - (images.ends[part - 1] if part else 0))
    # What is made of other images row by row keeps them as its ``images``.
    return _file(images.images, row) if hasattr(images, "images") else None
