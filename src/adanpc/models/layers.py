"""Finds layers by name, with the same names whether or not a model is compiled or runs on several devices."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from adanpc.errors import AdaNPCError
from adanpc.require import did_you_mean, listed

INPUT_OF = "input of "
COMPILED = "_orig_mod"  # torch.compile adds this to the names of layers
WRAPPER_PARTS = ("module", COMPILED)  # DataParallel adds "module"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``.

    Features are made with this inner model, because hooks cannot see into a compiled graph, and with DataParallel each
    device would show them a different part of the batch.
    """
    while True:
        compiled = getattr(model, COMPILED, None)
        if isinstance(compiled, nn.Module):
            model = compiled
        elif isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        else:
            return model


def plain_name(name: str) -> str:
    """The name of a layer or parameter without the parts that wrappers add: ``module.fc`` becomes ``fc``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def plain_layer(layer: str) -> str:
    """The same for a feature layer: ``input of module.fc`` becomes ``input of fc``."""
    if layer.startswith(INPUT_OF):
        return INPUT_OF + plain_name(layer.removeprefix(INPUT_OF))
    return plain_name(layer)


def visible_modules(model: nn.Module) -> dict[str, nn.Module]:
    """All modules that hooks can see, by name. Those inside a part that was compiled on its own are left out."""
    modules: dict[str, nn.Module] = dict(unwrapped(model).named_modules())
    return {name: module for name, module in modules.items() if COMPILED not in name.split(".")}


def module_at(model: nn.Module, name: str) -> nn.Module:
    """The module with this name, which may be given with or without the parts that wrappers add."""
    modules = visible_modules(model)
    if name in modules:
        return modules[name]
    for other, module in modules.items():
        if plain_name(other) == plain_name(name):
            return module
    names = [plain_name(other) for other in modules if other]
    hint = did_you_mean(name, names)
    raise AdaNPCError(f"the model has no layer {name!r}; it has: {listed(names)}{hint}")


def name_of(model: nn.Module, wanted: nn.Module) -> str:
    """The name that one of a model's modules has in it, including the parts that wrappers add."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, module in modules.items():
        if module is wanted:
            return name
    raise AdaNPCError(f"the model has no such {type(wanted).__name__}")
