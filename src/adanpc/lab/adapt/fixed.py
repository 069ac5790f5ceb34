"""Methods that learn nothing from the stream, the baselines of adaptation: the source model, k-NN, and LAME."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adanpc import require
from adanpc.core import AdaNPC, MemoryBank, nobody
from adanpc.lab.adapt.adapter import Adapter, Source

ROUNDS = 100  # the largest number of rounds of LAME
SETTLED = 1e-6  # the rounds end when no probability changes by more than this


class Linear(Adapter):
    """Answers with the source model's own head."""

    in_paper: ClassVar[str] = "ResNet50"  # the paper names the row by its network
    sees: ClassVar[Literal["images", "features"]] = "features"

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the head's probabilities (B, C) for features (B, D)."""
        probs: Tensor = self.model.head(batch).softmax(1)
        return probs


class FrozenKNN(Adapter):
    """Answers by a vote of the nearest source rows; the bank does not grow.

    Args:
        k: how many rows vote.
        rule, temperature: how they vote; see ``core.vote``.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {
        "k": (1, 5, 10, 25, 50, 75, 100, 150, 200),
        "temperature": (0.01, 0.05, 0.1, 0.25, 0.5),
    }

    def __init__(self, source: Source, *, k: int = 10, rule: str = "share", temperature: float = 0.1) -> None:
        super().__init__(source)
        bank = MemoryBank(self.model.dim, self.model.classes, device=self.model.device)
        self.classifier = AdaNPC(bank, k=k, rule=rule, temperature=temperature, admission=nobody)
        self.classifier.learn(source.features, source.labels)
        self.banks["source"] = bank

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the vote (B, C) of the nearest rows on features (B, D)."""
        return self.classifier.predict(batch).probs.to(batch.dtype)


def nearest_affinity(rows: Tensor, k: int) -> Tensor:
    """Returns the matrix (B, B) of unit rows (B, D) that is 1 at each row's k nearest other rows, and 0 elsewhere."""
    similarity = (rows @ rows.T).fill_diagonal_(-torch.inf)
    near = similarity.topk(min(k, len(rows) - 1), 1).indices
    return torch.zeros_like(similarity).scatter_(1, near, 1.0)


def gaussian_affinity(rows: Tensor, k: int) -> Tensor:
    """Returns a Gaussian of the distances between unit rows (B, B), as wide as the mean distance to the k-th nearest.

    Each row counts as its own first neighbor. In a batch of one, a row listens to nobody.
    """
    if len(rows) == 1:
        return rows.new_zeros(1, 1)
    distance = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    to_nearest = distance.topk(min(k, len(rows)), largest=False).values  # (B, k)
    width = to_nearest[:, -1].mean().clamp(min=1e-12)
    affinity: Tensor = (-(distance / width).square() / 2).exp()
    return affinity


def linear_affinity(rows: Tensor, k: int) -> Tensor:
    """Returns the cosines (B, B) between unit rows. In a batch of one, a row listens to nobody."""
    if len(rows) == 1:
        return rows.new_zeros(1, 1)
    return rows @ rows.T


KERNELS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "knn": nearest_affinity,
    "rbf": gaussian_affinity,
    "linear": linear_affinity,
}


class LAME(Adapter):
    """Pulls the head's probabilities toward those of similar rows of the same batch until they agree.

    It repeats ``probs = softmax(log p + W probs)``, at most 100 times, where p are the head's probabilities and the
    affinity W (B, B) is how much each row listens to each other row. Nothing is kept from batch to batch, and a batch
    of one gets the head's answer.

    Args:
        kernel: how W is computed. With ``knn``, a row listens equally to its k nearest neighbors. With ``rbf``, it
            listens to all rows, by a Gaussian of their distance that is as wide as the mean distance to the k-th
            nearest, where each row counts as its own first neighbor. With ``linear``, it listens to all rows by their
            cosine. With the last two it also listens to itself.
        k: the number of neighbors; ``linear`` does not use it.

    Paper: Boudiaf et al., Parameter-free Online Test-time Adaptation, CVPR 2022.

    Differs from the published code: with ``knn`` a row never listens to itself; in the published code it may if rows
    are equal. The rounds end when no probability changes by more than 1e-6; in the published code, when the energy
    stops changing. If the Gaussian has no width because rows are equal, equal rows listen to each other; the published
    code gives NaN.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"kernel": ("knn", "rbf", "linear"), "k": (1, 3, 5)}

    def __init__(self, source: Source, *, kernel: str = "knn", k: int = 5) -> None:
        super().__init__(source)
        self.k = require.whole("k", k, least=1)
        self.affinity = KERNELS[require.one_of("kernel", kernel, KERNELS)]

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns probabilities (B, C) of features (B, D) that agree with those of their neighbors."""
        logs = self.model.head(batch).double().log_softmax(1)  # (B, C)
        affinity = self.affinity(normalize(batch.double(), dim=1), self.k)  # (B, B)
        probs: Tensor = logs.exp()
        for _ in range(ROUNDS):
            before = probs
            probs = (logs + affinity @ probs).softmax(1)
            changes = (probs - before).abs()
            if bool((changes <= SETTLED).all()):
                break
        return probs.to(batch.dtype)
