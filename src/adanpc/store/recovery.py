"""Recovering a classifier from a log: loading the newest valid snapshot and replaying the changes since."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from adanpc import require
from adanpc.core import AdaNPC
from adanpc.errors import AdaNPCError
from adanpc.store.check import BankFileError, NewerContentsError
from adanpc.store.log import Log, LogError


class Recovered(NamedTuple):
    """A classifier that was recovered from its log."""

    classifier: AdaNPC
    recipe: dict[str, str]  # how its features are made
    snapshot: int  # the position of the snapshot that it was loaded from
    notices: list[str]  # what is wrong with newer snapshots, one sentence each


def recovered(log: Log, position: int | None = None) -> Recovered:
    """Returns the classifier at a position of a log, by default the last one."""
    if position is None:
        position = log.position
    position = require.whole("position", position, least=log.start, most=log.position)
    found = _newest_valid(log, [snapshot for snapshot in log.snapshots() if snapshot <= position])
    for change in islice(log.read(found.snapshot), position - found.snapshot):
        try:
            found.classifier.apply(change)
        except AdaNPCError as error:
            where = found.classifier.position + 1
            raise LogError(f"the log's entry at position {where} does not fit its bank: {error}") from error
    return found


def _newest_valid(log: Log, positions: Sequence[int]) -> Recovered:
    """Returns the classifier of the first of these snapshots that can be read."""
    flaws: list[str] = []
    for position in positions:
        try:
            classifier, recipe = log.load(position)
        except (BankFileError, LogError) as error:
            if isinstance(error.__cause__, NewerContentsError):
                raise  # falling back to an older snapshot would hide that a newer adanpc wrote this one
            if position in log.snapshots():  # otherwise, the writing process has just removed it
                flaws.append(str(error))
            continue
        return Recovered(classifier, recipe, position, flaws)
    raise LogError(f"no snapshot can be read: {' '.join(flaws) or 'there is none'}")
