"""Which answered queries may join the bank."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import inf

from torch import Tensor

from adanpc.core.types import Prediction
from adanpc.errors import AdaNPCError


@dataclass(frozen=True)
class Admission:
    """A query joins if all of these hold; ``a & b`` asks for both. Each query is judged alone, by its own answer and
    the rows held when it arrives.

    Args:
        min_confidence: the predicted class has at least this probability (the paper's margin).
        min_margin: the best class leads the second by at least this probability.
        max_entropy: the answer's entropy is at most this many nats.
        class_quota: fewer than this many admitted rows of the predicted class are held.
    """

    min_confidence: float = 0.0
    min_margin: float = 0.0
    max_entropy: float = inf
    class_quota: float = inf

    def __post_init__(self) -> None:
        if any(value != value for value in astuple(self)):
            raise AdaNPCError(f"the values of an admission must be numbers, got {self}")

    def __and__(self, other: Admission) -> Admission:
        ours, theirs = astuple(self), astuple(other)
        return Admission(*map(max, ours[:2], theirs[:2]), *map(min, ours[2:], theirs[2:]))

    def __call__(self, prediction: Prediction, held: Tensor) -> Tensor:
        """(B,) bool, given how many admitted rows of each class are held at each query's turn (B, C)."""
        joins = prediction.confidence >= self.min_confidence
        if self.min_margin > 0 or self.max_entropy < inf:  # what cannot fail is not computed
            joins &= (prediction.margin >= self.min_margin) & (prediction.entropy <= self.max_entropy)
        if self.class_quota < inf:
            joins &= held.gather(1, prediction.labels[:, None])[:, 0] < self.class_quota
        return joins


everyone = Admission()
nobody = Admission(class_quota=0)
