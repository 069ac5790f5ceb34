"""What an average accuracy hides: the worst stretch of a stream, and how far confidence can be trusted."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 100  # consecutive answers
WORST = 0.1  # share of the windows
BINS = 15  # of confidence, all equally wide


def worst_tenth(right: Tensor) -> float:
    """The accuracy, in percent, over the worst tenth of the windows of a stream, given which answers (n,) are right.

    A window is 100 consecutive answers. Windows do not overlap, and answers that do not fill the last one are ignored.
    At least one window is taken, however few there are; a stream that is shorter than a window is one window.
    """
    count = len(right) // WINDOW
    if count == 0:
        return 100 * right.double().mean().item()
    windows = right[: count * WINDOW].reshape(count, WINDOW)
    accuracies = windows.double().mean(1).sort().values
    worst = max(1, int(count * WORST))
    return 100 * accuracies[:worst].mean().item()


def calibration_error(probs: Tensor, right: Tensor) -> float:
    """The expected calibration error, in percent, of answers (n, C), given which of them (n,) are right.

    Answers are sorted into 15 bins of equal width by confidence. In each bin the mean confidence is compared with the
    accuracy, and the absolute differences are averaged, weighted by the number of answers in the bin.

    Paper: Guo et al., "On calibration of modern neural networks", ICML 2017.
    """
    confidence = probs.amax(1).double()
    bins = (confidence * BINS).ceil().clamp(1, BINS).long() - 1
    # The gap of a bin times its number of answers is the sum of confidence minus correctness over these answers.
    gaps = torch.zeros(BINS, dtype=torch.float64)
    gaps.index_add_(0, bins, confidence - right.double())
    return 100 * gaps.abs().sum().item() / len(probs)


def auroc(native: Tensor, foreign: Tensor) -> float:
    """How well scores separate native samples (n,) from foreign ones (m,): the area under the ROC curve, in percent.

    It is the share of all pairs in which the native sample has the higher score; a tie counts half. 50 is chance.
    """
    higher = (native[:, None] > foreign).double()  # (n, m)
    tied = (native[:, None] == foreign).double()
    return 100 * (higher + tied / 2).mean().item()
