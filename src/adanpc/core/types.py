"""The values that flow through the method.

Shapes: B queries, D feature dimensions, N rows, K neighbors, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from reprlib import repr as brief
from typing import Any, TypeVar, cast

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import pad

from adanpc.index.grid import array_if_on_cpu

Value = TypeVar("Value")
Numbers = Tensor | ArrayLike  # what users have: tensors, arrays, lists


def with_fields(value: Value, **fields: Any) -> Value:
    """``dataclasses.replace`` without ``__init__`` and its checks, in a fifth of the time.

    Cached properties are copied too, so never change a field that one depends on, such as ``probs``.
    """
    changed = object.__new__(type(value))
    changed.__dict__.update(value.__dict__)
    changed.__dict__.update(fields)
    return changed


class Origin(IntEnum):
    """Where a row came from. Only ``ADMITTED`` rows are ever evicted."""

    SOURCE = 0  # labeled training data
    ADMITTED = 1  # a query that was answered confidently enough to join
    EXPERT = 2  # a person's correction


@dataclass(frozen=True)
class Neighbors:
    """The rows nearest to each query, most similar first, ties to the lowest id.

    K is k (beyond 4096 no more than the rows held). Where fewer than K rows may vote, id and label are -1 and
    similarity is -inf.
    """

    ids: Tensor  # (B, K) int64
    similarity: Tensor  # (B, K) float64, the exact cosine to the stored row
    labels: Tensor  # (B, K) int64
    soft: Tensor | None = None  # (B, K, C) float32, in banks with soft labels

    def __repr__(self) -> str:
        queries, width = self.ids.shape
        return f"<Neighbors of {queries} queries, {width} each: ids {_some(self.ids)}>"

    @property
    def missing_for_some(self) -> bool:
        """Whether some query has no neighbor at all."""
        present = array_if_on_cpu(self.ids) >= 0
        return not present.all() and not present.any(1).all()

    def without(self, hidden: Tensor) -> Neighbors:
        """The same, with no row where ``hidden`` (B, K) is true."""
        soft = self.soft
        if soft is not None:
            soft = soft.masked_fill(hidden[:, :, None], 0)
        return Neighbors(
            self.ids.masked_fill(hidden, -1),
            self.similarity.masked_fill(hidden, -torch.inf),
            self.labels.masked_fill(hidden, -1),
            soft,
        )

    def of(self, queries: slice) -> Neighbors:
        """The neighbors of some of the queries."""
        soft = self.soft
        if soft is not None:
            soft = soft[queries]
        return Neighbors(self.ids[queries], self.similarity[queries], self.labels[queries], soft)

    def pick(self, order: Tensor) -> Neighbors:
        """The neighbors at these positions (B, k) of each query."""
        soft = self.soft
        if soft is not None:
            soft = soft.gather(1, order[:, :, None].expand(-1, -1, soft.shape[2]))
        return Neighbors(
            self.ids.gather(1, order), self.similarity.gather(1, order), self.labels.gather(1, order), soft
        )

    def nearest(self, k: int) -> Neighbors:
        """The k most similar of neighbors that stand in the order of ids wherever they tie."""
        return self.pick(self.similarity.argsort(dim=1, descending=True, stable=True)[:, :k])

    def padded(self, width: int) -> Neighbors:
        """The same with K = width, no row in the places that are added."""
        short = width - self.ids.shape[1]
        if short <= 0:
            return self
        soft = self.soft
        if soft is not None:
            soft = pad(soft, (0, 0, 0, short))
        return Neighbors(
            pad(self.ids, (0, short), value=-1),
            pad(self.similarity, (0, short), value=-torch.inf),
            pad(self.labels, (0, short), value=-1),
            soft,
        )


def _some(values: Tensor) -> str:
    """The first few values, in one line."""
    return brief(values[:7].tolist())


def side_by_side(parts: Sequence[Neighbors]) -> Neighbors:
    """All neighbors of each query, those of the first part first."""
    return _concatenated(parts, 1)


def one_after_another(parts: Sequence[Neighbors]) -> Neighbors:
    """The neighbors of all queries, those of the first part first."""
    width = max(part.ids.shape[1] for part in parts)
    return _concatenated([part.padded(width) for part in parts], 0)


def answered_in_turn(answers: Sequence[Prediction]) -> Prediction:
    """The answers to all queries, those of the first part first, with ids that are final."""
    if len(answers) == 1:
        return with_fields(answers[0], provisional=None)
    neighbors = one_after_another([answer.neighbors for answer in answers])
    width = neighbors.ids.shape[1]
    return Prediction(
        torch.cat([answer.probs for answer in answers]),
        torch.cat([pad(answer.weights, (0, width - answer.weights.shape[1])) for answer in answers]),
        neighbors,
        torch.cat([answer.joined for answer in answers]),
        trust=_together([answer.trust for answer in answers]),
        frozen=_together([answer.frozen for answer in answers]),
        novelty=_together([answer.novelty for answer in answers]),
    )


def _together(parts: Sequence[Tensor | None], dim: int = 0) -> Tensor | None:
    """Parts of a column that all answers have, or none of them."""
    if parts[0] is None:
        return None
    return torch.cat(cast(list[Tensor], parts), dim)


def _concatenated(parts: Sequence[Neighbors], dim: int) -> Neighbors:
    if len(parts) == 1:
        return parts[0]
    return Neighbors(
        torch.cat([part.ids for part in parts], dim),
        torch.cat([part.similarity for part in parts], dim),
        torch.cat([part.labels for part in parts], dim),
        _together([part.soft for part in parts], dim),
    )


@dataclass(frozen=True)
class Prediction:
    """Class probabilities and the neighbors behind them.

    In a proposal, ids from ``provisional`` upward are guesses, in ``joined`` and among the neighbors: ``apply`` gives
    the ids, and ``settled`` puts them in their place.
    """

    probs: Tensor  # (B, C) float32, rows sum to 1
    weights: Tensor  # (B, K) float32, each neighbor's share of the vote
    neighbors: Neighbors
    joined: Tensor  # (B,) int64, the id under which the query joined the bank, else -1
    provisional: int | None = None
    trust: Tensor | None = None  # (B,) float32, how much of the answer is the adapted one; preset "safe" only
    frozen: Tensor | None = None  # (B, C) float32, the answer without anything learned from the stream; likewise
    novelty: Tensor | None = None  # (B,) float32, how unlike the source the query is, from 0 to 1; likewise

    def __repr__(self) -> str:
        queries, classes = self.probs.shape
        joined = int((self.joined >= 0).sum())
        what = f"<Prediction of {queries} queries, {classes} classes"
        if not queries:
            return what + ">"
        confidence = f"confidence {self.confidence.min():.2f} … {self.confidence.max():.2f}"
        return f"{what}: labels {_some(self.labels)}, {confidence}, {joined} joined>"

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

    def settled(self, first: int) -> Prediction:
        """The same with true ids, where ``first`` is the first id that ``apply`` gave to the proposal's rows."""
        if self.provisional is None or self.provisional == first:
            return with_fields(self, provisional=None)
        joined = _moved(self.joined, self.provisional, first)
        ids = _moved(self.neighbors.ids, self.provisional, first)
        neighbors = replace(self.neighbors, ids=ids)
        return replace(self, neighbors=neighbors, joined=joined, provisional=None)


def _moved(ids: Tensor, provisional: int, first: int) -> Tensor:
    """Ids of which those from ``provisional`` on are counted from ``first`` instead."""
    return torch.where(ids >= provisional, ids + (first - provisional), ids)
