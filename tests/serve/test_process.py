"""``adanpc serve`` as a process of its own, from its first line to its last."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import requests
import torch
from services import PATIENCE, filled, queries, started

import adanpc
from adanpc.serve import add_token, remove_token


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()):
        pass
    return tmp_path / "bank"


def test_what_was_learned_outlives_the_process_and_its_end_is_orderly(folder: Path) -> None:
    given = queries(20)
    twin = filled()
    with started(folder) as service:
        assert service.url.startswith("http://127.0.0.1:")
        for query in given:
            answered = requests.post(f"{service.url}/v1/predict", json={"features": query.tolist()}).json()
            expected = twin.step(torch.from_numpy(query[None]))
            assert answered["answers"][0]["probs"] == expected.probs[0].tolist()
        digest = requests.get(f"{service.url}/v1/bank?digest=true").json()["digest"]
        assert digest == twin.digest()
        assert service.end() == 0
    with started(folder) as service:
        assert requests.get(f"{service.url}/v1/bank?digest=true").json()["digest"] == digest


def test_what_was_accepted_is_answered_before_the_end(folder: Path) -> None:
    """Many clients ask while the service ends: each gets a whole answer or none, and all that was answered is kept."""
    answered: list[int] = []
    asked = threading.Event()
    with started(folder) as service:

        def ask(number: int) -> None:
            with requests.Session() as session:
                for turn in range(200):
                    body = {"features": queries(1, seed=1000 * number + turn).tolist()}
                    try:
                        response = session.post(f"{service.url}/v1/predict", json=body, timeout=PATIENCE)
                    except requests.ConnectionError:
                        return  # it is not accepted any more
                    assert response.status_code == 200, response.text
                    answered.append(response.json()["answers"][0]["joined"])
                    if len(answered) > 20:
                        asked.set()

        listener = requests.get(f"{service.url}/v1/events", stream=True)
        clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for client in clients:
            client.start()
        assert asked.wait(PATIENCE)
        status = service.end()
        for client in clients:
            client.join()
        listener.close()
    assert status == 0
    with adanpc.DurableBank.open(folder) as bank:
        held = bank.contents.table("id")["id"].tolist()
        assert not bank.notices
    joined = {row for row in answered if row is not None}
    assert joined <= set(held)
    assert len(joined) == len([row for row in answered if row is not None])


def test_interrupting_it_by_hand_is_an_orderly_end_too(folder: Path) -> None:
    with started(folder) as service:
        requests.post(f"{service.url}/v1/veto", json={"rows": [1]})
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(PATIENCE) == 0
    with adanpc.DurableBank.open(folder) as bank:
        assert set(bank.contents.vetoed) == {1}


def test_logs_are_lines_of_json_without_codes_for_terminals_and_without_what_was_sent(
    folder: Path, tmp_path: Path
) -> None:
    token = add_token(tmp_path / "tokens", "Ann", "expert")
    headers = {"Authorization": f"Bearer {token}", "X-Request-Id": "shift-7"}
    with started(folder, "--tokens", tmp_path / "tokens") as service:
        requests.post(f"{service.url}/v1/veto", json={"rows": [7], "why": "confidential"}, headers=headers)
        requests.get(f"{service.url}/v1/queries/secret-name?order=latest", headers=headers)
        requests.get(f"{service.url}/v1/bank", headers={"Authorization": "Bearer guessed"})
        assert service.end() == 0
        every_line = service.log()
        text = service.errors.read_text()
    assert any(line["message"].startswith("Started server process") for line in every_line)  # uvicorn colors this one
    assert not any("color_message" in line for line in every_line)
    lines = [line for line in every_line if line["message"] == "request"]
    assert [(line["route"], line["status"], line["caller"]) for line in lines] == [
        ("/v1/veto", 200, "Ann"),
        ("/v1/queries/{name}", 404, "Ann"),
        ("other", 401, ""),
    ]
    assert lines[0]["request"] == "shift-7"
    assert all(line["seconds"] >= 0 and line["time"] > 0 for line in lines)
    for secret in (token, "confidential", "secret-name", "guessed"):
        assert secret not in text


def test_a_removed_token_is_refused_by_the_running_process(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    token = add_token(tokens, "Ann", "expert")
    headers = {"Authorization": f"Bearer {token}"}
    with started(folder, "--tokens", tokens, "--host", "0.0.0.0") as service:
        url = service.url.replace("0.0.0.0", "127.0.0.1")
        assert requests.get(f"{url}/v1/bank", headers=headers).json()["who"] == "Ann"
        remove_token(tokens, "Ann")
        assert requests.get(f"{url}/v1/bank", headers=headers).status_code == 401
