"""How often answers are right, estimated without labels, and an alarm for when that falls.

An answer agrees with the stream as far as the query's nearest rows of the stream were believed to be of the same
class. Where answers mean something they agree: of two queries that lie close together but were answered differently,
at least one is wrong. The source says how many errors a disagreement stands for: its rows have labels, can be answered
by rows of other domains, and have neighbors in their own domain, as the queries of a stream have.

    accuracy = (mean agreement) ** exponent
    exponent = errors of source rows / their disagreement, and at least 1

Near 1 this is one minus exponent times the disagreement. The estimate holds for the frozen and for the adapted answer.
What it cannot see is a stream whose queries all moved together to where another class is, since they agree with each
other. Where classes arrive mixed, full centering undoes such a move, and how many answers it changes says how far the
move was. A frozen answer that it changes then counts as one that agrees with nothing, and the adapted answer in its
place counts half. With several source domains this is not needed: their rows are answered by other domains, so the
errors of a shift are in the calibration already.

All state is a few numbers, and a query makes the next ones of them, so that it replays and does not depend on how a
stream is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pow, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from adanpc.core.types import Neighbors
from adanpc.core.vote import vote
from adanpc.index.grid import Array

SAMPLE = 1000  # source rows, at most, that the calibration asks
CHUNK = 64  # of these rows that are compared with the source at a time
PRIOR = 10  # rows with as many errors as disagreements that the calibration starts with
FAR = 3  # times as far from the stream as from the source: nothing near has come yet, and nothing can be compared
HORIZON = 200  # queries that the running means remember
DEVIATIONS = 1.645  # to each side, for an interval that holds nine times out of ten
TOLERANCE = 0.1  # how far accuracy may be below that on the source before the alarm counts it

# What the estimate was wrong by, on problems made of source domains alone; see docs/safety.md.
ERROR_OF_SEVERAL_DOMAINS = 0.14
ERROR_OF_ONE_DOMAIN = 0.18

PACKED = 4  # numbers of a packed calibration
UNKNOWN = (0.0, 0.0, 0.0, 1.0)  # a packed calibration of which nothing is known: any accuracy is possible
MOST_CAPITAL = 1e12  # beyond it the alarm wins no more, so that its numbers stay finite


class Accuracy(NamedTuple):
    """A share of right answers as it is estimated, and the ends of its interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Calibration:
    """How errors and agreement go together on the source; a value that is fitted with the transform."""

    rows: float  # how many were asked
    errors: float  # how many of them were answered wrongly
    disagreement: float  # the sum of one minus the agreement of each
    own_error: float  # what the estimate may be wrong by, however many queries there are

    def packed(self) -> Tensor:
        """All of it as one vector (PACKED,) float64, for changes and files."""
        return torch.tensor([self.rows, self.errors, self.disagreement, self.own_error], dtype=torch.float64)

    @classmethod
    def unpacked(cls, vector: Tensor) -> Calibration:
        """What ``packed`` wrote."""
        return cls(*vector.tolist())

    @property
    def accuracy(self) -> float:
        """The share of source rows that were answered rightly, 1 if none was asked."""
        return 1 - self.errors / max(self.rows, 1)

    @property
    def exponent(self) -> float:
        """How many errors stand behind one disagreement, at least 1: the transform has seen the rows that are asked."""
        return max(1.0, (self.errors + PRIOR) / (self.disagreement + PRIOR))

    @property
    def has_seen_shifts(self) -> bool:
        """Whether rows were answered by other domains, so that errors that come of a shift are in the calibration."""
        return self.own_error <= ERROR_OF_SEVERAL_DOMAINS

    @property
    def alarm_level(self) -> float:
        """The mean agreement that stands for an accuracy TOLERANCE below that on the source."""
        lowest = max(self.accuracy - TOLERANCE, 0.0)
        return pow(lowest, 1 / self.exponent)

    def chance(self, agreement: float) -> float:
        """The probability that an answer with this agreement, or one of many with this mean agreement, is right."""
        # Not a power of a tensor: its bits depend on the place that a number has among others.
        return pow(agreement, self.exponent)

    def interval(self, agreement: float, count: int) -> Accuracy:
        """The share of right answers among ``count`` that have this mean agreement, with an interval.

        The interval allows for the chance of which queries came, and for what the estimate itself may be wrong by.
        """
        if count == 0:
            return Accuracy(self.accuracy, 0.0, 1.0)
        estimate = self.chance(agreement)
        slope = self.exponent * pow(agreement, self.exponent - 1)
        # No numbers between 0 and 1 with this mean vary more.
        variance = agreement * (1 - agreement) / count
        margin = DEVIATIONS * sqrt(slope**2 * variance + self.own_error**2)
        return Accuracy(estimate, max(0.0, estimate - margin), min(1.0, estimate + margin))


@dataclass(frozen=True)
class Agreements:
    """Running means of how far answers agree with the stream, over about its last HORIZON queries."""

    count: float = 0.0  # of all queries
    frozen: float = 0.0
    adapted: float = 0.0

    def after(self, frozen: float, adapted: float) -> Agreements:
        """Once a query has come whose two answers agree with the stream so far."""
        rate = max(1 / (self.count + 1), 1 / HORIZON)
        return Agreements(
            self.count + 1,
            self.frozen + rate * (frozen - self.frozen),
            self.adapted + rate * (adapted - self.adapted),
        )

    @property
    def remembered(self) -> int:
        """How many queries the means are of."""
        return min(int(self.count), HORIZON)


