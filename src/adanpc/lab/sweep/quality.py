"""What an average accuracy hides: the worst stretch of a stream, and how far confidence can be believed."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 100  # answers
WORST = 0.1  # of the windows
BINS = 15  # of confidence


def worst_tenth(right: Tensor) -> float:
    """The accuracy, in percent, in the worst tenth of the windows of a stream of answers (n,), right or wrong.

    A window is 100 answers in succession; windows follow each other without overlap, and a rest that fills none does
    not count. Of few windows the worst one is taken; a stream that is shorter than a window is one.
    """
    count = len(right) // WINDOW
    if count == 0:
        return 100 * right.double().mean().item()
    windows = right[: count * WINDOW].reshape(count, WINDOW)
    accuracies = windows.double().mean(1).sort().values
    worst = max(1, int(count * WORST))
    return 100 * accuracies[:worst].mean().item()


def calibration_error(probs: Tensor, right: Tensor) -> float:
    """The expected calibration error of answers (n, C) that are right or wrong (n,), in percent.

    Answers are put into 15 equal bins of confidence; in each, the mean confidence is compared with the accuracy, and
    the differences are averaged over all answers.

    Paper: Guo et al., "On calibration of modern neural networks", ICML 2017.
    """
    confidence = probs.amax(1).double()
    bins = (confidence * BINS).ceil().clamp(1, BINS).long() - 1
    gaps = torch.zeros(BINS, dtype=torch.float64)
    gaps.index_add_(0, bins, confidence - right.double())
    return 100 * gaps.abs().sum().item() / len(probs)


def auroc(native: Tensor, foreign: Tensor) -> float:
    """How well scores tell native samples (n,) from foreign ones (m,): the area under the ROC curve, in percent.

    It is the share of all pairs in which the native one has the higher score; a tie counts half. 50 is chance.
    """
    higher = (native[:, None] > foreign).double() + (native[:, None] == foreign).double() / 2
    return 100 * higher.mean().item()
