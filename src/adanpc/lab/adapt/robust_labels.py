"""RPL: scales and shifts are trained on the model's own answers, with a loss that is robust to wrong ones."""

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
    """Trains scales and shifts on the model's own answers, with the generalized cross-entropy.

    The loss is ``(1 - p^q) / q``, where p is the probability of the answer. It lies between the cross-entropy (q = 0)
    and the probability of an error (q = 1). BatchNorm layers use the statistics of the batch. A batch is answered as
    it would be before the step.

    Paper:
        Rusak et al., If Your Data Distribution Shifts, Use Self-Learning, TMLR 2022.

    Differs from the published code:
        Adam is used, as in the published code for CIFAR; for ImageNet that code uses SGD at 5e-4.

    Args:
        lr: the learning rate of Adam.
        q: the robustness to wrong answers.
    """

    # No search is published, so the grid spans a factor of ten on each side of the default.
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"lr": (1e-4, 1e-3, 1e-2)}

    def __init__(self, source: Source, *, lr: float = 1e-3, q: float = 0.8) -> None:
        super().__init__(source)
        self.q = require.positive("q", q)
        use_batch_statistics(self.model)
        self.optimizers["adam"] = Adam(trainable_scales(self.model, "RPL"), lr=lr)

    def moving(self) -> set[str]:
        """Returns the names of the scales and shifts of normalization layers."""
        return {name for name, value in self.named_parameters(remove_duplicate=False) if value.requires_grad}

    @torch.enable_grad()
    def answer(self, batch: Tensor) -> Tensor:
        """Returns the probabilities (B, C) as they were before the step."""
        probs: Tensor = self.model(batch).softmax(1)
        confidence = probs.amax(1)
        loss = ((1 - confidence**self.q) / self.q).mean()
        descend(loss, self.optimizers["adam"])
        return probs.detach()
