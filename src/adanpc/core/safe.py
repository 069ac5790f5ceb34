"""The preset "safe": adaptation that gains where it can, and falls back to the frozen answer where it cannot.

The paper's rule lets confident answers vote as if they were labels, so early mistakes attract more of them. Here a
query joins the bank with its belief, not a label, and each belief keeps a part of what source rows say:

    z           the transformed feature, see ``transform``
    frozen      the class-wise vote of source rows for z less the source's origin: nothing of the stream is in it
    moved       z less the running mean of the stream; if classes may not arrive mixed, only that part of the mean is
                removed which cannot be a change of class shares: the part outside the span of class differences
    belief      a mixture of the class-wise vote of source rows for the moved query, and of the beliefs of its nearest
                rows of the stream. The share of the latter grows with how near they are, up to a half; up to all if
                classes arrive mixed. Then classes that have been answered often count less, too.
    answer      trust x belief + (1 - trust) x frozen, see ``guard``. Trust is lower for a query that was nearer to
                source rows before it was moved than it is to any rows now: it may well belong to the source.

A query joins with its belief. A belief that is confident and comes from rows of the stream is sharpened first: passing
beliefs on averages them, so without sharpening they would blur away after a few steps of a growing shift.

Every query joins unless there is nothing to learn from it, because it is foreign or one more copy of earlier queries.
Such a query is answered like any other and leaves no trace.

``stream="mixed"`` is for users who know that classes arrive mixed: the whole mean is removed from the start, and the
belief is the answer. Labels from people have the same effect once they show that adapting is right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from adanpc import require
from adanpc.core.changes import Append, Feedback
from adanpc.core.contents import Contents, Pool
from adanpc.core.estimate import Agreements, Alarm, Calibration, calibrate, comparable
from adanpc.core.estimate import agreement as agreement_with
from adanpc.core.guard import APART, WARM_UP, Beliefs, Stream, Verdicts, distance
from adanpc.core.transform import NEAREST, Parts, Transform, domain_centers, fit, less_centers
from adanpc.core.tryout import suitable_parts
from adanpc.core.types import Neighbors, Origin, Prediction, side_by_side
from adanpc.core.vote import vote
from adanpc.errors import AdaNPCError, EmptyBankError
from adanpc.index import unit
from adanpc.index.grid import Array, to_main_memory
from adanpc.index.protocol import Products

STREAMS = ("unknown", "mixed")
UNKNOWN_DOMAIN = -1
SOURCE_ROWS = 100  # source rows that vote on a query
SOURCE_TEMPERATURE = 0.06
STREAM_ROWS = 10
STREAM_TEMPERATURE = 0.1
SHARPNESS = 8  # how strongly the nearer of stream and source rows is preferred
SHARPNESS_OF_HOME = 16  # the same for a query's place before and after it was moved
SHARPNESS_OF_ANSWERS = 2.5  # the power that given probabilities are raised to, see ``as_given``
SHARPENING = 1.5  # the higher, the less a belief is sharpened that is unsure or does not come from the stream
MOST_UNMIXED = 0.5  # the largest share of stream rows in a belief unless classes arrive mixed
MASS_PRIOR = 8  # queries of each class that the balance assumes before the stream
MANY = 8  # queries of a batch from which products are kept
SOURCE_POOL = Pool(SOURCE_ROWS, source=True, soft=False)
STREAM_POOL = Pool(STREAM_ROWS, source=False)


@dataclass(frozen=True)
class SafeSettings:
    """The settings of the preset "safe". Each of its parts can be switched off by itself.

    Args:
        stream: ``unknown``: nothing is known of the order in which classes arrive; ``mixed``: they arrive mixed.
        transform: whether features are transformed to suit the source; without it they are only centered.
        screen: whether foreign queries and further copies of earlier ones are kept out of the bank.
        guard: whether answers fall back to the frozen ones where neighbors do not agree; without it, trust is 1.
        balance: how strongly classes that were answered often are held back where classes arrive mixed, 0 to 1.
        carry: whether beliefs are carried along as a shift grows: they are sharpened when they are passed on, adapted
            answers may show that classes arrive mixed, and once answers are trusted, source rows count in the guard
            only as much as they do in the belief.
        home: whether queries that lie nearer to the source before they are moved get the frozen answer.
    """

    stream: str = "unknown"
    transform: bool = True
    screen: bool = True
    guard: bool = True
    balance: float = 0.5
    carry: bool = True
    home: bool = True

    def __post_init__(self) -> None:
        require.one_of("stream", self.stream, STREAMS)
        for name in ("transform", "screen", "guard", "carry", "home"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise AdaNPCError(f"{name} must be True or False, got {value!r}")
        object.__setattr__(self, "balance", require.between("balance", self.balance, 0, 1))


# What joins the bank


def prepared(change: Append, features: Tensor, contents: Contents, settings: SafeSettings) -> Append:
    """Returns the change with its checked features (n, D) in the form that the bank stores.

    The first source rows fit the transform. Source rows are centered by their domains; a row from an expert is placed
    where the next query would be.
    """
    if not len(features):
        return change
    if change.origin != Origin.SOURCE:
        transformed = transformed_by(contents, features)
        frames = frames_apart(contents, transformed, settings)
        return replace(change, features=joining(frames, transformed), centered=True)
    labels = change.labels
    domains = torch.as_tensor(change.domain, device=features.device).expand(len(features))
    transform = contents.statistics.transform
    classes = contents.settings.classes
    unfitted = transform is None
    if transform is None:
        transform = fitted(features, labels, domains, classes, settings)
    transformed = transform(features)
    centers = source_centers(transform, transformed, labels, domains, first=unfitted)
    rows = directed(less_centers(transformed, domains, centers), transformed)
    change = replace(change, features=rows, centered=True)
    if unfitted:
        calibration = calibrate(
            unit(rows),
            labels,
            domains,
            classes,
            voters=SOURCE_ROWS,
            per_class=transform.per_class,
            witnesses=STREAM_ROWS,
            temperature=STREAM_TEMPERATURE,
        )
        packed = calibration.packed().to(features.device)
        change = replace(change, transform=replace(transform, calibration=packed))
    return change


def fitted(features: Tensor, labels: Tensor, domains: Tensor, classes: int, settings: SafeSettings) -> Transform:
    """Returns the transform for source features (n, D) with labels (n,) and domains (n,), not calibrated yet."""
    parts = Parts()
    if settings.transform:
        parts = suitable_parts(features, labels, domains, classes)
    return fit(features, labels, domains, classes, parts)


def source_centers(
    transform: Transform, transformed: Tensor, labels: Tensor, domains: Tensor, *, first: bool
) -> dict[int, Tensor]:
    """Returns the center (D,) of each domain among source rows (n, D) with labels (n,) and domains (n,).

    Rows of an unknown domain that come after the first rows of the bank are centered like those. They may come a few
    at a time or class by class, and then their own mean is mostly that of their classes.
    """
    centers = domain_centers(transformed, labels, domains)
    if not first and UNKNOWN_DOMAIN in centers:
        centers[UNKNOWN_DOMAIN] = transform.origin
    return centers


def directed(moved: Tensor, transformed: Tensor) -> Tensor:
    """Returns moved features in float32. One that was moved to the very origin keeps its earlier direction."""
    moved = moved.float()
    return torch.where((moved == 0).all(1, keepdim=True), transformed.float(), moved)


# Where queries are compared with rows


class Frame(NamedTuple):
    """The place in which one query is compared with the rows of the bank."""

    moved: Array  # (D,) float64
    mean: Array  # (D,) float64, the mean of the stream once the query has joined
    mixed: float  # how far classes seem to arrive mixed
    nearer: float  # the squared length of the query after it was moved, divided by that before


def frames_of(transform: Transform, transformed: Tensor, means: list[Array], mixed: list[float]) -> list[Frame]:
    """Returns the frames of queries (B, D).

    Args:
        transform: the transform of the bank.
        transformed: the transformed queries.
        means: of the stream once each query has joined.
        mixed: how far classes seem to arrive mixed before each query.
    """
    if not means:
        return []
    device = transformed.device
    shifts = torch.from_numpy(numpy.stack(means)).to(device) - transform.origin
    ambiguous = transform.within_span(shifts)  # either part of the shift, or due to which classes happened to come
    came = transformed - transform.origin
    left = torch.tensor(mixed, dtype=torch.float64, device=device)[:, None]
    moved = to_main_memory(came - (shifts - ambiguous) - left * ambiguous)
    before = numpy.square(to_main_memory(came)).sum(1)
    nearer = numpy.square(moved).sum(1) / numpy.maximum(before, APART)
    return [Frame(*frame) for frame in zip(moved, means, mixed, nearer.tolist(), strict=True)]


def frames_apart(contents: Contents, transformed: Tensor, settings: SafeSettings) -> list[Frame]:
    """Returns the frame that each query (B, D) would have if it came next."""
    stream = contents.stream()
    arrivals = stream.arrivals
    means = [arrivals.mean_with(query) for query in to_main_memory(transformed)]
    mixed = max(mixed_at_least(settings, stream), arrivals.mixed())
    return frames_of(contents.transform(), transformed, means, [mixed] * len(means))


def joining(frames: list[Frame], transformed: Tensor) -> Tensor:
    """Returns queries (B, D) as they would join the bank, in float32."""
    if not frames:
        return transformed.float()
    moved = torch.from_numpy(numpy.stack([frame.moved for frame in frames])).to(transformed.device)
    return directed(moved, transformed)


def still(contents: Contents, features: Tensor) -> Tensor:
    """Returns queries (B, D) as they are compared before anything is known of the stream, in float32."""
    return _directed_from_origin(contents, transformed_by(contents, features))


def _directed_from_origin(contents: Contents, transformed: Tensor) -> Tensor:
    return directed(contents.transform().still(transformed), transformed)


def transformed_by(contents: Contents, features: Tensor) -> Tensor:
    """Returns checked features (B, D) after the transform, in float64."""
    return contents.transform()(features)


def knows_mixed(settings: SafeSettings, verdicts: Verdicts) -> bool:
    """Returns whether classes are known to arrive mixed, from the user or from labels."""
    return settings.stream == "mixed" or verdicts.for_adapted


def mixed_at_least(settings: SafeSettings, stream: Stream) -> float:
    """Returns how far classes arrive mixed, from 0 to 1, according to anything but the frozen answers."""
    if knows_mixed(settings, stream.verdicts):
        return 1.0
    return stream.beliefs.mixed


# Answers


class Frozen(NamedTuple):
    """The answers of source rows alone to queries (B, D)."""

    probs: Tensor  # (B, C) float64
    weights: Tensor  # (B, K)
    neighbors: Neighbors
    distance: list[float]  # (B,) to the nearest source rows


def frozen_answers(contents: Contents, near: Neighbors) -> Frozen:
    """Returns the answers of the source rows near queries that have not been moved."""
    if near.missing_for_some:
        raise EmptyBankError("no source row of the bank may vote: learn source rows first, or restore vetoed ones")
    probs, weights = vote_of_source(contents, near)
    return Frozen(probs, weights, near, _distances(near))


def vote_of_source(contents: Contents, near: Neighbors) -> tuple[Tensor, Tensor]:
    """Returns the probabilities (B, C) voted by the source rows near queries, and the weights of these rows (B, K)."""
    per_class = contents.transform().per_class
    return vote(near, contents.settings.classes, "classwise", SOURCE_TEMPERATURE, per_class=per_class)


def products_for(contents: Contents, still: Tensor) -> Products | None:
    """Returns the products of all rows with what queries (B, D) consist of in any frame, if the index keeps products.

    A moved query is made of the queries of its batch as they came, ``still``, of the mean of the stream before them,
    and of directions in which classes differ. None also for a few queries, for which reading all rows again is as fast.
    """
    if len(still) < MANY:
        return None
    transform = contents.transform()
    mean = torch.from_numpy(contents.stream().arrivals.mean).to(still.device)
    shift = unit((mean - transform.origin)[None])
    return contents.products(torch.cat([still, shift, transform.span.float()]))


def frozen_queries(contents: Contents, transformed: Tensor) -> Tensor:
    """Returns transformed queries (B, D) at length one, as they are before anything is known of the stream."""
    return unit(_directed_from_origin(contents, transformed))


class Witnesses(NamedTuple):
    """The nearest rows of the stream to one query, most similar first."""

    ids: Array  # (k,)
    similarity: Array  # (k,) float64
    labels: Array  # (k,)
    beliefs: Array  # (k, C) float32

    @property
    def distance(self) -> float:
        """The distance between the query and these rows; infinite if there are none."""
        if not len(self.similarity):
            return inf
        return distance(self.similarity)

    @classmethod
    def of_each(cls, near: Neighbors) -> list[Witnesses]:
        """Returns the neighbors of each query, without the padding of absent ones."""
        soft = near.soft
        assert soft is not None  # a bank of this preset keeps them
        ids, similarity, labels, beliefs = map(to_main_memory, (near.ids, near.similarity, near.labels, soft))
        witnesses = []
        for query, found in enumerate((ids >= 0).sum(1).tolist()):  # absent neighbors come last
            present = slice(0, found)
            columns = (column[query, present] for column in (ids, similarity, labels, beliefs))
            witnesses.append(cls(*columns))
        return witnesses


class Evidence(NamedTuple):
    """What source rows say of one query after it was moved."""

    probs: Array  # (C,) float64
    distance: float  # to the nearest of them


def evidence_of(near: Neighbors, probs: Tensor) -> list[Evidence]:
    """Returns the evidence for each query, given its source neighbors and the probabilities (B, C) that they vote."""
    return [Evidence(row, far) for row, far in zip(to_main_memory(probs), _distances(near), strict=True)]


def _distances(near: Neighbors) -> list[float]:
    """Returns the distance of each query from its nearest neighbors, at most NEAREST of them."""
    nearest = to_main_memory(near.similarity[:, :NEAREST])
    found = (nearest > -numpy.inf).sum(1)  # absent neighbors come last
    distances = []
    for similarities, count in zip(nearest, found.tolist(), strict=True):
        distances.append(distance(similarities[:count]))
    return distances


def novelty_of(transform: Transform, frozen: float, evidence: Evidence) -> float:
    """Returns how unlike the source a query is, from 0 to 1, given its distances before and after it was moved.

    The shorter distance counts, because a shift of the whole stream does not make its queries foreign.
    """
    return transform.novelty(1 - min(frozen, evidence.distance))


class Belief(NamedTuple):
    """The answer to one query, and what it is made of."""

    belief: Array  # (C,) float64
    passed_on: Array  # (C,) float64, the belief that the query joins with
    mixture: Array  # (C,) float64, with the frozen answer mixed in; the user gets it ``as_given``
    trust: float
    stream_share: float  # the share of stream rows in the belief
    emphasis: Array  # (C,) float64, the factor for votes for each class, scaled so that beliefs sum to 1
    witnesses: Witnesses
    votes: Array  # (k,) float64, the weights of the witnesses; they sum to 1
    after: Beliefs  # this and the next two: what is known once the query has joined
    agreements: Agreements
    alarm: Alarm


def believe(
    settings: SafeSettings,
    calibration: Calibration,
    stream: Stream,
    frame: Frame,
    frozen: Array,
    frozen_distance: float,
    evidence: Evidence,
    witnesses: Witnesses,
) -> Belief:
    """Returns the answer to one query, and what is known of the stream after it.

    Args:
        settings: the settings of the preset.
        calibration: how errors and agreement are related on the source.
        stream: what is known of the stream before the query.
        frame: the frame of the query.
        frozen: (C,) its frozen answer.
        frozen_distance: its distance to the nearest source rows before it was moved.
        evidence: what source rows say of it after it was moved.
        witnesses: rows of the stream near it.
    """
    count = stream.arrivals.count
    answered = int(evidence.probs.argmax())
    votes = _softmax(witnesses.similarity / STREAM_TEMPERATURE)
    to_stream = witnesses.distance
    share = _stream_share(evidence.distance, to_stream, len(votes), frame.mixed)
    belief = evidence.probs
    if len(votes):
        from_stream = (votes[:, None] * witnesses.beliefs).sum(0)
        belief = (1 - share) * belief + share * from_stream
    beliefs = _compared(settings, stream, answered, votes, witnesses, share)
    emphasis = (beliefs.masses + MASS_PRIOR) ** (-settings.balance * frame.mixed)
    weighted = belief * emphasis
    total = weighted.sum()
    belief = weighted / total
    trust = _trust(settings, stream.verdicts, beliefs, count + 1)
    if settings.home:
        nearest = min(evidence.distance, to_stream)
        trust *= nearness(nearest * frame.nearer, frozen_distance, SHARPNESS_OF_HOME)
    mixture = trust * belief + (1 - trust) * frozen
    passed_on = belief
    after = beliefs.with_belief(count, belief, stream.arrivals)
    if settings.carry:
        passed_on = _sharpened(belief, share)
    else:
        after = replace(after, mixed=0.0)
    agreements = stream.agreements
    alarm = stream.alarm
    # The first rows of a stream are few and far apart, so there is little to agree with.
    if count >= WARM_UP and comparable(evidence.distance, to_stream):
        frozen_answer = int(frozen.argmax())
        agreement = cache(partial(agreement_with, votes, witnesses.labels, moved=answered))  # answers are often equal
        of_frozen = agreement(frozen_answer)
        of_belief = agreement(int(belief.argmax()))
        of_answer = agreement(int(mixture.argmax()))
        after = after.with_gain(count, of_belief - of_frozen)
        # Removing the shift has changed the answer. A calibration without shifts knows nothing of such errors.
        doubt = 0.0
        if frozen_answer != answered and not calibration.has_seen_shifts:
            doubt = frame.mixed
        of_frozen = (1 - doubt) * of_frozen
        of_answer = (1 - doubt / 2) * of_answer
        agreements = agreements.after(of_frozen, of_answer)
        alarm = alarm.after(of_answer, calibration.alarm_level)
    return Belief(
        belief,
        passed_on,
        mixture,
        trust,
        share,
        emphasis / total,
        witnesses,
        votes,
        after,
        agreements,
        alarm,
    )


def as_given(probs: Array) -> Array:
    """Returns probabilities (…, C) as the user gets them: raised to SHARPNESS_OF_ANSWERS.

    The class-wise vote compares means of many similarities, which differ little, so its probabilities are far too
    cautious to be read as confidence: answers of which 85 % are right have a mean confidence of 38 %. Beliefs stay that
    cautious, since they are passed on to other queries. The most probable class does not change.
    """
    # Squares and roots are rounded the same way everywhere; the last bits of a power depend on the library.
    powers = probs * probs * numpy.sqrt(probs)
    return numpy.asarray(powers / powers.sum(-1, keepdims=True))


def factors_of(given: Array, probs: Array) -> Array:
    """Returns what ``as_given`` multiplied probabilities (…, C) by; 0 where there was nothing to multiply."""
    # A class that every witness has ruled out, again and again, ends with a belief of exactly 0.
    factors = numpy.zeros_like(probs)
    numpy.divide(given, probs, out=factors, where=probs > 0)
    return factors


def _compared(
    settings: SafeSettings, stream: Stream, answered: int, votes: Array, witnesses: Witnesses, share: float
) -> Beliefs:
    """Returns what is known of beliefs once a query has been compared with its witnesses.

    Args:
        settings: the settings of the preset.
        stream: what is known of the stream before the query.
        answered: the class that source rows vote for.
        votes: (k,) the weights of the witnesses.
        witnesses: rows of the stream near the query.
        share: the share of the witnesses in the belief.
    """
    count = stream.arrivals.count
    agreement = None
    if len(votes):
        agreement = float((votes * (witnesses.labels == answered)).sum())
    weight = 1.0
    if settings.carry:
        weight = 1 - share * stream.beliefs.trust(count)
    return stream.beliefs.compared(count, answered, agreement, weight)


def _softmax(values: Array) -> Array:
    """Returns the softmax of values (k,). The first value must be the largest."""
    powers = numpy.exp(values - values[:1])
    return numpy.asarray(powers / powers.sum())


def _trust(settings: SafeSettings, verdicts: Verdicts, beliefs: Beliefs, count: int) -> float:
    """Returns how much the belief counts in the answer to query number ``count``."""
    if verdicts.for_frozen:
        return 0.0
    if knows_mixed(settings, verdicts) or not settings.guard:
        return 1.0
    return beliefs.trust(count)


def _stream_share(to_source: float, to_stream: float, found: int, mixed: float) -> float:
    """Returns the part of a belief that comes from rows of the stream.

    Args:
        to_source: the distance to the nearest source rows.
        to_stream: the distance to the nearest rows of the stream.
        found: how many of those there are.
        mixed: how far classes seem to arrive mixed.
    """
    if not found:
        return 0.0
    most = MOST_UNMIXED + (1 - MOST_UNMIXED) * mixed
    share = min(most, nearness(to_stream, to_source, SHARPNESS))
    return share * (found / STREAM_ROWS)  # the first few rows of a stream count less


def _sharpened(belief: Array, share: float) -> Array:
    """Returns a belief (C,) as it is passed on, given the share of stream rows in it.

    The more confident it is, and the more of it was averaged from other beliefs, the more it is sharpened: at most, it
    is squared.
    """
    powers = belief ** (1 + (share * float(belief.max())) ** SHARPENING)
    return numpy.asarray(powers / powers.sum())


def nearness(one: float, other: float, sharpness: int) -> float:
    """Compares two distances: returns 1 if the first is much shorter, 1/2 if both are equal, 0 if it is much longer."""
    return 1 / (1 + (one / other) ** sharpness)


def predict(contents: Contents, features: Tensor, settings: SafeSettings, exclude: Tensor | None) -> Prediction:
    """Returns the answer that each query (B, D) would get if it came next."""
    transformed = transformed_by(contents, features)
    frames = frames_apart(contents, transformed, settings)
    moved = unit(joining(frames, transformed))
    count = len(moved)
    if exclude is not None:
        exclude = torch.cat([exclude, exclude])
    together = torch.cat([frozen_queries(contents, transformed), moved])
    source, stream = contents.nearest_of(together, [SOURCE_POOL, STREAM_POOL], exclude)
    frozen = frozen_answers(contents, source.of(slice(0, count)))
    source = source.of(slice(count, None))
    witnesses_of = Witnesses.of_each(stream.of(slice(count, None)))
    probs, weights = vote_of_source(contents, source)
    known = contents.stream()
    calibration = contents.calibration()
    transform = contents.transform()
    answers = []
    novelty = []
    for query, evidence in enumerate(evidence_of(source, probs)):
        witnesses = witnesses_of[query]
        frozen_answer = to_main_memory(frozen.probs[query])
        far = frozen.distance[query]
        answers.append(believe(settings, calibration, known, frames[query], frozen_answer, far, evidence, witnesses))
        novelty.append(novelty_of(transform, far, evidence))
    joined = torch.full((count,), -1, device=features.device)
    return prediction_of(contents, frozen, source, weights, answers, novelty, joined)


class Question(NamedTuple):
    """A query on which the frozen and the adapted answer differ, so that a label would decide between them."""

    query: int  # its row among the features given to ``ask``
    frozen: int  # the answer without anything learned from the stream
    adapted: int  # the answer with everything learned from it

    def answered(self, label: int, *, who: str = "", why: str = "", when: float | None = None) -> Feedback:
        """Returns the change that a person's label makes. It is not applied here."""
        return Feedback(label, self.frozen, self.adapted, who, why, when)


