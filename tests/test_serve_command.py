"""``adanpc serve``, ``adanpc sample`` and ``adanpc token``, as they are typed."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
import typer
from services import filled, queries
from typer.testing import CliRunner, Result

import adanpc
from adanpc import cli
from adanpc.lab import sample
from adanpc.lab.banks import of_run
from adanpc.lab.train.run import Run
from adanpc.serve import read_tokens


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    outcome = run(*arguments)
    assert outcome.exit_code == 2, outcome.output
    sentence: str = outcome.stderr
    assert sentence.startswith("adanpc: ")
    assert sentence.count("\n") == 1
    return sentence


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def while_serving(use: Callable[[str], Any], *arguments: object) -> tuple[Result, Any]:
    """What a command printed until it was ended, and what somebody found out who used the service meanwhile."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    found: list[Any] = []

    def user() -> None:
        try:
            while True:
                try:
                    requests.get(f"{url}/v2/health/live", timeout=100)
                    break
                except requests.ConnectionError:
                    if ended.wait(0.05):
                        return
            found.append(use(url))
        finally:
            if not ended.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    ended = threading.Event()
    thread = threading.Thread(target=user)
    thread.start()
    # A signal that comes late must not end the tests.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        outcome = run(*arguments, "--port", port)
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert outcome.exit_code == 0, outcome.output
    assert f"at {url}" in outcome.stdout
    return outcome, found[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()):
        pass
    return tmp_path / "bank"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> sample.Sample:
    """A sample that is small and hardly trained."""
    return sample.make(tmp_path_factory.mktemp("served") / "sample", count=3, steps=2)


def test_serve_answers_until_a_signal_and_keeps_what_was_learned(folder: Path) -> None:
    def use(url: str) -> int:
        requests.post(f"{url}/v1/predict", json={"features": queries(3).tolist()}).raise_for_status()
        return int(requests.get(f"{url}/v1/bank").json()["rows"])

    _, rows = while_serving(use, "serve", folder)
    with adanpc.DurableBank.open(folder) as bank:
        assert len(bank.contents) == rows


