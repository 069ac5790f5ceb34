"""Nothing moves: what adaptation is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adanpc import require
from adanpc.core import AdaNPC, MemoryBank, nobody
from adanpc.lab.adapt.adapter import Adapter, Source

ROUNDS, SETTLED = 100, 1e-6  # of LAME: the most, and the change of a probability that ends them


class Linear(Adapter):
    """The source model's own head."""

    in_paper: ClassVar[str] = "ResNet50"  # the paper names the row by its network
    sees: ClassVar[Literal["images", "features"]] = "features"

    def answer(self, batch: Tensor) -> Tensor:
        """The head's probabilities of features (B, D)."""
        probs: Tensor = self.model.head(batch).softmax(1)
        return probs


class FrozenKNN(Adapter):
    """A vote of the nearest source rows; the bank does not grow.

    Args:
        k: how many rows vote.
        rule, temperature: of the vote.
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
        """The share of each class among the nearest rows of features (B, D)."""
        return self.classifier.predict(batch).probs.to(batch.dtype)


def nearest_affinity(rows: Tensor, k: int) -> Tensor:
    """1 for the k nearest other rows of each of some unit rows (B, D), 0 for all else (B, B)."""
    similarity = (rows @ rows.T).fill_diagonal_(-torch.inf)
    near = similarity.topk(min(k, len(rows) - 1), 1).indices
    return torch.zeros_like(similarity).scatter_(1, near, 1.0)


def gaussian_affinity(rows: Tensor, k: int) -> Tensor:
    """A Gaussian of the distances between unit rows (B, B), as wide as the mean distance to the k-th nearest.

    The row itself is the first of the nearest. A batch of one has no other row, and listens to nobody.
    """
    if len(rows) == 1:
        return rows.new_zeros(1, 1)
    distance = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    width = distance.topk(min(k, len(rows)), largest=False).values[:, -1].mean().clamp(min=1e-12)
    affinity: Tensor = (-(distance / width).square() / 2).exp()
    return affinity


def linear_affinity(rows: Tensor, k: int) -> Tensor:
    """The cosines of unit rows (B, B). A batch of one has no other row, and listens to nobody."""
    if len(rows) == 1:
        return rows.new_zeros(1, 1)
    return rows @ rows.T


KERNELS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "knn": nearest_affinity,
    "rbf": gaussian_affinity,
    "linear": linear_affinity,
}


class LAME(Adapter):
    """The head's probabilities, drawn toward those of similar rows of the same batch, until they agree.

    Rounds of ``probs = softmax(log p + W probs)``, 100 at most, where W (B, B) says how much rows listen to each other.
    Nothing is kept from batch to batch, and a batch of one gets the head's answer.

    Args:
        kernel: what W is. With ``knn`` a row listens to its k nearest alike; with ``rbf`` to all, as a Gaussian of
            their distance says that is as wide as the mean distance to the k-th nearest, the row itself being the
            first; with ``linear`` to all, as their cosine says. With the last two it listens to itself, too.
        k: see there; ``linear`` has none.

    Paper: Boudiaf et al., Parameter-free Online Test-time Adaptation, CVPR 2022.

    Differs from the published code: with ``knn`` a row never listens to itself, there it may if rows are equal; the
    rounds end when no probability changes by more than 1e-6, there when the energy does not. Where the Gaussian has no
    width, because rows are equal, equal rows listen to each other; there NaN.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"kernel": ("knn", "rbf", "linear"), "k": (1, 3, 5)}

    def __init__(self, source: Source, *, kernel: str = "knn", k: int = 5) -> None:
        super().__init__(source)
        self.k = require.whole("k", k, least=1)
        self.affinity = KERNELS[require.one_of("kernel", kernel, KERNELS)]

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Probabilities of features (B, D) that agree with those of their neighbors."""
        logs = self.model.head(batch).double().log_softmax(1)  # (B, C)
        affinity = self.affinity(normalize(batch.double(), dim=1), self.k)  # (B, B)
        probs: Tensor = logs.exp()
        for _ in range(ROUNDS):
            before = probs
            probs = (logs + affinity @ probs).softmax(1)
            if bool(((probs - before).abs() <= SETTLED).all()):
                break
        return probs.to(batch.dtype)
