"""Nothing moves: what adaptation is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adanpc.core import AdaNPC, MemoryBank, nobody
from adanpc.errors import AdaNPCError
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


class LAME(Adapter):
    """The head's probabilities, drawn toward those of the nearest rows of the same batch, until they agree.

    Rounds of ``probs = softmax(log p + sum of the probs of the k nearest)``, 100 at most. Nothing is kept from batch to
    batch, and a batch of one gets the head's answer.

    Args:
        k: how many rows each row listens to, by the cosine of features.

    Paper: Boudiaf et al., Parameter-free Online Test-time Adaptation, CVPR 2022 (its k-NN affinity).

    Differs from the published code: a row never listens to itself, there it may if rows are equal; the rounds end when
    no probability changes by more than 1e-6, there when the energy does not.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"k": (1, 3, 5)}

    def __init__(self, source: Source, *, k: int = 5) -> None:
        super().__init__(source)
        if k < 1:
            raise AdaNPCError(f"k must be at least 1, got {k}")
        self.k = k

    @torch.no_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Probabilities of features (B, D) that agree with those of their neighbors."""
        logs = self.model.head(batch).double().log_softmax(1)  # (B, C)
        near = self._near(batch.double())  # (B, k)
        probs: Tensor = logs.exp()
        for _ in range(ROUNDS):
            before, probs = probs, (logs + probs[near].sum(1)).softmax(1)
            if bool(((probs - before).abs() <= SETTLED).all()):
                break
        return probs.to(batch.dtype)

    def _near(self, batch: Tensor) -> Tensor:
        """Which other rows (B, k) are nearest to each; fewer in a small batch."""
        rows = normalize(batch, dim=1)
        similarity = (rows @ rows.T).fill_diagonal_(-torch.inf)
        return similarity.topk(min(self.k, len(batch) - 1), 1).indices
