"""Optional centering of features: what a shift of the whole domain adds to every feature is taken away again."""

from __future__ import annotations

import torch
from torch import Tensor

from adanpc.errors import AdaNPCError

MODES = ("none", "source", "stream")
BOUND = torch.finfo(torch.float32).max


class Centering:
    """Subtracts a mean before features are normalized; its tensors are part of the saved state.

    ``source``: the mean of the source features, from rows and queries alike. ``stream``: each source domain's own mean
    from its rows, and from a query the running mean of all queries up to and including it, which starts as the source
    mean with the weight of ``prior`` queries.
    """

    def __init__(self, dim: int, mode: str = "none", prior: int = 16, device: torch.device | str = "cpu") -> None:
        if mode not in MODES:
            raise AdaNPCError(f"centering must be one of {', '.join(MODES)}, got {mode!r}")
        if prior < 1:
            raise AdaNPCError(f"prior must be at least 1 query, got {prior}")
        self.mode, self.prior = mode, prior
        self.mean: Tensor | None = None  # (D,) float64, of the source
        self.total = torch.zeros(dim, dtype=torch.float64, device=device)  # of the stream
        self.count = 0

    def source(self, features: Tensor, domain: Tensor) -> tuple[Tensor, Tensor | None]:
        """Source features (n, D) centered, and the source mean: that of the first features."""
        if self.mode == "none" or not len(features):
            return features, self.mean
        mean = features.double().mean(0) if self.mean is None else self.mean
        means = mean.repeat(len(features), 1)
        if self.mode == "stream":
            for name in domain.unique():
                means[domain == name] = features[domain == name].double().mean(0)
        return _less(features, means), mean

    def queries(self, features: Tensor, *, sequence: bool) -> tuple[Tensor, tuple[Tensor, int] | None]:
        """Queries (B, D) centered, one after another or each as the next one, and the stream's sum and count then."""
        if self.mode == "none" or self.mean is None or not len(features):
            return features, None
        if self.mode == "source":
            return _less(features, self.mean), None
        means, total, count = [], self.total, self.count
        for feature in features.double():  # one by one, so that rounding does not depend on the batch
            means.append((total + feature + self.prior * self.mean) / (count + 1 + self.prior))
            if sequence:
                total, count = total + feature, count + 1
        return _less(features, torch.stack(means)), (total, count)


def _less(features: Tensor, means: Tensor) -> Tensor:
    """Features minus means; one that equals its mean keeps its own direction rather than none."""
    centered = (features - means).clamp(-BOUND, BOUND).float()
    return torch.where((centered == 0).all(1, keepdim=True), features, centered)
