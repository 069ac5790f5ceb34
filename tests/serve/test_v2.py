"""The Open Inference Protocol, spoken by a stock client of Triton and by hand."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from services import ROWS, filled, queries

import adanpc
from adanpc.core import MemoryBank
from adanpc.serve import Limits, create, direct, serving

triton: Any = pytest.importorskip("tritonclient.http")

OUTPUTS = {
    "labels": np.int64, "probs": np.float32, "joined": np.int64, "neighbor_ids": np.int64,
    "neighbor_labels": np.int64, "neighbor_origins": np.int8, "neighbor_similarities": np.float64,
    "neighbor_shares": np.float32,
}  # fmt: skip


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[adanpc.DurableBank]:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()) as opened:
        yield opened


@pytest.fixture
def url(bank: adanpc.DurableBank) -> Iterator[str]:
    with serving(create(bank, limits=Limits(body=100_000))) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    opened = triton.InferenceServerClient(url.removeprefix("http://"))
    yield opened
    opened.close()


def tensor(values: Any, *, binary: bool = True, kind: str = "FP32") -> Any:
    made = triton.InferInput("features", list(values.shape), kind)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def wanted(binary: bool) -> list[Any]:
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in OUTPUTS]


def infer_document(values: Any, **more: Any) -> dict[str, Any]:
    described = {"name": "features", "shape": list(values.shape), "datatype": "FP32", "data": values.tolist()}
    return {"inputs": [described], **more}


def test_a_stock_client_finds_its_way(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    for version in ("", "1"):
        assert client.is_model_ready("adanpc", version)
        described = client.get_model_metadata("adanpc", version)
        assert described["inputs"] == [{"name": "features", "datatype": "FP32", "shape": [-1, 4]}]
        assert [output["name"] for output in described["outputs"]] == list(OUTPUTS)
    assert not client.is_model_ready("another")
    assert not client.is_model_ready("adanpc", "2")
    with pytest.raises(triton.InferenceServerException, match="there is no model 'another'"):
        client.infer("another", [tensor(queries(1))])


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tensors_in_and_out_are_those_of_the_bank(client: Any, binary_in: bool, binary_out: bool) -> None:
    given = queries(6)
    expected = filled().step(torch.from_numpy(given))
    answered = client.infer("adanpc", [tensor(given, binary=binary_in)], outputs=wanted(binary_out), model_version="1")
    near = expected.neighbors
    oracle = {
        "labels": expected.labels,
        "probs": expected.probs,
        "joined": expected.joined,
        "neighbor_ids": near.ids,
        "neighbor_labels": near.labels,
        "neighbor_similarities": near.similarity.clamp(min=-2),
        "neighbor_shares": expected.weights,
    }
    for name, values in oracle.items():
        np.testing.assert_array_equal(answered.as_numpy(name), values.numpy())
    for name, kind in OUTPUTS.items():
        assert answered.as_numpy(name).dtype == kind
    ids = near.ids.numpy()
    origins = np.select(
        [ids < 0, ids < ROWS], [-1, 0], 1
    )  # what lies behind the first rows joined in this very request
    np.testing.assert_array_equal(answered.as_numpy("neighbor_origins"), origins)
    assert answered.get_response()["model_name"] == "adanpc"


def test_half_and_double_precision_are_read_too(client: Any) -> None:
    given = queries(2)
    for kind, dtype in (("FP16", np.float16), ("FP64", np.float64)):
        cast = given.astype(dtype)
        expected = filled().predict(torch.from_numpy(cast.astype(np.float32))).labels.tolist()
        assert client.infer("adanpc", [tensor(cast, kind=kind)]).as_numpy("labels").tolist() == expected


def test_the_same_request_enters_once_even_after_a_restart(tmp_path: Path, bank: adanpc.DurableBank) -> None:
    given = queries(4)
    answers = []
    for _ in range(2):
        with serving(create(bank)) as url:
            client = triton.InferenceServerClient(url.removeprefix("http://"))
            for _ in range(2):
                answered = client.infer("adanpc", [tensor(given)], request_id="shift-7")
                assert answered.get_response()["id"] == "shift-7"
                answers.append((answered.as_numpy("probs").tolist(), answered.as_numpy("joined").tolist()))
            client.close()
        bank.close()
        bank = adanpc.DurableBank.open(tmp_path / "bank")
    with bank:
        assert all(answer == answers[0] for answer in answers)
        assert len(bank.contents) == ROWS + sum(row >= 0 for row in answers[0][1])


def test_requests_without_an_id_all_count(client: Any, bank: adanpc.DurableBank) -> None:
    for _ in range(3):
        client.infer("adanpc", [tensor(queries(1))])
    assert len(bank.contents) == ROWS + 3


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_read(client: Any, algorithm: str) -> None:
    given = queries(3)
    expected = filled().step(torch.from_numpy(given)).probs.numpy()
    answered = client.infer("adanpc", [tensor(given)], request_compression_algorithm=algorithm)
    np.testing.assert_array_equal(answered.as_numpy("probs"), expected)


@pytest.mark.parametrize("encoding", ["GZIP", "x-gzip"])
def test_a_compression_may_be_named_in_other_ways(url: str, encoding: str) -> None:
    content = gzip.compress(json.dumps(infer_document(queries(1))).encode())
    answered = requests.post(f"{url}/v2/models/adanpc/infer", data=content, headers={"Content-Encoding": encoding})
    assert answered.status_code == 200


@pytest.mark.parametrize(
    ("content", "encoding", "status"),
    [
        (gzip.compress(bytes(1_000_000), mtime=0), "gzip", 413),
        (gzip.compress(b"{}", mtime=0)[:-4], "gzip", 400),
        (b"no gzip", "gzip", 400),
        (zlib.compress(b"{}"), "br", 415),
    ],
)
def test_what_a_compressed_body_claims_is_bounded(url: str, content: bytes, encoding: str, status: int) -> None:
    headers = {"Content-Encoding": encoding}
    assert requests.post(f"{url}/v2/models/adanpc/infer", data=content, headers=headers).status_code == status


def test_binary_outputs_can_be_the_default(url: str) -> None:
    body = infer_document(queries(2), parameters={"binary_data_output": True})
    answered = requests.post(f"{url}/v2/models/adanpc/infer", json=body)
    length = int(answered.headers["Inference-Header-Content-Length"])
    document = json.loads(answered.content[:length])
    sizes = [output["parameters"]["binary_data_size"] for output in document["outputs"]]
    assert sum(sizes) == len(answered.content) - length
    plain = requests.post(f"{url}/v2/models/adanpc/infer", json=infer_document(queries(2)))
    assert "Inference-Header-Content-Length" not in plain.headers
    assert [output["name"] for output in plain.json()["outputs"]] == ["labels", "probs", "joined"]


@pytest.mark.parametrize("stated", ["9" * 5000, "-1", "x", "999999", "²"])
def test_a_header_that_states_a_wrong_length_is_refused(url: str, stated: str) -> None:
    headers = {"Inference-Header-Content-Length": stated.encode()}
    refused = requests.post(f"{url}/v2/models/adanpc/infer", json=infer_document(queries(1)), headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (400, "bad-request")


@pytest.mark.parametrize(
    "more",
    [
        {"outputs": 3},
        {"outputs": [{"name": "everything"}]},
        {"outputs": ["labels"]},
        {"parameters": []},
        {"inputs": []},
        {"inputs": [{"name": "images", "shape": [1, 4], "datatype": "FP32", "data": [1, 0, 0, 0]}]},
        {"inputs": [{"name": "features", "shape": [1, 4], "datatype": "BYTES", "data": ["a"]}]},
        {"inputs": [{"name": "features", "shape": [1] * 9, "datatype": "FP32", "data": [1]}]},
        {"inputs": [{"name": "features", "shape": [1], "datatype": "FP32"}]},
    ],
)
def test_what_is_asked_wrongly_is_refused_with_a_sentence(url: str, bank: adanpc.DurableBank, more: Any) -> None:
    refused = requests.post(f"{url}/v2/models/adanpc/infer", json={**infer_document(queries(1)), **more})
    assert refused.status_code == 400
    assert set(refused.json()) == {"error", "code"}
    assert bank.position == 1


def test_extensions_of_triton_that_would_change_the_answer_are_refused(client: Any, bank: adanpc.DurableBank) -> None:
    """Without them a client would take the probabilities for texts, or look for the answer in memory of its own."""
    given = [tensor(queries(1))]
    ranked = triton.InferRequestedOutput("probs", class_count=1)
    with pytest.raises(triton.InferenceServerException, match="classification is not supported: read the labels"):
        client.infer("adanpc", given, outputs=[ranked])
    placed = triton.InferRequestedOutput("probs")
    placed.set_shared_memory("region", 8)
    with pytest.raises(triton.InferenceServerException, match="shared_memory_region is not supported: send tensors"):
        client.infer("adanpc", given, outputs=[placed])
    given[0].set_shared_memory("region", 16)
    with pytest.raises(triton.InferenceServerException, match="shared_memory_region is not supported: send tensors"):
        client.infer("adanpc", given)
    assert bank.position == 1


def test_a_bank_that_lags_behind_its_log_is_not_ready(
    url: str, bank: adanpc.DurableBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patches:
        patches.setattr(MemoryBank, "_publish", fail)
        broken = requests.post(f"{url}/v1/veto", json={"rows": [1]})
        assert (broken.status_code, broken.json()["code"]) == (500, "internal")
        assert "no room" not in broken.text
    for path in ("/v2/health/ready", "/v2/models/adanpc/ready"):
        refused = requests.get(url + path)
        assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert requests.get(f"{url}/v2/health/live").status_code == 200
    refused = requests.post(f"{url}/v1/veto", json={"rows": [1]})
    assert (refused.status_code, refused.json()["code"]) == (503, "log-not-written")


def odd_requests() -> list[tuple[bytes, dict[str, str]]]:
    """Requests of every kind that the route tells apart, right ones and wrong ones."""
    document = infer_document(queries(2))
    text = json.dumps(document).encode()
    binary = {**document["inputs"][0], "parameters": {"binary_data_size": 32}}
    del binary["data"]
    head = json.dumps({"inputs": [binary], "parameters": {"binary_data_output": True}, "id": 'é "x"'}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    return [
        (text, {}),
        (head + queries(2).tobytes(), length),
        (head + b"short", length),
        (gzip.compress(text), {"Content-Encoding": "gzip"}),
        (gzip.compress(text), {"Content-Encoding": "br"}),
        (b"x" * 100_001, {}),
        (b"", {}),
        (b"[]", {}),
        (b"{}", {}),
        (json.dumps({**document, "id": 5}).encode(), {}),
        (json.dumps({**document, "id": "x" * 201}).encode(), {}),
        (json.dumps(infer_document(np.zeros((1, 4), np.float32))).encode(), {}),
        (json.dumps(infer_document(np.ones((1, 5), np.float32))).encode(), {}),
        (json.dumps(infer_document(np.ones((0, 4), np.float32))).encode(), {}),
    ]


def answers_of(url: str) -> list[Any]:
    """What the service answers to odd requests, on both paths, with a stated length and without."""
    heard: list[Any] = []
    for path in ("/v2/models/adanpc/infer", "/v2/models/adanpc/versions/1/infer"):
        for body, headers in odd_requests():
            answer = requests.post(url + path, data=body, headers={**headers, "X-Request-Id": "one"})
            del answer.headers["Date"]
            heard.append((answer.status_code, dict(answer.headers), answer.content))
            streamed = requests.post(url + path, data=iter([body]), headers=headers)
            heard.append((streamed.status_code, streamed.content))
    metrics = requests.get(f"{url}/metrics").text
    heard.append([line for line in metrics.splitlines() if line.startswith("adanpc_requests_total")])
    return heard


def test_the_direct_way_and_the_frameworks_answer_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    for name, paths in (("direct", direct.PATHS), ("framework", {})):
        monkeypatch.setattr(direct, "PATHS", paths)
        limits = Limits(body=100_000)
        with adanpc.DurableBank.create(tmp_path / name, filled()) as bank, serving(create(bank, limits=limits)) as url:
            heard.append(answers_of(url))
    for ours, frameworks in zip(*heard, strict=True):
        assert ours == frameworks
    assert {one[0] for one in heard[0][:-1]} == {200, 400, 413, 415, 422}
