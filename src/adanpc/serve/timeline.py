"""Timeline: the course of a stream in a bounded number of points, however long the stream is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from adanpc.core import Append, Change, Origin
from adanpc.core.guard import Signs

MOST = 1000  # points; beyond that, adjacent points are merged, so that each stands for twice as many queries


@dataclass
class Point:
    """A summary of the answers to consecutive queries."""

    position: int  # of the bank after the last query
    time: float
    queries: int
    confidence: float  # the sum over all queries
    joined: int
    counts: list[int]  # answers by class
    trust: float | None = None  # as of the last query
    estimate: float | None = None  # of the accuracy as of the last query; low and high are the ends of its interval
    low: float | None = None
    high: float | None = None

    def absorb(self, later: Point) -> None:
        """Merges a later point into this one."""
        self.position = later.position
        self.time = later.time
        self.queries += later.queries
        self.confidence += later.confidence
        self.joined += later.joined
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, later.counts, strict=True)]
        if later.trust is not None:
            self.trust = later.trust
            self.estimate = later.estimate
            self.low = later.low
            self.high = later.high

    def document(self) -> dict[str, Any]:
        """Returns the point as a JSON document."""
        queries = max(self.queries, 1)
        return {
            "position": self.position,
            "time": self.time,
            "queries": self.queries,
            "confidence": self.confidence / queries,
            "joined": self.joined / queries,
            "shares": [count / queries for count in self.counts],
            "trust": self.trust,
            "estimate": self.estimate,
            "low": self.low,
            "high": self.high,
        }


class Timeline:
    """Points that each stand for about the same number of queries.

    Args:
        classes: the number of classes of the bank.
    """

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._points: list[Point] = []
        self._width = 1  # queries in a point

    def seed(self, changes: Iterable[tuple[int, Change]]) -> None:
        """Adds queries that joined before this process started, from changes with their positions."""
        for position, change in changes:
            if isinstance(change, Append) and change.origin == Origin.ADMITTED:
                confidence = change.confidence
                known = [1.0] * len(change.labels) if confidence is None else confidence.tolist()
                labels = change.labels.tolist()
                self.note(position, change.when or 0.0, labels, known, len(labels))

    def note(
        self,
        position: int,
        time: float,
        labels: Sequence[int],
        confidence: Sequence[float],
        joined: int,
        signs: Signs | None = None,
    ) -> None:
        """Adds the answers to a request."""
        counts = [0] * self._classes
        for label in labels:
            counts[label] += 1
        point = Point(position, time, len(labels), sum(confidence), joined, counts)
        if signs is not None:
            point.trust = signs.trust
            point.estimate, point.low, point.high = signs.given
        if self._points and self._points[-1].queries < self._width:
            self._points[-1].absorb(point)
        else:
            self._points.append(point)
        if len(self._points) > MOST:
            self._width *= 2
            self._points = _merged(self._points, 2)

    def documents(self, points: int) -> list[dict[str, Any]]:
        """Returns at most this many points as JSON documents, oldest first."""
        together = -(-len(self._points) // points)
        return [point.document() for point in _merged(self._points, max(together, 1))]


def _merged(points: Sequence[Point], together: int) -> list[Point]:
    """Returns the points merged in groups of ``together``."""
    merged = []
    for start in range(0, len(points), together):
        first, *others = points[start : start + together]
        total = Point(**vars(first))
        for other in others:
            total.absorb(other)
        merged.append(total)
    return merged
