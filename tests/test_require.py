"""Checks of single values: what passes, and what the message says."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from adanpc import errors, require
from adanpc.errors import AdaNPCError


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        (lambda value: require.whole("k", value, least=1, most=9), np.int64(9), 9),
        (lambda value: require.number("quota", value), inf, inf),
        (lambda value: require.number("quota", value), np.float32(0.5), 0.5),
        (lambda value: require.positive("temperature", value), 1, 1.0),
        (lambda value: require.between("confidence", value, 0, 1), 1, 1.0),
        (lambda value: require.text("who", value), "Ada", "Ada"),
        (lambda value: require.one_of("rule", value, ("share", "paper")), "paper", "paper"),
    ],
)
def test_good_values_pass(check: Callable[[Any], Any], value: Any, expected: Any) -> None:
    checked = check(value)
    assert checked == expected
    assert type(checked) is type(expected)


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (lambda value: require.whole("k", value), 2.5, "k must be a whole number, got 2.5"),
        (lambda value: require.whole("k", value), True, "k must be a whole number, got True"),
        (lambda value: require.whole("k", value, least=1), 0, "k must be at least 1, got 0"),
        (lambda value: require.whole("k", value, most=9), 10, "k must be at most 9, got 10"),
        (lambda value: require.number("quota", value), nan, "quota must be a number, got nan"),
        (lambda value: require.number("quota", value), "1", "quota must be a number, got '1'"),
        (lambda value: require.positive("t", value), 0.0, "t must be a finite number greater than 0, got 0.0"),
        (lambda value: require.positive("t", value), inf, "t must be a finite number greater than 0, got inf"),
        (lambda value: require.between("c", value, 0, 1), 90, "c must be a number from 0 to 1, got 90"),
        (lambda value: require.between("c", value, 0, 1), nan, "c must be a number from 0 to 1, got nan"),
        (lambda value: require.text("who", value), None, "who must be a string, got None"),
        (
            lambda value: require.one_of("evict", value, ("fifo", "balanced")),
            "balance",
            "evict must be one of fifo, balanced, got 'balance'; did you mean 'balanced'?",
        ),
        (
            lambda value: require.one_of("evict", value, ("fifo", "balanced")),
            "FIFO",
            "evict must be one of fifo, balanced, got 'FIFO'; did you mean 'fifo'?",
        ),
        (lambda value: require.one_of("evict", value, ("fifo",)), 7, "evict must be one of fifo, got 7"),
    ],
)
def test_bad_values_are_named(check: Callable[[Any], Any], value: Any, message: str) -> None:
    with pytest.raises(AdaNPCError) as caught:
        check(value)
    assert str(caught.value) == message


def test_every_error_class_has_a_code_of_its_own() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, AdaNPCError)]
    codes = [made.code for made in classes]
    assert len(set(codes)) == len(classes)


def test_an_unknown_name_is_answered_by_the_one_that_was_meant_and_by_some_of_the_others() -> None:
    few = ("tent", "shot", "eta")
    many = [f"method-{number}" for number in range(30)]
    assert require.unknown("method", "tnet", few) == (
        "unknown method 'tnet'; did you mean 'tent'? Available: tent, shot, eta"
    )
    assert require.unknown("method", "magic", few, also="module:Class") == (
        "unknown method 'magic'; available: tent, shot, eta, or module:Class"
    )
    assert require.unknown("method", "x", many).endswith("available: " + ", ".join(many[:8]) + " and 22 more")


def test_a_number_is_not_a_misspelling_of_another() -> None:
    assert require.did_you_mean("90", ("0", "15", "75")) == ""
    assert require.did_you_mean("domain-9", ("domain-0", "domain-15")) == "; did you mean 'domain-0'?"