@dataclass(frozen=True)
class Alarm:
    """A sequential test of whether answers agree with the stream as far as they should.

    It bets that they do not: with each query, capital is multiplied by 1 + level - agreement. As long as the agreement
    to be expected is at least ``level``, whatever came before, no bet is expected to gain. A part of the first capital,
    which is 1, is kept for a bet that begins at each later query, 1 / (n (n + 1)) for the n-th, since a fall may begin
    at any of them. By Ville's inequality all of the capital together ever reaches 1 / rate with a probability of
    at most ``rate``, however long the stream.
    """

    count: float = 0.0  # of queries
    capital: float = 0.0  # in bets, without what is kept
    peak: float = 1.0  # the most capital there ever was, with what is kept

    def after(self, agreement: float, level: float) -> Alarm:
        """Once a query has come whose answer has this agreement."""
        count = self.count + 1
        bet = self.capital + 1 / (count * (count + 1))
        capital = min(bet * (1 + level - agreement), MOST_CAPITAL)
        kept = 1 / (count + 1)
        return Alarm(count, capital, max(self.peak, capital + kept))

    def raised(self, rate: float) -> bool:
        """Whether the alarm was ever raised, if a false one may have this probability."""
        return self.peak >= 1 / rate


def comparable(to_source: float, to_stream: float) -> bool:
    """Whether a query is near enough to rows of the stream for its answers to be compared with theirs.

    Where classes arrive one after another, the first queries of a class have no neighbors of their own class.

    Args:
        to_source: one minus the mean similarity of the moved query to its nearest source rows.
        to_stream: the same for its nearest rows of the stream.
    """
    return to_stream <= FAR * to_source


def agreement(votes: Array, labels: Array, answer: int, moved: int) -> float:
    """How far an answer agrees with the stream, from 0 to 1.

    Args:
        votes: (k,) of the query's nearest rows of the stream; they sum to 1.
        labels: (k,) of these rows.
        answer: the class that is to be judged.
        moved: what source rows say of the moved query. An answer that differs from it counts half.
    """
    share = float(votes[labels == answer].sum())
    if answer != moved:
        share /= 2
    return min(share, 1.0)  # votes may sum to a little more


def calibrate(
    rows: Tensor,
    labels: Tensor,
    domains: Tensor,
    classes: int,
    *,
    voters: int,
    per_class: int,
    witnesses: int,
    temperature: float,
) -> Calibration:
    """How answers to source rows and their agreement go together.

    Args:
        rows: (n, D) source rows at length one, each domain centered.
        labels: (n,) of them.
        domains: (n,) of them. Rows are answered by those of other domains; if there is only one, by all others.
        classes: the number of classes.
        voters: how many rows answer a query.
        per_class: how many of each class are compared.
        witnesses: how many rows of the stream an answer is compared with.
        temperature: of the votes of these.
    """
    groups = domains  # no row is answered by its own group
    own_error = ERROR_OF_SEVERAL_DOMAINS
    if len(domains.unique()) == 1:
        groups = torch.arange(len(rows), device=rows.device)
        own_error = ERROR_OF_ONE_DOMAIN
    asked = _asked(labels, groups)
    answers = _answers(rows, labels, groups, asked, classes, voters, per_class)
    count = 0
    errors = 0.0
    disagreement = 0.0
    for domain in domains[asked].unique():
        inside = domains[asked] == domain
        members = asked[inside]
        if len(members) < 2:
            continue  # nothing to agree with
        count += len(members)
        errors += float((answers[inside] != labels[members]).sum())
        disagreement += float((1 - _agreements(rows[members], answers[inside], witnesses, temperature)).sum())
    return Calibration(count, errors, max(disagreement, 0.0), own_error)  # votes may sum to a little more than 1


def _asked(labels: Tensor, groups: Tensor) -> Tensor:
    """At most SAMPLE rows (m,), evenly spaced, among those that another group can answer: it has their label, too."""
    answerable = torch.zeros_like(labels, dtype=torch.bool)
    for label in labels.unique():
        members = labels == label
        if len(groups[members].unique()) > 1:
            answerable |= members
    rows = answerable.nonzero()[:, 0]
    size = min(SAMPLE, len(rows))
    places = torch.arange(size, device=labels.device) * len(rows) // max(size, 1)
    return rows[places]


def _answers(
    rows: Tensor, labels: Tensor, groups: Tensor, asked: Tensor, classes: int, voters: int, per_class: int
) -> Tensor:
    """How the rows of other groups answer each row that is asked (m,)."""
    answers = []
    for some in asked.split(CHUNK):
        similarity = (rows[some] @ rows.T).double()
        similarity.masked_fill_(groups[some][:, None] == groups, -torch.inf)
        nearest, ids = similarity.topk(min(voters, len(rows)))
        probs, _ = vote(Neighbors(ids, nearest, labels[ids]), classes, "classwise", per_class=per_class)
        answers.append(probs.argmax(1))
    return torch.cat(answers)


def _agreements(rows: Tensor, answers: Tensor, witnesses: int, temperature: float) -> Tensor:
    """How far each answer (m,) agrees with those to the nearest of the other rows (m, D)."""
    similarity = rows @ rows.T
    similarity.fill_diagonal_(-torch.inf)
    nearest, places = similarity.topk(min(witnesses, len(rows) - 1))
    votes = (nearest.double() / temperature).softmax(1)
    return (votes * (answers[places] == answers[:, None])).sum(1)
