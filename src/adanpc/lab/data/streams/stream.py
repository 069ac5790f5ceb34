"""What every stream is: an order of arrival, cut into batches."""

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
    """The samples of one batch in order: the positions of their domains (B,), and their rows there (B,)."""

    domains: Tensor
    rows: Tensor


def fetch(domains: Sequence[Domain], arrival: Arrival) -> Tensor:
    """The images of a batch (B, C, H, W), transformed by their domains."""
    return _gather(arrival, lambda position, rows: domains[position].take(rows))


def labels_of(domains: Sequence[Domain], arrival: Arrival) -> Tensor:
    """The labels of a batch (B,), to score answers by; no method sees them."""
    return _gather(arrival, lambda position, rows: domains[position].labels[rows])


@dataclass(frozen=True, kw_only=True)
class Stream(ABC):
    """An order of arrival: a value, whose ``describe`` is recorded with every result.

    The order is a function of the seed, of the domains' names, sizes and sequence, and for some streams of their
    labels; never of the size of batches.

    Args:
        seed: of everything that is drawn.
    """

    name: ClassVar[str]  # as in ``STREAMS``
    resets: ClassVar[bool] = False  # whether a method starts afresh at each domain
    mixes: ClassVar[bool] = False  # whether a batch may hold samples of several domains

    seed: int = 0

    @abstractmethod
    def order(self, domains: Sequence[Domain]) -> Tensor:
        """The samples as they arrive (n, 2), int64: the position of the domain, and the row there; none twice."""

    def batches(self, domains: Sequence[Domain], size: int) -> Iterator[Arrival]:
        """The order, cut after every ``size`` samples, and wherever the domain changes unless the stream mixes.

        The last batch before a change may be smaller; nothing is dropped.
        """
        if size < 1:
            raise DataError(f"size must be at least 1, got {size}")
        return self._cut(self.order(domains), size)

    def _cut(self, order: Tensor, size: int) -> Iterator[Arrival]:
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
        """How many samples of each domain never arrive."""
        arrived = self.order(domains)[:, 0].bincount(minlength=len(domains)).tolist()
        return tuple(len(domain) - count for domain, count in zip(domains, arrived, strict=True))

    def describe(self) -> dict[str, Any]:
        """The stream as JSON, with its name in ``STREAMS`` under "stream" and its arguments beside it."""
        return {"stream": self.name, **asdict(self)}

    def _one_after_another(self, domains: Sequence[Domain], arrange: Callable[[Labels, Generator], Rows]) -> Tensor:
        """One domain after another, each with its rows as ``arrange`` puts them.

        Args:
            domains: in their sequence.
            arrange: the rows of a domain in the order of their arrival, given its labels and a generator of its own.
        """
        parts = [torch.empty(0, 2, dtype=torch.int64)]
        for position, domain in enumerate(domains):
            rng = default_rng(seed_of("stream", self.seed, domain.name))
            rows = torch.from_numpy(arrange(domain.labels.cpu().numpy(), rng))
            positions = torch.full_like(rows, position)
            parts.append(torch.stack([positions, rows], dim=1))
        return torch.cat(parts)


def shuffled(labels: Labels, rng: Generator) -> Rows:
    """All rows in random order."""
    return rng.permutation(len(labels))


def _gather(arrival: Arrival, read: Callable[[int, Tensor], Tensor]) -> Tensor:
    """What is read of each sample, in the order of arrival.

    Args:
        arrival: the samples.
        read: what a domain, given by its position, holds at some rows; called once for each domain.
    """
    places = []  # in the batch, of the samples of each domain
    values = []
    for position in arrival.domains.unique().tolist():
        place = (arrival.domains == position).nonzero()[:, 0]
        places.append(place)
        values.append(read(position, arrival.rows[place]))
    shapes = {tuple(value.shape[1:]) for value in values}
    if len(shapes) > 1:
        raise DataError(f"images of one batch differ in shape: {sorted(shapes)}; give the domains a common transform")
    return torch.cat(values)[torch.cat(places).argsort()]
