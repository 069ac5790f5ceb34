"""What a table of rows must hold, wherever it comes from: a file, or a change that was read from a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from reprlib import repr as brief

import torch
from torch import Tensor

from adanpc.core.changes import Judgment
from adanpc.core.estimate import MOST_CAPITAL, PACKED
from adanpc.core.guard import HEAD, Head, packed_length
from adanpc.core.transform import LONGEST, SAMPLE, Transform
from adanpc.core.types import Origin
from adanpc.core.vote import PER_CLASS
from adanpc.errors import AdaNPCError
from adanpc.index.grid import GRID, INT8, Columns, decode

ACTIVE, VETOED = 1, 2  # the states of a row
DECIDING = ("id", "label", "origin", "state")  # the columns by which it is decided who may vote and who is evicted
CHUNK = 1 << 18  # coordinates checked at once: what the cache holds
LENGTH = 0.01  # how far from one a row's length may be; int8 rounds by less than 0.002 at D = 8192


class TableError(AdaNPCError):
    """Rows that no bank could hold, or for which search would not be exact."""

    code = "bad-table"


def pairs(table: Columns) -> list[tuple[int, int]]:
    """The id and label of each row."""
    return list(zip(table["id"].tolist(), table["label"].tolist(), strict=True))


def check_kinds(table: Mapping[str, Tensor], like: Columns) -> None:
    """Passes columns with the names, types and shapes of an empty bank's table, all of one length."""
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
    """Passes rows whose columns are of the right kind and that a bank of so many classes can hold."""
    ids = table["id"]
    _check_ids(ids, next_id)
    for bad, what in _bad_columns(table, classes):
        _refuse(bad, ids, what)
    encoded = {name: table[name] for name in INT8 if name in table}
    dim = encoded["row"].shape[1]
    step = max(1, CHUNK // dim)
    for start in range(0, len(ids), step):
        rows = slice(start, start + step)
        part = {name: column[rows] for name, column in encoded.items()}
        for bad, what in _bad_rows(part):
            _refuse(bad, ids[rows], what)


def _check_ids(ids: Tensor, next_id: int) -> None:
    """Passes ids that rise from row to row and that a bank has given."""
    falls = ids[1:] <= ids[:-1]  # a difference of forged ids could overflow
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
    """Passes judgments of rows that are held, by which just the vetoed rows may not vote."""
    silenced = set()
    for row, history in judgments.items():
        if row not in held:
            raise TableError(f"its judgments are of row {row}, which it does not hold")
        if any(judgment.label >= classes for judgment in history):
            raise TableError(f"its judgments of row {row} name a label outside its classes")
        decisions = [judgment.verdict for judgment in history if judgment.verdict != "relabel"]
        if decisions and decisions[-1] == "veto":
            silenced.add(row)
    if silenced != vetoed:
        by_judgment = f"by its judgments, the vetoed rows are {brief(sorted(silenced))}"
        raise TableError(f"{by_judgment}, but by their states {brief(sorted(vetoed))}")


def check_mean(name: str, mean: Tensor, dim: int) -> None:
    """Passes a finite vector of float64."""
    if mean.dtype != torch.float64 or mean.shape != (dim,):
        given = f"{mean.dtype} of {tuple(mean.shape)}"
        raise TableError(f"its {name} must be float64 of shape ({dim},), got {given}")
    if not mean.isfinite().all():
        raise TableError(f"its {name} holds NaN or infinity")


def check_transform(transform: Transform, dim: int) -> None:
    """Passes a transform for which everything is exact: vectors on the grid, none much longer than one."""
    check_mean("origin", transform.origin, dim)
    if transform.directions.shape != transform.damped.shape:
        raise TableError("its directions and what is damped along them differ in number")
    if transform.telling.shape != transform.amplified.shape:
        raise TableError("the directions that tell classes apart and what is added along them differ in number")
    for name in ("directions", "damped", "telling", "span"):
        _check_vectors(name, getattr(transform, name), dim, 1)
    _check_vectors("amplified", transform.amplified, dim, LONGEST)
    for name in ("origin", "directions", "damped", "telling", "amplified", "span"):
        if ((getattr(transform, name) * GRID).frac() != 0).any():
            raise TableError(f"its {name} is off the grid of 2**-24")
    if transform.power.tolist() not in ([0.5], [1.0]):
        raise TableError(f"its power must be 0.5 or 1, got {brief(transform.power.tolist())}")
    if transform.voters.tolist() not in [[float(count)] for count in range(1, PER_CLASS + 1)]:
        raise TableError(f"its voters must be a number from 1 to {PER_CLASS}, got {brief(transform.voters.tolist())}")
    _check_foreign(transform.foreign)
    check_mean("calibration", transform.calibration, PACKED)
    if (transform.calibration < 0).any():
        raise TableError("its calibration holds negative numbers")


def _check_foreign(similarities: Tensor) -> None:
    """Passes finite numbers of float64 in rising order."""
    fits = similarities.ndim == 1 and len(similarities) <= SAMPLE
    if not fits or similarities.dtype != torch.float64:
        given = f"{similarities.dtype} of {tuple(similarities.shape)}"
        raise TableError(f"its foreign must be float64 of shape (at most {SAMPLE},), got {given}")
    falls = similarities.diff() < 0
    if not similarities.isfinite().all() or falls.any():
        raise TableError("its foreign must hold finite numbers in rising order")


def _check_vectors(name: str, vectors: Tensor, dim: int, longest: float) -> None:
    """Passes at most ``dim`` finite vectors of float64 with lengths up to about ``longest``."""
    shape = tuple(vectors.shape)
    fits = len(shape) == 2 and shape[0] <= dim and shape[1] == dim
    if not fits or vectors.dtype != torch.float64:
        wanted = f"float64 of shape (at most {dim}, {dim})"
        raise TableError(f"its {name} must be {wanted}, got {vectors.dtype} of {shape}")
    short = vectors.norm(dim=1) <= longest + LENGTH  # false for NaN
    if not short.all():
        raise TableError(f"its {name} has vectors longer than {longest:g}, NaN or infinity")


def check_stream(vector: Tensor, dim: int, classes: int) -> None:
    """Passes what ``guard.Stream`` packs: finite numbers, a whole count, a class or -1."""
    length = packed_length(dim, classes)
    if vector.dtype != torch.float64 or vector.shape != (length,):
        raise TableError(
            f"its stream must be float64 of shape ({length},), got {vector.dtype} of {tuple(vector.shape)}"
        )
    if not vector.isfinite().all():
        raise TableError("its stream holds NaN or infinity")
    _check_head(Head(*vector[:HEAD].tolist()), classes)
    if (vector[HEAD + dim :] < 0).any():
        raise TableError("its stream has classes with a negative share")


def _check_head(head: Head, classes: int) -> None:
    """Passes finite numbers of a packed stream that are in their ranges."""
    for counted in (head.queries, head.adapted_right, head.frozen_right, head.compared, head.bets):
        if counted < 0 or counted != int(counted):
            raise TableError(f"its stream counts {counted:g} queries or labels")
    for latest in (head.last, head.believed_last):
        if latest != int(latest) or not -1 <= latest < classes:
            raise TableError(f"the last query of its stream is of class {latest:g}")
    for name in ("frozen_agreement", "adapted_agreement", "mixed"):
        share = getattr(head, name)
        if not 0 <= share <= 1:
            raise TableError(f"its stream has {name} {share:g}, which is not from 0 to 1")
    if not -1 <= head.gain <= 1:
        raise TableError(f"its stream has gain {head.gain:g}, which is not from -1 to 1")
    if not 0 <= head.capital <= MOST_CAPITAL or head.peak < 1:
        raise TableError(f"the alarm of its stream has capital {head.capital:g} and peak {head.peak:g}")


def _refuse(bad: Tensor, ids: Tensor, what: str) -> None:
    if bad.any():
        raise TableError(f"row {int(ids[bad.nonzero()[0, 0]])} {what}")


def _bad_columns(table: Mapping[str, Tensor], classes: int) -> Iterator[tuple[Tensor, str]]:
    label = table["label"]
    state = table["state"]
    yield (label < 0) | (label >= classes), f"has a label outside 0 … {classes - 1}"
    yield (state != ACTIVE) & (state != VETOED), "is neither active nor vetoed"
    yield table["origin"] > max(Origin), "has an unknown origin"
    yield ~table["confidence"].isfinite(), "has a confidence that is NaN or infinite"
    if "soft" in table:
        soft = table["soft"]
        probabilities = (soft >= 0).all(1) & ((soft.sum(1) - 1).abs() <= 1e-3)
        yield ~probabilities, "has soft labels that are not probabilities"


def _bad_rows(part: Columns) -> Iterator[tuple[Tensor, str]]:
    """Rows for which search would not be exact; every comparison is turned so that NaN is bad."""
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
        left_out = rows - stored.double() * scale  # of what a scan reads
        hidden = left_out.norm(dim=1, keepdim=True) * 1.0001
        error = (part["residual"].double() - hidden).abs()
        # Machines round a sum in different orders; this is far less than the room that 1.0001 leaves.
        yield ~(error <= 1e-6 * hidden), "has a false residual"
    excess = rows.norm(dim=1) - 1
    yield ~(excess.abs() <= LENGTH), "does not have length one"
