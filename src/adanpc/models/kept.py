"""KeptFeatures: what a model makes of the batches of a loader, in memory if it is little and in files if it is much."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any, NamedTuple, Self

import numpy
import torch
from torch import Tensor

from adanpc.errors import AdaNPCError
from adanpc.files import make_folder, replace
from adanpc.index.grid import Array

IN_MEMORY = 1 << 28  # bytes of features for which no file is written, unless a folder is given
SEAL = 32  # bytes of the hash at the end of a file
HEADER = 16  # bytes at its beginning: the numbers of rows and of coordinates
NUMBER = 4  # bytes of a coordinate


class _Spilled(NamedTuple):
    """Where the features of a batch are in the file without a name."""

    start: int  # in bytes
    rows: int
    dim: int


class KeptFeatures:
    """The features of batches in the order in which they were added, to be gone through any number of times.

    Without a folder, they are kept in memory, and from ``IN_MEMORY`` on in a temporary file without a name, of which
    nothing is left when the process ends, in whatever way.

    Args:
        folder: if given, the features of each batch are kept there as soon as they are made, and found there if they
            were made before. It is left as it is; nothing in it is ever executed.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._spilled: IO[bytes] | None = None  # the file without a name
        self._batches: list[Tensor | Path | _Spilled] = []
        self._in_memory = 0  # bytes

    @property
    def in_folder(self) -> bool:
        """Whether features are kept in a folder that was given, where the next run finds them by name."""
        return self._folder is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Removes what is not in the folder that was given."""
        if self._spilled is not None:
            self._spilled.close()

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
            with _one_sentence(self._folder, "make room there, or give another workspace"):
                replace(path, partial(_write, found, path.name))
        self._batches.append(path)
        return found

    def _put_away(self, features: Tensor) -> Tensor | _Spilled:
        """The features themselves, or where they are in the file because there are too many."""
        self._in_memory += features.nbytes
        if self._in_memory <= IN_MEMORY:
            return features
        with _one_sentence(Path(gettempdir()), "set TMPDIR to a folder on a larger disk, or give a workspace"):
            if self._spilled is None:
                self._spilled = TemporaryFile(prefix="adanpc-")  # noqa: SIM115 - closed by __exit__
            start = self._spilled.seek(0, os.SEEK_END)
            self._spilled.write(_bytes_of(features))
            self._spilled.flush()
        rows, dim = features.shape
        return _Spilled(start, rows, dim)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._batches:
            if isinstance(batch, Tensor):
                yield batch
            elif isinstance(batch, _Spilled):
                yield self._read_spilled(batch)
            else:
                found = _read(batch)
                if found is None:
                    raise AdaNPCError(f"{batch} was damaged or removed while the bank was built: build it again")
                yield found

    def _read_spilled(self, place: _Spilled) -> Tensor:
        """The features of a batch in the file without a name."""
        assert self._spilled is not None  # something has been written to it
        self._spilled.seek(place.start)
        data = self._spilled.read(place.rows * place.dim * NUMBER)
        features = _tensor_of(data, place.rows, place.dim)
        if features is None:
            raise AdaNPCError("features were damaged while the bank was built: build it again")
        return features


def workspace_folder(given: Any) -> Path:
    """The folder of a workspace, which is created if there is none; raises an error if that is impossible."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise AdaNPCError(f"workspace must be the path of a folder, got {given!r}")
    folder = Path(given)
    try:
        make_folder(folder)
    except OSError as error:
        raise AdaNPCError(
            f"the workspace {folder} cannot be created: {error.strerror or error}; give another one"
        ) from error
    if not folder.is_dir():
        raise AdaNPCError(f"the workspace {folder} is not a folder: give another path")
    return folder


@contextmanager
def _one_sentence(folder: Path, remedy: str) -> Iterator[None]:
    """Turns the errors of a disk into one sentence."""
    try:
        yield
    except OSError as error:
        raise AdaNPCError(f"features cannot be kept in {folder}: {error.strerror or error}; {remedy}") from error


def _bytes_of(features: Tensor) -> bytes:
    """The coordinates of features, row by row."""
    array: Array = features.numpy()
    return array.astype("<f4").tobytes()


def _tensor_of(data: bytes, rows: int, dim: int) -> Tensor | None:
    """The features (rows, dim) with these coordinates; None if there are more or fewer."""
    if rows < 0 or dim < 0 or len(data) != rows * dim * NUMBER:
        return None
    array = numpy.frombuffer(data, "<f4").astype(numpy.float32)
    return torch.from_numpy(array.reshape(rows, dim))


def _write(features: Tensor, name: str, path: Path) -> None:
    """Writes a file with features (B, D) and a seal for the name that it will have."""
    header = numpy.array(features.shape, "<i8").tobytes()
    data = header + _bytes_of(features)
    path.write_bytes(data + _seal(name, data))


def _read(path: Path) -> Tensor | None:
    """The features in a file; None if there is no such file, or if it is damaged or was written under another name."""
    if path.is_symlink() or not path.is_file():  # opening a named pipe would wait for a writer
        return None
    contents = path.read_bytes()
    data = contents[:-SEAL]
    if len(data) < HEADER or _seal(path.name, data) != contents[-SEAL:]:
        return None
    rows, dim = numpy.frombuffer(data[:HEADER], "<i8").tolist()
    return _tensor_of(data[HEADER:], rows, dim)


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
        dense = value.detach().to_dense().cpu().resolve_conj().resolve_neg().contiguous()
        hasher.update(f"tensor {value.dtype} {value.layout} {tuple(value.shape)} ".encode())
        hasher.update(dense.reshape(-1).view(torch.uint8).numpy())
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
        hasher.update(_pickled(value))


def _pickled(value: Any) -> bytes:
    """The value as bytes, which are hashed and never read back; raises an error if it has no such form."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # whatever the value's own methods raise
        kind = type(value).__name__
        raise AdaNPCError(
            f"a workspace cannot tell inputs of type {kind} apart, because they cannot be pickled: leave it out"
        ) from error
