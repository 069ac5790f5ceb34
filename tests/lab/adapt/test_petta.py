"""PeTTA: its divergence, its losses, and the contract while it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sources import images, source

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.petta import PeTTA
from adanpc.testing import check_adapter


@pytest.mark.no_cover
def test_contract_while_it_learns() -> None:
    check_adapter(PeTTA, every=4, capacity=8)


def test_divergence_is_that_of_loops_and_means_follow() -> None:
    start = source("batch2d")
    adapter = PeTTA(start)
    with torch.no_grad():
        answers = start.model.head(start.features).argmax(1)
    label = int(answers.mode().values)
    rows = start.features[answers == label].double()
    assert adapter._drift_of([(start.features[:0], answers[:0])]) == 0.0
    features = start.features[answers == label][:2] + 1
    given = [(features, torch.full((2,), label))]
    assert adapter._drift_of(given) == 0.0  # means move after they are compared
    total = 0.0
    for place in range(rows.shape[1]):
        mean = float(rows[:, place].mean())
        now = 0.95 * mean + 0.05 * float(features[:, place].double().mean())
        total += (now - mean) ** 2 / (float(rows[:, place].var()) + 1e-6)
    expected = 1 - torch.exp(torch.tensor(-total / rows.shape[1]))
    assert adapter._drift_of(given) == pytest.approx(float(expected), rel=1e-4)


def test_a_drifted_teacher_stands_still() -> None:
    adapter = PeTTA(source("batch2d"), every=8, momentum=0.5)
    adapter.means += 1e3
    before = [parameter.clone() for parameter in adapter.teacher.parameters()]
    adapter.step(images(8, seed=1))
    after = list(adapter.teacher.parameters())
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(before, after, strict=True))
    assert any(not torch.equal(one, other) for one, other in zip(before, adapter.model.parameters(), strict=True))


def test_weights_that_did_not_turn_have_cosines_of_1() -> None:
    adapter = PeTTA(source("batch2d"))
    assert float(adapter._negative_cosine().detach()) == pytest.approx(-1)


def test_a_source_without_variances_is_refused() -> None:
    start = source("batch2d")
    few = replace(start, features=start.features[:1], labels=start.labels[:1])
    with pytest.raises(AdaNPCError, match="no class has two of them: use RoTTA"):
        PeTTA(few)
