"""Methods that fit a Gaussian to each class of the stream, with the answers of prototypes as prior: OGA, StatA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adanpc import require
from adanpc.lab.adapt.adapter import Source
from adanpc.lab.adapt.caches import Cache
from adanpc.lab.adapt.entropy import entropy
from adanpc.lab.adapt.zero_shot import ZeroShot

ROUNDS = 10  # of StatA: each updates the assignments, then the Gaussians
INNER_ROUNDS = 5  # of StatA: updates of the assignments in each round
SOFTENING = 50.0  # StatA divides log-likelihoods by this
SMALLEST_VARIANCE = 1e-12


class OGA(ZeroShot):
    """Multiplies the answers of prototypes by the likelihood of the feature under a Gaussian for each class.

    For each class, the 8 features of lowest entropy that were answered with it are kept. The center of a class is the
    mean of its kept features if there are at least two, else its direction. All classes share one covariance, that of
    the kept features around their centers; it is estimated as soon as a class has three of them. If there are at most
    four features per dimension, its inverse is a ridge estimate, ``d ((n - 1) S + trace(S) I)^-1``. The answer is
    proportional to ``p softmax(0.05 log g)``, where g is the likelihood. A batch is kept before it is answered.

    Paper:
        Fuchs, Zanella and De Vleeschouwer, Online Gaussian Test-Time Adaptation of Vision-Language Models, 2025.

    Differs from the published code:
        The mean of a class is the mean of its kept features; see ``OGAPublished``.

    Args:
        prototypes: see ``ZeroShot``.
        keep: how many features of each class are kept.
        temperature: log-likelihoods are multiplied by this.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"temperature": (0.01, 0.05, 0.1)}  # around the published one
    centers: Tensor  # (C, D)
    precision: Tensor  # (D, D), the inverse of the covariance

    def __init__(self, source: Source, *, prototypes: str = "head", keep: int = 8, temperature: float = 0.05) -> None:
        super().__init__(source, prototypes=prototypes)
        require.positive("temperature", temperature)
        self.temperature = temperature
        dim = self.model.dim
        self.kept = Cache(dim, self.model.classes, keep)
        self.register_buffer("centers", self.directions.clone())
        self.register_buffer("precision", dim * torch.eye(dim, device=self.model.device))

    def moving(self) -> set[str]:
        """Returns the names of the centers and the precision."""
        return {"centers", "precision"}

    def extra(self) -> dict[str, Any]:
        """Returns the kept features."""
        return {"kept": self.kept.state()}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts the kept features back."""
        self.kept.load(extra["kept"])

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of features (B, D), all of which are kept first."""
        rows, logits = self.rows_and_logits(batch)
        labels = logits.argmax(1).tolist()
        for row, label, row_entropy in zip(rows, labels, entropy(logits).tolist(), strict=True):
            self.kept.add(row, label, row_entropy)
        self._estimate()
        tempered = (self.temperature * self._log_likelihoods(rows)).log_softmax(1)
        return (logits.log_softmax(1) + tempered).softmax(1)

    def divisors(self, counts: Tensor) -> Tensor:
        """Returns what the sum of each class's kept features is divided by (C,), given their counts (C,)."""
        return counts

    def _estimate(self) -> None:
        """Sets the centers and the precision to those of the features kept now."""
        rows = self.kept.rows.double()
        labels = torch.tensor(self.kept.labels, device=rows.device)
        counts = self.kept.counts()
        sums = rows.new_zeros(len(counts), rows.shape[1]).index_add(0, labels, rows)
        several = counts >= 2
        means = sums[several] / self.divisors(counts)[several, None]
        self.centers[several] = means.to(self.centers.dtype)
        if bool((counts >= 3).any()):
            # The center of a class with a single feature is its direction, so the mean deviation need not be zero.
            deviations = rows - self.centers[labels].double()
            self.precision.copy_(inverse_covariance(deviations - deviations.mean(0)))

    def _log_likelihoods(self, rows: Tensor) -> Tensor:
        """Returns the log-likelihoods (B, C), up to a constant, of rows (B, D) under each class."""
        precision = self.precision.double()
        rows = rows.double()
        centers = self.centers.double()
        # The squared Mahalanobis distance (x - c)' P (x - c), multiplied out into x'Px - 2 x'Pc + c'Pc.
        weighted_centers = centers @ precision  # (C, D)
        of_rows = (rows @ precision * rows).sum(1, keepdim=True)  # (B, 1)
        of_both = rows @ weighted_centers.T  # (B, C)
        of_centers = (weighted_centers * centers).sum(1)  # (C,)
        squares = of_rows - 2 * of_both + of_centers
        return (-squares / 2).to(self.centers.dtype)


class OGAPublished(OGA):
    """OGA with the means of its public code, which divides sums by ``keep`` instead of the number of kept features.

    So the center of a class with half of ``keep`` features is half as long as it should be.

    Paper:
        Fuchs, Zanella and De Vleeschouwer 2025: see ``OGA``.
    """

    def divisors(self, counts: Tensor) -> Tensor:
        """Returns, for each class (C,), how many features there is room for."""
        return torch.full_like(counts, self.kept.keep)


