"""Chooses what suits a source by trying it on source rows that are left out: the parts of the transform, and the vote.

No part suits every source. The square root amplifies values near zero, which are noise in pixels of digits on a black
background. Damping removes the directions in which a class varies most, which may be what tells it from others. A
network that was trained for the task already separates its classes, and nothing need be amplified. As far as that can
be known without the stream, the labels of the source show which parts help: some rows are learned, and the others are
disturbed and used as queries.

Nor does any number of rows suit every vote. Of handwritten digits, the three nearest rows of each class say more than
the mean of fifteen; where classes are round clouds, all fifteen help. Left-out rows show that, too.

The queries should differ from the learned rows as a stream may differ from the source. If there are several domains,
each is left out in turn. A single domain is cut in two along the directions in which samples of a class differ most,
and its rows are disturbed more.
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
    strongest,
)
from adanpc.core.types import Neighbors
from adanpc.core.vote import PER_CLASS, vote

TRIED = 2000  # the most source rows that are used, as learned rows or as queries
MOST_PROBLEMS = 4  # the most ways of leaving some of them out
FOLDS = 3  # how many parts of a single domain are left out, to see whether amplification suits it
VOTERS = 100  # how many rows vote on a query
# The length of the noise added to queries, relative to how much samples of a class differ. Another domain is a
# disturbance by itself, so it gets less noise.
NOISE_OF_SEVERAL_DOMAINS = 0.5
NOISE_OF_ONE_DOMAIN = 1.0
CLEARLY = 0.02  # the loss of accuracy at which the root is left out: two standard errors with TRIED rows
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
    root = _root_suits(with_root, without_root, len(problem.features))
    damped = without_root
    if root:
        damped = with_root
    undamped = problem.answered_right(Parts(root=root))
    parts = Parts(root=root, damped=_lead(_together(damped), _together(undamped)) >= -SURELY)
    transformed = fit(features, labels, domains, classes, parts)(features)
    plain, amplified = _asked_of_others(centered(transformed, labels, domains), labels, domains, classes)
    if _amplification_suits(plain, amplified, several_domains=len(domains.unique()) > 1):
        return parts._replace(amplified=True, voters=_suitable_count(amplified))
    return parts._replace(voters=_suitable_count(plain))


class _Problem(NamedTuple):
    """Source rows, and several ways to leave some of them out and use them as queries."""

    features: Tensor  # (n, D)
    disturbed: Tensor  # (n, D), the same rows as queries
    labels: Tensor  # (n,)
    domains: Tensor  # (n,)
    classes: int
    left_out: list[Tensor]  # (n,) bool each: one way of leaving rows out

    def answered_right(self, parts: Parts) -> list[Tensor]:
        """Returns, for each way of leaving rows out, which queries (q,) are answered correctly with these parts."""
        marks = []
        for asked in self.left_out:
            known = ~asked
            labels = self.labels[known]
            answerable = asked & torch.isin(self.labels, labels)
            if not answerable.any():
                continue
            transform = fit(self.features[known], labels, self.domains[known], self.classes, parts)
            rows = centered(transform(self.features[known]), labels, self.domains[known])
            queries = transform.still(transform(self.disturbed[answerable]))
            answers = _answers(_nearest(queries, rows, labels), self.classes, per_class(labels))
            marks.append(answers == self.labels[answerable])
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
    strength = NOISE_OF_SEVERAL_DOMAINS
    if len(domains.unique()) == 1:
        strength = NOISE_OF_ONE_DOMAIN
    disturbed = features + strength * deviation * normalize(noise)
    return _Problem(features, disturbed, labels, domains, classes, _left_out(features, labels, domains))


def _root_suits(with_root: list[Tensor], without_root: list[Tensor], rows: int) -> bool:
    """Returns whether the root may be used, given which answers are right with and without it.

    Both have a tensor for each way of leaving rows out. The root is left out only if it loses on all rows together and
    in most of these ways: otherwise one domain that is unlike all others would decide for them, if it has most rows.
    """
    if not with_root:
        return True  # there were no queries
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
    offsets: Tensor, labels: Tensor, domains: Tensor, classes: int
) -> tuple[list[_Asked], list[_Asked]]:
    """Returns what is found near left-out rows among centered ones (n, D), without and with amplification.

    These rows are not disturbed: the question is not how robust a choice is, but whether it helps at all.
    """
    generator = torch.Generator().manual_seed(0)
    asked = torch.zeros_like(labels, dtype=torch.bool)
    asked[torch.randperm(len(labels), generator=generator)[:TRIED].to(labels.device)] = True
    plain: list[_Asked] = []
    amplified: list[_Asked] = []
    for group in _groups(domains):
        known = ~group
        queries = asked & group & torch.isin(labels, labels[known])
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


def _groups(domains: Tensor) -> list[Tensor]:
    """Returns masks (n,) of rows that are left out together: each domain, or every third row of a single one."""
    names = domains.unique().tolist()
    if len(names) > 1:
        return [domains == name for name in names[:MOST_PROBLEMS]]
    places = torch.arange(len(domains), device=domains.device) % FOLDS
    return [places == fold for fold in range(FOLDS)]


def _left_out(features: Tensor, labels: Tensor, domains: Tensor) -> list[Tensor]:
    """Returns masks (n,) of rows that become queries while all others are learned.

    With several domains, each is one mask. A single domain is cut in two along the directions in which samples of one
    class differ most, each class at its median, and either half is a mask.
    """
    names = domains.unique().tolist()
    if len(names) > 1:
        return [domains == name for name in names[:MOST_PROBLEMS]]
    residuals = _residuals(normalize(features.double()), labels)
    _, directions = strongest(residuals, min(MOST_PROBLEMS // 2, features.shape[1]))
    halves = []
    for along in (residuals @ directions.T).unbind(1):
        upper = torch.zeros_like(labels, dtype=torch.bool)
        for label in labels.unique():
            members = labels == label
            upper[members] = along[members] > along[members].median()
        halves += [upper, ~upper]
    return halves


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