def test_a_signal_right_after_the_first_line_is_an_orderly_end_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service does not listen for signals yet when it prints its address, and somebody may be waiting for that."""
    printed = typer.echo

    def echo(line: str, **options: Any) -> None:
        printed(line, **options)
        if line.startswith("Serving"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(typer, "echo", echo)
    before = signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("the signal would end the process"))
    try:
        assert run("serve", folder, "--port", 0).exit_code == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    with adanpc.DurableBank.open(folder) as bank:  # nobody holds it any more
        assert not bank.notices


def test_serve_with_a_run_answers_images_and_shows_those_of_source_rows(made: sample.Sample, tmp_path: Path) -> None:
    bank = tmp_path / "bank"
    with adanpc.DurableBank.create(bank, of_run(Run(made.run))):
        pass

    def use(url: str) -> tuple[Any, Any, Any]:
        content = made.stream[0].read_bytes()
        answered = requests.post(f"{url}/v1/predict", data=content, headers={"Content-Type": "image/png"})
        row = answered.json()["answers"][0]["joined"]
        shown = requests.get(f"{url}/v1/rows/0/picture")
        return answered.json()["answers"][0], shown, requests.get(f"{url}/v1/rows/{row}/picture")

    options = ("--model", made.run, "--images", made.run, "--thumbnails")
    _, (answer, source, joined) = while_serving(use, "serve", bank, *options)
    assert len(answer["probs"]) == 6
    assert source.headers["content-type"] == joined.headers["content-type"] == "image/jpeg"


def test_serve_with_tokens_lets_their_owners_in(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    token = run("token", "add", tokens, "Ann", "--role", "expert").stdout.strip()

    def use(url: str) -> list[int]:
        headers = {"Authorization": f"Bearer {token}"}
        return [requests.get(f"{url}/v1/bank", headers=each).status_code for each in ({}, headers)]

    _, statuses = while_serving(use, "serve", folder, "--tokens", tokens)
    assert statuses == [401, 200]


def test_options_of_serve_are_limits(folder: Path) -> None:
    def use(url: str) -> list[int]:
        features = {"features": queries(3).tolist()}
        too_long = requests.post(f"{url}/v1/veto", data=bytes(5001))
        answers = [requests.post(f"{url}/v1/predict", json=features) for _ in range(2)]
        return [response.status_code for response in (too_long, *answers)]

    limits = ("--max-body", 5000, "--max-requests", 3, "--rate", 1000, "--max-connections", 50)
    _, statuses = while_serving(use, "serve", folder, *limits)
    assert statuses == [413, 200, 200]


def test_serve_refuses_in_one_sentence(folder: Path, tmp_path: Path, made: sample.Sample) -> None:
    assert "create tokens with adanpc token add, and pass their file as --tokens" in refusal(
        "serve", folder, "--host", "0.0.0.0"
    )
    assert "cannot be read" in refusal("serve", folder, "--tokens", tmp_path / "none")
    assert "nowhere" in refusal("serve", tmp_path / "nowhere", "--port", 0)
    assert "both make features" in refusal("serve", folder, "--model", made.run, "--encoder", "convnet", "--port", 0)
    for unused in (("--weights", made.run), ("--pretrained",)):
        assert "are for an --encoder: name it, or omit them" in refusal("serve", folder, *unused, "--port", 0)
    assert "--which last is for a --model" in refusal("serve", folder, "--which", "last", "--port", 0)
    assert "64 numbers, but the bank has 4" in refusal("serve", folder, "--model", made.run, "--port", 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1, port {port}" in refusal("serve", folder, "--port", port)
    with adanpc.DurableBank.open(folder):
        assert "in use" in refusal("serve", folder, "--port", 0)


def test_serve_by_the_name_of_an_encoder_that_does_not_fit(folder: Path) -> None:
    assert "but the bank has 4: choose another model" in refusal("serve", folder, "--encoder", "convnet", "--port", 0)


def test_a_sample_is_served_with_something_to_look_at(made: sample.Sample) -> None:
    def look(url: str) -> tuple[Any, Any]:
        asked: list[Any] = []
        while len(asked) < 18:
            asked = requests.get(f"{url}/v1/queries").json()["queries"]
            time.sleep(0.05)
        return requests.get(f"{url}/v1/bank").json(), asked

    folder = made.bank.parent
    outcome, (bank, first) = while_serving(look, "sample", folder)
    assert bank["rows"] == bank["source_rows"] + bank["stream_rows"]
    assert bank["source_rows"] == made.source_rows
    assert bank["stream_rows"] > 0
    assert all(query["picture"] for query in first)
    assert "Serving" in outcome.stdout
    _, (again, asked) = while_serving(look, "sample", folder)
    assert again["rows"] == bank["rows"]  # it is asked about others then, and learns nothing
    before = [query["query"] for query in first]
    assert set(before) <= {query["query"] for query in asked}  # what was answered the first time is still there
    assert all(query["joined"] is None for query in asked if query["query"] not in before)


def test_tokens_are_added_listed_and_removed(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    token = run("token", "add", file, "Ann", "--role", "expert").stdout.strip()
    assert len(token) >= 40
    run("token", "add", file, "Bob")
    assert run("token", "list", file).stdout.splitlines() == ["expert   Ann", "predict  Bob"]
    listed = json.loads(run("token", "list", file, "--json").stdout)
    assert listed == {"tokens": [{"name": "Ann", "role": "expert"}, {"name": "Bob", "role": "predict"}]}
    assert "Ann is refused from now on" in run("token", "remove", file, "Ann").stdout
    assert [entry.name for entry in read_tokens(file)] == ["Bob"]
    assert "has no token of 'Ann'" in refusal("token", "remove", file, "Ann")
    assert "role must be one of predict, expert, admin" in refusal("token", "add", file, "Eve", "--role", "boss")
    assert "cannot be read" in refusal("token", "list", tmp_path / "none")
    elsewhere = tmp_path / "none" / "tokens"
    assert f"{elsewhere} was not written (No such file or directory)" in refusal("token", "add", elsewhere, "Ann")
