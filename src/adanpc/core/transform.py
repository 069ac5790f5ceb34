"""A feature transform fitted to the source: differences between classes count more than those between samples.

A feature x becomes z = A W unit(sign(x) sqrt|x|). Its parts:

* The square root keeps a few large coordinates from deciding every cosine.
* W damps the directions in which samples of one class and domain differ most: with S the pooled covariance within
  classes and domains, it is the inverse root of a tenth of S and nine tenths of its mean variance, taken for the 64
  strongest directions, since for all others it hardly differs from a multiple of the identity.
* A amplifies the directions that tell classes apart. A ridge regression R from centered features to classes knows
  them; A is the root of I + R R', so a similarity after it is the plain one and that of the predicted classes, added.
  On source rows both parts are about as large.

No part suits every source, so ``tryout`` chooses which are used.

The transform also keeps similarities within the source, by which foreign queries are recognized.

Everything here is exact, so that one feature and a batch of features get the same bits: coordinates and directions are
multiples of 2**-24 and their products are multiples of 2**-48, so float64 adds up products of vectors without rounding,
in any order, as long as no sum reaches 32. No vector here is longer than LONGEST.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from adanpc.core.estimate import UNKNOWN, Rivals
from adanpc.core.vote import PER_CLASS
from adanpc.index import unit
from adanpc.index.grid import snap

RANK = 64  # directions that are damped
SHRINKAGE = 0.9  # the share of the mean variance in the covariance that is inverted
ROUNDS_OF_CENTERS = 10  # in which means of classes and of domains settle, where domains have different classes
ROUNDS = 12  # of subspace iteration, enough for directions that matter: their eigenvalues stand out
TINY = 1e-12  # eigenvalues and lengths below this share of the largest are rounding
RIDGE = 10.0  # how many rows the assumption that classes do not differ counts for
LONGEST = 8.0  # no direction is amplified more, so that sums stay exact
SAMPLE = 1000  # source rows that are compared with rows of other classes
FEWEST = 3  # rows of each class that are compared at least, however small a class is
NEAREST = 10  # rows whose mean similarity says how near a query is


class Parts(NamedTuple):
    """Which parts of the transform are used, and how many rows of each class vote on what it makes."""

    root: bool = False  # the square root
    damped: bool = False  # the directions in which samples of one class and domain differ
    amplified: bool = False  # the directions that tell classes apart
    voters: int = PER_CLASS  # how many rows of each class are compared in a vote, at most


@dataclass(frozen=True, eq=False)
class Transform:
    """What was learned from the source features; a value that is part of a classifier's state."""

    power: Tensor  # (1,) float64, to which magnitudes are raised first: 0.5 or 1
    origin: Tensor  # (D,) float64, the mean of the source domains' centers, on the grid
    directions: Tensor  # (R, D) float64, orthonormal up to rounding, on the grid
    damped: Tensor  # (R, D) float64, what is taken away along each of them, on the grid
    telling: Tensor  # (A, D) float64, the directions that tell classes apart, orthonormal up to rounding, on the grid
    amplified: Tensor  # (A, D) float64, what is added along each of them, on the grid
    span: Tensor  # (S, D) float64, an orthonormal basis of the differences between class centers, on the grid
    foreign: Tensor  # (M,) float64, rising: how similar source rows are to the nearest of other classes
    calibration: Tensor  # (4,) float64, how errors of source rows and their agreement go together, see ``estimate``
    voters: Tensor  # (1,) float64, how many rows of each class are compared in a vote

    def __repr__(self) -> str:
        found = f"{len(self.directions)} directions damped, {len(self.telling)} amplified"
        return f"<Transform of {len(self.origin)} coordinates: {found}>"

    def __call__(self, features: Tensor) -> Tensor:
        """Returns checked features (n, D) of any length after the transform, in float64 on the grid."""
        evened = less_along(start(features, float(self.power)), self.directions, self.damped)
        return more_along(evened, self.telling, self.amplified)

    def still(self, transformed: Tensor) -> Tensor:
        """Returns transformed queries (n, D) as they are compared with rows before anything is known of the stream."""
        return transformed - self.origin

    @property
    def per_class(self) -> int:
        """How many rows of each class are compared in a vote, see ``per_class``."""
        return int(self.voters)

    def novelty(self, similarity: float) -> float:
        """Returns how unlike the source a query is, from 0 to 1, given its mean similarity to the NEAREST source rows.

        It is the share of source rows that are more similar to rows of other classes than the query is to any rows:
        one minus the p-value of a query that is no nearer to the source than its classes are to each other. It is 0
        if there are no two classes to compare.
        """
        known = self._foreign
        if not known:
            return 0.0
        return 1 - bisect_right(known, similarity) / len(known)

    @cached_property
    def _foreign(self) -> list[float]:
        """The similarities in ``foreign`` as a list, in which one place is found faster than in an array."""
        similarities: list[float] = self.foreign.tolist()
        return similarities

    def within_span(self, vectors: Tensor) -> Tensor:
        """Returns the part of vectors (n, D) that lies in the span of differences between classes."""
        return snap(snap(snap(vectors) @ self.span.T) @ self.span)

    def to(self, device: torch.device) -> Transform:
        """Returns a copy of the transform on a device."""
        parts = {part.name: getattr(self, part.name).to(device, copy=True) for part in fields(self)}
        return Transform(**parts)


