"""Text that somebody else chose, made safe to show: the name of a file must not be able to control a terminal."""

from __future__ import annotations


def spelled_out(text: str) -> str:
    r"""The text with characters that are not printable spelled out, such as ``\x1b`` for an escape.

    Whoever packs the data chooses the names of folders, files and classes. Printed as they are, they could color, clear
    or rewrite the terminal. Messages that quote a name with ``!r`` do not need this.
    """
    shown = []
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode("ascii")
        shown.append(character)
    return "".join(shown)


def on_one_line(text: str) -> str:
    """The text on one line: characters that are not printable become spaces, and several spaces become one."""
    shown = []
    for character in text:
        if not character.isprintable():
            character = " "
        shown.append(character)
    return " ".join("".join(shown).split())
