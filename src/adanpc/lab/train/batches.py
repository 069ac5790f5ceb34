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
from adanpc.require import whole


class Steps(Dataset[tuple[Batch, ...]]):
    """``steps[n]``: the batches of step n, one from each domain, for ``data.loading.ahead``.

    Each domain is gone through epoch after epoch, each time in a new order. Several processes deal the rows of one
    large batch among themselves.

    Args:
        domains: the training splits, already with their transforms.
        size: rows from each domain, in each process.
        seed: decides the order, and what random transforms do.
        rank, world: the number of this process, and how many there are.
    """

    def __init__(self, domains: Sequence[Domain], size: int, seed: int, *, rank: int = 0, world: int = 1) -> None:
        whole("the batch size", size, least=1)
        self.domains = tuple(domains)
        self.size = size
        self.seed = seed
        self.rank = rank
        self.world = world
        self.first_keys: list[int] = []  # of each domain; keys number the rows of all domains, one after another
        total = 0
        for domain in domains:
            if not len(domain):
                raise AdaNPCError(f"domain {domain.name!r} has no training samples")
            self.first_keys.append(total)
            total += len(domain)

    def __getitem__(self, step: int) -> tuple[Batch, ...]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.seed, "transform", step, self.rank))
            return tuple(self._batch(position, step) for position in range(len(self.domains)))

    def _batch(self, position: int, step: int) -> Batch:
        domain = self.domains[position]
        rows = self.rows(position, step)
        return Batch(domain.take(rows), domain.labels[rows], self.first_keys[position] + rows)

    def rows(self, position: int, step: int) -> Tensor:
        """The rows (size,) that this process sees in a step, of the domain at this position."""
        count = len(self.domains[position])
        total = self.size * self.world
        places = torch.arange(step * total, (step + 1) * total)  # in the sequence of all epochs
        first_epoch = int(places[0]) // count
        last_epoch = int(places[-1]) // count
        orders = []
        for epoch in range(first_epoch, last_epoch + 1):
            orders.append(_order(count, seed_of(self.seed, position, epoch)))
        rows = torch.cat(orders)[places - first_epoch * count]
        return rows[self.rank :: self.world]


@lru_cache(maxsize=64)
def _order(count: int, seed: int) -> Tensor:
    """A random order of so many rows; cached, as all steps of an epoch share it."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
