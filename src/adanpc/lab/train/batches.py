"""Which samples a step sees: a pure function of the seed and the step, so that any step can be made again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.data import Dataset

from adanpc.errors import AdaNPCError
from adanpc.lab.data.domain import Domain
from adanpc.lab.seeds import seed_of
from adanpc.lab.train.algorithm import Batch


class Steps(Dataset[tuple[Batch, ...]]):
    """``steps[n]``: the batches of step n, one from each domain, for ``data.loading.ahead``.

    Each domain is gone through in a new order again and again. Several processes deal the rows of one large batch
    among themselves.

    Args:
        domains: the training splits, already with their transforms.
        size: rows from each domain, in each process.
        seed: decides the order, and what random transforms do.
        rank, world: this process, and how many there are.
    """

    def __init__(self, domains: Sequence[Domain], size: int, seed: int, *, rank: int = 0, world: int = 1) -> None:
        if size < 1:
            raise AdaNPCError(f"the batch size must be at least 1, got {size}")
        for domain in domains:
            if not len(domain):
                raise AdaNPCError(f"domain {domain.name!r} has no training samples")
        self.domains, self.size, self.seed, self.rank, self.world = tuple(domains), size, seed, rank, world
        self.first = [sum(len(domain) for domain in domains[:position]) for position in range(len(domains))]

    def __getitem__(self, step: int) -> tuple[Batch, ...]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.seed, "transform", step, self.rank))
            return tuple(self._batch(position, step) for position in range(len(self.domains)))

    def _batch(self, position: int, step: int) -> Batch:
        domain = self.domains[position]
        rows = self.rows(position, step)
        return Batch(domain.take(rows), domain.labels[rows], self.first[position] + rows)

    def rows(self, position: int, step: int) -> Tensor:
        """The rows (size,) of one domain that this process sees in a step."""
        count, total = len(self.domains[position]), self.size * self.world
        places = torch.arange(step * total, (step + 1) * total)
        epochs = [_order(count, seed_of(self.seed, position, epoch)) for epoch in (places // count).unique().tolist()]
        return torch.cat(epochs)[places - int(places[0]) // count * count][self.rank :: self.world]


@lru_cache(maxsize=64)
def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
