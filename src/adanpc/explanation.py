"""Explanation: the rows behind an answer, for a terminal, a notebook or a program."""

from __future__ import annotations

import base64
import html
import io
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from adanpc.printable import spelled_out

Files = Mapping[int, Any] | Sequence[Any]
HEADINGS = ("share", "class", "similarity", "origin", "row", "key", "file")
UNKNOWN = "–"
THUMBNAIL = 64  # length of a thumbnail's longer side, in pixels
MOST_SHOWN = 20  # how many rows a table shows; programs get all of them
CLASSES = 10  # how many classes the line of votes names
LEAST_SHARE = 0.0005  # smaller shares would be shown as 0.000, and are left out
MOST_BYTES = 64 << 20  # larger pictures get no thumbnail


@dataclass(frozen=True)
class Witness:
    """A row that voted."""

    row: int  # its id
    label: int
    name: str  # the name of its class
    share: float  # its share of the vote
    similarity: float
    origin: str  # source, admitted or expert; "this batch" before a proposal is applied; "left" if it is gone
    key: int | None
    vetoed: bool = False  # whether it has been vetoed since
    file: str | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The text under each of ``HEADINGS``."""
        origin = self.origin
        if self.vetoed:
            origin = f"{self.origin}, vetoed since"
        key = UNKNOWN
        if self.key is not None:
            key = str(self.key)
        file = self.file
        if file is None:
            file = UNKNOWN
        share = f"{self.share:.3f}"
        similarity = f"{self.similarity:.4f}"
        return (share, self.name, similarity, origin, str(self.row), key, file)


@dataclass(frozen=True)
class Explanation:
    """Why a query got its answer. It prints as a table; notebooks add thumbnails of the files that are known."""

    query: int  # its position in the batch
    answer: str  # the name of the predicted class
    confidence: float
    joined: int | None  # the id under which the query joined the bank; None if it did not
    votes: Mapping[str, float]  # the probability of each class that got any, the highest first
    witnesses: tuple[Witness, ...]  # the largest share first
    # With the preset "safe" only:
    trust: float | None = None  # how much of the answer is the adapted one
    frozen: str | None = None  # the name of the class that would have been answered without adapting

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
    def shown(self) -> list[Witness]:
        """The rows that a table shows."""
        return [witness for witness in self.witnesses[:MOST_SHOWN] if witness.share >= LEAST_SHARE]

    @property
    def summary(self) -> str:
        """The votes in one line, those of minor classes summed up, and how many rows the table leaves out."""
        named = sum(share >= LEAST_SHARE for share in self.votes.values())
        named = min(named, CLASSES)
        if len(self.votes) == named + 1:
            named += 1  # a name says more than "1 other"
        votes_of_class = list(self.votes.items())
        shares = [f"{name} {share:.3f}" for name, share in votes_of_class[:named]]
        others = [share for _, share in votes_of_class[named:]]
        if others:
            shares.append(f"{len(others)} others {sum(others):.3f}")
        votes = "Votes: " + ", ".join(shares)
        left_out = len(self.witnesses) - len(self.shown)
        if left_out == 0:
            return votes
        if left_out == 1:
            return f"… and 1 row with a smaller share. {votes}"
        return f"… and {left_out} rows with smaller shares. {votes}"

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [HEADINGS]
        for witness in self.shown:
            cells = [spelled_out(cell) for cell in witness.cells]
            lines.append(tuple(cells))
        columns = zip(*lines, strict=True)
        widths = [max(map(len, column)) for column in columns]
        table = []
        for line in lines:
            padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            table.append("  " + "  ".join(padded).rstrip())
        return "\n".join([spelled_out(self.title), *table, spelled_out(self.summary)])

    __repr__ = __str__

    def __rich__(self) -> Any:
        """The table for ``rich.print``."""
        text = import_module("rich.text").Text  # a Text shows brackets as they are, where a str would be markup
        title = text(spelled_out(self.title))
        caption = text(spelled_out(self.summary))
        table = import_module("rich.table").Table(*HEADINGS, title=title, caption=caption)
        for witness in self.shown:
            cells = [text(spelled_out(cell)) for cell in witness.cells]
            table.add_row(*cells)
        return table

    def _repr_html_(self) -> str:
        """The table for a notebook, with thumbnails of the files that can be shown."""
        lines = [_html_row("th", [*HEADINGS, ""])]
        for witness in self.shown:
            lines.append(_html_row("td", witness.cells, _thumbnail(witness.file)))
        title = html.escape(spelled_out(self.title))
        summary = html.escape(spelled_out(self.summary))
        return f"<p>{title}</p><table>{''.join(lines)}</table><p>{summary}</p>"


@require.names_its_arguments
def explain(answer: Prediction, bank: MemoryBank, query: int = 0, *, files: Files | None = None) -> Explanation:
    """The rows that voted on one query, with what the bank knows about them.

    Args:
        answer: an answer of ``predict``, ``propose`` or ``step``.
        bank: the bank that answered. Rows that have left it since then are shown with what the answer says of them.
        query: the position of the query in the batch.
        files: the file of each row by its key, such as a list of paths in the order of the data set.
    """
    if not isinstance(bank, MemoryBank):
        raise AdaNPCError(f"bank must be the MemoryBank that answered, such as classifier.bank, got {brief(bank)}")
    return explanation(answer, bank.contents, query, file_finder(files))


def explanation(
    answer: Prediction, contents: Contents, query: int, file_of: Callable[[Witness], Any | None]
) -> Explanation:
    """The result of ``explain``, given a function that returns the file of a row, or None if it is unknown."""
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
    names = contents.settings.names or tuple(str(label) for label in range(classes))
    probs = answer.probs[query].tolist()
    by_probability = sorted(range(classes), key=lambda label: -probs[label])
    votes = {names[label]: probs[label] for label in by_probability if probs[label] > 0}
    joined: int | None = int(answer.joined[query])
    if joined == -1:
        joined = None
    trust = None
    frozen = None
    if answer.trust is not None and answer.frozen is not None:
        trust = float(answer.trust[query])
        frozen = names[int(answer.frozen[query].argmax())]
    return Explanation(
        query=query,
        answer=names[int(answer.labels[query])],
        confidence=float(answer.confidence[query]),
        joined=joined,
        votes=votes,
        witnesses=tuple(_witnesses(answer, contents, query, names, file_of)),
        trust=trust,
        frozen=frozen,
    )


def file_finder(files: Files | None) -> Callable[[Witness], Any | None]:
    """A function that returns the file of a row, found by its key, or None if it is unknown."""
    if isinstance(files, str | os.PathLike):
        raise AdaNPCError(f"files must be a list of paths, or a mapping from keys to paths, got {brief(files)}")

    def file_of(witness: Witness) -> Any | None:
        if files is None or witness.key is None:
            return None
        if isinstance(files, Mapping):
            return files.get(witness.key)
        if witness.key >= len(files):
            return None
        return files[witness.key]

    return file_of


def _witnesses(
    answer: Prediction, contents: Contents, query: int, names: Sequence[str], file_of: Callable[[Witness], Any | None]
) -> list[Witness]:
    """The rows that voted on a query, the largest share first."""
    near = answer.neighbors
    voted = (near.ids[query] >= 0) & (answer.weights[query] != 0)  # a row may be found and yet not vote
    ids = near.ids[query][voted]
    labels = near.labels[query][voted].tolist()
    similarity = near.similarity[query][voted].tolist()
    shares = answer.weights[query][voted].tolist()
    table = contents.table("id", "origin", "key", "state")
    places = torch.searchsorted(table["id"], ids.to(table["id"].device)).tolist()
    held = table["id"].tolist()
    witnesses = []
    for number, row in enumerate(ids.tolist()):
        origin = "left"
        key = None
        vetoed = False
        place = places[number]
        if answer.provisional is not None and row >= answer.provisional:
            origin = "this batch"
        elif place < len(held) and held[place] == row:
            origin = Origin(int(table["origin"][place])).name.lower()
            vetoed = int(table["state"][place]) == VETOED
            if table["key"][place] >= 0:
                key = int(table["key"][place])
        label = labels[number]
        witness = Witness(row, label, names[label], shares[number], similarity[number], origin, key, vetoed)
        file = file_of(witness)
        if file is not None:
            witness = replace(witness, file=os.fspath(file))
        witnesses.append(witness)
    return sorted(witnesses, key=lambda witness: -witness.share)


def _html_row(tag: str, cells: Sequence[str], picture: str = "") -> str:
    """One row of an HTML table, with a picture given by its URL as the last cell."""
    shown = "".join(f"<{tag}>{html.escape(spelled_out(cell))}</{tag}>" for cell in cells)
    if picture:
        shown += f'<{tag}><img src="{picture}" alt=""></{tag}>'
    return f"<tr>{shown}</tr>"


def _thumbnail(file: str | None) -> str:
    """A small PNG of a picture as a data URL; empty if the file cannot be shown for any reason."""
    if file is None or not Path(file).is_file() or Path(file).stat().st_size > MOST_BYTES:
        return ""
    try:
        image_module = import_module("PIL.Image")
    except ModuleNotFoundError:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PIL warns of a picture with so many pixels that it may be an attack
            with image_module.open(file) as picture:
                picture.draft("RGB", (THUMBNAIL, THUMBNAIL))  # decodes a JPEG at a smaller size, which is faster
                small = picture.convert("RGB")
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        written = io.BytesIO()
        small.save(written, "PNG")
    except Exception:  # a damaged picture may raise nearly anything, and the table must be shown without it
        return ""
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
