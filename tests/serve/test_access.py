"""Who comes in, what they may do, how much of it, and in which shape they are refused."""

from __future__ import annotations

import gzip
import hmac
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from services import CLASSES, encode, filled, png, queries

import adanpc
from adanpc.errors import AdaNPCError
from adanpc.serve import Limits, Tokens, add_token, create, read_tokens, remove_token, serving
from adanpc.serve.limits import Rates
from adanpc.serve.tokens import ROLES, TokenError

INFER = "/v2/models/adanpc/infer"
ONE_QUERY = {"features": [1.0, 0.2, 0.0, 0.1]}


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[adanpc.DurableBank]:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()) as opened:
        yield opened


@pytest.fixture
def url(bank: adanpc.DurableBank) -> Iterator[str]:
    with serving(create(bank, encoder=encode)) as address:
        yield address


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# Tokens


def test_each_role_may_do_what_those_before_it_may(bank: adanpc.DurableBank, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    tokens = {role: add_token(file, role.title(), role) for role in ROLES}
    requests_by_role: dict[str, list[tuple[str, str, Any]]] = {
        "predict": [
            ("GET", "/v1/bank", None),
            ("GET", "/metrics", None),
            ("GET", "/openapi.json", None),
            ("POST", "/v1/predict?adapt=false", ONE_QUERY),
            ("POST", "/v1/preview", ONE_QUERY),
        ],
        "expert": [
            ("POST", "/v1/veto", {"rows": [1]}),
            ("POST", "/v1/restore", {"rows": [1]}),
            ("POST", "/v1/relabel", {"rows": [1], "label": 0}),
            ("POST", "/v1/undo", {"position": 4}),
            ("POST", "/v1/rollback", {"to": 1, "preview": True}),
            ("POST", "/v1/rollback", {"to": 1}),
        ],
        "admin": [("POST", "/v1/delete", {"rows": [2], "why": "asked for"})],
    }
    with serving(create(bank, tokens=Tokens(file))) as url:
        for needed, calls in requests_by_role.items():
            for method, path, body in calls:
                nobody = requests.request(method, url + path, json=body)
                assert (nobody.status_code, nobody.json()["code"]) == (401, "unauthorized"), path
                assert nobody.headers["WWW-Authenticate"] == "Bearer"
                for role in ROLES[: ROLES.index(needed)]:
                    refused = requests.request(method, url + path, json=body, headers=bearer(tokens[role]))
                    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden"), path
                done = requests.request(method, url + path, json=body, headers=bearer(tokens[needed]))
                assert done.status_code == 200, done.text
        assert requests.get(f"{url}/v1/bank", headers=bearer(tokens["expert"])).json()["who"] == "Expert"
    assert [entry["who"] for entry in _log(bank)] == ["Admin", "Expert", "Expert", "Expert", "Expert", "Expert"]


def _log(bank: adanpc.DurableBank) -> list[dict[str, Any]]:
    with serving(create(bank)) as url:
        entries: list[dict[str, Any]] = requests.get(f"{url}/v1/log").json()["entries"]
        return entries


def test_a_name_in_a_header_counts_only_where_there_are_no_tokens(bank: adanpc.DurableBank, tmp_path: Path) -> None:
    token = add_token(tmp_path / "tokens", "Ann", "expert")
    with serving(create(bank, tokens=Tokens(tmp_path / "tokens"))) as url:
        headers = {**bearer(token), "X-Expert": "Bob"}
        requests.post(f"{url}/v1/veto", json={"rows": [1]}, headers=headers).raise_for_status()
    assert bank.contents.judgments[1][0].who == "Ann"


def test_callers_with_names_have_request_ids_of_their_own(bank: adanpc.DurableBank, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    tokens = [add_token(file, name, "predict") for name in ("Ann", "Bob")]
    with serving(create(bank, tokens=Tokens(file))) as url:
        for number, path in enumerate(("v1/predict", "v2/models/adanpc/infer", "v2/models/adanpc/versions/1/infer")):
            features = queries(1, seed=number).tolist()
            tensor = {"name": "features", "shape": [1, 4], "datatype": "FP32", "data": features}
            body: Any = {"inputs": [tensor], "id": f"photo {number}"}
            if path == "v1/predict":
                body = {"features": features, "request": f"photo {number}"}
            positions = []
            for token in (*tokens, *tokens):
                answered = requests.post(f"{url}/{path}", json=body, headers=bearer(token))
                assert answered.status_code == 200, answered.text
                positions.append(bank.position)
                assert "Ann" not in answered.text  # the id in the answer is the one that was given
            assert positions[1] > positions[0]  # Bob's request is another one than Ann's
            assert positions[1:] == positions[1:2] * 3  # and each counts once
        body["id"] = "x" * 201
        refused = requests.post(f"{url}/{path}", json=body, headers=bearer(token))
        assert refused.status_code == 422
        assert "at most 200 characters, got 201" in refused.json()["error"]


def test_a_token_is_in_no_file_and_is_refused_the_moment_it_is_removed(
    bank: adanpc.DurableBank, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    first = add_token(file, "Ann", "expert")
    with serving(create(bank, tokens=Tokens(file))) as url, requests.Session() as session:
        assert session.get(f"{url}/v1/bank", headers=bearer(first)).status_code == 200
        second = add_token(file, "Bob", "predict")
        assert session.get(f"{url}/v1/bank", headers=bearer(second)).status_code == 200
        assert first not in file.read_text()
        assert second not in file.read_text()
        assert session.get(f"{url}/v1/bank", headers=bearer(read_tokens(file)[0].sha256)).status_code == 401
        remove_token(file, "Ann")
        assert session.get(f"{url}/v1/bank", headers=bearer(first)).status_code == 401
        assert session.get(f"{url}/v1/bank", headers=bearer(second)).status_code == 200


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"tokens": [{"name": "x"}]}', b"\xff"])
def test_nobody_comes_in_while_the_tokens_cannot_be_read(
    bank: adanpc.DurableBank, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "tokens"
    token = add_token(file, "Ann", "admin")
    with serving(create(bank, tokens=Tokens(file))) as url:
        kept = file.read_bytes()
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        refused = requests.get(f"{url}/v1/bank", headers=bearer(token))
        assert (refused.status_code, refused.json()["code"]) == (503, "bad-tokens")
        file.write_bytes(kept)
        assert requests.get(f"{url}/v1/bank", headers=bearer(token)).status_code == 200


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic YTpi", "bearer\u00e9 x", "Bearer " + "x" * 5000])
def test_other_credentials_are_none(bank: adanpc.DurableBank, tmp_path: Path, header: str) -> None:
    add_token(tmp_path / "tokens", "Ann", "admin")
    with serving(create(bank, tokens=Tokens(tmp_path / "tokens"))) as url:
        refused = requests.get(f"{url}/v1/bank", headers={"Authorization": header.encode()})
        assert refused.status_code == 401


def test_every_entry_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens"
    tokens = [add_token(file, name, "predict") for name in ("Ann", "Bob", "Eve")]
    known = Tokens(file)
    compared = []
    compare = hmac.compare_digest

    def counting(one: str, other: str) -> bool:
        compared.append(one)
        return compare(one, other)

    monkeypatch.setattr("adanpc.serve.tokens.hmac.compare_digest", counting)
    for token, name in zip([*tokens, "another"], ["Ann", "Bob", "Eve", None], strict=True):
        compared.clear()
        caller = known.caller(token)
        assert getattr(caller, "name", None) == name
        assert len(compared) == 3  # whoever it is, and nobody


def test_a_file_of_tokens_is_written_and_checked_with_care(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    with pytest.raises(TokenError, match="make it by adanpc token add"):
        Tokens(file)
    add_token(file, "Ann", "expert")
    assert file.stat().st_mode & 0o077 == 0, "nobody else has to read the hashes"
    with pytest.raises(AdaNPCError, match="has a token of 'Ann' already"):
        add_token(file, "Ann", "expert")
    with pytest.raises(AdaNPCError, match="role must be one of predict, expert, admin"):
        add_token(file, "Bob", "boss")
    for name in ("", "x" * 101, "two\nlines"):
        with pytest.raises(AdaNPCError, match="printable characters"):
            add_token(file, name, "expert")
    with pytest.raises(AdaNPCError, match="has no token of 'Bob'; it has: Ann"):
        remove_token(file, "Bob")
    document = json.loads(file.read_text())
    document["tokens"][0]["role"] = "boss"
    file.write_text(json.dumps(document))
    with pytest.raises(TokenError, match="an entry that is no token, 'Ann'"):
        read_tokens(file)


def test_the_page_and_health_are_open_and_tell_nothing(bank: adanpc.DurableBank, tmp_path: Path) -> None:
    add_token(tmp_path / "tokens", "Zebulon", "admin")
    with serving(create(bank, tokens=Tokens(tmp_path / "tokens"))) as url:
        for path in ("/", "/page/main.js", "/page/page.css", "/page/icon.svg", "/v2/health/live", "/v2/health/ready"):
            shown = requests.get(url + path)
            assert shown.status_code == 200
            assert "Zebulon" not in shown.text
            assert not set(CLASSES) & set(re.findall(r"\w+", shown.text))


# Hosts, pages and headers


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"Host": "localhost:1"}, True),
        ({"Host": "[::1]"}, True),
        ({"Host": "LOCALHOST"}, True),
        ({"Host": "adanpc.example"}, False),
        ({"Host": "127.0.0.1.adanpc.example"}, False),
        ({"Host": "[::1"}, False),
        ({"Origin": "http://adanpc.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://[::1"}, False),
        ({"Origin": "http://127.0.0.1:1"}, False),
    ],
)
def test_other_names_and_pages_of_other_hosts_are_refused(url: str, headers: dict[str, str], allowed: bool) -> None:
    for path in ("/", "/v1/bank", "/metrics", "/v2/health/live", "/page/main.js"):
        answered = requests.get(url + path, headers=headers)
        assert answered.status_code == (200 if allowed else 403)
        if not allowed:
            assert answered.json()["code"] == "forbidden"


