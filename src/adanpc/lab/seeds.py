"""Seeds: from what a random choice is for to a number."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """A seed that is a function of the parts alone, the same on every machine; other parts give an unrelated one."""
    return int.from_bytes(hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()[:7], "little")
