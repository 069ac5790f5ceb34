"""The picture of a stream: its curves by hand, and that it is drawn."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adanpc import AdaNPC, Admission, MemoryBank, Prediction, plot_stream
from adanpc.errors import AdaNPCError, LabelError, UnavailableError
from adanpc.plot import stream_curves


@pytest.fixture
def answers() -> list[Prediction]:
    torch.manual_seed(0)
    made = AdaNPC(MemoryBank(3, 2), k=3, admission=Admission(min_confidence=0.8))
    made.learn(torch.randn(9, 3), torch.arange(9) % 2)
    return [made.step(torch.randn(4, 3)), made.step(torch.randn(5, 3))]


def test_curves_are_means_over_a_window(answers: list[Prediction]) -> None:
    labels = torch.tensor([-1, -1, 0, 1, 0, -1, -1, -1, 1])
    trust = torch.linspace(0, 1, 9)
    trusted = [replace(answers[0], trust=trust[:4]), replace(answers[1], trust=trust[4:])]
    curves = stream_curves(trusted, labels, window=3)
    given = torch.cat([answer.labels for answer in answers])
    confidence = torch.cat([answer.confidence for answer in answers])
    for query in range(9):
        last = slice(max(0, query - 2), query + 1)
        known = labels[last] >= 0
        right = (given[last] == labels[last])[known]
        expected = float(right.float().mean())
        assert float(curves["accuracy"][query]) == pytest.approx(expected, nan_ok=True)
        assert float(curves["confidence"][query]) == pytest.approx(float(confidence[last].mean()))
        assert float(curves["trust"][query]) == pytest.approx(float(trust[last].mean()))
    joined = torch.cat([answer.joined for answer in answers]) >= 0
    assert curves["admitted"].tolist() == joined.cumsum(0).tolist()


def test_labels_and_trust_may_be_missing(answers: list[Prediction]) -> None:
    assert list(stream_curves(answers[0])) == ["confidence", "admitted"]


def test_the_default_preset_shows_its_trust() -> None:
    torch.manual_seed(0)
    made = AdaNPC(MemoryBank(3, 2, soft=True), preset="safe")
    made.learn(torch.randn(30, 3), torch.arange(30) % 2)
    figure = plot_stream([made.step(torch.randn(4, 3)), made.step(torch.randn(5, 3))])
    assert [line.get_label() for line in figure.axes[0].lines] == ["confidence", "trust"]


def test_it_is_drawn(answers: list[Prediction], tmp_path: Path) -> None:
    figure = plot_stream(answers, [0] * 9, path=tmp_path / "stream.png")
    assert (tmp_path / "stream.png").stat().st_size > 1000
    upper, lower = figure.axes
    assert [line.get_label() for line in upper.lines] == ["accuracy", "confidence"]
    assert len(lower.lines) == 1


def test_unusable_arguments(answers: list[Prediction]) -> None:
    with pytest.raises(LabelError, match=r"labels must have shape \(9,\), one for each query, got \(3,\)"):
        plot_stream(answers, [0, 1, 1])
    with pytest.raises(LabelError, match="labels must be numbers, one for each query, got"):
        plot_stream(answers, ["cat"] * 9)
    with pytest.raises(AdaNPCError, match="window must be at least 1, got 0"):
        plot_stream(answers, window=0)
    with pytest.raises(AdaNPCError, match="answers must be a Prediction or a list of them"):
        plot_stream([])


def test_without_matplotlib(answers: list[Prediction], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnavailableError, match="needs matplotlib"):
        plot_stream(answers)
