"""A wrapped model in a server: many threads at once, each gets the answers to its own inputs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from torch import Tensor, nn

import adanpc
from adanpc.models import Wrapped
from adanpc.models.extract import extract, find_head

WIDTH, CLASSES = 16, 8
THREADS, REQUESTS = 8, 40


class Pause(nn.Module):
    """Lets other threads run in the midst of a model."""

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.001)
        return inputs


class Net(nn.Module):
    """Calls its head by name, drops features in training, and waits between its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), Pause(), nn.ReLU(), Pause())
        self.drop = nn.Dropout(0.5)
        self.pause = Pause()
        self.head = nn.Linear(24, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(input=self.pause(self.drop(self.body(inputs))))
        return logits


def samples(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def wrapped_net(**options: Any) -> Wrapped:
    """A bank of 64 samples; the nearest row of sample i is row i."""
    inputs = samples(64)
    return adanpc.wrap(Net().train(), [(inputs, torch.arange(64) % CLASSES)], preset="paper", k=1, **options)


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


class Handler(BaseHTTPRequestHandler):
    """Answers {"inputs": [[…]]} with the nearest row and the class of each; with "keys", it learns from them."""

    wrapped: Wrapped

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "keys" in request:
            answer = self.wrapped.step(request["inputs"], keys=request["keys"])
            reply = {"joined": answer.joined.tolist()}
        else:
            answer = self.wrapped.predict(request["inputs"])
            reply = {"rows": answer.neighbors.ids[:, 0].tolist(), "labels": answer.labels.tolist()}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Nothing on stderr."""


@contextmanager
def serving(wrapped: Wrapped) -> Iterator[str]:
    handler = type("WrappedHandler", (Handler,), {"wrapped": wrapped})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_gives_each_request_its_own_answers() -> None:
    wrapped = wrapped_net()
    wrapped.model.drop.eval()  # type: ignore[union-attr]  # a part with a mode of its own
    before = modes(wrapped.model)
    inputs = samples(64).tolist()

    def ask(turn: int) -> tuple[list[int], dict[str, list[int]]]:
        rows = [(7 * turn + offset) % 64 for offset in range(1 + turn % 3)]
        body = json.dumps({"inputs": [inputs[row] for row in rows]}).encode()
        with urlopen(Request(address, body), timeout=300) as response:
            return rows, json.loads(response.read())

    with serving(wrapped) as address, ThreadPoolExecutor(THREADS) as clients:
        answers = list(clients.map(ask, range(THREADS * REQUESTS)))
    for rows, answer in answers:
        assert answer == {"rows": rows, "labels": [row % CLASSES for row in rows]}
    assert modes(wrapped.model) == before
    assert_no_hooks(wrapped.model)


def test_a_server_that_learns_from_some_requests_while_it_answers_others(tmp_path: Path) -> None:
    wrapped = wrapped_net(admission=adanpc.everyone)
    inputs = samples(64).tolist()
    stream = samples(THREADS * REQUESTS, seed=2)

    def ask(turn: int) -> bool:
        if turn % 4 == 0:
            request = {"inputs": [stream[turn].tolist()], "keys": [turn]}
        else:
            request = {"inputs": [inputs[turn % 64]]}
        with urlopen(Request(address, json.dumps(request).encode()), timeout=300) as response:
            reply = json.loads(response.read())
        return turn % 4 == 0 or reply["rows"] == [turn % 64]

    with serving(wrapped) as address, ThreadPoolExecutor(THREADS) as clients:
        assert all(clients.map(ask, range(THREADS * REQUESTS)))
    table = wrapped.classifier.bank.table("id", "key")
    assert table["id"].tolist() == list(range(64 + THREADS * REQUESTS // 4))
    assert sorted(table["key"][64:].tolist()) == list(range(0, THREADS * REQUESTS, 4))
    learned = wrapped.features(stream[table["key"][64:]])  # each row is the feature of its own request
    stored = wrapped.classifier.bank.rows(table["id"][64:])
    torch.testing.assert_close(stored, torch.nn.functional.normalize(learned))
    adanpc.save(wrapped, tmp_path / "bank")
    assert adanpc.load(tmp_path / "bank", wrapped.model).classifier.digest() == wrapped.classifier.digest()


def assert_no_hooks(model: nn.Module) -> None:
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_threads_that_learn_get_ids_of_their_own() -> None:
    wrapped = wrapped_net(admission=adanpc.everyone)
    before = modes(wrapped.model)
    with ThreadPoolExecutor(THREADS) as pool:
        stream = samples(160, seed=2)
        keys = torch.arange(1000, 1160)
        answers = list(pool.map(lambda turn: wrapped.step(stream[turn], keys=keys[turn]), keys.sub(1000).split(2)))
    joined = torch.cat([answer.joined for answer in answers])
    assert sorted(joined.tolist()) == list(range(64, 224))
    table = wrapped.classifier.bank.table()
    assert table["id"].tolist() == list(range(224))
    # Each row is the feature of the input that it was given for.
    order = joined.argsort()
    assert torch.equal(table["key"][64:], keys[order])
    expected = torch.nn.functional.normalize(wrapped.features(stream[order]))
    torch.testing.assert_close(wrapped.classifier.bank.rows(table["id"][64:]), expected)
    assert modes(wrapped.model) == before


@pytest.mark.parametrize("layer", ["body", "input of head", "head"])
def test_threads_at_several_layers_and_users_of_the_model_itself(layer: str) -> None:
    model = Net().train()
    inputs = samples(64)
    expected = extract(model, layer, inputs)[0]
    bare = nn.Sequential(model.body)  # another model that shares a part, and runs beside

    def work(turn: int) -> bool:
        rows = slice(turn % 60, turn % 60 + 1 + turn % 4)
        if turn % 5 == 0:
            model(inputs[rows])  # by someone who knows nothing of hooks
            return True
        if turn % 5 == 1:
            extract(bare, "0", inputs[rows])
            return True
        features, output = extract(model, layer, inputs[rows])
        return torch.allclose(features, expected[rows], atol=1e-6) and len(output) == len(features)

    before = modes(model)
    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(work, range(THREADS * REQUESTS)))
    assert modes(model) == before
    assert_no_hooks(model)


def test_heads_are_found_by_many_threads_at_once() -> None:
    model = Net()
    with ThreadPoolExecutor(THREADS) as pool:
        found = set(pool.map(lambda turn: find_head(model, samples(1 + turn % 3, turn)), range(64)))
    assert found == {("input of head", CLASSES)}


def test_a_run_that_fails_leaves_the_modes_to_the_others() -> None:
    wrapped = wrapped_net()
    before = modes(wrapped.model)
    inputs = samples(64)

    def work(turn: int) -> bool:
        if turn % 2:
            with pytest.raises(RuntimeError):
                wrapped.predict(torch.ones(1, WIDTH + 1))
            return True
        row = turn % 64
        return wrapped.predict(inputs[row : row + 1]).neighbors.ids[0, 0].item() == row

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(work, range(160)))
    assert modes(wrapped.model) == before
