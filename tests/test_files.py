"""Lines that are added, and locks that are held, by real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from adanpc.files import add_entry, entries, held

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
    start = time.monotonic()
    with held(path, wait=True) as free:
        assert free
    assert time.monotonic() - start < 30
