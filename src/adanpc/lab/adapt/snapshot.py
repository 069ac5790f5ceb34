"""All that the steps of an adapter may change, as it was at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adanpc.core import Contents, MemoryBank


@dataclass(frozen=True)
class Snapshot:
    """Everything that a step of an adapter may change.

    Args:
        tensors: copies of the parameters and buffers that may change, by name.
        extras: what ``get_extra_state`` returned for each module that has one, by the name of the module.
        contents: the contents of each bank. They are values that no later change touches, so they are not copied.
    """

    tensors: dict[str, Tensor]
    extras: dict[str, Any]
    contents: dict[str, Contents]

    def __reduce__(self) -> tuple[Callable[..., Snapshot], tuple[Any, ...]]:
        # Contents share memory with their bank, in blocks that have room for more rows. A bank is pickled without that
        # room, so pickle banks instead of contents.
        banks = {}
        for name, contents in self.contents.items():
            banks[name] = MemoryBank.load(contents.state(), device=contents.index.device)
        return _with_banks, (self.tensors, self.extras, banks)


def _with_banks(tensors: dict[str, Tensor], extras: dict[str, Any], banks: Mapping[str, MemoryBank]) -> Snapshot:
    """Returns the snapshot that was pickled with these banks."""
    contents = {name: bank.contents for name, bank in banks.items()}
    return Snapshot(tensors, extras, contents)
