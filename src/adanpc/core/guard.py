"""Signs that need no labels: how a stream arrives, what may be learned from it, and whether that can be trusted.

Three questions are answered while a stream goes by.

* Is there anything to learn from a query? Not if it is foreign: less like the source than the source's classes are
  like each other. Nor if it is one more copy of what came before: otherwise whoever repeats an image moves all answers.
* Do classes arrive mixed? If answers repeat more often than their shares explain, or one class has most of them,
  probably not. Then the stream's mean says as much about the classes that happened to come as about the shift. Once
  classes have been seen to arrive mixed, adapted answers may show that they still do: far from the source the frozen
  ones all become the same.
* Do neighbors agree? Queries that are near each other should get the same answer more often than chance, if the
  answers mean anything. Where a class is spread over several answers at random, as it is once centering has removed
  what made it that class, they do not. What is asked is what source rows say. Once answers
  are trusted, it counts as far as they come from these: far from the source, source rows may be wrong and answers not.
  And neighbors should agree more with the adapted answers than with the frozen ones. If they do not, adapting has
  gained nothing that could be seen, and the frozen answers are the safer ones.

The last two are running averages over the last hundred queries or so, and what people say overrules both: labels on
which the frozen and the adapted answer differ decide between them by a sequential test.

All of it are values: a query makes the next one of them. So they replay, and do not depend on how a stream is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log
from typing import NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad

from adanpc.core.estimate import Accuracy, Agreements, Alarm, Calibration
from adanpc.index.grid import Array

FOREIGN = 0.9  # queries of more novelty are not learned from
COPIES = 3  # near copies of a query that are learned from
COPY_DISTANCE = 0.2  # from a copy, as a share of the distance to the source
APART = 1e-6  # the least distance from neighbors

PRIOR = 16  # queries that the values before the stream count for
RATE = 1 / 100  # of the running averages of signs
HORIZON = 1000  # queries that the running mean of features remembers
WARM_UP = 32  # queries before which no sign is believed
BLOCK = 64  # queries after which it is looked again whether beliefs are mixed, so that many can be searched together

# From no trust to full trust. The first two were fixed by a study of PACS features; the last by which streams of
# single classes lost and which others gained, see docs/safety.md.
REPETITION = (0.16, 0.08)
LARGEST_SHARE = (0.8, 0.6)
COHERENCE = (0.35, 0.45)
GAIN = (0.0, 0.02)
GAIN_PRIOR = 16  # queries that an unsuspicious gain counts for before the stream
GAIN_RATE = 1 / 200  # of the running average of gains

# The test of labels: if one kind of answer is right in so many of the cases in which just one of them is, it is
# chosen, but for this chance of an error.
ADVANTAGE = 0.7
ERROR = 0.05
ALARM_RATE = 0.01  # the chance of a false alarm, however long the stream
LEAD = ceil(log((1 - ERROR) / ERROR) / log(ADVANTAGE / (1 - ADVANTAGE)))  # cases by which the better one must lead


def is_copy(from_source: float, from_stream: Array) -> bool:
    """Whether a query is one more copy of earlier ones.

    Args:
        from_source: its distance from the nearest source rows, see ``distance``.
        from_stream: (k,) its similarity to the nearest rows of the stream, the nearest first.
    """
    if len(from_stream) < COPIES:
        return False
    return bool(1 - from_stream[COPIES - 1] <= COPY_DISTANCE * from_source)


def distance(similarity: Array) -> float:
    """One minus the mean of similarities (k,), but no less than APART."""
    return max(1 - float(similarity.mean()), APART)


@dataclass(frozen=True, eq=False)
class Order:
    """In what order classes arrive, as far as some kind of answers tells."""

    shares: Array  # (C,) float64, of each class among the answers
    repeats: float  # how often an answer is the same as the one before
    last: int  # the latest answer, -1 before the first

    @classmethod
    def none(cls, classes: int) -> Order:
        """Before the first answer."""
        return cls(numpy.full(classes, 1 / classes), 1 / classes, -1)

    def after(self, count: int, answer: int) -> Order:
        """Once a query, one after ``count`` others, has been answered so."""
        rate = _rate(count, RATE)
        shares = self.shares * (1 - rate)
        shares[answer] += rate
        repeats = self.repeats
        if self.last >= 0:
            repeats = (1 - rate) * repeats + rate * float(answer == self.last)
        return Order(shares, repeats, answer)

    def mixed(self, count: int) -> float:
        """How far the classes seem to arrive mixed after so many queries, from 0 to 1."""
        if count < WARM_UP:
            return 0.0
        by_chance = float(numpy.square(self.shares).sum())
        return _ramp(self.repeats - by_chance, *REPETITION) * _ramp(float(self.shares.max()), *LARGEST_SHARE)


@dataclass(frozen=True, eq=False)
class Arrivals:
    """What is known of the queries themselves, from their features and the frozen bank's answers to them."""

    count: int
    mean: Array  # (D,) float64, the running mean of transformed features
    order: Order  # of the frozen answers

    @classmethod
    def none(cls, origin: Array, classes: int) -> Arrivals:
        """Before the first query."""
        return cls(0, origin, Order.none(classes))

    def mean_with(self, transformed: Array) -> Array:
        """The running mean (D,) once a query (D,) has come."""
        rate = _rate(self.count, 1 / HORIZON)
        return (1 - rate) * self.mean + rate * transformed

    def after(self, mean: Array, answer: int) -> Arrivals:
        """Once a query has come that makes the mean this one (D,), and that the frozen bank answers so."""
        return Arrivals(self.count + 1, mean, self.order.after(self.count, answer))

    def mixed(self) -> float:
        """How far the classes seem to arrive mixed, from 0 to 1."""
        return self.order.mixed(self.count)


