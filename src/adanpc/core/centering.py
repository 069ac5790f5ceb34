"""Optional centering: subtracts a mean from the features, and with it what a shift adds to all features of a domain."""

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
    """What a bank knows about source and stream in addition to its rows; never altered, only replaced.

    Sums of unit features are exact, because their coordinates lie on the grid. So they depend neither on how a stream
    was cut into batches nor on the machine.
    """

    source_mean: Tensor | None = None  # (D,) float64
    stream_total: Tensor | None = None  # (D,) float64, the sum of all queries
    stream_count: int = 0  # the number of all queries
    transform: Transform | None = None  # of the preset "safe", fitted to its first source rows
    stream: Tensor | None = None  # what that preset knows about the stream, packed; see ``guard.Stream``

    def after(self, change: Append) -> Statistics:
        """The statistics once the change has been applied; vectors are copied, since the caller may reuse its own."""
        changed = self
        if change.source_mean is not None:
            changed = replace(changed, source_mean=change.source_mean.clone())
        if change.observed is not None:
            total = change.observed.total.clone()
            if self.stream_total is not None:
                total = self.stream_total + total.to(self.stream_total.device)
            count = self.stream_count + change.observed.count
            changed = replace(changed, stream_total=total, stream_count=count)
        if change.transform is not None:
            changed = replace(changed, transform=change.transform)
        if change.stream is not None:
            changed = replace(changed, stream=change.stream.clone())
        return changed

    def to(self, device: torch.device) -> Statistics:
        """The same statistics in new tensors on a device."""
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
    """Subtracts a mean from features before they are normalized, stored and compared.

    Args:
        mode: which mean.

            * ``none``: no centering.
            * ``source``: the mean of the source features, for rows and queries.
            * ``stream``: for source rows, the mean of their own domain; for a query, the running mean of all queries
              up to and including it, which starts as the source mean.
        prior: how many queries the source mean counts for in the running mean.
        unit_features: whether features are normalized before means are taken, so that no single one, however long,
            can drag a mean away. False for banks from files of format 1.
    """

    mode: str = "none"
    prior: int = 16
    unit_features: bool = True

    def __post_init__(self) -> None:
        require.one_of("centering", self.mode, MODES)
        object.__setattr__(self, "prior", require.whole("prior", self.prior, least=1, most=2**53))

    def prepared(self, change: Append, features: Tensor, statistics: Statistics) -> Append:
        """The change with its features centered, as the bank is to store them.

        Args:
            change: an append whose features may have been centered before.
            features: (n, D) its features, checked.
            statistics: of the bank before the change.
        """
        if change.centered or self.mode == "none" or not len(features):
            return change
        if change.origin != Origin.SOURCE:
            # An expert's row is centered as if it were the next query, but enters no mean.
            centered, _ = self.queries(features, statistics, sequence=False)
            return replace(change, features=centered, centered=True)
        features = self._scaled(features)
        mean = statistics.source_mean
        if mean is None:
            mean = _mean(features)
        means = mean.repeat(len(features), 1)
        if self.mode == "stream":
            domains = torch.as_tensor(change.domain, device=features.device).expand(len(features))
            for domain in domains.unique():
                of_domain = domains == domain
                means[of_domain] = _mean(features[of_domain])
        return replace(change, features=_minus(features, means), centered=True, source_mean=mean)

    def queries(self, features: Tensor, statistics: Statistics, *, sequence: bool) -> tuple[Tensor, Observed | None]:
        """The queries (B, D) centered, and what they add to the stream's statistics; None if they add nothing.

        Args:
            features: (B, D) the queries, checked.
            statistics: of the bank before the first query.
            sequence: True if the queries come one after another, so that each enters the mean of those after it; False
                to center each of them as if it came next.
        """
        mean = statistics.source_mean
        if self.mode == "none" or mean is None or not len(features):
            return features, None
        features = self._scaled(features)
        if self.mode == "source":
            return _minus(features, mean), None
        total = statistics.stream_total
        if total is None:
            total = torch.zeros_like(mean)
        count = statistics.stream_count
        if sequence:
            # torch adds along this dimension one after another, so that rounding does not depend on the batch.
            totals = torch.cat([total[None], features.double()]).cumsum(0)[1:]  # (B, D)
            counts = torch.arange(count + 1, count + 1 + len(features), device=features.device)
        else:
            totals = total + features.double()
            counts = torch.full((len(features),), count + 1, device=features.device)
        means = (totals + self.prior * mean) / (counts[:, None] + self.prior)
        observed = Observed(totals[-1] - total, len(features))
        return _minus(features, means), observed

    def _scaled(self, features: Tensor) -> Tensor:
        if self.unit_features:
            return unit(features)
        return features


def _mean(features: Tensor) -> Tensor:
    """The mean (D,) of features (n, D) in float64; for unit features, the sum in it is exact."""
    return features.double().sum(0) / len(features)


def _minus(features: Tensor, means: Tensor) -> Tensor:
    """Features minus means, float32; a feature equal to its mean is left as it is, since zero has no direction."""
    centered = (features - means).clamp(-BOUND, BOUND).float()
    zero = (centered == 0).all(1, keepdim=True)  # (n, 1)
    return torch.where(zero, features, centered)
