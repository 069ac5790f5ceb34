"""Clients that stall: in the head of a request, in its body, or before they have read the response."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from services import filled, queries

import adanpc
from adanpc.serve import Limits, create, serving
from adanpc.serve.limits import Body, Held

INFER = "/v2/models/adanpc/infer"
PATIENCE = 3.0  # seconds; short, since these tests wait for its end
STALLED = 60  # clients at a time


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[adanpc.DurableBank]:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()) as opened:
        yield opened


def connected(stack: ExitStack, url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return stack.enter_context(socket.create_connection((host, int(port)), timeout=300))


def everything_from(stalled: socket.socket) -> bytes:
    """What a client receives until the service ends its connection."""
    received = b""
    while part := stalled.recv(2**16):
        received += part
    return received


def refusal_in(received: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the JSON document of a response, which must be whole."""
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert f"content-length: {len(body)}" in lines
    assert "content-type: application/json" in lines
    assert "connection: close" in lines
    return int(lines[0].split()[1]), json.loads(body)


def asked(url: str) -> int:
    return requests.post(f"{url}/v1/predict", json={"features": queries(1).tolist()}).status_code


@pytest.mark.parametrize("sent", [b"", b"P", b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_a_request_that_does_not_begin_or_stops_in_its_head_is_refused(bank: adanpc.DurableBank, sent: bytes) -> None:
    with serving(create(bank, limits=Limits(patience=PATIENCE))) as url, ExitStack() as stack:
        stalled = [connected(stack, url) for _ in range(STALLED)]
        for one in stalled:
            one.sendall(sent)
        assert asked(url) == 200  # meanwhile
        for one in stalled:
            status, document = refusal_in(everything_from(one))
            assert (status, document["code"]) == (408, "too-slow")
        assert asked(url) == 200


@pytest.mark.parametrize(
    ("path", "head"),
    [
        ("/v1/predict", "Content-Length: 100000"),
        ("/v1/veto", "Transfer-Encoding: chunked"),
        (INFER, "Content-Length: 100000"),
    ],
)
def test_a_body_that_stops_is_refused_and_its_bytes_are_freed(bank: adanpc.DurableBank, path: str, head: str) -> None:
    """The service waits for as many as it has room for, and refuses the others at once."""
    app = create(bank, limits=Limits(body=100_000, patience=PATIENCE))
    first = bytes(99_000)
    if "chunked" in head:
        first = b"%x\r\n" % len(first) + first
    with serving(app) as url, ExitStack() as stack:
        stalled = [connected(stack, url) for _ in range(STALLED)]
        for one in stalled:
            one.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n\r\n".encode() + first)
        found = [refusal_in_the_first(one) for one in stalled]
        codes = {(status, document["code"]) for status, document in found}
        assert codes == {(408, "too-slow"), (429, "too-many-requests")}
        assert len(app.state.service.held) == 0
        assert asked(url) == 200


def refusal_in_the_first(stalled: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the JSON document of the first response on a connection."""
    received = everything_from(stalled)
    head, _, rest = received.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    length = next(int(line.split(": ")[1]) for line in lines if line.startswith("content-length: "))
    return int(lines[0].split()[1]), json.loads(rest[:length])


def test_a_body_that_trickles_is_refused(bank: adanpc.DurableBank) -> None:
    """A byte now and then is not enough, however often it comes."""
    with serving(create(bank, limits=Limits(patience=PATIENCE))) as url, ExitStack() as stack:
        trickling = connected(stack, url)
        trickling.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n")
        trickling.settimeout(0.05)
        received = b""
        while not received:
            try:
                trickling.sendall(b"x")
                received = trickling.recv(2**16)
            except TimeoutError:
                continue
        assert received.startswith(b"HTTP/1.1 408 ")


class Hours(asyncio.SelectorEventLoop):
    """An event loop on whose clock nearly all the time that a body has passes before each part of it."""

    now = 0.0

    def time(self) -> float:
        return self.now


def test_a_body_that_is_slow_but_steady_is_read() -> None:
    """Each part comes in the time that is given for it, and all of them together take far longer than that."""
    parts = 100
    loop = Hours()

    async def receive() -> Any:
        nonlocal parts
        parts -= 1
        loop.now += 0.9 * PATIENCE
        await asyncio.sleep(0)
        return {"type": "http.request", "body": bytes(2**16), "more_body": parts > 0}

    async def received() -> int:
        body = Body(receive, Limits(patience=PATIENCE), Held(2**30))
        while parts:
            await body.receive()
        return body.received

    try:
        assert loop.run_until_complete(received()) == 100 * 2**16
    finally:
        loop.close()


def test_a_response_that_is_not_read_is_given_up(bank: adanpc.DurableBank) -> None:
    """Otherwise those who never read would soon be as many as are answered at a time."""
    limits = Limits(requests=4, patience=PATIENCE)
    app = create(bank, limits=limits)
    bank.apply(adanpc.Append(torch.eye(4)[[0] * 60_000], torch.zeros(60_000, dtype=torch.int64)))
    with serving(app) as url, ExitStack() as stack:
        for _ in range(limits.requests):
            stalled = connected(stack, url)
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for _ in range(20):
                stalled.sendall(b"GET /v1/map?limit=100000 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        while asked(url) != 429:  # all are busy with responses that nobody reads
            pass
        while asked(url) != 200:
            pass


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nHo st: x\r\n\r\n"]
)
def test_what_is_not_http_is_refused_in_the_one_shape(bank: adanpc.DurableBank, sent: bytes) -> None:
    with serving(create(bank)) as url, ExitStack() as stack:
        other = connected(stack, url)
        other.sendall(sent)
        status, document = refusal_in(everything_from(other))
        assert (status, document["code"]) == (400, "bad-request")


@pytest.mark.parametrize("path", ["/v1/predict", INFER])
def test_a_chunk_that_is_none_is_refused_and_ends_the_connection(bank: adanpc.DurableBank, path: str) -> None:
    with serving(create(bank)) as url, ExitStack() as stack:
        other = connected(stack, url)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        other.sendall(head.encode() + b"2\r\n{}\r\nnone\r\n")
        status, document = refusal_in(everything_from(other))
        assert (status, document["code"]) == (400, "bad-request")
        assert asked(url) == 200


def test_a_client_that_has_said_all_it_has_to_say_gets_its_answer(bank: adanpc.DurableBank) -> None:
    """As nc and socat do when their input ends: they close the connection in one direction only."""
    body = json.dumps({"features": queries(1).tolist()}).encode()
    head = f"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    with serving(create(bank)) as url, ExitStack() as stack:
        other = connected(stack, url)
        other.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        other.shutdown(socket.SHUT_WR)
        answered = everything_from(other)
        assert answered.startswith(b"HTTP/1.1 200")
        assert len(json.loads(answered.partition(b"\r\n\r\n")[2])["answers"]) == 1
        broken_off = connected(stack, url)
        broken_off.sendall(head.encode() + b"\r\n{")
        broken_off.shutdown(socket.SHUT_WR)
        assert b"200" not in everything_from(broken_off)
        assert asked(url) == 200


def test_in_the_middle_of_a_response_there_is_no_second_one(bank: adanpc.DurableBank) -> None:
    """The events are a response without end, and the body of a request for them is not needed to begin it."""
    with serving(create(bank)) as url, ExitStack() as stack:
        other = connected(stack, url)
        other.sendall(b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        begun = other.recv(2**16)
        assert begun.startswith(b"HTTP/1.1 200")
        other.sendall(b"none\r\n")
        assert b"HTTP/1.1" not in everything_from(other)
        assert asked(url) == 200


def test_a_head_that_is_too_large_is_refused_with_its_limit(bank: adanpc.DurableBank) -> None:
    with serving(create(bank)) as url, ExitStack() as stack:
        other = connected(stack, url)
        other.sendall(b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 2**16)
        status, document = refusal_in(everything_from(other))
        assert (status, document["code"]) == (400, "bad-request")
        assert "its head has more than 65,536 bytes" in document["error"]


@pytest.mark.parametrize(
    "path", ["/", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/adanpc/ready", "/v1/log", "/page/page.css"]
)
def test_those_who_only_look_whether_it_answers_may_ask_for_the_head(bank: adanpc.DurableBank, path: str) -> None:
    with serving(create(bank)) as url:
        found = requests.head(url + path)
        assert (found.status_code, found.content) == (200, b"")
        assert found.headers["Content-Length"] == requests.get(url + path).headers["Content-Length"]


def test_the_head_of_events_is_all_of_the_answer(bank: adanpc.DurableBank) -> None:
    """They have no end, so a connection on which they were still being sent could not be used again."""
    app = create(bank)
    with serving(app) as url, requests.Session() as session:
        for _ in range(3):
            found = session.head(f"{url}/v1/events")
            assert found.headers["Content-Type"].startswith("text/event-stream")
        assert session.get(f"{url}/v2").status_code == 200
        assert session.head(f"{url}/v1/predict").status_code == 405