@dataclass(frozen=True, eq=False)
class Beliefs:
    """What is known of the adapted answers to a stream."""

    masses: Array  # (C,) float64, the sum of all beliefs
    shares: Array  # (C,) float64, of each class among the source rows' answers, lately
    coherence: float  # how much of a query's neighbors in the stream was answered as it is, lately
    order: Order  # of the beliefs' most probable classes
    mixed: float  # how far classes seemed mixed by that order when the latest BLOCK of queries began
    gain: float  # how much more neighbors agreed with the adapted answers than with the frozen ones, lately

    @classmethod
    def none(cls, classes: int) -> Beliefs:
        """Before the first query."""
        unsuspicious = GAIN[1]
        uniform = numpy.full(classes, 1 / classes)
        return cls(numpy.zeros(classes), uniform, 0.0, Order.none(classes), 0.0, unsuspicious)

    def compared(self, count: int, answer: int, agreement: float | None, weight: float) -> Beliefs:
        """Once a query, one after ``count`` others, has been compared with its neighbors in the stream, if any.

        Args:
            count: of the others.
            answer: what source rows say of it.
            agreement: how much of its neighbors was answered so.
            weight: what that counts, from 0 to 1.
        """
        rate = _rate(count, RATE)
        shares = self.shares * (1 - rate)
        shares[answer] += rate
        coherence = self.coherence
        if agreement is not None:
            rate = rate * weight
            coherence = (1 - rate) * coherence + rate * agreement
        return replace(self, shares=shares, coherence=coherence)

    def with_belief(self, count: int, belief: Array, frozen_mixed: float) -> Beliefs:
        """Once a query, one after ``count`` others, has been believed to be of these classes (C,).

        Args:
            count: of the others.
            belief: in the query.
            frozen_mixed: how far classes seem mixed by the frozen answers.
        """
        order = self.order.after(count, int(belief.argmax()))
        mixed = self.mixed
        if (count + 1) % BLOCK == 0:
            # Beliefs can confirm that classes still arrive mixed, but not discover it: where a single class arrives and
            # the whole mean is removed, beliefs look mixed for just that reason.
            mixed = min(order.mixed(count + 1), max(mixed, frozen_mixed))
        return replace(self, masses=self.masses + belief, order=order, mixed=mixed)

    def with_gain(self, count: int, gain: float) -> Beliefs:
        """Once neighbors agreed by so much more with the adapted answer to a query, one after ``count`` others."""
        rate = max(1 / (count + 1 - WARM_UP + GAIN_PRIOR), GAIN_RATE)
        return replace(self, gain=self.gain + rate * (gain - self.gain))

    def beyond_chance(self) -> float:
        """How far neighbors agree: 0 as much as chance, 1 always."""
        by_chance = float(numpy.square(self.shares).sum())
        return (self.coherence - by_chance) / max(1 - by_chance, 1e-9)

    def trust(self, count: int) -> float:
        """How far adapted answers can be trusted after so many queries, from 0 to 1."""
        if count <= WARM_UP:
            return 0.0
        return _ramp(self.beyond_chance(), *COHERENCE) * _ramp(self.gain, *GAIN)


