"""Source: labeled source rows whose features need not fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from adanpc.core.changes import Append
from adanpc.errors import FeatureError
from adanpc.index import check_features

AT_A_TIME = 1 << 23  # coordinates that are processed at once


class Source(NamedTuple):
    """Labeled source rows, of which only the features may be too many for memory."""

    pieces: Iterable[Tensor]  # the features (…, D) in order, some at a time; a new iteration begins again
    labels: Tensor  # (n,) int64
    domains: Tensor  # (n,) int64
    keys: Tensor  # (n,) int64

    def change(self, start: int, features: Tensor) -> Append:
        """The change that appends the rows from ``start`` on that have these features."""
        rows = slice(start, start + len(features))
        return Append(features, self.labels[rows], domain=self.domains[rows], keys=self.keys[rows])

    def changes(self, dim: int) -> Iterator[Append]:
        """The changes that append the rows (…, dim), one for each piece."""
        for start, features in self.checked(dim):
            yield self.change(start, features)

    def one_change(self, dim: int) -> Append:
        """The change that appends all rows (n, dim), for which there must be memory."""
        pieces = [features for _, features in self.checked(dim)]
        return self.change(0, torch.cat([*pieces, torch.zeros(0, dim, device=self.labels.device)]))

    def checked(self, dim: int) -> Iterator[tuple[int, Tensor]]:
        """The features (…, D) in order, checked, with the number of the first row; no piece is very large."""
        most = max(1, AT_A_TIME // dim)
        start = 0
        for piece in self.pieces:
            for some in check_features(piece, dim).split(most):
                yield start, some.to(self.labels.device)
                start += len(some)
            if start > len(self.labels):
                break
        if start != len(self.labels):
            raise FeatureError(f"the pieces hold {start} features or more, and there are {len(self.labels)} labels")
