"""The processes that train one model together: this one alone, or all that torchrun started."""

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
    """The processes that train together, as seen from this one.

    Args:
        rank: the number of this process; process 0 evaluates, writes files and prints.
        world: the number of processes.
        device: where this process computes.
    """

    rank: int
    world: int
    device: torch.device

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the mean of each number over all processes."""
        if self.world == 1:
            return dict(values)
        total = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        means = (total / self.world).tolist()
        return dict(zip(values, means, strict=True))

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set in any process; all processes get the same answer at the same step."""
        return self.mean({"flag": float(flag)})["flag"] > 0

    def wait(self) -> None:
        """Returns when all processes have arrived here."""
        if self.world > 1:
            distributed.barrier()


SINGLE_PROCESS = ProcessGroup(rank=0, world=1, device=torch.device("cpu"))


@contextmanager
def process_group(device: str = "cpu") -> Iterator[ProcessGroup]:
    """Yields the group that this process belongs to, and leaves the group afterward.

    Args:
        device: a type of device; if several processes run on one machine, each uses its own accelerator.
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
    # DistributedDataParallel imports this module, which keeps a reference to the group that exists when it is first
    # imported. The threads of such a group keep running until Python exits, and a late one then aborts the process. So
    # import it before there is a group.
    import_module("torch._dynamo")
    distributed.init_process_group(distributed.get_default_backend_for_device(device))
    try:
        yield ProcessGroup(distributed.get_rank(), world, torch.device(device))
    finally:
        distributed.destroy_process_group()


def known_device(name: str) -> str:
    """Returns the name of a device, or raises an error if this machine has no such device."""
    try:
        torch.zeros(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an AssertionError if torch was built without this device
        reason = str(error).splitlines()[0]
        raise AdaNPCError(f"device {name!r} is not available here: use cpu ({reason})") from None
    return name
