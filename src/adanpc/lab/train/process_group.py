"""The processes that train one model together: one, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import distributed

from adanpc.errors import AdaNPCError


@dataclass(frozen=True)
class ProcessGroup:
    """This process's place among all that train together.

    Args:
        rank: this process's number; process 0 evaluates, writes files and prints.
        world: how many processes there are.
        device: where this process computes.
    """

    rank: int
    world: int
    device: torch.device

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """The mean of each number over all processes."""
        if self.world == 1:
            return dict(values)
        total = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        means = (total / self.world).tolist()
        return dict(zip(values, means, strict=True))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; all processes get the same answer at the same step."""
        return self.mean({"flag": float(flag)})["flag"] > 0

    def wait(self) -> None:
        """Returns when all processes have arrived here."""
        if self.world > 1:
            distributed.barrier()


SINGLE_PROCESS = ProcessGroup(rank=0, world=1, device=torch.device("cpu"))


@contextmanager
def process_group(device: str = "cpu") -> Iterator[ProcessGroup]:
    """The group that this process belongs to, for as long as it trains.

    Args:
        device: a type of device; of several processes on one machine each uses an accelerator of its own.
    """
    known_device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
    if world == 1:
        yield ProcessGroup(0, 1, torch.device(device))
        return
    if device != "cpu":
        local_rank = os.environ["LOCAL_RANK"]
        torch.accelerator.set_device_index(int(local_rank))
        device = f"{device}:{local_rank}"
    # DistributedDataParallel imports this module, which keeps whatever group there is when it is first imported. The
    # threads of a group that is kept run on until Python exits, and one that is late then aborts the process.
    import_module("torch._dynamo")
    distributed.init_process_group(distributed.get_default_backend_for_device(device))
    try:
        yield ProcessGroup(distributed.get_rank(), world, torch.device(device))
    finally:
        distributed.destroy_process_group()


def known_device(name: str) -> str:
    """The name of a device, or an error if this machine has no such device."""
    try:
        torch.zeros(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).splitlines()[0]
        raise AdaNPCError(f"device {name!r} is not available here: use cpu ({reason})") from None
    return name
