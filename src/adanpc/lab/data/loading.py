"""Reads data ahead on every core, and stops cleanly on Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from adanpc.lab.data.domain import Domain

T = TypeVar("T")


class Chunks(Dataset[tuple[Tensor, Tensor]]):
    """A domain in parts: ``chunks[n]`` has the images and labels of ``size`` rows from row n * size on."""

    def __init__(self, domain: Domain, size: int) -> None:
        self.domain = domain
        self.rows = torch.arange(len(domain)).split(size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        rows = self.rows[number]
        return self.domain.take(rows), self.domain.labels[rows]


def chunks(domain: Domain, size: int, workers: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Returns the images and labels of a whole domain in order, ``size`` rows at a time."""
    items = Chunks(domain, size)
    count = len(items) if len(domain) else 0  # torch splits a tensor without rows into one empty part
    return ahead(items, range(count), [domain], workers)


def ahead(
    items: Dataset[T], order: Sequence[int], domains: Sequence[Domain], workers: int | None = None
) -> Iterator[T]:
    """Returns ``items[n]`` for each n in ``order``, read ahead by worker processes.

    Args:
        items: anything that can be indexed and pickled.
        order: the numbers of the items.
        domains: the domains that the items are read from.
        workers: the number of processes; by default one for each core if images are read from disk, and none if they
            are in memory or this process is limited to a single thread.
    """
    if workers is None:
        workers = _default_workers(domains)
    loader = DataLoader(
        items,
        sampler=order,
        batch_size=None,  # an item is a whole batch already
        num_workers=min(workers, len(order)),
        worker_init_fn=_ignore_interrupts,
        generator=torch.Generator(),  # without one, each loader draws a seed from the global generator
    )
    return iter(loader)


def _default_workers(domains: Sequence[Domain]) -> int:
    """Returns one process for each core if images are read from disk, and none if all are in memory.

    A process that is limited to a single thread gets none, either: the other cores then have work of their own.
    """
    in_memory = all(isinstance(domain.images, Tensor) for domain in domains)
    if in_memory or torch.get_num_threads() == 1:
        return 0
    return cores()


def cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on every platform
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ignore_interrupts(worker: int) -> None:
    """Leaves Ctrl-C to the main process, which stops its workers after saving."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
