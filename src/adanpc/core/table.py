"""Checks of rows and statistics that come from outside: from a file, or from a change that was read from a log.

A ``check_…`` function returns nothing, and raises a TableError that says what is wrong. Its messages say "its …" for
what belongs to the file or change that is being read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from reprlib import repr as brief

import torch
from torch import Tensor

from adanpc.core.changes import Judgment
from adanpc.core.estimate import MOST_CAPITAL, PACKED
from adanpc.core.guard import NUMBER_COUNT, PackedNumbers, packed_length
from adanpc.core.transform import LONGEST, SAMPLE, Transform
from adanpc.core.types import Origin
from adanpc.core.vote import PER_CLASS
from adanpc.errors import AdaNPCError
from adanpc.index.grid import GRID, INT8, Columns, decode

ACTIVE, VETOED = 1, 2  # the states of a row
DECIDING = ("id", "label", "origin", "state")  # the columns that decide which rows vote and which are evicted
CHUNK = 1 << 18  # coordinates that are checked at once: few enough to stay in the cache
LENGTH = 0.01  # how far from one a row's length may be; int8 rounds by less than 0.002 at D = 8192


class TableError(AdaNPCError):
    """Raised for rows that no bank could hold, or that could not be searched exactly."""

    code = "bad-table"


def pairs(table: Columns) -> list[tuple[int, int]]:
    """The id and label of each row."""
    ids = table["id"].tolist()
    labels = table["label"].tolist()
    return list(zip(ids, labels, strict=True))


def check_kinds(table: Mapping[str, Tensor], like: Columns) -> None:
    """Checks that the columns have the names, types and shapes of ``like``, and one value for each id.

    Args:
        table: the columns to check.
        like: the table of the bank that is to hold the rows; it may be empty.
    """
    if table.keys() != like.keys():
        raise TableError(f"the columns must be {', '.join(like)}, got {', '.join(table)}")
    ids = table["id"]
    count = len(ids) if ids.ndim else 0
    for name, wanted in like.items():
        column = table[name]
        shape = (count, *wanted.shape[1:])
        if column.dtype == wanted.dtype and column.shape == shape:
            continue
        expected = f"{wanted.dtype} of shape {shape}"
        given = f"{column.dtype} of shape {tuple(column.shape)}"
        raise TableError(f"the column {name!r} must be {expected}, got {given}")


def check_rows(table: Mapping[str, Tensor], classes: int, next_id: int) -> None:
    """Checks the values of a table that has passed ``check_kinds``.

    Args:
        table: the columns to check.
        classes: the number of classes of the bank.
        next_id: the first id that the bank has not given yet.
    """
    ids = table["id"]
    _check_ids(ids, next_id)
    for bad, defect in _bad_columns(table, classes):
        _refuse(bad, ids, defect)
    encoded = {name: table[name] for name in INT8 if name in table}
    dim = encoded["row"].shape[1]
    step = max(1, CHUNK // dim)
    for start in range(0, len(ids), step):
        rows = slice(start, start + step)
        part = {name: column[rows] for name, column in encoded.items()}
        for bad, defect in _bad_rows(part):
            _refuse(bad, ids[rows], defect)


def _check_ids(ids: Tensor, next_id: int) -> None:
    """Checks that ids rise from row to row and lie between 0 and ``next_id - 1``."""
    # Neighbors are compared, not subtracted: a difference of forged ids could overflow.
    falls = ids[1:] <= ids[:-1]
    if falls.any():
        raise TableError("its ids do not rise from row to row")
    if not len(ids):
        return
    first = int(ids[0])
    last = int(ids[-1])
    if first < 0 or last >= next_id:
        raise TableError(f"its ids, {first} … {last}, must be between 0 and next_id - 1, {next_id - 1}")


def check_judgments(
    judgments: Mapping[int, tuple[Judgment, ...]], held: set[int], vetoed: set[int], classes: int
) -> None:
    """Checks that judgments agree with the rows.

    Args:
        judgments: what people decided about each row, by id, oldest first.
        held: the ids of all rows.
        vetoed: the ids of the rows whose state says that they may not vote.
        classes: the number of classes of the bank.
    """
    judged_vetoed = set()
    for row, history in judgments.items():
        if row not in held:
            raise TableError(f"it has judgments on row {row}, which it does not hold")
        if any(judgment.label >= classes for judgment in history):
            raise TableError(f"its judgments on row {row} name a label outside its classes")
        decisions = [judgment.verdict for judgment in history if judgment.verdict != "relabel"]
        if decisions and decisions[-1] == "veto":
            judged_vetoed.add(row)
    if judged_vetoed != vetoed:
        by_judgment = brief(sorted(judged_vetoed))
        by_state = brief(sorted(vetoed))
        raise TableError(f"its judgments say that rows {by_judgment} are vetoed, but its states say {by_state}")


def check_mean(name: str, mean: Tensor, dim: int) -> None:
    """Checks that a mean or a sum of features is a finite vector (dim,) of float64."""
    _check_kind(name, mean, dim)
    if not mean.isfinite().all():
        raise TableError(f"its {name} holds NaN or infinity")


def _check_kind(name: str, vector: Tensor, length: int) -> None:
    """Checks that a vector is float64 of shape (length,)."""
    if vector.dtype != torch.float64 or vector.shape != (length,):
        given = f"{vector.dtype} of shape {tuple(vector.shape)}"
        raise TableError(f"its {name} must be float64 of shape ({length},), got {given}")


def check_transform(transform: Transform, dim: int) -> None:
    """Checks that a transform computes exactly: its vectors lie on the grid, and none is much too long."""
    check_mean("origin", transform.origin, dim)
    if transform.directions.shape != transform.damped.shape:
        raise TableError("it has different numbers of directions and of vectors that are damped along them")
    if transform.telling.shape != transform.amplified.shape:
        raise TableError(
            "it has different numbers of directions that tell classes apart and of vectors that are added along them"
        )
    for name in ("directions", "damped", "telling", "span"):
        _check_vectors(name, getattr(transform, name), dim, 1)
    _check_vectors("amplified", transform.amplified, dim, LONGEST)
    for name in ("origin", "directions", "damped", "telling", "amplified", "span"):
        off_grid = (getattr(transform, name) * GRID).frac() != 0
        if off_grid.any():
            raise TableError(f"its {name} is off the grid of 2**-24")
    power = transform.power.tolist()
    if power not in ([0.5], [1.0]):
        raise TableError(f"its power must be 0.5 or 1, got {brief(power)}")
    voters = transform.voters.tolist()
    if voters not in [[float(count)] for count in range(1, PER_CLASS + 1)]:
        raise TableError(f"its voters must be a number from 1 to {PER_CLASS}, got {brief(voters)}")
    _check_foreign(transform.foreign)
    check_mean("calibration", transform.calibration, PACKED)
    if (transform.calibration < 0).any():
        raise TableError("its calibration holds negative numbers")


def _check_foreign(similarities: Tensor) -> None:
    """Checks that the similarities of foreign queries are finite, float64 and in rising order."""
    fits = similarities.ndim == 1 and len(similarities) <= SAMPLE
    if not fits or similarities.dtype != torch.float64:
        given = f"{similarities.dtype} of shape {tuple(similarities.shape)}"
        raise TableError(f"its foreign must be float64 of shape (at most {SAMPLE},), got {given}")
    falls = similarities.diff() < 0
    if not similarities.isfinite().all() or falls.any():
        raise TableError("its foreign must hold finite numbers in rising order")


def _check_vectors(name: str, vectors: Tensor, dim: int, longest: float) -> None:
    """Checks that there are at most ``dim`` vectors of float64, none of them longer than about ``longest``."""
    shape = tuple(vectors.shape)
    fits = len(shape) == 2 and shape[0] <= dim and shape[1] == dim
    if not fits or vectors.dtype != torch.float64:
        wanted = f"float64 of shape (at most {dim}, {dim})"
        raise TableError(f"its {name} must be {wanted}, got {vectors.dtype} of shape {shape}")
    short = vectors.norm(dim=1) <= longest + LENGTH  # false for NaN
    if not short.all():
        raise TableError(f"its {name} has vectors that are longer than {longest:g}, or hold NaN or infinity")


def check_stream(vector: Tensor, dim: int, classes: int) -> None:
    """Checks a stream as ``guard.Stream`` packs it: single numbers, D coordinates, C shares of classes."""
    _check_kind("stream", vector, packed_length(dim, classes))
    if not vector.isfinite().all():
        raise TableError("its stream holds NaN or infinity")
    numbers = PackedNumbers(*vector[:NUMBER_COUNT].tolist())
    _check_numbers(numbers, classes)
    shares = vector[NUMBER_COUNT + dim :]
    if (shares < 0).any():
        raise TableError("its stream has classes with a negative share")


def _check_numbers(numbers: PackedNumbers, classes: int) -> None:
    """Checks that the single numbers of a packed stream are in their ranges; they are known to be finite."""
    for count in (numbers.queries, numbers.adapted_right, numbers.frozen_right, numbers.compared, numbers.bets):
        if count < 0 or count != int(count):
            raise TableError(f"its stream counts {count:g} queries or labels")
    for label in (numbers.last, numbers.believed_last):
        if label != int(label) or not -1 <= label < classes:
            raise TableError(f"the last query of its stream is of class {label:g}")
    for name in ("frozen_agreement", "adapted_agreement", "mixed"):
        share = getattr(numbers, name)
        if not 0 <= share <= 1:
            raise TableError(f"its stream has {name} {share:g}, which is not between 0 and 1")
    if not -1 <= numbers.gain <= 1:
        raise TableError(f"its stream has gain {numbers.gain:g}, which is not between -1 and 1")
    if not 0 <= numbers.capital <= MOST_CAPITAL or numbers.peak < 1:
        raise TableError(f"the alarm of its stream has capital {numbers.capital:g} and peak {numbers.peak:g}")


def _refuse(bad: Tensor, ids: Tensor, defect: str) -> None:
    """Raises a TableError that names the first bad row and its defect, if any row is bad."""
    if bad.any():
        first = bad.nonzero()[0, 0]
        raise TableError(f"row {int(ids[first])} {defect}")


def _bad_columns(table: Mapping[str, Tensor], classes: int) -> Iterator[tuple[Tensor, str]]:
    """For each possible defect of a column: which rows have it (n,) bool, and its description."""
    label = table["label"]
    state = table["state"]
    yield (label < 0) | (label >= classes), f"has a label outside 0 … {classes - 1}"
    yield (state != ACTIVE) & (state != VETOED), "is neither active nor vetoed"
    yield table["origin"] > max(Origin), "has an unknown origin"
    yield ~table["confidence"].isfinite(), "has a confidence that is NaN or infinite"
    if "soft" in table:
        soft = table["soft"]
        error = (soft.sum(1) - 1).abs()
        probabilities = (soft >= 0).all(1) & (error <= 1e-3)
        yield ~probabilities, "has soft labels that are not probabilities"


def _bad_rows(part: Columns) -> Iterator[tuple[Tensor, str]]:
    """For each defect that would make search inexact: which rows have it (n,) bool, and its description.

    What a good row must satisfy is computed and then negated where NaN might occur, because every comparison with NaN
    is false: so NaN counts as a defect.
    """
    stored = part["row"]
    if stored.dtype == torch.float32:
        off_grid = (stored * GRID).frac() != 0
        yield off_grid.any(1), "is NaN, infinite or off the grid of 2**-24"
    rows = decode(part).double()
    if "fine" in part:
        scale = part["scale"].double()
        positive = (scale > 0) & scale.isfinite()
        yield ~positive, "has a scale that is not a positive number"
        outside = (stored == -128) | (part["fine"] == -128)
        yield outside.any(1), "has a code outside -127 … 127"
        left_out = rows - stored.double() * scale  # what a scan of the coarse codes does not see
        residual = left_out.norm(dim=1, keepdim=True) * 1.0001
        error = (part["residual"].double() - residual).abs()
        # Machines add up in different orders and so round differently, by far less than the slack that 1.0001 leaves.
        yield ~(error <= 1e-6 * residual), "has a false residual"
    excess = rows.norm(dim=1) - 1
    yield ~(excess.abs() <= LENGTH), "does not have length one"
