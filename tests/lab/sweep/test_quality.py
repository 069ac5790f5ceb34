"""What an average hides, against counting by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adanpc.lab.sweep.quality import BINS, auroc, calibration_error, worst_tenth


@settings(max_examples=60, deadline=None)
@given(marks=st.lists(st.booleans(), min_size=1, max_size=2500))
def test_the_worst_tenth_is_that_of_whole_windows(marks: list[bool]) -> None:
    windows = [marks[start : start + 100] for start in range(0, len(marks) - 99, 100)] or [marks]
    shares = sorted(sum(window) / len(window) for window in windows)
    worst = shares[: max(1, len(shares) // 10)]
    assert worst_tenth(torch.tensor(marks)) == pytest.approx(100 * sum(worst) / len(worst))


def test_a_bad_stretch_shows_that_an_average_hides() -> None:
    right = torch.ones(2000, dtype=torch.bool)
    right[500:600] = False
    right[900:950] = False
    assert right.float().mean() == pytest.approx(0.925)
    assert worst_tenth(right) == pytest.approx(25.0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 300), classes=st.integers(2, 9))
def test_calibration_is_compared_bin_by_bin(seed: int, count: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = (4 * torch.randn(count, classes, generator=generator)).softmax(1)
    right = torch.rand(count, generator=generator) < 0.5
    total = 0.0
    for place in range(BINS):
        low = place / BINS
        high = (place + 1) / BINS
        own = [row for row in range(count) if low < float(probs[row].max().double()) <= high]
        if own:
            confidence = sum(float(probs[row].max()) for row in own) / len(own)
            accuracy = sum(bool(right[row]) for row in own) / len(own)
            total += len(own) / count * abs(confidence - accuracy)
    assert calibration_error(probs, right) == pytest.approx(100 * total, abs=1e-3)


def test_certainty_is_right_or_wrong() -> None:
    certain = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert calibration_error(certain, torch.tensor([True, True])) == 0
    assert calibration_error(certain, torch.tensor([False, False])) == pytest.approx(100)


@settings(max_examples=60, deadline=None)
@given(
    native=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    foreign=st.lists(st.integers(0, 5), min_size=1, max_size=30),
)
def test_the_area_under_the_curve_is_that_of_all_pairs(native: list[int], foreign: list[int]) -> None:
    points = 0.0
    for one in native:
        for other in foreign:
            if one > other:
                points += 1
            elif one == other:
                points += 0.5
    expected = 100 * points / (len(native) * len(foreign))
    assert auroc(torch.tensor(native), torch.tensor(foreign)) == pytest.approx(expected)
