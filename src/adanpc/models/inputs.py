"""What people give to a model: tensors, arrays, lists, several inputs, or inputs by name as tokenizers make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Signature, signature
from numbers import Real
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from adanpc.errors import AdaNPCError


class InputError(AdaNPCError):
    """Inputs that cannot be given to a model as they are."""

    code = "bad-inputs"


PIL_REMEDY = (
    "the inputs are PIL images, but a model takes tensors: give the data set the transform that the model was trained "
    "with, such as torchvision.transforms.Compose([Resize(256), CenterCrop(224), ToTensor(), Normalize(mean, std)])"
)


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """The arguments of one call of a model, with all tensors on its device."""

    positional: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def count(self) -> int:
        """How many samples there are: the length of the first tensor."""
        for value in (*self.positional, *self.named.values()):
            tensor = first_tensor(value)
            if tensor is not None and tensor.ndim:
                return len(tensor)
        raise InputError("encode_size needs inputs that are tensors with one row for each sample")

    def batches(self, size: int) -> Iterator[ModelInputs]:
        """The same samples in batches of exactly ``size``; the last one is filled up with copies of its last sample."""
        count = self.count
        for start in range(0, count, size):
            yield self.changed(partial(_rows, count=count, start=start, size=size))

    def changed(self, change: Callable[[Tensor], Tensor]) -> ModelInputs:
        """The same with every tensor changed."""
        positional = tuple(_each_tensor(value, change) for value in self.positional)
        named = {name: _each_tensor(value, change) for name, value in self.named.items()}
        return ModelInputs(positional, named)


def inputs_for(model: nn.Module, given: Any) -> ModelInputs:
    """The arguments for a call of the model, by the form of what is given.

    A mapping is given by name, as in ``model(**inputs)``; a tuple or a list of tensors or arrays one by one, as in
    ``model(*inputs)``; anything else is one input. Arrays and lists of numbers become tensors, with floating-point
    numbers in the precision of the model's weights. Tensors keep their type. All tensors go to the model's device.
    """
    if isinstance(given, ModelInputs):
        call = given
    elif isinstance(given, Mapping):
        call = ModelInputs((), dict(given))
    elif _are_several(given):
        call = ModelInputs(tuple(given), {})
    else:
        call = ModelInputs((given,), {})
    positional = tuple(_as_tensor(model, value) for value in call.positional)
    named = {name: _as_tensor(model, value) for name, value in call.named.items()}
    device = next(model.parameters(), torch.zeros(0)).device
    return ModelInputs(positional, named).changed(lambda tensor: tensor.to(device))


def token_mask(model: nn.Module, inputs: ModelInputs) -> Tensor | None:
    """(B, T), which tokens of each sample are not padding, if the inputs tell, by name or by place."""
    by_name = inputs.named
    accepted = _accepted(model)
    if accepted is not None:
        by_name = dict(zip(accepted.parameters, inputs.positional, strict=False)) | by_name
    mask = by_name.get("attention_mask")
    return mask if isinstance(mask, Tensor) else None


def check_call(model: nn.Module, inputs: ModelInputs) -> None:
    """Refuses inputs that are not those that the model takes, in number or in name."""
    accepted = _accepted(model)
    if accepted is None:
        return
    try:
        accepted.bind(*inputs.positional, **inputs.named)
    except TypeError as error:
        remedy = "name the inputs as its forward method does"
        if len(inputs.positional) > 1:
            remedy = "if they are the samples of one batch, pass torch.stack(samples)"
        raise InputError(f"{type(model).__name__} does not take these inputs ({error}): {remedy}") from None


def _accepted(model: nn.Module) -> Signature | None:
    """The arguments that the model takes, if it tells: compiled code does not."""
    try:
        return signature(model.forward)
    except (TypeError, ValueError):
        return None


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a value: of a tuple, of a mapping, of the fields of an output object."""
    if isinstance(value, Tensor):
        return value
    for part in parts_of(value):
        tensor = first_tensor(part)
        if tensor is not None:
            return tensor
    return None


def parts_of(value: Any) -> list[Any]:
    """What a tuple, a list, a mapping or a dataclass holds, in order; nothing for any other value."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return list(value)
    if hasattr(value, "__dataclass_fields__"):
        return [getattr(value, name) for name in value.__dataclass_fields__]
    return []


def _are_several(given: Any) -> bool:
    """Whether a tuple or a list holds inputs rather than the numbers or texts of one input."""
    if not isinstance(given, tuple | list):
        return False
    return any(isinstance(value, Tensor | numpy.ndarray | Mapping) for value in given)


def _as_tensor(model: nn.Module, value: Any) -> Any:
    """Arrays and lists of numbers as tensors; anything else as it is."""
    if isinstance(value, numpy.ndarray | numpy.generic):
        return _converted(model, value)
    first = value
    while isinstance(first, tuple | list) and first:
        first = first[0]
    if _is_picture(first):
        raise InputError(PIL_REMEDY)
    if isinstance(value, tuple | list) and isinstance(first, Real):
        return _converted(model, value)
    return value


def _converted(model: nn.Module, numbers: Any) -> Tensor:
    try:
        # A copy in the usual order: torch takes neither read-only arrays nor those that run backward.
        tensor = torch.from_numpy(numpy.array(numbers, order="C"))
    except (TypeError, ValueError) as error:
        kind = type(numbers).__name__
        reason = str(error).split("\n")[0]
        raise InputError(f"the inputs must be numbers, with rows of equal length, got a {kind}: {reason}") from None
    if not tensor.is_floating_point():
        return tensor
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return tensor.to(parameter.dtype)
    return tensor.to(torch.get_default_dtype())


def _rows(tensor: Tensor, count: int, start: int, size: int) -> Tensor:
    """``size`` rows of a tensor that has one for each of ``count`` samples; any other is shared by all samples."""
    if not tensor.ndim or len(tensor) != count:
        return tensor
    rows = tensor[start : start + size]
    missing = size - len(rows)
    if missing == 0:
        return rows
    copies = rows[-1:].expand(missing, *rows.shape[1:])
    return torch.cat([rows, copies])


def _is_picture(value: Any) -> bool:
    """Whether it is a PIL image; PIL itself need not be installed."""
    return any(kind.__module__.startswith("PIL.") for kind in type(value).__mro__)


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with every tensor in it changed; tuples, lists and mappings are looked into."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _each_tensor(part, change) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(_each_tensor(part, change) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(_each_tensor(part, change) for part in value)
    return value
