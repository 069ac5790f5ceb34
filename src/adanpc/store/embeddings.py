"""Labeled embeddings in files that other programs read and write: CSV, Parquet and NumPy."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import IO, Any

import numpy
import torch
from torch import Tensor

from adanpc import require
from adanpc.core import AdaNPC, Contents, MemoryBank, Origin
from adanpc.core.table import VETOED
from adanpc.errors import AdaNPCError
from adanpc.progress import track
from adanpc.store.file import replace_or_explain

LABEL, DOMAIN, KEY, FEATURE = "label", "domain", "key", "feature"
SUFFIXES = (".csv", ".parquet", ".npy")
LONGEST_LINE = 2**24  # characters in a line of CSV
LONGEST_NUMBER = 18  # digits of a label that is the number of a class; longer ones are names
PURPOSE = "a Parquet file"
AUTO = "auto"
PIECE = 1 << 25  # bytes of an array that are read at once
LARGE = 20_000  # with this many rows, searching costs more than everything else; see benchmarks/results/serve.md


class EmbeddingsError(AdaNPCError):
    """A file of embeddings cannot be used; the message names the file, what is wrong, and the remedy."""

    code = "bad-embeddings"


@dataclass(frozen=True, eq=False)
class StoredArray:
    """The rows of a .npy file, read some at a time, as often as they are gone through."""

    path: Path
    shape: tuple[int, int]
    dtype: Any
    start: int  # where they begin in the file

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def _rows_at_once(self) -> int:
        row_bytes: int = self.shape[1] * self.dtype.itemsize
        return max(1, PIECE // row_bytes)

    @property
    def parts(self) -> int:
        """How many pieces there are."""
        return -(-len(self) // self._rows_at_once)

    def __iter__(self) -> Iterator[Tensor]:
        rows = self._rows_at_once
        with _blaming(self.path), self.path.open("rb") as file:
            file.seek(self.start)
            for first in range(0, len(self), rows):
                wanted = (min(rows, len(self) - first), self.shape[1])
                values = numpy.fromfile(file, self.dtype, wanted[0] * wanted[1])
                if values.size != wanted[0] * wanted[1]:
                    raise EmbeddingsError("it has become shorter while it was read")
                yield torch.from_numpy(values.reshape(wanted).astype(numpy.float32))


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Features with labels, as they are in a file."""

    pieces: Tensor | StoredArray  # the features (n, D)
    labels: list[str]  # converted to strings, whatever their type was
    domains: Tensor | None = None  # (n,) int64
    keys: Tensor | None = None  # (n,) int64

    @property
    def features(self) -> Tensor:
        """All features (n, D) float32 in memory."""
        if isinstance(self.pieces, Tensor):
            return self.pieces
        return torch.cat(list(self.pieces))

    def classes(self) -> int | list[str]:
        """Returns the number of classes if all labels are numbers, or else the sorted names of the classes."""
        if all(label.isdecimal() and len(label) <= LONGEST_NUMBER for label in self.labels):
            return 1 + max(int(label) for label in self.labels)
        return sorted(set(self.labels))

    def labels_in(self, names: Sequence[str], classes: int) -> Tensor:
        """Returns the labels (n,) as class numbers of a bank; a label may be the name or the number of a class."""
        places = {str(number): number for number in range(classes)}
        places |= {name: place for place, name in enumerate(names)}
        for row, label in enumerate(self.labels):
            if label not in places:
                known = brief(list(names) or list(places))
                raise EmbeddingsError(f"the label of row {row} is {brief(label)}, and the classes are {known}")
        return torch.tensor([places[label] for label in self.labels], dtype=torch.int64)


