"""Which parts of the feature transform suit a source: each is tried on source rows that are left out.

No part suits every source. The square root amplifies what is near zero, which is noise in the pixels of digits on a
black ground. Damping takes away what a class has most of, which may be what tells it from others. A network that was
trained for the task tells its classes apart already, and nothing need be amplified. Labels of the source say which
parts help, as far as that can be known without the stream: some rows are learned, others are disturbed and asked.

What is asked differs from what is learned as a stream may differ from the source. Of several domains, each is left
out in turn. A single one is cut in two along the directions in which samples of a class differ most, and its rows are
disturbed more.
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

TRIED = 2000  # source rows that are learned or asked
MOST_PROBLEMS = 4  # ways of leaving some of them out
FOLDS = 3  # in which a single domain is left out, to see whether amplification suits it
VOTERS = 100  # rows that answer
# Noise of rows that are asked, compared with how far samples of a class differ. Another domain is a disturbance by
# itself, so there is less of it.
NOISE_OF_SEVERAL_DOMAINS = 0.5
NOISE_OF_ONE_DOMAIN = 1.0
CLEARLY = 0.02  # the share of answers by which the root must lose to be left out: two standard errors of TRIED rows
ENOUGH = 1000  # rows, if it is to lose by so much
SURELY = 2  # standard deviations by which damping must lose to be left out


def suitable_parts(features: Tensor, labels: Tensor, domains: Tensor, classes: int) -> Parts:
    """The parts of the transform that suit source features (n, D) with labels (n,) and domains (n,).

    Root and damping are used unless they lose, since they are worth most where a stream is far from the source, which
    left-out rows are not.
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
    """Source rows of which some are left out and asked, in several ways."""

    features: Tensor  # (n, D)
    disturbed: Tensor  # (n, D), as they are asked
    labels: Tensor  # (n,)
    domains: Tensor  # (n,)
    classes: int
    left_out: list[Tensor]  # (n,) of bool, each a way of leaving rows out

    def answered_right(self, parts: Parts) -> Tensor:
        """Which of all that is asked is answered rightly with these parts, in a fixed order."""
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
    """At most TRIED rows of the source, and what is left out of them."""
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
    """Whether the root may be used, given which answers are right with and without it, of a problem of so many rows."""
    if not len(with_root):
        return True  # nothing could be asked
    lost = float(without_root.double().mean() - with_root.double().mean())
    # Few rows tell little, and then the root must not lose at all.
    return lost <= CLEARLY * min(1.0, rows / ENOUGH)


def _lead(one: Tensor, other: Tensor) -> float:
    """By how many standard deviations one way of answering leads another, given which answers are right (m,).

    If it were a matter of chance which of them is right where just one is, the lead would be about one.
    """
    gained = int((one & ~other).sum())
    lost = int((other & ~one).sum())
    return (gained - lost) / max(sqrt(gained + lost), 1.0)


def _amplification_suits(features: Tensor, labels: Tensor, domains: Tensor, classes: int, parts: Parts) -> bool:
    """Whether amplification suits source features (n, D) that are transformed by these parts.

    What tells classes apart in several domains probably does so elsewhere, so there amplification must not lose
    clearly; in a single domain it must clearly gain. Rows are asked undisturbed, since what is asked here is not how
    robust the directions are but whether there is anything to learn from them.
    """
    transformed = fit(features, labels, domains, classes, parts)(features)
    offsets = centered(transformed, labels, domains)
    plain, amplified = amplified_right(offsets, labels, domains, classes)
    if torch.equal(plain, amplified):
        return False  # nothing could be compared, or nothing changes
    lead = _lead(amplified, plain)
    if len(domains.unique()) > 1:
        return lead >= -1
    return lead > 1


def amplified_right(offsets: Tensor, labels: Tensor, domains: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Which of the left-out rows among centered ones (n, D) are answered rightly, without amplification and with it."""
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
    """Rows (n,) that are left out together: each domain, or every third row of a single one."""
    names = domains.unique().tolist()
    if len(names) > 1:
        return [domains == name for name in names[:MOST_PROBLEMS]]
    places = torch.arange(len(domains), device=domains.device) % FOLDS
    return [places == fold for fold in range(FOLDS)]


def _left_out(features: Tensor, labels: Tensor, domains: Tensor) -> list[Tensor]:
    """Rows (n,) that are asked while all others are learned, so that the two differ as a stream and the source may.

    They are the domains, one after another. A single domain is cut in two along the directions in which samples of one
    class differ most, each class at its median.
    """
    names = domains.unique().tolist()
    if len(names) > 1:
        return [domains == name for name in names[:MOST_PROBLEMS]]
    residuals = _residuals(normalize(features.double()), labels)
    _, directions = strongest(residuals.T @ residuals, min(MOST_PROBLEMS // 2, features.shape[1]))
    halves = []
    for along in (residuals @ directions.T).unbind(1):
        upper = torch.zeros_like(labels, dtype=torch.bool)
        for label in labels.unique():
            members = labels == label
            upper[members] = along[members] > along[members].median()
        halves += [upper, ~upper]
    return halves


def _residuals(features: Tensor, labels: Tensor) -> Tensor:
    """Features (n, D) less the mean of their class."""
    residuals = features.clone()
    for label in labels.unique():
        members = labels == label
        residuals[members] -= features[members].mean(0)
    return residuals


def _answers(queries: Tensor, rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """What rows (n, D) with these labels (n,) answer to queries (q, D)."""
    similarity = normalize(queries) @ normalize(rows).T
    nearest, places = similarity.topk(min(VOTERS, len(labels)), dim=1)
    near = Neighbors(places, nearest, labels[places])
    probs, _ = vote(near, classes, "classwise", per_class=per_class(labels))
    return probs.argmax(1)
