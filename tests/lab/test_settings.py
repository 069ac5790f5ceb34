"""Settings that are typed by users: names and types."""

from __future__ import annotations

from typing import Any

import pytest

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt import ADAPTERS
from adanpc.lab.settings import check_settings
from adanpc.lab.train import ALGORITHMS
from adanpc.lab.train.algorithm import Algorithm
from adanpc.lab.train.spec import GIVEN


class Taker:
    def __init__(
        self, given: object, *, k: int, lr: float, soft: bool, rule: str, keep: int | None, free: object
    ) -> None:
        pass


GOOD = [("k", 3), ("lr", 1), ("lr", 0.5), ("soft", True), ("rule", "x"), ("keep", None), ("keep", 2), ("free", [1])]
BAD = [
    ("k", "abc", "a whole number"),
    ("k", 2.5, "a whole number"),
    ("k", True, "a whole number"),
    ("k", None, "a whole number"),
    ("lr", "abc", "a number"),
    ("lr", False, "a number"),
    ("soft", 1, "true or false"),
    ("rule", 1, "a string"),
    ("rule", True, "a string"),
    ("keep", 0.5, "a whole number or null"),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_a_value_of_the_annotated_type_is_accepted(name: str, value: Any) -> None:
    check_settings("it", [Taker], {name: value}, ("self", "given"))


@pytest.mark.parametrize(("name", "value", "words"), BAD)
def test_any_other_value_is_refused_in_words(name: str, value: Any, words: str) -> None:
    with pytest.raises(AdaNPCError, match=f"{name} of it must be {words}, got {value!r}"):
        check_settings("it", [Taker], {name: value}, ("self", "given"))


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(AdaNPCError, match="it has no setting 'given'; it has: k, lr, soft, rule, keep, free$"):
        check_settings("it", [Taker], {"given": 1}, ("self", "given"))
    with pytest.raises(AdaNPCError, match="it has no setting 'sotf'; it has: .*, free; did you mean 'soft'?"):
        check_settings("it", [Taker], {"sotf": True}, ("self", "given"))


def test_annotations_that_cannot_be_resolved_allow_every_value() -> None:
    class Unresolved:
        def __init__(self, *, k: Unknown) -> None:  # type: ignore[name-defined]  # noqa: F821
            pass

    check_settings("it", [Unresolved], {"k": "anything"}, ())
    with pytest.raises(AdaNPCError, match="it has no setting 'l'; it has: k"):
        check_settings("it", [Unresolved], {"l": 1}, ())


@pytest.mark.parametrize("kind", ADAPTERS.values())
def test_every_method_takes_its_own_grid(kind: Any) -> None:
    for name, values in kind.grid.items():
        for value in values:
            check_settings("it", [kind], {name: value}, ("source",))


@pytest.mark.parametrize("kind", ALGORITHMS.values())
def test_every_algorithm_refuses_a_string_for_its_learning_rate(kind: type) -> None:
    check_settings("it", [kind, Algorithm], {"lr": 1e-3}, GIVEN)
    with pytest.raises(AdaNPCError, match="lr of it must be a number, got 'abc'"):
        check_settings("it", [kind, Algorithm], {"lr": "abc"}, GIVEN)
