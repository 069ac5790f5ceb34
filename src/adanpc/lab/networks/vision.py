"""The only place where timm and torchvision are imported."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from torch.library import Library

from adanpc.errors import UnavailableError


@cache
def vision() -> ModuleType:
    """Returns timm, which is imported on first use: that takes seconds, and most users never need it."""
    try:
        _import_torchvision()
        return import_module("timm")
    except ModuleNotFoundError as error:
        remedy = "pip install 'adanpc[vision]', then pip install --no-deps timm torchvision, which keeps your torch"
        raise UnavailableError(f"this encoder comes from timm, but {error}: {remedy}") from None


def _import_torchvision() -> None:
    """Imports torchvision even if its compiled part was built for another torch.

    Such a torchvision, for instance a CUDA build beside a CPU build of torch, cannot load its operators. Its import
    then fails because it registers properties of two of them with torch. Nothing here calls these operators, so it is
    enough to declare them.
    """
    try:
        import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        _declare_operators()
        import_module("torchvision")


@cache  # keeps the library alive: torch forgets the operators when the object is deleted
def _declare_operators() -> Library:
    """Declares the operators of torchvision that its import needs."""
    library = Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
