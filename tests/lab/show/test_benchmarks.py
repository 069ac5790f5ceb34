"""The tables of the benchmark follow from the numbers beside them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import core, throughput

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
