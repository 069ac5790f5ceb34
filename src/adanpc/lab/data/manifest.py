"""Data sets listed in a CSV or Parquet file, with the path, the label and perhaps the domain of each image."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, NamedTuple

from adanpc.lab.data.contents import MEBIBYTE, MOST_BYTES, ContentError, blaming, read_contents
from adanpc.lab.data.domain import DataError, DataSet
from adanpc.lab.data.images import file_behind
from adanpc.lab.data.scan import LONGEST_NAME, ListedFile, Scan, build_data_set, collect_images, has_image_name

SUFFIXES = (".csv", ".parquet")
COLUMNS = ("path", "label", "domain")
REQUIRED = ("path", "label")
MOST_ROWS = 4_000_000  # three times ImageNet
MOST_DOMAINS = 10_000
MOST_NAME_BYTES = 2**30  # of all names, each padded to the longest, as they are stored in an array
PARQUET_ROWS = 4096  # rows unpacked at once, since a few bytes of such a file may unpack to very many
MISSING = "missing"


class Row(NamedTuple):
    """One line of a manifest."""

    path: str
    label: str
    domain: str


def manifest(path: Path) -> DataSet | None:
    """Returns the data set that a file lists; None if the path is not that of a CSV or Parquet file.

    Paths are relative to the folder of the file and must stay within it: a list that someone else wrote may choose
    among the images that came with it, but not among all files of this machine. Files that do not exist are included;
    ``refuse_missing`` reports them.
    """
    if path.suffix.lower() not in SUFFIXES or not path.exists():
        return None
    root = Path(os.path.abspath(path.parent))
    with blaming(path, "cannot be used", "correct it, or write it again"):
        rows = sorted(set(_rows(path, root)), key=lambda row: (row.domain, row.label, row.path))
        if not rows:
            raise ContentError("it lists no images")
        _check_width(rows)
        scans = _scans(root, rows)
    return build_data_set("manifest", scans, classes=_ordered({row.label for row in rows}))


def refuse_missing(data: DataSet) -> None:
    """Refuses a data set with files that do not exist, before anything is read."""
    missing = []
    for domain in data.domains:
        for row in range(len(domain)):
            file = file_behind(domain.images, row)
            if file is not None and not os.path.exists(file.files.file(file.row)):
                missing.append(file.files.file(file.row))
    if missing:
        raise DataError(
            f"{len(missing):,} of the listed files cannot be found, such as {missing[0]!r}: copy what is missing, or "
            "leave it out with `skip_unreadable`"
        )


def _scans(root: Path, rows: Iterable[Row]) -> dict[str, Scan]:
    """Returns the images of each domain."""
    files: dict[str, list[ListedFile]] = {}
    for row in rows:
        file = ListedFile(row.label, row.path, _stamp(root / row.path))
        files.setdefault(row.domain, []).append(file)
        if len(files) > MOST_DOMAINS:
            raise ContentError(f"it names more than {MOST_DOMAINS:,} domains")
    return {domain: collect_images(root, listed) for domain, listed in files.items()}


def _stamp(path: Path) -> str:
    """Returns a text that changes when the file does."""
    try:
        status = path.stat()
    except OSError:
        return MISSING
    return f"{status.st_size} {status.st_mtime_ns}"


def _ordered(labels: Iterable[str]) -> tuple[str, ...]:
    """Returns the classes in the order of their labels: by number if all of them are numbers, else by name."""
    names = sorted(labels)
    if all(name.isdecimal() for name in names):
        names.sort(key=int)
    return tuple(names)


def _rows(path: Path, root: Path) -> Iterator[Row]:
    """Yields the rows of a file, checked one by one."""
    contents = read_contents(path)
    records = _parquet(contents) if path.suffix.lower() == ".parquet" else _csv(contents)
    for number, record in enumerate(records, 1):
        if number > MOST_ROWS:
            raise ContentError(f"it has more than {MOST_ROWS:,} rows")
        yield _row(record, number, path, root)


def _row(record: Mapping[str, Any], number: int, path: Path, root: Path) -> Row:
    """Returns one row, or refuses it.

    Args:
        record: the values by column.
        number: the number of the row, for messages.
        path: the manifest; its name is the domain of rows without one.
        root: the folder that paths are relative to.
    """
    values = {}
    for column in COLUMNS:
        value = record.get(column)
        text = "" if value is None else str(value)
        if len(text.encode("utf-8", "surrogatepass")) > LONGEST_NAME:
            raise ContentError(f"row {number} has a {column} of more than {LONGEST_NAME:,} bytes")
        if not text and column in REQUIRED:
            raise ContentError(f"row {number} has no {column}")
        values[column] = text
    return Row(_below(values["path"], number, root), values["label"], values["domain"] or path.stem)


def _below(name: str, number: int, root: Path) -> str:
    """Returns the normalized path of an image below the root, with ``/`` between folders; refuses one outside."""
    if "\0" in name:
        raise ContentError(f"row {number} has a path with a zero byte")
    normal = os.path.normpath(os.path.join(root, name))
    start = os.path.join(root, "")  # ends with a separator, so that /data2 does not count as below /data
    if not normal.startswith(start):
        raise ContentError(
            f"row {number} leads out of {str(root)!r} to {name!r}: the file must be in a folder above its images"
        )
    below = normal.removeprefix(start).replace(os.sep, "/")
    if not has_image_name(below):
        raise ContentError(f"row {number} names {name!r}, which is hidden or has no suffix of an image")
    return below


def _check_width(rows: Iterable[Row]) -> None:
    """Refuses paths that would need too much memory, since each is stored as wide as the longest."""
    lengths = [len(os.fsencode(row.path)) for row in rows]
    if len(lengths) * max(lengths) > MOST_NAME_BYTES:
        raise ContentError(f"its {len(lengths):,} paths of up to {max(lengths):,} bytes are too much to keep")


def _csv(contents: bytes) -> Iterator[dict[str, Any]]:
    """Yields the records of a CSV file."""
    try:
        text = contents.decode("utf-8-sig")  # spreadsheets start the file with a byte order mark
    except UnicodeDecodeError as error:
        raise ContentError("it is not UTF-8") from error
    reader = csv.DictReader(StringIO(text, newline=""))
    try:
        _check_columns(reader.fieldnames or ())
        for record in reader:
            if None in record:
                raise ContentError(f"line {reader.line_num} has more values than there are columns")
            yield record
    except csv.Error as error:
        raise ContentError(f"line {reader.line_num}: {error}") from error


def _parquet(contents: bytes) -> Iterator[dict[str, Any]]:
    """Yields the records of a Parquet file."""
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise ContentError("Parquet is read by pyarrow, which is not installed: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(BytesIO(contents))
        names = file.schema_arrow.names
        _check_columns(names)
        size = 0
        columns = [name for name in COLUMNS if name in names]
        for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
            size += batch.nbytes
            if size > MOST_BYTES:
                raise ContentError(f"it unpacks to more than {MOST_BYTES // MEBIBYTE} MiB")
            yield from batch.to_pylist()
    except (ContentError, MemoryError):
        raise
    except Exception as error:  # a damaged file can make its reader raise anything
        raise ContentError(error) from error


def _check_columns(names: Iterable[str]) -> None:
    """Refuses a file without the required columns."""
    present = list(names)
    for column in REQUIRED:
        if column not in present:
            shown = ", ".join(repr(name) for name in present[:10]) or "none"
            raise ContentError(f"it needs the columns path and label, and may have domain; it has: {shown}")
