"""History: lists changes from the log, and undoes an expert's change."""

from __future__ import annotations

from itertools import islice
from typing import Any

from adanpc.core import Append, Change, Contents, Judgment, Relabel, Restore, Rollback, Veto
from adanpc.serve.errors import ConflictError, NotFoundError
from adanpc.store import DurableBank

MOST_READ = 5000  # log entries read for one response
SHOWN = 20  # ids shown for each entry
SAME_MATTER = {"veto": ("veto", "restore"), "restore": ("veto", "restore"), "relabel": ("relabel",)}


def log_documents(
    bank: DurableBank, before: int | None, limit: int, by_people: bool
) -> tuple[list[dict[str, Any]], int | None]:
    """Returns entries of the log, newest first, and the value of ``before`` for the next call, None at the start.

    Args:
        bank: the bank whose log is read.
        before: a position, to return only entries before it; None for the last entries.
        limit: the most entries to return.
        by_people: True to leave out queries that joined by themselves. A stream may have very many of them between two
            changes by people, so at most ``MOST_READ`` entries are read; fewer than ``limit`` entries may be returned
            even though there are more.
    """
    end = bank.position
    if before is not None:
        end = min(end, before - 1)
    contents = bank.contents
    lowest = max(bank.log.start, end - MOST_READ)
    documents: list[dict[str, Any]] = []
    while end > lowest and len(documents) < limit:
        start = max(lowest, end - limit)
        page = []  # of documents, not of changes, which may hold many features
        for position, change in enumerate(islice(bank.log.read(start), end - start), start + 1):
            if by_people and isinstance(change, Append) and not change.who:
                continue
            page.append(_entry(position, change, contents))
        documents += reversed(page)
        end = start
    shown = documents[:limit]
    if len(documents) > limit:
        end = shown[-1]["position"] - 1
    next_before = None
    if end > bank.log.start:
        next_before = end + 1
    return shown, next_before


def change_at(bank: DurableBank, position: int) -> Change:
    """Returns the change that led to a position."""
    if not bank.log.start < position <= bank.position:
        first = bank.log.start + 1
        raise NotFoundError(f"the log has no entry {position}: it has {first} … {bank.position}")
    return next(iter(bank.log.read(position - 1)))


def check_position(bank: DurableBank, position: int) -> None:
    """Raises a NotFoundError unless the bank can return to a position."""
    if not bank.log.start <= position <= bank.position:
        raise NotFoundError(f"there is no way back to position {position}: give {bank.log.start} to {bank.position}")


def undoing(change: Change, contents: Contents, *, who: str, why: str) -> Change:
    """Returns the change that undoes an expert's change, or raises a ConflictError.

    A change can be undone as long as it is the last word on each of its rows.
    """
    if not isinstance(change, Veto | Restore | Relabel):
        kind = type(change).__name__.lower()
        raise ConflictError(f"{kind} is no veto, restoration or correction: return to the position before it instead")
    old_labels = {}
    for row in change.ids:
        judgment = _last_word(row, change, contents)
        if judgment is None:
            raise ConflictError(f"row {row} was judged again since, or has left: nothing is taken back")
        old_labels[row] = judgment.label
    if isinstance(change, Veto):
        return Restore(change.ids, who, why)
    if isinstance(change, Restore):
        return Veto(change.ids, who, why)
    rows = tuple(old_labels)
    if len(set(old_labels.values())) == 1:
        return Relabel(rows, old_labels[rows[0]], who, why)
    return Relabel(rows, tuple(old_labels.values()), who, why)


def judgment_documents(row: int, contents: Contents) -> list[dict[str, Any]]:
    """Returns what people decided about a row, oldest first."""
    documents = []
    for judgment in contents.judgments.get(row, ()):
        document = judgment._asdict()
        documents.append({"kind": document.pop("verdict"), **document})
    return documents


def _entry(position: int, change: Change, contents: Contents) -> dict[str, Any]:
    document: dict[str, Any] = {
        "position": position,
        "kind": type(change).__name__.lower(),
        "rows": _row_count(change),
        "ids": list(getattr(change, "ids", ())[:SHOWN]),
        "who": change.who,
        "why": change.why,
        "when": change.when,
        "undoable": _is_undoable(change, contents),
    }
    for name in ("label", "frozen", "adapted", "to"):
        if hasattr(change, name):
            document[name] = getattr(change, name)
    if isinstance(change, Relabel) and not isinstance(change.label, int):
        document["label"] = list(change.label[:SHOWN])  # the labels of the ids that are shown
    if isinstance(change, Append):
        document["origin"] = change.origin.name.lower()
    return document


def _row_count(change: Change) -> int:
    if isinstance(change, Append):
        return len(change.features)
    if isinstance(change, Rollback):
        return len(change.removed) + len(change.rows["id"])
    return len(getattr(change, "ids", ()))


def _is_undoable(change: Change, contents: Contents) -> bool:
    if not isinstance(change, Veto | Restore | Relabel):
        return False
    return all(_last_word(row, change, contents) is not None for row in change.ids)


def _last_word(row: int, change: Veto | Restore | Relabel, contents: Contents) -> Judgment | None:
    """Returns the judgment that a change made about a row, or None if a later one concerns the same matter."""
    verdict = _verdict(change)
    matters = SAME_MATTER[verdict]
    judgments = [judgment for judgment in contents.judgments.get(row, ()) if judgment.verdict in matters]
    if not judgments:
        return None
    last = judgments[-1]
    if (last.verdict, last.who, last.why, last.when) != (verdict, change.who, change.why, change.when):
        return None
    return last


def _verdict(change: Veto | Restore | Relabel) -> str:
    return type(change).__name__.lower()
