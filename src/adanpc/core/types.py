"""The values that the method returns and passes on: ``Prediction``, ``Neighbors`` and ``Origin``.

In the order in which a user meets them: an answer, the rows behind it, and where a row comes from. The functions
below them are for library code.

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
Numbers = Tensor | ArrayLike  # what users pass: tensors, arrays, lists


@dataclass(frozen=True)
class Prediction:
    """Class probabilities for each query, and the neighbors that they come from.

    Example::

        bank = MemoryBank(dim=2, classes=2)
        bank.apply(Append(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), torch.tensor([0, 0, 1])))
        answer = AdaNPC(bank, k=3).predict([[5.0, 1.0]])

        answer.labels         # tensor([0]), the predicted class
        answer.probs          # tensor([[0.9998, 0.0002]])
        answer.neighbors.ids  # tensor([[1, 0, 2]]), most similar first
        answer.weights        # tensor([[0.5390, 0.4609, 0.0002]]), each neighbor's share of the vote

    Until a proposal is applied, the ids of the rows that it would add are provisional: all ids from ``provisional``
    upward, in ``joined`` and among the neighbors. ``settled`` replaces them by the ids that ``apply`` gave.
    """

    probs: Tensor  # (B, C) float32, rows sum to 1
    weights: Tensor  # (B, K) float32, each neighbor's share of the vote
    neighbors: Neighbors
    joined: Tensor  # (B,) int64, the id under which the query joined the bank, or -1 if it did not
    provisional: int | None = None  # the first provisional id; None if all ids are final
    # With the preset "safe" only:
    trust: Tensor | None = None  # (B,) float32, how much of the answer is the adapted one, from 0 to 1
    frozen: Tensor | None = None  # (B, C) float32, the answer without anything learned from the stream
    novelty: Tensor | None = None  # (B,) float32, how unlike the source the query is, from 0 to 1

    def __repr__(self) -> str:
        count, classes = self.probs.shape
        summary = f"<Prediction of {_queries(count)}, {classes} classes"
        if not count:
            return summary + ">"
        confidence = f"confidence {self.confidence.min():.2f} … {self.confidence.max():.2f}"
        joined = int((self.joined >= 0).sum())
        return f"{summary}: labels {_first_few(self.labels)}, {confidence}, {joined} joined>"

    @cached_property
    def labels(self) -> Tensor:
        """The most probable class of each query (B,), ties to the lowest class."""
        return self.probs.argmax(1)

    @cached_property
    def confidence(self) -> Tensor:
        """The probability of the predicted class (B,)."""
        return self.probs.amax(1)

    @cached_property
    def margin(self) -> Tensor:
        """The probability of the best class minus that of the second best (B,)."""
        best = self.probs.topk(min(2, self.probs.shape[1]), dim=1).values
        second = best[:, 1:].sum(1)  # 0 if there is only one class
        return best[:, 0] - second

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy in nats (B,), from 0 (certain) to ln C."""
        return torch.sum(torch.special.entr(self.probs), 1)

    def settled(self, first: int) -> Prediction:
        """The same answers with final ids.

        Args:
            first: the first id that ``apply`` gave to the rows of the proposal.
        """
        if self.provisional is None or self.provisional == first:
            return with_fields(self, provisional=None)
        joined = _final_ids(self.joined, self.provisional, first)
        ids = _final_ids(self.neighbors.ids, self.provisional, first)
        neighbors = replace(self.neighbors, ids=ids)
        return replace(self, neighbors=neighbors, joined=joined, provisional=None)


