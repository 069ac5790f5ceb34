"""Every test that ``docs/promises.md`` names exists, so that no promise loses its proof unnoticed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_promise_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "promises.md").read_text()
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)\(", written))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 50
    assert named <= defined
    for place in re.findall(r"`(tests/[\w/.]+)`", page):
        assert (ROOT / place).exists(), place
