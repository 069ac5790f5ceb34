"""Labeled batches from a loader, in whatever form it gives them, with the row numbers of their samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from reprlib import repr as brief
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from adanpc.errors import AdaNPCError, LabelError
from adanpc.index.grid import tensor_of
from adanpc.models.inputs import LABEL_NAMES, PIL_REMEDY, InputError
from adanpc.progress import track

ENOUGH = 100  # so many samples without two of the same domain were not drawn from domains
UNKNOWN = -1  # the key or domain of a sample that has none


class LoaderError(AdaNPCError):
    """Raised for a loader that does not give labeled batches."""

    code = "bad-loader"


class LabeledBatch(NamedTuple):
    """Inputs of a model, with the label, domain and key of each of them."""

    inputs: Any
    labels: Tensor  # (B,)
    domains: Tensor  # (B,)
    keys: Tensor  # (B,)


def labeled_batches(loader: Iterable[Any]) -> Iterator[LabeledBatch]:
    """The batches of a loader, with a progress bar.

    Keys are row numbers in the loader's data set, even if it shuffles. Where there are no row numbers (an iterable
    data set, or a collate function that drops samples), keys are -1. If the loader is not a ``DataLoader``, keys number
    its samples from 0.
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
    first_domains: list[int] = []
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
        if len(first_domains) < ENOUGH:
            first_domains += domains.tolist()
            _check_first_domains(first_domains)
        yield LabeledBatch(inputs, labels, domains, keys)


class _RecordedSampler:
    """A batch sampler that remembers which rows of the data set it drew.

    This tells the rows of each batch, because a loader draws in the process that iterates over it, and gives batches in
    the order in which they were drawn.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._drawn: deque[list[Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        for rows in self._sampler:
            self._drawn.append(list(rows))
            yield rows

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # raises whatever the sampler itself would raise

    def next_keys(self, count: int) -> Tensor:
        """The rows (count,) of the next batch, -1 if they cannot be told."""
        rows: list[Any] = []
        if self._drawn:
            rows = self._drawn.popleft()
        if len(rows) != count or not all(isinstance(row, int) for row in rows):
            return torch.full((count,), UNKNOWN)
        return torch.tensor(rows)


def _recorded(loader: DataLoader[Any]) -> _RecordedSampler | None:
    """A recording sampler for a loader; None if the rows of its batches cannot be told."""
    in_order = getattr(loader, "in_order", True)
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None or not in_order:
        return None
    return _RecordedSampler(loader.batch_sampler)


def _with_sampler(loader: DataLoader[Any], sampler: _RecordedSampler) -> DataLoader[Any]:
    """A copy of the loader, of the same class, with another batch sampler."""
    changed = copy(loader)
    attributes = vars(changed)  # a loader refuses assignments after it was made, to protect iterations under way
    attributes["batch_sampler"] = sampler
    attributes["_iterator"] = None  # persistent workers belong to the original; the copy starts its own
    return changed


def _tensors_only(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; raises an InputError with a remedy if the default collate function meets PIL images."""
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
    wanted = "the loader must give batches (inputs, labels), got a"
    if isinstance(batch, list | tuple) and len(batch) == 1:
        raise LoaderError(
            f"{wanted} {type(batch).__name__} of 1: its data set must give (input, label) for each sample"
        )
    if not isinstance(batch, Sequence) or len(batch) < 2:
        raise LoaderError(f"{wanted} {type(batch).__name__}: for a single batch pass [(inputs, labels)]")
    if len(batch) == 2:
        labels = _labels(batch[1])
        return batch[0], labels, torch.full_like(labels, UNKNOWN)
    labels = _labels(batch[1], "if it is a second input of the model, give ((one, two), labels)")
    return batch[0], labels, _domains(batch[2], labels)


def _named_parts(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The same for a batch that is a mapping: every entry but the labels is an input."""
    for name in LABEL_NAMES:
        if name in batch:
            inputs = {other: value for other, value in batch.items() if other != name}
            labels = _labels(batch[name])
            return inputs, labels, torch.full_like(labels, UNKNOWN)
    names = ", ".join(map(str, batch))
    raise LoaderError(f"the loader's batches need an entry {LABEL_NAMES[0]!r} with class numbers, got: {names}")


def _labels(values: Any, remedy: str = "pass labels.argmax(1) if they are one-hot") -> Tensor:
    """The labels as class numbers (B,); raises a LabelError that says how to get them.

    Args:
        values: the labels.
        remedy: what to do if there are several numbers for each input.
    """
    labels = _tensor("labels", values)
    wanted = "the loader's labels must be class numbers, one for each input"
    if labels.ndim == 0:
        raise LabelError(f"{wanted}, got a single one: give batches, such as those of a DataLoader with a batch_size")
    if labels.ndim > 1:
        if labels.shape[1] == 1:
            remedy = "pass labels.flatten()"
        raise LabelError(f"{wanted}, got shape {tuple(labels.shape)}: {remedy}")
    _check_whole("labels", labels)
    return labels


def _domains(values: Any, labels: Tensor) -> Tensor:
    """The domain of each sample with one of these labels (B,); a single number holds for all of them."""
    domains = _tensor("domains", values)
    _check_whole("domains", domains)
    if domains.ndim == 0:
        return domains.expand(labels.shape)
    if domains.shape != labels.shape:
        raise LabelError(f"the loader gave {len(labels)} inputs with {len(domains)} domains: give one for each")
    return domains


def _check_first_domains(domains: list[int]) -> None:
    """Raises a LoaderError if the domains of the first samples all differ: each sample would be centered to nothing."""
    if len(domains) >= ENOUGH and len(set(domains)) == len(domains):
        raise LoaderError(
            f"no two of the first {len(domains)} samples have the same domain: the third item of the loader's batches "
            "is the domain of each sample; if it is something else, such as a row number, leave it out"
        )


def _tensor(name: str, values: Any) -> Tensor:
    """The values as a new tensor: a loader may reuse its own for the next batch."""
    try:
        return tensor_of(values).clone()
    except (TypeError, ValueError, RuntimeError):
        raise LabelError(f"the loader's {name} must be whole numbers from 0, got {brief(values)}") from None


def _check_whole(name: str, numbers: Tensor) -> None:
    """Raises a LabelError for numbers that are not of a whole type."""
    if numbers.is_floating_point() or numbers.is_complex():
        raise LabelError(
            f"the loader's {name} must be whole numbers, got {numbers.dtype}: "
            f"pass {name}.long() if the values are whole"
        )
