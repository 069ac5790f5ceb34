"""Adapt a trained classifier while it is used: a bank of features, a vote of the nearest, no gradients."""

from adanpc.core import (
    AdaNPC,
    Admission,
    Append,
    Delete,
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
from adanpc.errors import AdaNPCError
from adanpc.losses import KNNLoss
from adanpc.models import Wrapped, wrap
from adanpc.store import load, save
from adanpc.version import __version__

__all__ = [
    "AdaNPC", "AdaNPCError", "Admission", "Append", "Delete", "KNNLoss", "MemoryBank", "Origin", "Prediction",
    "Relabel", "Restore", "Rollback", "Veto", "Wrapped", "__version__", "everyone", "load", "nobody", "save", "wrap",
]  # fmt: skip
