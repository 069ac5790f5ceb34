"""Queries: the latest answered queries, kept for people who look at them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from adanpc.core import Prediction
from adanpc.serve.errors import NotFoundError
from adanpc.store.answers import part_of
from adanpc.store.latest import Latest, latest_of

MOST = 500
SKIPPED = 1_000_000  # numbers skipped after an unclean shutdown, since queries that were not saved may have used them


@dataclass(frozen=True)
class Query:
    """A query and its answer."""

    number: int
    features: Tensor  # (D,)
    prediction: Prediction  # for all queries that were answered together with it
    place: int  # its place among them
    time: float  # seconds since 1970
    picture: bytes | None = None  # a small JPEG

    @property
    def name(self) -> str:
        """The name by which clients refer to it."""
        return f"q-{self.number}"

    @property
    def confidence(self) -> float:
        """The confidence of its answer."""
        return float(self.prediction.confidence[self.place])

    @property
    def own_rows(self) -> list[int]:
        """The id of the row that it became, in a list that is empty if it did not join."""
        row = int(self.prediction.joined[self.place])
        if row < 0:
            return []
        return [row]


@dataclass(frozen=True)
class KeptQueries:
    """Queries that were answered together. A ``Query`` is made only when somebody looks at it."""

    first: int  # the number of the first query
    features: Tensor  # (B, D)
    prediction: Prediction  # for these queries, and possibly others
    begin: int  # the place of the first query in the prediction
    time: float
    pictures: Sequence[bytes | None]  # of all queries, or only the first few

    def query(self, number: int) -> Query:
        """Returns the query with this number."""
        row = number - self.first
        picture = None
        if row < len(self.pictures):
            picture = self.pictures[row]
        return Query(number, self.features[row], self.prediction, self.place_of(number), self.time, picture)

    def place_of(self, number: int) -> int:
        """Returns the place in the prediction of the query with this number."""
        return self.begin + number - self.first

    def number_at(self, place: int) -> int:
        """Returns the number of the query at this place in the prediction."""
        return self.first + place - self.begin

    @property
    def numbers(self) -> range:
        """The numbers of the queries."""
        return range(self.first, self.first + len(self.features))


class Queries:
    """The newest queries, under names that are never reused.

    Args:
        most: the number of queries to keep.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._next = 1  # the number of the next query
        self._count = 0  # the number of queries in ``_kept``
        self._kept: deque[KeptQueries] = deque()
        self._forgotten: set[int] = set()  # numbers of queries in ``_kept`` that no longer exist for callers

    def __len__(self) -> int:
        """Returns the number of queries that are kept."""
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Query]:
        """Yields the queries, newest first."""
        left = self._most
        for kept in reversed(list(self._kept)):
            for number in reversed(kept.numbers):
                if number in self._forgotten:
                    continue
                if not left:
                    return
                left -= 1
                yield kept.query(number)

    def keep(
        self,
        features: Tensor,
        prediction: Prediction,
        time: float,
        *,
        begin: int = 0,
        pictures: Sequence[bytes | None] = (),
    ) -> KeptQueries:
        """Keeps queries (B, D) that were answered together, and drops the oldest ones beyond the limit.

        Args:
            features: the features of the queries.
            prediction: their answers, possibly among others.
            time: when they were answered.
            begin: where their answers begin in the prediction.
            pictures: the pictures of the queries, if they were images.
        """
        kept = KeptQueries(self._next, features, prediction, begin, time, pictures)
        self._next += len(features)
        self._kept.append(kept)
        self._count += len(features)
        while self._count - len(self._kept[0].features) >= self._most:
            dropped = self._kept.popleft()
            self._count -= len(dropped.features)
            self._forgotten.difference_update(dropped.numbers)
        return kept

    def forget(self, rows: Iterable[int]) -> None:
        """Forgets the queries that became these rows."""
        gone = set(rows)
        for query in self:
            if not gone.isdisjoint(query.own_rows):
                self._forgotten.add(query.number)

    def latest(self, *, ended: bool) -> Latest | None:
        """Returns all queries in the form in which they are saved for the next process; None if there are none."""
        queries = list(self)[::-1]
        if not queries:
            return None
        return latest_of(
            [query.number for query in queries],
            [query.features for query in queries],
            [query.time for query in queries],
            [part_of(query.prediction, slice(query.place, query.place + 1)) for query in queries],
            [query.picture for query in queries],
            self._next,
            ended=ended,
        )

    def restore(self, latest: Latest) -> None:
        """Restores what an earlier process kept; to be called before anything else is kept."""
        times = latest.times.tolist()
        for place, number in enumerate(latest.numbers.tolist()):
            self._next = number
            features = latest.features[place : place + 1]
            picture = latest.pictures[place]
            self.keep(features, latest.answers, times[place], begin=place, pictures=[picture])
        self._next = latest.next_number
        if not latest.ended:
            self._next += SKIPPED

    def find(self, name: str) -> Query:
        """Returns the query with this name, or raises a NotFoundError."""
        for query in self:
            if query.name == name:
                return query
        raise NotFoundError(f"there is no query {name[:20]!r}: only the latest {self._most} are kept")

    def listed(self, order: str, limit: int) -> list[Query]:
        """Returns the latest queries, or those with the least confident answers if ``order`` is "uncertain"."""
        queries = list(self)
        if order == "uncertain":
            queries.sort(key=lambda query: query.confidence)
        return queries[:limit]
