"""Evaluation mode for as long as somebody needs it, in any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from torch import nn


@dataclass
class _Use:
    """A module that runs at this moment."""

    training: bool  # its mode before the first run began
    runs: int = 0


_LOCK = Lock()  # held while modes are switched, never while a model runs
_IN_USE: dict[int, _Use] = {}  # by id(module): modules need not be hashable


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Runs of the model inside are in evaluation mode; when the last of them ends, its modes are put back.

    Modules are counted one by one, so that models which share some of them may run at the same time.
    """
    modules = list(model.modules())
    with _LOCK:
        for module in modules:
            use = _IN_USE.setdefault(id(module), _Use(module.training))
            use.runs += 1
    try:
        with _LOCK:
            if any(module.training for module in modules):
                model.eval()
        yield
    finally:
        with _LOCK:
            _leave(model, modules)


def _leave(model: nn.Module, modules: list[nn.Module]) -> None:
    free = []
    for module in modules:
        use = _IN_USE[id(module)]
        use.runs -= 1
        if use.runs == 0:
            del _IN_USE[id(module)]
            free.append((module, use.training))
    if len(free) == len(modules):
        was_training = free[0][1]
        if model.training is not was_training:
            model.train(was_training)  # some modules do more than note their mode
    for module, training in free:  # parts may have had a mode of their own
        module.training = training
