"""The guard: signs that need no labels, by which it decides what to learn from and how far to trust adapted answers.

It asks three questions of a stream.

* Is there anything to learn from this query? Not if it is foreign, that is, less like the source than the source's
  classes are like each other. Nor if it is one more copy of earlier queries: otherwise, anyone could move all answers
  by repeating an image. If even the queries that were learned from are nearly foreign, then it is the whole stream that
  is far from the source, as photos are from sketches, and being far from the source no longer tells a query apart.
* Do classes arrive mixed? Probably not, if answers repeat more often than the shares of classes explain, or if one
  class has most of them. Then the stream's mean says as much about which classes happened to come as about the shift.
  Once classes have been seen to arrive mixed, adapted answers may confirm that they still do: far from the source, all
  frozen answers become the same.
* Do neighbors agree? If answers mean anything, queries near each other get the same answer more often than by chance.
  They do not where a class is spread over several answers at random, as happens when centering has removed what made it
  that class. The answers compared here are those of source rows. Once answers are trusted, source rows count only as
  much as they do in the belief, since far from the source they may be wrong where the belief is right. Neighbors should
  also agree more with adapted answers than with frozen ones. If they do not, adapting has gained nothing visible, and
  the frozen answers are safer.

The last two are answered by running averages over about a hundred queries. People overrule both: labels for queries
whose frozen and adapted answers differ decide between the two by a sequential test.

Everything here is a value, and each query turns it into the next one. So it can be replayed, and it does not depend on
how a stream is split into batches.
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
from adanpc.core.types import with_fields
from adanpc.index.grid import Array

FOREIGN = 0.9  # a query of higher novelty is not learned from
FAR_AWAY = 0.5  # if queries that were learned from have a higher mean novelty, no query is called foreign
COPIES = 3  # how many near copies of a query are learned from
COPY_DISTANCE = 0.2  # two queries are copies if their distance is below this share of the distance to the source
APART = 1e-6  # the smallest distance, which avoids division by zero

PRIOR = 16  # how many queries the values before the stream count for
RATE = 1 / 100  # the weight of a query in the running averages of signs
HORIZON = 1000  # queries that the running mean of features remembers
WARM_UP = 32  # queries that must come before a sign is used
BLOCK = 64  # beliefs are checked for being mixed only every so many queries, so that many can be searched together

# Each pair is (no trust, full trust). How they were chosen is logged in docs/safety-study.md.
REPETITION = (0.16, 0.08)
LARGEST_SHARE = (0.8, 0.6)
COHERENCE = (0.35, 0.45)
GAIN = (0.0, 0.02)
GAIN_PRIOR = 16  # how many queries the gain before the stream, which raises no suspicion, counts for
GAIN_RATE = 1 / 200  # the weight of a query in the running average of gains
TRUSTED = 0.5  # the trust from which on answers are mostly the adapted ones
PATIENCE = 100  # how many queries may be learned from without such trust before a rollback is advised

# The sequential test of labels looks at queries of which exactly one of the two answers is right. If one kind of answer
# is the right one in this share of them, the other kind is chosen with at most this probability.
ADVANTAGE = 0.7
ERROR = 0.05
LEAD = ceil(log((1 - ERROR) / ERROR) / log(ADVANTAGE / (1 - ADVANTAGE)))  # labels by which one kind must lead
ALARM_RATE = 0.01  # the probability of a false alarm, however long the stream


def is_copy(from_source: float, from_stream: Array) -> bool:
    """Returns whether a query is one more copy of earlier ones.

    Args:
        from_source: its distance to the nearest source rows, see ``distance``.
        from_stream: (k,) its similarity to the nearest rows of the stream, the nearest first.
    """
    if len(from_stream) < COPIES:
        return False
    return bool(1 - from_stream[COPIES - 1] <= COPY_DISTANCE * from_source)


def distance(similarity: Array) -> float:
    """Returns one minus the mean of similarities (k,), but at least APART."""
    return max(1 - float(similarity.sum()) / len(similarity), APART)  # in half the time of ``mean``


@dataclass(frozen=True, eq=False)
class Order:
    """What one kind of answers says about the order in which classes arrive."""

    shares: Array  # (C,) float64, the share of each class among the answers
    repeats: float  # how often an answer equals the one before it
    last: int  # the latest answer, -1 before the first

    @classmethod
    def none(cls, classes: int) -> Order:
        """Before the first answer."""
        return cls(numpy.full(classes, 1 / classes), 1 / classes, -1)

    def after(self, count: int, answer: int) -> Order:
        """Returns the order after one more answer, which came after ``count`` others."""
        rate = _rate(count, RATE)
        shares = self.shares * (1 - rate)
        shares[answer] += rate
        repeats = self.repeats
        if self.last >= 0:
            repeats = (1 - rate) * repeats + rate * float(answer == self.last)
        return Order(shares, repeats, answer)

    def mixed(self, count: int) -> float:
        """Returns how far classes seem to arrive mixed after ``count`` queries, from 0 to 1."""
        if count < WARM_UP:
            return 0.0
        by_chance = float(numpy.square(self.shares).sum())
        return _ramp(self.repeats - by_chance, *REPETITION) * _ramp(float(self.shares.max()), *LARGEST_SHARE)


@dataclass(frozen=True, eq=False)
class Arrivals:
    """What features and frozen answers tell about the queries of a stream."""

    count: int
    mean: Array  # (D,) float64, the running mean of transformed features
    order: Order  # of the frozen answers

    @classmethod
    def none(cls, origin: Array, classes: int) -> Arrivals:
        """Before the first query."""
        return cls(0, origin, Order.none(classes))

    def mean_with(self, transformed: Array) -> Array:
        """Returns the running mean (D,) after one more query (D,)."""
        rate = _rate(self.count, 1 / HORIZON)
        return (1 - rate) * self.mean + rate * transformed

    def after(self, mean: Array, answer: int) -> Arrivals:
        """Returns what is known after one more query, given the mean (D,) with it and its frozen answer."""
        return Arrivals(self.count + 1, mean, self.order.after(self.count, answer))

    def mixed(self) -> float:
        """How far the classes seem to arrive mixed, from 0 to 1."""
        return self.order.mixed(self.count)


@dataclass(frozen=True, eq=False)
class AdaptedAnswers:
    """What is known of the adapted answers to a stream. Shares, coherence and gain are running averages."""

    masses: Array  # (C,) float64, the sum of all beliefs
    shares: Array  # (C,) float64, the share of each class among the answers of source rows
    coherence: float  # the share of a query's neighbors in the stream that got the same answer
    order: Order  # of the most probable classes of beliefs
    mixed: float  # how far classes seemed mixed by that order when the current BLOCK of queries began
    gain: float  # how much more neighbors agree with adapted answers than with frozen ones

    @classmethod
    def none(cls, classes: int) -> AdaptedAnswers:
        """Before the first query."""
        unsuspicious = GAIN[1]
        uniform = numpy.full(classes, 1 / classes)
        return cls(
            masses=numpy.zeros(classes),
            shares=uniform,
            coherence=0.0,
            order=Order.none(classes),
            mixed=0.0,
            gain=unsuspicious,
        )

    def compared(self, count: int, answer: int, agreement: float | None, weight: float) -> AdaptedAnswers:
        """Returns what is known after one more query has been compared with its neighbors in the stream.

        Args:
            count: how many queries came before it.
            answer: what source rows say of it.
            agreement: the share of its neighbors that got the same answer; None if it has no neighbors.
            weight: how much the agreement counts, from 0 to 1.
        """
        rate = _rate(count, RATE)
        shares = self.shares * (1 - rate)
        shares[answer] += rate
        coherence = self.coherence
        if agreement is not None:
            rate = rate * weight
            coherence = (1 - rate) * coherence + rate * agreement
        return with_fields(self, shares=shares, coherence=coherence)

    def with_belief(self, count: int, belief: Array, arrivals: Arrivals) -> AdaptedAnswers:
        """Returns what is known after one more query has got its belief.

        Args:
            count: how many queries came before it.
            belief: (C,) the belief.
            arrivals: what frozen answers tell about these queries.
        """
        order = self.order.after(count, int(belief.argmax()))
        mixed = self.mixed
        if (count + 1) % BLOCK == 0:
            # Beliefs can confirm that classes still arrive mixed, but not discover it: if a single class arrives and
            # the whole mean is removed, beliefs look mixed for that very reason.
            mixed = min(order.mixed(count + 1), max(mixed, arrivals.mixed()))
        return with_fields(self, masses=self.masses + belief, order=order, mixed=mixed)

    def with_gain(self, count: int, gain: float) -> AdaptedAnswers:
        """Returns what is known after one more query with this gain, which came after ``count`` others."""
        rate = max(1 / (count + 1 - WARM_UP + GAIN_PRIOR), GAIN_RATE)
        return with_fields(self, gain=self.gain + rate * (gain - self.gain))

    def beyond_chance(self) -> float:
        """Returns how much neighbors agree, from 0 (no more than by chance) to 1 (always)."""
        by_chance = float(numpy.square(self.shares).sum())
        return (self.coherence - by_chance) / max(1 - by_chance, 1e-9)

    def trust(self, count: int) -> float:
        """Returns how far adapted answers can be trusted after ``count`` queries, from 0 to 1."""
        if count <= WARM_UP:
            return 0.0
        return _ramp(self.beyond_chance(), *COHERENCE) * _ramp(self.gain, *GAIN)


@dataclass(frozen=True)
class Verdicts:
    """What people's labels say about queries whose frozen and adapted answers differ."""

    adapted: int = 0  # labels for which only the adapted answer was right
    frozen: int = 0  # labels for which only the frozen answer was right

    @property
    def for_adapted(self) -> bool:
        """Whether labels have shown that the adapted answers are better."""
        return self.adapted - self.frozen >= LEAD

    @property
    def for_frozen(self) -> bool:
        """Whether labels have shown that the frozen answers are better."""
        return self.frozen - self.adapted >= LEAD


