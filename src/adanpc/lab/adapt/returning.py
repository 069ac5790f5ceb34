"""AdaNPC that returns to the source: after a fixed time, when answers collapse, or as far as features have drifted."""

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
    """AdaNPC that forgets the stream after every ``every`` samples.

    Setting ``adapter.reset_every = n`` makes any method do this.

    Paper:
        Press et al., RDumb: A Simple Approach That Questions Our Progress in Continual Test-Time Adaptation, NeurIPS
        2023.

    Differs from the published code:
        The bank returns to the source rows; in the published code, a network that ETA trains returns to the source
        model. Samples are counted instead of batches of 64, and the reset happens at the first batch after ``every``
        of them.

    Args:
        every: the number of samples between two resets; in the published code, 1000 batches.
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

    The entropy of the mean answer to each batch is compared with a running average of this entropy. If it is below the
    average, the bank keeps only the earliest of its admitted rows, a share of
    ``max(kept - slope * (average - entropy), 0)``, and the average starts again. Otherwise the average moves toward the
    entropy, the more slowly the more answers differ from those of the source rows alone. Only a batch with several
    classes has a high entropy, so single samples, or samples sorted by class, keep the bank at the source.

    Paper:
        Lim, Hwang and Lee, When and Where to Reset Matters for Long-Term Test-Time Adaptation, ICLR 2026 (ASR).

    Differs from the published code:
        In the published code, layers of a network return to the source, the last ones first, and a penalty pulls the
        others toward earlier values; here the rows that joined last are removed, and nothing is trained.

    Args:
        k, temperature, min_confidence: see ``AdaNPC``.
        momentum: the largest share of the way that the average moves; m0 in the published settings.
        start: the average starts at the entropy of ``start * C`` equally likely classes; a0 there.
        kept: the share of rows that stays if the entropy is just below the average; r0 there.
        slope: how fast that share falls for each nat that the entropy is below the average; r1 there.
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
        """Returns the vote (B, C) on features (B, D)."""
        frozen = source_vote(self.classifier, batch).argmax(1)  # before any of the batch joins
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
        """Removes all admitted rows but those that joined first."""
        share = max(self.kept - self.slope * (self.average - entropy), 0.0)
        table = self.classifier.bank.table("id", "origin")
        joined = table["id"][table["origin"] == Origin.ADMITTED].tolist()
        staying = ceil(share * len(joined))
        removed = joined[staying:]
        if removed:
            self.classifier.apply(Delete(tuple(removed)))

    def extra(self) -> dict[str, Any]:
        """Returns the running average of the entropy."""
        return {"average": self.average}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts the average back."""
        self.average = extra["average"]


@final
class AdaNPCPeTTA(Adapter):
    """AdaNPC that falls back to the source rows as far as features have drifted from theirs.

    For each class, a running mean of the features answered with that class is compared with the mean and the variance
    of its source features. The divergence is ``1 - exp(-mean((mean - source mean)^2 / source variance))`` over the
    classes answered in a batch. It is the share that the vote of the source rows alone has in the answer. A query joins
    if that answer is confident.

    Paper:
        Hoang, Vo and Do, Persistent Test-Time Adaptation in Recurring Testing Scenarios, NeurIPS 2024 (PeTTA).

    Differs from the published code:
        In the published code, the divergence scales a penalty on the weights of a student and slows its teacher; here
        it mixes the answer of the growing bank with that of the source rows. Source means are by true labels; in the
        published code, by predicted ones. A batch is answered before any of it joins.

    Args:
        k, temperature, min_confidence: see ``AdaNPC``.
        rate: how far a running mean moves with each batch.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    means: Tensor  # (C, D) running means of the features answered with each class
    source_means: Tensor  # (C, D)
    source_variances: Tensor  # (C, D)

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
        """Returns the name of the running means."""
        return {"means"}

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the vote (B, C) of all rows on features (B, D), mixed with that of the source rows alone."""
        adapted = self.classifier.predict(batch)
        share = self._divergence(adapted.labels)
        self._move_means(batch, adapted.labels)
        frozen = source_vote(self.classifier, batch)
        probs = (1 - share) * adapted.probs.double() + share * frozen
        self.latest = self._join(batch, probs, adapted)
        return probs.to(batch.dtype)

    def _divergence(self, answers: Tensor) -> float:
        """Returns how far, from 0 to 1, the means of the answered classes (B,) are from those of the source."""
        classes = answers.unique()
        squares = (self.means[classes] - self.source_means[classes]).square()
        distance = (squares / (self.source_variances[classes] + 1e-6)).mean()
        return float(1 - torch.exp(-distance))

    def _move_means(self, batch: Tensor, answers: Tensor) -> None:
        """Moves the mean of each answered class (B,) toward the mean of its features (B, D) in the batch."""
        for label in answers.unique().tolist():
            batch_mean = batch[answers == label].double().mean(0)
            self.means[label] += self.rate * (batch_mean - self.means[label])

    def _join(self, batch: Tensor, probs: Tensor, adapted: Prediction) -> Prediction:
        """Lets the queries with confident answers (B, C) join; returns the prediction with their ids."""
        confidence, labels = probs.max(1)
        confident = confidence >= self.min_confidence
        joined = torch.full_like(labels, -1)
        if confident.any():
            change = Append(batch[confident], labels[confident], Origin.ADMITTED, confidence=confidence[confident])
            ids = self.classifier.apply(change)
            joined[confident] = torch.arange(ids.start, ids.stop, device=joined.device)
        return Prediction(probs.float(), adapted.weights, adapted.neighbors, joined)


def source_vote(classifier: core.AdaNPC, batch: Tensor) -> Tensor:
    """Returns the vote (B, C), float64, of the source rows alone on features (B, D)."""
    settings = classifier.settings
    if not isinstance(settings, core.PaperSettings):
        raise AdaNPCError(f"the vote of source rows alone needs preset='paper', got {classifier.preset!r}")
    near = classifier.bank.search(batch, settings.k, source=True)
    probs, _ = vote(near, classifier.bank.classes, settings.rule, settings.temperature)
    return probs


def class_moments(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Returns the mean (C, D) and the variance (C, D) of the features (n, D) of each class, in float64.

    The mean of a class without features is zero, and so is the variance of a class with fewer than two.
    """
    means = torch.zeros(classes, features.shape[1], dtype=torch.float64, device=features.device)
    variances = torch.zeros_like(means)
    for label in labels.unique().tolist():
        rows = features[labels == label].double()
        means[label] = rows.mean(0)
        if len(rows) > 1:
            variances[label] = rows.var(0)
    return means, variances