def inverse_covariance(deviations: Tensor) -> Tensor:
    """Returns the inverse covariance (D, D) of deviations (n, D) from their mean; a ridge estimate if n is small."""
    count, dim = deviations.shape
    scatter = deviations.T @ deviations  # (n - 1) times the covariance
    if count > 4 * dim:
        inverse: Tensor = torch.linalg.pinv(scatter / (count - 1), hermitian=True)
        return inverse
    ridge = scatter.trace() / (count - 1)
    if ridge == 0:
        return torch.zeros_like(scatter)  # all deviations are zero; the published code returns zeros, too
    identity = torch.eye(dim, dtype=scatter.dtype, device=scatter.device)
    factor = torch.linalg.cholesky(scatter + ridge * identity)
    return dim * torch.cholesky_inverse(factor)


class StatA(ZeroShot):
    """Fits a Gaussian to each class of a batch, pulled toward its prototype if the batch has few features of the class.

    There are ten rounds. Each first assigns rows to classes, in proportion to
    ``p exp((log-likelihood + 50/6 (W + W') assignments) / 50)``, where W holds the cosines of each row with its 3
    nearest rows in the batch. Then the mean and variance of a class to which n rows are assigned come from them with
    the share ``n / (n + 1)``, and from its prototype with the rest. The last assignments are the answer. Nothing is
    kept from batch to batch.

    Paper:
        Zanella, Fuchs, De Vleeschouwer and Ben Ayed, Realistic Test-Time Adaptation of Vision-Language Models, CVPR
        2025.

    Differs from the published code:
        Batches of four rows or fewer have fewer neighbors; the published code refuses them. The first variance of a
        batch of more than 2,500 rows is divided by their number once; the published code divides once for every 2,500.

    Args:
        prototypes: see ``ZeroShot``.
        k: the number of nearest rows that each row listens to.
        anchor: how many rows the prototype counts for.
    """

    def __init__(self, source: Source, *, prototypes: str = "head", k: int = 3, anchor: float = 1.0) -> None:
        super().__init__(source, prototypes=prototypes)
        self.k = require.whole("k", k, least=1)
        self.anchor = require.positive("anchor", anchor)

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the assignments (B, C) of features (B, D)."""
        rows, logits = self.rows_and_logits(batch)
        rows = rows.double()
        logs = logits.double().log_softmax(1)
        start = self.directions.double()
        affinity = nearest_cosines(rows, self.k)  # (B, B)
        shares = logs.exp()
        first_variance = weighted_squares(rows, start, shares).sum(0) / len(rows)
        first_variance = first_variance.clamp(min=SMALLEST_VARIANCE)  # (D,)
        centers = start
        variances = first_variance.expand_as(start)
        for _ in range(ROUNDS):
            shares = self._assigned(logs, shares, log_likelihoods(rows, centers, variances), affinity)
            counts = shares.argmax(1).bincount(minlength=len(start)).double()
            trust = (counts / (counts + self.anchor))[:, None]  # (C, 1)
            means = normalize(shares.T @ rows, dim=1)
            centers = normalize(trust * means + (1 - trust) * start, dim=1)
            totals = shares.sum(0).clamp(min=SMALLEST_VARIANCE)[:, None]
            spread = weighted_squares(rows, centers, shares) / totals
            anchored = first_variance + (start - centers).square()
            variances = (trust * spread + (1 - trust) * anchored).clamp(min=SMALLEST_VARIANCE)
        shares = self._assigned(logs, shares, log_likelihoods(rows, centers, variances), affinity)
        return shares.to(batch.dtype)

    def _assigned(self, logs: Tensor, shares: Tensor, likelihoods: Tensor, affinity: Tensor) -> Tensor:
        """Returns the assignments (B, C) after rounds in which neighbors listen to each other.

        Args:
            logs: (B, C) the logarithms of the prototypes' answers.
            shares: (B, C) the assignments so far.
            likelihoods: (B, C) the log-likelihoods under the Gaussians.
            affinity: (B, B) how much each row listens to each other row.
        """
        both_ways = affinity + affinity.T
        for _ in range(INNER_ROUNDS):
            agreement = SOFTENING / (2 * self.k) * (both_ways @ shares)
            shares = (logs + (likelihoods + agreement) / SOFTENING).softmax(1)
        return shares


def nearest_cosines(rows: Tensor, k: int) -> Tensor:
    """Returns the cosines of unit rows with their k nearest other rows, and 0 for all other pairs (B, B)."""
    cosines = rows @ rows.T
    others = cosines.clone().fill_diagonal_(-torch.inf)
    near = others.topk(min(k, len(rows) - 1), 1).indices
    return torch.zeros_like(cosines).scatter(1, near, cosines.gather(1, near))


def log_likelihoods(rows: Tensor, centers: Tensor, variances: Tensor) -> Tensor:
    """Returns the log-likelihoods (B, C), up to a constant, of rows (B, D) under one diagonal Gaussian per class."""
    precisions = 1 / variances  # (C, D)
    # The squared distance, multiplied out as in ``OGA``.
    of_rows = rows.square() @ precisions.T  # (B, C)
    of_both = rows @ (centers * precisions).T  # (B, C)
    of_centers = (centers.square() * precisions).sum(1)  # (C,)
    squares = of_rows - 2 * of_both + of_centers
    return -(squares + variances.log().sum(1)) / 2


def weighted_squares(rows: Tensor, centers: Tensor, shares: Tensor) -> Tensor:
    """Returns the squared deviations (C, D) of rows from each class center, summed with weights ``shares`` (B, C)."""
    sums = shares.T @ rows
    totals = shares.sum(0)[:, None]
    squares = shares.T @ rows.square() - 2 * centers * sums + centers.square() * totals
    return squares.clamp(min=0)  # the difference of large numbers may round to less than 0
