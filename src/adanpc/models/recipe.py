"""How features are made, in a few strings: what a model must match when a saved bank is loaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.models.layers import INPUT_OF, plain_layer, plain_name, unwrapped

FEATURES = "features:"  # marks hashes of what makes the features; older files have a hash of the whole model


class RecipeError(AdaNPCError):
    """The model, layer or preprocessing is not the one that a bank's rows were made with."""

    code = "other-recipe"


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
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return _hash(tensors.items())


def feature_fingerprint(model: nn.Module, layer: str) -> str:
    """A hash of the parameters and buffers that may decide the features at a layer, names included.

    With the layer ``"input of NAME"`` the module NAME does not count, so another head changes nothing. Otherwise all
    of the model counts: which parts run after the layer is not known before the model runs. Names are the same for a
    compiled or parallel model.
    """
    feature_layer = plain_layer(str(layer))  # a layer that is not a text is refused when the recipe is saved
    tensors = []
    for name, value in unwrapped(model).state_dict().items():
        if isinstance(value, Tensor) and not _behind(plain_name(name), feature_layer):
            tensors.append((plain_name(name), value))
    return FEATURES + _hash(tensors)


def check_recipe(recorded: Mapping[str, str], model: nn.Module, layer: str, preprocessing: str, strict: bool) -> None:
    """Refuses a bank that was built in another way, with an error that says what differs and what to do.

    Args:
        recorded: the recipe of the bank.
        model, layer, preprocessing: what there is now.
        strict: whether preprocessing and weights must be the same.
    """
    recorded_layer = recorded.get("layer", "")
    if plain_layer(recorded_layer) != plain_layer(layer):
        difference = _difference("layer", recorded_layer, layer)
        raise RecipeError(f"{difference}; wrap it with layer={recorded_layer!r}")
    if not strict:
        return
    recorded_preprocessing = recorded.get("preprocessing", "")
    if recorded_preprocessing != preprocessing:
        raise RecipeError(
            f"{_preprocessing_difference(recorded_preprocessing, preprocessing)}; or pass strict=False if you know "
            "that the inputs are prepared in the same way"
        )
    recorded_weights = recorded.get("weights", "")
    if not _has_weights(model, layer, recorded_weights):
        difference = _difference("weights", recorded_weights, feature_fingerprint(model, layer))
        raise RecipeError(
            f"{difference}: load the weights that the bank was built with, or pass strict=False if you know that the "
            "features are the same, as after model.half()"
        )


def _has_weights(model: nn.Module, layer: str, recorded: str) -> bool:
    if recorded.startswith(FEATURES):
        return recorded == feature_fingerprint(model, layer)
    return recorded in (fingerprint(unwrapped(model)), fingerprint(model))


def _preprocessing_difference(theirs: str, ours: str) -> str:
    """What differs, and what to pass instead."""
    if not theirs:
        return f"the bank was built without a preprocessing, got {ours!r}: leave out preprocessing"
    if not ours:
        return (
            f"the bank was built from inputs prepared by {theirs!r}: pass preprocessing=transform, the transform of "
            "the data set that it was built from"
        )
    return f"the bank was built from inputs prepared by {theirs!r}, not by {ours!r}: pass the former as preprocessing"


def _difference(name: str, theirs: str, ours: str) -> str:
    return f"the bank was built with {name} {theirs or 'unknown'!r}, this model has {ours!r}"


def _behind(name: str, layer: str) -> bool:
    """Whether a parameter belongs to the module whose input is the feature."""
    if not layer.startswith(INPUT_OF):
        return False
    module = layer.removeprefix(INPUT_OF)
    return module == "" or name.startswith(f"{module}.")


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    total = hashlib.sha256()
    for name, value in sorted(tensors, key=lambda named: named[0]):
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]