def read_embeddings(path: Path, labels: Path | None = None) -> Embeddings:
    """Returns the embeddings in a file.

    Args:
        path: a CSV or Parquet file with a column ``label``, optional columns ``domain`` and ``key`` (whole numbers),
            and the features: a column ``feature`` of lists (Parquet only), or all other columns in order. Or a .npy
            file with an array (n, D).
        labels: for a .npy file, another .npy file with the labels (n,).
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise EmbeddingsError(f"{path} was not read: give a file that ends with {', '.join(SUFFIXES)}")
    if suffix == ".npy" and labels is None:
        raise EmbeddingsError(f"{path} was not read: an array has no labels; give the file that holds them as `labels`")
    if suffix != ".npy" and labels is not None:
        raise EmbeddingsError(f"{path} was not read: its labels are in a column; leave out `labels`")
    with _blaming(path):
        if suffix == ".csv":
            made = _of_columns(_csv(path))
        elif suffix == ".parquet":
            made = _of_columns(_parquet(path))
        else:
            made = Embeddings(_rows(path), [])
    if labels is not None:
        with _blaming(labels):
            made = Embeddings(made.pieces, _texts(_array(labels).tolist()))
    with _blaming(path):
        _check(made)
    return made


def storage_for(rows: int, wanted: str = AUTO) -> str:
    """Returns the storage for a bank that begins with this many rows; "auto" picks what serves many callers best."""
    if wanted != AUTO:
        return wanted
    if rows >= LARGE:
        return "int8"
    return "float32"


def classifier_of(
    given: Embeddings, *, preset: str, settings: Mapping[str, Any], storage: str = AUTO, **bank_settings: Any
) -> AdaNPC:
    """Returns a classifier with a new bank of these rows.

    Args:
        given: the labeled source rows.
        preset: how the classifier learns.
        settings: the settings of the preset.
        storage: see ``storage_for``.
        **bank_settings: other arguments of the ``MemoryBank``: capacity, evict.
    """
    rows = len(given.pieces)
    bank_settings["storage"] = storage_for(rows, storage)
    bank = MemoryBank(given.pieces.shape[1], given.classes(), soft=preset == "safe", **bank_settings)
    classifier = AdaNPC(bank, preset=preset, **settings)
    pieces: Iterable[Tensor]
    if isinstance(given.pieces, Tensor):
        pieces = [given.pieces]
    else:
        pieces = track(given.pieces, "Going through the rows", given.pieces.parts)
    domains: Any = -1
    if given.domains is not None:
        domains = given.domains
    keys = given.keys
    if keys is None:
        keys = torch.arange(rows)
    classifier.learn_in_pieces(pieces, given.labels_in(bank.names, bank.classes), domain=domains, keys=keys)
    return classifier


def write_parquet(contents: Contents, path: Path) -> None:
    """Writes the rows of a bank as they are stored: unit features, which the preset "safe" has transformed.

    The columns are id, label, class, origin, vetoed, domain, key, confidence and feature. Rows are in the order of ids.
    """
    arrow = require.library("pyarrow", PURPOSE)
    parquet = require.library("pyarrow.parquet", PURPOSE)
    table = contents.table("id", LABEL, "origin", "state", DOMAIN, KEY, "confidence")
    rows = contents.rows(table["id"]).cpu().numpy()
    names = contents.settings.names
    labels = table[LABEL].tolist()
    columns: dict[str, Any] = {
        "id": table["id"].cpu().numpy(),
        LABEL: table[LABEL].cpu().numpy(),
        "class": [names[label] if names else str(label) for label in labels],
        "origin": [Origin(origin).name.lower() for origin in table["origin"].tolist()],
        "vetoed": (table["state"] == VETOED).cpu().numpy(),
        DOMAIN: table[DOMAIN].cpu().numpy(),
        KEY: table[KEY].cpu().numpy(),
        "confidence": table["confidence"].cpu().numpy(),
        FEATURE: arrow.FixedSizeListArray.from_arrays(arrow.array(rows.reshape(-1)), contents.settings.dim),
    }
    replace_or_explain(path, lambda new: parquet.write_table(arrow.table(columns), new))


@contextmanager
def _blaming(path: Path) -> Any:
    """Adds the name of the file to every error inside the block."""
    try:
        yield
    except AdaNPCError as error:
        raise type(error)(f"{path} was not read: {error}") from None
    except OSError as error:
        raise EmbeddingsError(
            f"{path} was not read: {error.strerror or error}; check the path and its rights"
        ) from None
    except (ValueError, csv.Error) as error:
        raise EmbeddingsError(f"{path} was not read: {error}; correct it, or write it again") from None


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lets fields be as long as a line. The limit is global to the process, so it is restored afterward."""
    before = csv.field_size_limit(LONGEST_LINE)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv(path: Path) -> dict[str, Sequence[Any]]:
    with _long_fields(), path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        header = next(lines, [])
        columns: list[list[str]] = [[] for _ in header]
        for line in lines:
            if len(line) != len(header):
                raise EmbeddingsError(f"line {lines.line_num} has {len(line)} values for {len(header)} columns")
            for column, value in zip(columns, line, strict=True):
                column.append(value)
    if len(set(header)) != len(header):
        raise EmbeddingsError("two of its columns have the same name")
    return dict(zip(header, columns, strict=True))


