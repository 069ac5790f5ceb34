"""Lines that are added, and locks that are held, by real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from adanpc import files
from adanpc.files import add_entry, entries, held, replace

HOLD = "import sys, time; from pathlib import Path; from adanpc.files import held\n"
HOLD += "with held(Path(sys.argv[1]), wait=False): print('held', flush=True); time.sleep(60)"
LINES: SearchStrategy[list[dict[str, object]]] = st.lists(
    st.dictionaries(st.text(max_size=3), st.integers() | st.text())
)


@given(before=LINES, after=LINES, cut=st.integers(1, 5))
def test_what_was_added_is_read_back_and_a_line_cut_off_by_a_crash_hides_no_other(
    before: list[dict[str, object]], after: list[dict[str, object]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "lines"
    assert list(entries(path)) == []
    for entry in before:
        add_entry(path, entry)
    with path.open("ab") as file:
        file.write(b'{"torn": "\xff'[:-cut])
    for entry in after:
        add_entry(path, entry)
    assert list(entries(path)) == [*before, *after]


def test_a_lock_is_held_against_other_processes_until_they_are_killed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with held(path, wait=False) as free:
            assert not free
    finally:
        process.kill()
        process.communicate()
    with held(path, wait=True) as free:  # would wait for ever if the lock had outlived its process
        assert free


@pytest.mark.parametrize(
    "line",
    [b"[" * 100_000, b'{"a":' * 100_000, b"5", b"null", b'"text"', b"[{}]", b"", b"\xff\xfe", b"9" * 10_000, b"{}}"],
    ids=lambda line: str(line[:9]),
)
def test_lines_that_are_no_entries_are_passed_over(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "lines"
    add_entry(path, {"before": 1})
    with path.open("ab") as file:
        file.write(line + b"\n")
    add_entry(path, {"after": 2})
    assert list(entries(path)) == [{"before": 1}, {"after": 2}]


def test_what_goes_wrong_with_an_entry_is_not_swallowed(tmp_path: Path) -> None:
    add_entry(tmp_path / "lines", {"a": 1})
    reading = entries(tmp_path / "lines")
    assert isinstance(reading, Generator)
    assert next(reading) == {"a": 1}
    with pytest.raises(ValueError, match="of the caller's"):
        reading.throw(ValueError("of the caller's"))


def add(path: Path) -> None:
    add_entry(path, {"a": 1})


def hold(path: Path) -> None:
    with held(path, wait=True):
        pass


@pytest.mark.parametrize("nofollow", [True, False])
@pytest.mark.parametrize("write", [add, hold])
def test_a_link_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], nofollow: bool
) -> None:
    """Whoever plants a link where a line is added or a lock is made would have another file written to."""
    if not nofollow:
        monkeypatch.delattr(os, "O_NOFOLLOW")  # as on Windows
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(victim)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "made by nobody")
    for path in (link, dangling):
        with pytest.raises(OSError, match="is a symbolic link") as caught:
            write(path)
        assert str(caught.value) == f"{path} is a symbolic link, and is not followed: give the path of the file itself"
    assert victim.read_text() == "precious"
    assert not (tmp_path / "made by nobody").exists()


@pytest.mark.parametrize("nofollow", [True, False])
@pytest.mark.parametrize("write", [add, hold])
def test_links_to_folders_on_the_way_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], nofollow: bool
) -> None:
    if not nofollow:
        monkeypatch.delattr(os, "O_NOFOLLOW")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    write(tmp_path / "link" / "file")
    assert (tmp_path / "folder" / "file").is_file()


@pytest.mark.parametrize("write", [add, hold])
def test_where_nothing_can_be_opened(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with pytest.raises(IsADirectoryError):
        write(tmp_path)


def test_a_lock_file_keeps_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("precious")
    hold(tmp_path / "lock")
    assert (tmp_path / "lock").read_text() == "precious"


@pytest.mark.parametrize("write", [add, hold])
def test_new_files_have_the_permissions_of_the_umask(tmp_path: Path, write: Callable[[Path], None]) -> None:
    old = os.umask(0o027)
    try:
        write(tmp_path / "file")
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def write_new(path: Path) -> None:
    path.write_text("new")


def test_a_link_is_replaced_and_its_target_is_left_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(victim)
    old = os.umask(0o027)
    try:
        replace(link, write_new)
    finally:
        os.umask(old)
    assert not link.is_symlink()
    assert link.read_text() == "new"
    assert link.stat().st_mode & 0o777 == 0o640  # not those of a file that is not replaced
    assert victim.read_text() == "precious"


def test_hard_links_part(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.write_text("old")
    one.chmod(0o604)
    os.link(one, tmp_path / "two")
    replace(one, write_new)
    assert one.read_text() == "new"
    assert one.stat().st_mode & 0o777 == 0o604
    assert (tmp_path / "two").read_text() == "old"


def test_where_there_are_no_locks_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    with held(tmp_path / "lock", wait=False) as one, held(tmp_path / "lock", wait=False) as two:
        assert one
        assert two
