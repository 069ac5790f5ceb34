"""Who voted for an answer: the rows behind it, for a terminal, a notebook or a program."""

from __future__ import annotations

import base64
import html
import io
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import torch

from adanpc import require
from adanpc.core import MemoryBank, Origin, Prediction
from adanpc.core.contents import Contents
from adanpc.core.table import VETOED
from adanpc.errors import AdaNPCError

Files = Mapping[int, Any] | Sequence[Any]
HEADINGS = ("share", "class", "similarity", "origin", "row", "key", "file")
UNKNOWN = "–"
THUMBNAIL = 64  # pixels, the longer side
SHOWN = 20  # rows in a table; a program gets all
MOST_BYTES = 64 << 20  # of a picture that is shown in small


@dataclass(frozen=True)
class Witness:
    """A row that voted."""

    row: int  # its id
    label: int
    name: str  # of its class
    share: float  # of the vote
    similarity: float
    origin: str  # source, admitted or expert; "this batch" before a proposal is applied; "left" if it is gone
    key: int | None
    vetoed: bool = False  # since it voted
    file: str | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """What is shown under each of ``HEADINGS``."""
        origin = f"{self.origin}, vetoed since" if self.vetoed else self.origin
        key = UNKNOWN if self.key is None else str(self.key)
        file = UNKNOWN if self.file is None else self.file
        share = f"{self.share:.3f}"
        similarity = f"{self.similarity:.4f}"
        return (share, self.name, similarity, origin, str(self.row), key, file)


@dataclass(frozen=True)
class Explanation:
    """Why a query got its answer. It prints as a table, and notebooks show it with the pictures that are known."""

    query: int  # its number in the batch
    answer: str  # the name of the predicted class
    confidence: float
    joined: int | None  # the id under which the query joined the bank
    votes: Mapping[str, float]  # the probability of each class that got any, the highest first
    witnesses: tuple[Witness, ...]  # the largest share first
    trust: float | None = None  # how much of the answer is the adapted one, with the preset "safe"
    frozen: str | None = None  # what would have been answered without adapting, likewise

    @property
    def title(self) -> str:
        """The answer in one sentence."""
        fate = "did not join the bank"
        if self.joined is not None:
            fate = f"joined the bank as row {self.joined}"
        adapted = ""
        if self.trust is not None:
            adapted = f", trust {self.trust:.2f} (without adapting: {self.frozen})"
        return f"Query {self.query}: {self.answer}, confidence {self.confidence:.3f}{adapted}; it {fate}."

    @property
    def summary(self) -> str:
        """The votes in one line, and how many rows a table leaves out."""
        votes = "Votes: " + ", ".join(f"{name} {share:.3f}" for name, share in self.votes.items())
        more = len(self.witnesses) - SHOWN
        if more <= 0:
            return votes
        return f"… and {more} rows with smaller shares. {votes}"

    def __str__(self) -> str:
        lines = [HEADINGS, *(witness.cells for witness in self.witnesses[:SHOWN])]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
        table = []
        for line in lines:
            cells = [_printable(cell).ljust(width) for cell, width in zip(line, widths, strict=True)]
            table.append("  " + "  ".join(cells).rstrip())
        return "\n".join([_printable(self.title), *table, _printable(self.summary)])

    __repr__ = __str__

    def __rich__(self) -> Any:
        """The table for ``rich.print``."""
        text = import_module("rich.text").Text
        table = import_module("rich.table").Table(
            *HEADINGS, title=text(_printable(self.title)), caption=text(_printable(self.summary))
        )
        for witness in self.witnesses[:SHOWN]:
            table.add_row(*(text(_printable(cell)) for cell in witness.cells))
        return table

    def _repr_html_(self) -> str:
        """The table for a notebook, with thumbnails of the files that can be shown."""
        lines = [_html_row("th", [*HEADINGS, ""])]
        for witness in self.witnesses[:SHOWN]:
            lines.append(_html_row("td", witness.cells, _thumbnail(witness.file)))
        title = html.escape(_printable(self.title))
        summary = html.escape(_printable(self.summary))
        return f"<p>{title}</p><table>{''.join(lines)}</table><p>{summary}</p>"


@require.names_its_arguments
def explain(answer: Prediction, bank: MemoryBank, query: int = 0, *, files: Files | None = None) -> Explanation:
    """The rows that voted for the answer to one query, with what the bank knows of them.

    Args:
        answer: of ``predict``, ``propose`` or ``step``.
        bank: that answered, as it is now: rows that have left since are shown without their history.
        query: which query of the batch.
        files: the file of each row by its key, such as a list of paths in the order of the data set.
    """
    if not isinstance(bank, MemoryBank):
        raise AdaNPCError(f"bank must be the MemoryBank that answered, such as classifier.bank, got {brief(bank)}")
    return explanation(answer, bank.contents, query, file_finder(files))


