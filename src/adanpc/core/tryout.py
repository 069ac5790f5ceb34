"""Chooses what suits a source by trying it on source rows that are left out: the parts of the transform, and the vote.

No part suits every source. The square root amplifies values near zero, which are noise in pixels of digits on a black
background. Damping removes the directions in which a class varies most, which may be what tells it from others. A
network that was trained for the task already separates its classes, and nothing need be amplified. As far as that can
be known without the stream, the labels of the source show which parts help: some rows are learned, and the others are
disturbed and used as queries.

Nor does any number of rows suit every vote. Of handwritten digits, the three nearest rows of each class say more than
the mean of fifteen; where classes are round clouds, all fifteen help. Left-out rows show that, too.

The queries should differ from the learned rows as a stream may differ from the source. If there are several domains
that share classes, each is left out in turn, and its rows are disturbed a little. Otherwise, a third of the rows is
left out in turn, and they are asked both as they are and disturbed more.
"""

from __future__ import annotations

from math import sqrt
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adanpc.core.transform import (
    Parts,
    amplification,
    centered,
    fit,
    more_along,
    per_class,
)
from adanpc.core.types import Neighbors
from adanpc.core.vote import PER_CLASS, vote

TRIED = 2000  # the most source rows that are used, as learned rows or as queries
MOST_PROBLEMS = 4  # the most ways of leaving some of them out
FOLDS = 3  # how many parts of a single domain are left out in turn
VOTERS = 100  # how many rows vote on a query
# The length of the noise added to queries, relative to how much samples of a class differ. Another domain is a
# disturbance by itself, so it gets less noise.
NOISE_OF_SEVERAL_DOMAINS = 0.5
NOISE_OF_ONE_DOMAIN = 1.0
PROBABLY = 1  # with a single domain the root is left out if its loss is larger than this, in standard deviations,
NOTABLY = 0.0075  # and larger than this, in accuracy
CLEARLY = 0.02  # the loss of accuracy at which it is left out with several domains: two standard errors with TRIED rows
ENOUGH = 1000  # rows from which on that loss is required; with fewer, a smaller loss is enough
SURELY = 2  # the loss, in standard deviations, at which damping is left out
COUNTS = (3, 5, 7, 10)  # how many rows of each class may be compared in a vote, instead of PER_CLASS


def suitable_parts(features: Tensor, labels: Tensor, domains: Tensor, classes: int) -> Parts:
    """Returns the parts of the transform that suit source features (n, D) with labels (n,) and domains (n,).

    Root and damping are used unless they lose: they help most where a stream is far from the source, and left-out rows
    are not that far.
    """
    problem = _problem(features, labels, domains, classes)
    with_root = problem.answered_right(Parts(root=True, damped=True))
    without_root = problem.answered_right(Parts(damped=True))
    if problem.several_domains:
        root = _root_suits_domains(with_root, without_root, len(problem.features))
    else:
        root = _root_suits_rows(_together(with_root), _together(without_root))
    damped = without_root
    if root:
        damped = with_root
    undamped = problem.answered_right(Parts(root=root))
    parts = Parts(root=root, damped=_lead(_together(damped), _together(undamped)) >= -SURELY)
    transformed = fit(features, labels, domains, classes, parts)(features)
    offsets = centered(transformed, labels, domains)
    plain, amplified = _asked_of_others(offsets, labels, _left_out(labels, domains), classes)
    if _amplification_suits(plain, amplified, several_domains=problem.several_domains):
        return parts._replace(amplified=True, voters=_suitable_count(amplified))
    return parts._replace(voters=_suitable_count(plain))


class _Problem(NamedTuple):
    """Source rows, and several ways to leave some of them out and use them as queries."""

    features: Tensor  # (n, D)
    asked: list[Tensor]  # (n, D) each: the same rows as queries, in one or two states
    labels: Tensor  # (n,)
    domains: Tensor  # (n,)
    classes: int
    several_domains: bool  # whether each of several domains is left out
    left_out: list[Tensor]  # (n,) bool each: one way of leaving rows out

    def answered_right(self, parts: Parts) -> list[Tensor]:
        """Returns, for each way of leaving rows out, which queries (q,) are answered correctly with these parts."""
        marks = []
        for out in self.left_out:
            known = ~out
            labels = self.labels[known]
            answerable = out & torch.isin(self.labels, labels)
            if not answerable.any():
                continue
            transform = fit(self.features[known], labels, self.domains[known], self.classes, parts)
            rows = centered(transform(self.features[known]), labels, self.domains[known])
            right = []
            for state in self.asked:
                queries = transform.still(transform(state[answerable]))
                answers = _answers(_nearest(queries, rows, labels), self.classes, per_class(labels))
                right.append(answers == self.labels[answerable])
            marks.append(torch.cat(right))
        return marks


