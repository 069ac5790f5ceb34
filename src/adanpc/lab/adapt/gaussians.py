"""A Gaussian for each class over the features of the stream, with the answers of prototypes as prior: OGA, StatA."""

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

ROUNDS = 10  # of StatA
INNER_ROUNDS = 5
SOFTENING = 50.0  # what StatA divides log-likelihoods by
SMALLEST_VARIANCE = 1e-12


class OGA(ZeroShot):
    """Multiplies the answers of prototypes with the likelihood of the feature under a Gaussian for each class.

    The 8 features of lowest entropy that were answered as each class are kept. A class with at least two has their
    mean, any other its own direction; all classes share one covariance, that of the kept features around their
    centers, known as soon as a class has three. With up to four features a dimension its inverse is that of a ridge
    estimate, ``d ((n - 1) S + trace(S) I)^-1``. The answer is proportional to ``p softmax(0.05 log g)``, where g is the
    likelihood. A batch is kept before it is answered.

    Paper:
        Fuchs, Zanella and De Vleeschouwer, Online Gaussian Test-Time Adaptation of Vision-Language Models, 2025.

    Differs from the published code:
        The mean of a class is that of its kept features; see ``OGAPublished``.

    Args:
        prototypes: see ``ZeroShot``.
        keep: how many features of each class.
        temperature: what log-likelihoods are multiplied by.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"temperature": (0.01, 0.05, 0.1)}  # around the published one
    centers: Tensor  # (C, D)
    precision: Tensor  # (D, D)

    def __init__(self, source: Source, *, prototypes: str = "head", keep: int = 8, temperature: float = 0.05) -> None:
        super().__init__(source, prototypes=prototypes)
        require.positive("temperature", temperature)
        self.temperature = temperature
        dim = self.model.dim
        self.kept = Cache(dim, self.model.classes, keep)
        self.register_buffer("centers", self.directions.clone())
        self.register_buffer("precision", dim * torch.eye(dim, device=self.model.device))

    def moving(self) -> set[str]:
        """Returns the names of the centers and of the inverse of the covariance."""
        return {"centers", "precision"}

    def extra(self) -> dict[str, Any]:
        """Returns the features that are kept."""
        return {"kept": self.kept.state()}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts back the features that were kept."""
        self.kept.load(extra["kept"])

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of features (B, D), after they were kept."""
        rows, logits = self.look(batch)
        labels = logits.argmax(1).tolist()
        for row, label, height in zip(rows, labels, entropy(logits).tolist(), strict=True):
            self.kept.add(row, label, height)
        self._estimate()
        tempered = (self.temperature * self._log_likelihoods(rows)).log_softmax(1)
        return (logits.log_softmax(1) + tempered).softmax(1)

    def divisors(self, counts: Tensor) -> Tensor:
        """Returns what the sum of the kept features of each class is divided by (C,), given how many there are."""
        return counts

    def _estimate(self) -> None:
        """Sets the centers and the precision to those of the features that are kept now."""
        rows = self.kept.rows.double()
        labels = torch.tensor(self.kept.labels, device=rows.device)
        counts = self.kept.counts()
        sums = rows.new_zeros(len(counts), rows.shape[1]).index_add(0, labels, rows)
        several = counts >= 2
        means = sums[several] / self.divisors(counts)[several, None]
        self.centers[several] = means.to(self.centers.dtype)
        if bool((counts >= 3).any()):
            deviations = rows - self.centers[labels].double()
            self.precision.copy_(inverse_covariance(deviations - deviations.mean(0)))

    def _log_likelihoods(self, rows: Tensor) -> Tensor:
        """Returns the logarithms (B, C), up to a constant, of the likelihood of rows (B, D) under each class."""
        precision = self.precision.double()
        rows = rows.double()
        centers = self.centers.double()
        leaned = centers @ precision  # (C, D)
        own = (rows @ precision * rows).sum(1, keepdim=True)  # (B, 1)
        across = rows @ leaned.T  # (B, C)
        squares = own - 2 * across + (leaned * centers).sum(1)
        return (-squares / 2).to(self.centers.dtype)


class OGAPublished(OGA):
    """Does what OGA does with the means of its public code: sums divided by the room for features, not by their number.

    So the center of a class that is half full is half as long as it should be.

    Paper:
        Fuchs, Zanella and De Vleeschouwer 2025: see ``OGA``.
    """

    def divisors(self, counts: Tensor) -> Tensor:
        """Returns how many features there is room for, for each class (C,)."""
        return torch.full_like(counts, self.kept.keep)


def inverse_covariance(deviations: Tensor) -> Tensor:
    """Returns the inverse (D, D) of the covariance of n deviations (n, D) from their mean, by a ridge if n is small."""
    count, dim = deviations.shape
    scatter = deviations.T @ deviations  # (n - 1) times the covariance
    if count > 4 * dim:
        inverse: Tensor = torch.linalg.pinv(scatter / (count - 1), hermitian=True)
        return inverse
    ridge = scatter.trace() / (count - 1)
    if ridge == 0:
        return torch.zeros_like(scatter)  # all deviations are zero, and so is the inverse of the published code
    identity = torch.eye(dim, dtype=scatter.dtype, device=scatter.device)
    factor = torch.linalg.cholesky(scatter + ridge * identity)
    return dim * torch.cholesky_inverse(factor)


class StatA(ZeroShot):
    """Fits a Gaussian to each class of a batch, drawn to its prototype where the batch has few features of it.

    Ten rounds. In each, assignments are proportional to ``p exp((log-likelihood + 50/6 (W + W') assignments) / 50)``,
    where W has the cosines of each row with its 3 nearest in the batch. Then a class to which n rows are assigned has
    the share ``n / (n + 1)`` of its mean and variance from them, and the rest from its prototype. The last assignments
    are the answer. Nothing is kept from batch to batch.

    Paper:
        Zanella, Fuchs, De Vleeschouwer and Ben Ayed, Realistic Test-Time Adaptation of Vision-Language Models, CVPR
        2025.

    Differs from the published code:
        Batches of four rows or fewer have fewer neighbors; there they are refused. The first variance of a batch of
        more than 2,500 rows is divided by their number once, there once for every 2,500.

    Args:
        prototypes: see ``ZeroShot``.
        k: how many rows each row listens to.
        anchor: how many rows the prototype counts for.
    """

    def __init__(self, source: Source, *, prototypes: str = "head", k: int = 3, anchor: float = 1.0) -> None:
        super().__init__(source, prototypes=prototypes)
        self.k = require.whole("k", k, least=1)
        self.anchor = require.positive("anchor", anchor)

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the assignments (B, C) of features (B, D)."""
        rows, logits = self.look(batch)
        rows = rows.double()
        logs = logits.double().log_softmax(1)
        start = self.directions.double()
        heard = nearest_cosines(rows, self.k)  # (B, B)
        shares = logs.exp()
        first_variance = (weighted_squares(rows, start, shares).sum(0) / len(rows)).clamp(min=SMALLEST_VARIANCE)
        centers = start
        variances = first_variance.expand_as(start)
        for _ in range(ROUNDS):
            shares = self._assigned(logs, shares, log_likelihoods(rows, centers, variances), heard)
            counts = shares.argmax(1).bincount(minlength=len(start)).double()
            trust = (counts / (counts + self.anchor))[:, None]  # (C, 1)
            means = normalize(shares.T @ rows, dim=1)
            centers = normalize(trust * means + (1 - trust) * start, dim=1)
            totals = shares.sum(0).clamp(min=SMALLEST_VARIANCE)[:, None]
            spread = weighted_squares(rows, centers, shares) / totals
            anchored = first_variance + (start - centers).square()
            variances = (trust * spread + (1 - trust) * anchored).clamp(min=SMALLEST_VARIANCE)
        shares = self._assigned(logs, shares, log_likelihoods(rows, centers, variances), heard)
        return shares.to(batch.dtype)

    def _assigned(self, logs: Tensor, shares: Tensor, likelihoods: Tensor, heard: Tensor) -> Tensor:
        """Returns new assignments (B, C) after rounds in which neighbors listen to each other."""
        both_ways = heard + heard.T
        for _ in range(INNER_ROUNDS):
            agreement = SOFTENING / (2 * self.k) * (both_ways @ shares)
            shares = (logs + (likelihoods + agreement) / SOFTENING).softmax(1)
        return shares


def nearest_cosines(rows: Tensor, k: int) -> Tensor:
    """Returns the cosines (B, B) of unit rows with their k nearest others, and 0 with all others."""
    cosines = rows @ rows.T
    others = cosines.clone().fill_diagonal_(-torch.inf)
    near = others.topk(min(k, len(rows) - 1), 1).indices
    heard = torch.zeros_like(cosines)
    return heard.scatter(1, near, cosines.gather(1, near))


def log_likelihoods(rows: Tensor, centers: Tensor, variances: Tensor) -> Tensor:
    """Returns the logarithms (B, C), up to a constant, of the likelihood of rows under diagonal Gaussians."""
    precisions = 1 / variances  # (C, D)
    own = rows.square() @ precisions.T  # (B, C)
    across = rows @ (centers * precisions).T
    squares = own - 2 * across + (centers.square() * precisions).sum(1)
    return -(squares + variances.log().sum(1)) / 2


def weighted_squares(rows: Tensor, centers: Tensor, shares: Tensor) -> Tensor:
    """Returns the squared deviations (C, D) of rows from the center of each class, summed with their shares (B, C)."""
    sums = shares.T @ rows
    totals = shares.sum(0)[:, None]
    squares = shares.T @ rows.square() - 2 * centers * sums + centers.square() * totals
    return squares.clamp(min=0)  # a difference of large numbers may round to less
