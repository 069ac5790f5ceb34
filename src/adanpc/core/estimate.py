"""Estimates without labels how often answers are right, and raises an alarm when that falls.

The agreement of an answer is the share of the query's nearest rows in the stream that were believed to be of the same
class. Meaningful answers agree: of two queries that lie close together but were answered differently, at least one is
wrong. The source shows how many errors a disagreement stands for: its rows have labels, can be answered by rows of
other domains, and have neighbors in their own domain, just like the queries of a stream.

    chance   = (mean agreement) ** exponent
    exponent = errors of source rows / their disagreement, and at least 1
    accuracy : 1 - accuracy = 0.82 * (chance : 1 - chance) ** 1.3

Near 1 the chance is one minus the exponent times the disagreement. But a wrong answer also makes right ones near it
disagree, and wrong ones near it may agree with it, so chances are too close to each other: too low where nearly all
answers are right, and too high where most are wrong. The third line, which was fitted to many streams with known
labels, stretches them apart. All of this is computed for frozen and for adapted answers.

The less of the answers is right, the more the estimate may be off, so its interval widens as the estimate falls, and
reaches farther up than down. It is wider where classes do not arrive mixed.

Agreement alone misses a stream whose queries have all moved to where another class is, since they still agree with each
other. Where classes arrive mixed, removing the whole mean undoes such a move, and the number of answers that this
changes shows how far the move was. So a frozen answer that it changes counts as no agreement at all, and the adapted
answer in its place counts half. With several source domains this is not needed: their rows are answered by other
domains, so the calibration already includes the errors of a shift.

The state is a few numbers, and each query turns them into the next ones. So it can be replayed, and it does not depend
on how a stream is split into batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, pow, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from adanpc.core.types import Neighbors
from adanpc.core.vote import vote
from adanpc.index.grid import Array

SAMPLE = 1000  # the most source rows that are used as queries for the calibration
CHUNK = 64  # how many of them are compared with the source at a time
PRIOR = 10  # imaginary rows, with one error per disagreement, that the calibration starts with
FAR = 3  # a query this many times as far from the stream as from the source has nothing to be compared with yet
HORIZON = 200  # queries that the running means remember
DEVIATIONS = 1.645  # to each side, for an interval that holds nine times out of ten
TOLERANCE = 0.1  # how far accuracy may fall below that on the source before the alarm counts it

# How the next seven were chosen is logged in docs/safety-study.md.
ODDS = 0.82  # what the odds of a right answer are multiplied by after they have been raised to SPREAD
SPREAD = 1.3
LEAST_ERROR = 0.04  # by which an estimate may be wrong, however high it is
RISE = 0.6  # how much of what is missing to 1 the accuracy may be above the estimate
FALL = 0.5  # how much of the estimate the accuracy may be below it, at most
SCALE_OF_MIXED = 0.9  # what these three are multiplied by where classes arrive mixed
SCALE_OF_ORDERED = 1.3  # the same where they do not

# The error of the chance on problems made of source domains alone; see docs/safety-study.md.
ERROR_OF_SEVERAL_DOMAINS = 0.14
ERROR_OF_ONE_DOMAIN = 0.18

PACKED = 4  # numbers of a packed calibration
UNKNOWN = (0.0, 0.0, 0.0, 1.0)  # a packed calibration that knows nothing: any accuracy is possible
MOST_CAPITAL = 1e12  # beyond it the alarm wins no more, so that its numbers stay finite


class Accuracy(NamedTuple):
    """An estimated share of right answers, and the ends of its interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Calibration:
    """How errors and agreement are related on the source; fitted together with the transform."""

    rows: float  # how many source rows were used as queries
    errors: float  # how many of them got a wrong answer
    disagreement: float  # the sum over them of one minus their agreement
    own_error: float  # the error of the chance on problems made of source domains; higher if there was only one domain

    def packed(self) -> Tensor:
        """Returns the calibration as one vector (PACKED,) of float64, for changes and files."""
        return torch.tensor([self.rows, self.errors, self.disagreement, self.own_error], dtype=torch.float64)

    @classmethod
    def unpacked(cls, vector: Tensor) -> Calibration:
        """Returns the calibration that ``packed`` wrote."""
        return cls(*vector.tolist())

    @property
    def accuracy(self) -> float:
        """The share of source rows that were answered correctly, 1 if there were none."""
        return 1 - self.errors / max(self.rows, 1)

    @property
    def exponent(self) -> float:
        """How many errors one disagreement stands for. At least 1, since the transform was fitted to these rows."""
        return max(1.0, (self.errors + PRIOR) / (self.disagreement + PRIOR))

    @property
    def has_seen_shifts(self) -> bool:
        """Whether rows were answered by other domains, so that the calibration includes the errors of a shift."""
        return self.own_error <= ERROR_OF_SEVERAL_DOMAINS

    @property
    def alarm_level(self) -> float:
        """The mean agreement that corresponds to an accuracy TOLERANCE below that on the source."""
        lowest = max(self.accuracy - TOLERANCE, 0.0)
        return pow(lowest, 1 / self.exponent)

    def chance(self, agreement: float) -> float:
        """Returns the probability that an answer is right, given its agreement or the mean agreement of many."""
        # Not a power of a tensor, whose last bits depend on where a number stands among the others.
        return pow(agreement, self.exponent)

    def interval(self, agreement: float, count: int, mixed: float) -> Accuracy:
        """Returns the estimated share of right answers among ``count`` that have this mean agreement, with an interval.

        The interval allows for chance, since other queries might have come, and for the error of the estimate itself.

        Args:
            agreement: their mean agreement.
            count: how many queries there are.
            mixed: how far classes seem to arrive mixed, from 0 to 1. Where they do not, the estimate errs more.
        """
        if count == 0:
            return Accuracy(self.accuracy, 0.0, 1.0)
        estimate = self.estimate(agreement)
        if not self.rows:
            return Accuracy(estimate, 0.0, 1.0)  # no source row was asked, so nothing limits the error
        scale = SCALE_OF_MIXED * mixed + SCALE_OF_ORDERED * (1 - mixed)
        below = scale * (LEAST_ERROR + min(FALL * estimate, (1 - estimate) ** 2))
        above = scale * (LEAST_ERROR + RISE * (1 - estimate))
        by_chance = _margin_of_chance(agreement, count)
        lowest = self.estimate(max(0.0, agreement - by_chance))
        highest = self.estimate(min(1.0, agreement + by_chance))
        return Accuracy(
            estimate,
            max(0.0, estimate - hypot(below, estimate - lowest)),
            min(1.0, estimate + hypot(above, highest - estimate)),
        )

    def estimate(self, agreement: float) -> float:
        """Returns the estimated share of right answers among many with this mean agreement."""
        return _stretched(self.chance(agreement))


