"""Queries: the latest ones that were answered, kept in memory for people who look at them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from adanpc.core import Prediction
from adanpc.serve.errors import NotFoundError

MOST = 500


@dataclass(frozen=True)
class Query:
    """A query, and the answer that it got."""

    name: str
    features: Tensor  # (D,)
    prediction: Prediction  # of the queries that it was answered with
    place: int  # among them
    time: float  # seconds since 1970
    picture: bytes | None = None  # a small JPEG

    @property
    def confidence(self) -> float:
        """Of its answer."""
        return float(self.prediction.confidence[self.place])

    @property
    def own_rows(self) -> list[int]:
        """The row that it became, if it joined."""
        row = int(self.prediction.joined[self.place])
        return [row] if row >= 0 else []


@dataclass(frozen=True)
class Answered:
    """Queries that were answered together, as they are kept: nothing is made of each until somebody looks at it."""

    first: int  # the number of the first of them
    features: Tensor  # (B, D)
    prediction: Prediction  # of these, and perhaps of others
    begin: int  # the place of the first of them in it
    time: float
    pictures: Sequence[bytes | None]  # of the first of them, or of all

    def query(self, number: int) -> Query:
        """The query with this number."""
        place = number - self.first
        picture = None
        if place < len(self.pictures):
            picture = self.pictures[place]
        return Query(f"q-{number}", self.features[place], self.prediction, self.begin + place, self.time, picture)

    @property
    def numbers(self) -> range:
        """Of its queries."""
        return range(self.first, self.first + len(self.features))


class Queries:
    """The newest queries, under names that are given once.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._next = 1  # number
        self._kept: deque[Answered] = deque()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._numbers())

    def __iter__(self) -> Iterator[Query]:
        """The newest first."""
        oldest = self._numbers().start
        for answered in reversed(list(self._kept)):
            for number in reversed(answered.numbers):
                if number >= oldest:
                    yield answered.query(number)

    def keep(
        self,
        features: Tensor,
        prediction: Prediction,
        time: float,
        *,
        begin: int = 0,
        pictures: Sequence[bytes | None] = (),
    ) -> Answered:
        """Keeps queries (B, D) that were answered together, and forgets those that are too many.

        Args:
            features: of the queries.
            prediction: their answers, and perhaps those of others.
            time: when they were given.
            begin: where they stand in the prediction.
            pictures: of the queries, if they were images.
        """
        answered = Answered(self._next, features, prediction, begin, time, pictures)
        self._next += len(features)
        self._kept.append(answered)
        while self._kept and self._kept[0].numbers.stop <= self._numbers().start:
            self._kept.popleft()
        return answered

    def find(self, name: str) -> Query:
        """The query of this name, or a NotFoundError."""
        for query in self:
            if query.name == name:
                return query
        raise NotFoundError(f"there is no query {name[:20]!r}: only the latest {self._most} are kept")

    def listed(self, order: str, limit: int) -> list[Query]:
        """The latest queries, or those with the least certain answers."""
        queries = list(self)
        if order == "uncertain":
            queries.sort(key=lambda query: query.confidence)
        return queries[:limit]

    def _numbers(self) -> range:
        """Of the queries that are kept."""
        first = self._next
        if self._kept:
            first = self._kept[0].first
        return range(max(first, self._next - self._most), self._next)
