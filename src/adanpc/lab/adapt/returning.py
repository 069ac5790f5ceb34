"""The bank moves, and returns to the source: after a time, where answers collapse, or as far as features drifted."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from adanpc import core, require
from adanpc.core import Admission, Append, Delete, MemoryBank, Origin, Prediction, vote
from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Adapter, Source
from adanpc.lab.adapt.bank import AdaNPC


@final
class AdaNPCReset(AdaNPC):
    """AdaNPC that forgets the stream after every so many samples.

    Any method does the same with ``adapter.reset_every = n``.

    Paper:
        Press et al., RDumb: A Simple Approach That Questions Our Progress in Continual Test-Time Adaptation, NeurIPS
        2023.

    Differs from the published code:
        The bank returns to the source rows; there it is a network that ETA trains. Samples are counted instead of
        batches of 64, and the return is at the first batch after so many.

    Args:
        every: samples between two returns; there 1000 batches.
        k, temperature, min_confidence: see ``AdaNPC``.
    """

    in_paper: ClassVar[str] = ""

    def __init__(
        self,
        source: Source,
        *,
        every: int = 1000,
        k: int = 10,
        temperature: float = 0.1,
        min_confidence: float = 0.9,
    ) -> None:
        super().__init__(source, k=k, temperature=temperature, min_confidence=min_confidence)
        self.reset_every = require.whole("every", every, least=1)


@final
class AdaNPCASR(Adapter):
    """AdaNPC that removes its latest rows when the answers to a batch are too much alike.

    The entropy of the mean answer to each batch is compared with a running average of it. Below that average the bank
    keeps only its earliest rows, a share of ``max(kept - slope * (average - entropy), 0)``, and the average starts
    again; otherwise the average moves toward the entropy, the slower the more answers differ from those of the
    source rows alone. A batch needs samples of several classes to have a high entropy, so alone or sorted by class
    they keep the bank at the source.

    Paper:
        Lim, Hwang and Lee, When and Where to Reset Matters for Long-Term Test-Time Adaptation, ICLR 2026 (ASR).

    Differs from the published code:
        There, layers of a network return to the source, the last ones first, and a penalty draws the others toward
        what they were; here the rows that joined last are removed, and nothing is trained.

    Args:
        k, temperature, min_confidence: see ``AdaNPC``.
        momentum: how far the average moves at most; m0 in the published settings.
        start: the average starts at the entropy of ``start * C`` equally likely classes; a0 there.
        kept: the share of rows that is kept at most, when the entropy is just below the average; r0 there.
        slope: how fast that share falls with the entropy, for each nat; r1 there.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"

    def __init__(
        self,
        source: Source,
        *,
        k: int = 10,
        temperature: float = 0.1,
        min_confidence: float = 0.9,
        momentum: float = 0.15,
        start: float = 0.5,
        kept: float = 0.5,
        slope: float = 20.0,
    ) -> None:
        super().__init__(source)
        self.momentum = momentum
        self.kept = kept
        self.slope = slope
        self.first_average = log(start * self.model.classes)
        self.average = self.first_average  # entropy, in nats
        bank = MemoryBank(self.model.dim, self.model.classes, device=self.model.device)
        admission = Admission(min_confidence=min_confidence)
        self.classifier = core.AdaNPC(bank, k=k, temperature=temperature, admission=admission)
        self.classifier.learn(source.features, source.labels)
        self.banks["bank"] = bank

    def answer(self, batch: Tensor) -> Tensor:
        """The vote on features (B, D)."""
        frozen = source_vote(self.classifier, batch).argmax(1)
        prediction = self.classifier.step(batch)
        self.latest = prediction
        entropy = float(torch.special.entr(prediction.probs.double().mean(0)).sum())
        if entropy < self.average:
            self._remove_latest(entropy)
            self.average = self.first_average
        else:
            flipped = float((prediction.labels != frozen).double().mean())
            stays = 1 - self.momentum + self.momentum * flipped
            self.average = stays * self.average + (1 - stays) * entropy
        return prediction.probs.to(batch.dtype)

    def _remove_latest(self, entropy: float) -> None:
        """Leaves only the rows of the stream that joined first."""
        share = max(self.kept - self.slope * (self.average - entropy), 0.0)
        table = self.classifier.bank.table("id", "origin")
        joined = table["id"][table["origin"] == Origin.ADMITTED].tolist()
        removed = joined[ceil(share * len(joined)) :]
        if removed:
            self.classifier.apply(Delete(tuple(removed)))

    def extra(self) -> dict[str, Any]:
        """The running average of the entropy."""
        return {"average": self.average}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts the average back."""
        self.average = extra["average"]


@final
class AdaNPCPeTTA(Adapter):
    """AdaNPC that falls back to the source rows as far as the features of its answers have drifted from theirs.

    For each class, a running mean of the features that were answered so is compared with the mean and the variance of
    the source. The divergence is ``1 - exp(-mean((mean - source mean)^2 / source variance))`` over the classes of a
    batch. It is the share of the source rows' own vote in the answer, and a query joins if that answer is sure.

    Paper:
        Hoang, Vo and Do, Persistent Test-Time Adaptation in Recurring Testing Scenarios, NeurIPS 2024 (PeTTA).

    Differs from the published code:
        There, the divergence weighs a penalty on the weights of a student and slows its teacher; here it mixes the
        answer of the growing bank with that of the source rows, which stands for their anchor. Source means are by
        true labels, there by predicted ones. A batch is answered before any of it joins.

    Args:
        k, temperature, min_confidence: see ``AdaNPC``.
        rate: of the running means.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    means: Tensor
    source_means: Tensor
    source_variances: Tensor

    def __init__(
        self,
        source: Source,
        *,
        k: int = 10,
        temperature: float = 0.1,
        min_confidence: float = 0.9,
        rate: float = 0.05,
    ) -> None:
        super().__init__(source)
        self.min_confidence = min_confidence
        self.rate = rate
        bank = MemoryBank(self.model.dim, self.model.classes, device=self.model.device)
        self.classifier = core.AdaNPC(bank, k=k, temperature=temperature)
        self.classifier.learn(source.features, source.labels)
        self.banks["bank"] = bank
        means, variances = class_moments(source.features, source.labels, self.model.classes)
        self.register_buffer("source_means", means)
        self.register_buffer("source_variances", variances)
        self.register_buffer("means", means.clone())

    def moving(self) -> set[str]:
        """The running means."""
        return {"means"}

    def answer(self, batch: Tensor) -> Tensor:
        """The votes of all rows and of source rows on features (B, D), mixed."""
        adapted = self.classifier.predict(batch)
        share = self._divergence(adapted.labels)
        self._move_means(batch, adapted.labels)
        frozen = source_vote(self.classifier, batch)
        probs = (1 - share) * adapted.probs.double() + share * frozen
        self.latest = self._join(batch, probs, adapted)
        return probs.to(batch.dtype)

    def _divergence(self, answers: Tensor) -> float:
        """How far the means of the classes that are answered (B,) are from those of the source, from 0 to 1."""
        met = answers.unique()
        squares = (self.means[met] - self.source_means[met]).square()
        return float(1 - torch.exp(-(squares / (self.source_variances[met] + 1e-6)).mean()))

    def _move_means(self, batch: Tensor, answers: Tensor) -> None:
        """Moves the mean of each class that is answered (B,) toward that of its features (B, D) in the batch."""
        for label in answers.unique().tolist():
            here = batch[answers == label].double().mean(0)
            self.means[label] += self.rate * (here - self.means[label])

    def _join(self, batch: Tensor, probs: Tensor, adapted: Prediction) -> Prediction:
        """Lets sure answers (B, C) join; returns the answer with their ids."""
        confidence, labels = probs.max(1)
        sure = confidence >= self.min_confidence
        joined = torch.full_like(labels, -1)
        if sure.any():
            change = Append(batch[sure], labels[sure], Origin.ADMITTED, confidence=confidence[sure])
            ids = self.classifier.apply(change)
            joined[sure] = torch.arange(ids.start, ids.stop, device=joined.device)
        return Prediction(probs.float(), adapted.weights, adapted.neighbors, joined)


def source_vote(classifier: core.AdaNPC, batch: Tensor) -> Tensor:
    """The vote (B, C), float64, of source rows alone on features (B, D)."""
    settings = classifier.settings
    if not isinstance(settings, core.PaperSettings):
        raise AdaNPCError(f"the vote of source rows alone needs preset='paper', got {classifier.preset!r}")
    near = classifier.bank.search(batch, settings.k, source=True)
    probs, _ = vote(near, classifier.bank.classes, settings.rule, settings.temperature)
    return probs


def class_moments(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean (C, D) and the variance (C, D) of features (n, D) by class, float64; zero for a class without any."""
    means = torch.zeros(classes, features.shape[1], dtype=torch.float64, device=features.device)
    variances = torch.zeros_like(means)
    for label in labels.unique().tolist():
        rows = features[labels == label].double()
        means[label] = rows.mean(0)
        if len(rows) > 1:
            variances[label] = rows.var(0)
    return means, variances
