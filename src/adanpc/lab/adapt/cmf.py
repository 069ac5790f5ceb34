"""CMF: ROID, with weights averaged with the estimate of a Kalman filter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from adanpc.lab.adapt.adapter import Source
from adanpc.lab.adapt.roid import ROID, corrected_by_logits
from adanpc.lab.adapt.teacher import approach

NOISE = 0.005  # noise that a step adds to the hidden weights of a model with REFERENCE trained weights
REFERENCE = 38_400
LEAST_STAY = 0.89  # the smallest share of themselves that the hidden weights keep in a step


class CMF(ROID):
    """ROID, but the trained weights are averaged with hidden weights that a Kalman filter estimates.

    After each step the hidden weights move a hundredth of the way to those of the source, then toward the trained ones,
    by as much as the filter trusts these. Then the trained weights move a hundredth of the way to the hidden ones.

    Paper:
        Lee and Chang, Continual Momentum Filtering on Parameter Space for Online Test-Time Adaptation, ICLR 2024.

    Differs from the published code:
        In the same ways as ROID; see ``CMFPublished`` for the prior. A reset also forgets the variance of the filter.

    Args:
        lr, momentum, trend_momentum, temperature: see ``ROID``; the momentum is that of the trained weights.
        return_rate: how far the hidden weights move toward those of the source in a step.
    """

    def __init__(
        self,
        source: Source,
        *,
        lr: float = 1e-3,
        momentum: float = 0.99,
        trend_momentum: float = 0.9,
        temperature: float = 1 / 3,
        return_rate: float = 0.01,
    ) -> None:
        super().__init__(source, lr=lr, momentum=momentum, trend_momentum=trend_momentum, temperature=temperature)
        self.return_rate = return_rate
        copies = [nn.Parameter(scale.detach().clone(), requires_grad=False) for scale in self.trained]
        self.hidden = nn.ParameterList(copies)
        self.noise = NOISE * sum(scale.numel() for scale in self.trained) / REFERENCE
        self.variance = 0.0  # the filter's uncertainty about the hidden weights

    def moving(self) -> set[str]:
        """Returns the names of what ROID changes, and of the hidden weights."""
        return super().moving() | {f"hidden.{place}" for place in range(len(self.hidden))}

    def extra(self) -> dict[str, Any]:
        """Returns the variance of the hidden weights."""
        return {"variance": self.variance}

    def take_extra(self, extra: Mapping[str, Any]) -> None:
        """Puts the variance back."""
        self.variance = extra["variance"]

    def average_weights(self) -> None:
        """Makes one step of the filter, and moves the trained weights toward the hidden ones."""
        # Predict: the hidden weights drift back to the source, and become less certain.
        approach(self.hidden, self.anchor, self.return_rate)
        self.variance = (1 - self.return_rate) ** 2 * self.variance + self.noise
        # Update: one minus the Kalman gain is the share of the hidden weights that stays.
        measurement_noise = 1 - self.noise
        stays = max(measurement_noise / (self.variance + measurement_noise), LEAST_STAY)
        if stays >= 0.9999:
            stays = 1.0
        self.variance *= stays
        approach(self.hidden, self.trained, 1 - stays)
        approach(self.trained, self.hidden, 1 - self.momentum)


class CMFPublished(CMF):
    """CMF, but the prior multiplies logits, as in the public code.

    Paper:
        Lee and Chang, Continual Momentum Filtering on Parameter Space for Online Test-Time Adaptation, ICLR 2024.

    Differs from the published code:
        In the same ways as CMF, apart from the prior.

    Args:
        lr, momentum, trend_momentum, temperature, return_rate: see ``CMF``.
    """

    def corrected(self, logits: Tensor) -> Tensor:
        """Returns the answers (B, C), corrected by a prior on logits."""
        return corrected_by_logits(logits)