class PackedNumbers(NamedTuple):
    """The numbers that a packed stream begins with, in this order; its vectors follow."""

    queries: float  # how many queries joined
    repeats: float  # of the frozen answers
    last: float  # of the frozen answers, -1 before the first
    coherence: float
    adapted_right: float  # labels for which only the adapted answer was right
    frozen_right: float  # labels for which only the frozen answer was right
    compared: float  # how many queries were compared with the stream
    frozen_agreement: float
    adapted_agreement: float
    bets: float  # of the alarm
    capital: float
    peak: float
    believed_repeats: float
    believed_last: float
    mixed: float
    gain: float
    novelty: float
    trusted: float


NUMBER_COUNT = len(PackedNumbers._fields)
# How many there were in earlier versions, which ended before gain and before novelty.
EARLIER_NUMBER_COUNTS = (NUMBER_COUNT - 3, NUMBER_COUNT - 2)


@dataclass(frozen=True, eq=False)
class Stream:
    """Everything that is known of a stream apart from its rows."""

    arrivals: Arrivals
    adapted: AdaptedAnswers
    verdicts: Verdicts
    agreements: Agreements
    alarm: Alarm
    novelty: float = 0.0  # the running average over the queries that were learned from
    trusted: int = 0  # how many queries had been learned from when answers were last trusted, 0 if they never were

    @classmethod
    def none(cls, origin: Tensor, classes: int) -> Stream:
        """Before the first query."""
        arrivals = Arrivals.none(origin.cpu().numpy(), classes)
        return cls(arrivals, AdaptedAnswers.none(classes), Verdicts(), Agreements(), Alarm())

    @property
    def is_far_away(self) -> bool:
        """Whether the whole stream is so far from the source that no query is foreign for being far from it."""
        return self.arrivals.count >= WARM_UP and self.novelty > FAR_AWAY

    def takes_for_foreign(self, novelty: float) -> bool:
        """Returns whether the next query would be foreign, given its novelty."""
        return novelty > FOREIGN and not self.is_far_away

    def after(
        self, arrivals: Arrivals, adapted: AdaptedAnswers, agreements: Agreements, alarm: Alarm, novelty: float
    ) -> Stream:
        """Returns the stream after one more query was learned from, given what is known since and its novelty."""
        mean_novelty = self.novelty + _rate(self.arrivals.count, RATE) * (novelty - self.novelty)
        trusted = self.trusted
        if adapted.trust(arrivals.count) >= TRUSTED:
            trusted = arrivals.count
        return Stream(arrivals, adapted, self.verdicts, agreements, alarm, mean_novelty, trusted)

    def packed(self) -> Tensor:
        """Returns everything as one vector (NUMBER_COUNT + D + 4 C,) of float64, for changes and files."""
        arrivals = self.arrivals
        adapted = self.adapted
        numbers = PackedNumbers(
            queries=arrivals.count,
            repeats=arrivals.order.repeats,
            last=arrivals.order.last,
            coherence=adapted.coherence,
            adapted_right=self.verdicts.adapted,
            frozen_right=self.verdicts.frozen,
            compared=self.agreements.count,
            frozen_agreement=self.agreements.frozen,
            adapted_agreement=self.agreements.adapted,
            bets=self.alarm.count,
            capital=self.alarm.capital,
            peak=self.alarm.peak,
            believed_repeats=adapted.order.repeats,
            believed_last=adapted.order.last,
            mixed=adapted.mixed,
            gain=adapted.gain,
            novelty=self.novelty,
            trusted=self.trusted,
        )
        by_class = [arrivals.order.shares, adapted.masses, adapted.shares, adapted.order.shares]
        parts = [numpy.array(numbers, dtype=numpy.float64), arrivals.mean, *by_class]
        return torch.from_numpy(numpy.concatenate(parts))

    @classmethod
    def unpacked(cls, vector: Tensor, dim: int, classes: int) -> Stream:
        """Returns the stream that ``packed`` wrote."""
        ends = numpy.cumsum([NUMBER_COUNT, dim, classes, classes, classes])
        parts = numpy.split(vector.cpu().numpy(), ends)
        first, mean, frozen_shares, masses, source_shares, believed_shares = parts
        numbers = PackedNumbers(*first.tolist())
        frozen_order = Order(frozen_shares, numbers.repeats, int(numbers.last))
        adapted = AdaptedAnswers(
            masses=masses,
            shares=source_shares,
            coherence=numbers.coherence,
            order=Order(believed_shares, numbers.believed_repeats, int(numbers.believed_last)),
            mixed=numbers.mixed,
            gain=numbers.gain,
        )
        return cls(
            arrivals=Arrivals(int(numbers.queries), mean, frozen_order),
            adapted=adapted,
            verdicts=Verdicts(int(numbers.adapted_right), int(numbers.frozen_right)),
            agreements=Agreements(numbers.compared, numbers.frozen_agreement, numbers.adapted_agreement),
            alarm=Alarm(numbers.bets, numbers.capital, numbers.peak),
            novelty=numbers.novelty,
            trusted=int(numbers.trusted),
        )

    def with_verdict(self, *, adapted_right: bool, frozen_right: bool) -> Stream:
        """Returns the stream after a person has said which of the two answers to a query was right."""
        verdicts = self.verdicts
        if adapted_right and not frozen_right:
            verdicts = replace(verdicts, adapted=verdicts.adapted + 1)
        if frozen_right and not adapted_right:
            verdicts = replace(verdicts, frozen=verdicts.frozen + 1)
        return replace(self, verdicts=verdicts)

    def signs(self, calibration: Calibration) -> Signs:
        """Returns the signs in numbers and words, given how errors and agreement are related on the source."""
        arrivals = self.arrivals
        adapted = self.adapted
        mixed = max(arrivals.mixed(), adapted.mixed)
        trust = adapted.trust(arrivals.count)
        sentences = [f"{arrivals.count} queries were learned from."]
        if arrivals.count < WARM_UP:
            sentences.append(f"Answers are the frozen ones until there are {WARM_UP}.")
        else:
            sentences.append(_in_words(mixed, arrivals, trust, adapted))
        if self.is_far_away:
            sentences.append("The stream as a whole is far from the source, so no query is taken for foreign.")
        untrusted = arrivals.count - self.trusted
        if self.trusted and untrusted >= PATIENCE:
            since = f"Answers were last trusted {untrusted} queries ago"
            sentences.append(f"{since}: a rollback to there would forget what was learned from these.")
        known = self.agreements.remembered
        frozen = calibration.interval(self.agreements.frozen, known, mixed)
        given = calibration.interval(self.agreements.adapted, known, mixed)
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
            queries=arrivals.count,
            mixed=mixed,
            agreement=adapted.beyond_chance(),
            gain=adapted.gain,
            trust=trust,
            trusted=self.trusted,
            adapted_right=self.verdicts.adapted,
            frozen_right=self.verdicts.frozen,
            frozen=frozen,
            given=given,
            alarm=alarm,
            words=" ".join(sentences),
        )


