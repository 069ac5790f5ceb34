"""Metrics, read as Prometheus reads them."""

from __future__ import annotations

from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families
from services import CLASSES, ROWS, encode, filled, png, queries

import adanpc
from adanpc.serve import create, serving


def read(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and labels."""
    samples = {}
    answered = requests.get(f"{url}/metrics")
    assert answered.headers["content-type"].startswith("text/plain; version=0.0.4")
    for family in text_string_to_metric_families(answered.text):
        assert family.name.startswith("adanpc_"), family.name
        assert family.documentation
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def test_metrics_count_what_happened(tmp_path: Path) -> None:
    with (
        adanpc.DurableBank.create(tmp_path / "bank", filled()) as bank,
        serving(create(bank, encoder=encode)) as url,
    ):
        before = read(url)
        assert ("adanpc_admission_ratio", ()) not in before  # nothing was offered yet
        requests.post(f"{url}/v1/predict", json={"features": queries(6).tolist()})
        requests.post(f"{url}/v1/predict?adapt=false", json={"features": queries(3).tolist()})
        requests.post(f"{url}/v1/predict", data=png(1), headers={"Content-Type": "image/png"})
        requests.post(f"{url}/v1/veto", json={"rows": [1, 2]})
        requests.post(f"{url}/v1/veto", json={"rows": [999]})
        requests.get(f"{url}/v1/rows/1")
        requests.get(f"{url}/v1/rows/2")
        samples = read(url)
        contents = bank.contents
    joined = len(contents) - ROWS
    assert samples["adanpc_queries_total", ()] == 10
    assert samples["adanpc_joined_total", ()] == joined
    assert samples["adanpc_admission_ratio", ()] == joined / 7
    assert samples["adanpc_changes_total", (("kind", "veto"),)] == 1
    assert samples["adanpc_log_position", ()] == contents.position
    assert samples["adanpc_bank_bytes", ()] == contents.nbytes
    assert samples["adanpc_bank_rows", (("origin", "source"),)] == ROWS
    assert samples["adanpc_bank_rows", (("origin", "admitted"),)] == joined
    assert samples["adanpc_bank_rows", (("origin", "vetoed"),)] == 2
    assert sum(samples["adanpc_class_ratio", (("class", name),)] for name in CLASSES) == 1
    assert samples["adanpc_waiting_requests", ()] == 0
    assert samples["adanpc_waiting_images", ()] == 0
    assert samples["adanpc_trust_ratio", ()] == 0
    assert samples["adanpc_alarm", ()] == 0
    ends = [samples["adanpc_estimated_accuracy_ratio", (("answers", "given"), ("end", end))] for end in ("low", "high")]
    assert 0 <= ends[0] <= ends[1] <= 1
    # A route is counted as it is written down: what is asked for by chance or malice does not become a label.
    assert samples["adanpc_requests_total", (("route", "/v1/rows/{row}"), ("status", "200"))] == 2
    assert samples["adanpc_requests_total", (("route", "/v1/veto"), ("status", "404"))] == 1
    assert samples["adanpc_request_seconds_count", (("route", "/v1/predict"),)] == 3


def test_units_are_base_units_and_counters_are_totals(tmp_path: Path) -> None:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()) as bank, serving(create(bank)) as url:
        requests.get(f"{url}/nothing-{'x' * 50}")
        text = requests.get(f"{url}/metrics").text
    assert "nothing" not in text
    for family in text_string_to_metric_families(text):
        if family.type == "counter":
            assert any(sample.name.endswith("_total") for sample in family.samples) or not family.samples
        assert not family.name.endswith(("_ms", "_milliseconds", "_mb", "_percent"))


def test_a_bank_without_a_guard_has_no_signs(tmp_path: Path) -> None:
    classifier = adanpc.AdaNPC(adanpc.MemoryBank(4, 2), admission=adanpc.everyone)
    with adanpc.DurableBank.create(tmp_path / "bank", classifier) as bank, serving(create(bank)) as url:
        samples = read(url)
        assert not [name for name, _ in samples if "trust" in name or "estimated" in name]
        assert requests.get(f"{url}/v1/bank").json()["signs"] is None
        empty = requests.post(f"{url}/v1/predict", json={"features": queries(1).tolist()})
        assert (empty.status_code, empty.json()["code"]) == (409, "empty-bank")
