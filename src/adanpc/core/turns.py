"""Answers the queries of a batch one after another, with the preset "safe", but searches the bank for many at once.

The two needs conflict. Where a query is compared with rows (its frame) depends on which earlier queries joined the
bank, and whether a query joins depends on what a search in its frame finds. So the work is done in rounds:

1. Guess which of the remaining queries will join. The frames of all of them follow from that.
2. Search the bank in these frames, for all of them together.
3. Answer the queries in turn, for as long as the guess proves right.

The first query for which the guess is wrong still gets the right answer, because its own frame depends only on earlier
queries, for which the guess was right. The next round starts after it, with a better guess: what this round found near
the other queries, in frames that are only slightly wrong. Most batches need one or two rounds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from adanpc.core.changes import Append
from adanpc.core.contents import Contents
from adanpc.core.eviction import Eviction
from adanpc.core.guard import BLOCK, is_copy
from adanpc.core.safe import (
    SOURCE_POOL,
    STREAM_POOL,
    STREAM_ROWS,
    Belief,
    Evidence,
    Frame,
    Frozen,
    SafeSettings,
    Witnesses,
    believe,
    evidence_of,
    frames_apart,
    frames_of,
    frozen_answers,
    frozen_queries,
    joining,
    mixed_at_least,
    novelty_of,
    prediction_of,
    products_for,
    transformed_by,
    vote_of_source,
)
from adanpc.core.types import Neighbors, Origin, Prediction, one_after_another, with_fields
from adanpc.index import unit
from adanpc.index.grid import Array, to_main_memory
from adanpc.index.protocol import Products


def propose(
    contents: Contents, queue: Eviction | None, features: Tensor, settings: SafeSettings
) -> tuple[Prediction, Append | None, Tensor | None]:
    """Returns the answers to queries (B, D) that arrive in this order, the change that adds them, and its unit rows.

    Args:
        contents: what the bank holds when the first query arrives.
        queue: the order in which rows are evicted, which is used up here; None without a capacity.
        features: the queries, already checked.
        settings: the settings of the preset.
    """
    turns = _Turns(contents, queue, transformed_by(contents, features), settings)
    turns.answer_all()
    return turns.prediction(), turns.change(), turns.rows()


class Found(NamedTuple):
    """What one round found near its R queries, in the frames that follow from the guess."""

    frames: list[Frame]
    rows: Tensor  # (R, D) float32, the queries as they would join
    queries: Tensor  # (R, D) the same rows at length one
    stored: Tensor  # (R, D) float64, the values that would be read back from storage
    source: Neighbors  # among source rows
    weights: Tensor  # (R, K) the weights of the source rows in the vote
    evidence: list[Evidence]
    stream: list[Witnesses]  # among rows of the stream
    similarity: Array  # (R, F + R) to the F rows that joined in earlier rounds, and to each other


class _Turns:
    """The state of a batch between two of its queries."""

    def __init__(self, contents: Contents, queue: Eviction | None, transformed: Tensor, settings: SafeSettings) -> None:
        self.contents = contents
        self.queue = queue
        self.transformed = transformed
        self.arrays = to_main_memory(transformed)
        self.settings = settings
        self.known = contents.stream()  # what is known of the stream before the next query
        self.calibration = contents.calibration()
        self.answers: list[Belief] = []
        self.parts: list[tuple[Neighbors, Tensor]] = []  # source rows and their weights, one pair per round
        self.joined: list[int] = []  # ids of the queries answered so far, -1 for those that did not join
        self.gone: list[int] = []  # ids of rows that have been evicted since the batch began
        # The queries of this batch that have joined. Those of one round are kept in one tensor.
        self.fresh_ids: list[int] = []
        self.fresh_rows: list[Tensor] = []  # (n, D) float32 each
        self.fresh_queries: list[Tensor] = []  # (n, D) each, the same at length one
        self.fresh_stored: list[Tensor] = []  # (n, D) float64 each, as read back from storage
        # In arrays with room for all queries, of which as many rows are used as queries have joined:
        self.fresh_beliefs = numpy.empty((len(transformed), contents.settings.classes), numpy.float32)
        self.fresh_labels = numpy.empty(len(transformed), numpy.int64)
        self.first_search: Found | None = None
        self.products: Products | None = None  # of all rows, by which searches of the next rounds are faster
        self.frozen = self._search_frozen()
        self.frozen_labels = self.frozen.probs.argmax(1).tolist()
        self.frozen_probs = to_main_memory(self.frozen.probs)
        self.novelty: list[float] = []  # of the queries answered so far
        self.guess = [self._looks_known(distance) for distance in self.frozen.distance]  # whether each will join

    def answer_all(self) -> None:
        """Answers every query."""
        while len(self.answers) < len(self.transformed):
            self._round()

    # Searching

    def _search_frozen(self) -> Frozen:
        """Returns the frozen answers to all queries.

        A single query is searched for in both of its frames at once, which saves a pass over all rows.
        """
        still = frozen_queries(self.contents, self.transformed)
        if len(still) != 1:
            self.products = products_for(self.contents, still)
            near = self.contents.nearest_of(still, [SOURCE_POOL], products=self.products)[0]
            return frozen_answers(self.contents, near)
        frames = frames_apart(self.contents, self.transformed, self.settings)
        rows = joining(frames, self.transformed)
        source, stream = self.contents.nearest_of(torch.cat([still, unit(rows)]), [SOURCE_POOL, STREAM_POOL])
        frozen = frozen_answers(self.contents, source.of(slice(0, 1)))
        self.first_search = self._found(frames, rows, source.of(slice(1, None)), stream.of(slice(1, None)))
        return frozen

    def _search(self) -> Found:
        """Searches for the remaining queries in the frames that they have if the guess is right."""
        left = range(len(self.answers), len(self.transformed))
        means: list[Array] = []
        mixed: list[float] = []
        arrivals = self.known.arrivals
        least_mixed = mixed_at_least(self.settings, self.known)
        block = arrivals.count // BLOCK
        for query in left:
            # When a block ends, beliefs that are not known yet decide again whether classes arrive mixed.
            if arrivals.count // BLOCK > block:
                break
            means.append(arrivals.mean_with(self.arrays[query]))
            mixed.append(max(least_mixed, arrivals.mixed()))
            if self.guess[query]:
                arrivals = arrivals.after(means[-1], self.frozen_labels[query])
        transformed = self.transformed[left.start : left.start + len(means)]
        frames = frames_of(self.contents.transform(), transformed, means, mixed)
        rows = joining(frames, transformed)
        # Up to this many rows may be evicted before the last query's turn, so as many spare ones are searched for.
        leaving = 0 if self.queue is None else len(self.transformed)
        pools = [SOURCE_POOL, STREAM_POOL._replace(k=STREAM_ROWS + leaving)]
        source, stream = self.contents.nearest_of(unit(rows), pools, products=self.products)
        return self._found(frames, rows, source, stream)

    def _found(self, frames: list[Frame], rows: Tensor, source: Neighbors, stream: Neighbors) -> Found:
        queries = unit(rows)
        stored = self.contents.index.stored(queries).double()
        columns = stored
        if self.fresh_stored:
            columns = torch.cat([*self.fresh_stored, stored])
        similarity = to_main_memory(queries.double() @ columns.T)  # exact
        probs, weights = vote_of_source(self.contents, source)
        evidence = evidence_of(source, probs)
        witnesses = Witnesses.of_each(stream)
        return Found(frames, rows, queries, stored, source, weights, evidence, witnesses, similarity)

    # Answering

    def _round(self) -> None:
        """Answers queries up to and including the first one for which the guess is wrong."""
        found = self.first_search
        self.first_search = None
        if found is None:
            found = self._search()
        first = len(self.answers)
        earlier = len(self.fresh_ids)
        columns = list(range(earlier))  # of ``found.similarity`` that belong to rows that have joined
        for number in range(len(found.frames)):
            query = first + number
            witnesses = self._witnesses(found, number, columns)
            joins = self._answer(query, found, number, witnesses)
            if joins:
                columns.append(earlier + number)
            if joins != self.guess[query]:
                self._guess_again(found, number + 1, columns, earlier)
                break
        joined = [column - earlier for column in columns[earlier:]]
        if joined:
            self.fresh_rows.append(found.rows[joined])
            self.fresh_queries.append(found.queries[joined])
            self.fresh_stored.append(found.stored[joined])
        answered = slice(0, len(self.answers) - first)
        self.parts.append((found.source.of(answered), found.weights[answered]))

    def _answer(self, query: int, found: Found, number: int, witnesses: Witnesses) -> bool:
        """Answers a query and returns whether it joins."""
        frame = found.frames[number]
        evidence = found.evidence[number]
        frozen = self.frozen_probs[query]
        far = self.frozen.distance[query]
        belief = believe(self.settings, self.calibration, self.known, frame, frozen, far, evidence, witnesses)
        self.answers.append(belief)
        novelty = self._novelty(query, evidence)
        self.novelty.append(novelty)
        if not self._joins(novelty, evidence, witnesses.similarity):
            self.joined.append(-1)
            return False
        place = len(self.fresh_ids)
        row = self.contents.next_id + place
        self.joined.append(row)
        self.fresh_ids.append(row)
        self.fresh_beliefs[place] = belief.passed_on
        self.fresh_labels[place] = self.fresh_beliefs[place].argmax()
        arrivals = self.known.arrivals.after(frame.mean, self.frozen_labels[query])
        self.known = self.known.after(arrivals, belief.after, belief.agreements, belief.alarm, novelty)
        if self.queue is not None:
            left, _ = self.queue.push(row, int(self.fresh_labels[place]))
            if left >= 0:
                self.gone.append(left)
        return True

    def _looks_known(self, distance: float) -> bool:
        """Guesses whether a query is familiar, given its distance from source rows in the frozen frame."""
        if not self.settings.screen:
            return True
        return not self.known.takes_for_foreign(self.contents.transform().novelty(1 - distance))

    def _novelty(self, query: int, evidence: Evidence) -> float:
        return novelty_of(self.contents.transform(), self.frozen.distance[query], evidence)

    def _joins(self, novelty: float, evidence: Evidence, similarity: Array) -> bool:
        """Returns whether a query joins, given its similarity (k,) to the nearest rows of the stream."""
        if not self.settings.screen:
            return True
        return not self.known.takes_for_foreign(novelty) and not is_copy(evidence.distance, similarity)

    def _witnesses(self, found: Found, number: int, columns: list[int]) -> Witnesses:
        """Returns the nearest rows of the stream to a query of this round, including earlier queries of the batch."""
        old = found.stream[number]
        count = len(columns)
        if not count:  # nothing has joined, so nothing was evicted either
            return Witnesses(*(column[:STREAM_ROWS] for column in old))
        beliefs = numpy.concatenate([old.beliefs, self.fresh_beliefs[:count]])
        labels = numpy.concatenate([old.labels, self.fresh_labels[:count]])
        first = self.contents.next_id
        ids = numpy.concatenate([old.ids, numpy.arange(first, first + count)])
        similarity = numpy.concatenate([old.similarity, found.similarity[number, columns]])
        if self.gone:
            held = ~numpy.isin(ids, self.gone)
            ids = ids[held]
            similarity = similarity[held]
            labels = labels[held]
            beliefs = beliefs[held]
        # Fresh rows come last because their ids are higher, and a stable sort keeps ties in this order.
        nearest = numpy.argsort(-similarity, kind="stable")[:STREAM_ROWS]
        return Witnesses(ids[nearest], similarity[nearest], labels[nearest], beliefs[nearest])

    def _guess_again(self, found: Found, start: int, columns: list[int], earlier: int) -> None:
        """Guesses again which queries from number ``start`` on will join, by what this round found near them.

        Evictions are ignored, since a guess need not be right.
        """
        first = len(self.answers) - start
        expected = list(columns)
        for number in range(start, len(found.frames)):
            near = found.stream[number].similarity
            near = numpy.sort(numpy.concatenate([near, found.similarity[number, expected]]))[::-1]
            evidence = found.evidence[number]
            joins = self._joins(self._novelty(first + number, evidence), evidence, near)
            self.guess[first + number] = joins
            if joins:
                expected.append(earlier + number)

    # Results

    def prediction(self) -> Prediction:
        """Returns all answers. Their ids are provisional until the change is applied."""
        device = self.transformed.device
        joined = torch.tensor(self.joined, dtype=torch.int64, device=device)
        if not self.parts:
            self.parts.append((self.frozen.neighbors, self.frozen.weights))
        source = one_after_another([near for near, _ in self.parts])
        weights = torch.cat([weight for _, weight in self.parts])
        prediction = prediction_of(self.contents, self.frozen, source, weights, self.answers, self.novelty, joined)
        return with_fields(prediction, provisional=self.contents.next_id)

    def change(self) -> Append | None:
        """Returns the change that adds the queries that join; None if none does."""
        if not self.fresh_ids:
            return None
        device = self.transformed.device
        soft = torch.from_numpy(self.fresh_beliefs[: len(self.fresh_ids)]).to(device)
        return Append(
            torch.cat(self.fresh_rows),
            soft.argmax(1),
            Origin.ADMITTED,
            soft=soft,
            confidence=soft.amax(1),
            centered=True,
            stream=self.known.packed().to(device),
        )

    def rows(self) -> Tensor | None:
        """Returns the features of the change at length one; None if there is no change."""
        if not self.fresh_ids:
            return None
        return torch.cat(self.fresh_queries)