@dataclass(frozen=True)
class Verdicts:
    """What people's labels say where the frozen and the adapted answer differ."""

    adapted: int = 0  # labels by which the adapted answer was right, and the frozen one was not
    frozen: int = 0  # the other way round

    @property
    def for_adapted(self) -> bool:
        """Whether the adapted answers have been shown to be the better ones."""
        return self.adapted - self.frozen >= LEAD

    @property
    def for_frozen(self) -> bool:
        """Whether the frozen answers have been shown to be the better ones."""
        return self.frozen - self.adapted >= LEAD


class Head(NamedTuple):
    """The numbers of a packed stream before its vectors, in their order."""

    queries: float  # that joined
    repeats: float  # of the frozen answers
    last: float  # of the frozen answers, -1 before the first
    coherence: float
    adapted_right: float  # labels by which only the adapted answer was right
    frozen_right: float  # labels by which only the frozen answer was right
    compared: float  # queries that were compared with the stream
    frozen_agreement: float
    adapted_agreement: float
    bets: float  # of the alarm
    capital: float
    peak: float
    believed_repeats: float
    believed_last: float
    mixed: float
    gain: float


HEAD = len(Head._fields)
HEAD_BEFORE = HEAD - 1  # of earlier versions, which knew no gain


@dataclass(frozen=True, eq=False)
class Stream:
    """All that is known of a stream beside its rows."""

    arrivals: Arrivals
    beliefs: Beliefs
    verdicts: Verdicts
    agreements: Agreements
    alarm: Alarm

    @classmethod
    def none(cls, origin: Tensor, classes: int) -> Stream:
        """Before the first query."""
        arrivals = Arrivals.none(origin.cpu().numpy(), classes)
        return cls(arrivals, Beliefs.none(classes), Verdicts(), Agreements(), Alarm())

    def packed(self) -> Tensor:
        """All of it as one vector (HEAD + D + 4 C,) float64, for changes and files."""
        arrivals = self.arrivals
        beliefs = self.beliefs
        head = Head(
            queries=arrivals.count,
            repeats=arrivals.order.repeats,
            last=arrivals.order.last,
            coherence=beliefs.coherence,
            adapted_right=self.verdicts.adapted,
            frozen_right=self.verdicts.frozen,
            compared=self.agreements.count,
            frozen_agreement=self.agreements.frozen,
            adapted_agreement=self.agreements.adapted,
            bets=self.alarm.count,
            capital=self.alarm.capital,
            peak=self.alarm.peak,
            believed_repeats=beliefs.order.repeats,
            believed_last=beliefs.order.last,
            mixed=beliefs.mixed,
            gain=beliefs.gain,
        )
        by_class = [arrivals.order.shares, beliefs.masses, beliefs.shares, beliefs.order.shares]
        parts = [numpy.array(head, dtype=numpy.float64), arrivals.mean, *by_class]
        return torch.from_numpy(numpy.concatenate(parts))

    @classmethod
    def unpacked(cls, vector: Tensor, dim: int, classes: int) -> Stream:
        """What ``packed`` wrote."""
        numbers = vector.cpu().numpy()
        ends = numpy.cumsum([HEAD, dim, classes, classes, classes])
        first, mean, shares, masses, lately, believed = numpy.split(numbers, ends)
        head = Head(*first.tolist())
        order = Order(shares, head.repeats, int(head.last))
        believed_order = Order(believed, head.believed_repeats, int(head.believed_last))
        return cls(
            Arrivals(int(head.queries), mean, order),
            Beliefs(masses, lately, head.coherence, believed_order, head.mixed, head.gain),
            Verdicts(int(head.adapted_right), int(head.frozen_right)),
            Agreements(head.compared, head.frozen_agreement, head.adapted_agreement),
            Alarm(head.bets, head.capital, head.peak),
        )

    def with_verdict(self, *, adapted_right: bool, frozen_right: bool) -> Stream:
        """Once a person has said which of the two answers to a query was right."""
        verdicts = self.verdicts
        if adapted_right and not frozen_right:
            verdicts = replace(verdicts, adapted=verdicts.adapted + 1)
        if frozen_right and not adapted_right:
            verdicts = replace(verdicts, frozen=verdicts.frozen + 1)
        return replace(self, verdicts=verdicts)

    def signs(self, calibration: Calibration) -> Signs:
        """What the signs say now, in numbers and words, given how errors and agreement go together on the source."""
        arrivals = self.arrivals
        beliefs = self.beliefs
        mixed = max(arrivals.mixed(), beliefs.mixed)
        trust = beliefs.trust(arrivals.count)
        sentences = [f"{arrivals.count} queries were learned from."]
        if arrivals.count < WARM_UP:
            sentences.append(f"Answers are the frozen ones until there are {WARM_UP}.")
        else:
            sentences.append(_in_words(mixed, arrivals, trust, beliefs))
        known = self.agreements.remembered
        frozen = calibration.interval(self.agreements.frozen, known)
        given = calibration.interval(self.agreements.adapted, known)
        alarm = self.alarm.raised(ALARM_RATE)
        if known:
            shares = f"{_percent(given)} of the answers given and {_percent(frozen)} of the frozen ones"
            sentences.append(f"By estimate, {shares} are right.")
        if alarm:
            sentences.append("ALARM: answers agree less than they should if they were as good as on the source.")
        if self.verdicts.for_adapted:
            sentences.append("People's labels have shown that the adapted answers are better, so they are given.")
        if self.verdicts.for_frozen:
            sentences.append("People's labels have shown that the frozen answers are better, so they are given.")
        return Signs(
            arrivals.count,
            mixed,
            beliefs.beyond_chance(),
            beliefs.gain,
            trust,
            self.verdicts.adapted,
            self.verdicts.frozen,
            frozen,
            given,
            alarm,
            " ".join(sentences),
        )


