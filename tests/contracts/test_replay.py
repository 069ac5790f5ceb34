"""Changes are the whole truth about a classifier, for everything that it can be set to."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
import torch

from adanpc.core import AdaNPC, Admission, MemoryBank, Veto, everyone, nobody
from adanpc.core.centering import MODES
from adanpc.core.eviction import POLICIES
from adanpc.core.vote import RULES
from adanpc.index import STORAGE, ProgressiveIndex, progressive, row_codes
from adanpc.testing import check_replay

ADMISSIONS = {
    "everyone": everyone,
    "nobody": nobody,
    "confident": Admission(min_confidence=0.6),
    "bounded": Admission(min_margin=0.1, max_entropy=1.5, class_quota=6, max_copies=2),
}
BANKS: list[dict[str, Any]] = [
    {"storage": storage, "soft": soft, "capacity": capacity, "evict": evict, "seed": 11}
    for storage, soft, (capacity, evict) in product(
        STORAGE, (False, True), [(None, "fifo"), *((5, policy) for policy in POLICIES)]
    )
]
SOFT_BANKS = [bank for bank in BANKS if bank["soft"]]
SAFE: list[dict[str, Any]] = [{}, {"stream": "mixed"}, {"guard": False, "balance": 1.0}]
# Every rule, centering and admission meets every other; banks take turns.
MODELS: list[dict[str, Any]] = [
    {"rule": rule, "centering": mode, "admission": admission, **pools}
    for (rule, mode, admission), pools in zip(
        product(RULES, MODES, ADMISSIONS), cycle([{"k": 7}, {"k_source": 4, "k_target": 3}]), strict=False
    )
]


@pytest.mark.no_cover
@pytest.mark.parametrize("number", range(len(MODELS)))
def test_every_setting_replays(number: int) -> None:
    bank = BANKS[number % len(BANKS)]
    settings = {**MODELS[number], "admission": ADMISSIONS[MODELS[number]["admission"]]}
    check_replay(lambda: AdaNPC(MemoryBank(5, 3, **bank), **settings), seed=number)


@pytest.mark.no_cover
@pytest.mark.parametrize("bank", BANKS, ids=lambda bank: "-".join(str(value) for value in bank.values()))
def test_every_bank_replays(bank: dict[str, Any]) -> None:
    check_replay(lambda: AdaNPC(MemoryBank(5, 3, **bank), k=6, centering="stream", admission=everyone))


@pytest.mark.no_cover
@pytest.mark.parametrize("number", range(len(SOFT_BANKS)))
def test_the_safe_preset_replays(number: int) -> None:
    bank = SOFT_BANKS[number]
    options = SAFE[number % len(SAFE)]
    check_replay(lambda: AdaNPC(MemoryBank(5, 3, **bank), preset="safe", **options))


@pytest.mark.no_cover
@pytest.mark.parametrize("number", range(0, len(MODELS), 7))
def test_a_bank_that_searches_by_codes_replays(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_codes, "ROWS_FOR_CODES", 16)
    monkeypatch.setattr(progressive, "ROWS_PER_WANTED", 1)
    monkeypatch.setattr(progressive, "LEAST_REREAD", 4)
    bank = {**BANKS[number % len(BANKS)], "storage": "progressive"}
    settings = {**MODELS[number], "admission": ADMISSIONS[MODELS[number]["admission"]]}
    made = []

    def make() -> AdaNPC:
        made.append(AdaNPC(MemoryBank(5, 3, **bank), **settings))
        return made[-1]

    check_replay(make, seed=number)
    index = made[0].bank.contents.index
    assert isinstance(index, ProgressiveIndex)
    assert index.coded


def test_the_check_sees_what_is_not_in_the_changes() -> None:
    class Forgetful(AdaNPC):
        """Changes its bank behind the back of whoever keeps the changes."""

        def propose(self, *args: Any, **options: Any) -> Any:
            answer = super().propose(*args, **options)
            if len(self.bank.vetoes) == 2:
                self.bank.apply(Veto((7,)))
            return answer

    with pytest.raises(AssertionError, match="position"):
        check_replay(lambda: Forgetful(MemoryBank(5, 3), k=6))


def test_a_mean_outside_of_the_changes_would_be_seen() -> None:
    made = AdaNPC(MemoryBank(2, 2), k=1, centering="source")
    made.learn(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    before = made.digest()
    mean = made.bank.contents.statistics.source_mean
    assert mean is not None
    mean += 0.25
    assert made.digest() != before
