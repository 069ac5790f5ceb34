"""The inputs of a model in the forms in which people pass them: tensors, arrays, lists, tuples, or mappings by name."""

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
from torch.utils.data import DataLoader, Dataset

from adanpc.errors import AdaNPCError


class InputError(AdaNPCError):
    """Raised for inputs that a model cannot take."""

    code = "bad-inputs"


LABEL_NAMES = ("labels", "label")  # where the labels are in batches that are dictionaries
PIL_REMEDY = (
    "the inputs are PIL images, but a model takes tensors: give the data set the transform that the model was trained "
    "with, such as torchvision.transforms.Compose([Resize(256), CenterCrop(224), ToTensor(), Normalize(mean, std)])"
)


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """The arguments of one call of a model."""

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

    def __str__(self) -> str:
        """The shapes and types of all tensors; if there are none, the types of the arguments."""
        shapes: list[str] = []

        def note(tensor: Tensor) -> Tensor:
            lengths = ", ".join(map(str, tensor.shape))
            shapes.append(f"({lengths}) {plain_dtype(tensor.dtype)}")
            return tensor

        self.mapped(note)
        if shapes:
            return f"{', '.join(shapes)}; the first dimension counts samples"
        kinds = [type(value).__name__ for value in (*self.positional, *self.named.values())]
        return f"no tensor, but {', '.join(kinds)}"

    def batches(self, size: int) -> Iterator[ModelInputs]:
        """The same samples in batches of exactly ``size``; the last one is filled up with copies of its last sample."""
        count = self.count
        for start in range(0, count, size):
            rows = partial(_rows, count=count, start=start, size=size)
            yield self.mapped(rows)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> ModelInputs:
        """The same arguments, with a function applied to every tensor in them."""
        positional = tuple(_each_tensor(value, function) for value in self.positional)
        named = {name: _each_tensor(value, function) for name, value in self.named.items()}
        return ModelInputs(positional, named)


def inputs_for(model: nn.Module, given: Any) -> ModelInputs:
    """The arguments with which to call the model, with all tensors on its device.

    A mapping is passed by name, as in ``model(**inputs)``. A tuple or list of tensors or arrays is passed as several
    inputs, as in ``model(*inputs)``. Anything else is one input. Arrays and lists of numbers become tensors, with
    floating-point numbers in the precision of the model's weights; tensors keep their type.
    """
    if isinstance(given, DataLoader | Dataset | Iterator) or _are_labeled_batches(given):
        kind = type(given).__name__
        raise InputError(
            f"the inputs must be one batch, got a {kind}: call it for each batch of a loader, "
            "as in `for inputs, _ in loader: wrapped.step(inputs)`"
        )
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
    return ModelInputs(positional, named).mapped(lambda tensor: tensor.to(device))


def token_mask(model: nn.Module, inputs: ModelInputs) -> Tensor | None:
    """Which tokens of each sample are not padding, (B, T): the argument ``attention_mask``; None if there is none."""
    arguments = inputs.named
    accepted = _accepted(model)
    if accepted is not None:
        names = accepted.parameters
        arguments = dict(zip(names, inputs.positional, strict=False)) | inputs.named
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor):
        return mask
    return None


def check_call(model: nn.Module, inputs: ModelInputs) -> None:
    """Raises an InputError if the model does not take this number of inputs, or inputs with these names."""
    accepted = _accepted(model)
    if accepted is None:
        return
    try:
        accepted.bind(*inputs.positional, **inputs.named)
    except TypeError as error:
        remedy = _remedy(inputs)
        raise InputError(f"{type(model).__name__} does not take these inputs ({error}): {remedy}") from None


def _remedy(inputs: ModelInputs) -> str:
    """What to do about inputs that a model does not take."""
    for name in LABEL_NAMES:
        if name in inputs.named:
            return f"leave out {name!r}"
    if len(inputs.positional) < 2:
        return "name the inputs as its forward method does"
    shapes = [value.shape for value in inputs.positional if isinstance(value, Tensor)]
    if shapes and len(shapes[0]) > 1 and shapes[-1] == shapes[0][:1]:
        return "leave out the labels, as in step(batch[0])"
    return "if they are the samples of one batch, pass torch.stack(samples)"


def _accepted(model: nn.Module) -> Signature | None:
    """The arguments that the model takes; None if they are unknown, as those of compiled code are."""
    try:
        return signature(model.forward)
    except (TypeError, ValueError):
        return None


def plain_dtype(dtype: torch.dtype) -> str:
    """The name of a type: ``float32`` rather than ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a value, which may be a tuple, a mapping or an output object, nested to any depth."""
    if isinstance(value, Tensor):
        return value
    for part in parts_of(value):
        tensor = first_tensor(part)
        if tensor is not None:
            return tensor
    return None


def parts_of(value: Any) -> list[Any]:
    """The parts of a tuple, list, mapping or dataclass, in order; an empty list for any other value."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return list(value)
    if hasattr(value, "__dataclass_fields__"):
        return [getattr(value, name) for name in value.__dataclass_fields__]
    return []


def _are_several(given: Any) -> bool:
    """Whether the value is a tuple or list of several inputs, rather than of the numbers or texts of one input."""
    if not isinstance(given, tuple | list):
        return False
    return any(isinstance(value, Tensor | numpy.ndarray | Mapping) for value in given)


def _are_labeled_batches(given: Any) -> bool:
    """Whether the value is a list of batches (inputs, labels), which ``wrap`` takes for a loader."""
    if not isinstance(given, list) or not given:
        return False
    for batch in given:
        if not isinstance(batch, tuple) or len(batch) != 2:
            return False
        inputs, labels = batch
        if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
            return False
        if inputs.ndim < 2 or labels.shape != inputs.shape[:1]:
            return False
    return True


def _as_tensor(model: nn.Module, value: Any) -> Any:
    """The value as a tensor if it is an array or a list of numbers; any other value as it is."""
    if isinstance(value, numpy.ndarray | numpy.generic):
        return _converted(model, value)
    first = value  # the first element of nested lists, which tells what the others are
    while isinstance(first, tuple | list) and first:
        first = first[0]
    if _is_picture(first):
        raise InputError(PIL_REMEDY)
    if isinstance(value, tuple | list) and isinstance(first, Real):
        return _converted(model, value)
    return value


def _converted(model: nn.Module, numbers: Any) -> Tensor:
    """The numbers as a tensor, floating-point numbers in the precision of the model's weights."""
    try:
        # Copied in C order, because torch accepts neither read-only arrays nor those with negative strides.
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
    """The rows of samples ``start`` to ``start + size``, the last row repeated where samples are missing.

    A tensor that does not have one row for each of the ``count`` samples belongs to all of them, and stays as it is.
    """
    if not tensor.ndim or len(tensor) != count:
        return tensor
    rows = tensor[start : start + size]
    missing = size - len(rows)
    if missing == 0:
        return rows
    copies = rows[-1:].expand(missing, *rows.shape[1:])
    return torch.cat([rows, copies])


def _is_picture(value: Any) -> bool:
    """Whether the value is a PIL image, tested without importing PIL, which need not be installed."""
    return any(kind.__module__.startswith("PIL.") for kind in type(value).__mro__)


def _each_tensor(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The value with a function applied to every tensor in it, also inside tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _each_tensor(part, function) for name, part in value.items()}
    if not isinstance(value, tuple | list):
        return value
    parts = [_each_tensor(part, function) for part in value]
    if hasattr(value, "_fields"):  # a named tuple takes its parts as separate arguments
        return type(value)(*parts)
    return type(value)(parts)
