"""The recipe of a bank: a few strings that say how its features were made, to be compared when it is loaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adanpc.errors import AdaNPCError
from adanpc.models.layers import INPUT_OF, plain_layer, plain_name, unwrapped

FEATURES = "features:"  # marks a hash of the weights that decide the features; older files have one of the whole model


class RecipeError(AdaNPCError):
    """Raised if the model, layer or preprocessing is not the one that a bank was built with."""

    code = "other-recipe"


def describe(preprocessing: Any) -> str:
    """A text that describes a preprocessing in the same way in every process.

    A string describes itself, a function or class is described by its name, and anything else by its repr without
    memory addresses.
    """
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
    return tensors_hash(tensors.items())


def feature_fingerprint(model: nn.Module, layer: str) -> str:
    """A hash of the parameters and buffers that may decide the features at a layer, names included.

    With the layer ``"input of NAME"``, the module NAME does not count, so that the head may be replaced. Otherwise the
    whole model counts, because only running it would show which parts come after the layer. The hash is the same for a
    compiled or parallel model.
    """
    feature_layer = plain_layer(str(layer))  # a layer that is not a string is refused when the recipe is saved
    tensors = []
    for full_name, value in unwrapped(model).state_dict().items():
        name = plain_name(full_name)
        if isinstance(value, Tensor) and not _behind(name, feature_layer):
            tensors.append((name, value))
    return FEATURES + tensors_hash(tensors)


def check_recipe(recorded: Mapping[str, str], model: nn.Module, layer: str, preprocessing: str, strict: bool) -> None:
    """Raises a RecipeError that says what differs and what to do, if a bank was built in another way.

    Args:
        recorded: the recipe of the bank.
        model, layer, preprocessing: how features would be made now.
        strict: whether preprocessing and weights must be the same, too.
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
    """Whether the model has the weights whose hash was recorded."""
    if recorded.startswith(FEATURES):
        return recorded == feature_fingerprint(model, layer)
    # Older files have a hash of the whole model, with or without its wrappers.
    return recorded in (fingerprint(unwrapped(model)), fingerprint(model))


def _preprocessing_difference(recorded: str, given: str) -> str:
    """How two preprocessings differ, and what to pass instead."""
    if not recorded:
        return f"the bank was built without a preprocessing, got {given!r}: leave out preprocessing"
    if not given:
        return (
            f"the bank was built from inputs prepared by {recorded!r}: pass preprocessing=transform, the transform of "
            "the data set that it was built from"
        )
    return (
        f"the bank was built from inputs prepared by {recorded!r}, not by {given!r}: pass the former as preprocessing"
    )


def _difference(name: str, recorded: str, found: str) -> str:
    """How the layer or the weights of a bank differ from those of a model; nothing is recorded in some older files."""
    if not recorded:
        recorded = "unknown"
    return f"the bank was built with {name} {recorded!r}, this model has {found!r}"


def _behind(name: str, layer: str) -> bool:
    """Whether a parameter belongs to the module whose input is the feature, and so cannot decide the feature."""
    if not layer.startswith(INPUT_OF):
        return False
    module = layer.removeprefix(INPUT_OF)
    return module == "" or name.startswith(f"{module}.")


def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names, types, shapes and bytes, whatever the order of the tensors."""
    hasher = hashlib.sha256()
    for name, value in sorted(tensors, key=lambda named: named[0]):
        hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]