def test_its_own_page_may_ask(url: str) -> None:
    assert requests.get(f"{url}/v1/bank", headers={"Origin": url}).status_code == 200


def test_with_tokens_it_answers_to_other_names_but_not_to_other_pages(bank: adanpc.DurableBank, tmp_path: Path) -> None:
    token = add_token(tmp_path / "tokens", "Ann", "admin")
    with serving(create(bank, tokens=Tokens(tmp_path / "tokens"))) as url:
        by_name = {**bearer(token), "Host": "adanpc.example"}
        assert requests.get(f"{url}/v1/bank", headers=by_name).status_code == 200
        assert requests.get(f"{url}/v1/bank", headers={**by_name, "Origin": "http://evil"}).status_code == 403


def test_every_answer_tells_browsers_to_keep_to_this_host(url: str) -> None:
    calls = [
        requests.get(f"{url}/"),
        requests.get(f"{url}/v1/bank"),
        requests.get(f"{url}/nothing"),
        requests.post(f"{url}/v1/veto", data=b"{"),
        requests.get(f"{url}/v1/bank", headers={"Host": "evil"}),
    ]
    for answered in calls:
        policy = answered.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answered.headers["X-Content-Type-Options"] == "nosniff"
        assert answered.headers["X-Frame-Options"] == "DENY"
        assert answered.headers["Referrer-Policy"] == "no-referrer"
        assert answered.headers["Cache-Control"] == "no-store"
        assert answered.headers["X-Request-Id"]
        assert "Server" not in answered.headers


