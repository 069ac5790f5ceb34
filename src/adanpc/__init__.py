"""Adapts a trained classifier while it is in use: a bank of features, a vote of the nearest rows, no gradients."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adanpc.errors import AdaNPCError
from adanpc.require import did_you_mean
from adanpc.version import __version__

if TYPE_CHECKING:
    from adanpc.core import (
        AdaNPC,
        Admission,
        Append,
        Delete,
        Feedback,
        MemoryBank,
        Origin,
        Prediction,
        Relabel,
        Restore,
        Rollback,
        Veto,
        everyone,
        nobody,
    )
    from adanpc.estimator import AdaNPCClassifier, AdaNPCTransformer, adapt_predict
    from adanpc.explanation import Explanation, explain
    from adanpc.losses import KNNLoss
    from adanpc.models.wrap import Wrapped, wrap
    from adanpc.plot import plot_stream
    from adanpc.rebuild import merged, reduced, with_capacity, with_classes
    from adanpc.store import DurableBank, load, save

# The module that each name comes from. It is imported when one of its names is first used: torch alone takes seconds to
# import, and nobody should wait for that who only asks for the version or completes a command.
_MODULES = {
    "core": [
        "AdaNPC", "Admission", "Append", "Delete", "Feedback", "MemoryBank", "Origin", "Prediction",
        "Relabel", "Restore", "Rollback", "Veto", "everyone", "nobody",
    ],
    "estimator": ["AdaNPCClassifier", "AdaNPCTransformer", "adapt_predict"],
    "explanation": ["Explanation", "explain"],
    "index": [],
    "losses": ["KNNLoss"],
    "models": ["Wrapped", "wrap"],
    "plot": ["plot_stream"],
    "rebuild": ["merged", "reduced", "with_capacity", "with_classes"],
    "store": ["DurableBank", "load", "save"],
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AdaNPC", "AdaNPCClassifier", "AdaNPCError", "AdaNPCTransformer", "Admission", "Append", "Delete", "DurableBank",
    "Explanation", "Feedback", "KNNLoss", "MemoryBank", "Origin", "Prediction", "Relabel", "Restore", "Rollback",
    "Veto", "Wrapped", "__version__", "adapt_predict", "everyone", "explain", "load", "merged", "nobody",
    "plot_stream", "reduced", "save", "with_capacity", "with_classes", "wrap",
]  # fmt: skip


if not TYPE_CHECKING:  # type checkers would otherwise accept every name

    def __getattr__(name: str) -> Any:
        """Imports a public module or name when it is first used."""
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            hint = did_you_mean(name, __all__)
            # The message must begin like Python's own, because some tools look for that.
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        module = import_module(f"{__name__}.{_MODULE_OF[name]}")
        value = getattr(module, name)
        globals()[name] = value  # so that Python finds it without this function from now on
        return value


def __dir__() -> list[str]:
    """All public names, including those that have not been imported yet."""
    return sorted({*globals(), *__all__, *_MODULES})
