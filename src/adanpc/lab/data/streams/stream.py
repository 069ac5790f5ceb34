"""The interface of every stream: an order of arrival, cut into batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from torch import Tensor

from adanpc.lab.data.domain import DataError, Domain
from adanpc.lab.seeds import seed_of

Rows = NDArray[np.int64]
Labels = NDArray[np.int64]


class Arrival(NamedTuple):
    """The samples of one batch in order: the positions of their domains (B,), and their rows in them (B,)."""

    domains: Tensor
    rows: Tensor


def fetch(domains: Sequence[Domain], arrival: Arrival) -> Tensor:
    """Returns the images of a batch (B, C, H, W), transformed by their domains."""
    return _gather(arrival, lambda position, rows: domains[position].take(rows))


def labels_of(domains: Sequence[Domain], arrival: Arrival) -> Tensor:
    """Returns the labels of a batch (B,), which score the answers; no method sees them."""
    return _gather(arrival, lambda position, rows: domains[position].labels[rows])


@dataclass(frozen=True, kw_only=True)
class Stream(ABC):
    """An order of arrival, as a value; its ``describe`` is recorded with every result.

    The order depends on the seed, on the names, sizes and order of the domains, and in some streams on their labels. It
    never depends on the batch size.

    Args:
        seed: decides all random numbers.
    """

    name: ClassVar[str]  # the name in ``STREAMS``
    resets: ClassVar[bool] = False  # whether a method is reset before each domain
    mixes: ClassVar[bool] = False  # whether a batch may have samples of several domains

    seed: int = 0

    @abstractmethod
    def order(self, domains: Sequence[Domain]) -> Tensor:
        """Returns the samples in order (n, 2), int64: the position of the domain and the row in it; none twice."""

    def batches(self, domains: Sequence[Domain], size: int) -> Iterator[Arrival]:
        """Returns batches of ``size`` samples; unless the stream mixes, a batch also ends where the domain changes.

        The last batch before a change may be smaller; nothing is dropped.
        """
        if size < 1:
            raise DataError(f"size must be at least 1, got {size}")
        return self._cut(self.order(domains), size)

    def _cut(self, order: Tensor, size: int) -> Iterator[Arrival]:
        """Yields the batches of an order."""
        if len(order) == 0:
            return
        runs: Sequence[Tensor] = [order]
        if not self.mixes:
            _, lengths = order[:, 0].unique_consecutive(return_counts=True)
            runs = order.split(lengths.tolist())
        for run in runs:
            for batch in run.split(size):
                yield Arrival(domains=batch[:, 0], rows=batch[:, 1])

    def left_out(self, domains: Sequence[Domain]) -> tuple[int, ...]:
        """Returns how many samples of each domain never arrive."""
        positions = self.order(domains)[:, 0]
        arrived = positions.bincount(minlength=len(domains)).tolist()
        return tuple(len(domain) - count for domain, count in zip(domains, arrived, strict=True))

    def describe(self) -> dict[str, Any]:
        """Returns the stream as JSON: its name in ``STREAMS`` as "stream", and its arguments."""
        return {"stream": self.name, **asdict(self)}

    def _one_after_another(self, domains: Sequence[Domain], arrange: Callable[[Labels, Generator], Rows]) -> Tensor:
        """Returns an order of one domain after another, each with its rows in the order of ``arrange``.

        Args:
            domains: the domains in order.
            arrange: returns the rows of a domain in order of arrival, given its labels and a generator of its own.
        """
        parts = [torch.empty(0, 2, dtype=torch.int64)]
        for position, domain in enumerate(domains):
            # A generator for each domain, by name, so that the order in one does not depend on the others.
            rng = default_rng(seed_of("stream", self.seed, domain.name))
            rows = torch.from_numpy(arrange(domain.labels.cpu().numpy(), rng))
            positions = torch.full_like(rows, position)
            parts.append(torch.stack([positions, rows], dim=1))
        return torch.cat(parts)


def shuffled(labels: Labels, rng: Generator) -> Rows:
    """Returns all rows in random order."""
    return rng.permutation(len(labels))


def _gather(arrival: Arrival, read: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Returns what ``read`` returns for each sample, in the order of arrival.

    Args:
        arrival: the samples.
        read: returns the values of a domain, given by its position, at some rows; it is called once for each domain.
    """
    places = []  # for each domain, where its samples are in the batch
    values = []
    for position in arrival.domains.unique().tolist():
        place = (arrival.domains == position).nonzero()[:, 0]
        places.append(place)
        values.append(read(position, arrival.rows[place]))
    shapes = {tuple(value.shape[1:]) for value in values}
    if len(shapes) > 1:
        raise DataError(f"images of one batch differ in shape: {sorted(shapes)}; give the domains a common transform")
    return torch.cat(values)[torch.cat(places).argsort()]  # from the order of domains back to that of arrival
