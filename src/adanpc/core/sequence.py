"""How a batch of queries is answered at once, with the answers that they would get one by one.

The problem. Queries arrive in order. At turn t, query t is answered by the rows that are held at that moment, and then
it may join the bank, which may evict another row. So the rows that vote on query t depend on the *outcomes* of the
turns before t: which queries joined, and with what answers. Those are not known when the whole batch is answered at
once.

The method. Guess an outcome for every query, and answer all queries as if the guess were right: follow it turn by turn
to see which rows are held at each turn, let them vote, and apply the admission. This *sweep* gives every query a new
outcome, and so a new guess. Repeat until the outcomes are those that were guessed. The first guess is that no query
joins.

Why the result is right. The outcome that a sweep finds for query t depends on the guess for queries 0 … t - 1 alone, as
no later query can vote on it. And if the guess is right for all of these, then query t sees the rows that it would see
one by one, so the outcome found for it is right.

* It ends. The first sweep is right for query 0, which depends on no guess. A sweep that starts from a guess that is
  right for queries 0 … t - 1 is right for queries 0 … t. So every sweep makes at least one more query right, after B
  sweeps at most all are right, and from then on nothing changes. In practice a few sweeps are enough, because most
  answers do not depend on other queries of the batch.
* It ends with the right outcomes. Suppose a sweep returns the very outcomes that were guessed. They are right for query
  0. So the guess was right for query 0, hence the sweep is right for query 1, and so on up to the last query.

Why the bits are the same, too. Similarities are exact, however many queries are compared at once (see ``index.grid``).
So each query gets the same voters, with the same similarities, in the same order as if it had come alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adanpc.core.admission import Admission
from adanpc.core.contents import Contents, Pool
from adanpc.core.eviction import Eviction
from adanpc.core.types import Neighbors, Prediction, side_by_side, with_fields
from adanpc.index.grid import array_if_on_cpu


def resolve(
    contents: Contents,
    queue_of: Callable[[Contents], Eviction | None],
    queries: Tensor,
    pools: Sequence[Pool],
    answer: Callable[[Neighbors], Prediction],
    admission: Admission,
) -> Prediction:
    """The answers to unit queries (B, D) that arrive in this order, with provisional ids for those that join.

    Args:
        contents: the contents of the bank when the first query arrives.
        queue_of: returns the eviction queue of contents; None without a capacity.
        queries: the queries as ``unit`` returns them.
        pools: which rows vote on a query, and how many.
        answer: the vote: turns voters into answers.
        admission: decides which queries join, given their answers.
    """
    batch = len(queries)
    # Up to this many of the bank's rows may be evicted before the last query's turn. Searching for as many more than k
    # makes sure that the k nearest of those that remain are among the rows found.
    leaving = _most_that_leave(contents, batch - 1)
    found = contents.nearest_of(queries, [_widened(pool, leaving) for pool in pools])
    nearest = found
    if leaving:
        nearest = [near.nearest(pool.k) for near, pool in zip(found, pools, strict=True)]
    # The first sweep, from the guess that no query joins: all see the bank as it is.
    counts = contents.admitted.expand(batch, -1)  # (B, C)
    guess = _with_joins(answer(side_by_side(nearest)), admission, counts, contents.next_id)
    if batch < 2 or not bool((guess.joined[:-1] >= 0).any()):
        return guess  # no query joins before the last one, as was guessed
    queue = queue_of(contents)
    stored = contents.index.stored(queries)
    similarity = queries.double() @ stored.double().T  # (B, B), exact
    while True:
        timeline = _timeline(contents, queue, guess)
        voters = _voters(contents, pools, found, similarity, guess, timeline)
        outcomes = _with_joins(answer(voters), admission, timeline.admitted, contents.next_id)
        if _same_outcomes(guess, outcomes):
            return outcomes
        guess = outcomes


def _most_that_leave(contents: Contents, joining: int) -> int:
    """The most rows of the bank that can be evicted if up to ``joining`` queries join."""
    capacity = contents.settings.capacity
    if capacity is None or joining < 1:
        return 0
    excess = int(contents.admitted.sum()) + joining - capacity
    return min(joining, max(0, excess))


def _widened(pool: Pool, leaving: int) -> Pool:
    """The pool with ``leaving`` more rows, unless it has source rows only, which never leave."""
    if pool.source:
        return pool
    return pool._replace(k=pool.k + leaving)


def _with_joins(answered: Prediction, admission: Admission, counts: Tensor, next_id: int) -> Prediction:
    """The answers, and for each query that is admitted the id under which it would join.

    Args:
        answered: answers that say nothing about who joins.
        admission: decides which queries join.
        counts: (B, C) how many admitted rows of each class may vote at each query's turn.
        next_id: the id of the first query that joins; the others follow in order.
    """
    admitted = array_if_on_cpu(admission(answered, counts))
    ids = admitted.cumsum(0) + (next_id - 1)
    ids[~admitted] = -1
    return with_fields(answered, joined=torch.as_tensor(ids), provisional=next_id)


@dataclass(frozen=True)
class _Timeline:
    """Which rows are held at each turn if a guess is right."""

    last_turn: Tensor  # (B,) the last turn at which each query of the batch may vote, if it joins at all
    admitted: Tensor  # (B, C) how many admitted rows of each class may vote at each turn
    evicted: list[tuple[int, int]]  # the id of each row of the bank that leaves, and the turn at whose end it does


def _timeline(contents: Contents, queue: Eviction | None, guess: Prediction) -> _Timeline:
    """Follows a guess turn by turn."""
    batch = len(guess.joined)
    device = guess.joined.device
    joins = guess.joined >= 0
    # Row 0 holds the numbers of admitted rows at turn 0, row t + 1 by how much they change at the end of turn t. Their
    # running sum is therefore the numbers at each turn.
    count_changes = torch.zeros(batch + 1, contents.settings.classes, dtype=torch.int64, device=device)
    count_changes[0] = contents.admitted
    count_changes[1:].scatter_add_(1, guess.labels[:, None], joins.long()[:, None])
    last_turn = torch.full((batch,), batch, device=device)
    evicted = []
    if queue is not None:
        queue = queue.copy()  # the next sweep starts from the same queue
        turns = joins.nonzero()[:, 0].tolist()
        for turn, label in zip(turns, guess.labels[joins].tolist(), strict=True):
            row, label_of_row = queue.push(int(guess.joined[turn]), label)
            if row < 0:
                continue  # there was room, so no row leaves
            count_changes[turn + 1, label_of_row] -= 1
            if row < contents.next_id:
                evicted.append((row, turn))
            else:  # a query of this batch, found by its id: those that join get consecutive ids from next_id on
                turn_of_row = turns[row - contents.next_id]
                last_turn[turn_of_row] = turn
    return _Timeline(last_turn, count_changes.cumsum(0)[:-1], evicted)


def _voters(
    contents: Contents,
    pools: Sequence[Pool],
    found: Sequence[Neighbors],
    similarity: Tensor,
    guess: Prediction,
    timeline: _Timeline,
) -> Neighbors:
    """The rows that vote on each query if the guess is right.

    Args:
        contents: the contents of the bank before the batch.
        pools: which rows vote on a query, and how many.
        found: for each pool, the nearest rows of the bank, including some to spare for those that leave.
        similarity: (B, B) of each query to each query of the batch as it would be stored.
        guess: the outcome of each query.
        timeline: what the guess entails.
    """
    batch = len(similarity)
    turn = torch.arange(batch, device=similarity.device)
    earlier = turn < turn[:, None]  # (B, B) whether the query of the column comes before that of the row
    visible = earlier & (guess.joined >= 0) & (timeline.last_turn >= turn[:, None])
    soft = None
    if contents.settings.soft:
        soft = guess.probs.expand(batch, *guess.probs.shape)
    joined = guess.joined.expand_as(similarity)
    labels = guess.labels.expand_as(similarity)
    of_batch = Neighbors(joined, similarity, labels, soft).without(~visible)
    voters = []
    for near, pool in zip(found, pools, strict=True):
        if pool.source:  # queries do not join the source
            voters.append(near.nearest(pool.k))
        else:
            remaining = near.without(_gone(near, timeline.evicted))
            # Queries of the batch come last, since their ids are higher: a stable sort leaves ties in this order.
            candidates = side_by_side([remaining, of_batch])
            voters.append(candidates.nearest(pool.k))
    return side_by_side(voters)


def _gone(near: Neighbors, evicted: list[tuple[int, int]]) -> Tensor:
    """Whether each neighbor has been evicted before its query's turn, (B, K) bool."""
    if not evicted:
        return torch.zeros_like(near.ids, dtype=torch.bool)
    device = near.ids.device
    by_row = torch.tensor(sorted(evicted), device=device)  # (E, 2)
    rows = by_row[:, 0].contiguous()
    turns = by_row[:, 1]
    place = torch.searchsorted(rows, near.ids)  # (B, K), len(rows) for ids larger than all of them
    place = place.clamp(max=len(rows) - 1)
    leaves = rows[place] == near.ids
    turn = torch.arange(len(near.ids), device=device)[:, None]  # (B, 1)
    gone: Tensor = leaves & (turns[place] < turn)
    return gone


def _same_outcomes(guess: Prediction, outcomes: Prediction) -> bool:
    """Whether the same queries join with the same answers.

    The last query is not compared, since no query comes after it. Nor are the answers of queries that do not join,
    since they alter nothing. Answers are compared by their probabilities, which vote in banks with soft labels.
    """
    joined = guess.joined[:-1]
    if not torch.equal(joined, outcomes.joined[:-1]):
        return False
    joins = joined >= 0
    guessed = guess.probs[:-1][joins]
    found = outcomes.probs[:-1][joins]
    return torch.equal(guessed, found)
