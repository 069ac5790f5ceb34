"""Distributions of hyper-parameters."""

from __future__ import annotations

import json
from dataclasses import replace
from inspect import Parameter, signature
from random import Random
from typing import Any

import pytest

from adanpc.errors import AdaNPCError
from adanpc.lab.train.registry import ALGORITHMS
from adanpc.lab.train.search import Choice, Power, Uniform, draw
from adanpc.lab.train.spec import Spec

MANY = 2000


def test_draws_stay_in_their_range_and_fill_it() -> None:
    random = Random(0)
    uniform = [Uniform(2, 4)(random) for _ in range(MANY)]
    assert 2 <= min(uniform) < 2.02
    assert 3.98 < max(uniform) <= 4
    power = [Power(-2, 1)(random) for _ in range(MANY)]
    assert 0.01 <= min(power) < 0.0105
    assert 9.5 < max(power) <= 10
    assert sum(value < 0.1 for value in power) == pytest.approx(MANY / 3, abs=100)  # uniform in the exponent
    assert {Power(3, 5.5, 2, whole=True)(random) for _ in range(MANY)} == set(range(8, 46))
    assert {Choice((1, "a"))(random) for _ in range(MANY)} == {1, "a"}


def test_each_name_is_drawn_by_itself() -> None:
    space = {"a": Uniform(0, 1), "b": Uniform(0, 1)}
    drawn = draw(space, 3)
    assert drawn["a"] != drawn["b"]
    assert draw({"b": Uniform(0, 1)}, 3) == {"b": drawn["b"]}
    assert draw(space, 4) != drawn
    assert draw(space, 3, 1) != drawn
    assert draw(space, 1, 3) != draw(space, 3, 1)
    assert draw(space, 0) == {}


def test_the_knn_learning_rate_of_a_trial_is_in_its_range() -> None:
    for trial in range(1, 30):
        spec = Spec("rotated-mnist", ("75",), "knn", trial=trial).complete()
        assert 10**-4.5 <= spec.hyper["lr"] <= 10**-2.5
        assert 8 <= spec.batch <= 512
        assert spec.hyper["k"] in (5, 10, 20, 50, 100, 150)


def test_every_seed_searches_anew_and_all_algorithms_alike() -> None:
    specs = [Spec("rotated-mnist", ("0",), name, seed=seed, trial=2) for name in ("erm", "coral") for seed in (0, 1)]
    rates = [spec.complete().hyper["lr"] for spec in specs]
    assert rates[0] == rates[2] != rates[1] == rates[3]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_completing_twice_changes_nothing_and_what_is_given_stays(algorithm: str) -> None:
    spec = Spec("pacs", ("photo",), algorithm, trial=5, batch=3, hyper={"lr": 0.5}, dropout=0.25)
    complete = spec.complete()
    assert complete.complete() == complete
    assert (complete.batch, complete.hyper["lr"], complete.dropout) == (3, 0.5, 0.25)
    assert set(ALGORITHMS[algorithm].space) <= set(complete.hyper)
    assert Spec.of(complete.document()) == complete


def default_values(algorithm: str) -> dict[str, Any]:
    """The settings of an algorithm and their defaults, read from the constructors."""
    values = {"lr": 1e-3, "weight_decay": 0.0}
    for name, parameter in signature(ALGORITHMS[algorithm].__init__).parameters.items():
        if parameter.default is not Parameter.empty:
            values[name] = parameter.default
    return values


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_complete_spec_holds_every_default_of_its_algorithm(algorithm: str) -> None:
    hyper = Spec("rotated-mnist", ("0",), algorithm).complete().hyper
    assert hyper == default_values(algorithm)
    assert json.loads(json.dumps(hyper)) == hyper


def test_defaults_and_spaces_are_the_published_ones() -> None:
    """As in domainbed/hparams_registry.py and datasets.py at b93c22a, and in the same file of AdaNPC at 29fe27a."""
    arm = {data: Spec(data, ("x",), "arm") for data in ("rotated-mnist", "pacs")}
    assert (arm["rotated-mnist"].complete().batch, arm["pacs"].complete().batch) == (64, 8)
    assert {replace(arm["pacs"], trial=trial).complete().batch for trial in range(1, 9)} == {8}
    assert len({replace(arm["rotated-mnist"], trial=trial).complete().batch for trial in range(1, 9)}) > 4
    assert [Spec(data, ("x",)).complete().every for data in ("rotated-mnist", "pacs", "domain-net")] == [100, 300, 1000]
    batches = [Spec("domain-net", ("x",), trial=trial).complete().batch for trial in range(1, 60)]
    assert 8 <= min(batches) <= 9
    assert 29 <= max(batches) < 32
    knn = Spec("pacs", ("x",), "knn").complete().hyper
    assert (knn["lr"], knn["k"], knn["size"]) == (1e-4, 150, 3500)
    drawn = [Spec("pacs", ("x",), "knn", trial=trial).complete().hyper for trial in range(1, 60)]
    assert {hyper["k"] for hyper in drawn} == {25, 50, 75, 100, 125, 150, 200, 500}
    assert {hyper["size"] for hyper in drawn} == {1000, 1500, 2000, 2500, 3500, 5000}
    for algorithm in ("dann", "cdann"):
        for data, low, high in (("rotated-mnist", -4.5, -2.5), ("pacs", -5, -3.5)):
            drawn = [Spec(data, ("x",), algorithm, trial=trial).complete().hyper for trial in range(1, 9)]
            assert all(10**low <= hyper["lr_d"] <= 10**high for hyper in drawn)
            assert all(hyper["lr_d"] != hyper["lr"] for hyper in drawn)
        assert Spec("pacs", ("x",), algorithm).complete().hyper["lr_d"] is None  # the same as lr


def test_defaults_follow_the_data() -> None:
    digits, photos = (Spec(name, ("x",)).complete() for name in ("rotated-mnist", "pacs"))
    assert (digits.encoder, digits.batch, digits.pretrained, digits.augment) == ("convnet", 64, False, False)
    assert (photos.encoder, photos.batch, photos.pretrained, photos.augment) == ("resnet-50", 32, True, True)
    assert Spec("pacs", ("photo",), encoder="resnet-18").complete().pretrained is False


@pytest.mark.parametrize(("algorithm", "usual"), [("irm", 500), ("vrex", 500), ("fishr", 1500)])
def test_a_penalty_begins_after_the_same_part_of_any_training(algorithm: str, usual: int) -> None:
    assert ALGORITHMS[algorithm].paced == ("anneal",)
    for steps in (5000, 500, 10):
        spec = Spec("rotated-mnist", ("0",), algorithm, steps=steps)
        assert spec.complete().hyper["anneal"] == usual * steps // 5000
        long, short = (replace(spec, steps=each, trial=4).complete().hyper["anneal"] for each in (5000, steps))
        assert short == pytest.approx(long * steps / 5000, abs=1)
        assert replace(spec, trial=4, hyper={"anneal": 7}).complete().hyper["anneal"] == 7


def test_bad_specs_are_refused_by_name() -> None:
    with pytest.raises(AdaNPCError, match="unknown algorithm 'best'; available: erm"):
        Spec("pacs", ("photo",), "best")
    bad: list[dict[str, Any]] = [{"steps": 0}, {"every": -1}, {"batch": -1}, {"seed": -1}, {"trial": -1}]
    for given in bad:
        with pytest.raises(AdaNPCError, match=f"{next(iter(given))} must be at least"):
            Spec("pacs", ("photo",), **given)
