"""PeTTA: RoTTA that adapts less the further features have drifted from those of the source."""

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
    """RoTTA that stays closer to the source model the further features have drifted from those of the source.

    For each class, a running mean of the teacher's features answered with that class is compared with the mean and the
    variance of the source features that the source model answers with it. The divergence is
    ``g = 1 - exp(-mean((mean - source mean)^2 / source variance))`` over the classes answered since the last step. It
    scales a penalty on turning the trained weights away from those of the source (``10 g`` times the mean of their
    negative cosines), and slows the teacher by ``1 - g``. The student also learns the answers of the source model.

    Paper:
        Hoang, Vo and Do, Persistent Test-Time Adaptation in Recurring Testing Scenarios, NeurIPS 2024 (PeTTA).

    Differs from the published code:
        Source means are computed from training samples; in the published code, from test samples. Classes with fewer
        than two samples are not compared. The loss is the published one for ImageNet; for CIFAR and DomainNet the
        published one is symmetric. Otherwise in the same ways as RoTTA.

    Args:
        lr, capacity, every, share, momentum, timeliness, uncertainty: see ``RoTTA``.
        rate: how far a running mean moves in each step.
        penalty: the weight of the penalty if the divergence is 1; lambda_0 in the published settings.
    """

    means: Tensor  # (C, D) running means of the teacher's features
    source_means: Tensor  # (C, D)
    source_variances: Tensor  # (C, D)

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
        self.recent: list[tuple[Tensor, Tensor]] = []  # features (n, D) and answers (n,) since the last step

    def moving(self) -> set[str]:
        """Returns the names of what RoTTA changes, the running means, and the source model's statistics."""
        names = super().moving()
        # The source model learns no weights, but its BatchNorm layers follow the statistics of the stream.
        statistics = [name for name in names if name.startswith("model.") and ".running_" in name]
        return names | {"means"} | {f"frozen.{name.removeprefix('model.')}" for name in statistics}

    @torch.no_grad()
    def _answer_and_keep(self, rows: Tensor) -> Tensor:
        """Returns the probabilities of images, offers all of them to the memory, and records their features."""
        features = self.teacher.features(rows)
        logits = self.teacher.head(features)
        answers = logits.argmax(1)
        for row, label, row_entropy in zip(rows, answers.tolist(), entropy(logits).tolist(), strict=True):
            self.memory.add(Exemplar(row.clone(), label, row_entropy))  # a view would keep the whole batch alive
        self.recent.append((features, answers))
        self.seen += len(rows)
        probs: Tensor = logits.softmax(1)
        return probs

    @torch.enable_grad()
    def learn(self) -> None:
        """Makes one step of the student on the images in the memory, and one of the teacher toward the student."""
        images = self.memory.images()
        with learning(self.teacher), torch.no_grad():
            teacher_answers = self.teacher(images).softmax(1)
        with learning(self.frozen), torch.no_grad():
            source_answers = self.frozen(images).softmax(1)
        with learning(self.model):
            # As in the public code, the student's statistics move twice: first with the images, then with the views.
            with torch.no_grad():
                self.model(images)
            logits = self.model(view(images))
        divergence = self._drift_of(self.recent)
        self.recent = []
        loss = cross_entropy(logits, teacher_answers) + cross_entropy(logits, source_answers)
        descend(loss + self.penalty * divergence * self._negative_cosine(), self.optimizers["adam"])
        approach(self.teacher.parameters(), self.model.parameters(), (1 - self.momentum) * (1 - divergence))

    @torch.no_grad()
    def _drift_of(self, recent: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Returns the divergence of the classes among recent answers, then moves the running means of these classes."""
        features = torch.cat([part for part, _ in recent]).double()
        answers = torch.cat([part for _, part in recent])
        classes = answers.unique()
        compared = classes[self.compared.to(classes.device)[classes]]
        squares = (self.means[compared] - self.source_means[compared]).square()
        distance = (squares / (self.source_variances[compared] + 1e-6)).mean()
        # The divergence is that of the means before these features move them.
        for label in classes.tolist():
            recent_mean = features[answers == label].mean(0)
            self.means[label] += self.rate * (recent_mean - self.means[label])
        if len(compared) == 0:
            return 0.0
        return float(1 - torch.exp(-distance))

    def _negative_cosine(self) -> Tensor:
        """Returns the mean () of the negative cosines between trained weights and those of the source."""
        terms = []
        for now, start in zip(self.model.parameters(), self.frozen.parameters(), strict=True):
            if now.requires_grad:
                terms.append(-cosine_similarity(now.flatten(), start.flatten(), dim=0))
        return torch.stack(terms).mean()

    def extra(self) -> dict[str, Any]:
        """Returns the memory, the number of images seen, and the features and answers since the last step."""
        return {**super().extra(), "recent": list(self.recent)}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts back what ``extra`` returned."""
        super().take_extra(extra)
        self.recent = list(extra["recent"])