def _stretched(chance: float) -> float:
    """Returns a probability of a right answer, given one that is too close to others: see ODDS and SPREAD."""
    right = ODDS * pow(chance, SPREAD)
    return right / (right + pow(1 - chance, SPREAD))


def _margin_of_chance(agreement: float, count: int) -> float:
    """Returns how far a mean agreement of ``count`` queries may be off because other queries might have come."""
    # As if one more query had half agreed: even after a few that all agree, others may not.
    mean = (agreement * count + 0.5) / (count + 1)
    # The largest variance that numbers between 0 and 1 with this mean can have.
    variance = mean * (1 - mean) / count
    return DEVIATIONS * sqrt(variance)


@dataclass(frozen=True)
class Agreements:
    """Running means of the agreement of answers, over about the last HORIZON queries."""

    count: float = 0.0  # of all queries
    frozen: float = 0.0
    adapted: float = 0.0

    def after(self, frozen: float, adapted: float) -> Agreements:
        """Returns the means after one more query, given the agreement of its two answers."""
        rate = max(1 / (self.count + 1), 1 / HORIZON)
        return Agreements(
            self.count + 1,
            self.frozen + rate * (frozen - self.frozen),
            self.adapted + rate * (adapted - self.adapted),
        )

    @property
    def remembered(self) -> int:
        """How many queries the means cover."""
        return min(int(self.count), HORIZON)


