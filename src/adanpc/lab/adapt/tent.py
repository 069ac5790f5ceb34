"""Tent: scale and shift, or the head, descend the mean entropy of the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from adanpc.lab.adapt.adapter import Source
from adanpc.lab.adapt.entropy import EntropyDescent, entropy

GRID: Mapping[str, Sequence[Any]] = {"alpha": (0.1, 1.0, 10.0), "steps": (1, 3)}


class Tent(EntropyDescent):
    """The source model with the statistics of the batch, whose scales and shifts descend the entropy of its answers.

    Paper: Wang et al. 2021, Tent: fully test-time adaptation by entropy minimization. CIFAR-10-C there: Adam at 1e-3;
    ImageNet-C: sgd at 2.5e-4.

    Differs from the published code: GroupNorm, LayerNorm and BatchNorm1d are trained, too. An episodic answer comes
    after the step; there before it, so that a single step changes no answer.

    Args:
        alpha: the learning rate, as a multiple of the source's.
        steps: made on each batch.
        optimizer: adam, or sgd with momentum 0.9.
        episodic: every batch starts from the source model.
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
        super().__init__(source, trains="norm", alpha=alpha, optimizer=optimizer, steps=steps)
        self.episodic = episodic

    def answer(self, batch: Tensor) -> Tensor:
        """The probabilities (B, C) before the last step on the batch; if episodic, after it."""
        if not self.episodic:
            return super().answer(batch)
        self.recover()
        super().answer(batch)
        with torch.no_grad():
            return self.look(batch).softmax(1)

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """One step on the mean entropy."""
        self.descend(entropy(logits).mean())


class TentClf(EntropyDescent):
    """The source model's head, which descends the entropy of its answers; features stay as they are.

    Paper: Iwasawa and Matsuo 2021, where it is Tent-C.

    Args:
        alpha: the learning rate, as a multiple of the source's.
        steps: made on each batch.
    """

    in_paper: ClassVar[str] = "Tent-clf"
    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = GRID

    def __init__(self, source: Source, *, alpha: float = 1.0, steps: int = 1) -> None:
        super().__init__(source, trains="head", alpha=alpha, optimizer="adam", steps=steps)

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """One step on the mean entropy."""
        self.descend(entropy(logits).mean())


class TentPreBN(EntropyDescent):
    """A new BatchNorm between features and head, by the batch's statistics; it descends the entropy of the answers.

    Paper: Iwasawa and Matsuo 2021, where it is Tent-BN.

    Args:
        alpha: the learning rate, as a multiple of the source's.
        steps: made on each batch.
    """

    sees: ClassVar[Literal["images", "features"]] = "features"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = GRID
    least: ClassVar[int] = 2

    def __init__(self, source: Source, *, alpha: float = 1.0, steps: int = 1) -> None:
        super().__init__(source, trains="new norm", alpha=alpha, optimizer="adam", steps=steps)

    def learn(self, batch: Tensor, logits: Tensor) -> None:
        """One step on the mean entropy."""
        self.descend(entropy(logits).mean())
