"""The samples of each step: a pure function of the seed and the step, so that any step can be repeated."""

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
    """The batches of every step: ``steps[n]`` has those of step n, one from each domain; for ``data.loading.ahead``.

    Each domain is traversed epoch after epoch, each time in a new order. Several processes divide the rows of one
    large batch among themselves.

    Args:
        domains: the training splits, with their transforms.
        size: the number of rows from each domain in each process.
        seed: decides the order, and what random transforms do.
        rank: the number of this process.
        world: the number of processes.
    """

    def __init__(self, domains: Sequence[Domain], size: int, seed: int, *, rank: int = 0, world: int = 1) -> None:
        whole("the batch size", size, least=1)
        self.domains = tuple(domains)
        self.size = size
        self.seed = seed
        self.rank = rank
        self.world = world
        # Keys number the rows of all domains, one domain after another. This is the first key of each.
        self.first_keys: list[int] = []
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
        """Returns this process's batch of a step, from the domain at this position."""
        domain = self.domains[position]
        rows = self.rows(position, step)
        return Batch(domain.take(rows), domain.labels[rows], self.first_keys[position] + rows)

    def rows(self, position: int, step: int) -> Tensor:
        """Returns the row numbers (size,) of this process in a step, from the domain at this position."""
        count = len(self.domains[position])
        total = self.size * self.world
        # The rows of all epochs form one endless sequence, of which every step takes the next ``total``.
        places = torch.arange(step * total, (step + 1) * total)
        first_epoch = int(places[0]) // count
        last_epoch = int(places[-1]) // count
        orders = []
        for epoch in range(first_epoch, last_epoch + 1):
            orders.append(_order(count, seed_of(self.seed, position, epoch)))
        rows = torch.cat(orders)[places - first_epoch * count]
        return rows[self.rank :: self.world]


@lru_cache(maxsize=64)
def _order(count: int, seed: int) -> Tensor:
    """Returns a random order of ``count`` rows; cached, since all steps of an epoch share it."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