def _parquet(path: Path) -> dict[str, Sequence[Any]]:
    parquet = require.library("pyarrow.parquet", PURPOSE)
    try:
        table = parquet.read_table(path)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged file can make the reader fail in any way
        raise EmbeddingsError(" ".join(str(error).split())[:200]) from None
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, Any]:
    """Returns the shape of the array in a .npy file, whether it is stored column by column, and its type.

    The file must be as long as its header says, so that no more is allocated. Afterward it is at the first number.
    """
    version = numpy.lib.format.read_magic(file)
    read_header = numpy.lib.format.read_array_header_1_0
    if version != (1, 0):
        read_header = numpy.lib.format.read_array_header_2_0
    shape, by_column, dtype = read_header(file)
    if dtype.hasobject:
        raise EmbeddingsError("it holds objects of Python, and these are not read")
    size = int(numpy.prod(shape, dtype=object)) * dtype.itemsize
    there = os.fstat(file.fileno()).st_size - file.tell()
    if size != there:
        raise EmbeddingsError(f"its header announces {size} bytes, and there are {there}")
    return shape, by_column, dtype


def _array(path: Path) -> Any:
    """Returns the array in a .npy file."""
    with path.open("rb") as file:
        _header(file)
        file.seek(0)
        return numpy.lib.format.read_array(file, allow_pickle=False)


def _rows(path: Path) -> Tensor | StoredArray:
    """Returns the features in a .npy file, which stay there unless its layout or type is unusual."""
    with path.open("rb") as file:
        shape, by_column, dtype = _header(file)
        if len(shape) == 2 and shape[1] and not by_column and dtype.kind in "fiu":
            return StoredArray(path, (shape[0], shape[1]), dtype, file.tell())
    return _features(_array(path))


def _of_columns(columns: Mapping[str, Sequence[Any]]) -> Embeddings:
    if LABEL not in columns:
        raise EmbeddingsError(f"it needs a column {LABEL!r}; it has {brief(list(columns))}")
    if not columns[LABEL]:
        raise EmbeddingsError("it has no rows")
    if FEATURE in columns:
        features = columns[FEATURE]
    else:
        values = {name: column for name, column in columns.items() if name not in (LABEL, DOMAIN, KEY)}
        if not values:
            raise EmbeddingsError("it has no columns of features")
        features = list(zip(*(_numbers(name, column) for name, column in values.items()), strict=True))
    return Embeddings(
        _features(features),
        _texts(columns[LABEL]),
        _whole_numbers(DOMAIN, columns.get(DOMAIN)),
        _whole_numbers(KEY, columns.get(KEY)),
    )


def _features(values: Any) -> Tensor:
    try:
        array = numpy.asarray(values, dtype=numpy.float32)
    except (TypeError, ValueError):
        raise EmbeddingsError("its features must be numbers, and as many in each row") from None
    if array.ndim != 2:
        raise EmbeddingsError(f"its features must have shape (n, D), got {array.shape}")
    return torch.from_numpy(array.copy())


def _numbers(name: str, column: Sequence[Any]) -> list[float]:
    try:
        return [float(value) for value in column]
    except (TypeError, ValueError):
        raise EmbeddingsError(
            f"its column {name!r} must hold numbers, as all but {LABEL}, {DOMAIN} and {KEY}"
        ) from None


def _whole_numbers(name: str, column: Sequence[Any] | None) -> Tensor | None:
    if column is None:
        return None
    try:
        return torch.tensor([int(value) for value in column], dtype=torch.int64)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise EmbeddingsError(f"its column {name!r} must hold whole numbers") from None


def _texts(values: Sequence[Any]) -> list[str]:
    return [str(value) for value in values]


def _check(made: Embeddings) -> None:
    if len(made.labels) != len(made.pieces):
        raise EmbeddingsError(f"there are {len(made.labels)} labels for {len(made.pieces)} rows")
    for label in made.labels:
        if label in ("", "None", "nan"):
            raise EmbeddingsError("a row has no label")
