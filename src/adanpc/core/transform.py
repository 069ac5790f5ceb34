"""A feature transform fitted to the source: what tells domains or single samples apart counts less than classes do.

A feature x becomes z = W unit(sign(x) sqrt|x|). The square root keeps a few large coordinates from deciding every
cosine. W damps the directions in which samples of one class and domain differ most: with S the pooled covariance
within classes and domains, it is the inverse root of a tenth of S and nine tenths of its mean variance, taken for the
64 strongest directions, since for all others it hardly differs from a multiple of the identity.

Everything here is exact, so that one feature and a batch of them have the same bits: coordinates and directions lie
on the grid of 2**-24, their products on that of 2**-48, and sums of products of unit vectors stay below 2, which
float64 adds up without rounding in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adanpc.index import unit
from adanpc.index.grid import snap

RANK = 64  # directions that are damped
SHRINKAGE = 0.9  # the share of the mean variance in the covariance that is inverted
ROUNDS = 12  # of subspace iteration, enough for directions that matter: their eigenvalues stand out
TINY = 1e-12  # eigenvalues and lengths below this share of the largest are rounding


@dataclass(frozen=True, eq=False)
class Transform:
    """What was learned of the source features; a value that is part of a classifier's state."""

    origin: Tensor  # (D,) float64, the mean of the source domains' centers, on the grid
    directions: Tensor  # (R, D) float64, orthonormal up to rounding, on the grid
    damped: Tensor  # (R, D) float64, what is taken away along each of them, on the grid
    span: Tensor  # (S, D) float64, an orthonormal basis of the differences between class centers, on the grid

    def __call__(self, features: Tensor) -> Tensor:
        """Checked features (n, D), transformed: float64 on the grid."""
        rooted = unit(_root(features)).double()
        along = snap(rooted @ self.directions.T)  # (n, R)
        return rooted - snap(along @ self.damped)

    def within_span(self, vector: Tensor) -> Tensor:
        """The part of a vector (D,) that lies in the span of differences between classes."""
        return snap(snap(snap(vector) @ self.span.T) @ self.span)

    def to(self, device: torch.device) -> Transform:
        """The same in tensors of its own on a device."""
        return Transform(
            self.origin.to(device, copy=True),
            self.directions.to(device, copy=True),
            self.damped.to(device, copy=True),
            self.span.to(device, copy=True),
        )


def fit(features: Tensor, labels: Tensor, domains: Tensor, classes: int) -> Transform:
    """The transform for source features (n, D) with labels (n,) and domains (n,)."""
    rooted = unit(_root(features)).double()
    covariance, samples = _within(rooted, labels, domains, classes)
    directions, damped = _damping(covariance, samples)
    plain = Transform(rooted.new_zeros(rooted.shape[1]), directions, damped, rooted.new_zeros(0, rooted.shape[1]))
    transformed = plain(features)
    centers = domain_centers(transformed, labels, domains)
    origin = snap(torch.stack(list(centers.values())).mean(0))
    offsets = centered(transformed, domains, centers)
    class_centers = torch.stack([offsets[labels == label].mean(0) for label in labels.unique()])
    return Transform(origin, directions, damped, _basis(class_centers))


def domain_centers(transformed: Tensor, labels: Tensor, domains: Tensor) -> dict[int, Tensor]:
    """The center (D,) of each domain: the mean of its class means, so that frequent classes do not pull it."""
    centers = {}
    for domain in domains.unique().tolist():
        inside = domains == domain
        means = [transformed[inside & (labels == label)].mean(0) for label in labels[inside].unique()]
        centers[domain] = snap(torch.stack(means).mean(0))
    return centers


def centered(transformed: Tensor, domains: Tensor, centers: dict[int, Tensor]) -> Tensor:
    """Features (n, D) less the centers of their domains (n,)."""
    result = transformed.clone()
    for domain, center in centers.items():
        result[domains == domain] -= center
    return result


def _root(features: Tensor) -> Tensor:
    features = features.double()
    return features.sign() * features.abs().sqrt()


def _within(rooted: Tensor, labels: Tensor, domains: Tensor, classes: int) -> tuple[Tensor, int]:
    """The scatter (D, D) of features around the means of their class and domain, and its degrees of freedom."""
    dim = rooted.shape[1]
    scatter = rooted.new_zeros(dim, dim)
    freedom = 0
    groups = domains * classes + labels
    for group in groups.unique():
        members = rooted[groups == group]
        residual = members - members.mean(0)
        scatter += residual.T @ residual
        freedom += len(members) - 1
    return scatter, freedom


def _damping(scatter: Tensor, freedom: int) -> tuple[Tensor, Tensor]:
    """Orthonormal directions (R, D), and how much of a feature is taken away along each (R, D)."""
    dim = len(scatter)
    nothing = scatter.new_zeros(0, dim)
    mean_variance = float(scatter.trace()) / dim
    if freedom < 1 or mean_variance <= TINY:
        return nothing, nothing
    values, vectors = _strongest(scatter, min(RANK, dim))
    floor = SHRINKAGE * mean_variance
    gain = (floor / (floor + (1 - SHRINKAGE) * values)).sqrt()
    # Where samples vary less than on average, there is nothing to damp.
    strong = values > mean_variance
    directions = snap(vectors[strong])
    return directions, snap(directions * (1 - gain[strong])[:, None])


def _strongest(scatter: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues (R,) of a symmetric matrix and their eigenvectors (R, D), by subspace iteration."""
    dim = len(scatter)
    if dim <= 4 * rank:
        values, vectors = torch.linalg.eigh(scatter)
        return values[-rank:].flip(0), vectors[:, -rank:].flip(1).T
    generator = torch.Generator().manual_seed(0)
    subspace = torch.randn(dim, rank + 16, generator=generator, dtype=torch.float64).to(scatter.device)
    for _ in range(ROUNDS):
        subspace = torch.linalg.qr(scatter @ subspace).Q
    values, inside = torch.linalg.eigh(subspace.T @ scatter @ subspace)
    vectors = subspace @ inside
    return values[-rank:].flip(0), vectors[:, -rank:].flip(1).T


def _basis(class_centers: Tensor) -> Tensor:
    """An orthonormal basis (S, D) of what class centers (C, D) span."""
    _, lengths, basis = torch.linalg.svd(class_centers, full_matrices=False)
    spanned = lengths > 1e-6 * lengths.max().clamp(min=TINY)
    return snap(basis[spanned])
