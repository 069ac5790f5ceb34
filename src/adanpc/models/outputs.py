"""The outputs of models: tensors, tuples, dictionaries, or output objects with ``logits``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from adanpc.models.inputs import parts_of


def possible_logits(output: Any) -> list[Tensor]:
    """The tensors (B, C) of an output that may be its logits, the likeliest first."""
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
    """The outputs for several batches as one output for all samples, of the same form.

    Args:
        outputs: the outputs for the batches, in order.
        size: the size of every batch. The last one may have been filled up with copies, which are cut off here.
        count: the number of samples. Tensors without one row for each sample cannot be joined and become None.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if not first.ndim or len(first) != size:
            return None
        return torch.cat(list(outputs))[:count]
    parts_by_output = [parts_of(output) for output in outputs]
    parts = []
    for corresponding in zip(*parts_by_output, strict=True):
        parts.append(joined(corresponding, size, count))
    return _rebuilt(first, parts)


def _rebuilt(output: Any, parts: list[Any]) -> Any:
    """An output of the same form as ``output`` that holds these parts; None if it is of no known form."""
    if isinstance(output, Mapping):
        mapping: Any = copy(output)
        for name, part in zip(output, parts, strict=True):
            mapping[name] = part
        return mapping
    if isinstance(output, tuple) and hasattr(output, "_fields"):  # a named tuple
        return type(output)(*parts)
    if isinstance(output, tuple | list):
        return type(output)(parts)
    if hasattr(output, "__dataclass_fields__"):
        copied = copy(output)
        for name, part in zip(output.__dataclass_fields__, parts, strict=True):
            object.__setattr__(copied, name, part)  # works for frozen dataclasses, too
        return copied
    return None
