"""Empirical risk minimization, the baseline for all other algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from adanpc.lab.train.algorithm import Algorithm, Batch, losses


class ERM(Algorithm):
    """Minimizes the mean cross-entropy over domains.

    Paper: Vapnik, Statistical Learning Theory, 1998.
    """

    erm: ClassVar[Mapping[str, Any] | None] = {}

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of the domains."""
        return losses(self.model, batches).mean(), {}
