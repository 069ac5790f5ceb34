"""Makes names from a disk safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Returns the text with characters that are not printable written out, such as ``\x1b`` for an escape.

    Whoever packs the data chooses the names of folders and files. Printed as they are, they could color, clear or
    rewrite the terminal. Messages that quote a name with ``!r`` do not need this.
    """
    characters = []
    for character in text:
        if character.isprintable():
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode("ascii"))
    return "".join(characters)
