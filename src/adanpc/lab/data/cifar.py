"""CIFAR-10: the published batches, or image files."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adanpc.lab.data.domain import DataError, DataSet, Domain
from adanpc.lab.data.scan import Scan, assemble, class_names, collect, compared, members, notice, places, scan

NAME = "cifar-10"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDERS = ("CIFAR-10", "cifar-10", "cifar10", "CIFAR10")
PICKLED = "cifar-10-batches-py"
BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
PUBLISHED = {"train": 50_000, "test": 10_000}
ALLOWED = {  # all that a pickled array needs, under its old and its new name
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
}


def cifar10(root: Path) -> DataSet | None:
    """CIFAR-10 with the domains train and test; None if it is not at the root or in its usual folder below.

    Read are the pickled batches, else the folders ``train/<class>/<image>`` and ``test/<class>/<image>``, else a zip
    file of these with cifar in its name.
    """
    for place in places(root, FOLDERS):
        data = _pickled(place) or _folders(place) or _zipped(place)
        if data is not None:
            differences = [compared(f"{name} images", len(data[name]), count) for name, count in PUBLISHED.items()]
            return replace(data, notice=notice(data.notice, *differences))
    return None


class Unpickler(pickle.Unpickler):
    """Reads arrays, texts, numbers, lists and dicts; a file that asks for anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """The allowed class or function of this name."""
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, as no batch of CIFAR-10 does")
        return ALLOWED[module, name]


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """The images (n, 3, 32, 32) uint8 and labels (n,) of one pickled batch; nothing in it is executed."""
    try:
        with path.open("rb") as file:
            batch = Unpickler(file, encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), torch.tensor(batch[b"labels"], dtype=torch.int64)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle raises whatever it happens to say
        raise DataError(f"{str(path)!r} is no batch of CIFAR-10 ({error}): unpack it again") from error
    if pixels.dtype != np.uint8 or pixels.shape != (*labels.shape, 3 * 32 * 32) or not _are_labels(labels):
        raise DataError(f"{str(path)!r} holds no images of 3 x 32 x 32 with labels up to 9: unpack it again")
    return torch.from_numpy(pixels.copy()).reshape(-1, 3, 32, 32), labels


def _are_labels(labels: Tensor) -> bool:
    return labels.ndim == 1 and bool(((labels >= 0) & (labels < len(CLASSES))).all())


def _pickled(place: Path) -> DataSet | None:
    folder = place / PICKLED if (place / PICKLED).is_dir() else place
    names = [name for batches in BATCHES.values() for name in batches]
    missing = [name for name in names if not (folder / name).is_file()]
    if len(missing) == len(names):
        return None
    if missing:
        raise DataError(f"{str(folder)!r} lacks {', '.join(missing)}: unpack the archive again")
    return DataSet(NAME, tuple(_batches(folder, name) for name in BATCHES), CLASSES)


def _batches(folder: Path, name: str) -> Domain:
    parts = [read_batch(folder / batch) for batch in BATCHES[name]]
    images, labels = (torch.cat(values) for values in zip(*parts, strict=True))
    return Domain(name, images, labels)


def _folders(place: Path) -> DataSet | None:
    if not any((place / name / label).is_dir() for name in PUBLISHED for label in CLASSES):
        return None
    return _checked(place, {name: scan(place, name) for name in PUBLISHED})


def _zipped(place: Path) -> DataSet | None:
    for path in sorted(place.glob("*.zip")):
        if "cifar" in path.name.lower() and (files := members(path)):
            parts = {name: [file for file in files if _split(file.name) == name] for name in PUBLISHED}
            if any(parts.values()):
                return _checked(path, {name: collect(path, part) for name, part in parts.items()})
    return None


def _split(name: str) -> str:
    """The folder above the class."""
    return PurePosixPath(name).parent.parent.name


def _checked(place: Path, scans: dict[str, Scan]) -> DataSet:
    for name, found in scans.items():
        if class_names({name: found}) != CLASSES:
            raise DataError(f"{str(place)!r} has other classes in {name} than {', '.join(CLASSES)}: copy it again")
    return assemble(NAME, scans)
