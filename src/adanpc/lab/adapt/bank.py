"""Methods that adapt by letting answers join a bank: AdaNPC, the safe preset, and the published code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from adanpc import core
from adanpc.core import Admission, Append, MemoryBank, Origin, vote
from adanpc.lab.adapt.adapter import Adapter, Source

KS = (1, 5, 10, 25, 50, 75, 100, 150, 200)
TEMPERATURES = (0.01, 0.05, 0.1, 0.25, 0.5)


class AdaNPC(Adapter):
    """Answers by a vote of the nearest rows of a bank, which confident answers join.

    Queries join one after another, so answers do not depend on the batch size.

    Args:
        k: how many rows vote.
        rule, temperature: how they vote; see ``core.vote``.
        min_confidence: the paper's margin: an answer joins if its probability is at least this.
        soft: whether a row that joins keeps the probabilities of its answer instead of its class, as the paper's text
            says.
        centering: how features are centered; see ``core.Centering``.
        capacity: the largest number of admitted rows; the oldest leave first. None sets no limit.

    Paper: section "Methods", equation 4.
    """

    in_paper: ClassVar[str] = "AdaNPC"
    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {
        "k": KS,
        "temperature": TEMPERATURES,
        "min_confidence": (0.0, 0.5, 0.9),
    }

    def __init__(
        self,
        source: Source,
        *,
        k: int = 10,
        rule: str = "share",
        temperature: float = 0.1,
        min_confidence: float = 0.9,
        soft: bool = False,
        centering: str = "none",
        capacity: int | None = None,
    ) -> None:
        super().__init__(source)
        bank = MemoryBank(self.model.dim, self.model.classes, soft=soft, capacity=capacity, device=self.model.device)
        admission = Admission(min_confidence=min_confidence)
        self.classifier = core.AdaNPC(
            bank, k=k, rule=rule, temperature=temperature, admission=admission, centering=centering
        )
        self.classifier.learn(source.features, source.labels, domain=_domains(source))
        self.banks["bank"] = bank

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the vote (B, C) on features (B, D)."""
        self.latest = self.classifier.step(batch)
        return self.latest.probs.to(batch.dtype)


class AdaNPCSafe(Adapter):
    """Answers with the library's default preset, ``safe``: soft labels join a bank, and a guard watches the answers.

    The guard falls back to the frozen answer, the one without anything learned from the stream, when adapting seems to
    do harm; see ``core.safe``.

    Args:
        stream: ``unknown``, or ``mixed`` if classes are known to arrive in mixed order.
        guard: whether the guard may fall back.
        capacity: the largest number of rows from the stream; the oldest leave first. None sets no limit.

    Paper: Zhang et al., AdaNPC: Exploring Non-Parametric Classifier for Test-Time Adaptation, ICML 2023, for the bank;
        the rest is this library's own.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"

    def __init__(
        self, source: Source, *, stream: str = "unknown", guard: bool = True, capacity: int | None = None
    ) -> None:
        super().__init__(source)
        bank = MemoryBank(self.model.dim, self.model.classes, soft=True, capacity=capacity, device=self.model.device)
        self.classifier = core.AdaNPC(bank, preset="safe", stream=stream, guard=guard)
        self.classifier.learn(source.features, source.labels, domain=_domains(source))
        self.banks["bank"] = bank

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) of features (B, D)."""
        self.latest = self.classifier.step(batch)
        return self.latest.probs.to(batch.dtype)


def _domains(source: Source) -> Tensor:
    """Returns the number of the source domain that each sample (n,) belongs to."""
    if source.domains is None:
        return torch.zeros_like(source.labels)  # all samples belong to one domain
    return source.domains


class AdaNPCPublished(Adapter):
    """AdaNPC as in its public code, for comparison with published numbers.

    The bank starts with one random row of class 0. A whole batch is answered before any of it joins. The confidence is
    the largest value of a softmax of the vote, although the vote already consists of probabilities: with C classes it
    cannot exceed e / (e + C - 1).

    Paper: Zhang et al., AdaNPC: Exploring Non-Parametric Classifier for Test-Time Adaptation, ICML 2023, and its
        public code.

    Args:
        k: how many rows vote.
        temperature: of the vote.
        threshold: an answer joins if its confidence is at least this; beta in the public code.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {
        "k": KS,
        "temperature": TEMPERATURES,
        "threshold": (0.0, 0.25, 0.75, 1.1),
    }

    def __init__(self, source: Source, *, k: int = 100, temperature: float = 0.1, threshold: float = 0.1) -> None:
        super().__init__(source)
        self.k = k
        self.temperature = temperature
        self.threshold = threshold
        self.bank = MemoryBank(self.model.dim, self.model.classes, device=self.model.device)
        self.banks["bank"] = self.bank
        random_row = torch.rand(1, self.model.dim, generator=torch.Generator().manual_seed(0)) * 2 - 1
        self.bank.apply(Append(random_row, torch.zeros(1, dtype=torch.int64), Origin.SOURCE))
        self.bank.apply(Append(source.features, source.labels, Origin.SOURCE))

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the vote (B, C) on features (B, D)."""
        near = self.bank.search(batch, self.k)
        probs, _ = vote(near, self.model.classes, "published", self.temperature)
        flat_confidence, labels = probs.softmax(1).max(1)  # a softmax of probabilities, as in the public code
        joins = flat_confidence >= self.threshold
        if joins.any():
            # The bank records the probability itself, which means the same for every method.
            confidence = probs.amax(1)
            self.bank.apply(Append(batch[joins], labels[joins], Origin.ADMITTED, confidence=confidence[joins]))
        return probs.to(batch.dtype)