def _problem(features: Tensor, labels: Tensor, domains: Tensor, classes: int) -> _Problem:
    """Returns at most TRIED rows of the source, and the ways in which they are left out."""
    generator = torch.Generator().manual_seed(0)
    tried = torch.randperm(len(features), generator=generator)[:TRIED].to(features.device)
    features = features[tried]
    labels = labels[tried]
    domains = domains[tried]
    noise = torch.randn(features.shape, generator=generator).to(features.device)
    deviation = _residuals(features.float(), labels).norm(dim=1).mean()
    several_domains = _can_answer_each_other(labels, domains)
    if several_domains:
        asked = [features + NOISE_OF_SEVERAL_DOMAINS * deviation * normalize(noise)]
    else:
        asked = [features, features + NOISE_OF_ONE_DOMAIN * deviation * normalize(noise)]
    return _Problem(features, asked, labels, domains, classes, several_domains, _left_out(labels, domains))


def _root_suits_rows(with_root: Tensor, without_root: Tensor) -> bool:
    """Returns whether the root may be used with one domain, given which answers (m,) are right with and without it.

    Where nearly all answers are right, as on the rows that a network was trained with, a few that differ say little.
    """
    if not len(with_root):
        return True  # there were no queries
    probably = _lead(with_root, without_root) < -PROBABLY
    notably = _lost(with_root, without_root) > NOTABLY
    return not (probably and notably)


def _root_suits_domains(with_root: list[Tensor], without_root: list[Tensor], rows: int) -> bool:
    """Returns whether the root may be used with several domains, given which answers are right with and without it.

    Both have a tensor for each domain that was left out. The root is left out only if it loses on all rows together and
    in most domains: otherwise one domain that is unlike all others would decide for them, if it has most rows.
    """
    lost = []
    for right, otherwise in zip(with_root, without_root, strict=True):
        lost.append(_lost(right, otherwise))
    least = min(median(lost), _lost(_together(with_root), _together(without_root)))
    # With few rows the evidence is weak, so hardly any loss is tolerated.
    return least <= CLEARLY * min(1.0, rows / ENOUGH)


def _lost(right: Tensor, otherwise: Tensor) -> float:
    """Returns how much lower one accuracy is than another, given which answers are right (m,)."""
    return float(otherwise.double().mean() - right.double().mean())


def _together(marks: list[Tensor]) -> Tensor:
    """Returns all marks in one tensor (m,), also if there are none."""
    none = torch.zeros(0, dtype=torch.bool)
    return torch.cat([none, *(some.cpu() for some in marks)])


def _lead(one: Tensor, other: Tensor) -> float:
    """Returns the lead of one way of answering over another in standard deviations, given which answers are right (m,).

    Where exactly one of them is right, it might be either by chance; then the lead would typically be about one.
    """
    gained = int((one & ~other).sum())
    lost = int((other & ~one).sum())
    return (gained - lost) / max(sqrt(gained + lost), 1.0)


class _Asked(NamedTuple):
    """Left-out rows that were asked, and the rows that may answer them."""

    near: Neighbors
    most: int  # rows of each class that can be compared
    truth: Tensor  # (q,)
    classes: int

    def right(self, count: int) -> Tensor:
        """Returns which answers are right (q,) if ``count`` rows of each class are compared, or as many as can be."""
        return _answers(self.near, self.classes, min(count, self.most)) == self.truth