class Signs(NamedTuple):
    """What the guard sees."""

    queries: int  # that were learned from
    mixed: float  # how far classes seem to arrive mixed, from 0 to 1
    agreement: float  # of neighbors in the stream: 0 as much as chance, 1 always
    gain: float  # how much more neighbors agree with the adapted answers than with the frozen ones
    trust: float  # in adapted answers as far as signs say, from 0 to 1
    adapted_right: int  # labels by which only the adapted answer was right
    frozen_right: int  # labels by which only the frozen answer was right
    frozen: Accuracy  # of the frozen answers, estimated without labels
    given: Accuracy  # of the answers that are given, likewise
    alarm: bool  # whether answers were ever clearly worse than on the source; false once in a hundred streams
    words: str  # all of it for people

    def __str__(self) -> str:
        return self.words


def _in_words(mixed: float, arrivals: Arrivals, trust: float, beliefs: Beliefs) -> str:
    """What the signs say of a stream, in two sentences."""
    arrive = "Classes seem to arrive mixed"
    if mixed < 0.5:
        arrive = "Classes do not seem to arrive mixed, so only part of the shift is removed"
    largest = f"the largest class has {100 * arrivals.order.shares.max():.0f} % of the frozen answers"
    agree = f"Neighbors in the stream agree {100 * beliefs.beyond_chance():.0f} % of the way from chance to always"
    if trust >= 0.5:
        verdict = "so answers are the adapted ones"
    elif _ramp(beliefs.beyond_chance(), *COHERENCE) < 0.5:
        verdict = "which is too little, so answers are mostly the frozen ones"
    else:
        verdict = "but with the adapted answers no better than with the frozen ones, so these are mostly given"
    return f"{arrive}: {largest}. {agree}, {verdict}."


def _percent(accuracy: Accuracy) -> str:
    """An accuracy and its interval."""
    return f"{100 * accuracy.estimate:.0f} % ({100 * accuracy.low:.0f} to {100 * accuracy.high:.0f})"


def packed_length(dim: int, classes: int) -> int:
    """How many numbers a packed stream has."""
    return HEAD + dim + 4 * classes


def completed(vector: Tensor, dim: int, classes: int) -> Tensor:
    """A packed stream as it is packed today, if an earlier version packed it; any other vector as it is."""
    if vector.shape != (HEAD_BEFORE + dim + 4 * classes,):
        return vector
    nothing_known = vector.new_tensor([Beliefs.none(classes).gain])
    return torch.cat([vector[:HEAD_BEFORE], nothing_known, vector[HEAD_BEFORE:]])


def with_more_classes(vector: Tensor, dim: int, classes: int, count: int) -> Tensor:
    """A packed stream of so many classes, with ``count`` of them; the new ones have not been met."""
    head, *by_class = vector.split([HEAD + dim, classes, classes, classes, classes])
    return torch.cat([head, *(pad(column, (0, count - classes)) for column in by_class)])


def _rate(count: int, least: float) -> float:
    """The weight of a query that comes after so many others."""
    return max(1 / (count + 1 + PRIOR), least)


def _ramp(value: float, none: float, full: float) -> float:
    """0 at ``none`` or beyond it, 1 at ``full`` or beyond it, straight between them."""
    return min(1.0, max(0.0, (value - none) / (full - none)))
