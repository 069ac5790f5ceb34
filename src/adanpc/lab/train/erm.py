"""Empirical risk minimization: what all the others are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from adanpc.lab.train.algorithm import Algorithm, Batch, losses


class ERM(Algorithm):
    """The mean cross-entropy over domains.

    Paper: Vapnik, Statistical Learning Theory, 1998.
    """

    erm: ClassVar[Mapping[str, Any] | None] = {}

    def loss(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of the domains."""
        return losses(self.model, batches).mean(), {}