def _asked_of_others(
    offsets: Tensor, labels: Tensor, left_out: list[Tensor], classes: int
) -> tuple[list[_Asked], list[_Asked]]:
    """Returns what is found near left-out rows among centered ones (n, D), without and with amplification.

    These rows are not disturbed: the question is not how robust a choice is, but whether it helps at all.

    Args:
        offsets: the centered rows.
        labels: (n,) their classes.
        left_out: (n,) bool each: one way of leaving rows out.
        classes: the number of classes.
    """
    generator = torch.Generator().manual_seed(0)
    asked = torch.zeros_like(labels, dtype=torch.bool)
    asked[torch.randperm(len(labels), generator=generator)[:TRIED].to(labels.device)] = True
    plain: list[_Asked] = []
    amplified: list[_Asked] = []
    for out in left_out:
        known = ~out
        queries = asked & out & torch.isin(labels, labels[known])
        if not queries.any():
            continue
        telling, added = amplification(offsets[known], labels[known])
        most = per_class(labels[known])
        for rows, found in ((offsets, plain), (more_along(offsets, telling, added), amplified)):
            near = _nearest(rows[queries].float(), rows[known].float(), labels[known])
            found.append(_Asked(near, most, labels[queries], classes))
    return plain, amplified


def _right(asked: list[_Asked], count: int) -> Tensor:
    """Returns which left-out rows (m,) are answered correctly if ``count`` rows of each class are compared."""
    return _together([some.right(count) for some in asked])


def _amplification_suits(plain: list[_Asked], amplified: list[_Asked], *, several_domains: bool) -> bool:
    """Returns whether amplification suits a source, given what is found near left-out rows without and with it.

    Directions that tell classes apart in several domains probably do so elsewhere, so with several domains
    amplification is used unless it clearly loses; with a single one, only if it clearly gains.
    """
    without = _right(plain, PER_CLASS)
    with_it = _right(amplified, PER_CLASS)
    if torch.equal(without, with_it):
        return False  # there was nothing to compare, or nothing changes
    lead = _lead(with_it, without)
    if several_domains:
        return lead >= -1
    return lead > 1


def _suitable_count(asked: list[_Asked]) -> int:
    """Returns how many rows of each class should be compared: PER_CLASS, unless left-out rows clearly favor fewer."""
    best = PER_CLASS
    most_right = usual = _right(asked, PER_CLASS)
    for count in COUNTS:
        right = _right(asked, count)
        if _lead(right, usual) > 1 and right.sum() > most_right.sum():
            best = count
            most_right = right
    return best


def _left_out(labels: Tensor, domains: Tensor) -> list[Tensor]:
    """Returns masks (n,) of rows that are left out together: each domain, or a third of all rows.

    The latter if there is a single domain, or if domains have hardly any classes in common.
    """
    if _can_answer_each_other(labels, domains):
        return [domains == name for name in domains.unique()[:MOST_PROBLEMS]]
    # By chance, since rows may come in an order that repeats, such as one of each class in turn.
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(len(domains), generator=generator).to(domains.device)
    return [places % FOLDS == fold for fold in range(FOLDS)]


def _can_answer_each_other(labels: Tensor, domains: Tensor) -> bool:
    """Returns whether most rows have a class (n,) that occurs in other domains (n,) than their own."""
    pairs = torch.stack([labels, domains]).unique(dim=1)  # (2, M)
    domains_with = pairs[0].bincount()  # by class
    shared = domains_with[labels] > 1
    return bool(shared.double().mean() > 0.5)


def _residuals(features: Tensor, labels: Tensor) -> Tensor:
    """Returns features (n, D) minus the mean of their class."""
    residuals = features.clone()
    for label in labels.unique():
        members = labels == label
        residuals[members] -= features[members].mean(0)
    return residuals


def _nearest(queries: Tensor, rows: Tensor, labels: Tensor) -> Neighbors:
    """Returns the rows (n, D) with these labels (n,) that are nearest to queries (q, D)."""
    similarity = normalize(queries) @ normalize(rows).T
    nearest, places = similarity.topk(min(VOTERS, len(labels)), dim=1)
    return Neighbors(places, nearest, labels[places])


def _answers(near: Neighbors, classes: int, count: int) -> Tensor:
    """Returns the answers (q,) of the rows near queries if this many rows of each class are compared."""
    probs, _ = vote(near, classes, "classwise", per_class=count)
    return probs.argmax(1)
