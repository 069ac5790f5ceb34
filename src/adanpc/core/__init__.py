"""The method: a bank of rows, a vote of the nearest, and who may join."""

from adanpc.core.admission import Admission, everyone, nobody
from adanpc.core.bank import MemoryBank
from adanpc.core.classifier import AdaNPC
from adanpc.core.types import Append, Change, Neighbors, Origin, Prediction, Restore, Veto
from adanpc.core.vote import vote

__all__ = [
    "AdaNPC", "Admission", "Append", "Change", "MemoryBank", "Neighbors", "Origin", "Prediction", "Restore", "Veto",
    "everyone", "nobody", "vote",
]  # fmt: skip
