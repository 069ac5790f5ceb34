"""Labeled batches of a loader, in the forms that loaders give them, and the row numbers of their samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from adanpc.errors import AdaNPCError, LabelError
from adanpc.index.grid import tensor_of
from adanpc.models.inputs import PIL_REMEDY, InputError
from adanpc.progress import track

LABEL_NAMES = ("labels", "label")  # of batches that are dictionaries
UNKNOWN = -1  # the key or the domain of a sample for which there is none


class LoaderError(AdaNPCError):
    """A loader that gives no labeled batches."""

    code = "bad-loader"


@dataclass(frozen=True, eq=False)
class LabeledBatch:
    """Inputs of a model with what is known of each of them."""

    inputs: Any
    labels: Tensor  # (B,)
    domains: Tensor  # (B,)
    keys: Tensor  # (B,)


def labeled_batches(loader: Iterable[Any]) -> Iterator[LabeledBatch]:
    """The batches of a loader; progress is shown.

    Keys are the row numbers of the loader's data set, however it shuffles. Without row numbers (an iterable data set,
    a collate function that drops samples) they are -1. Of batches that do not come from a ``DataLoader``, they count
    the samples.
    """
    recorded: _RecordedSampler | None = None
    if isinstance(loader, DataLoader):
        recorded = _recorded(loader)
        if recorded is not None:
            loader = _with_sampler(loader, recorded)
    if isinstance(loader, Dataset) and not isinstance(loader, Iterable):
        kind = type(loader).__name__
        raise LoaderError(
            f"the loader must give batches (inputs, labels), got a data set ({kind}): "
            "pass DataLoader(dataset, batch_size=64)"
        )
    if not isinstance(loader, Iterable):
        raise LoaderError(f"the loader must be a DataLoader or a list of batches (inputs, labels), got {loader!r}")
    arrived = 0
    for batch in _tensors_only(track(loader, "Building the bank")):
        inputs, labels, domains = _parts(batch)
        count = len(labels)
        if recorded is not None:
            keys = recorded.next_keys(count)
        elif isinstance(loader, DataLoader):
            keys = torch.full((count,), UNKNOWN)
        else:
            keys = torch.arange(arrived, arrived + count)
        arrived += count
        yield LabeledBatch(inputs, labels, domains, keys)


class _RecordedSampler:
    """A batch sampler that remembers which rows of the data set it drew.

    A loader draws in the process that iterates it, and gives the batches in the order in which they were drawn.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._drawn: deque[list[Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        for rows in self._sampler:
            self._drawn.append(list(rows))
            yield rows

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # as the loader would ask the sampler itself

    def next_keys(self, count: int) -> Tensor:
        """The rows (count,) of the next batch."""
        rows = self._drawn.popleft() if self._drawn else []
        if len(rows) != count or not all(isinstance(row, int) for row in rows):
            return torch.full((count,), UNKNOWN)
        return torch.tensor(rows)


def _recorded(loader: DataLoader[Any]) -> _RecordedSampler | None:
    """A recording sampler for a loader, unless its batches cannot be told by row numbers."""
    in_order = getattr(loader, "in_order", True)
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None or not in_order:
        return None
    return _RecordedSampler(loader.batch_sampler)


def _with_sampler(loader: DataLoader[Any], sampler: _RecordedSampler) -> DataLoader[Any]:
    """A copy of the loader, of whatever class it is, that draws by another batch sampler."""
    made = copy(loader)
    vars(made)["batch_sampler"] = sampler  # a loader refuses the assignment, to protect iterations under way
    vars(made)["_iterator"] = None  # of persistent workers; the copy starts its own
    return made


def _tensors_only(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, with a plain error where the default collate function meets PIL images."""
    try:
        yield from batches
    except TypeError as error:
        if "PIL." in str(error):
            raise InputError(PIL_REMEDY) from error
        raise


def _parts(batch: Any) -> tuple[Any, Tensor, Tensor]:
    """The inputs, labels and domains of a batch."""
    if isinstance(batch, Mapping):
        return _named_parts(batch)
    if not isinstance(batch, Sequence) or len(batch) < 2:
        raise LoaderError(
            f"the loader must give batches (inputs, labels), got a {type(batch).__name__}: "
            "for a single batch pass [(inputs, labels)]"
        )
    labels = _labels(batch[1])
    if len(batch) == 2:
        return batch[0], labels, torch.full_like(labels, UNKNOWN)
    return batch[0], labels, _whole_numbers("domains", batch[2])


def _named_parts(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The same for a batch by names: what is not the label is an input."""
    for name in LABEL_NAMES:
        if name in batch:
            inputs = {other: value for other, value in batch.items() if other != name}
            labels = _labels(batch[name])
            return inputs, labels, torch.full_like(labels, UNKNOWN)
    names = ", ".join(map(str, batch))
    raise LoaderError(f"the loader's batches need an entry {LABEL_NAMES[0]!r} with class numbers, got: {names}")


def _labels(values: Any) -> Tensor:
    """Class numbers (B,), or an error that says how to get them."""
    labels = _whole_numbers("labels", values)
    if labels.ndim == 1:
        return labels
    wanted = "the loader's labels must be class numbers, one for each input"
    if labels.ndim == 0:
        raise LabelError(f"{wanted}, got a single one: give batches, such as those of a DataLoader with a batch_size")
    remedy = "pass labels.argmax(1) if they are one-hot"
    if labels.shape[1] == 1:
        remedy = "pass labels.flatten()"
    raise LabelError(f"{wanted}, got shape {tuple(labels.shape)}: {remedy}")


def _whole_numbers(name: str, values: Any) -> Tensor:
    """A copy of a loader's whole numbers: loaders may use their arrays again."""
    try:
        return tensor_of(values).clone()
    except (TypeError, ValueError, RuntimeError):
        raise LabelError(f"the loader's {name} must be whole numbers from 0, got {brief(values)}") from None
