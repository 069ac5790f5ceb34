"""The preset "safe": adaptation that gains where it can, and falls back to the frozen answer where it cannot.

The paper's rule lets confident answers vote as if they were labels, so early mistakes attract more of them. Here
every query joins the bank, but with its belief, not a label, and each belief keeps a part of what source rows say:

    z           the transformed feature, see ``transform``
    frozen      the class-wise vote of source rows for z less the source's origin: nothing of the stream is in it
    moved       z less the running mean of the stream; if classes may not arrive mixed, only that part of the mean is
                removed which cannot be a change of class shares: the part outside the span of class differences
    belief      a mixture of the class-wise vote of source rows for the moved query, and of the beliefs of its nearest
                rows of the stream. The share of the latter grows with how near they are, up to a half; up to all if
                classes arrive mixed. Then classes that have been answered often count less, too.
    answer      trust x belief + (1 - trust) x frozen, see ``guard``

No search depends on an earlier answer, only on earlier features, so a batch is searched at once; beliefs are then
formed one after another. ``stream="mixed"`` is for those who know that classes arrive mixed: the whole mean is removed
from the start, and the belief is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from adanpc import require
from adanpc.core.changes import Append
from adanpc.core.contents import Contents
from adanpc.core.eviction import Eviction
from adanpc.core.guard import Arrivals, Beliefs, Stream
from adanpc.core.transform import Transform, centered, domain_centers, fit
from adanpc.core.types import Neighbors, Origin, Prediction, side_by_side
from adanpc.core.vote import vote
from adanpc.errors import AdaNPCError, EmptyBankError, LabelError
from adanpc.index import unit

STREAMS = ("unknown", "mixed")
SOURCE_ROWS = 100  # that vote for a query
SOURCE_TEMPERATURE = 0.06
STREAM_ROWS = 10
STREAM_TEMPERATURE = 0.1
SHARPNESS = 8  # of the share of stream rows, as a function of how near they are
MOST_UNMIXED = 0.5  # the largest share of stream rows in a belief where classes may not arrive mixed
MASS_PRIOR = 8  # queries of each class that the balance starts with
APART = 1e-6  # the least distance from neighbors


@dataclass(frozen=True)
class SafeSettings:
    """What can be chosen of the preset "safe".

    Args:
        stream: ``unknown``: nothing is known of the order in which classes arrive; ``mixed``: they arrive mixed.
        guard: whether answers fall back to the frozen ones where neighbors do not agree; without it, trust is 1.
        balance: how strongly classes that were answered often are held back where classes arrive mixed, 0 to 1.
    """

    stream: str = "unknown"
    guard: bool = True
    balance: float = 0.5

    def __post_init__(self) -> None:
        require.one_of("stream", self.stream, STREAMS)
        if not isinstance(self.guard, bool):
            raise AdaNPCError(f"guard must be True or False, got {self.guard!r}")
        object.__setattr__(self, "balance", require.between("balance", self.balance, 0, 1))


def prepared(change: Append, features: Tensor, contents: Contents, settings: SafeSettings) -> Append:
    """The change with its checked features (n, D) as the bank is to store them.

    The first source rows fit the transform. Source rows are centered by their domains; a row of an expert's stands
    where a query that came next would.
    """
    if not len(features):
        return change
    transform = contents.statistics.transform
    if change.origin != Origin.SOURCE:
        moved = _questions(contents, features, settings, sequence=False, exclude=None).moved
        return replace(change, features=moved, centered=True)
    labels = torch.as_tensor(change.labels, device=features.device)
    domains = _domains(change, features)
    if labels.shape != (len(features),):
        return change  # the bank says what is wrong with them
    fitted = None
    if transform is None:
        transform = fitted = fit(features, labels, domains, contents.settings.classes)
    transformed = transform(features)
    rows = centered(transformed, domains, domain_centers(transformed, labels, domains))
    return replace(change, features=_directed(rows, transformed), centered=True, transform=fitted)


def _domains(change: Append, features: Tensor) -> Tensor:
    domains = torch.as_tensor(change.domain, device=features.device)
    if domains.ndim and domains.shape != (len(features),):
        raise LabelError(f"domain must have shape ({len(features)},), a row for each, got {tuple(domains.shape)}")
    return domains.expand(len(features))


def _directed(moved: Tensor, transformed: Tensor) -> Tensor:
    """Moved features in float32; one that was moved to the origin keeps the direction that it had."""
    moved = moved.float()
    return torch.where((moved == 0).all(1, keepdim=True), transformed.float(), moved)


class Questions(NamedTuple):
    """What queries (B, D) ask the bank, and how it answers without its stream."""

    moved: Tensor  # (B, D) float32, what joins the bank
    queries: Tensor  # (B, D) the same at length one
    frozen: Tensor  # (B, C) float64
    frozen_weights: Tensor  # (B, K)
    frozen_neighbors: Neighbors
    arrivals: list[Arrivals]  # after each query
    mixed: list[float]  # how far classes seem to arrive mixed, at each query


def _questions(
    contents: Contents, features: Tensor, settings: SafeSettings, *, sequence: bool, exclude: Tensor | None
) -> Questions:
    transform = _transform_of(contents)
    transformed = transform(features)
    queries = unit(_directed(transformed - transform.origin, transformed))
    near = contents.nearest(queries, SOURCE_ROWS, exclude, True, with_soft=False)
    _check_voters(near)
    frozen, weights = vote(near, contents.settings.classes, "classwise", SOURCE_TEMPERATURE)
    before = stream_of(contents).arrivals
    arrivals: list[Arrivals] = []
    mixed: list[float] = []
    moved: list[Tensor] = []
    for query, answer in zip(transformed, frozen.argmax(1).tolist(), strict=True):
        now = before.after(query, answer)
        share = 1.0 if settings.stream == "mixed" else now.mixed()
        shift = now.mean - transform.origin
        ambiguous = transform.within_span(shift)  # it may be the shift, or the classes that happened to come
        moved.append(query - transform.origin - (shift - ambiguous) - share * ambiguous)
        arrivals.append(now)
        mixed.append(share)
        if sequence:
            before = now
    joining = transformed.float()
    if moved:
        joining = _directed(torch.stack(moved), transformed)
    return Questions(joining, unit(joining), frozen, weights, near, arrivals, mixed)


def still(contents: Contents, features: Tensor) -> Tensor:
    """Queries (B, D) where they are if nothing is known of the stream, float32."""
    transform = _transform_of(contents)
    transformed = transform(features)
    return _directed(transformed - transform.origin, transformed)


def _transform_of(contents: Contents) -> Transform:
    transform = contents.statistics.transform
    if transform is None:
        raise EmptyBankError("no row of the bank may vote: learn source rows first")
    return transform


def _check_voters(near: Neighbors) -> None:
    if (near.ids < 0).all(1).any():
        raise EmptyBankError("no source row of the bank may vote: learn source rows first, or restore vetoed ones")


def stream_of(contents: Contents) -> Stream:
    """What is known of the stream so far."""
    settings = contents.settings
    packed = contents.statistics.stream
    if packed is not None:
        return Stream.unpacked(packed, settings.dim, settings.classes)
    origin = _transform_of(contents).origin
    return Stream(Arrivals.none(origin, settings.classes), Beliefs.none(settings.classes, origin.device))


def predict(contents: Contents, features: Tensor, settings: SafeSettings, exclude: Tensor | None) -> Prediction:
    """What each query (B, D) would be answered if it came next."""
    asked = _questions(contents, features, settings, sequence=False, exclude=exclude)
    source = contents.nearest(asked.queries, SOURCE_ROWS, exclude, True, with_soft=False)
    stream = contents.nearest(asked.queries, STREAM_ROWS, exclude, False)
    evidence, weights = vote(source, contents.settings.classes, "classwise", SOURCE_TEMPERATURE)
    beliefs = stream_of(contents).beliefs
    answers = []
    for query in range(len(features)):
        witnesses = Witnesses.among(_one(stream, query))
        answers.append(_believe(settings, asked, query, evidence[query], source.similarity[query], witnesses, beliefs))
    joined = torch.full((len(features),), -1, device=features.device)
    return _prediction(contents, asked, source, weights, answers, joined)


def propose(
    contents: Contents, queue: Eviction | None, features: Tensor, settings: SafeSettings
) -> tuple[Prediction, Append | None]:
    """The answers to queries (B, D) that arrive in this order, and the change by which all of them join.

    Args:
        contents: of the bank when the first one arrives.
        queue: of its evictions, which is used up; None without a capacity.
        features: checked.
        settings: of the preset.
    """
    count = len(features)
    asked = _questions(contents, features, settings, sequence=True, exclude=None)
    source = contents.nearest(asked.queries, SOURCE_ROWS, None, True, with_soft=False)
    evidence, weights = vote(source, contents.settings.classes, "classwise", SOURCE_TEMPERATURE)
    beliefs = stream_of(contents).beliefs
    answers: list[Belief] = []
    for query, witnesses in enumerate(_witnesses_in_turn(contents, queue, asked.queries, answers)):
        answer = _believe(settings, asked, query, evidence[query], source.similarity[query], witnesses, beliefs)
        beliefs = answer.beliefs
        answers.append(answer)
    joined = contents.next_id + torch.arange(count, device=features.device)
    prediction = replace(_prediction(contents, asked, source, weights, answers, joined), provisional=contents.next_id)
    if not count:
        return prediction, None
    soft = torch.stack([answer.belief for answer in answers]).float()
    return prediction, Append(
        asked.moved,
        soft.argmax(1),
        Origin.ADMITTED,
        soft=soft,
        confidence=soft.amax(1),
        centered=True,
        stream=Stream(asked.arrivals[-1], beliefs).packed(),
    )


class Witnesses(NamedTuple):
    """The nearest rows of the stream to one query, most similar first."""

    ids: Tensor  # (k,)
    similarity: Tensor  # (k,) float64
    labels: Tensor  # (k,)
    beliefs: Tensor  # (k, C) float32

    @classmethod
    def among(cls, near: Neighbors) -> Witnesses:
        """The first STREAM_ROWS of one query's neighbors (1, K) that there are."""
        beliefs = near.soft
        assert beliefs is not None  # a bank of this preset keeps them
        columns = (near.ids[0], near.similarity[0], near.labels[0], beliefs[0])
        present = (near.ids[0] >= 0).nonzero()[:STREAM_ROWS, 0]
        return cls(*(column[present] for column in columns))


