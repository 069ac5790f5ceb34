"""The files that rows were made of, as far as they are known. A bank keeps keys; file names live beside it."""

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
    """Finds the file of a row: of a source row by its key, of a row that joined by its id.

    Args:
        of_source: the file of a source row with this key, if it is known.
    """

    def __init__(self, of_source: FileOfKey | None = None) -> None:
        self._of_source = of_source
        self._joined: dict[int, Any] = {}  # by id

    def __call__(self, witness: Witness) -> Any | None:
        """The file of a row that voted."""
        if witness.origin != SOURCE:
            return self._joined.get(witness.row)
        if self._of_source is None or witness.key is None:
            return None
        return self._of_source(witness.key)

    def note(self, joined: Tensor, files: Sequence[Any]) -> None:
        """Notes the files of a batch of which some joined, each under the id in ``joined`` (B,), or -1."""
        for row, file in zip(joined.tolist(), files, strict=True):
            if row >= 0:
                self._joined[row] = file

    def __len__(self) -> int:
        """How many files of rows that joined are noted."""
        return len(self._joined)

    def keep(self, held: Collection[int]) -> None:
        """Forgets the files of rows that have left."""
        self._joined = {row: file for row, file in self._joined.items() if row in held}


def checked_files(files: Any, count: int) -> list[Any] | None:
    """One file for each of so many inputs, if there are any."""
    if files is None:
        return None
    names = [files] if isinstance(files, str) else list(files)
    if len(names) != count:
        raise LabelError(f"files must name one file for each of the {count} inputs, got {len(names)}")
    return names


@dataclass(frozen=True)
class SampleFiles:
    """The file of each sample of a data set, by row number. A value, so that a wrapped model can be pickled."""

    samples: Sequence[tuple[str, Any]]

    def __call__(self, key: int) -> Any | None:
        """The file of the sample in this row; None if there is no such row."""
        if not 0 <= key < len(self.samples):
            return None
        return self.samples[key][0]


@dataclass(frozen=True)
class SubsetFiles:
    """The files of a part of a data set, by row number in the part."""

    whole: FileOfKey
    rows: Sequence[int]

    def __call__(self, key: int) -> Any | None:
        """The file of the sample in this row; None if there is no such row."""
        if not 0 <= key < len(self.rows):
            return None
        return self.whole(self.rows[key])


def files_of(dataset: Any) -> FileOfKey | None:
    """The files of a data set by row number, if it tells, as torchvision's ``ImageFolder`` and subsets of it do."""
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
    """Whether it is a path with a label."""
    return isinstance(value, Sequence) and len(value) == 2 and isinstance(value[0], str)
