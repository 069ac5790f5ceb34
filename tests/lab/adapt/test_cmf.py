"""CMF: its filter against numbers, and what it shares with ROID."""

from __future__ import annotations

import pytest
import torch
from sources import images, source

from adanpc.lab.adapt.cmf import CMF
from adanpc.lab.adapt.roid import ROID


def test_the_filter_is_that_of_plain_numbers() -> None:
    adapter = CMF(source("batch2d"))
    count = sum(scale.numel() for scale in adapter.trained)
    noise = 0.005 * count / 38_400
    hidden = model = start = float(adapter.trained[0].detach()[0])
    variance = 0.0
    for number in range(5):
        moved = model + 0.1 * (number + 1)  # as if a gradient had moved it
        with torch.no_grad():
            adapter.trained[0][0] = moved
        adapter.average_weights()
        hidden = 0.99 * hidden + 0.01 * start
        variance = 0.99**2 * variance + noise
        trust = max((1 - noise) / (variance + 1 - noise), 0.89)
        trust = 1.0 if trust >= 0.9999 else trust
        variance *= trust
        hidden = trust * hidden + (1 - trust) * moved
        model = 0.99 * moved + 0.01 * hidden
        assert float(adapter.trained[0].detach()[0]) == pytest.approx(model, rel=1e-5)
        assert adapter.variance == pytest.approx(variance)


def test_large_models_trust_what_was_trained() -> None:
    adapter = CMF(source("batch2d"))
    adapter.noise = 0.5
    before = adapter.hidden[0].clone()
    with torch.no_grad():
        adapter.trained[0].add_(1)
    adapter.average_weights()
    assert torch.allclose(adapter.hidden[0] - before, torch.tensor(0.11), atol=1e-5)  # at most 11 percent


def test_the_first_answer_is_that_of_roid() -> None:
    batch = images(16, seed=3)
    assert torch.equal(CMF(source("batch2d")).step(batch), ROID(source("batch2d")).step(batch))