def test_a_request_keeps_the_id_that_its_client_gave_if_it_is_harmless(url: str) -> None:
    assert requests.get(f"{url}/", headers={"X-Request-Id": "shift-7"}).headers["X-Request-Id"] == "shift-7"
    for given in ("two words", "x" * 101, '"'):
        assert requests.get(f"{url}/", headers={"X-Request-Id": given}).headers["X-Request-Id"] != given


@pytest.mark.parametrize("path", ["/page/../app.py", "/page/%2e%2e/app.py", "/page//etc/passwd", "/page/", "/page/x"])
def test_no_path_of_a_request_reaches_the_file_system(url: str, path: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answered = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answered.startswith(b"HTTP/1.1 404")
    assert b'"code":"not-found"' in answered


# One shape of error


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/nothing", b"", 404, "not-found"),
        ("GET", "/v1/nothing", b"", 404, "not-found"),
        ("DELETE", "/v1/bank", b"", 405, "wrong-method"),
        ("GET", "/v1/predict", b"", 405, "wrong-method"),
        ("POST", "/v1/veto", b"{", 415, "unsupported-type"),
        ("POST", "/v1/veto", b"", 415, "unsupported-type"),
        ("GET", "/v1/rows/x", b"", 422, "invalid-value"),
        ("GET", "/v1/rows/99999999999999999999", b"", 422, "invalid-value"),
        ("GET", "/v1/queries?limit=0", b"", 422, "invalid-value"),
        ("GET", "/v1/log?kind=none", b"", 422, "invalid-value"),
        ("GET", "/v1/queries/q-1", b"", 404, "not-found"),
        ("POST", "/v1/predict", b"[[1, 2]]", 415, "unsupported-type"),
    ],
)
def test_every_refusal_is_a_sentence_and_a_code(
    url: str, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    refused = requests.request(method, url + path, data=content)
    assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert set(refused.json()) == {"error", "code"}
    assert refused.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        ('{"features": [[1, 2, 3, 4], [1, 2]]}', 400, "bad-request"),
        ('{"features": [[1, 2]]}', 422, "bad-features"),
        ('{"features": [1, 2, 3, "four"]}', 422, "invalid-value"),
        ('{"features": []}', 422, "invalid-value"),
        ('{"features": [[0, 0, 0, 0]]}', 422, "bad-features"),
        ('{"features": [[1e400, 0, 0, 0]]}', 422, "bad-features"),
        ('{"features": [1, 0, 0, 0], "request": 3}', 422, "invalid-value"),
    ],
)
def test_features_that_cannot_be_used_are_refused(
    url: str, bank: adanpc.DurableBank, content: str, status: int, code: str
) -> None:
    refused = requests.post(f"{url}/v1/predict", data=content, headers={"Content-Type": "application/json"})
    assert (refused.status_code, refused.json()["code"]) == (status, code), refused.text
    assert bank.position == 1


