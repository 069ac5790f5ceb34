"""The bounds of Propositions 1–3 with all constants of their proofs, and problems whose constants are known."""

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
        dim: d, the dimension of the features; an estimate need not be a whole number.
        source_overlap: c_mu, how much of a small ball around a target point the source covers. The proofs use only its
            product with ``density``: a ball of radius r has a source mass of at least c_mu mu_- pi_d r^d.
        target_overlap: c_mu*, the same for the target.
        density: mu_-, the smallest density.
        smoothness: C, with |eta(x) - eta(x')| ≤ C |x - x'|^alpha.
        holder: alpha; the paper states the case alpha = 1 and says that a smaller one is possible.
        margin: beta, with P(|eta_U - 1/2| < t) ≤ C_beta t^beta.
        margin_constant: C_beta.
        gap: C_ada, the largest difference between eta_S and eta_U at a target point; 0 under covariate shift alone.
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
    """Returns the volume of the unit ball, the paper's pi_d."""
    return float(pi ** (dim / 2)) / gamma(dim / 2 + 1)


def radius(k: int, rows: int, overlap: float, density: float, dim: float) -> float:
    """Returns the radius of a ball that holds k of the rows, except with probability exp(-k/4).

    This is the paper's r_0 (label ``bound:x_diff``): (2k / (c_mu mu_- pi_d n))^(1/d). It is 0 without neighbors, and
    infinite without rows. The proof needs it to be below r_mu; beyond the diameter it says nothing.
    """
    if k == 0:
        return 0.0
    if rows == 0:
        return inf
    rows_in_unit_ball = overlap * density * unit_ball(dim) * rows
    return float((2 * k / rows_in_unit_ball) ** (1 / dim))


def proposition_1(k: int, n_s: int, known: Assumptions, lipschitz: float, least_error: float, risk: float) -> float:
    """Returns a bound on the target error of a hypothesis (``lemma:bound_omega``; constant of ``prop:wass_omega``).

    It is kappa + risk + 2 L r_0, and holds with probability at least 1 - n exp(-k/4) for n target points. The O(·) of
    the statement hides the factor 2 L, which the appendix gives. Omega is taken to be the distribution of one of the k
    nearest source rows of a target point. The paper's union of balls need not be as close to the target, depending on
    where the source has its mass.

    Args:
        k: how many neighbors vote.
        n_s: the number of source rows.
        known: the constants of the problem.
        lipschitz: L, for every hypothesis. No classifier with answers in {0, 1} has one unless it is constant, so it
            must be chosen.
        least_error: kappa, the smallest sum of the errors on target and Omega that one hypothesis can have.
        risk: the error of the hypothesis on Omega.
    """
    distance = radius(k, n_s, known.source_overlap, known.density, known.dim)
    return least_error + risk + 2 * lipschitz * distance


def vote_error(k_s: int, k_u: int, n_s: int, n_u: int, known: Assumptions) -> float:
    """Returns a bound on |vote share - eta_U| at a target point; Propositions 2 and 3 raise it to the power 1 + beta.

    It is the sum of k^(-1/4), for the noise of labels, and of two terms, one for each kind of neighbor: its share of
    the vote times C r^alpha, plus C_ada for the source. The proof of Proposition 3 computes the radius of each kind
    from its own number of neighbors.
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
    """Returns a bound on the excess error of the vote of k source rows (labels ``prop:knn_S`` and ``bound:22``).

    It is 2 C_beta (k^(-1/4) + C r_0 + C_ada)^(1 + beta), with the constants that the proof has before it drops them.
    With gap 0 this is the covariate-shift half of the proposition, otherwise the posterior-shift half. It may exceed 1.
    """
    return proposition_3(k, 0, n_s, 0, known)


def proposition_3(k_s: int, k_u: int, n_s: int, n_u: int, known: Assumptions) -> float:
    """Returns a bound on the excess error with k_u target rows in the vote (label ``prop:knn_SU``).

    It is 2 C_beta vote_error^(1 + beta), and assumes that the label of a target row has mean eta_U. In ``bound:28`` the
    paper writes C_1 k_s where the line before has k_s / k; the latter is proved, and used here.
    """
    error = vote_error(k_s, k_u, n_s, n_u, known)
    return 2 * known.margin_constant * float(error ** (1 + known.margin))


def failure(k_s: int, k_u: int = 0) -> float:
    """Returns the probability, at most 1, that ``vote_error`` is exceeded at one target point.

    It is 2 exp(-2 sqrt k) for the noise (label ``equ:21``), plus exp(-k/4) for each radius in use. The paper combines
    these into 3 exp(-2 sqrt k), which needs k of at least 64, and counts neither radius in Proposition 3. It then
    treats the bound as if it held at all points at once; for the mean over points, this probability has to be added to
    the excess error.
    """
    noise = 2 * exp(-2 * sqrt(k_s + k_u))
    radii = sum(exp(-count / 4) for count in (k_s, k_u) if count > 0)
    return min(1.0, noise + radii)


def best_split(k: int, n_s: int, n_u: int, known: Assumptions) -> tuple[int, int]:
    """Returns the k_s and k_u with the smallest bound of Proposition 3; ties go to the fewest target rows.

    Without a gap this is k_s : k_u = c_mu n_s : c_mu* n_u up to rounding, which a search over all rows gives by itself
    if the densities are what the overlaps say. A gap moves it toward the target.
    """
    if not 1 <= k <= n_s + n_u:
        raise AdaNPCError(f"k must be from 1 to {n_s + n_u}, the number of rows, got {k}")
    least = max(0, k - n_s)  # if there are fewer than k source rows, target rows must make up the rest
    most = min(k, n_u)
    k_u = min(range(least, most + 1), key=lambda count: vote_error(k - count, count, n_s, n_u, known))
    return k - k_u, k_u


@dataclass(frozen=True)
class Problem:
    """Two classes on a torus of unit vectors, for which every quantity in the propositions is known.

    A point consists of d angles, stored as their cosines and sines divided by sqrt(d). That is a unit vector of 2d
    numbers, so the bank's cosine has the same order as Euclidean distance. The torus is a flat surface without a
    border, so a ball of radius r ≤ pi / sqrt(d) contains at least pi_d r^d of it. The probability of class 1 depends on
    the first angle: eta_U = 1/2 + amplitude sign(cos) |cos|^power, and eta_S = eta_U + gap everywhere.

    Args:
        dim: d.
        overlap: c_mu. At 1 both domains are uniform. Below 1 there is covariate shift: the target is uniform on the
            half of the torus where the sine of the last angle is positive; there the source has this share of the
            uniform density, and the rest of its mass is on the other half. (Taken literally, Assumption 1 would let the
            sparse half lower mu_-. Where the supports differ, c_mu is 0 or 1 at almost every point as the radius goes
            to 0.)
        gap: C_ada, the posterior shift.
        amplitude: the largest difference between eta_U and 1/2.
        power: 1 / beta; if it is at most 1, it is also the Hölder exponent.
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
        """The kind of shift, one of the paper's settings: none, covariate, posterior or both."""
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
        """The constants, all exact: c_mu* is 1, since the target's border halves balls, but its density is double."""
        # The slope of |cos|^power in the cosine is at most the power. With a power below 1 it has no limit, and the
        # function is only Hölder continuous.
        holder = min(self.power, 1)
        steepness = max(self.power, 1)
        stretch = sqrt(self.dim) ** holder  # the cosine is sqrt(d) times a coordinate of the point
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
        """The exact Wasserstein distance W(D_S, D_U) between the two domains.

        The best transport mirrors the last angle; by duality, the sine of that angle proves it.
        """
        if self.overlap == 1:
            return 0.0
        return (2 - self.overlap) * 2 / pi / sqrt(self.dim)

    def source(self, count: int, draw: np.random.Generator) -> Array:
        """Draws points (count, 2d) of the source."""
        angles = draw.uniform(0, 2 * pi, (count, self.dim))
        if self.overlap < 1:
            # The uniform density has half of its mass on the target's half, of which the source has this share.
            in_other_half = draw.uniform(size=count) >= self.overlap / 2
            angles[:, -1] = angles[:, -1] / 2 + pi * in_other_half
        return _points(angles)

    def target(self, count: int, draw: np.random.Generator) -> Array:
        """Draws points (count, 2d) of the target."""
        angles = draw.uniform(0, 2 * pi, (count, self.dim))
        if self.overlap < 1:
            angles[:, -1] /= 2  # from 0 to pi, where the sine is positive
        return _points(angles)

    def target_probability(self, points: Array) -> Array:
        """Returns eta_U, the probability (n,) of class 1 at points (n, 2d) of the target."""
        cosine = np.clip(points[:, 0] * sqrt(self.dim), -1, 1)  # rounding may go beyond
        probability: Array = 0.5 + self.amplitude * np.sign(cosine) * np.abs(cosine) ** self.power
        return probability

    def source_probability(self, points: Array) -> Array:
        """Returns eta_S, the probability (n,) of class 1 at points (n, 2d) of the source."""
        return self.target_probability(points) + self.gap

    def excess(self, points: Array, answers: npt.NDArray[np.bool_]) -> float:
        """Returns the excess error of answers (n,), true for class 1, at points of the target; it needs no labels."""
        probability = self.target_probability(points)
        best_answers = probability >= 0.5
        cost_of_mistake = np.abs(2 * probability - 1)
        return float(np.mean(cost_of_mistake * (answers != best_answers)))


def _points(angles: Array) -> Array:
    """Returns the unit vectors (n, 2d) of angles (n, d)."""
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) / sqrt(angles.shape[1])