def fit(features: Tensor, labels: Tensor, domains: Tensor, classes: int, parts: Parts) -> Transform:
    """Returns the transform with these parts for source features (n, D) with labels (n,) and domains (n,).

    The calibration is left for the caller to add, who knows how answers are computed.
    """
    power = 0.5 if parts.root else 1.0
    begun = start(features, power)
    nothing = begun.new_zeros(0, begun.shape[1])
    unfinished = Transform(
        power=begun.new_tensor([power]),
        origin=nothing.sum(0),
        directions=nothing,
        damped=nothing,
        telling=nothing,
        amplified=nothing,
        span=nothing,
        foreign=nothing[:, 0],
        calibration=begun.new_tensor(UNKNOWN),
        voters=begun.new_tensor([min(parts.voters, per_class(labels))]),
    )
    if parts.damped:
        directions, damped = damping(begun, labels, domains, classes)
        unfinished = replace(unfinished, directions=directions, damped=damped)
    if parts.amplified:
        evened = unfinished(features)
        offsets = centered(evened, labels, domains)
        telling, amplified = amplification(offsets, labels)
        unfinished = replace(unfinished, telling=telling, amplified=amplified)
    transformed = unfinished(features)
    centers = domain_centers(transformed, labels, domains)
    origin = snap(torch.stack(list(centers.values())).mean(0))
    offsets = centered(transformed, labels, domains)
    class_centers = torch.stack([offsets[labels == label].mean(0) for label in labels.unique()])
    return replace(unfinished, origin=origin, span=_basis(class_centers), foreign=_between_classes(offsets, labels))


def domain_centers(transformed: Tensor, labels: Tensor, domains: Tensor) -> dict[int, Tensor]:
    """Returns the center (D,) of each domain: that of the source, moved as far as the domain is known to have moved.

    The center of the source is the mean of its class means, so that frequent classes do not pull it. How far a domain
    has moved is seen from classes that other domains have, too: if each class is in a domain of its own, what tells
    domains apart is what tells classes apart, and nothing of it may be taken away.
    """
    names, places = domains.unique(return_inverse=True)
    kinds, classes = labels.unique(return_inverse=True)
    cells, members = (places * len(kinds) + classes).unique(return_inverse=True)
    means = torch.stack([transformed[members == cell].mean(0) for cell in range(len(cells))])  # (M, D)
    domain_of = cells // len(kinds)
    class_of = cells % len(kinds)
    moved = means.new_zeros(len(names), means.shape[1])
    class_means = _means_by(class_of, means)
    for _ in range(ROUNDS_OF_CENTERS):
        moved = _means_by(domain_of, means - class_means[class_of])
        class_means = _means_by(class_of, means - moved[domain_of])
    center = class_means.mean(0)
    return dict(zip(names.tolist(), snap(center + moved), strict=True))


