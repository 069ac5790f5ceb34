"""Products of all rows with some vectors, from which those with similar queries follow without reading the rows again.

The preset "safe" compares each query with all rows twice: as it came, and less the running mean of the stream. That
mean is itself a sum of queries, so the second query lies near the span of a few vectors: all queries as they came, the
mean before them, and the directions of class differences. A product is linear, so where a query is nearly a sum of
multiples of such vectors, its products are nearly that sum of theirs. Adding up some hundred products is faster than
multiplying rows of a thousand coordinates.

Nothing here decides a result: as after every scan, candidates are scored exactly. What is left of a query when the sum
is taken away is measured, so a query that is not near the span takes more time, but finds the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adanpc.index.batch import nearest_by, scanned
from adanpc.index.protocol import Found, Wanted
from adanpc.index.scan import input_rounding

if TYPE_CHECKING:
    from adanpc.index.exact import ExactIndex

# Added to the diagonal of the vectors' products with each other, so that weights stay small where vectors are nearly
# equal. At most about the root of it is left of a query that lies in the span.
RIDGE = 1e-10


class ExactProducts:
    """The products of the rows of an index with vectors (J, D), each of length at most one.

    Args:
        index: the index, which must have rows.
        vectors: float32 vectors, far fewer than their coordinates, or nothing is gained.
    """

    def __init__(self, index: ExactIndex, vectors: Tensor) -> None:
        self._index = index
        self._products, self._errors = scanned(index, vectors)
        self._given = vectors
        self._vectors = vectors.double()
        self._factor: Tensor | None = None  # (J, J), computed when it is needed

    def search(self, queries: Tensor, wanted: Sequence[Wanted], *, exclude: Tensor | None = None) -> list[Found]:
        """The results of a search for queries (B, D) near the span of the vectors; see ``Products.search``."""
        wanted = [(min(k, self._index.slots), group) for k, group in wanted]
        exclude = self._index.checked_exclude(exclude, len(queries))
        products, errors = self._products_with(queries)
        return nearest_by(self._index, queries, products, errors, wanted, exclude)

    def _products_with(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Products (tiles, B, 64) of all rows and queries (B, D), and their errors (B,), as a scan gives them."""
        count = len(queries)
        if torch.equal(queries, self._given[:count]):
            return self._products[:, :count], self._errors[:count]
        weights = self._weights(queries)
        left = queries.double() - weights.double() @ self._vectors
        tiles = len(self._products)
        with torch.autocast(queries.device.type, enabled=False):  # which would compute some products in bfloat16
            products = torch.bmm(weights.expand(tiles, *weights.shape), self._products)
        # No term is rounded more often than there are terms, and none is larger than its weight.
        rounding = 1.01 * (len(self._vectors) * 2.0**-24 + 2 * input_rounding())
        errors = weights.double().abs() @ (self._errors.double() + rounding) + 1.001 * left.norm(dim=1)
        return products, errors

    def _weights(self, queries: Tensor) -> Tensor:
        """Weights (B, J) float32 by which the vectors add up to about these queries (B, D)."""
        if self._factor is None:
            among = self._vectors @ self._vectors.T
            among.diagonal().add_(RIDGE)
            self._factor = torch.linalg.cholesky(among)
        return torch.cholesky_solve(self._vectors @ queries.double().T, self._factor).T.float()
