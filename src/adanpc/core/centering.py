"""Optional centering of features: what a shift of the whole domain adds to every feature is taken away again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adanpc import require
from adanpc.core.changes import Append, Observed
from adanpc.core.transform import Transform
from adanpc.core.types import Origin
from adanpc.index import unit

MODES = ("none", "source", "stream")
BOUND = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Statistics:
    """What is known of source and stream beside the rows; a value that changes replace.

    Sums of unit features are exact, since their coordinates lie on the grid, so they do not depend on how a stream was
    cut into batches, nor on the machine.
    """

    source_mean: Tensor | None = None  # (D,) float64
    stream_total: Tensor | None = None  # (D,) float64, the sum of all queries
    stream_count: int = 0
    transform: Transform | None = None  # of the preset "safe", fitted to its first source rows
    stream: Tensor | None = None  # what it knows of the stream, packed; see ``guard.Stream``

    def after(self, change: Append) -> Statistics:
        """The statistics once the change has been applied."""
        changed = self
        if change.source_mean is not None:
            changed = replace(changed, source_mean=change.source_mean.clone())  # the caller may use its own again
        if change.observed is not None:
            total = change.observed.total.clone()
            if self.stream_total is not None:
                total = self.stream_total + total.to(self.stream_total.device)
            changed = replace(changed, stream_total=total, stream_count=self.stream_count + change.observed.count)
        if change.transform is not None:
            changed = replace(changed, transform=change.transform)
        if change.stream is not None:
            changed = replace(changed, stream=change.stream.clone())
        return changed

    def to(self, device: torch.device) -> Statistics:
        """The same in tensors of its own on a device."""
        mean = self.source_mean
        if mean is not None:
            mean = mean.to(device, copy=True)
        total = self.stream_total
        if total is not None:
            total = total.to(device, copy=True)
        transform = self.transform
        if transform is not None:
            transform = transform.to(device)
        stream = self.stream
        if stream is not None:
            stream = stream.to(device, copy=True)
        return Statistics(mean, total, self.stream_count, transform, stream)


@dataclass(frozen=True)
class Centering:
    """Subtracts a mean before features are normalized for good.

    Args:
        mode: ``none``; ``source``: the mean of the source features, from rows and queries alike; ``stream``: each
            source domain's own mean from its rows, and from a query the running mean of all queries up to and
            including it, which starts as the source mean with the weight of ``prior`` queries.
        prior: see there.
        unit_features: features are normalized before means are taken, so that no single one, however long, can drag a
            mean away. Files of format 1 did without.
    """

    mode: str = "none"
    prior: int = 16
    unit_features: bool = True

    def __post_init__(self) -> None:
        require.one_of("centering", self.mode, MODES)
        object.__setattr__(self, "prior", require.whole("prior", self.prior, least=1, most=2**53))

    def prepared(self, change: Append, features: Tensor, statistics: Statistics) -> Append:
        """The change with its checked features (n, D) centered, as the bank is to store them."""
        if change.centered or self.mode == "none" or not len(features):
            return change
        if change.origin != Origin.SOURCE:
            # A single row of an expert's is centered as a query that came next, and counted in no mean.
            centered, _ = self.queries(features, statistics, sequence=False)
            return replace(change, features=centered, centered=True)
        features = self._scaled(features)
        mean = statistics.source_mean
        if mean is None:
            mean = _mean(features)
        means = mean.repeat(len(features), 1)
        if self.mode == "stream":
            domains = torch.as_tensor(change.domain, device=features.device).expand(len(features))
            for name in domains.unique():
                means[domains == name] = _mean(features[domains == name])
        return replace(change, features=_less(features, means), centered=True, source_mean=mean)

    def queries(self, features: Tensor, statistics: Statistics, *, sequence: bool) -> tuple[Tensor, Observed | None]:
        """Queries (B, D) centered, and what they add to the stream's statistics.

        Args:
            features: checked.
            statistics: before the first of them.
            sequence: the queries come one after another; if not, each is centered as if it came next.
        """
        mean = statistics.source_mean
        if self.mode == "none" or mean is None or not len(features):
            return features, None
        features = self._scaled(features)
        if self.mode == "source":
            return _less(features, mean), None
        total = statistics.stream_total
        if total is None:
            total = torch.zeros_like(mean)
        count = statistics.stream_count
        if sequence:
            # torch adds one after another along this dimension, so that rounding does not depend on the batch.
            totals = torch.cat([total[None], features.double()]).cumsum(0)[1:]  # (B, D)
            counts = torch.arange(count + 1, count + 1 + len(features), device=features.device)
        else:
            totals = total + features.double()
            counts = torch.full((len(features),), count + 1, device=features.device)
        means = (totals + self.prior * mean) / (counts[:, None] + self.prior)
        observed = Observed(totals[-1] - total, len(features))
        return _less(features, means), observed

    def _scaled(self, features: Tensor) -> Tensor:
        return unit(features) if self.unit_features else features


def _mean(features: Tensor) -> Tensor:
    """The mean (D,) of features (n, D); of unit features, the sum is exact."""
    return features.double().sum(0) / len(features)


def _less(features: Tensor, means: Tensor) -> Tensor:
    """Features minus means; one that equals its mean keeps its own direction rather than none."""
    centered = (features - means).clamp(-BOUND, BOUND).float()
    return torch.where((centered == 0).all(1, keepdim=True), features, centered)
