"""Slow, independent versions of the method: loops and plain Python, written from the paper, not from the code."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Row:
    number: int
    vector: np.ndarray
    label: int
    source: bool


def similarities(rows: list[Row], query: np.ndarray) -> list[tuple[float, Row]]:
    """(cosine, row) of all rows, nearest first, ties to the lowest number."""
    scored = [(float(sum(a * b for a, b in zip(row.vector, query, strict=True))), row) for row in rows]
    return sorted(scored, key=lambda pair: (-pair[0], pair[1].number))


def vote(
    near: list[tuple[float, int]], classes: int, rule: str, temperature: float, per_class: int = 15
) -> list[float]:
    """Class probabilities from (similarity, label) pairs."""
    totals = [0.0] * classes
    if rule == "classwise":
        farthest = min(similarity for similarity, _ in near)
        for label in range(classes):
            best = sorted((similarity for similarity, other in near if other == label), reverse=True)
            best = best[:per_class]
            mean = (sum(best) + (per_class - len(best)) * farthest) / per_class
            totals[label] = math.exp(mean / temperature)
        return [total / sum(totals) for total in totals]
    if rule == "paper":
        for similarity, label in near:
            totals[label] += similarity
        powers = [math.exp(total) for total in totals]
        return [power / sum(powers) for power in powers]
    if rule == "rank":
        order = sorted(
            range(len(near)), key=lambda place: -near[place][0]
        )  # stable: of equals, the earlier comes first
        weights = [1 / (2 + order.index(place)) for place in range(len(near))]
    elif rule == "uniform":
        weights = [1.0] * len(near)
    else:
        weights = [math.exp(similarity / temperature) for similarity, _ in near]
    for weight, (_, label) in zip(weights, near, strict=True):
        totals[label] += weight / sum(weights)
    if rule == "published":
        totals = [total + 1e-5 for total in totals]
        return [total / sum(totals) for total in totals]
    return totals


@dataclass
class Online:
    """AdaNPC, one query at a time, over a list of rows."""

    classes: int
    pools: list[tuple[int, bool | None]]
    rule: str
    temperature: float
    min_confidence: float
    quota: float = math.inf
    capacity: int | None = None
    balanced: bool = False
    rows: list[Row] = field(default_factory=list)
    arrived: int = 0

    def learn(self, vectors: np.ndarray, labels: list[int], source: bool = True) -> None:
        for vector, label in zip(vectors, labels, strict=True):
            self.rows.append(Row(self.arrived, vector, label, source))
            self.arrived += 1

    def step(self, query: np.ndarray, stored: np.ndarray) -> tuple[list[float], list[int], int]:
        """Probabilities, the voters' numbers, and the number under which the query joined, or -1."""
        near: list[tuple[float, Row]] = []
        for k, source in self.pools:
            near += similarities([row for row in self.rows if source in (None, row.source)], query)[:k]
        probs = vote([(s, row.label) for s, row in near], self.classes, self.rule, self.temperature)
        label = max(range(self.classes), key=lambda c: (probs[c], -c))
        held = sum(not row.source and row.label == label for row in self.rows)
        joined = -1
        if probs[label] >= self.min_confidence and held < self.quota:
            joined = self.arrived
            self.learn(stored[None], [label], source=False)
            self.evict()
        return probs, [row.number for _, row in near], joined

    def evict(self) -> None:
        guests = [row for row in self.rows if not row.source]
        if self.capacity is None or len(guests) <= self.capacity:
            return
        if self.balanced:
            counts = {label: sum(row.label == label for row in guests) for label in range(self.classes)}
            largest = max(counts, key=lambda label: (counts[label], -label))
            guests = [row for row in guests if row.label == largest]
        self.rows.remove(min(guests, key=lambda row: row.number))


def knn_loss(
    queries: np.ndarray, labels: list[int], keys: np.ndarray, key_labels: list[int], k: int, tau: float
) -> float:
    """Equation 3 with the published floor, by loops; classes are those of the keys and queries."""
    classes = max([*labels, *key_labels]) + 1
    total = 0.0
    for query, label in zip(queries, labels, strict=True):
        cosine = [float(query @ key / np.linalg.norm(query) / np.linalg.norm(key)) for key in keys]
        best = sorted(range(len(keys)), key=lambda j: (-cosine[j], j))[:k]
        above = sum(math.exp(cosine[j] / tau) for j in best if key_labels[j] == label)
        below = sum(math.exp(cosine[j] / tau) for j in best)
        total -= math.log((above / below + 1e-5) / (1 + classes * 1e-5))
    return total / len(queries)