@dataclass(frozen=True)
class Alarm:
    """A sequential test of whether answers agree with the stream as much as they should.

    It bets that they do not: each query multiplies the capital by 1 + level - agreement. As long as the expected
    agreement is at least ``level``, whatever came before, no bet is expected to gain. A fall may begin at any query, so
    of the initial capital of 1, the share 1 / (n (n + 1)) is set aside for a bet that begins at the n-th query. By
    Ville's inequality, the probability that the total capital ever reaches 1 / rate is at most ``rate``, however long
    the stream.
    """

    count: float = 0.0  # of queries
    capital: float = 0.0  # in bets, without what is kept
    peak: float = 1.0  # the most capital there ever was, with what is kept

    def after(self, agreement: float, level: float) -> Alarm:
        """Returns the test after one more query, given the agreement of its answer."""
        count = self.count + 1
        bet = self.capital + 1 / (count * (count + 1))
        capital = min(bet * (1 + level - agreement), MOST_CAPITAL)
        kept = 1 / (count + 1)
        return Alarm(count, capital, max(self.peak, capital + kept))

    def raised(self, rate: float) -> bool:
        """Returns whether the alarm was ever raised, if a false alarm may have this probability."""
        return self.peak >= 1 / rate


def comparable(to_source: float, to_stream: float) -> bool:
    """Returns whether a query is near enough to rows of the stream for their answers to be compared.

    Where classes arrive one after another, the first queries of a class have no neighbors of their own class.

    Args:
        to_source: one minus the mean similarity of the moved query to its nearest source rows.
        to_stream: the same for its nearest rows of the stream.
    """
    return to_stream <= FAR * to_source


