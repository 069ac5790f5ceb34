"""Queries of the preset "safe" answered one after another, though the bank is searched for many of them at once.

Where a query is compared with rows depends on which of the earlier ones joined, and whether a query joins depends on
what is near it there: on a search. So it is guessed who will join; all queries that are left are searched for in the
frames that follow; and they are answered in turn for as long as the guess proves right. The first one for which it
does not is answered rightly all the same, since the guess was right for all before it. From the next one on, all is
done again, with a better guess: what was found near the others in slightly wrong frames. Mostly, one round is enough.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from adanpc.core.changes import Append
from adanpc.core.contents import Contents
from adanpc.core.eviction import Eviction
from adanpc.core.guard import BLOCK, FOREIGN, Stream, is_copy
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
    frame_of,
    frames_apart,
    frozen_answers,
    frozen_queries,
    joining,
    mixed_at_least,
    novelty_of,
    prediction_of,
    transformed_by,
    vote_of_source,
)
from adanpc.core.types import Neighbors, Origin, Prediction, one_after_another, with_fields
from adanpc.index import unit
from adanpc.index.grid import Array, to_main_memory


def propose(
    contents: Contents, queue: Eviction | None, features: Tensor, settings: SafeSettings
) -> tuple[Prediction, Append | None, Tensor | None]:
    """The answers to queries (B, D) that arrive in this order, the change by which they join, and its unit rows.

    Args:
        contents: of the bank when the first one arrives.
        queue: of its evictions, which is used up; None without a capacity.
        features: checked.
        settings: of the preset.
    """
    turns = _Turns(contents, queue, transformed_by(contents, features), settings)
    turns.answer_all()
    return turns.prediction(), turns.change(), turns.rows()


class Found(NamedTuple):
    """What was found near the queries that are left, in the frames of a guess."""

    frames: list[Frame]
    rows: Tensor  # (R, D) float32, as they would join
    queries: Tensor  # (R, D) the same at length one
    stored: Tensor  # (R, D) float64, what they would be read back as
    source: Neighbors
    weights: Tensor  # (R, K) of the source rows
    evidence: list[Evidence]
    stream: Neighbors
    similarity: Array  # (R, F + R) to the rows that joined in earlier rounds, and to each other


class _Turns:
    """The state between two queries; see above."""

    def __init__(self, contents: Contents, queue: Eviction | None, transformed: Tensor, settings: SafeSettings) -> None:
        self.contents = contents
        self.queue = queue
        self.transformed = transformed
        self.settings = settings
        self.known = contents.stream()  # of the stream, before the next query
        self.calibration = contents.calibration()
        self.answers: list[Belief] = []
        self.parts: list[tuple[Neighbors, Tensor]] = []  # source rows and their weights, of the queries of each round
        self.joined: list[int] = []  # the id of each query that was answered, -1 if it did not join
        self.gone: list[int] = []  # ids of rows that were evicted
        self.fresh_ids: list[int] = []
        self.fresh_beliefs: list[Array] = []  # (C,) float32 each
        self.fresh_rows: list[Tensor] = []  # (D,) float32 each, as they join
        self.fresh_queries: list[Tensor] = []  # (D,) the same at length one
        self.fresh_stored: list[Tensor] = []  # (D,) float64 each, as they are read back
        self.first_search: Found | None = None
        self.frozen = self._search_frozen()
        self.frozen_labels = self.frozen.probs.argmax(1).tolist()
        self.frozen_probs = to_main_memory(self.frozen.probs)
        self.novelty: list[float] = []  # of each query that was answered
        self.guess = [self._looks_known(distance) for distance in self.frozen.distance]  # who will join

    def answer_all(self) -> None:
        """Answers all queries."""
        while len(self.answers) < len(self.transformed):
            self._round()

    # Searching

    def _search_frozen(self) -> Frozen:
        """The frozen answers to all queries. A single query is searched for in both frames at once."""
        still = frozen_queries(self.contents, self.transformed)
        if len(still) != 1:
            near = self.contents.nearest_of(still, [SOURCE_POOL])[0]
            return frozen_answers(self.contents, near)
        frames = frames_apart(self.contents, self.transformed, self.settings)
        rows = joining(frames, self.transformed)
        source, stream = self.contents.nearest_of(torch.cat([still, unit(rows)]), [SOURCE_POOL, STREAM_POOL])
        frozen = frozen_answers(self.contents, source.of(slice(0, 1)))
        self.first_search = self._found(frames, rows, source.of(slice(1, None)), stream.of(slice(1, None)))
        return frozen

    def _search(self) -> Found:
        """What is near the queries that are left, if those join of whom it is guessed."""
        left = range(len(self.answers), len(self.transformed))
        frames = []
        arrivals = self.known.arrivals
        mixed = mixed_at_least(self.settings, self.known)
        block = arrivals.count // BLOCK
        transform = self.contents.transform()
        for query in left:
            # Whether classes arrive mixed is looked at again when a block ends, by beliefs that are not known yet.
            if arrivals.count // BLOCK > block:
                break
            frame = frame_of(transform, to_main_memory(self.transformed[query]), arrivals, mixed)
            frames.append(frame)
            if self.guess[query]:
                arrivals = arrivals.after(frame.mean, self.frozen_labels[query])
        rows = joining(frames, self.transformed[left.start : left.start + len(frames)])
        # As many rows may be evicted before the last query's turn; that many more are found, to take their place.
        leaving = 0 if self.queue is None else len(self.transformed)
        pools = [SOURCE_POOL, STREAM_POOL._replace(k=STREAM_ROWS + leaving)]
        source, stream = self.contents.nearest_of(unit(rows), pools)
        return self._found(frames, rows, source, stream)

    def _found(self, frames: list[Frame], rows: Tensor, source: Neighbors, stream: Neighbors) -> Found:
        queries = unit(rows)
        stored = self.contents.index.stored(queries).double()
        columns = stored
        if self.fresh_stored:
            columns = torch.cat([torch.stack(self.fresh_stored), stored])
        similarity = to_main_memory(queries.double() @ columns.T)  # exact
        probs, weights = vote_of_source(self.contents, source)
        return Found(frames, rows, queries, stored, source, weights, evidence_of(source, probs), stream, similarity)

    # Answering

    def _round(self) -> None:
        """Answers queries for as long as the guess proves right, and one more."""
        found = self.first_search
        self.first_search = None
        if found is None:
            found = self._search()
        first = len(self.answers)
        earlier = len(self.fresh_ids)
        columns = list(range(earlier))  # of the similarity, of rows that have joined
        for number in range(len(found.frames)):
            query = first + number
            witnesses = self._witnesses(found, number, columns)
            joins = self._answer(query, found, number, witnesses)
            if joins:
                columns.append(earlier + number)
            if joins != self.guess[query]:
                self._guess_again(found, number + 1, columns, earlier)
                break
        answered = slice(0, len(self.answers) - first)
        self.parts.append((found.source.of(answered), found.weights[answered]))

    def _answer(self, query: int, found: Found, number: int, witnesses: Witnesses) -> bool:
        """Answers a query; whether it joins."""
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
        row = self.contents.next_id + len(self.fresh_ids)
        self.joined.append(row)
        self.fresh_ids.append(row)
        self.fresh_beliefs.append(belief.passed_on.astype(numpy.float32))
        self.fresh_rows.append(found.rows[number])
        self.fresh_queries.append(found.queries[number])
        self.fresh_stored.append(found.stored[number])
        arrivals = self.known.arrivals.after(frame.mean, self.frozen_labels[query])
        self.known = Stream(arrivals, belief.after, self.known.verdicts, belief.agreements, belief.alarm)
        if self.queue is not None:
            left, _ = self.queue.push(row, int(self.fresh_beliefs[-1].argmax()))
            if left >= 0:
                self.gone.append(left)
        return True

    def _looks_known(self, distance: float) -> bool:
        """Whether a query at this distance from the source rows, where it came, seems not to be foreign."""
        if not self.settings.screen:
            return True
        return self.contents.transform().novelty(1 - distance) <= FOREIGN

    def _novelty(self, query: int, evidence: Evidence) -> float:
        return novelty_of(self.contents.transform(), self.frozen.distance[query], evidence)

    def _joins(self, novelty: float, evidence: Evidence, similarity: Array) -> bool:
        """Whether there is something to learn from a query, given its similarity (k,) to rows of the stream."""
        if not self.settings.screen:
            return True
        return novelty <= FOREIGN and not is_copy(evidence.distance, similarity)

    def _witnesses(self, found: Found, number: int, columns: list[int]) -> Witnesses:
        """The nearest rows of the stream to a query that is left, earlier queries of the batch among them."""
        old = Witnesses.among(found.stream, number)
        if not columns:  # then nothing was evicted either
            return Witnesses(*(column[:STREAM_ROWS] for column in old))
        fresh = numpy.stack(self.fresh_beliefs)
        beliefs = numpy.concatenate([old.beliefs, fresh])
        labels = numpy.concatenate([old.labels, fresh.argmax(1)])
        ids = numpy.concatenate([old.ids, numpy.array(self.fresh_ids, dtype=numpy.int64)])
        similarity = numpy.concatenate([old.similarity, found.similarity[number, columns]])
        if self.gone:
            held = ~numpy.isin(ids, self.gone)
            ids = ids[held]
            similarity = similarity[held]
            labels = labels[held]
            beliefs = beliefs[held]
        # Fresh rows come last: their ids are higher, and a stable sort leaves ties in this order.
        nearest = numpy.argsort(-similarity, kind="stable")[:STREAM_ROWS]
        return Witnesses(ids[nearest], similarity[nearest], labels[nearest], beliefs[nearest])

    def _guess_again(self, found: Found, start: int, columns: list[int], earlier: int) -> None:
        """Guesses who of the queries from number ``start`` on will join, by what is near them in the frames searched.

        Evictions are left out: a guess need not be right.
        """
        first = len(self.answers) - start
        expected = list(columns)
        for number in range(start, len(found.frames)):
            near = Witnesses.among(found.stream, number).similarity
            near = numpy.sort(numpy.concatenate([near, found.similarity[number, expected]]))[::-1]
            evidence = found.evidence[number]
            joins = self._joins(self._novelty(first + number, evidence), evidence, near)
            self.guess[first + number] = joins
            if joins:
                expected.append(earlier + number)

    # Results

    def prediction(self) -> Prediction:
        """All answers, with ids that are provisional."""
        device = self.transformed.device
        joined = torch.tensor(self.joined, dtype=torch.int64, device=device)
        if not self.parts:
            self.parts.append((self.frozen.neighbors, self.frozen.weights))
        source = one_after_another([near for near, _ in self.parts])
        weights = torch.cat([weight for _, weight in self.parts])
        prediction = prediction_of(self.contents, self.frozen, source, weights, self.answers, self.novelty, joined)
        return with_fields(prediction, provisional=self.contents.next_id)

    def change(self) -> Append | None:
        """The change by which those join that do."""
        if not self.fresh_ids:
            return None
        device = self.transformed.device
        soft = torch.from_numpy(numpy.stack(self.fresh_beliefs)).to(device)
        return Append(
            torch.stack(self.fresh_rows),
            soft.argmax(1),
            Origin.ADMITTED,
            soft=soft,
            confidence=soft.amax(1),
            centered=True,
            stream=self.known.packed().to(device),
        )

    def rows(self) -> Tensor | None:
        """What ``unit`` makes of the features of the change."""
        if not self.fresh_ids:
            return None
        return torch.stack(self.fresh_queries)
