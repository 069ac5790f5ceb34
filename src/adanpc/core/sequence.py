"""Why a batch answers as its queries would one by one, and how.

Queries arrive in order. Each is answered by the rows held at its turn, which include earlier queries of the same batch
that joined, and not those that were evicted for them. So who joins depends on answers, and answers on who joined.

That circle is resolved by guessing. The first guess is that nobody joins. All queries are answered as if the guess were
true, and their answers say who would join then: the next guess. When a guess and the answers under it agree, it stands.

* It ends. The answer to query t depends on the queries before t alone. If the guess is right about the first t of them,
  then so is the answer to query t, and the next guess is right about the first t + 1. So every sweep settles at least
  one more query. In practice a few sweeps settle all: most answers do not depend on the batch.
* It ends at the right place. A guess that stands is, by the same induction, that of answering one by one.

Similarities are exact, so a sweep for the whole batch gives the bits that single queries would; see ``index.grid``.
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
        contents: of the bank when the first one arrives.
        queue_of: gives a queue of contents' evictions, None without a capacity.
        queries: as ``unit`` returns them.
        pools: who votes.
        answer: from voters to an answer.
        admission: from an answer to whether the query joins.
    """
    batch = len(queries)
    # Up to this many of the nearest rows may be evicted before the last query's turn, so as many more are searched for.
    leaving = _most_that_leave(contents, batch - 1)
    wider = [_with_room(pool, leaving) for pool in pools]
    found = contents.nearest_of(queries, wider)
    first = found
    if leaving:
        first = [near.nearest(pool.k) for near, pool in zip(found, pools, strict=True)]
    held = contents.admitted.expand(batch, -1)  # (B, C)
    # The second guess already: who joins, by their answers, if nobody joins before them.
    guess = _with_joins(answer(side_by_side(first)), admission, held, contents.next_id)
    if batch < 2 or not bool((guess.joined[:-1] >= 0).any()):
        return guess  # nobody joins before the last query: the first guess stands
    queue = queue_of(contents)
    stored = contents.index.stored(queries)
    similarity = queries.double() @ stored.double().T  # (B, B), exact
    while True:
        timeline = _timeline(contents, queue, guess)
        voters = _voters(contents, pools, found, similarity, guess, timeline)
        answered = _with_joins(answer(voters), admission, timeline.held, contents.next_id)
        if _stands(guess, answered):
            return answered
        guess = answered


def _most_that_leave(contents: Contents, joining: int) -> int:
    """How many rows of the bank could be evicted if so many queries joined."""
    capacity = contents.settings.capacity
    if capacity is None or joining < 1:
        return 0
    too_many = int(contents.admitted.sum()) + joining - capacity
    return min(joining, max(0, too_many))


def _with_room(pool: Pool, leaving: int) -> Pool:
    """The pool with so many more rows; source rows never leave."""
    if pool.source:
        return pool
    return pool._replace(k=pool.k + leaving)


def _with_joins(answered: Prediction, admission: Admission, held: Tensor, next_id: int) -> Prediction:
    """The answers with the ids under which the admitted ones would join."""
    admitted = array_if_on_cpu(admission(answered, held))
    ids = admitted.cumsum(0) + (next_id - 1)
    ids[~admitted] = -1
    return with_fields(answered, joined=torch.as_tensor(ids), provisional=next_id)


@dataclass(frozen=True)
class _Timeline:
    """What a guess entails."""

    until: Tensor  # (B,) the last turn at which each query of the batch, if it joined, may vote
    held: Tensor  # (B, C) admitted rows of each class that may vote at each turn
    evicted: list[tuple[int, int]]  # rows of the bank that leave, and the turn after which they are gone


def _timeline(contents: Contents, queue: Eviction | None, guess: Prediction) -> _Timeline:
    batch = len(guess.joined)
    device = guess.joined.device
    joins = guess.joined >= 0
    # How many admitted rows of each class there are at first, and by how many they change after each turn.
    count_changes = torch.zeros(batch + 1, contents.settings.classes, dtype=torch.int64, device=device)
    count_changes[0] = contents.admitted
    count_changes[1:].scatter_add_(1, guess.labels[:, None], joins.long()[:, None])
    until = torch.full((batch,), batch, device=device)
    evicted = []
    if queue is not None:
        queue = queue.copy()
        turns = joins.nonzero()[:, 0].tolist()
        for turn, label in zip(turns, guess.labels[joins].tolist(), strict=True):
            row, left_label = queue.push(int(guess.joined[turn]), label)
            if row < 0:
                continue  # there was room: nobody leaves
            count_changes[turn + 1, left_label] -= 1
            if row < contents.next_id:
                evicted.append((row, turn))
            else:  # a query of this batch; those that join get consecutive ids from next_id on
                until[turns[row - contents.next_id]] = turn
    return _Timeline(until, count_changes.cumsum(0)[:-1], evicted)


def _voters(
    contents: Contents,
    pools: Sequence[Pool],
    found: Sequence[Neighbors],
    similarity: Tensor,
    guess: Prediction,
    timeline: _Timeline,
) -> Neighbors:
    """Who votes for each query if the guess is true."""
    batch = len(similarity)
    turn = torch.arange(batch, device=similarity.device)
    earlier = turn < turn[:, None]  # (B, B)
    visible = earlier & (guess.joined >= 0) & (timeline.until >= turn[:, None])
    soft = None
    if contents.settings.soft:
        soft = guess.probs.expand(batch, *guess.probs.shape)
    joined = guess.joined.expand_as(similarity)
    labels = guess.labels.expand_as(similarity)
    fresh = Neighbors(joined, similarity, labels, soft).without(~visible)
    sides = []
    for near, pool in zip(found, pools, strict=True):
        if pool.source:
            sides.append(near.nearest(pool.k))
        else:
            # Fresh rows come last: their ids are higher, and a stable sort leaves ties in this order.
            sides.append(side_by_side([near.without(_gone(near, timeline.evicted)), fresh]).nearest(pool.k))
    return side_by_side(sides)


def _gone(near: Neighbors, evicted: list[tuple[int, int]]) -> Tensor:
    """Which neighbors have left the bank before the query's turn, (B, K)."""
    if not evicted:
        return torch.zeros_like(near.ids, dtype=torch.bool)
    device = near.ids.device
    by_row = torch.tensor(sorted(evicted), device=device)  # (E, 2)
    rows = by_row[:, 0].contiguous()
    turns = by_row[:, 1]
    last = len(rows) - 1  # a row that is higher than all would be looked for behind the end
    place = torch.searchsorted(rows, near.ids).clamp(max=last)  # (B, K)
    leaves = rows[place] == near.ids
    turn = torch.arange(len(near.ids), device=device)[:, None]  # (B, 1)
    gone: Tensor = leaves & (turns[place] < turn)
    return gone


def _stands(guess: Prediction, answered: Prediction) -> bool:
    """Whether the same queries, but for the last, which nobody comes after, join with the same answers."""
    joined = guess.joined[:-1]
    if not torch.equal(joined, answered.joined[:-1]):
        return False
    joins = joined >= 0
    guessed = guess.probs[:-1][joins]
    found = answered.probs[:-1][joins]
    return torch.equal(guessed, found)  # not their labels alone: in banks with soft labels, probabilities vote
