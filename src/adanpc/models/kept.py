"""KeptFeatures: what a model makes of the batches of a loader, in memory if it is little and in files if it is much."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy
import torch
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.files import make_folder, replace
from adanpc.index.grid import Array

IN_MEMORY = 1 << 28  # bytes of features for which no file is written, unless a folder is given
SEAL = 32  # bytes of the hash at the end of a file
HEADER = 16  # bytes at its beginning: the numbers of rows and of coordinates


class KeptFeatures:
    """The features of batches in the order in which they were added, to be gone through any number of times.

    Args:
        folder: if given, the features of each batch are kept there as soon as they are made, and found there if they
            were made before. It is left as it is; nothing in it is ever executed.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._temporary: TemporaryDirectory[str] | None = None  # for what is too much for memory
        self._batches: list[Tensor | Path] = []
        self._in_memory = 0  # bytes
        if folder is not None:
            make_folder(folder)

    @property
    def in_folder(self) -> bool:
        """Whether features are kept in a folder that was given, where the next run finds them by name."""
        return self._folder is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Removes what is not in the folder that was given."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def add(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Adds a batch, and returns its features (B, D) float32.

        Args:
            name: a digest of the batch and of what makes its features.
            make: what makes them, called unless they are in the folder.
        """
        if self._folder is None:
            features = make()
            self._batches.append(self._put_away(features))
            return features
        path = self._folder / f"{name}.features"
        found = _read(path)
        if found is None:
            found = make()
            replace(path, partial(_write, found, path.name))
        self._batches.append(path)
        return found

    def _put_away(self, features: Tensor) -> Tensor | Path:
        """The features themselves, or the file in which they are because there are too many."""
        self._in_memory += features.nbytes
        if self._in_memory <= IN_MEMORY:
            return features
        if self._temporary is None:
            self._temporary = TemporaryDirectory(prefix="adanpc-")
        path = Path(self._temporary.name) / str(len(self._batches))
        _write(features, path.name, path)
        return path

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._batches:
            if isinstance(batch, Tensor):
                yield batch
                continue
            found = _read(batch)
            if found is None:
                raise AdaNPCError(f"{batch} was damaged or removed while the bank was built: build it again")
            yield found


def _write(features: Tensor, name: str, path: Path) -> None:
    """Writes a file with features (B, D) and a seal for the name that it will have."""
    array: Array = features.numpy()
    header = numpy.array(array.shape, "<i8").tobytes()
    data = header + array.astype("<f4").tobytes()
    path.write_bytes(data + _seal(name, data))


def _read(path: Path) -> Tensor | None:
    """The features in a file; None if there is no such file, or if it is damaged or was written under another name."""
    if path.is_symlink() or not path.is_file():  # opening a named pipe would wait for a writer
        return None
    contents = path.read_bytes()
    data = contents[:-SEAL]
    if len(data) < HEADER or _seal(path.name, data) != contents[-SEAL:]:
        return None
    shape = numpy.frombuffer(data[:HEADER], "<i8").tolist()
    return torch.from_numpy(numpy.frombuffer(data, "<f4", offset=HEADER).astype(numpy.float32).reshape(shape))


def _seal(name: str, data: bytes) -> bytes:
    """A hash of what a file holds and of its name, so that features of another batch are noticed, too."""
    hasher = hashlib.blake2b(name.encode(), digest_size=SEAL)
    hasher.update(data)
    return hasher.digest()


def digest_of_batch(origin: Mapping[str, str], inputs: Any) -> str:
    """A hash of the inputs of a model, and of what its features are made with."""
    hasher = hashlib.blake2b(digest_size=SEAL)
    _add(hasher, origin)
    _add(hasher, inputs)
    return hasher.hexdigest()


def _add(hasher: Any, value: Any) -> None:
    """Adds a value to a hash, tensors and arrays by their contents."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        hasher.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        hasher.update(value.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        hasher.update(f"array {value.dtype} {value.shape} ".encode())
        hasher.update(numpy.ascontiguousarray(value))
    elif isinstance(value, Mapping):
        hasher.update(f"mapping {len(value)} ".encode())
        for name, part in value.items():
            _add(hasher, name)
            _add(hasher, part)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        hasher.update(f"sequence {len(value)} ".encode())
        for part in value:
            _add(hasher, part)
    else:
        hasher.update(pickle.dumps(value))
