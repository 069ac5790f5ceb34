"""Tent: normalization layers, or the head, are trained to minimize the mean entropy of the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from adanpc import require
from adanpc.lab.adapt.adapter import Source
from adanpc.lab.adapt.entropy import EntropyDescent, entropy

GRID: Mapping[str, Sequence[Any]] = {"alpha": (0.1, 1.0, 10.0), "steps": (1, 3)}


class Tent(EntropyDescent):
    """Normalizes by the statistics of the batch, and trains scales and shifts to minimize the entropy of the answers.

    Paper:
        Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021. It uses Adam at 1e-3 for
        CIFAR-10-C, and SGD at 2.5e-4 for ImageNet-C.

    Differs from the published code:
        GroupNorm, LayerNorm and BatchNorm1d are trained, too. If episodic, the answer is the one after the step; in the
        published code it is the one before, so a single step changes no answer.

    Args:
        alpha: the learning rate, as a multiple of that of source training.
        steps: the number of steps on each batch.
        optimizer: adam, or sgd with momentum 0.9.
        episodic: whether every batch starts from the source model.
    """

    in_paper: ClassVar[str] = "Tent"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = GRID

    def __init__(
        self,
        source: Source,
        *,
        alpha: float = 1.0,
        steps: int = 1,
        optimizer: str = "adam",
        episodic: bool = False,
    ) -> None:
        rate = source.lr * require.positive("alpha", alpha)
        super().__init__(source, trains="norm", lr=rate, optimizer=optimizer, steps=steps)
        self.episodic = episodic

    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) as they were before the last step on the batch; if episodic, after it."""
        if not self.episodic:
            return super().answer(batch)
        self.recover()
        super().answer(batch)
        with torch.no_grad():
            return self.classify(batch).softmax(1)

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """Makes one step on the mean entropy."""
        self.descend(self.uncertainty(logits).mean())


class TentClf(EntropyDescent):
    """Trains the head to minimize the entropy of its answers; features do not change.

    Paper:
        Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization, NeurIPS
        2021, where it is Tent-C.

    Args:
        alpha: the learning rate, as a multiple of that of source training.
        steps: the number of steps on each batch.
    """

    in_paper: ClassVar[str] = "Tent-clf"
    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = GRID

    def __init__(self, source: Source, *, alpha: float = 1.0, steps: int = 1) -> None:
        rate = source.lr * require.positive("alpha", alpha)
        super().__init__(source, trains="head", lr=rate, optimizer="adam", steps=steps)

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """Makes one step on the mean entropy."""
        self.descend(entropy(logits).mean())


class TentPreBN(EntropyDescent):
    """Puts a new BatchNorm between features and head, and trains it to minimize the entropy of the answers.

    Paper:
        Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization, NeurIPS
        2021, where it is Tent-BN.

    Args:
        alpha: the learning rate, as a multiple of that of source training.
        steps: the number of steps on each batch.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = GRID
    least: ClassVar[int] = 2  # a single row has no variance

    def __init__(self, source: Source, *, alpha: float = 1.0, steps: int = 1) -> None:
        rate = source.lr * require.positive("alpha", alpha)
        super().__init__(source, trains="new norm", lr=rate, optimizer="adam", steps=steps)

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """Makes one step on the mean entropy."""
        self.descend(entropy(logits).mean())