@pytest.mark.parametrize(
    ("route", "body", "place"),
    [
        ("predict", {"features": [[1, 0, "x", 0]]}, "features.0.2: "),
        ("predict", {"features": "none"}, "features: "),
        ("relabel", {"rows": [1], "label": 1.5}, "body.label: "),
        ("relabel", {"rows": [1, "x"], "label": 1}, "body.rows.1: "),
    ],
)
def test_a_refusal_names_the_place_in_what_was_sent(url: str, route: str, body: Any, place: str) -> None:
    refused = requests.post(f"{url}/v1/{route}", json=body)
    assert refused.status_code == 422
    assert refused.json()["error"].startswith(f"{place}Input should be")


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_json_that_is_not_called_json_is_refused_by_its_type(url: str, bank: adanpc.DurableBank, kind: str) -> None:
    """As sent by curl -d without a header."""
    refused = requests.post(f"{url}/v1/veto", data='{"rows": [1]}', headers={"Content-Type": kind})
    assert (refused.status_code, refused.json()["code"]) == (415, "unsupported-type")
    assert refused.json()["error"] == f"the body must be application/json, got {kind!r}"
    for content in ("{", "", '{"rows": 1}'):
        refused = requests.post(f"{url}/v1/veto", data=content, headers={"Content-Type": "application/json"})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid-value")
    assert bank.position == 1


