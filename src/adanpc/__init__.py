"""Adapt a trained classifier while it is used: a bank of features, a vote of the nearest, no gradients."""

from adanpc.core import AdaNPC, Admission, Append, MemoryBank, Origin, Prediction, Restore, Veto, everyone, nobody
from adanpc.errors import AdaNPCError
from adanpc.losses import KNNLoss
from adanpc.models import Wrapped, wrap
from adanpc.store import load, save
from adanpc.version import __version__

__all__ = [
    "AdaNPC", "AdaNPCError", "Admission", "Append", "KNNLoss", "MemoryBank", "Origin", "Prediction", "Restore", "Veto",
    "Wrapped", "__version__", "everyone", "load", "nobody", "save", "wrap",
]  # fmt: skip
