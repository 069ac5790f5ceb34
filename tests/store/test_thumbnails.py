"""Thumbnails are kept within bounds of size and age, and matter to nothing else."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from adanpc.errors import AdaNPCError
from adanpc.store.thumbnails import FILE, LARGEST, Thumbnails


def test_pictures_are_found_by_row_and_forgotten(tmp_path: Path) -> None:
    with closing(Thumbnails(tmp_path)) as pictures:
        pictures.keep(3, b"three")
        pictures.keep(4, b"four")
        pictures.keep(3, b"another")
        assert [pictures.find(row) for row in (3, 4, 5)] == [b"another", b"four", None]
        pictures.forget([3, 99])
        assert pictures.find(3) is None
    with closing(Thumbnails(tmp_path)) as pictures:
        assert pictures.find(4) == b"four"


def test_they_are_bounded_in_size(tmp_path: Path) -> None:
    with closing(Thumbnails(tmp_path, most_bytes=10 * LARGEST)) as pictures:
        with pytest.raises(AdaNPCError, match="a thumbnail has at most 65,536 bytes, got 65,537: make it smaller"):
            pictures.keep(0, b"x" * (LARGEST + 1))
        for row in range(50):
            pictures.keep(row, bytes([row]) * LARGEST)
            assert pictures.find(row) is not None
            assert pictures._total() <= 10 * LARGEST
        assert pictures.find(30) is None
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 40 * LARGEST


def test_they_are_bounded_in_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    with closing(Thumbnails(tmp_path, most_days=1)) as pictures:
        pictures.keep(1, b"one")
        monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
        assert pictures.find(1) is None
        pictures.keep(2, b"two")
        assert pictures._total() == 3  # the old one is gone, not only hidden
        monkeypatch.setattr(time, "time", lambda: now - 10**6)  # a clock that is set back hides nothing
        assert pictures.find(2) == b"two"


def test_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with closing(Thumbnails(tmp_path)) as pictures:
        pictures.keep(1, b"one")
        assert pictures.find(1) == b"one"
