"""Queries: the latest ones that were answered, kept in memory for people who look at them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
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
    prediction: Prediction  # of the request that it was part of
    place: int  # in that request
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


class Queries:
    """The newest queries, under names that this process gives out once.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._count = 0
        self._kept: OrderedDict[str, Query] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Query]:
        """The newest first."""
        return iter(list(reversed(self._kept.values())))

    def keep(
        self, features: Tensor, prediction: Prediction, time: float, pictures: list[bytes | None] | None = None
    ) -> list[Query]:
        """Keeps the queries (B, D) of a request, the newest if there are too many, and returns all of them."""
        queries = []
        for place in range(len(features)):
            self._count += 1
            name = f"q-{self._count}"
            picture = None
            if pictures is not None:
                picture = pictures[place]
            query = Query(name, features[place], prediction, place, time, picture)
            self._kept[name] = query
            queries.append(query)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return queries

    def find(self, name: str) -> Query:
        """The query of this name, or a NotFoundError."""
        query = self._kept.get(name)
        if query is None:
            raise NotFoundError(f"there is no query {name[:20]!r}: only the latest {self._most} are kept")
        return query

    def listed(self, order: str, limit: int) -> list[Query]:
        """The latest queries, or those with the least certain answers."""
        queries = list(self)
        if order == "uncertain":
            queries.sort(key=lambda query: query.confidence)
        return queries[:limit]
