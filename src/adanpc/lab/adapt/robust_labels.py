"""Scales and shifts are trained on the model's own labels, by a loss that forgives wrong ones: RPL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Adam

from adanpc import require
from adanpc.lab.adapt.adapter import Adapter, Source, descend
from adanpc.lab.adapt.statistics import use_batch_statistics
from adanpc.lab.adapt.teacher import trainable_scales


class RPL(Adapter):
    """Trains scales and shifts on the classes that the model answers, by the generalized cross-entropy.

    The loss is ``(1 - p^q) / q``, where p is the probability of the answer: between a cross-entropy (q = 0) and the
    probability of an error (q = 1). BatchNorm layers use the statistics of the batch. Answers are from before the step.

    Paper:
        Rusak et al., If Your Data Distribution Shifts, Use Self-Learning, TMLR 2022.

    Differs from the published code:
        Adam as for CIFAR; for ImageNet theirs uses SGD at 5e-4.

    Args:
        lr: of Adam.
        q: how much wrong labels are forgiven.
    """

    # No search is published: a decade to each side of the default.
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"lr": (1e-4, 1e-3, 1e-2)}

    def __init__(self, source: Source, *, lr: float = 1e-3, q: float = 0.8) -> None:
        super().__init__(source)
        self.q = require.positive("q", q)
        use_batch_statistics(self.model)
        self.optimizers["adam"] = Adam(trainable_scales(self.model, "RPL"), lr=lr)

    def moving(self) -> set[str]:
        """Returns the scales and shifts of normalization layers."""
        return {name for name, value in self.named_parameters(remove_duplicate=False) if value.requires_grad}

    @torch.enable_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C), from before the step."""
        probs: Tensor = self.model(batch).softmax(1)
        sureness = probs.amax(1)
        loss = ((1 - sureness**self.q) / self.q).mean()
        descend(loss, self.optimizers["adam"])
        return probs.detach()
