"""Many requests reach the bank together, and every caller gets the answer to their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from services import filled, queries

import adanpc
from adanpc.errors import FeatureError, UnavailableError
from adanpc.serve import batcher
from adanpc.serve.batcher import AnsweredTogether, Batcher


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[adanpc.DurableBank]:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()) as opened:
        yield opened


def parts(answered: AnsweredTogether) -> list[Any]:
    return list(answered.parts)


async def asked(opened: Batcher, *batches: Any) -> list[Any]:
    """What each of these requests is answered, or its error."""
    return await asyncio.gather(*[opened.ask(features) for features in batches], return_exceptions=True)


def test_requests_of_one_moment_share_a_change(bank: adanpc.DurableBank) -> None:
    batches = [queries(count, seed) for seed, count in enumerate([1, 2, 1])]
    before = bank.position
    results = asyncio.run(asked(Batcher(bank, parts), *batches))
    assert bank.position == before + 1
    twin = filled()
    for features, part in zip(batches, results, strict=True):
        expected = twin.step(features)
        assert part.prediction.probs.tolist() == expected.probs.tolist()
        assert part.prediction.joined.tolist() == expected.joined.tolist()


def test_no_more_wait_for_each_other_than_are_answered_together(
    bank: adanpc.DurableBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher, "TOGETHER", 2)
    sizes = []
    submit_all = bank.submit_all

    def noted(features: Any, *others: Any) -> Any:
        sizes.append(len(features))
        return submit_all(features, *others)

    monkeypatch.setattr(bank, "submit_all", noted)

    async def in_turn() -> None:
        opened = Batcher(bank, parts)
        tasks = []
        for seed in range(4):
            tasks.append(asyncio.create_task(opened.ask(queries(1, seed))))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    asyncio.run(in_turn())
    assert sum(sizes) == 4
    assert max(sizes) < 4


def test_everyone_gets_their_own_error(bank: adanpc.DurableBank) -> None:
    good, bad, also_good = asyncio.run(
        asked(Batcher(bank, parts), queries(1), np.full((1, 4), np.nan, np.float32), queries(2))
    )
    assert isinstance(bad, FeatureError)
    assert (good.end - good.begin, also_good.end - also_good.begin) == (1, 2)
    assert isinstance(asyncio.run(asked(Batcher(bank, parts), np.zeros((1, 4), np.float32)))[0], FeatureError)


def test_an_answer_that_cannot_be_noted_is_an_error(bank: adanpc.DurableBank) -> None:
    def failing(answered: AnsweredTogether) -> Any:
        raise OSError("the disk is full")

    (result,) = asyncio.run(asked(Batcher(bank, failing), queries(1)))
    assert isinstance(result, OSError)


def test_a_bank_that_is_closed(tmp_path: Path) -> None:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()) as bank:
        pass
    (result,) = asyncio.run(asked(Batcher(bank, parts), queries(1)))
    assert isinstance(result, UnavailableError)


def test_who_no_longer_waits_disturbs_nobody(bank: adanpc.DurableBank) -> None:
    async def given_up() -> Any:
        opened = Batcher(bank, parts)
        tasks = [asyncio.create_task(opened.ask(queries(1, seed))) for seed in range(2)]
        bad = asyncio.create_task(opened.ask(np.zeros((1, 4), np.float32)))
        await asyncio.sleep(0)
        tasks[0].cancel()
        bad.cancel()
        return await tasks[1]

    assert asyncio.run(given_up()).begin == 1


def test_answers_that_come_when_the_loop_is_closed_are_dropped(bank: adanpc.DurableBank) -> None:
    async def asked_and_left() -> None:
        opened = Batcher(bank, parts)
        task = asyncio.create_task(opened.ask(queries(1)))
        while not opened._submitted:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(asked_and_left())
    bank.classify(torch.from_numpy(queries(1)))  # the bank goes on