def questions(contents: Contents, features: Tensor, settings: SafeSettings, most: int) -> list[Question]:
    """Returns at most ``most`` of the queries (B, D), those with the most informative labels first.

    The adapted answer is the one that would be given if classes were known to arrive mixed. A label is informative if
    exactly one of the two answers is right, so queries come first for which that is most probable.
    """
    answer = predict(contents, features, replace(settings, stream="mixed"), None)
    assert answer.frozen is not None  # it is this preset's
    adapted = answer.labels
    frozen = answer.frozen.argmax(1)
    both = torch.stack([frozen, adapted], 1)  # (B, 2)
    one_is_right = (answer.probs + answer.frozen).gather(1, both).sum(1)
    order = one_is_right.masked_fill(frozen == adapted, -1).argsort(descending=True, stable=True)
    differing = int((frozen != adapted).sum())
    return [Question(query, *both[query].tolist()) for query in order[: min(most, differing)].tolist()]


def prediction_of(
    contents: Contents,
    frozen: Frozen,
    source: Neighbors,
    source_weights: Tensor,
    answers: list[Belief],
    novelty: list[float],
    joined: Tensor,
) -> Prediction:
    """Returns all answers as one value, with the rows behind them and their weights.

    Args:
        contents: what the bank holds.
        frozen: the frozen answers.
        source: source rows near the queries after they were moved.
        source_weights: (B, K) the weights of these rows in the class-wise vote.
        answers: the answers, one per query.
        novelty: the novelty of each query.
        joined: (B,) the ids that the queries get, -1 for those that do not join.
    """
    classes = contents.settings.classes
    device = joined.device
    if not answers:
        nothing = torch.zeros(0, classes, device=device)
        none = nothing[:, 0]
        return Prediction(nothing, torch.zeros(0, 0, device=device), source, joined, None, none, nothing, none)
    trust = torch.tensor([answer.trust for answer in answers], dtype=torch.float64, device=device)
    stream_share = torch.tensor([answer.stream_share for answer in answers], dtype=torch.float64, device=device)
    mixtures = numpy.stack([answer.mixture for answer in answers])  # (B, C)
    given = as_given(mixtures)
    factors = factors_of(given, mixtures)
    rescaled = torch.from_numpy(factors).to(device)
    emphasis = _stacked([answer.emphasis for answer in answers], device) * rescaled  # (B, C)
    source_part = (trust * (1 - stream_share))[:, None] * source_weights * _of_labels(emphasis, source)
    stream, votes, heard = _padded_witnesses(answers, factors, device)
    stream_part = (trust * stream_share)[:, None] * votes * heard
    frozen_part = (1 - trust)[:, None] * frozen.weights * _of_labels(rescaled, frozen.neighbors)
    # A row that votes in both frames is shown once.
    place, shared = _places_among(source.ids, frozen.neighbors.ids)
    source_part = source_part + frozen_part.gather(1, place).masked_fill(~shared, 0)
    _, again = _places_among(frozen.neighbors.ids, source.ids)
    frozen_part = frozen_part.masked_fill(again, 0)
    neighbors = side_by_side([source, frozen.neighbors.without(again), stream])
    return Prediction(
        torch.from_numpy(given).to(device).float(),
        torch.cat([source_part, frozen_part, stream_part], 1).float(),
        neighbors,
        joined,
        trust=trust.float(),
        frozen=torch.from_numpy(as_given(to_main_memory(frozen.probs))).to(device).float(),
        novelty=torch.tensor(novelty, device=device),
    )