def agreement(votes: Array, labels: Array, answer: int, moved: int) -> float:
    """Returns how much of the stream near a query agrees with an answer, from 0 to 1.

    Args:
        votes: (k,) the weights of the query's nearest rows in the stream; they sum to 1.
        labels: (k,) the labels of these rows.
        answer: the class whose agreement is wanted.
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
    """Returns how errors and agreement are related when source rows are used as queries.

    Args:
        rows: (n, D) source rows at length one, each domain centered.
        labels: (n,) their labels.
        domains: (n,) their domains. A row is answered by rows of other domains; if there is only one, by all others.
        classes: the number of classes.
        voters: how many rows answer a query.
        per_class: how many rows of each class are compared.
        witnesses: how many neighbors in its own domain an answer is compared with.
        temperature: the temperature of their votes.
    """
    groups, own_error = answering_groups(domains)
    asked = rows_to_ask(labels, groups)
    answers = _answers(rows, labels, groups, asked, classes, voters, per_class)
    return calibration_of(
        rows[asked], labels[asked], domains[asked], answers, own_error, witnesses=witnesses, temperature=temperature
    )


def answering_groups(domains: Tensor) -> tuple[Tensor, float]:
    """Returns the groups (n,) of source rows, and the error of an estimate that is calibrated with them.

    A row is never answered by its own group: its domain or, if there is only one, the row itself.
    """
    if len(domains.unique()) == 1:
        return torch.arange(len(domains), device=domains.device), ERROR_OF_ONE_DOMAIN
    return domains, ERROR_OF_SEVERAL_DOMAINS


def calibration_of(
    rows: Tensor,
    labels: Tensor,
    domains: Tensor,
    answers: Tensor,
    own_error: float,
    *,
    witnesses: int,
    temperature: float,
) -> Calibration:
    """Returns how errors and agreement are related on source rows that were asked; see ``calibrate``.

    Args:
        rows: (m, D) the rows.
        labels: (m,) their labels.
        domains: (m,) their domains.
        answers: (m,) the answers that they got from rows of other groups.
        own_error: see ``Calibration``.
        witnesses, temperature: see ``calibrate``.
    """
    count = 0
    errors = 0.0
    disagreement = 0.0
    for domain in domains.unique():
        inside = domains == domain
        members = rows[inside]
        if len(members) < 2:
            continue  # nothing to agree with
        count += len(members)
        errors += float((answers[inside] != labels[inside]).sum())
        disagreement += float((1 - _agreements(members, answers[inside], witnesses, temperature)).sum())
    return Calibration(count, errors, max(disagreement, 0.0), own_error)  # votes may sum to a little more than 1


def rows_to_ask(labels: Tensor, groups: Tensor) -> Tensor:
    """Returns at most SAMPLE rows (m,), in rising order, among those whose label occurs in another group, too."""
    answerable = torch.zeros_like(labels, dtype=torch.bool)
    for label in labels.unique():
        members = labels == label
        if len(groups[members].unique()) > 1:
            answerable |= members
    rows = answerable.nonzero()[:, 0]
    # By chance, since rows may come in an order that repeats, such as one of each class or domain in turn.
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(len(rows), generator=generator)[:SAMPLE].sort().values
    return rows[places.to(rows.device)]


def _answers(
    rows: Tensor, labels: Tensor, groups: Tensor, asked: Tensor, classes: int, voters: int, per_class: int
) -> Tensor:
    """Returns the answers (m,) of the rows of other groups to each row in ``asked``."""
    answers = []
    for some in asked.split(CHUNK):
        rivals = Rivals(rows[some], groups[some], voters)
        rivals.see(rows, groups, labels)
        answers.append(rivals.answers(classes, per_class))
    return torch.cat(answers)


class Rivals:
    """For some rows, the most similar rows of other groups so far, among rows that come piece by piece.

    Args:
        rows: (m, D) the rows, at length one.
        groups: (m,) their groups.
        most: how many similar rows to find for each.
    """

    def __init__(self, rows: Tensor, groups: Tensor, most: int) -> None:
        self.similarity = torch.zeros(len(rows), 0, dtype=torch.float64, device=rows.device)  # (m, k), -inf for none
        self._labels = torch.zeros(len(rows), 0, dtype=torch.int64, device=rows.device)
        self._rows = rows
        self._groups = groups
        self._most = most

    def see(self, rows: Tensor, groups: Tensor, labels: Tensor) -> None:
        """Compares the rows with a piece (n, D) of others, with their groups (n,) and labels (n,)."""
        similarity = (self._rows @ rows.T).double()
        similarity.masked_fill_(self._groups[:, None] == groups, -torch.inf)
        nearest, places = similarity.topk(min(self._most, len(rows)))
        self._take(nearest, labels[places])

    def _take(self, similarity: Tensor, labels: Tensor) -> None:
        """Keeps the best of what was found before and of what was found in a piece, each (m, …) and sorted."""
        if self.similarity.shape[1]:
            similarity = torch.cat([self.similarity, similarity], 1)
            labels = torch.cat([self._labels, labels], 1)
            similarity, places = similarity.topk(min(self._most, similarity.shape[1]))
            labels = labels.gather(1, places)
        self.similarity = similarity
        self._labels = labels

    def answers(self, classes: int, per_class: int) -> Tensor:
        """Returns the answers (m,) of the rows that were found, by the class-wise vote of the preset "safe"."""
        near = Neighbors(torch.zeros_like(self._labels), self.similarity, self._labels)  # a vote does not need ids
        probs, _ = vote(near, classes, "classwise", per_class=per_class)
        return probs.argmax(1)

    def means(self) -> Tensor:
        """Returns the mean similarities of what was found, in rising order; rows for which nothing was are left out."""
        others = self.similarity > -torch.inf
        mean = self.similarity.where(others, 0).sum(1) / others.sum(1)
        return mean[others.any(1)].sort().values


def _agreements(rows: Tensor, answers: Tensor, witnesses: int, temperature: float) -> Tensor:
    """Returns how much each answer (m,) agrees with the answers to its nearest rows among the others (m, D)."""
    similarity = rows @ rows.T
    similarity.fill_diagonal_(-torch.inf)
    nearest, places = similarity.topk(min(witnesses, len(rows) - 1))
    votes = (nearest.double() / temperature).softmax(1)
    return (votes * (answers[places] == answers[:, None])).sum(1)
