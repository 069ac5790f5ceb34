"""A bank as plain values, for state dicts; files are the business of ``store``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from adanpc.core import MemoryBank, Veto


def snapshot(bank: MemoryBank) -> dict[str, Any]:
    """All of a bank, in tensors, numbers and texts."""
    return {
        "config": bank.config(),
        "table": bank.table(),
        "next_id": bank.next_id,
        "vetoes": [[row, veto.who, veto.why] for row, veto in bank.vetoes.items()],
    }


def bank_of(state: Mapping[str, Any], device: torch.device | str) -> MemoryBank:
    """The bank that ``snapshot`` described."""
    bank = MemoryBank(**state["config"], device=device)
    vetoes = {row: Veto((row,), who, why) for row, who, why in state["vetoes"]}
    bank.fill(state["table"], state["next_id"], vetoes)
    return bank
