"""Admission: each rule by hand, and composition."""

from __future__ import annotations

import math

import pytest
import torch

from adanpc.core import Admission, Neighbors, Prediction, everyone, nobody
from adanpc.errors import AdaNPCError

NEAR = Neighbors(torch.zeros(4, 1).long(), torch.zeros(4, 1), torch.zeros(4, 1).long())
PROBS = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 1.0]])
ANSWER = Prediction(PROBS, torch.ones(4, 1), NEAR, torch.full((4,), -1))
NONE_HELD = torch.zeros(4, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("admission", "expected"),
    [
        (everyone, [True, True, True, True]),
        (nobody, [False, False, False, False]),
        (Admission(min_confidence=0.9), [True, False, False, True]),
        (Admission(min_margin=0.19), [True, False, True, True]),
        (Admission(max_entropy=math.log(2)), [True, True, False, True]),
        (Admission(min_confidence=0.5) & Admission(max_entropy=0.4), [True, False, False, True]),
        (Admission(min_confidence=0.95) & Admission(min_confidence=0.2), [False, False, False, True]),
        (Admission(min_confidence=math.inf), [False, False, False, False]),
    ],
)
def test_rules(admission: Admission, expected: list[bool]) -> None:
    assert admission(ANSWER, NONE_HELD).tolist() == expected


def test_quota_looks_at_the_rows_held_at_each_turn() -> None:
    held = torch.tensor([[2, 0, 0], [1, 9, 9], [9, 9, 1], [0, 0, 2]])
    assert Admission(class_quota=2)(ANSWER, held).tolist() == [False, True, True, False]


def test_and_takes_the_stricter_of_each() -> None:
    both = Admission(0.5, 0.3, 1.0, 10) & Admission(0.7, 0.1, 2.0, 5)
    assert both == Admission(0.7, 0.3, 1.0, 5)
    assert everyone & both == both


def test_a_nan_is_refused() -> None:
    with pytest.raises(AdaNPCError, match="min_margin must be a number, got nan"):
        Admission(min_margin=math.nan)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"min_confidence": 90}, "min_confidence must be a probability from 0 to 1, got 90; for 90 % give 0.9"),
        ({"min_margin": -0.5}, "min_margin must be a probability from 0 to 1, got -0.5$"),
        ({"min_confidence": 1000}, "min_confidence must be a probability from 0 to 1, got 1000$"),
        ({"max_entropy": -1}, "max_entropy must be at least 0, got -1"),
        ({"class_quota": -1}, "class_quota must be at least 0, got -1"),
        ({"class_quota": 2.5}, "class_quota must be a whole number, since rows are counted, got 2.5"),
        ({"max_copies": 0.5}, "max_copies must be a whole number, since rows are counted, got 0.5"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(setting: dict[str, float], message: str) -> None:
    with pytest.raises(AdaNPCError, match=message):
        Admission(**setting)


def test_margin_and_entropy_of_an_answer() -> None:
    assert ANSWER.margin.tolist() == pytest.approx([0.8, 0.0, 0.2, 1.0])
    expected = [-sum(p * math.log(p) for p in row if p > 0) for row in PROBS.tolist()]
    assert ANSWER.entropy.tolist() == pytest.approx(expected, abs=1e-6)
    alone = Prediction(torch.ones(2, 1), torch.ones(2, 1), NEAR, torch.full((2,), -1))
    assert alone.margin.tolist() == [1.0, 1.0]
