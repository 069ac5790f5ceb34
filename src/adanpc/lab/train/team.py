"""The processes that train one model together: one, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed

from adanpc.errors import AdaNPCError


@dataclass(frozen=True)
class Team:
    """This process's place among all.

    Args:
        rank: 0 for the one that writes and speaks.
        world: how many there are.
        device: where this process computes.
    """

    rank: int
    world: int
    device: torch.device

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """The mean of each number over all processes."""
        if self.world == 1:
            return dict(values)
        summed = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        distributed.all_reduce(summed)
        return dict(zip(values, (summed / self.world).tolist(), strict=True))

    def any(self, flag: bool) -> bool:
        """Whether it is true in any process; all get the same answer at the same moment."""
        return self.mean({"flag": float(flag)})["flag"] > 0

    def wait(self) -> None:
        """Returns when all processes have come here."""
        if self.world > 1:
            distributed.barrier()


ALONE = Team(0, 1, torch.device("cpu"))


@contextmanager
def team(device: str = "cpu") -> Iterator[Team]:
    """The team of this process, for as long as it trains.

    Args:
        device: a type of device; of several processes on one machine each takes an accelerator of its own.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    known_device(device)
    if world == 1:
        yield Team(0, 1, torch.device(device))
        return
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = f"{device}:{os.environ['LOCAL_RANK']}"
    distributed.init_process_group(distributed.get_default_backend_for_device(device))
    try:
        yield Team(distributed.get_rank(), world, torch.device(device))
    finally:
        distributed.destroy_process_group()


def known_device(name: str) -> str:
    """The name of a device, refused if there is none such here."""
    try:
        torch.zeros(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise AdaNPCError(f"there is no device {name!r} here, take cpu ({str(error).splitlines()[0]})") from None
    return name
