"""The service with real clients, over real connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch

import adanpc
from adanpc.serve import Tokens, add_token, create, serving


def filled() -> adanpc.AdaNPC:
    torch.manual_seed(0)
    classifier = adanpc.AdaNPC(adanpc.MemoryBank(4, ["cat", "dog"], soft=True), preset="safe")
    features = torch.eye(4)[[0, 1] * 20] + 0.1 * torch.rand(40, 4)
    classifier.learn(features, torch.tensor([0, 1] * 20))
    return classifier


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[adanpc.DurableBank]:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()) as opened:
        yield opened


@pytest.fixture
def url(bank: adanpc.DurableBank) -> Iterator[str]:
    with serving(create(bank)) as address:
        yield address


def test_an_answer_is_the_banks_and_can_be_previewed_vetoed_and_undone(url: str) -> None:
    expected = filled().step(torch.tensor([[1.0, 0.2, 0.0, 0.1]]))
    answered = requests.post(f"{url}/v1/predict", json={"features": [[1.0, 0.2, 0.0, 0.1]]}).json()
    (answer,) = answered["answers"]
    assert answer["probs"] == expected.probs[0].tolist()
    assert answer["joined"] == 40
    row = answer["neighbors"][0]["id"]
    preview = requests.post(f"{url}/v1/preview", json={"query": answer["query"], "without": [row]}).json()
    assert row not in [neighbor["id"] for neighbor in preview["neighbors"]]
    position = requests.post(f"{url}/v1/veto", json={"rows": [row]}, headers={"X-Expert": "Ann"}).json()["position"]
    assert requests.get(f"{url}/v1/rows/{row}").json()["vetoed"]
    assert requests.post(f"{url}/v1/undo", json={"position": position}).status_code == 200
    assert not requests.get(f"{url}/v1/rows/{row}").json()["vetoed"]
    assert requests.post(f"{url}/v1/undo", json={"position": position}).json()["code"] == "conflict"


def test_a_request_may_hold_more_queries_than_are_kept(url: str, bank: adanpc.DurableBank) -> None:
    queries = np.random.default_rng(0).random((600, 4)).tolist()
    answered = requests.post(f"{url}/v1/predict?adapt=false", json={"features": queries}).json()
    assert len(answered["answers"]) == 600


def test_a_stock_client_gets_the_banks_answers_and_a_retry_counts_once(url: str, bank: adanpc.DurableBank) -> None:
    client_module: Any = pytest.importorskip("tritonclient.http")
    queries = np.random.default_rng(0).random((3, 4), dtype=np.float32)
    expected = filled().step(torch.from_numpy(queries))
    client = client_module.InferenceServerClient(url.removeprefix("http://"))
    try:
        assert client.is_server_live()
        assert client.is_model_ready("adanpc")
        assert client.get_model_metadata("adanpc")["inputs"][0]["shape"] == [-1, 4]
        for binary in (True, False):
            given = client_module.InferInput("features", [3, 4], "FP32")
            given.set_data_from_numpy(queries, binary_data=binary)
            names = ("labels", "probs", "joined", "neighbor_ids", "neighbor_origins")
            outputs = [client_module.InferRequestedOutput(name, binary_data=binary) for name in names]
            result = client.infer("adanpc", [given], request_id="one", outputs=outputs)
            np.testing.assert_array_equal(result.as_numpy("probs"), expected.probs.numpy())
            np.testing.assert_array_equal(result.as_numpy("joined"), expected.joined.numpy())
            np.testing.assert_array_equal(result.as_numpy("neighbor_ids"), expected.neighbors.ids.numpy())
        assert bank.contents.next_id == 40 + int((expected.joined >= 0).sum())
    finally:
        client.close()


def test_other_hosts_and_pages_are_refused(url: str) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        refused = requests.get(f"{url}/v1/bank", headers=headers)
        assert refused.status_code == 403
        assert refused.json()["code"] == "forbidden"


def test_roles_decide(bank: adanpc.DurableBank, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    reader = add_token(file, "Bob", "predict")
    expert = add_token(file, "Ann", "expert")
    assert expert not in file.read_text()
    with serving(create(bank, tokens=Tokens(file))) as url:
        statuses = []
        for token in ("", "wrong", reader, expert):
            headers = {"Authorization": f"Bearer {token}"}
            statuses.append(requests.post(f"{url}/v1/veto", json={"rows": [1]}, headers=headers).status_code)
        assert statuses == [401, 401, 403, 200]
    assert bank.contents.judgments[1][0].who == "Ann"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"inputs": [1]}',
        b'{"inputs": [{"name": "features", "shape": [1, -4], "datatype": "FP32", "data": [1]}]}',
        b'{"inputs": [{"name": "features", "shape": [1, 4], "datatype": "FP32", "data": [1, "a", 0, 0]}]}',
        b'{"inputs": [{"name": "features", "shape": [1, 4], "datatype": "FP32", "data": [NaN, 1, 0, 0]}]}',
        b'{"inputs": [{"name": "features", "shape": [2147483647, 8], "datatype": "FP32", "data": []}]}',
        b'{"inputs": [{"shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}]}',
        b'{"id": 3, "inputs": [{"name": "features", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 0, 0]}]}',
    ],
)
def test_malformed_tensors_are_refused_and_change_nothing(url: str, bank: adanpc.DurableBank, body: bytes) -> None:
    refused = requests.post(f"{url}/v2/models/adanpc/infer", data=body)
    assert refused.status_code in (400, 422)
    assert refused.json()["code"] in ("bad-request", "bad-features", "invalid-value")
    assert bank.position == 1


def test_arrays_and_bodies_that_claim_too_much_are_refused(url: str, bank: adanpc.DurableBank) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 4), }\n"
    claims = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    for content in (b"", b"\x93NUMPY", claims, claims + bytes(16)):
        refused = requests.post(f"{url}/v1/predict", data=content, headers={"Content-Type": "application/x-npy"})
        assert refused.status_code == 400
    too_long = requests.post(f"{url}/v1/predict", data=iter([bytes(2**20)] * 33), headers={"Content-Type": "image/png"})
    assert too_long.status_code == 413
    assert requests.post(f"{url}/v1/predict", data=b"x", headers={"Content-Type": "text/plain"}).status_code == 415
    assert bank.position == 1
