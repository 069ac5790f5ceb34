"""A figure of a stream: how confident the answers were, how many of them joined, and how many were right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adanpc import require
from adanpc.core import Prediction
from adanpc.errors import AdaNPCError, LabelError
from adanpc.index.grid import tensor_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNLABELED = -1  # the label of a query whose class is unknown


def stream_curves(
    answers: Prediction | Sequence[Prediction], labels: Any = None, *, window: int = 50
) -> dict[str, Tensor]:
    """The curves that ``plot_stream`` draws, by name, each (B,) with one value for each query.

    Each is an average over the last ``window`` queries, except for ``admitted``, which counts from the start. Accuracy
    is NaN where none of these queries has a label.
    """
    window = require.whole("window", window, least=1)
    if isinstance(answers, Prediction):
        answers = [answers]
    parts = list(answers)
    if not parts or not all(isinstance(part, Prediction) for part in parts):
        raise AdaNPCError("answers must be a Prediction or a list of them, as step returns them")
    confidence = torch.cat([part.confidence for part in parts]).double().cpu()
    joined = torch.cat([part.joined for part in parts]).cpu() >= 0
    everywhere = torch.ones_like(confidence, dtype=torch.bool)
    curves = {}
    if labels is not None:
        truth = _column("labels", labels, len(confidence))
        right = torch.cat([part.labels for part in parts]).cpu() == truth
        curves["accuracy"] = _running_mean(right.double(), truth != UNLABELED, window)
    curves["confidence"] = _running_mean(confidence, everywhere, window)
    trust = [part.trust for part in parts if part.trust is not None]
    if len(trust) == len(parts):
        curves["trust"] = _running_mean(torch.cat(trust).double().cpu(), everywhere, window)
    curves["admitted"] = joined.cumsum(0).double()
    return curves


@require.names_its_arguments
def plot_stream(
    answers: Prediction | Sequence[Prediction],
    labels: Any = None,
    *,
    window: int = 50,
    path: str | Path | None = None,
) -> Figure:
    """A figure of a stream: accuracy if labels are given, confidence, trust, and how many queries joined the bank.

    Trust is shown for answers of the preset "safe".

    Args:
        answers: what ``step`` returned, once or several times in order.
        labels: (B,) the true classes of all queries; -1 where it is unknown.
        window: how many queries each point is an average of.
        path: the .png, .pdf or .svg file to write; by default none.
    """
    curves = stream_curves(answers, labels, window=window)
    figure_module = require.library("matplotlib.figure", "a plot")
    figure: Figure = figure_module.Figure(figsize=(8, 5), layout="constrained")
    _draw(figure, curves, window)
    if path is not None:
        figure.savefig(path)
    return figure


def _draw(figure: Figure, curves: Mapping[str, Tensor], window: int) -> None:
    """Draws the averages in one panel, and below it how many queries have joined."""
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for name, curve in curves.items():
        if name != "admitted":
            upper.plot(curve.numpy(), label=name)
    upper.set_ylim(0, 1)
    upper.set_ylabel(f"mean of the last {window}")
    upper.legend(loc="lower right")
    upper.grid(alpha=0.3)
    lower.plot(curves["admitted"].numpy(), color="tab:gray")
    lower.set_ylim(bottom=0)
    lower.set_ylabel("answers that joined")
    lower.set_xlabel("query")
    lower.grid(alpha=0.3)


def _column(name: str, given: Any, count: int) -> Tensor:
    """The values as a tensor (count,); raises a LabelError for anything else."""
    try:
        values = tensor_of(given).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise LabelError(f"{name} must be numbers, one for each query, got {brief(given)}") from None
    if values.shape != (count,):
        raise LabelError(f"{name} must have shape ({count},), one for each query, got {tuple(values.shape)}")
    return values


def _running_mean(values: Tensor, known: Tensor, window: int) -> Tensor:
    """For each place, the mean of the known among the last ``window`` values up to it, (B,); NaN if none is known."""
    totals = torch.where(known, values, 0.0).cumsum(0)
    counts = known.cumsum(0)
    # A sum over a window is the difference of two running totals; the first windows begin at the first value.
    sums = totals.clone()
    sums[window:] -= totals[:-window]
    known_in_window = counts.clone()
    known_in_window[window:] -= counts[:-window]
    return sums / known_in_window
