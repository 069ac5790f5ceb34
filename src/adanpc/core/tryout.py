"""Chooses the parts of the feature transform that suit a source, by trying each on source rows that are left out.

No part suits every source. The square root amplifies values near zero, which are noise in pixels of digits on a black
background. Damping removes the directions in which a class varies most, which may be what tells it from others. A
network that was trained for the task already separates its classes, and nothing need be amplified. As far as that can
be known without the stream, the labels of the source show which parts help: some rows are learned, and the others are
disturbed and used as queries.

The queries should differ from the learned rows as a stream may differ from the source. If there are several domains,
each is left out in turn. A single domain is cut in two along the directions in which samples of a class differ most,
and its rows are disturbed more.
"""

from __future__ import annotations

from math import sqrt
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
from adanpc.core.vote import vote

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


def suitable_parts(features: Tensor, labels: Tensor, domains: Tensor, classes: int) -> Parts:
    """Returns the parts of the transform that suit source features (n, D) with labels (n,) and domains (n,).

    Root and damping are used unless they lose: they help most where a stream is far from the source, and left-out rows
    are not that far.
    """
    problem = _problem(features, labels, domains, classes)
    with_root = problem.answered_right(Parts(root=True, damped=True))
    without_root = problem.answered_right(Parts(damped=True))
    root = _root_suits(with_root, without_root, len(problem.features))
    damped = with_root if root else without_root
    undamped = problem.answered_right(Parts(root=root))
    parts = Parts(root=root, damped=_lead(damped, undamped) >= -SURELY)
    return parts._replace(amplified=_amplification_suits(features, labels, domains, classes, parts))


class _Problem(NamedTuple):
    """Source rows, and several ways to leave some of them out and use them as queries."""

    features: Tensor  # (n, D)
    disturbed: Tensor  # (n, D), the same rows as queries
    labels: Tensor  # (n,)
    domains: Tensor  # (n,)
    classes: int
    left_out: list[Tensor]  # (n,) bool each: one way of leaving rows out

    def answered_right(self, parts: Parts) -> Tensor:
        """Returns which queries are answered correctly with these parts, in a fixed order."""
        marks = [self.labels.new_zeros(0, dtype=torch.bool)]
        for asked in self.left_out:
            known = ~asked
            labels = self.labels[known]
            answerable = asked & torch.isin(self.labels, labels)
            if not answerable.any():
                continue
            transform = fit(self.features[known], labels, self.domains[known], self.classes, parts)
            rows = centered(transform(self.features[known]), labels, self.domains[known])
            queries = transform.still(transform(self.disturbed[answerable]))
            answers = _answers(queries, rows, labels, self.classes)
            marks.append(answers == self.labels[answerable])
        return torch.cat(marks)


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


def _root_suits(with_root: Tensor, without_root: Tensor, rows: int) -> bool:
    """Returns whether the root may be used, given which answers are right with and without it."""
    if not len(with_root):
        return True  # there were no queries
    lost = float(without_root.double().mean() - with_root.double().mean())
    # With few rows the evidence is weak, so hardly any loss is tolerated.
    return lost <= CLEARLY * min(1.0, rows / ENOUGH)


def _lead(one: Tensor, other: Tensor) -> float:
    """Returns the lead of one way of answering over another in standard deviations, given which answers are right (m,).

    Where exactly one of them is right, it might be either by chance; then the lead would typically be about one.
    """
    gained = int((one & ~other).sum())
    lost = int((other & ~one).sum())
    return (gained - lost) / max(sqrt(gained + lost), 1.0)


def _amplification_suits(features: Tensor, labels: Tensor, domains: Tensor, classes: int, parts: Parts) -> bool:
    """Returns whether amplification suits source features (n, D) that are transformed by these parts.

    Directions that tell classes apart in several domains probably do so elsewhere, so with several domains
    amplification is used unless it clearly loses; with a single one, only if it clearly gains. Queries are not
    disturbed: the question is not how robust the directions are, but whether they carry anything at all.
    """
    transformed = fit(features, labels, domains, classes, parts)(features)
    offsets = centered(transformed, labels, domains)
    plain, amplified = amplified_right(offsets, labels, domains, classes)
    if torch.equal(plain, amplified):
        return False  # there was nothing to compare, or nothing changes
    lead = _lead(amplified, plain)
    if len(domains.unique()) > 1:
        return lead >= -1
    return lead > 1


def amplified_right(offsets: Tensor, labels: Tensor, domains: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Returns which left-out rows among centered ones (n, D) are answered correctly, without and with amplification."""
    generator = torch.Generator().manual_seed(0)
    asked = torch.zeros_like(labels, dtype=torch.bool)
    asked[torch.randperm(len(labels), generator=generator)[:TRIED].to(labels.device)] = True
    nothing = labels.new_zeros(0, dtype=torch.bool)
    plain = [nothing]
    amplified = [nothing]
    for group in _groups(domains):
        known = ~group
        queries = asked & group & torch.isin(labels, labels[known])
        if not queries.any():
            continue
        telling, added = amplification(offsets[known], labels[known])
        for rows, marks in ((offsets, plain), (more_along(offsets, telling, added), amplified)):
            answers = _answers(rows[queries].float(), rows[known].float(), labels[known], classes)
            marks.append(answers == labels[queries])
    return torch.cat(plain), torch.cat(amplified)


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


def _answers(queries: Tensor, rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Returns the answers of rows (n, D) with these labels (n,) to queries (q, D)."""
    similarity = normalize(queries) @ normalize(rows).T
    nearest, places = similarity.topk(min(VOTERS, len(labels)), dim=1)
    near = Neighbors(places, nearest, labels[places])
    probs, _ = vote(near, classes, "classwise", per_class=per_class(labels))
    return probs.argmax(1)
