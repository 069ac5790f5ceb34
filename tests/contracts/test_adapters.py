"""Every registered test-time method meets the shipped contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adanpc.lab.adapt import ADAPTERS
from adanpc.testing import ADAPTER_CHECKS


@pytest.mark.parametrize("check", ADAPTER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ADAPTERS)
def test_contract(name: str, check: Callable[..., None]) -> None:
    check(ADAPTERS[name])
