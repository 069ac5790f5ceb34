"""Text that somebody else chose must not be able to control a terminal."""

from __future__ import annotations

import pytest

from adanpc.printable import on_one_line, spelled_out

EVIL = "a\x1b[31mb\x07\n c\u202e\udcff é [red]"


def test_characters_that_steer_a_terminal_are_spelled_out() -> None:
    assert spelled_out(EVIL) == r"a\x1b[31mb\x07\n c\u202e\udcff é [red]"


def test_or_become_spaces_on_one_line() -> None:
    assert on_one_line(EVIL) == "a [31mb c é [red]"


@pytest.mark.parametrize("text", ["", "plain", "très bien 猫"])
def test_printable_text_stays_as_it_is(text: str) -> None:
    assert spelled_out(text) == text
    assert on_one_line(text) == text