class Belief(NamedTuple):
    """The answer to one query, and what it is made of."""

    belief: Tensor  # (C,) float64
    answer: Tensor  # (C,) float64, with the frozen answer mixed in
    trust: float
    stream_share: float  # of the rows of the stream in the belief
    emphasis: Tensor  # (C,) float64, by which votes for each class were multiplied, so that beliefs sum to 1
    witnesses: Witnesses
    votes: Tensor  # (k,) float64, of the witnesses; they sum to 1
    beliefs: Beliefs  # after it


def _one(near: Neighbors, query: int) -> Neighbors:
    """The neighbors of one query (1, K)."""
    here = slice(query, query + 1)
    beliefs = near.soft
    assert beliefs is not None  # a bank of this preset keeps them
    return Neighbors(near.ids[here], near.similarity[here], near.labels[here], beliefs[here])


def _witnesses_in_turn(
    contents: Contents, queue: Eviction | None, queries: Tensor, answers: list[Belief]
) -> Iterator[Witnesses]:
    """The nearest rows of the stream to each query, earlier queries of the batch among them.

    Args:
        contents: of the bank when the first query arrives.
        queue: of its evictions.
        queries: (B, D) at length one.
        answers: to the queries whose witnesses were taken; the caller adds one before it asks for the next.
    """
    count = len(queries)
    # As many rows may be evicted before the last query's turn; that many more are found, to take their place.
    leaving = 0 if queue is None else count
    near = contents.nearest(queries, STREAM_ROWS + leaving, None, False)
    stored = contents.index.stored(queries)
    similarity = queries.double() @ stored.double().T  # (B, B), exact
    first = contents.next_id
    gone: set[int] = set()
    fresh_ids = first + torch.arange(count, device=queries.device)
    for query in range(count):
        own = _one(near, query)
        if gone:
            own = own.without(torch.isin(own.ids, torch.tensor(sorted(gone), device=own.ids.device)))
        if query:
            beliefs = torch.stack([answer.belief for answer in answers]).float()
            fresh = Neighbors(
                fresh_ids[None, :query], similarity[query : query + 1, :query], beliefs.argmax(1)[None], beliefs[None]
            )
            if gone:
                fresh = fresh.without(torch.isin(fresh.ids, torch.tensor(sorted(gone), device=fresh.ids.device)))
            # Fresh rows come last: their ids are higher, and a stable sort leaves ties in this order.
            own = side_by_side([own, fresh]).nearest(STREAM_ROWS)
        yield Witnesses.among(own)
        if queue is not None:
            label = int(answers[query].belief.float().argmax())
            left, _ = queue.push(first + query, label)
            if left >= 0:
                gone.add(left)


