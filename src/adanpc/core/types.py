"""The values that flow through the method.

Shapes: B queries, D feature dimensions, N rows, K neighbors, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor


class Origin(IntEnum):
    """Where a row came from. Only ``ADMITTED`` rows are ever evicted."""

    SOURCE = 0  # labeled training data
    ADMITTED = 1  # a query that was answered confidently enough to join
    EXPERT = 2  # a person's correction


@dataclass(frozen=True)
class Neighbors:
    """The rows nearest to each query, most similar first, ties to the lowest id.

    Where fewer than K rows may vote, id and label are -1 and similarity is -inf.
    """

    ids: Tensor  # (B, K) int64
    similarity: Tensor  # (B, K) float64, the exact cosine to the stored row
    labels: Tensor  # (B, K) int64
    soft: Tensor | None = None  # (B, K, C) float32, in banks with soft labels

    def without(self, hidden: Tensor) -> Neighbors:
        """The same, with nobody where ``hidden`` (B, K) is true."""
        similarity, ids = self.similarity.masked_fill(hidden, -torch.inf), self.ids.masked_fill(hidden, -1)
        soft = None if self.soft is None else self.soft.masked_fill(hidden[:, :, None], 0)
        return Neighbors(ids, similarity, self.labels.masked_fill(hidden, -1), soft)

    def pick(self, order: Tensor) -> Neighbors:
        """The neighbors at these positions (B, k) of each query."""
        soft = None if self.soft is None else self.soft.gather(1, order[:, :, None].expand(-1, -1, self.soft.shape[2]))
        ids, similarity, labels = (column.gather(1, order) for column in (self.ids, self.similarity, self.labels))
        return Neighbors(ids, similarity, labels, soft)


@dataclass(frozen=True)
class Prediction:
    """Class probabilities and the witnesses behind them."""

    probs: Tensor  # (B, C) float32, rows sum to 1
    weights: Tensor  # (B, K) float32, each neighbor's share of the vote
    neighbors: Neighbors
    joined: Tensor  # (B,) int64, the id under which the query joined the bank, else -1

    @cached_property
    def labels(self) -> Tensor:
        """The most probable class of each query, ties to the lowest class."""
        return self.probs.argmax(1)  # (B,)

    @cached_property
    def confidence(self) -> Tensor:
        """The probability of the predicted class."""
        return self.probs.amax(1)  # (B,)

    @cached_property
    def margin(self) -> Tensor:
        """The probability of the best class minus that of the second best."""
        best = self.probs.topk(min(2, self.probs.shape[1]), dim=1).values
        return best[:, 0] - best[:, 1:].sum(1)  # (B,)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy in nats, from 0 (certain) to ln C."""
        return torch.sum(torch.special.entr(self.probs), 1)  # (B,)


@dataclass(frozen=True)
class Append:
    """Rows to be stored, in this order. Features need not have unit length."""

    features: Tensor  # (n, D)
    labels: Tensor  # (n,)
    origin: Origin = Origin.SOURCE
    soft: Tensor | None = None  # (n, C) class probabilities, for banks with soft labels
    domain: Tensor | int = -1  # (n,) or one for all; -1 is unknown
    confidence: Tensor | None = None  # (n,); 1 when absent
    keys: Tensor | None = None  # (n,) the user's own row numbers; -1 when absent
    stream: tuple[Tensor, int] | None = None  # running sum and count of the stream after this change


@dataclass(frozen=True)
class Veto:
    """Rows that may no longer vote, by whom and why. They keep their place and can be restored."""

    ids: tuple[int, ...]
    who: str = ""
    why: str = ""


@dataclass(frozen=True)
class Restore:
    """Vetoed rows that may vote again."""

    ids: tuple[int, ...]
    who: str = ""
    why: str = ""


Change = Append | Veto | Restore