def _means_by(group: Tensor, rows: Tensor) -> Tensor:
    """Returns the mean (G, D) of the rows (n, D) in each group (n,)."""
    sums = rows.new_zeros(int(group.max()) + 1, rows.shape[1]).index_add_(0, group, rows)
    return sums / group.bincount()[:, None]


def centered(transformed: Tensor, labels: Tensor, domains: Tensor) -> Tensor:
    """Returns transformed features (n, D) minus the centers of their domains (n,), to be compared with queries."""
    return less_centers(transformed, domains, domain_centers(transformed, labels, domains))


def less_centers(transformed: Tensor, domains: Tensor, centers: Mapping[int, Tensor]) -> Tensor:
    """Returns transformed features (n, D) minus the given centers of their domains (n,)."""
    result = transformed.clone()
    for domain in domains.unique().tolist():
        result[domains == domain] -= centers[domain]
    return result


def per_class(labels: Tensor) -> int:
    """Returns how many rows of each class are compared at most: half of those that the smallest class has.

    Missing rows count against a class. And if all of its rows are compared, so are those that look like no other.
    """
    smallest = int(labels.bincount().where(labels.bincount() > 0, 2 * PER_CLASS).min())
    return max(FEWEST, min(PER_CLASS, smallest // 2))


def start(features: Tensor, power: float) -> Tensor:
    """Returns features (n, D) with each coordinate raised to a power, its sign kept, at length one on the grid."""
    features = features.double()
    if power == 0.5:
        features = features.sign() * features.abs().sqrt()
    return unit(features).double()


def less_along(features: Tensor, directions: Tensor, damped: Tensor) -> Tensor:
    """Returns features (n, D) damped along some directions (R, D)."""
    along = snap(features @ directions.T)  # (n, R)
    return features - snap(along @ damped)


def more_along(features: Tensor, telling: Tensor, amplified: Tensor) -> Tensor:
    """Returns features (n, D) amplified along some directions (A, D)."""
    along = snap(features @ telling.T)  # (n, A)
    return features + snap(along @ amplified)


def _within(rooted: Tensor, labels: Tensor, domains: Tensor, classes: int) -> tuple[Tensor, int]:
    """Returns features (n, D) minus the means of their class and domain, and the degrees of freedom that are left."""
    residuals = rooted.clone()
    groups = domains * classes + labels
    names = groups.unique()
    for group in names:
        members = groups == group
        residuals[members] -= rooted[members].mean(0)
    return residuals, len(rooted) - len(names)


def damping(rooted: Tensor, labels: Tensor, domains: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Returns orthonormal directions (R, D), and what is subtracted from a feature along each (R, D)."""
    residuals, freedom = _within(rooted, labels, domains, classes)
    dim = residuals.shape[1]
    nothing = residuals.new_zeros(0, dim)
    mean_variance = float(residuals.square().sum()) / dim
    if freedom < 1 or mean_variance <= TINY:
        return nothing, nothing
    values, vectors = strongest(residuals, min(RANK, dim))
    floor = SHRINKAGE * mean_variance
    gain = (floor / (floor + (1 - SHRINKAGE) * values)).sqrt()
    # Where samples vary less than on average, there is nothing to damp.
    strong = values > mean_variance
    directions = snap(vectors[strong])
    return directions, snap(directions * (1 - gain[strong])[:, None])


def strongest(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns the directions (R, D) along which rows (n, D) are longest, and their squared lengths (R,) along each.

    These are the first eigenvectors of the scatter ``rows.T @ rows``, and its eigenvalues.
    """
    dim = rows.shape[1]
    if dim <= 4 * rank:
        values, vectors = torch.linalg.eigh(rows.T @ rows)
        return values[-rank:].flip(0), vectors[:, -rank:].flip(1).T
    # Subspace iteration: far faster than all eigenvectors of a large matrix, of which few are needed.
    generator = torch.Generator().manual_seed(0)
    subspace = torch.randn(dim, rank + 16, generator=generator, dtype=torch.float64).to(rows.device)
    scatter = _Scatter(rows)
    for _ in range(ROUNDS):
        subspace = torch.linalg.qr(scatter.times(subspace)).Q
    values, inside = torch.linalg.eigh(subspace.T @ scatter.times(subspace))
    vectors = subspace @ inside
    return values[-rank:].flip(0), vectors[:, -rank:].flip(1).T


class _Scatter:
    """The matrix ``rows.T @ rows`` (D, D) of rows (n, D), which is not made if there are fewer rows than dimensions."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._made: Tensor | None = None
        if len(rows) >= rows.shape[1]:
            self._made = rows.T @ rows

    def times(self, columns: Tensor) -> Tensor:
        """Returns the product with a matrix (D, m)."""
        if self._made is None:
            return self._rows.T @ (self._rows @ columns)
        return self._made @ columns


def amplification(offsets: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the directions (A, D) that tell classes of centered rows (n, D) apart, and what is added along each."""
    rows = normalize(offsets)
    _, classes = labels.unique(return_inverse=True)
    sizes = classes.bincount()
    # A class counts the same however many rows it has; the weights of all rows sum to their number.
    weights = (len(rows) / (len(sizes) * sizes.double()))[classes]  # (n,)
    regression = _ridge_regression(rows, classes, weights, len(sizes))  # (D, C)
    directions, strengths, _ = torch.linalg.svd(regression, full_matrices=False)
    strong = strengths > 1e-3 * strengths.max().clamp(min=TINY)
    telling = snap(directions.T[strong])
    gain = (1 + strengths[strong].square()).sqrt().clamp(max=LONGEST)
    return telling, snap(telling * (gain - 1)[:, None])


def _ridge_regression(rows: Tensor, classes: Tensor, weights: Tensor, count: int) -> Tensor:
    """Returns the coefficients (D, C) that predict from rows (n, D) which of ``count`` classes (n,) each belongs to.

    Targets are 1 for the row's class and 0 for the others, less 1 / C.
    """
    weighted = rows * weights[:, None]
    if len(rows) >= rows.shape[1]:
        scatter = weighted.T @ rows
        scatter.diagonal().add_(RIDGE)
        # Products with the targets as sums by class: no table of targets is needed.
        sums = rows.new_zeros(count, rows.shape[1]).index_add_(0, classes, weighted)  # (C, D)
        products = (sums - sums.mean(0)).T  # (D, C)
        regression: Tensor = torch.linalg.solve(scatter, products)
        return regression
    # The same coefficients as a combination of the rows, found by a system of n equations instead of D.
    targets = one_hot(classes, count).double() - 1 / count
    similarity = weighted @ rows.T
    similarity.diagonal().add_(RIDGE)
    combination: Tensor = torch.linalg.solve(similarity, weights[:, None] * targets)  # (n, C)
    return rows.T @ combination


def _between_classes(offsets: Tensor, labels: Tensor) -> Tensor:
    """Returns, in rising order (M,), the mean similarity of some rows to their NEAREST rows of other classes.

    With a single class there is nothing to compare, and M is 0.
    """
    rows = normalize(offsets.float())
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(rows), generator=generator)[:SAMPLE].to(rows.device)
    found = []
    for part in chosen.split(100):
        rivals = Rivals(rows[part], labels[part], NEAREST)
        rivals.see(rows, labels, labels)
        found.append(rivals.means())
    return torch.cat(found).sort().values


def _basis(class_centers: Tensor) -> Tensor:
    """Returns an orthonormal basis (S, D) of the span of class centers (C, D)."""
    _, lengths, basis = torch.linalg.svd(class_centers, full_matrices=False)
    spanned = lengths > 1e-6 * lengths.max().clamp(min=TINY)
    return snap(basis[spanned])
