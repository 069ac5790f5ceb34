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


class Arrival(NamedTuple):
    """The samples of one batch in order: the positions of their domains (B,), and their rows there (B,)."""

    domains: Tensor
    rows: Tensor


def fetch(domains: Sequence[Domain], arrival: Arrival) -> Tensor:
    """The images of a batch (B, C, H, W), transformed by their domains."""
    return _gathered(arrival, lambda position, rows: domains[position].take(rows))


def labels_of(domains: Sequence[Domain], arrival: Arrival) -> Tensor:
    """The labels of a batch (B,), to score answers by; no method sees them."""
    return _gathered(arrival, lambda position, rows: domains[position].labels[rows])


@dataclass(frozen=True, kw_only=True)
class Stream(ABC):
    """An order of arrival: a value, whose ``describe`` is recorded with every result.

    The order is a function of the seed, of the domains' names, sizes and sequence, and for some streams of their
    labels; never of the size of batches.

    Args:
        seed: of all that is drawn.
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
        order = self.order(domains)
        counts = [len(order)] if self.mixes else order[:, 0].unique_consecutive(return_counts=True)[1].tolist()
        parts = [part for part in order.split(counts) if len(part)]
        return (Arrival(*batch.unbind(1)) for part in parts for batch in part.split(size))

    def left_out(self, domains: Sequence[Domain]) -> tuple[int, ...]:
        """How many samples of each domain never arrive."""
        arrived = self.order(domains)[:, 0].bincount(minlength=len(domains)).tolist()
        return tuple(len(domain) - count for domain, count in zip(domains, arrived, strict=True))

    def describe(self) -> dict[str, Any]:
        """The stream as JSON, with its name in ``STREAMS`` under "stream" and its arguments beside it."""
        return {"stream": self.name, **asdict(self)}

    def _each(self, domains: Sequence[Domain], arrange: Callable[[Rows, Generator], Rows]) -> Tensor:
        """One domain after another, its rows arranged by means of its labels and a generator of its own."""
        parts = [torch.empty(0, 2, dtype=torch.int64)]
        for position, domain in enumerate(domains):
            rng = default_rng(seed_of("stream", self.seed, domain.name))
            rows = torch.from_numpy(arrange(domain.labels.cpu().numpy(), rng))
            parts.append(torch.stack([torch.full_like(rows, position), rows], dim=1))
        return torch.cat(parts)


def shuffled(labels: Rows, rng: Generator) -> Rows:
    """All rows in random order."""
    return rng.permutation(len(labels))


def _gathered(arrival: Arrival, ask: Callable[[int, Tensor], Tensor]) -> Tensor:
    """What each domain answers for its rows, asked once, in the order of arrival."""
    positions = arrival.domains.unique().tolist()
    places = [(arrival.domains == position).nonzero()[:, 0] for position in positions]
    answers = [ask(position, arrival.rows[place]) for position, place in zip(positions, places, strict=True)]
    shapes = {tuple(answer.shape[1:]) for answer in answers}
    if len(shapes) > 1:
        raise DataError(f"images of one batch differ in shape: {sorted(shapes)}; give the domains a common transform")
    return torch.cat(answers)[torch.cat(places).argsort()]
