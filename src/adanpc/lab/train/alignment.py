"""Algorithms that make the features of all domains alike: CORAL, MMD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.penalty import Outputs, Penalized
from adanpc.lab.train.search import Draw, Power

GAMMAS = tuple(10.0**power for power in range(-3, 4))  # of the Gaussians in MMD's kernel


class CORAL(Penalized):
    """Penalizes how much the means and covariances of the features differ, averaged over pairs of domains.

    The distance of a pair is the mean squared difference of the means plus that of the covariances. The covariance of a
    domain with a single row counts as zero.

    Args:
        weight: of the penalty.

    Paper: Sun and Saenko, Deep CORAL, 2016.

    Differs from the published code: all domains pass through the encoder together, as in all algorithms here.
    """

    space: ClassVar[Mapping[str, Draw]] = {"weight": Power(-1, 1)}
    aligned: ClassVar[bool] = True
    needs: ClassVar[int] = 2

    def __init__(self, model: SourceModel, domains: int, *, weight: float = 1.0, **adam: float) -> None:
        super().__init__(model, domains, weight=weight, **adam)

    def penalty(self, outputs: Sequence[Outputs]) -> Tensor:
        """Returns the mean distance of two domains."""
        means = torch.stack([output.features.mean(0) for output in outputs])  # (domains, D)
        covariances = torch.stack([_covariance(output.features) for output in outputs])  # (domains, D, D)
        # The mean squared difference over all pairs is twice the unbiased variance.
        return 2 * (means.var(0).mean() + covariances.var(0).mean())


class MMD(Penalized):
    """Penalizes the maximum mean discrepancy of the features, averaged over pairs of domains.

    The kernel is a sum of Gaussians exp(-gamma * squared distance), with gamma from 0.001 to 1000 in powers of ten.
    Each mean is over all pairs of rows, including the pairs of a row with itself.

    Args:
        weight: of the penalty.

    Paper: Li, Pan, Wang and Kot, Domain Generalization with Adversarial Feature Learning, 2018; the discrepancy alone,
    as in DomainBed.

    Differs from the published code: all domains pass through the encoder together, as in all algorithms here.
    """

    space: ClassVar[Mapping[str, Draw]] = {"weight": Power(-1, 1)}
    aligned: ClassVar[bool] = True
    needs: ClassVar[int] = 2

    def __init__(self, model: SourceModel, domains: int, *, weight: float = 1.0, **adam: float) -> None:
        super().__init__(model, domains, weight=weight, **adam)

    def penalty(self, outputs: Sequence[Outputs]) -> Tensor:
        """Returns the mean discrepancy of two domains."""
        kernel = _kernel(torch.cat([output.features for output in outputs]))  # (B, B)
        averages = []
        for output in outputs:
            rows = len(output.features)
            averages.append(output.features.new_full((1, rows), 1 / rows))
        shares: Tensor = torch.block_diag(*averages)  # (domains, B): the share of each row in each domain's mean
        # As in CORAL, this is twice a variance, but in the space of the kernel. Taken around the mean domain, rounding
        # errors cancel if all domains are alike.
        shares = shares - shares.mean(0)
        return 2 * ((shares @ kernel) * shares).sum() / (len(outputs) - 1)


def _covariance(features: Tensor) -> Tensor:
    """Returns the unbiased covariance (D, D) of features (B, D); zero for a single row."""
    centered = features - features.mean(0)
    return centered.T @ centered / max(len(features) - 1, 1)


def _kernel(features: Tensor) -> Tensor:
    """Returns the kernel (B, B) of all pairs of rows."""
    # Distances are computed from differences: from products of features, small ones would be lost in rounding, which
    # matters at the largest gamma.
    distances = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist").square()
    kernels = [torch.exp(-gamma * distances) for gamma in GAMMAS]
    return torch.stack(kernels).sum(0)