@dataclass(frozen=True)
class Neighbors:
    """The rows nearest to each query, most similar first, ties to the lowest id.

    K is the k of the search. Where fewer than K rows may vote, the last ids and labels are -1 and the similarities
    -inf. (An absurdly large k is cut to the number of rows, so that a forged file cannot fill the memory.)

    Example::

        near = bank.search(queries, k=3)
        near.labels[0]        # the labels of the three rows nearest to the first query
        near.similarity[0]    # their cosines, from the highest to the lowest
        bank.rows(near.ids[0])
    """

    ids: Tensor  # (B, K) int64
    similarity: Tensor  # (B, K) float64, the exact cosine to the stored row
    labels: Tensor  # (B, K) int64
    soft: Tensor | None = None  # (B, K, C) float32, in banks with soft labels

    def __repr__(self) -> str:
        count, width = self.ids.shape
        return f"<Neighbors of {_queries(count)}, {width} each: ids {_first_few(self.ids)}>"

    @property
    def missing_for_some(self) -> bool:
        """Whether some query has no neighbor at all."""
        present = array_if_on_cpu(self.ids) >= 0
        return not present.all() and not present.any(1).all()  # the first test is cheaper, and usually decides

    def of(self, queries: slice) -> Neighbors:
        """The neighbors of some of the queries."""
        soft = self.soft
        if soft is not None:
            soft = soft[queries]
        return Neighbors(self.ids[queries], self.similarity[queries], self.labels[queries], soft)

    def pick(self, order: Tensor) -> Neighbors:
        """For each query, its neighbors at the positions in ``order`` (B, k), in that order."""
        soft = self.soft
        if soft is not None:
            order_of_soft = order[:, :, None].expand(-1, -1, soft.shape[2])
            soft = soft.gather(1, order_of_soft)
        return Neighbors(
            self.ids.gather(1, order), self.similarity.gather(1, order), self.labels.gather(1, order), soft
        )

    def nearest(self, k: int) -> Neighbors:
        """The k most similar, most similar first; neighbors with equal similarities keep their order."""
        order = self.similarity.argsort(dim=1, descending=True, stable=True)
        return self.pick(order[:, :k])

    def without(self, hidden: Tensor) -> Neighbors:
        """The same neighbors, but missing (id -1, similarity -inf) wherever ``hidden`` (B, K) is true."""
        soft = self.soft
        if soft is not None:
            soft = soft.masked_fill(hidden[:, :, None], 0)
        return Neighbors(
            self.ids.masked_fill(hidden, -1),
            self.similarity.masked_fill(hidden, -torch.inf),
            self.labels.masked_fill(hidden, -1),
            soft,
        )

    def padded(self, width: int) -> Neighbors:
        """The same neighbors in at least ``width`` columns; the neighbors in added columns are missing."""
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


class Origin(IntEnum):
    """Where a row came from. Only ``ADMITTED`` rows are ever evicted."""

    SOURCE = 0  # labeled training data
    ADMITTED = 1  # a query that joined the bank after it was answered
    EXPERT = 2  # a person's correction


# For library code


def with_fields(value: Value, **fields: Any) -> Value:
    """A copy of a dataclass with other values in some fields, in a fifth of the time of ``dataclasses.replace``.

    ``__init__`` and its checks are not called. Cached properties are copied too, so a field that one of them depends
    on, such as ``probs``, must not be changed this way.
    """
    changed = object.__new__(type(value))
    changed.__dict__.update(value.__dict__)
    changed.__dict__.update(fields)
    return changed


def side_by_side(parts: Sequence[Neighbors]) -> Neighbors:
    """Several sets of neighbors of the same queries as one: K is the sum of the parts' K."""
    return _concatenated(parts, dim=1)


def one_after_another(parts: Sequence[Neighbors]) -> Neighbors:
    """The neighbors of several batches of queries as those of one batch: B is the sum of the parts' B."""
    width = max(part.ids.shape[1] for part in parts)
    return _concatenated([part.padded(width) for part in parts], dim=0)


def answered_in_turn(answers: Sequence[Prediction]) -> Prediction:
    """The answers to several batches of queries as the answer to one batch.

    Their ids count as final: the caller has applied each batch before it proposed the next.
    """
    if len(answers) == 1:
        return with_fields(answers[0], provisional=None)
    neighbors = one_after_another([answer.neighbors for answer in answers])
    width = neighbors.ids.shape[1]
    weights = []
    for answer in answers:
        missing = width - answer.weights.shape[1]
        weights.append(pad(answer.weights, (0, missing)))
    return Prediction(
        torch.cat([answer.probs for answer in answers]),
        torch.cat(weights),
        neighbors,
        torch.cat([answer.joined for answer in answers]),
        trust=_concatenated_or_none([answer.trust for answer in answers]),
        frozen=_concatenated_or_none([answer.frozen for answer in answers]),
        novelty=_concatenated_or_none([answer.novelty for answer in answers]),
    )


def _concatenated(parts: Sequence[Neighbors], dim: int) -> Neighbors:
    if len(parts) == 1:
        return parts[0]
    return Neighbors(
        torch.cat([part.ids for part in parts], dim),
        torch.cat([part.similarity for part in parts], dim),
        torch.cat([part.labels for part in parts], dim),
        _concatenated_or_none([part.soft for part in parts], dim),
    )


def _concatenated_or_none(parts: Sequence[Tensor | None], dim: int = 0) -> Tensor | None:
    """The parts as one tensor; None if they are None, which all of them are or none."""
    if parts[0] is None:
        return None
    return torch.cat(cast(list[Tensor], parts), dim)


def _final_ids(ids: Tensor, provisional: int, first: int) -> Tensor:
    """The ids, with those from ``provisional`` upward moved to begin at ``first``."""
    return torch.where(ids >= provisional, ids + (first - provisional), ids)


def _queries(count: int) -> str:
    """A number of queries in words."""
    if count == 1:
        return "1 query"
    return f"{count} queries"


def _first_few(values: Tensor) -> str:
    """The first few values, on one line."""
    return brief(values[:7].tolist())
