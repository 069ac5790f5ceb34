"""Keeps a model in evaluation mode while any thread runs it, and restores its mode afterward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from torch import nn


@dataclass
class _Use:
    """How a module is being used at this moment."""

    training: bool  # its mode before the first of the runs began
    runs: int = 0  # how many runs are under way


_LOCK = Lock()  # held while modes are switched, never while a model runs
_IN_USE: dict[int, _Use] = {}  # by id(module), because modules need not be hashable


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside this context, the model is in evaluation mode; when the last thread leaves it, the mode is restored.

    Runs are counted for each module rather than each model, so that models that share modules may run at the same time.
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
    """Ends one run of a model, and restores the mode of every module that no other run is using."""
    finished: list[tuple[nn.Module, bool]] = []  # modules, each with the mode that it had
    for module in modules:
        use = _IN_USE[id(module)]
        use.runs -= 1
        if use.runs == 0:
            del _IN_USE[id(module)]
            finished.append((module, use.training))
    if len(finished) == len(modules):
        _, was_training = finished[0]  # modules() lists the model itself first
        if model.training is not was_training:
            model.train(was_training)  # train() may be overridden to do more than set the mode
    for module, training in finished:  # a part may have had another mode than the model
        module.training = training
