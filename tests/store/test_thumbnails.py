"""Thumbnails are kept within bounds of size and age, and matter to nothing else."""

from __future__ import annotations

import random
import time
from contextlib import closing
from pathlib import Path

import pytest

from adanpc.errors import AdaNPCError
from adanpc.store.thumbnails import FILE, LARGEST, Thumbnails, _total


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
            assert _total(pictures._connection) <= 10 * LARGEST
        assert pictures.find(30) is None
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 40 * LARGEST


def test_they_are_bounded_in_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    with closing(Thumbnails(tmp_path, most_days=1)) as pictures:
        pictures.keep(1, b"one")
        monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
        assert pictures.find(1) is None
        pictures.keep(2, b"two")
        assert _total(pictures._connection) == 3  # the old one is gone, not only hidden
        monkeypatch.setattr(time, "time", lambda: now - 10**6)  # a clock that is set back hides nothing
        assert pictures.find(2) == b"two"


def test_a_picture_that_cannot_be_kept_is_lost_and_nothing_else(tmp_path: Path) -> None:
    with closing(Thumbnails(tmp_path)) as pictures:
        pictures.keep(1, b"one")
        (pages,) = pictures._connection.execute("PRAGMA page_count").fetchone()
        pictures._connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()  # as on a disk that is full
        pictures.keep(2, b"x" * LARGEST)
        assert pictures.find(2) is None
        assert pictures.find(1) == b"one"
        pictures._connection.execute("PRAGMA max_page_count = 100000").fetchall()
        pictures.keep(2, b"two")
        assert pictures.find(2) == b"two"


def test_a_file_that_is_damaged_while_it_is_in_use(tmp_path: Path) -> None:
    with closing(Thumbnails(tmp_path)) as pictures:
        for row in range(100):
            pictures.keep(row, bytes([row]) * 5000)
        pictures._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        pictures._connection.execute("PRAGMA cache_size = 0").fetchall()
        size = (tmp_path / FILE).stat().st_size
        (tmp_path / FILE).write_bytes(b"\xff" * size)
        pictures.keep(200, b"another")
        assert pictures.find(50) is None
        with pytest.raises(AdaNPCError, match=f"the pictures were not removed .*: delete .*{FILE}"):
            pictures.forget([50])


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdaNPCError, match="is a symbolic link, and is not followed"):
        Thumbnails(tmp_path)
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


def test_old_pictures_are_found_without_reading_all(tmp_path: Path) -> None:
    with closing(Thumbnails(tmp_path)) as pictures:
        for query in (
            "DELETE FROM picture WHERE kept < 5",
            "SELECT row, length(image) FROM picture ORDER BY kept, row",
        ):
            plan = pictures._connection.execute(f"EXPLAIN QUERY PLAN {query}").fetchall()
            assert "USING INDEX" in str(plan) or "COVERING INDEX" in str(plan), plan


def test_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with closing(Thumbnails(tmp_path)) as pictures:
        pictures.keep(1, b"one")
        assert pictures.find(1) == b"one"


def test_a_file_of_which_any_part_is_damaged_is_made_anew_or_read_in_part(tmp_path: Path) -> None:
    with closing(Thumbnails(tmp_path)) as pictures:
        for row in range(40):
            pictures.keep(row, bytes([row]) * 6000)
    whole = (tmp_path / FILE).read_bytes()
    chance = random.Random(0)
    for _ in range(60):
        altered = bytearray(whole)
        for _ in range(chance.randint(1, 400)):
            altered[chance.randrange(len(whole))] = chance.randrange(256)
        (tmp_path / FILE).write_bytes(altered)
        with closing(Thumbnails(tmp_path)) as pictures:
            for row in range(40):
                pictures.find(row)
            pictures.keep(100, b"another")


def test_a_link_in_place_of_a_file_of_sqlite_is_removed_and_its_target_kept(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious" * 1000)
    (tmp_path / f"{FILE}-shm").symlink_to(tmp_path / "elsewhere")
    with closing(Thumbnails(tmp_path)) as pictures:
        pictures.keep(1, b"one")
        assert pictures.find(1) == b"one"
    assert (tmp_path / "elsewhere").read_bytes() == b"precious" * 1000


def test_a_forgotten_picture_is_in_no_file(tmp_path: Path) -> None:
    secret = b"nobody may see this " * 200
    with closing(Thumbnails(tmp_path)) as pictures:
        pictures.keep(1, secret)
        pictures.keep(2, b"two")
        pictures.forget([1])
        for path in tmp_path.iterdir():  # while it is open, and so even if the process is killed now
            assert secret[:100] not in path.read_bytes()
        assert pictures.find(2) == b"two"
