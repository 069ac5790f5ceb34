"""What a client can do to a service by requests that are allowed, but not meant."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import torch
from PIL import Image
from pydantic import ValidationError
from services import encode, filled, queries

import adanpc
from adanpc.serve import bodies, create, serving
from adanpc.serve.errors import RequestError
from adanpc.serve.images import decode

JSON = {"Content-Type": "application/json"}
MANY = 20_000


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[adanpc.DurableBank]:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()) as opened:
        yield opened


@pytest.fixture
def url(bank: adanpc.DurableBank, tmp_path: Path) -> Iterator[str]:
    with serving(create(bank, encoder=encode, folder=tmp_path / "bank")) as address:
        yield address


def ask(url: str, count: int, request: str) -> requests.Response:
    return requests.post(f"{url}/v1/predict", json={"features": queries(count).tolist(), "request": request})


@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 1)])
def test_an_id_that_is_used_again_for_other_queries(url: str, bank: adanpc.DurableBank, first: int, then: int) -> None:
    assert ask(url, first, "shift 7").status_code == 200
    position = bank.position
    refused = ask(url, then, "shift 7")
    assert refused.status_code == 422
    assert "a request with this id was answered before" in refused.json()["error"]
    assert bank.position == position
    assert requests.get(f"{url}/v1/queries").status_code == 200  # the list of answers is not broken by it
    assert ask(url, first, "shift 7").status_code == 200


WRONG: list[dict[str, int]] = [{}] * MANY
UNKNOWN = {f"field {number}": 0 for number in range(MANY)}


@pytest.mark.parametrize("kind", bodies.Body.__subclasses__())
def test_a_body_of_wrong_values_is_not_an_error_for_each_of_them(kind: type[bodies.Body]) -> None:
    for given in (UNKNOWN, dict.fromkeys(kind.model_fields, WRONG), {name: [WRONG] for name in kind.model_fields}):
        with pytest.raises(ValidationError) as caught:
            kind.model_validate_json(json.dumps(given))
        assert caught.value.error_count() < 10


@pytest.mark.parametrize(("route", "names"), [("predict", "features, request"), ("veto", "rows, why")])
def test_too_many_fields_are_refused_with_those_that_there_are(url: str, route: str, names: str) -> None:
    refused = requests.post(f"{url}/v1/{route}", json=UNKNOWN)
    assert refused.status_code == 422
    assert refused.json()["error"] == f"body: The fields are {names}, and no others"


def test_json_that_is_none_is_refused_by_the_name_of_what_is_wrong(url: str) -> None:
    for route in ("predict", "veto"):  # one of them is read by hand, the other by the framework
        refused = requests.post(f"{url}/v1/{route}", data=b'{"features": [', headers=JSON)
        assert refused.status_code == 422
        assert refused.json()["error"].startswith("the body is not valid JSON: ")


@pytest.mark.parametrize("behind", [gzip.compress(b"more"), b"more"], ids=["another piece", "no piece"])
def test_what_follows_compressed_data_is_not_ignored(url: str, bank: adanpc.DurableBank, behind: bytes) -> None:
    position = bank.position
    body = gzip.compress(json.dumps({"features": queries(1).tolist()}).encode()) + behind
    refused = requests.post(f"{url}/v1/predict", data=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert refused.status_code == 400
    assert "more than one" in refused.json()["error"]
    assert bank.position == position


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (101, 1)])
def test_an_image_that_would_be_enormous_once_its_shorter_side_is_resized(size: tuple[int, int]) -> None:
    written = BytesIO()
    Image.new("L", size).save(written, "PNG")
    with pytest.raises(RequestError, match="at most 100 times the shorter"):
        decode(written.getvalue(), 10**6)


def test_a_client_that_leaves_in_the_middle_of_a_body_is_no_error_of_the_service(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = urlsplit(url)
    head = f"POST /v1/predict HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: image/png\r\nContent-Length: 9\r\n\r\n"
    paths = ("/v1/predict", "/v1/veto", "/v2/models/adanpc/infer")
    with caplog.at_level("INFO", "adanpc.serve"):
        for path in paths:
            with socket.create_connection((place.hostname, place.port)) as connection:
                connection.sendall(head.replace("/v1/predict", path).encode() + b"half")
        while sum(record.message == "request" for record in caplog.records) < len(paths):
            time.sleep(0.01)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    assert requests.post(f"{url}/v1/predict", json={"features": queries(1).tolist()}).status_code == 200


def test_banks_of_earlier_positions_are_in_memory_one_at_a_time(
    url: str, bank: adanpc.DurableBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover = adanpc.DurableBank.at
    now: list[int] = []
    most: list[int] = []

    def watched(self: adanpc.DurableBank, position: int) -> adanpc.AdaNPC:
        now.append(position)
        most.append(len(now))
        time.sleep(0.1)  # so that others would come meanwhile
        try:
            return recover(self, position)
        finally:
            now.pop()

    monkeypatch.setattr(adanpc.DurableBank, "at", watched)
    bodies_sent = [{"to": bank.position, "preview": preview} for preview in (True, False) * 4]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: requests.post(f"{url}/v1/rollback", json=body), bodies_sent))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert most == [1] * 8


def test_predictions_that_nothing_learns_from_are_made_by_as_many_threads_as_there_are_cores(
    bank: adanpc.DurableBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bank of 100,000 rows, answers to 500 queries take 640 MiB for a moment."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    predict = adanpc.DurableBank.predict
    now: list[int] = []
    most: list[int] = []

    def watched(self: adanpc.DurableBank, features: torch.Tensor, **options: Any) -> adanpc.Prediction:
        now.append(len(features))
        most.append(len(now))
        time.sleep(0.1)  # so that others would come meanwhile
        try:
            return predict(self, features, **options)
        finally:
            now.pop()

    monkeypatch.setattr(adanpc.DurableBank, "predict", watched)
    query = queries(1).tolist()
    asked = [("predict?adapt=false", {"features": query}), ("preview", {"features": query[0]})] * 6
    with serving(create(bank)) as url, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda each: requests.post(f"{url}/v1/{each[0]}", json=each[1]), asked))
    assert [answer.status_code for answer in answers] == [200] * 12
    assert len(most) == 12
    assert max(most) <= 2


def test_a_flood_of_header_lines_is_refused_before_it_is_all_in_memory(url: str) -> None:
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port)) as connection:
        received = b""
        with suppress(OSError):  # it is closed while this side still sends
            connection.sendall(f"GET /v1/bank HTTP/1.1\r\nHost: {place.netloc}\r\n".encode())
            for _ in range(2000):
                connection.sendall(b"X: y\r\n" * 10_000)
            raise AssertionError("all of it was read")
        with suppress(OSError):
            received = connection.recv(1000)
    assert not received or received.startswith(b"HTTP/1.1 400 ")
    assert requests.get(f"{url}/v2/health/live").status_code == 200
