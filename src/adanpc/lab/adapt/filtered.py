"""Entropy is descended on chosen answers only: ETA, and EATA, which also holds on to what the source model knew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.adapter import Source
from adanpc.lab.adapt.entropy import EntropyDescent, entropy

GRID: Mapping[str, Sequence[Any]] = {"alpha": (0.1, 1.0, 10.0), "optimizer": ("sgd", "adam")}
ROWS = 64  # of a batch of source images, as published: Fisher weights depend on it


def usual_similarity(classes: int) -> float:
    """The largest cosine to the average answer that ETA tolerates, by the number of classes.

    A sure answer and an even average of C classes have the cosine C ** -0.5, so that no limit fits all: 0.05, published
    for 1,000 classes, would refuse every sure answer of 10. This is the power of C through both published values, 0.4
    for 10 classes and 0.05 for 1,000, and lies above that cosine for every C.
    """
    return float(0.4 * (10 / classes) ** (log(8) / log(100)))


class Selection(nn.Module):
    """Chooses sure answers that differ from the average one, and weighs them; the average follows the chosen.

    Args:
        classes: C.
        margin: of the entropy, as a share of its largest value ln C; above it an answer is not sure.
        similarity: the largest cosine to the average answer; by default ``usual_similarity``.
    """

    average: Tensor

    def __init__(self, classes: int, margin: float, similarity: float | None) -> None:
        super().__init__()
        if not margin > 0:
            raise AdaNPCError(f"margin must be positive, got {margin}")
        self.margin = margin * log(classes)
        self.similarity = usual_similarity(classes) if similarity is None else similarity
        self.register_buffer("average", torch.zeros(classes))  # (C,), zero until there is one

    def loss(self, logits: Tensor) -> Tensor | None:
        """The weighted mean entropy () of the chosen among logits (B, C), or None if there are none."""
        uncertainty, probs = entropy(logits), logits.detach().softmax(1)
        chosen = uncertainty < self.margin
        if self.average.any():
            chosen &= cosine_similarity(self.average[None], probs).abs() < self.similarity
        if not chosen.any():
            return None
        self.follow(probs[chosen].mean(0))
        weight = (self.margin - uncertainty.detach()).exp()
        return (weight * uncertainty)[chosen].mean()

    def follow(self, mean: Tensor) -> None:
        """Moves the average answer (C,) a tenth of the way to a new mean; the first one is taken whole."""
        self.average.copy_(self.average.lerp(mean, 0.1) if self.average.any() else mean)


class ETA(EntropyDescent):
    """Tent on the answers that are sure and unlike the average one, the surest with the largest weight.

    Paper: Niu et al. 2022, Efficient test-time model adaptation without forgetting, without its penalty.

    Differs from the published code: the margins depend on the number of classes, and are those published for 10 and
    1,000; the learning rate is the source's times alpha, 2.5e-4 there.

    Args:
        margin: the largest entropy of an answer to learn from, as a share of ln C; E0 of the paper.
        similarity: the largest cosine to the average answer; by default by the number of classes.
        trains: norm, or head with all statistics of the source.
        alpha: the learning rate, as a multiple of the source's.
        optimizer: sgd with momentum 0.9, or adam.
    """

    grid: ClassVar[Mapping[str, Sequence[Any]]] = GRID

    def __init__(
        self,
        source: Source,
        *,
        margin: float = 0.4,
        similarity: float | None = None,
        trains: str = "norm",
        alpha: float = 1.0,
        optimizer: str = "sgd",
    ) -> None:
        super().__init__(source, trains=trains, alpha=alpha, optimizer=optimizer, steps=1)
        self.selection = Selection(self.model.classes, margin, similarity).to(self.model.device)

    def moving(self) -> set[str]:
        """What is trained, and the average answer."""
        return super().moving() | {"selection.average"}

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """One step on the weighted mean entropy of the chosen, if there are any."""
        loss = self.selection.loss(logits)
        if loss is not None:
            self.descend(self.objective(loss))

    def objective(self, loss: Tensor) -> Tensor:
        """What is descended, for the weighted mean entropy () of the chosen."""
        return loss


class EATA(ETA):
    """ETA, with a penalty on moving what the source model's own answers on source images depend on.

    Paper: Niu et al. 2022, Efficient test-time model adaptation without forgetting.

    Differs from the published code: as ETA does.

    Args:
        margin, similarity, trains, alpha, optimizer: as of ETA.
        weight: of the penalty; 2000 is published for ImageNet, 1 for CIFAR-10.
        samples: source images for the Fisher weights, spread evenly over the rows; all if there are fewer.
    """

    def __init__(
        self,
        source: Source,
        *,
        margin: float = 0.4,
        similarity: float | None = None,
        weight: float = 2000.0,
        samples: int = 2000,
        trains: str = "norm",
        alpha: float = 1.0,
        optimizer: str = "sgd",
    ) -> None:
        if not weight >= 0:
            raise AdaNPCError(f"weight must be 0 or more, got {weight}")
        if samples < 1:
            raise AdaNPCError(f"samples must be at least 1, got {samples}")
        super().__init__(source, margin=margin, similarity=similarity, trains=trains, alpha=alpha, optimizer=optimizer)
        self.weight, self.fisher = weight, self._fisher(source, samples)

    def objective(self, loss: Tensor) -> Tensor:
        """The loss and the penalty."""
        return loss + self.weight * self.penalty()

    def penalty(self) -> Tensor:
        """The sum () of squared moves since the source, each times its Fisher weight."""
        parts = zip(self.fisher, self.trained, self.start, strict=True)
        return torch.stack([(fisher * (now - start).square()).sum() for fisher, now, start in parts]).sum()

    def _fisher(self, source: Source, samples: int) -> list[Tensor]:
        """The mean square of each trained parameter's gradient, over batches of source images and own answers."""
        if source.images is None or not len(source.labels):
            raise AdaNPCError("EATA looks at source images: give Source(images=…), or take ETA, which needs none")
        rows = source.mixed(samples)
        batches = rows.tensor_split(ceil(len(rows) / ROWS))
        total = [torch.zeros_like(parameter) for parameter in self.trained]
        for batch in batches:
            with torch.enable_grad():
                logits = self.look(source.images(batch).to(self.model.device))
                gradients = self.gradients(cross_entropy(logits, logits.argmax(1)))
            for mean, gradient in zip(total, gradients, strict=True):
                mean += gradient.square() / len(batches)
        return total
