"""Files of weights: read without running code, and refused if they do not fit the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from adanpc.errors import UnavailableError
from adanpc.lab.networks.vision import vision

State = dict[str, Tensor]
NESTED = ("state_dict", "model")  # entries under which training scripts save the tensors, among other things
PARALLEL_PREFIX = "module."  # before the names in models that were trained in parallel


class WeightsError(UnavailableError):
    """Weights that are missing, unreadable, or of another network."""

    code = "bad-weights"


def read(path: Path) -> State:
    """Returns the tensors of a checkpoint by name, on the CPU; a safetensors file is read by timm.

    If the tensors are in an entry ``state_dict`` or ``model``, that entry is used. The prefix ``module.`` is removed
    from their names.
    """
    if not path.is_file():
        raise WeightsError(f"there is no file of weights at {path}")
    try:
        contents = _load(path)
    except Exception as error:  # a broken file can make its reader raise anything
        reason = shorten(str(error), 80, placeholder=" …")
        raise WeightsError(
            f"{path} cannot be read as weights without running code ({reason}): save the state_dict() of the model, "
            "not the model itself"
        ) from None
    for name in NESTED:
        if isinstance(contents, Mapping) and isinstance(contents.get(name), Mapping):
            contents = contents[name]
    if not _is_state(contents):
        raise WeightsError(f"{path} does not hold tensors by name")
    return {name.removeprefix(PARALLEL_PREFIX): value for name, value in contents.items()}


def _load(path: Path) -> Any:
    """Returns the contents of a file, read without running code."""
    if path.suffix == ".safetensors":
        return vision().models.load_state_dict(str(path))
    return torch.load(path, map_location="cpu", weights_only=True)


def _is_state(contents: Any) -> bool:
    """Returns whether these are tensors by name, at least one."""
    if not isinstance(contents, Mapping) or not contents:
        return False
    return all(isinstance(name, str) and isinstance(value, Tensor) for name, value in contents.items())


def fill(module: nn.Module, state: State) -> None:
    """Copies the tensors into the module; there must be exactly one for each of its own."""
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise WeightsError(f"the weights are those of another network: {brief(error)}") from None


def brief(error: Exception) -> str:
    """Returns the message of an error in one line of readable length."""
    return shorten(str(error), 300, placeholder=" …")