class Signs(NamedTuple):
    """What the guard sees."""

    queries: int  # how many queries were learned from
    mixed: float  # how far classes seem to arrive mixed, from 0 to 1
    agreement: float  # how much neighbors in the stream agree: 0 no more than by chance, 1 always
    gain: float  # how much more neighbors agree with adapted answers than with frozen ones
    trust: float  # how far the signs trust adapted answers, from 0 to 1
    trusted: int  # how many queries had been learned from when that was last at least 0.5, 0 if it never was
    adapted_right: int  # labels for which only the adapted answer was right
    frozen_right: int  # labels for which only the frozen answer was right
    frozen: Accuracy  # the accuracy of frozen answers, estimated without labels
    given: Accuracy  # the accuracy of the answers that are given, estimated without labels
    alarm: bool  # whether answers were ever clearly worse than on the source; a false alarm in 1 % of streams at most
    words: str  # everything in words

    def __str__(self) -> str:
        return self.words


def _in_words(mixed: float, arrivals: Arrivals, trust: float, adapted: AdaptedAnswers) -> str:
    """Returns what the signs say of a stream, in two sentences."""
    arrive = "Classes seem to arrive mixed"
    if mixed < 0.5:
        arrive = "Classes do not seem to arrive mixed, so only part of the shift is removed"
    largest = f"the largest class has {100 * arrivals.order.shares.max():.0f} % of the frozen answers"
    agree = f"Neighbors in the stream agree {100 * adapted.beyond_chance():.0f} % of the way from chance to always"
    if trust >= 0.5:
        verdict = "so answers are the adapted ones"
    elif _ramp(adapted.beyond_chance(), *COHERENCE) < 0.5:
        verdict = "which is too little, so answers are mostly the frozen ones"
    else:
        verdict = "but with the adapted answers no better than with the frozen ones, so these are mostly given"
    return f"{arrive}: {largest}. {agree}, {verdict}."


