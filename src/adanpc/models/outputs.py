"""What models give back: tensors, tuples, dictionaries, or output objects with ``logits``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from adanpc.models.inputs import parts_of


def possible_logits(output: Any) -> list[Tensor]:
    """The tensors of an output that may be its logits, the likeliest first."""
    if isinstance(output, Tensor):
        return [output]
    tensors = []
    if isinstance(output, Mapping):
        tensors.append(output.get("logits"))
    else:
        tensors.append(getattr(output, "logits", None))
    tensors.extend(parts_of(output))
    return [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.ndim == 2]


def joined(outputs: Sequence[Any], size: int, count: int) -> Any:
    """The output for ``count`` samples, from outputs of batches of ``size``; what is not one row for each is None."""
    first = outputs[0]
    if isinstance(first, Tensor):
        if not first.ndim or len(first) != size:
            return None
        return torch.cat(list(outputs))[:count]
    parts = []
    for same_parts in zip(*(parts_of(output) for output in outputs), strict=True):
        parts.append(joined(same_parts, size, count))
    return _rebuilt(first, parts)


def _rebuilt(output: Any, parts: list[Any]) -> Any:
    """An output of the same form that holds these parts."""
    if isinstance(output, Mapping):
        made: Any = copy(output)
        for name, part in zip(output, parts, strict=True):
            made[name] = part
        return made
    if isinstance(output, tuple) and hasattr(output, "_fields"):  # a named tuple
        return type(output)(*parts)
    if isinstance(output, tuple | list):
        return type(output)(parts)
    if hasattr(output, "__dataclass_fields__"):
        made = copy(output)
        for name, part in zip(output.__dataclass_fields__, parts, strict=True):
            object.__setattr__(made, name, part)  # it may be frozen
        return made
    return None
