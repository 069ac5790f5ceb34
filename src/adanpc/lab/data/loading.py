"""Reading ahead with every core, and ending well."""

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
    """``chunks[n]``: images and labels of rows n * size … of a domain, in its order."""

    def __init__(self, domain: Domain, size: int) -> None:
        self.domain, self.rows = domain, torch.arange(len(domain)).split(size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.domain.take(self.rows[number]), self.domain.labels[self.rows[number]]


def chunks(domain: Domain, size: int, workers: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of a whole domain in its order, ``size`` rows at a time."""
    made = Chunks(domain, size)
    return ahead(made, range(len(made) if len(domain) else 0), [domain], workers)


def ahead(
    items: Dataset[T], order: Sequence[int], domains: Sequence[Domain], workers: int | None = None
) -> Iterator[T]:
    """``items[n]`` for each n of the order, read ahead by worker processes.

    Args:
        items: anything that can be indexed and pickled.
        order: which, and in which order.
        domains: what the items read from.
        workers: processes; by default one for each core if images are read from disk, none if they are in memory or if
            this process was given a single thread: then the other cores have work of their own.
    """
    if workers is None:
        idle = torch.get_num_threads() > 1 and not all(isinstance(domain.images, Tensor) for domain in domains)
        workers = cores() if idle else 0
    workers = min(workers, len(order))
    return iter(
        DataLoader(
            items,
            sampler=order,
            batch_size=None,
            num_workers=workers,
            worker_init_fn=_leave_interrupts,
            generator=torch.Generator(),  # without one, each loader would draw from the global generator
        )
    )


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _leave_interrupts(worker: int) -> None:
    """Leaves Ctrl-C to the main process, which ends its workers when it has saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
