"""Checks of what is read back from a folder of records, since anybody may have written there.

A check takes a value as read from JSON and says whether it can be used. Checks are composed: ``listed(number)`` checks
a list of numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import inf, isnan
from pathlib import Path
from typing import Any

from adanpc.errors import UnavailableError

Check = Callable[[Any], bool]
HUGE = 1e12  # no recorded number comes near it, and sums and powers of smaller numbers do not overflow
MOST_NEIGHBORS = 10_000  # a chart has a point for each, so a forged record could ask for too many


class RecordsError(UnavailableError):
    """A file in a folder of records is damaged, or is a link to somewhere else."""

    code = "bad-records"


def number(value: Any) -> bool:
    """Whether the value is a finite number of reasonable size."""
    if isinstance(value, bool):  # a bool is an int in Python, but not a number in JSON
        return False
    return isinstance(value, int | float) and -HUGE <= value <= HUGE


def measured(value: Any) -> bool:
    """Whether the value can come from a measurement: a number, NaN if there was nothing to measure, or infinity."""
    return isinstance(value, float) or number(value)


def score(value: Any) -> bool:
    """Whether settings can be selected by the value: a number, or NaN or None where it was not measured."""
    return value is None or number(value) or (isinstance(value, float) and isnan(value))


def count(value: Any) -> bool:
    """Whether the value is a whole number of at least 0."""
    return isinstance(value, int) and number(value) and value >= 0


def positive(value: Any) -> bool:
    """Whether the value is a number greater than 0."""
    return number(value) and value > 0


def text(value: Any) -> bool:
    """Whether the value is a string."""
    return isinstance(value, str)


def truth(value: Any) -> bool:
    """Whether the value is true or false."""
    return isinstance(value, bool)


def optional(check: Check) -> Check:
    """Accepts None, and whatever passes the check."""
    return lambda value: value is None or check(value)


def listed(check: Check, *, least: int = 0) -> Check:
    """Accepts a list of at least ``least`` values that all pass the check."""

    def passes(value: Any) -> bool:
        return isinstance(value, list) and len(value) >= least and all(check(each) for each in value)

    return passes


def named(check: Check) -> Check:
    """Accepts a mapping whose values all pass the check."""

    def passes(value: Any) -> bool:
        return isinstance(value, dict) and all(check(each) for each in value.values())

    return passes


def fields(**checks: Check) -> Check:
    """Accepts a mapping that has all these fields, each passing its check; other fields are ignored."""

    def passes(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        return all(name in value and check(value[name]) for name, check in checks.items())

    return passes


def where_present(**checks: Check) -> Check:
    """Accepts a mapping in which each of these fields passes its check, or is absent."""

    def passes(value: Any) -> bool:
        return all(check(value[name]) for name, check in checks.items() if name in value)

    return passes


def both(one: Check, other: Check) -> Check:
    """Accepts what passes two checks."""
    return lambda value: one(value) and other(value)


def read_checked(path: Path, check: Check, remedy: str) -> Any:
    """The contents of a JSON file, or None if there is no file; refuses contents that do not pass the check.

    Args:
        path: the file.
        check: what the contents must pass.
        remedy: what to do if the file is damaged; it ends the sentence of the error.
    """
    refuse_link(path)
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RecordsError(f"{path} is damaged ({error}): {remedy}") from None
    if not check(value):
        raise RecordsError(f"{path} is damaged (it is not what adanpc writes): {remedy}")
    return value


def refuse_link(path: Path) -> None:
    """Refuses a symbolic link, through which a write could end up anywhere."""
    if path.is_symlink():
        raise RecordsError(f"{path} is a symbolic link, which is not followed: remove it, or choose another `out`")


def anything(value: Any) -> bool:
    """Accepts every value."""
    return True


def _split(value: Any) -> bool:
    """Whether the value is the record of a split, with no more neighbors than there are rows."""
    rows = fields(k_s=count, k_u=count, n_s=count, n_u=count, joint=number, accuracy=fields(joint=score))
    constants = fields(
        dim=positive,
        source_overlap=positive,
        target_overlap=positive,
        density=lambda density: isinstance(density, float) and 0 < density < inf,  # may well be huge
        smoothness=number,
    )
    if not rows(value) or not fields(known=constants)(value):
        return False
    few = value["k_s"] + value["k_u"] <= MOST_NEIGHBORS
    return bool(few and value["k_s"] <= value["n_s"] and value["k_u"] <= value["n_u"])


ENTRY = fields(  # one line of the records
    id=text,
    kind=text,
    task=named(anything),
    record=named(anything),
    seconds=lambda value: number(value) and value >= 0,
    environment=fields(machine=text, commit=text, versions=named(text)),
)
DATA = named(count)  # data sets by name, each with its number of images
REFUSED = fields(error=text)  # the record of a task that could not be done

VOTES = ("source", "joint", "split", "half", "joint pseudo", "split pseudo", "half pseudo")
QUESTION = fields(
    row=count,
    label=count,
    probs=listed(number, least=1),
    neighbors=listed(fields(id=count, label=count, similarity=number)),
    removed=listed(count),
    after=optional(listed(number, least=1)),
)
DRAW = fields(
    sweep=text,
    shift=text,
    problem=named(number),
    k=count,
    n_s=count,
    n_u=count,
    queries=count,
    seed=count,
    excess=fields(**dict.fromkeys(VOTES, measured)),
    worst=measured,
    bound=fields(**dict.fromkeys(("2", "3", "3 half"), measured)),
    divergence=fields(
        mean=measured, within=measured, radius=measured, wasserstein=measured, error=measured, bound=measured
    ),
    pseudo_bias=optional(measured),
)

# The fields that tables read from the records of each kind of task.
RECORDS: Mapping[str, Check] = {
    "train": fields(evaluations=listed(named(anything))),
    "adapt": both(
        fields(
            average=number,
            domains=named(number),
            source=fields(before=score, after=named(score)),
            scores=fields(source=score, target=score, snd=score, diversity=score, agreement=score),
        ),
        where_present(
            worst_tenth=number,
            calibration_error=number,
            ood_auroc=optional(number),
            joined=optional(fields(rows=count, wrong=count)),
            frozen=optional(number),
            prototypes=truth,
        ),
    ),
    "intrude": both(
        fields(
            without=number,
            beside=number,
            changed=number,
            foreign=count,
            voters=optional(count),
            influential=optional(count),
            novelty=optional(fields(auroc=number, foreign=number, native=number)),
        ),
        where_present(decisive=optional(count)),
    ),
    "attack": fields(before=number, after=number, changed=number),
    "time": fields(methods=named(fields(ms=number, total_ms=number, mb=number))),
    "witness": fields(accuracy=number, queries=count, questions=listed(QUESTION)),
    "simulate": fields(draws=listed(both(DRAW, fields(problem=fields(dim=count, gap=number, overlap=number))))),
    "split": _split,
}


def usable(entry: Mapping[str, Any]) -> bool:
    """Whether a line of the records has every field that is read from it."""
    if not ENTRY(entry) or not DATA(entry.get("data", {})):
        return False
    record = entry["record"]
    if "error" in record:
        return REFUSED(record)
    check = RECORDS.get(entry["kind"], anything)
    return check(record)
