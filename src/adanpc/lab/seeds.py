"""Seeds that are derived from the purpose of a random choice."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """A seed that depends on the parts alone, on every machine; other parts give an unrelated seed."""
    text = "\x1f".join(str(part) for part in parts)  # the unit separator, which keeps "a", "bc" apart from "ab", "c"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:7], "little")  # 56 bits: it fits into a signed 64-bit integer
