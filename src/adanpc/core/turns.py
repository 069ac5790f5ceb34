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
from adanpc.core.guard import BLOCK, Stream, is_copy
from adanpc.core.safe import (
    SOURCE_POOL,
    STREAM_POOL,
    STREAM_ROWS,
    Answer,
    Evidence,
    Frame,
    Frozen,
    SafeSettings,
    Witnesses,
    answer_to,
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
    to_joined: Array  # (R, F) their similarity to the F queries that joined in earlier rounds
    to_each_other: Array  # (R, R)


class _Joined:
    """The queries of a batch that have joined so far, in the order in which they came.

    Args:
        first_id: the id of the first of them.
        most: how many there may be.
        classes: the number of classes.
    """

    def __init__(self, first_id: int, most: int, classes: int) -> None:
        self.count = 0
        self._first_id = first_id
        # As many rows of these are used as queries have joined:
        self._beliefs = numpy.empty((most, classes), numpy.float32)
        self._labels = numpy.empty(most, numpy.int64)
        # One tensor for each round that has ended:
        self._rows: list[Tensor] = []  # (n, D) float32
        self._queries: list[Tensor] = []  # (n, D) the same at length one
        self._stored: list[Tensor] = []  # (n, D) float64, as read back from storage

    def add(self, belief: Array) -> tuple[int, int]:
        """Adds the next query by the belief (C,) that it joins with, and returns its id and its label."""
        place = self.count
        self._beliefs[place] = belief
        label = int(self._beliefs[place].argmax())
        self._labels[place] = label
        self.count += 1
        return self._first_id + place, label

    def end_round(self, found: Found, numbers: list[int]) -> None:
        """Adds the features of the queries with these numbers, which have joined in the round that ends."""
        if numbers:
            self._rows.append(found.rows[numbers])
            self._queries.append(found.queries[numbers])
            self._stored.append(found.stored[numbers])

    def stored_with(self, stored: Tensor) -> Tensor:
        """Returns what is stored of the queries of earlier rounds, followed by rows (R, D) of this one."""
        if not self._stored:
            return stored
        return torch.cat([*self._stored, stored])

    def witnesses(self, similarity: Array) -> Witnesses:
        """Returns these queries as rows of the stream, given their similarity (n,) to a query."""
        ids = numpy.arange(self._first_id, self._first_id + self.count)
        return Witnesses(ids, similarity, self._labels[: self.count], self._beliefs[: self.count])

    def change(self, stream: Stream, device: torch.device) -> Append:
        """Returns the change that adds these queries, given what is known of the stream after them."""
        soft = torch.from_numpy(self._beliefs[: self.count]).to(device)
        return Append(
            torch.cat(self._rows),
            soft.argmax(1),
            Origin.ADMITTED,
            soft=soft,
            confidence=soft.amax(1),
            centered=True,
            stream=stream.packed().to(device),
        )

    def queries(self) -> Tensor:
        """Returns the features of the change at length one."""
        return torch.cat(self._queries)


class _Turns:
    """The state of a batch between two of its queries."""

    def __init__(self, contents: Contents, queue: Eviction | None, transformed: Tensor, settings: SafeSettings) -> None:
        self.contents = contents
        self.queue = queue
        self.transformed = transformed
        self.arrays = to_main_memory(transformed)  # the same queries
        self.settings = settings
        self.known = contents.stream()  # what is known of the stream before the next query
        self.calibration = contents.calibration()
        # Of the queries answered so far:
        self.answers: list[Answer] = []
        self.novelty: list[float] = []
        self.ids: list[int] = []  # -1 for those that did not join
        self.joined = _Joined(contents.next_id, len(transformed), contents.settings.classes)
        self.parts: list[tuple[Neighbors, Tensor]] = []  # source rows and their weights, one pair per round
        self.gone: list[int] = []  # ids of rows that have been evicted since the batch began
        self.first_search: Found | None = None
        self.products: Products | None = None  # of all rows, by which searches of the next rounds are faster
        self.frozen = self._search_frozen()
        self.frozen_labels = self.frozen.probs.argmax(1).tolist()
        self.guess = [self._looks_known(evidence) for evidence in self.frozen.evidence]  # whether each will join

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
        remaining = range(len(self.answers), len(self.transformed))
        means: list[Array] = []
        mixed: list[float] = []
        arrivals = self.known.arrivals
        least_mixed = mixed_at_least(self.settings, self.known)
        block = arrivals.count // BLOCK
        for query in remaining:
            # When a block ends, beliefs that are not known yet decide again whether classes arrive mixed.
            if arrivals.count // BLOCK > block:
                break
            means.append(arrivals.mean_with(self.arrays[query]))
            mixed.append(max(least_mixed, arrivals.mixed()))
            if self.guess[query]:
                arrivals = arrivals.after(means[-1], self.frozen_labels[query])
        transformed = self.transformed[remaining.start : remaining.start + len(means)]
        frames = frames_of(self.contents.transform(), transformed, means, mixed)
        rows = joining(frames, transformed)
        stream_pool = STREAM_POOL
        if self.queue is not None:
            # A row may be evicted for each query before the last one's turn, so as many spare rows are searched for.
            stream_pool = STREAM_POOL._replace(k=STREAM_ROWS + len(self.transformed))
        source, stream = self.contents.nearest_of(unit(rows), [SOURCE_POOL, stream_pool], products=self.products)
        return self._found(frames, rows, source, stream)

    def _found(self, frames: list[Frame], rows: Tensor, source: Neighbors, stream: Neighbors) -> Found:
        queries = unit(rows)
        stored = self.contents.index.stored(queries).double()
        similarity = to_main_memory(queries.double() @ self.joined.stored_with(stored).T)  # exact
        earlier = similarity.shape[1] - len(queries)
        probs, weights = vote_of_source(self.contents, source)
        evidence = evidence_of(source, probs)
        witnesses = Witnesses.of_each(stream)
        return Found(
            frames=frames,
            rows=rows,
            queries=queries,
            stored=stored,
            source=source,
            weights=weights,
            evidence=evidence,
            stream=witnesses,
            to_joined=similarity[:, :earlier],
            to_each_other=similarity[:, earlier:],
        )

    # Answering

    def _round(self) -> None:
        """Answers queries up to and including the first one for which the guess is wrong."""
        found = self.first_search
        self.first_search = None
        if found is None:
            found = self._search()
        first = len(self.answers)
        joined: list[int] = []  # numbers of the queries of this round that have joined
        for number in range(len(found.frames)):
            query = first + number
            witnesses = self._witnesses(found, number, joined)
            joins = self._answer(query, found, number, witnesses)
            if joins:
                joined.append(number)
            if joins != self.guess[query]:
                self._guess_again(found, number + 1, joined)
                break
        self.joined.end_round(found, joined)
        answered = slice(0, len(self.answers) - first)
        self.parts.append((found.source.of(answered), found.weights[answered]))

    def _answer(self, query: int, found: Found, number: int, witnesses: Witnesses) -> bool:
        """Answers a query and returns whether it joins."""
        frame = found.frames[number]
        evidence = found.evidence[number]
        frozen = self.frozen.evidence[query]
        answer = answer_to(self.settings, self.calibration, self.known, frame, frozen, evidence, witnesses)
        self.answers.append(answer)
        novelty = self._novelty(query, evidence)
        self.novelty.append(novelty)
        if not self._joins(novelty, evidence, witnesses.similarity):
            self.ids.append(-1)
            return False
        row, label = self.joined.add(answer.passed_on)
        self.ids.append(row)
        arrivals = self.known.arrivals.after(frame.mean, self.frozen_labels[query])
        self.known = self.known.after(arrivals, answer.adapted, answer.agreements, answer.alarm, novelty)
        if self.queue is not None:
            evicted, _ = self.queue.push(row, label)
            if evicted >= 0:
                self.gone.append(evicted)
        return True

    def _looks_known(self, frozen: Evidence) -> bool:
        """Guesses whether a query is familiar, given what source rows say of it before it is moved."""
        if not self.settings.screen:
            return True
        return not self.known.takes_for_foreign(self.contents.transform().novelty(1 - frozen.distance))

    def _novelty(self, query: int, evidence: Evidence) -> float:
        return novelty_of(self.contents.transform(), self.frozen.evidence[query], evidence)

    def _joins(self, novelty: float, evidence: Evidence, similarity: Array) -> bool:
        """Returns whether a query joins, given its similarity (k,) to the nearest rows of the stream."""
        if not self.settings.screen:
            return True
        return not self.known.takes_for_foreign(novelty) and not is_copy(evidence.distance, similarity)

    def _witnesses(self, found: Found, number: int, joined: list[int]) -> Witnesses:
        """Returns the nearest rows of the stream to a query of this round, including earlier queries of the batch.

        Args:
            found: what the round found.
            number: the number of the query in this round.
            joined: numbers of the queries of this round that have joined before it.
        """
        old = found.stream[number]
        if not self.joined.count:  # nothing was evicted either
            return old.at(slice(0, STREAM_ROWS))
        fresh = self.joined.witnesses(_similarity_to_joined(found, number, joined))
        near = Witnesses(*(numpy.concatenate(columns) for columns in zip(old, fresh, strict=True)))
        if self.gone:
            near = near.at(~numpy.isin(near.ids, self.gone))
        # Fresh rows come last because their ids are higher, and a stable sort keeps ties in this order.
        return near.at(numpy.argsort(-near.similarity, kind="stable")[:STREAM_ROWS])

    def _guess_again(self, found: Found, start: int, joined: list[int]) -> None:
        """Guesses again which queries from number ``start`` on will join, by what this round found near them.

        Evictions are ignored, since a guess need not be right.
        """
        first = len(self.answers) - start
        expected = list(joined)
        for number in range(start, len(found.frames)):
            similarity = [found.stream[number].similarity, _similarity_to_joined(found, number, expected)]
            nearest = numpy.sort(numpy.concatenate(similarity))[::-1]
            evidence = found.evidence[number]
            joins = self._joins(self._novelty(first + number, evidence), evidence, nearest)
            self.guess[first + number] = joins
            if joins:
                expected.append(number)

    # Results

    def prediction(self) -> Prediction:
        """Returns all answers. Their ids are provisional until the change is applied."""
        device = self.transformed.device
        joined = torch.tensor(self.ids, dtype=torch.int64, device=device)
        if not self.parts:
            self.parts.append((self.frozen.neighbors, self.frozen.weights))
        source = one_after_another([near for near, _ in self.parts])
        weights = torch.cat([weight for _, weight in self.parts])
        prediction = prediction_of(self.contents, self.frozen, source, weights, self.answers, self.novelty, joined)
        return with_fields(prediction, provisional=self.contents.next_id)

    def change(self) -> Append | None:
        """Returns the change that adds the queries that join; None if none does."""
        if not self.joined.count:
            return None
        return self.joined.change(self.known, self.transformed.device)

    def rows(self) -> Tensor | None:
        """Returns the features of the change at length one; None if there is no change."""
        if not self.joined.count:
            return None
        return self.joined.queries()


def _similarity_to_joined(found: Found, number: int, joined: list[int]) -> Array:
    """Returns the similarity (n,) of a query to those that joined in earlier rounds, and in this one, in this order.

    Args:
        found: what the round found.
        number: the number of the query in this round.
        joined: numbers of the queries that have joined in this round.
    """
    return numpy.concatenate([found.to_joined[number], found.to_each_other[number, joined]])
