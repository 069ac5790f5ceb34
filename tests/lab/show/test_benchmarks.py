"""The tables of the benchmark follow from the numbers beside them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import core, panel, throughput

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_the_tables_of_the_core_show_the_recorded_numbers(tmp_path: Path) -> None:
    recorded = json.loads((RESULTS / "core.json").read_text())
    results = {int(size): result for size, result in recorded["results"].items()}
    assert core.report(results, recorded["machine"]) == (RESULTS / "core.md").read_text()
    core.plot(results, tmp_path / "core.png")
    assert (tmp_path / "core.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_of_the_training_loop_has_medians_and_every_round() -> None:
    rounds = [throughput.Round(0.010, 0.010), throughput.Round(0.012, 0.010), throughput.Round(0.013, 0.010)]
    text = throughput.report(rounds, steps=30)
    assert "`adanpc train`: 12.0 ms a step; bare loop: 10.0 ms (medians)" in text
    assert "median 1.200, from 1.000 to 1.300" in text
    assert "10.0 / 10.0; 12.0 / 10.0; 13.0 / 10.0" in text


def test_the_panel_counts_cells_that_lose_and_intervals_that_held() -> None:
    rows = torch.eye(3)
    problem = panel.Problem("toy", "none", rows, torch.arange(3), torch.zeros(3).long(), rows, torch.arange(3))
    lost = panel.Outcome(90.0, 89.0, 80.0, True, False, 30.0)
    even = panel.Outcome(90.0, 90.0, 90.0, True, True, 50.0)
    text = panel.report([(problem, {"random": [even], "sorted": [lost, even]})])
    assert "**safe**: 1 of 2 cells more than 0.5 points below the frozen vote; -2.5 on average" in text
    assert "the worst is toy, none, sorted, -5.0" in text
    assert "**the transform alone**: 0 of 2 cells" in text
    assert "in 67 % of 3 streams, and that of the last frozen answers in 100 %; mean width 43 points" in text
    assert "| toy | none | 90.0 | +0.0 | +0.0 | -5.0 |" in text


def test_a_problem_of_the_panel_is_met_in_every_order() -> None:
    classes = torch.arange(4).repeat(15)
    problem = next(panel.of_table("toy", torch.eye(4)[classes], classes))
    outcomes = panel.measured(problem)
    assert list(outcomes) == list(panel.ORDERS)
    assert [len(streams) for streams in outcomes.values()] == [1, 1, 1, 1, 4]
    assert all(outcome.safe == 100 for streams in outcomes.values() for outcome in streams)
