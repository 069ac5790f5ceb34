"""The rows of an ``Append``, checked and turned into columns of tensors on the bank's device."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from reprlib import repr as brief
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from adanpc.core.changes import Append
from adanpc.core.contents import BankSettings
from adanpc.core.types import Origin
from adanpc.errors import LabelError
from adanpc.index.grid import Columns, tensor_of, to_main_memory

UNKNOWN = -1  # domain or key
NUMBER = (int, float)  # built once, because every append tests against it three times
ROUNDING = 1e-3  # how far the sum of a row's soft labels may be from one


def columns_of(change: Append, count: int, settings: BankSettings, device: torch.device) -> Columns:
    """Everything that is stored with the features of ``count`` rows; raises a LabelError if any of it is invalid."""
    labels = checked_labels(change.labels, count, settings.classes, device)
    columns = {
        "label": labels,
        "domain": _domain(change.domain, count, device),
        "key": _keys(change.keys, count, device),
        "confidence": _confidence(change.confidence, count, device),
        "origin": _repeated(_origin(change.origin), count, torch.uint8, device),
    }
    if settings.soft:
        columns["soft"] = _probabilities(change.soft, labels, settings.classes)
    elif change.soft is not None:
        raise LabelError("this bank stores hard labels only: create it with soft=True to store soft ones")
    return columns


def with_whole_numbers(change: Append, count: int, settings: BankSettings, device: torch.device) -> Append:
    """The change with its labels, and domains given for each row, as checked tensors (n,) int64."""
    labels, domain = labels_and_domain(change.labels, change.domain, count, settings, device)
    return replace(change, labels=labels, domain=domain)


def labels_and_domain(
    labels: Any, domain: Any, count: int, settings: BankSettings, device: torch.device
) -> tuple[Tensor, Tensor | int]:
    """The labels of ``count`` rows, and domains given for each row, as checked tensors (n,) int64.

    A single domain for all rows stays a single number, so that a log does not repeat it for each row.
    """
    checked = checked_labels(labels, count, settings.classes, device)
    if isinstance(domain, int):
        return checked, domain
    return checked, _whole_numbers("domain", domain, count, device)


def checked_labels(given: Any, count: int, classes: int, device: torch.device) -> Tensor:
    """The labels as a tensor (n,) int64, each from 0 to classes - 1."""
    labels = _whole_numbers("labels", given, count, device)
    if not count:
        return labels
    for extreme in _extremes(labels):
        if not 0 <= extreme < classes:
            raise LabelError(f"labels must be between 0 and {classes - 1}, got {extreme}")
    return labels


def _extremes(labels: Tensor) -> list[int]:
    """The lowest and the highest of labels (n,), of which there is at least one."""
    if labels.shape[0] == 1:
        single: list[int] = labels.tolist()
        return single
    lowest, highest = labels.aminmax()
    return [int(lowest), int(highest)]


def _repeated(value: float, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A column (count,) that holds the same value in every row; it is only ever read."""
    if count == 1:
        return _one_value(value, dtype, device)
    return torch.full((count,), value, dtype=dtype, device=device)


@lru_cache(maxsize=64)  # a stream appends rows one by one, with the same few values in every one
def _one_value(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=dtype, device=device)


def _domain(given: Tensor | int, count: int, device: torch.device) -> Tensor:
    """The domain of each row, (count,) int64."""
    if isinstance(given, int) and given == UNKNOWN:
        return _repeated(UNKNOWN, count, torch.int64, device)
    return _whole_numbers("domain", given, count, device)


def _keys(given: Tensor | None, count: int, device: torch.device) -> Tensor:
    """The user's own number of each row, (count,) int64."""
    if given is None:
        return _repeated(UNKNOWN, count, torch.int64, device)
    return _whole_numbers("keys", given, count, device)


def _whole_numbers(name: str, given: Tensor | int, count: int, device: torch.device) -> Tensor:
    """The values as a tensor (count,) int64, one for each row."""
    value = _column(name, given, (count,), device)
    if value.dtype == torch.int64:
        return value
    if value.is_floating_point() or value.is_complex():
        found = f"{value.dtype} with {value[:3].tolist()}, …"
        raise LabelError(f"{name} must be whole numbers, got {found}: pass {name}.long() if the values are whole")
    return value.to(torch.int64)


def _finite_numbers(name: str, given: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The values as float32 of this shape, all finite."""
    value = _column(name, given, shape, device)
    numbers = value.float()
    finite = numpy.isfinite(to_main_memory(numbers))
    if not value.is_floating_point() or not finite.all():
        raise LabelError(
            f"{name} must be finite floating-point numbers, got {value.dtype} with {value[:3].tolist()}, …"
        )
    return numbers


def _confidence(given: Tensor | None, count: int, device: torch.device) -> Tensor:
    """The confidence in each row, (count,) float32; 1 if none is given."""
    if given is None:
        return _repeated(1.0, count, torch.float32, device)
    return _finite_numbers("confidence", given, (count,), device)


def _probabilities(given: Tensor | None, labels: Tensor, classes: int) -> Tensor:
    """The soft labels (n, C) float32; one-hot if none are given."""
    if given is None:
        return one_hot(labels, classes).float()
    soft = _finite_numbers("soft labels", given, (len(labels), classes), labels.device)
    error = (soft.sum(1) - 1).abs()
    if (soft < 0).any() or (error > ROUNDING).any():
        raise LabelError(f"soft labels must be probabilities that sum to 1, got {soft[:3].tolist()}, …")
    return soft


def _column(name: str, given: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The values as a tensor of this shape; a single number is repeated for all rows."""
    try:
        if isinstance(given, NUMBER):
            return torch.full(shape, given, device=device)
        value = tensor_of(given).to(device).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        remedy = ""
        if name == "labels":
            remedy = ": pass the position of each class in classes, not its name"
        raise LabelError(f"{name} must be numbers, one for each row, got {brief(given)}{remedy}") from None
    if value.ndim == 0:
        value = value.expand(shape)
    if value.shape != shape:
        remedy = ""
        if name == "labels" and value.ndim == 2:
            remedy = ": pass labels.argmax(1) if they are one-hot"
        raise LabelError(f"{name} must have shape {shape}, one for each row, got {tuple(value.shape)}{remedy}")
    return value


def _origin(given: Any) -> int:
    try:
        return int(Origin(given))
    except ValueError:
        names = ", ".join(Origin.__members__)
        raise LabelError(f"{given!r} is not a valid Origin; available: {names}") from None