def _places_among(ids: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where each of some ids (B, K) stands among other ids (B, L), and whether it is there at all.

    Absent neighbors, with id -1, are not.
    """
    ordered, order = others.sort(1)
    place = torch.searchsorted(ordered, ids).clamp(max=others.shape[1] - 1)
    present = (ordered.gather(1, place) == ids) & (ids >= 0)
    return order.gather(1, place), present


def _of_labels(by_class: Tensor, neighbors: Neighbors) -> Tensor:
    """Returns, for each neighbor (B, K), the value of its class among values by class (B, C)."""
    return by_class.gather(1, neighbors.labels.clamp(min=0))


def _stacked(rows: list[Array], device: torch.device) -> Tensor:
    return torch.from_numpy(numpy.stack(rows)).to(device)


def _padded_witnesses(answers: list[Belief], factors: Array, device: torch.device) -> tuple[Neighbors, Tensor, Tensor]:
    """Returns the witnesses of all queries as neighbors (B, STREAM_ROWS), their votes, and what those count for.

    Args:
        answers: the answers, one per query.
        factors: (B, C) the factors by which ``as_given`` changed the probability of each class.
        device: where the result is needed.
    """
    shape = (len(answers), STREAM_ROWS)
    ids = numpy.full(shape, -1)
    similarity = numpy.full(shape, -numpy.inf)
    labels = numpy.full(shape, -1)
    votes = numpy.zeros(shape)
    heard = numpy.zeros(shape)
    for query, answer in enumerate(answers):
        found = len(answer.votes)
        ids[query, :found] = answer.witnesses.ids
        similarity[query, :found] = answer.witnesses.similarity
        labels[query, :found] = answer.witnesses.labels
        votes[query, :found] = answer.votes
        heard[query, :found] = (answer.witnesses.beliefs * answer.emphasis * factors[query]).sum(1)
    columns = [torch.from_numpy(column).to(device) for column in (ids, similarity, labels, votes, heard)]
    return Neighbors(*columns[:3]), columns[3], columns[4]