def test_a_request_with_two_lengths_is_refused_and_nothing_after_it_is_read(url: str) -> None:
    """A proxy that believes the other length would take the rest for a part of somebody else's request."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=300) as sender:
        head = f"POST /v1/veto HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        smuggled = f"GET /v1/bank HTTP/1.1\r\nHost: {host}\r\n\r\n"
        sender.sendall(f"{head}0\r\n\r\n{smuggled}".encode())
        received = b""
        while part := sender.recv(2**16):
            received += part
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1


def test_every_route_reads_compressed_bodies(url: str, bank: adanpc.DurableBank) -> None:
    def sent(path: str, content: bytes, kind: str) -> requests.Response:
        headers = {"Content-Type": kind, "Content-Encoding": "gzip"}
        return requests.post(url + path, data=gzip.compress(content), headers=headers)

    plain = requests.post(f"{url}/v1/preview", json=ONE_QUERY).json()
    assert sent("/v1/preview", json.dumps(ONE_QUERY).encode(), "application/json").json() == plain
    assert sent("/v1/predict", png(1), "image/png").status_code == 200
    assert sent("/v1/veto", b'{"rows": [1]}', "application/json").status_code == 200
    assert bank.contents.judgments[1][0].verdict == "veto"
    assert sent("/v1/veto", b"{", "application/json").status_code == 422


def test_an_error_that_nobody_foresaw_is_told_without_its_text(bank: adanpc.DurableBank) -> None:
    def broken(images: Any) -> Any:
        raise RuntimeError("the weights are in /secret/place")

    with serving(create(bank, encoder=broken)) as url:
        answered = requests.post(f"{url}/v1/predict", data=png(1), headers={"Content-Type": "image/png"})
        assert answered.status_code == 500
        assert answered.json() == {
            "error": "something went wrong inside the service: see its log", "code": "internal",
        }  # fmt: skip
        assert answered.headers["X-Content-Type-Options"] == "nosniff"
        assert answered.headers["X-Request-Id"]


# Limits


def test_bodies_pixels_and_batches_are_bounded(bank: adanpc.DurableBank) -> None:
    limits = Limits(body=20_000, pixels=100, queries=3)
    with serving(create(bank, encoder=encode, limits=limits)) as url:
        image = {"Content-Type": "image/png"}
        assert requests.post(f"{url}/v1/predict", data=png(1, side=10), headers=image).status_code == 200
        too_large = [
            requests.post(f"{url}/v1/predict", data=png(1, side=11), headers=image),
            requests.post(f"{url}/v1/predict", json={"features": queries(4).tolist()}),
            requests.post(f"{url}/v1/predict?adapt=false", json={"features": queries(4).tolist()}),
            requests.post(f"{url}/v1/predict", data=bytes(20_001), headers=image),
            requests.post(f"{url}/v1/predict", data=iter([bytes(10_000)] * 3), headers=image),
            requests.post(f"{url}/v1/veto", data=bytes(20_001)),
        ]
        for refused in too_large:
            assert (refused.status_code, refused.json()["code"]) == (413, "too-large"), refused.text
        assert "at most 100 pixels" in too_large[0].json()["error"]


def test_a_caller_that_is_too_fast_waits_and_others_do_not(bank: adanpc.DurableBank, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    fast = add_token(file, "Fast", "predict")
    slow = add_token(file, "Slow", "predict")
    limits = Limits(rate=0.001, burst=3.0)
    with serving(create(bank, tokens=Tokens(file), limits=limits)) as url:
        statuses = [requests.get(f"{url}/v1/bank", headers=bearer(fast)).status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        refused = requests.get(f"{url}/v1/bank", headers=bearer(fast))
        assert refused.json()["code"] == "too-many-requests"
        assert refused.headers["Retry-After"] == "1"
        assert requests.get(f"{url}/v1/bank", headers=bearer(slow)).status_code == 200


def test_a_budget_fills_with_time() -> None:
    rates = Rates(rate=2.0, burst=3.0)
    assert [rates.spend("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert rates.spend("b", 0.0)
    assert not rates.spend("a", 0.4)
    assert rates.spend("a", 0.6)
    assert [rates.spend("a", 100.0) for _ in range(4)] == [True, True, True, False]


def test_only_so_many_are_answered_or_listen_at_a_time(bank: adanpc.DurableBank) -> None:
    with serving(create(bank, limits=Limits(requests=2))) as url:
        with _listening(url), _listening(url):
            refused = requests.get(f"{url}/v1/bank")
            assert (refused.status_code, refused.json()["code"]) == (429, "too-many-requests")
        _until_answered(url)
    with serving(create(bank, limits=Limits(listeners=1))) as url:
        with _listening(url):
            assert requests.get(f"{url}/v1/events").status_code == 429
        _until_answered(url)


def test_only_so_many_bytes_of_requests_are_in_memory(bank: adanpc.DurableBank) -> None:
    app = create(bank, limits=Limits(body=100_000))
    held = app.state.service.held
    with serving(app) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with ExitStack() as stack:
            for number in range(8):
                slow = stack.enter_context(socket.create_connection((host, int(port))))
                head = f"POST /v1/predict HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100000\r\n\r\n"
                slow.sendall(head.encode() + bytes(99_000))
                while len(held) < 99_000 * (number + 1):  # it has been read
                    pass
            sent = [
                requests.post(f"{url}/v1/predict", data=bytes(9000)),
                requests.post(f"{url}/v1/predict", data=iter([bytes(5000)] * 2)),  # without a stated length
                requests.post(f"{url}{INFER}", data=iter([bytes(5000)] * 2)),
                requests.post(f"{url}{INFER}", data=gzip.compress(bytes(9000)), headers={"Content-Encoding": "gzip"}),
            ]
            for refused in sent:
                assert (refused.status_code, refused.json()["code"]) == (429, "too-many-requests"), refused.text
                assert refused.headers["Retry-After"] == "1"
                assert "requests of 800,000 bytes" in refused.json()["error"]
            assert requests.post(f"{url}/v1/predict", json={"features": queries(1).tolist()}).status_code == 200
        while len(held):  # those who sent half of a request have hung up
            pass
        assert requests.post(f"{url}/v1/predict", json={"features": queries(1).tolist()}).status_code == 200
    assert len(held) == 0


def test_only_so_many_connections_are_open(bank: adanpc.DurableBank) -> None:
    with serving(create(bank, limits=Limits(connections=2))) as url:
        with _listening(url), _listening(url):
            refused = requests.get(f"{url}/v1/bank")
            assert (refused.status_code, refused.json()["code"]) == (429, "too-many-requests")
            assert refused.headers["Connection"] == "close"
        _until_answered(url)


@contextmanager
def _listening(url: str) -> Iterator[None]:
    with requests.get(f"{url}/v1/events", stream=True) as stream:
        lines = stream.iter_lines(chunk_size=1)
        assert next(lines) == b": ping"
        yield


def _until_answered(url: str) -> None:
    """Waits until those who hung up are forgotten."""
    while requests.get(f"{url}/v1/bank").status_code != 200:
        pass


def test_limits_must_be_positive() -> None:
    for name in ("body", "pixels", "queries", "requests", "connections", "listeners", "rate", "burst"):
        with pytest.raises(AdaNPCError, match=name):
            Limits(**{name: 0})