def _percent(accuracy: Accuracy) -> str:
    """Returns an accuracy and its interval as text."""
    return f"{100 * accuracy.estimate:.0f} % ({100 * accuracy.low:.0f} to {100 * accuracy.high:.0f})"


def learned_from(packed: Tensor | None) -> int:
    """Returns how many queries were learned from, given a packed stream of any version; None before the first."""
    if packed is None:
        return 0
    return int(packed[PackedNumbers._fields.index("queries")])


def packed_length(dim: int, classes: int) -> int:
    """Returns the length of a packed stream."""
    return NUMBER_COUNT + dim + 4 * classes


def completed(vector: Tensor, dim: int, classes: int) -> Tensor:
    """Returns a packed stream of an earlier version as today's version packs it, and any other vector unchanged."""
    for known in EARLIER_NUMBER_COUNTS:
        if vector.shape == (known + dim + 4 * classes,):
            nothing_known = Stream.none(vector.new_zeros(dim), classes).packed().to(vector.device)
            return torch.cat([vector[:known], nothing_known[known:NUMBER_COUNT], vector[known:]])
    return vector


def with_more_classes(vector: Tensor, dim: int, classes: int, count: int) -> Tensor:
    """Returns a packed stream of ``classes`` classes extended to ``count``; no query of the new ones has come yet."""
    rest, *by_class = vector.split([NUMBER_COUNT + dim, classes, classes, classes, classes])
    return torch.cat([rest, *(pad(column, (0, count - classes)) for column in by_class)])


def _rate(count: int, least: float) -> float:
    """Returns the weight in a running average of a query that comes after ``count`` others, at least ``least``."""
    return max(1 / (count + 1 + PRIOR), least)


def _ramp(value: float, none: float, full: float) -> float:
    """Returns 0 at ``none`` and beyond, 1 at ``full`` and beyond, and interpolates linearly between them."""
    return min(1.0, max(0.0, (value - none) / (full - none)))