def explanation(
    answer: Prediction, contents: Contents, query: int, file_of: Callable[[Witness], Any | None]
) -> Explanation:
    """``explain``, with a function that knows the files of rows."""
    if not isinstance(answer, Prediction):
        raise AdaNPCError(f"answer must be a Prediction, as step and predict return it, got {brief(answer)}")
    count, classes = answer.probs.shape
    if classes != contents.settings.classes:
        raise AdaNPCError(
            f"the answer has {classes} classes and the bank {contents.settings.classes}: give the bank that answered"
        )
    if not count:
        raise AdaNPCError("the answer is empty: there is no query to explain")
    query = require.whole("query", query, least=0, most=count - 1)
    names = contents.settings.names or tuple(str(label) for label in range(contents.settings.classes))
    probs = answer.probs[query].tolist()
    votes = {}
    for label in sorted(range(len(probs)), key=lambda label: -probs[label]):
        if probs[label] > 0:
            votes[names[label]] = probs[label]
    joined = int(answer.joined[query])
    trust = None
    frozen = None
    if answer.trust is not None and answer.frozen is not None:
        trust = float(answer.trust[query])
        frozen = names[int(answer.frozen[query].argmax())]
    return Explanation(
        query=query,
        answer=names[int(answer.labels[query])],
        confidence=float(answer.confidence[query]),
        joined=None if joined < 0 else joined,
        votes=votes,
        witnesses=tuple(_witnesses(answer, contents, query, names, file_of)),
        trust=trust,
        frozen=frozen,
    )


def file_finder(files: Files | None) -> Callable[[Witness], Any | None]:
    """A function that finds the file of a row by its key."""
    if isinstance(files, str | os.PathLike):
        raise AdaNPCError(f"files must be a list of paths, or a mapping from keys to paths, got {brief(files)}")

    def file_of(witness: Witness) -> Any | None:
        if files is None or witness.key is None:
            return None
        if isinstance(files, Mapping):
            return files.get(witness.key)
        return files[witness.key] if witness.key < len(files) else None

    return file_of


def _witnesses(
    answer: Prediction, contents: Contents, query: int, names: Sequence[str], file_of: Callable[[Witness], Any | None]
) -> list[Witness]:
    near = answer.neighbors
    present = (near.ids[query] >= 0) & (answer.weights[query] != 0)  # others were found, and did not vote
    ids = near.ids[query][present]
    labels = near.labels[query][present].tolist()
    similarity = near.similarity[query][present].tolist()
    shares = answer.weights[query][present].tolist()
    table = contents.table("id", "origin", "key", "state")
    places = torch.searchsorted(table["id"], ids.to(table["id"].device)).tolist()
    held = table["id"].tolist()
    witnesses = []
    for number, row in enumerate(ids.tolist()):
        origin = "left"
        key = -1
        vetoed = False
        place = places[number]
        if answer.provisional is not None and row >= answer.provisional:
            origin = "this batch"
        elif place < len(held) and held[place] == row:
            origin = Origin(int(table["origin"][place])).name.lower()
            key = int(table["key"][place])
            vetoed = int(table["state"][place]) == VETOED
        label = labels[number]
        known = None if key < 0 else key
        witness = Witness(row, label, names[label], shares[number], similarity[number], origin, known, vetoed)
        witnesses.append(_with_file(witness, file_of(witness)))
    return sorted(witnesses, key=lambda witness: -witness.share)


def _with_file(witness: Witness, file: Any | None) -> Witness:
    if file is None:
        return witness
    return Witness(**{**vars(witness), "file": os.fspath(file)})


def _printable(text: str) -> str:
    """The text without characters that would steer a terminal: names of files and classes may contain any."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _html_row(tag: str, cells: Sequence[str], picture: str = "") -> str:
    shown = "".join(f"<{tag}>{html.escape(_printable(cell))}</{tag}>" for cell in cells)
    if picture:
        shown += f'<{tag}><img src="{picture}" alt=""></{tag}>'
    return f"<tr>{shown}</tr>"


def _thumbnail(file: str | None) -> str:
    """A small PNG of a picture as a data URL; empty if the file cannot be shown, for whatever reason."""
    if file is None or not Path(file).is_file() or Path(file).stat().st_size > MOST_BYTES:
        return ""
    try:
        image_module = import_module("PIL.Image")
    except ModuleNotFoundError:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a picture with more pixels than memory should hold
            with image_module.open(file) as picture:
                picture.draft("RGB", (THUMBNAIL, THUMBNAIL))
                small = picture.convert("RGB")
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        written = io.BytesIO()
        small.save(written, "PNG")
    except Exception:  # a damaged picture raises nearly anything, and its name is shown all the same
        return ""
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
