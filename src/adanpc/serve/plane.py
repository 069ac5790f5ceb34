"""Plane: the bank's rows as points on a map, and the map as bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adanpc.core import Contents
from adanpc.core.table import VETOED
from adanpc.index.counting import ceil_div
from adanpc.serve.answers import names_of

FITTED = 5000  # the most rows that the plane is fitted to
CHUNK = 8192  # rows read at a time


class Plane:
    """The two directions in which rows differ most; fitted once, so that the map does not turn while rows join."""

    def __init__(self) -> None:
        self._fitted: tuple[Tensor, Tensor] | None = None

    def map(self, contents: Contents, limit: int) -> bytes:
        """Returns a line of JSON and columns of the newest rows: id, x, y, label, origin, vetoed; all little-endian."""
        slots = contents.held_slots()[-limit:]
        table = contents.table_of(slots, "id", "label", "origin", "state")
        points = self._points(contents, slots)
        header = {"count": len(slots), "position": contents.position, "classes": list(names_of(contents.settings))}
        columns: list[Any] = [
            table["id"].cpu().numpy().astype("<i8"),
            points[:, 0].astype("<f4"),
            points[:, 1].astype("<f4"),
            table["label"].cpu().numpy().astype("<i2"),
            table["origin"].cpu().numpy().astype("u1"),
            (table["state"] == VETOED).cpu().numpy().astype("u1"),
        ]
        parts = [json.dumps(header).encode() + b"\n"]
        parts += [column.tobytes() for column in columns]
        return b"".join(parts)

    def _points(self, contents: Contents, slots: Tensor) -> Any:
        """Returns the coordinates (n, 2) on the plane of the rows in these slots."""
        if self._fitted is None and len(slots):
            self._fitted = _fit(contents)
        parts = [np.zeros((0, 2))]
        for start in range(0, len(slots), CHUNK):
            assert self._fitted is not None  # there are rows
            mean, directions = self._fitted
            rows = contents.index.rows(slots[start : start + CHUNK]).cpu()
            parts.append(((rows - mean) @ directions).numpy())
        return np.concatenate(parts)


def _fit(contents: Contents) -> tuple[Tensor, Tensor]:
    """Returns the mean (D,) and two directions (D, 2) of rows sampled evenly from the bank."""
    slots = contents.held_slots()
    step = ceil_div(len(slots), FITTED)
    rows = contents.index.rows(slots[::step]).cpu().double()
    mean = rows.mean(0)
    _, vectors = torch.linalg.eigh((rows - mean).T @ (rows - mean))  # in ascending order of importance
    directions = vectors[:, -2:].flip(1)
    # The sign of a direction is arbitrary. Make its largest coordinate positive, so that it is the same at every start.
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    directions = directions * largest.sign()
    if directions.shape[1] < 2:  # features of one dimension
        directions = torch.cat([directions, torch.zeros(len(mean), 1)], 1)
    return mean.float(), directions.float()
