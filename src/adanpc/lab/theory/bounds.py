"""The bounds of Propositions 1–3 with every constant of their proofs, and problems whose constants are known."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, gamma, inf, pi, sqrt

import numpy as np
import numpy.typing as npt

from adanpc import require
from adanpc.errors import AdaNPCError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Assumptions:
    """The constants of Assumptions 1–3 (labels ``assump1``, ``assump:xue:2:Nov_11_2022`` and ``define_noise``).

    Args:
        dim: d, the dimension of the features; an estimate need not be whole.
        source_overlap: c_mu, how much of a small ball around a target point the source covers. The proofs use
            only its product with ``density``: a ball of radius r has a source mass of at least
            c_mu mu_- pi_d r^d.
        target_overlap: c_mu*, the same for the target.
        density: mu_-, the least density.
        smoothness: C, with |eta(x) - eta(x')| ≤ C |x - x'|^alpha.
        holder: alpha; the paper writes out alpha = 1 and says that less would do.
        margin: beta, with P(|eta_U - 1/2| < t) ≤ C_beta t^beta.
        margin_constant: C_beta.
        gap: C_ada, the most that eta_S and eta_U differ at a target point; 0 under covariate shift alone.
    """

    dim: float
    source_overlap: float
    target_overlap: float
    density: float
    smoothness: float
    holder: float = 1.0
    margin: float = 1.0
    margin_constant: float = 1.0
    gap: float = 0.0


def unit_ball(dim: float) -> float:
    """The volume of the unit ball, the paper's pi_d."""
    return float(pi ** (dim / 2)) / gamma(dim / 2 + 1)


def radius(k: int, rows: int, overlap: float, density: float, dim: float) -> float:
    """The radius of a ball that holds k of the rows, except with probability exp(-k/4).

    The paper's r_0 (label ``bound:x_diff``): (2k / (c_mu mu_- pi_d n))^(1/d); 0 for no neighbors, infinite for no
    rows. The proof needs it to stay below r_mu; beyond the diameter it says nothing.
    """
    if k == 0:
        return 0.0
    if rows == 0:
        return inf
    rows_in_unit_ball = overlap * density * unit_ball(dim) * rows
    return float((2 * k / rows_in_unit_ball) ** (1 / dim))


def proposition_1(k: int, n_s: int, known: Assumptions, lipschitz: float, least_error: float, risk: float) -> float:
    """A bound on the target error of a hypothesis (label ``lemma:bound_omega``; constant of ``prop:wass_omega``).

    kappa + risk + 2 L r_0, with probability at least 1 - n exp(-k/4) for n target points. The O(·) of the statement
    hides 2 L, which the appendix gives. Omega is taken to be the law of one of the k nearest source rows of a target
    point: the paper's union of balls need not be as near to the target if the source spreads its mass otherwise.

    Args:
        k: how many neighbors vote.
        n_s: how many source rows there are.
        known: the constants of the problem.
        lipschitz: L, for every hypothesis. No answer in {0, 1} that ever changes has one, so it must be chosen.
        least_error: kappa, the least sum of the errors on target and Omega that one hypothesis can have.
        risk: the error of the hypothesis on Omega.
    """
    distance = radius(k, n_s, known.source_overlap, known.density, known.dim)
    return least_error + risk + 2 * lipschitz * distance


def vote_error(k_s: int, k_u: int, n_s: int, n_u: int, known: Assumptions) -> float:
    """A bound on |vote share - eta_U| at a target point, which Propositions 2 and 3 raise to the power 1 + beta.

    k^(-1/4) for the noise of labels, and for each kind of neighbor its share of the vote times C r^alpha, to which
    the source adds C_ada. The proof of Proposition 3 takes a radius for each kind from its own count.
    """
    k = k_s + k_u
    if min(k_s, k_u) < 0 or k < 1:
        raise AdaNPCError(f"k_s and k_u must be at least 0 and one of them 1, got {k_s} and {k_u}")
    source_radius = radius(k_s, n_s, known.source_overlap, known.density, known.dim)
    target_radius = radius(k_u, n_u, known.target_overlap, known.density, known.dim)
    noise = k**-0.25
    source_error = k_s / k * (known.smoothness * source_radius**known.holder + known.gap)
    target_error = k_u / k * known.smoothness * target_radius**known.holder
    return float(noise + source_error + target_error)


def proposition_2(k: int, n_s: int, known: Assumptions) -> float:
    """A bound on the excess error of the vote of k source rows (labels ``prop:knn_S`` and ``bound:22``).

    2 C_beta (k^(-1/4) + C r_0 + C_ada)^(1 + beta): the constants that the proof has before it drops them. With gap 0
    this is the covariate-shift half, otherwise the posterior-shift half. It may exceed 1.
    """
    return proposition_3(k, 0, n_s, 0, known)


def proposition_3(k_s: int, k_u: int, n_s: int, n_u: int, known: Assumptions) -> float:
    """A bound on the excess error with k_u target rows in the vote (label ``prop:knn_SU``).

    2 C_beta vote_error^(1 + beta). Assumes that the label of a target row has mean eta_U. In ``bound:28`` the paper
    writes C_1 k_s where the line before has k_s / k; the latter is proved, and used here.
    """
    error = vote_error(k_s, k_u, n_s, n_u, known)
    return 2 * known.margin_constant * float(error ** (1 + known.margin))


def failure(k_s: int, k_u: int = 0) -> float:
    """The probability, at one target point, that ``vote_error`` is exceeded; at most 1.

    2 exp(-2 sqrt k) for the noise (label ``equ:21``) and exp(-k/4) for each radius in use. The paper folds these into
    3 exp(-2 sqrt k), which needs k of at least 64, and for Proposition 3 counts neither radius. It then treats the
    bound as if it held at all points at once; in the mean over points, this much has to be added to the excess error.
    """
    noise = 2 * exp(-2 * sqrt(k_s + k_u))
    radii = sum(exp(-count / 4) for count in (k_s, k_u) if count > 0)
    return min(1.0, noise + radii)


def best_split(k: int, n_s: int, n_u: int, known: Assumptions) -> tuple[int, int]:
    """k_s and k_u with the least bound of Proposition 3; ties to the fewest target rows.

    Without a gap this is k_s : k_u = c_mu n_s : c_mu* n_u up to rounding, which one search over all rows finds by
    itself if the densities are what the overlaps say; a gap moves it toward the target.
    """
    if not 1 <= k <= n_s + n_u:
        raise AdaNPCError(f"k must be from 1 to {n_s + n_u}, the number of rows, got {k}")
    least = max(0, k - n_s)
    most = min(k, n_u)
    k_u = min(range(least, most + 1), key=lambda count: vote_error(k - count, count, n_s, n_u, known))
    return k - k_u, k_u


@dataclass(frozen=True)
class Problem:
    """Two classes on a torus of unit vectors, for which everything is known that the propositions speak of.

    A point is d angles, stored as their cosines and sines over sqrt(d). That is a unit vector of 2d numbers, so that
    the bank's cosine has the order of Euclidean distance; and the torus is a flat surface without a border, so that a
    ball of radius r ≤ pi / sqrt(d) holds at least pi_d r^d of it. The probability of class 1 follows the first angle:
    eta_U = 1/2 + amplitude sign(cos) |cos|^power, and eta_S = eta_U + gap everywhere.

    Args:
        dim: d.
        overlap: c_mu. At 1 both domains are uniform. Below 1, covariate shift: the target is uniform on the half of the
            torus where the last angle's sine is positive, and the source has this share of the uniform density there,
            the rest of its mass on the other half. (By the letter of Assumption 1 the thin half would lower mu_-; where
            the supports differ, c_mu is 0 or 1 at almost every point as the radius goes to 0.)
        gap: C_ada, the posterior shift.
        amplitude: the most that eta_U differs from 1/2.
        power: 1 / beta; if at most 1, it is also the Hölder exponent.
    """

    dim: int = 2
    overlap: float = 1.0
    gap: float = 0.0
    amplitude: float = 0.3
    power: float = 1.0

    def __post_init__(self) -> None:
        require.whole("dim", self.dim, least=1)
        if not 0 < self.overlap <= 1:
            raise AdaNPCError(f"overlap must be greater than 0 and at most 1, got {self.overlap}")
        require.positive("amplitude", self.amplitude)
        require.positive("power", self.power)
        if not 0 <= self.gap <= 0.5 - self.amplitude:
            raise AdaNPCError(
                f"gap must be from 0 to 0.5 - amplitude = {0.5 - self.amplitude:g}, so that probabilities stay within "
                f"0 and 1, got {self.gap}"
            )

    @property
    def shift(self) -> str:
        """Which of the paper's settings this is: none, covariate, posterior or both."""
        has_covariate_shift = self.overlap < 1
        has_posterior_shift = self.gap > 0
        if has_covariate_shift and has_posterior_shift:
            return "both"
        if has_covariate_shift:
            return "covariate"
        if has_posterior_shift:
            return "posterior"
        return "none"

    @property
    def assumptions(self) -> Assumptions:
        """The constants, all exact: c_mu* is 1, since a border halves balls of twice the density."""
        holder = min(self.power, 1)
        steepness = max(self.power, 1)
        stretch = sqrt(self.dim) ** holder
        return Assumptions(
            dim=self.dim,
            source_overlap=self.overlap,
            target_overlap=1.0,
            density=(sqrt(self.dim) / (2 * pi)) ** self.dim,
            smoothness=self.amplitude * steepness * stretch * 2 ** (1 - holder),
            holder=holder,
            margin=1 / self.power,
            margin_constant=self.amplitude ** (-1 / self.power),
            gap=self.gap,
        )

    @property
    def wasserstein(self) -> float:
        """The Wasserstein distance W(D_S, D_U) of the two domains, exact.

        Mirroring the last angle is the best transport: by duality, the sine of that angle proves it.
        """
        if self.overlap == 1:
            return 0.0
        return (2 - self.overlap) * 2 / pi / sqrt(self.dim)

    def source(self, count: int, draw: np.random.Generator) -> Array:
        """Points of the source, (count, 2d)."""
        angles = draw.uniform(0, 2 * pi, (count, self.dim))
        if self.overlap < 1:
            in_other_half = draw.uniform(size=count) >= self.overlap / 2
            angles[:, -1] = angles[:, -1] / 2 + pi * in_other_half
        return _points(angles)

    def target(self, count: int, draw: np.random.Generator) -> Array:
        """Points of the target, (count, 2d)."""
        angles = draw.uniform(0, 2 * pi, (count, self.dim))
        if self.overlap < 1:
            angles[:, -1] /= 2
        return _points(angles)

    def target_probability(self, points: Array) -> Array:
        """The probability of class 1, eta_U, at points (n, 2d) of the target: (n,)."""
        cosine = np.clip(points[:, 0] * sqrt(self.dim), -1, 1)
        probability: Array = 0.5 + self.amplitude * np.sign(cosine) * np.abs(cosine) ** self.power
        return probability

    def source_probability(self, points: Array) -> Array:
        """The probability of class 1, eta_S, at points (n, 2d) of the source: (n,)."""
        return self.target_probability(points) + self.gap

    def excess(self, points: Array, answers: npt.NDArray[np.bool_]) -> float:
        """The excess error of these answers (n,), true for class 1, at points of the target; it needs no labels."""
        probability = self.target_probability(points)
        best_answers = probability >= 0.5
        cost_of_mistake = np.abs(2 * probability - 1)
        return float(np.mean(cost_of_mistake * (answers != best_answers)))


def _points(angles: Array) -> Array:
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) / sqrt(angles.shape[1])
