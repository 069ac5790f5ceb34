"""Every registered training algorithm meets the shipped contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adanpc.lab.train.registry import ALGORITHMS
from adanpc.testing import ALGORITHM_CHECKS

# Settings with which a short toy problem reaches everything that an algorithm does.
SHORT: dict[str, dict[str, Any]] = {
    "knn": {"k": 3, "size": 20},
    "irm": {"anneal": 3, "weight": 2.0},
    "mmd": {"weight": 0.1},
    "vrex": {"anneal": 3},
    "fishr": {"anneal": 3},
    "dann": {"gradient_penalty": 0.1},
    "cdann": {"gradient_penalty": 0.1},
}


@pytest.mark.no_cover
@pytest.mark.parametrize("check", ALGORITHM_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_contract(name: str, check: Callable[..., None]) -> None:
    check(ALGORITHMS[name], **SHORT.get(name, {}))


@pytest.mark.parametrize("check", ALGORITHM_CHECKS, ids=lambda check: check.__name__)
def test_contract_of_the_em_mode(check: Callable[..., None]) -> None:
    check(ALGORITHMS["knn"], k=3, refresh=1)
