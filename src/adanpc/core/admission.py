"""Admission: which answered queries may join the bank."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor

from adanpc import require
from adanpc.core.types import Prediction
from adanpc.errors import AdaNPCError

COPY_SIMILARITY = 0.9999  # at or above this, a row counts as a copy


@require.names_its_arguments
@dataclass(frozen=True)
class Admission:
    """The conditions under which a query joins the bank; all of them must hold.

    Each query is judged on its own, by its answer and the rows held when it arrives, whatever else is in its batch.
    ``a & b`` is the admission that requires the conditions of both.

    Args:
        min_confidence: the predicted class must have at least this probability (the paper's margin); with inf, no
            query joins.
        min_margin: the best class must lead the second by at least this probability; with inf, no query joins.
        max_entropy: the entropy of the answer must be at most this many nats.
        class_quota: fewer than this many admitted rows of the predicted class may be voting already.
        max_copies: fewer than this many of the query's neighbors may be copies of it (similarity 0.9999 or more), so
            that an image sent a thousand times does not get a thousand votes. At most k copies can be counted.
    """

    min_confidence: float = 0.0
    min_margin: float = 0.0
    max_entropy: float = inf
    class_quota: float = inf
    max_copies: float = inf

    def __post_init__(self) -> None:
        for name in ("min_confidence", "min_margin"):
            object.__setattr__(self, name, _threshold(name, getattr(self, name)))
        for name in ("max_entropy", "class_quota", "max_copies"):
            limit = require.number(name, getattr(self, name))
            if limit < 0:
                raise AdaNPCError(f"{name} must be at least 0, got {limit:g}")
            object.__setattr__(self, name, limit)
        for name in ("class_quota", "max_copies"):
            limit = getattr(self, name)
            if limit != inf and not limit.is_integer():
                raise AdaNPCError(f"{name} must be a whole number, since rows are counted, got {limit:g}")

    def __and__(self, other: Admission) -> Admission:
        return Admission(
            min_confidence=max(self.min_confidence, other.min_confidence),
            min_margin=max(self.min_margin, other.min_margin),
            max_entropy=min(self.max_entropy, other.max_entropy),
            class_quota=min(self.class_quota, other.class_quota),
            max_copies=min(self.max_copies, other.max_copies),
        )

    def __call__(self, prediction: Prediction, admitted: Tensor) -> Tensor:
        """Whether each query joins (B,), given how many admitted rows of each class may vote at its turn (B, C)."""
        joins = prediction.confidence >= self.min_confidence
        # The other conditions are skipped where they hold for every query: each would cost time.
        if self.min_margin > 0:
            joins &= prediction.margin >= self.min_margin
        if self.max_entropy < inf:
            joins &= prediction.entropy <= self.max_entropy
        if self.class_quota < inf:
            of_predicted_class = admitted.gather(1, prediction.labels[:, None])[:, 0]
            joins &= of_predicted_class < self.class_quota
        if self.max_copies < inf:
            copies = (prediction.neighbors.similarity >= COPY_SIMILARITY).sum(1)
            joins &= copies < self.max_copies
        return joins


def _threshold(name: str, value: Any) -> float:
    """The value as a probability from 0 to 1, or inf, which no probability reaches."""
    threshold = require.number(name, value)
    if 0 <= threshold <= 1 or threshold == inf:
        return threshold
    remedy = ""
    if 1 < threshold <= 100:
        remedy = f"; for {threshold:g} % give {threshold / 100:g}"
    raise AdaNPCError(f"{name} must be a probability from 0 to 1, got {threshold:g}{remedy}")


everyone = Admission()
nobody = Admission(class_quota=0)
