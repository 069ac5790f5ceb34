"""How features are made, in a few texts: what a saved bank must meet again."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import Tensor, nn

from adanpc.errors import AdaNPCError


class RecipeError(AdaNPCError):
    """A bank meets a model, a layer or a preprocessing other than the one that its rows were made with."""


def describe(preprocessing: Any) -> str:
    """A text that is the same in the next process: a string as it is, a function's name, anything else's repr."""
    if preprocessing is None:
        return ""
    if isinstance(preprocessing, str):
        return preprocessing
    if hasattr(preprocessing, "__qualname__"):
        return f"{preprocessing.__module__}.{preprocessing.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(preprocessing))


def fingerprint(model: nn.Module) -> str:
    """A hash of all parameters and buffers, names included."""
    total = hashlib.sha256()
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, value in sorted(tensors.items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]
