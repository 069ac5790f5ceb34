"""The files that rows were made from, where they are known. A bank stores only keys; file names are kept here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from adanpc.core import Origin
from adanpc.errors import LabelError
from adanpc.explanation import Witness

SOURCE = Origin.SOURCE.name.lower()
FileOfKey = Callable[[int], Any | None]


class FileNames:
    """Finds the file of a row: that of a source row by its key, that of a row that joined by its id.

    Args:
        of_source: a function from the key of a source row to its file, or to None if it is unknown.
    """

    def __init__(self, of_source: FileOfKey | None = None) -> None:
        self._of_source = of_source
        self._joined: dict[int, Any] = {}  # the files of rows that joined, by id

    def __call__(self, witness: Witness) -> Any | None:
        """The file of a row that voted; None if it is unknown."""
        if witness.origin != SOURCE:
            return self._joined.get(witness.row)
        if self._of_source is None or witness.key is None:
            return None
        return self._of_source(witness.key)

    def note(self, joined: Tensor, files: Sequence[Any]) -> None:
        """Records the files of a batch under the ids with which queries joined: ``joined`` (B,), -1 if one did not."""
        for row, file in zip(joined.tolist(), files, strict=True):
            if row >= 0:
                self._joined[row] = file

    def __len__(self) -> int:
        """How many files of rows that joined are recorded."""
        return len(self._joined)

    def keep(self, held: Collection[int]) -> None:
        """Forgets the files of all rows that joined but are not among those still held."""
        self._joined = {row: file for row, file in self._joined.items() if row in held}


def checked_files(files: Any, count: int) -> list[Any] | None:
    """The files as a list with one for each of ``count`` inputs; None if none are given."""
    if files is None:
        return None
    if isinstance(files, str):
        files = [files]
    names = list(files)
    if len(names) != count:
        raise LabelError(f"files must name one file for each of the {count} inputs, got {len(names)}")
    return names


@dataclass(frozen=True)
class SampleFiles:
    """The file of each sample of a data set, by row number. A class, because a closure could not be pickled."""

    samples: Sequence[tuple[str, Any]]

    def __call__(self, key: int) -> Any | None:
        """The file of the sample in this row; None if there is no such row."""
        if not 0 <= key < len(self.samples):
            return None
        return self.samples[key][0]


@dataclass(frozen=True)
class SubsetFiles:
    """The files of a subset of a data set, by row number in the subset."""

    whole: FileOfKey
    rows: Sequence[int]

    def __call__(self, key: int) -> Any | None:
        """The file of the sample in this row; None if there is no such row."""
        if not 0 <= key < len(self.rows):
            return None
        return self.whole(self.rows[key])


def files_of(dataset: Any) -> FileOfKey | None:
    """The files of a data set by row number; None if it does not list them as torchvision's ``ImageFolder`` does."""
    if isinstance(dataset, Subset):
        whole = files_of(dataset.dataset)
        if whole is None:
            return None
        return SubsetFiles(whole, dataset.indices)
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, Sequence) or not samples or not _is_sample(samples[0]):
        return None
    return SampleFiles(samples)


def _is_sample(value: Any) -> bool:
    """Whether the value is a path with a label."""
    return isinstance(value, Sequence) and len(value) == 2 and isinstance(value[0], str)
