"""Weights in files: read without running code, and refused if they do not fit."""

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
NESTED = ("state_dict", "model")  # where training scripts put the tensors, beside other things
PREFIX = "module."  # of models that were trained in parallel


class WeightsError(UnavailableError):
    """Weights that are missing, unreadable, or of another network."""


def read(path: Path) -> State:
    """The tensors of a checkpoint by name, on the CPU; a safetensors file is read by timm.

    Tensors that lie under ``state_dict`` or ``model`` are taken from there, and ``module.`` from their names.
    """
    if not path.is_file():
        raise WeightsError(f"there is no file of weights at {path}")
    load = vision().models.load_state_dict if path.suffix == ".safetensors" else _unpickled
    try:
        found: Any = load(str(path))
    except Exception as error:  # a broken file can fail its reader in any way
        raise WeightsError(f"{path} cannot be read as weights without running code: {brief(error)}") from None
    for name in NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise WeightsError(f"{path} does not hold tensors by name")
    return {name.removeprefix(PREFIX): value for name, value in found.items()}


def _unpickled(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def fill(module: nn.Module, state: State) -> None:
    """Puts the tensors into the module; all of its own must be there, and no others."""
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise WeightsError(f"the weights are those of another network: {brief(error)}") from None


def brief(error: Exception) -> str:
    """The error's message in one line of readable length."""
    return shorten(str(error), 300, placeholder=" …")
