"""The method: a bank of rows, a vote of the nearest, and who may join."""

from adanpc.core.admission import Admission, everyone, nobody
from adanpc.core.bank import MemoryBank
from adanpc.core.centering import Centering
from adanpc.core.changes import Append, Change, Delete, Feedback, Judgment, Relabel, Restore, Rollback, Veto
from adanpc.core.classifier import AdaNPC, replay
from adanpc.core.contents import Contents, State
from adanpc.core.paper import PaperSettings
from adanpc.core.types import Neighbors, Origin, Prediction
from adanpc.core.vote import vote

__all__ = [
    "AdaNPC", "Admission", "Append", "Centering", "Change", "Contents", "Delete", "Feedback", "Judgment", "MemoryBank",
    "Neighbors", "Origin", "PaperSettings", "Prediction", "Relabel", "Restore", "Rollback", "State", "Veto", "everyone",
    "nobody", "replay", "vote",
]  # fmt: skip
