"""Distributions of hyper-parameters."""

from __future__ import annotations

from dataclasses import replace
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
    with pytest.raises(AdaNPCError, match="there is no algorithm 'best'; there are: erm"):
        Spec("pacs", ("photo",), "best")
    bad: list[dict[str, Any]] = [{"steps": 0}, {"every": 0}, {"batch": -1}, {"seed": -1}, {"trial": -1}]
    for given in bad:
        with pytest.raises(AdaNPCError, match=f"{next(iter(given))} must be at least"):
            Spec("pacs", ("photo",), **given)