def _believe(
    settings: SafeSettings,
    asked: Questions,
    query: int,
    evidence: Tensor,
    similarity: Tensor,
    witnesses: Witnesses,
    beliefs: Beliefs,
) -> Belief:
    """The answer to one query.

    Args:
        settings: of the preset.
        asked: all queries.
        query: which of them.
        evidence: (C,) the class-wise vote of source rows for it.
        similarity: (K,) to these source rows.
        witnesses: rows of the stream near it.
        beliefs: before it.
    """
    mixed = asked.mixed[query]
    count = asked.arrivals[query].count
    answered = int(evidence.argmax())
    votes = (witnesses.similarity / STREAM_TEMPERATURE).softmax(0)
    belief = evidence
    share = 0.0
    agreement = None
    if len(votes):
        share = _stream_share(similarity, witnesses.similarity, mixed)
        belief = (1 - share) * evidence + share * (votes[:, None] * witnesses.beliefs).sum(0)
        agreement = float((votes * (witnesses.labels == answered)).sum())
    beliefs = beliefs.compared(count - 1, answered, agreement)
    emphasis = (beliefs.masses + MASS_PRIOR) ** (-settings.balance * mixed)
    weighted = belief * emphasis
    total = weighted.sum()
    belief = weighted / total
    trust = 1.0
    if settings.guard and settings.stream != "mixed":
        trust = beliefs.trust(count)
    answer = trust * belief + (1 - trust) * asked.frozen[query]
    return Belief(belief, answer, trust, share, emphasis / total, witnesses, votes, beliefs.with_belief(belief))


