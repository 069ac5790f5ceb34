"""Foreign queries and attacks on a small bank whose contents are known."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch
from torch import Tensor

from adanpc import core
from adanpc.core import MemoryBank, Neighbors, Origin, Prediction
from adanpc.lab.adapt import ADAPTERS
from adanpc.lab.adapt.bank import AdaNPC
from adanpc.lab.sweep.disturbance import ATTACKS, Watch, attacked, harmful, intrude, noise, without_class
from adanpc.lab.sweep.scene import Scene
from adanpc.testing.adapters import toy_images, toy_source


@pytest.fixture(scope="module")
def stream() -> tuple[Tensor, Tensor]:
    images, labels = toy_images(80, seed=5, shift=0.2)
    with torch.no_grad():
        return toy_source().model.features(images), labels


@pytest.fixture(scope="module")
def foreign() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        return toy_source().model.features(5 * torch.rand(12, 1, 8, 8, generator=generator))


def scene() -> Scene:
    return Scene(toy_source(), (), ())


def test_a_method_that_learns_nothing_is_not_changed_by_foreigners(
    stream: tuple[Tensor, Tensor], foreign: Tensor
) -> None:
    record = intrude(ADAPTERS["source"](toy_source()), *stream, foreign, seed=0)
    right = ADAPTERS["source"](toy_source()).step(stream[0]).argmax(1) == stream[1]
    assert record["without"] == record["beside"] == pytest.approx(100 * right.float().mean().item())
    assert record["changed"] == 0
    assert (record["foreign"], record["voters"], record["influential"], record["decisive"]) == (12, None, None, None)
    assert record["novelty"] is None


def test_foreign_rows_are_counted_and_so_are_those_that_vote(stream: tuple[Tensor, Tensor], foreign: Tensor) -> None:
    everyone = AdaNPC(toy_source(), min_confidence=0.0)
    record = intrude(everyone, *stream, foreign, seed=0)
    assert record["voters"] == 12
    assert 0 <= record["decisive"] <= record["influential"] <= 12
    same = AdaNPC(toy_source(), min_confidence=0.0)
    as_native = intrude(same, *stream, stream[0][:12], seed=0)  # copies of queries are near to queries
    assert as_native["voters"] == 12
    assert as_native["influential"] > 6
    nobody = AdaNPC(toy_source(), min_confidence=inf)
    record = intrude(nobody, *stream, foreign, seed=0)
    assert (record["voters"], record["influential"], record["changed"]) == (0, 0, 0.0)


def answer(ids: list[list[int]], weights: list[list[float]], joined: list[int]) -> Prediction:
    numbers = torch.tensor(ids)
    near = Neighbors(numbers, torch.zeros(numbers.shape), torch.zeros_like(numbers))
    return Prediction(torch.ones(len(ids), 1), torch.tensor(weights), near, torch.tensor(joined))


def test_a_foreign_row_has_a_part_only_if_its_weight_is_not_zero() -> None:
    watch = Watch()
    watch.see(answer([[0, 1], [0, 1]], [[0.5, 0.5], [0.5, 0.5]], [7, 8]), torch.tensor([True, True]))
    watch.see(answer([[7, 8], [8, 0]], [[0.0, 1.0], [1.0, 0.0]], [9, -1]), torch.tensor([False, True]))
    assert watch.voters == {7, 8}
    assert watch.influential == {8}


def test_a_foreign_row_decides_if_the_answer_would_have_been_another_without_it() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.2], [0.2, 1.0]])
    classifier = core.AdaNPC(MemoryBank(2, 2), k=1)
    classifier.learn(rows[:2], torch.tensor([0, 1]))
    classifier.learn(rows[2:], torch.tensor([1, 1]), origin=Origin.EXPERT)
    watch = Watch(voters={2, 3})
    watch.foresee(classifier, torch.tensor([[0.0, 1.0]]))
    assert watch.decisive == set()
    watch.foresee(classifier, torch.tensor([[1.0, 0.3], [0.3, 1.0], [1.0, -1.0]]))
    assert watch.decisive == {2}, "without row 3, the answer would be the same"
    assert classifier.position == 2


def test_novelty_is_compared_pair_by_pair() -> None:
    watch = Watch()
    watch.novelty.append(torch.tensor([0.99, 0.5, 0.5, 0.98, 0.1]))
    told = watch.separation(torch.tensor([True, False, True, False, False]))
    assert told is not None
    # 0.99 is above all three native values; 0.5 equals one, is below one, and is above one.
    assert told["auroc"] == pytest.approx(100 * (3 + 0.5 + 0 + 1) / 6)
    assert told["foreign"] == 50
    assert told["native"] == pytest.approx(100 / 3)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_frozen_vote_cannot_be_attacked(attack: str, stream: tuple[Tensor, Tensor]) -> None:
    record = attacked(ADAPTERS["knn"](toy_source()), scene(), *stream, attack, seed=0)
    assert record["before"] == record["after"]
    assert record["changed"] == 0


def test_probes_are_the_last_queries_and_are_asked_twice(stream: tuple[Tensor, Tensor]) -> None:
    features, labels = stream
    adapter = AdaNPC(toy_source(), min_confidence=0.0)
    record = attacked(adapter, scene(), features, labels, "between", seed=0)
    other = AdaNPC(toy_source(), min_confidence=0.0)
    answers = other.step(features)  # in one batch or in many
    before = answers[60:].argmax(1)
    assert record["before"] == pytest.approx(100 * (before == labels[60:]).float().mean().item())
    assert len(adapter.banks["bank"]) == 60 + 60 + ATTACKS["between"]


def test_what_an_attacker_sends(stream: tuple[Tensor, Tensor]) -> None:
    met = stream[0]
    answers = ADAPTERS["source"](toy_source()).step(met).argmax(1)
    sent = {attack: harmful(attack, met, answers, [4, 9], scene(), 0) for attack in ATTACKS}
    assert {attack: len(inputs) for attack, inputs in sent.items()} == dict(ATTACKS)
    assert (sent["repeated"] == met[4]).all()
    assert (harmful("repeated", met, answers, [], scene(), 0) == met[0]).all()
    mean = (met / met.norm(dim=1, keepdim=True)).mean(0)
    assert (sent["opposite"] @ mean < 0).all()
    assert len(sent["between"].unique(dim=0)) > 1
    assert torch.equal(sent["between"], harmful("between", met, answers, [], scene(), 0))
    assert not torch.equal(sent["between"], harmful("between", met, answers, [], scene(), 1))


def test_a_source_without_a_class() -> None:
    source = replace(toy_source(), domains=torch.arange(60))
    rest = without_class(source, 1)
    kept = [row for row in range(60) if int(source.labels[row]) != 1]
    assert rest.domains is not None
    assert rest.domains.tolist() == kept
    assert torch.equal(rest.features, source.features[kept])
    assert sorted(set(rest.labels.tolist())) == [0, 2]
    assert without_class(toy_source(), 1).domains is None


def test_noise_is_drawn_by_the_seed() -> None:
    assert torch.equal(noise(3, 0).take([0, 1, 2]), noise(3, 0).take([0, 1, 2]))
    assert not torch.equal(noise(3, 0).take([0]), noise(3, 1).take([0]))
    assert noise(3, 0).take([0]).shape == (1, 3, 64, 64)
