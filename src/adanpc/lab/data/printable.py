"""Names from the disk, made safe to show."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with everything that a terminal would not print written out, such as ``\x1b`` for an escape.

    Names of folders and files come from whoever packed the data: shown as they are, they could color, clear or
    rewrite the terminal. Messages that quote a name with ``!r`` need no more than that.
    """
    characters = []
    for character in text:
        if character.isprintable():
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode("ascii"))
    return "".join(characters)