def _stream_share(source: Tensor, stream: Tensor, mixed: float) -> float:
    """What part of a belief comes from rows of the stream, given similarities to both kinds of rows."""
    nearest = source[:STREAM_ROWS]
    nearest = nearest[nearest > -torch.inf]  # there may be fewer rows
    from_source = max(1 - float(nearest.mean()), APART)
    from_stream = max(1 - float(stream.mean()), APART)
    farther = (from_stream / from_source) ** SHARPNESS
    most = MOST_UNMIXED + (1 - MOST_UNMIXED) * mixed
    share = min(most, 1 / (1 + farther))
    return share * len(stream) / STREAM_ROWS  # the first few rows of a stream count less


def _prediction(
    contents: Contents,
    asked: Questions,
    source: Neighbors,
    source_weights: Tensor,
    answers: list[Belief],
    joined: Tensor,
) -> Prediction:
    """All answers as one value, with the rows behind them and their weights."""
    classes = contents.settings.classes
    device = joined.device
    count = len(answers)
    if not count:
        nothing = torch.zeros(0, classes, device=device)
        return Prediction(
            nothing, torch.zeros(0, 0, device=device), source, joined, trust=nothing[:, 0], frozen=nothing
        )
    trust = torch.tensor([answer.trust for answer in answers], dtype=torch.float64, device=device)
    stream_share = torch.tensor([answer.stream_share for answer in answers], dtype=torch.float64, device=device)
    emphasis = torch.stack([answer.emphasis for answer in answers])  # (B, C)
    of_label = emphasis.gather(1, source.labels.clamp(min=0))
    source_part = (trust * (1 - stream_share))[:, None] * source_weights * of_label
    stream, votes = _padded_witnesses(answers, classes, device)
    heard = (stream.soft * emphasis[:, None, :]).sum(2) if stream.soft is not None else votes
    stream_part = (trust * stream_share)[:, None] * votes * heard
    frozen_part = (1 - trust)[:, None] * asked.frozen_weights
    # A row that votes in both frames is shown once.
    same = (asked.frozen_neighbors.ids[:, :, None] == source.ids[:, None, :]) & (source.ids >= 0)[:, None, :]
    source_part = source_part + (frozen_part[:, :, None] * same).sum(1)
    again = same.any(2)
    frozen_part = frozen_part.masked_fill(again, 0)
    shown = [source, asked.frozen_neighbors.without(again), stream]
    neighbors = side_by_side([replace(part, soft=None) for part in shown])
    weights = torch.cat([source_part, frozen_part, stream_part], 1)
    return Prediction(
        torch.stack([answer.answer for answer in answers]).float(),
        weights.float(),
        neighbors,
        joined,
        trust=trust.float(),
        frozen=asked.frozen.float(),
    )


def _padded_witnesses(answers: list[Belief], classes: int, device: torch.device) -> tuple[Neighbors, Tensor]:
    """The witnesses of all queries as neighbors (B, STREAM_ROWS), and their votes."""
    count = len(answers)
    ids = torch.full((count, STREAM_ROWS), -1, device=device)
    similarity = torch.full((count, STREAM_ROWS), -torch.inf, dtype=torch.float64, device=device)
    labels = torch.full((count, STREAM_ROWS), -1, device=device)
    soft = torch.zeros(count, STREAM_ROWS, classes, device=device)
    votes = torch.zeros(count, STREAM_ROWS, dtype=torch.float64, device=device)
    for query, answer in enumerate(answers):
        found = len(answer.votes)
        ids[query, :found] = answer.witnesses.ids
        similarity[query, :found] = answer.witnesses.similarity
        labels[query, :found] = answer.witnesses.labels
        soft[query, :found] = answer.witnesses.beliefs
        votes[query, :found] = answer.votes
    return Neighbors(ids, similarity, labels, soft), votes
