"""RoTTA that holds back as far as features have drifted from the source's: PeTTA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Source, descend
from adanpc.lab.adapt.batchnorm import learning
from adanpc.lab.adapt.entropy import entropy
from adanpc.lab.adapt.exemplars import Exemplar
from adanpc.lab.adapt.memory import RoTTA
from adanpc.lab.adapt.returning import class_moments
from adanpc.lab.adapt.teacher import approach, view


class PeTTA(RoTTA):
    """Does what RoTTA does, and holds on to the source model as far as features have drifted from the source's.

    For each class, a running mean of the teacher's features that were answered so is compared with the mean and the
    variance of the source features that the source model answers so. The divergence is
    ``g = 1 - exp(-mean((mean - source mean)^2 / source variance))`` over the classes answered since the last step. It
    weighs a penalty on turning the trained weights away from the source's (``10 g`` times the mean of their negative
    cosines), and slows the teacher by ``1 - g``. The student also learns the answers of the source model.

    Paper:
        Hoang, Vo and Do, Persistent Test-Time Adaptation in Recurring Testing Scenarios, NeurIPS 2024 (PeTTA).

    Differs from the published code:
        Source means are those of the training samples, there of test samples. Classes with fewer than two are not
        compared. The loss is the one for ImageNet; for CIFAR and DomainNet theirs is symmetric. What differs in RoTTA.

    Args:
        lr, capacity, every, share, momentum, timeliness, uncertainty: see ``RoTTA``.
        rate: of the running means.
        penalty: its weight where the divergence is 1; lambda_0 in the published settings.
    """

    means: Tensor
    source_means: Tensor
    source_variances: Tensor

    def __init__(
        self,
        source: Source,
        *,
        lr: float = 1e-3,
        capacity: int = 64,
        every: int = 64,
        share: float = 0.05,
        momentum: float = 0.999,
        timeliness: float = 1.0,
        uncertainty: float = 1.0,
        rate: float = 0.05,
        penalty: float = 10.0,
    ) -> None:
        super().__init__(
            source,
            lr=lr,
            capacity=capacity,
            every=every,
            share=share,
            momentum=momentum,
            timeliness=timeliness,
            uncertainty=uncertainty,
        )
        self.rate = rate
        self.penalty = penalty
        self.frozen = deepcopy(self.model).requires_grad_(False)
        with torch.no_grad():
            answers = source.model.head(source.features).argmax(1)
        self.compared = answers.bincount(minlength=self.model.classes) >= 2  # (C,)
        if not bool(self.compared.any()):
            raise AdaNPCError(
                "PeTTA compares with the variance of source features, and no class has two of them: use RoTTA"
            )
        means, variances = class_moments(source.features, answers, self.model.classes)
        self.register_buffer("source_means", means)
        self.register_buffer("source_variances", variances)
        self.register_buffer("means", means.clone())
        self.recent: list[tuple[Tensor, Tensor]] = []  # features and answers since the last step

    def moving(self) -> set[str]:
        """Returns what RoTTA moves, the running means, and the statistics of the source model's layers."""
        names = super().moving()
        statistics = [name for name in names if name.startswith("model.") and ".running_" in name]
        return names | {"means"} | {f"frozen.{name.removeprefix('model.')}" for name in statistics}

    @torch.no_grad()
    def _answer_and_keep(self, rows: Tensor) -> Tensor:
        """Returns the probabilities of rows, offers all of them to the memory, and notes their features."""
        features = self.teacher.features(rows)
        logits = self.teacher.head(features)
        answers = logits.argmax(1)
        for row, label, height in zip(rows, answers.tolist(), entropy(logits).tolist(), strict=True):
            self.memory.add(Exemplar(row.clone(), label, height))  # a view would keep the whole batch alive
        self.recent.append((features, answers))
        self.seen += len(rows)
        probs: Tensor = logits.softmax(1)
        return probs

    @torch.enable_grad()
    def learn(self) -> None:
        """Makes one step of the student on the images in the memory, and one of the teacher toward the student."""
        images = self.memory.images()
        with learning(self.teacher), torch.no_grad():
            taught = self.teacher(images).softmax(1)
        with learning(self.frozen), torch.no_grad():
            anchored = self.frozen(images).softmax(1)
        with learning(self.model):
            # The statistics of the student move twice, first by the images themselves, as in the public code.
            with torch.no_grad():
                self.model(images)
            logits = self.model(view(images))
        divergence = self._drift_of(self.recent)
        self.recent = []
        loss = cross_entropy(logits, taught) + cross_entropy(logits, anchored)
        descend(loss + self.penalty * divergence * self._turned(), self.optimizers["adam"])
        approach(self.teacher.parameters(), self.model.parameters(), (1 - self.momentum) * (1 - divergence))

    @torch.no_grad()
    def _drift_of(self, recent: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Returns the divergence of the classes of recent features and answers, and moves their means."""
        features = torch.cat([each for each, _ in recent]).double()
        answers = torch.cat([each for _, each in recent])
        met = answers.unique()
        compared = met[self.compared.to(met.device)[met]]
        squares = (self.means[compared] - self.source_means[compared]).square()
        distance = (squares / (self.source_variances[compared] + 1e-6)).mean()
        for label in met.tolist():
            here = features[answers == label].mean(0)
            self.means[label] += self.rate * (here - self.means[label])
        if len(compared) == 0:
            return 0.0
        return float(1 - torch.exp(-distance))

    def _turned(self) -> Tensor:
        """Returns the mean () of the negative cosines of trained weights with the source's."""
        terms = []
        for now, start in zip(self.model.parameters(), self.frozen.parameters(), strict=True):
            if now.requires_grad:
                terms.append(-cosine_similarity(now.flatten(), start.flatten(), dim=0))
        return torch.stack(terms).mean()

    def extra(self) -> dict[str, Any]:
        """Returns the memory, how many images were seen, and the features since the last step."""
        return {**super().extra(), "recent": list(self.recent)}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts back what ``extra`` returned."""
        super().take_extra(extra)
        self.recent = list(extra["recent"])
