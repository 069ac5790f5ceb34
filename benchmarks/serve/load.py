"""Clients: connections that each send a request, wait for its answer, and send the next."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

WIRES = ("binary", "json")  # how features are sent, and answers


class Load(NamedTuple):
    """What clients saw."""

    seconds: float
    latencies: Sequence[float]  # seconds of each answer, in ascending order

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.latencies) / self.seconds

    def quantile(self, part: float) -> float:
        """The latency that so large a part of all answers kept within, in milliseconds."""
        return 1000 * self.latencies[min(int(part * len(self.latencies)), len(self.latencies) - 1)]


class Requests:
    """Requests of one query each, as a client of the Open Inference Protocol sends them; without end.

    They are written beforehand, but for their ids: the clients share the machine with the server.

    Args:
        features: of the queries, (N, D), which are sent again and again.
        wire: one of ``WIRES``.
    """

    def __init__(self, features: np.ndarray, wire: str) -> None:
        self._wire = wire
        self._bodies = [_body(row, wire) for row in features]
        self._number = 0

    def to(self, address: str, *, ids: bool = False) -> Iterator[bytes]:
        """The next ones, to a server at this host, port and path."""
        host, _, path = address.partition("/")
        start = f"POST /{path} HTTP/1.1\r\nHost: {host}\r\n"
        while True:
            text, numbers = self._bodies[self._number % len(self._bodies)]
            self._number += 1
            if ids:
                text = f'{{"id": "{time.time_ns()}-{self._number}", '.encode() + text[1:]
            head = f"{start}Content-Length: {len(text) + len(numbers)}\r\n"
            if self._wire == "json":
                head += "Content-Type: application/json\r\n"
            else:
                head += "Content-Type: application/octet-stream\r\n"
                head += f"Inference-Header-Content-Length: {len(text)}\r\n"
            yield f"{head}\r\n".encode() + text + numbers


def _body(row: np.ndarray, wire: str) -> tuple[bytes, bytes]:
    """The JSON document of a request, and the bytes behind it."""
    tensor: dict[str, Any] = {"name": "features", "shape": [1, len(row)], "datatype": "FP32"}
    if wire == "json":
        return json.dumps({"inputs": [{**tensor, "data": row.tolist()}]}).encode(), b""
    tensor["parameters"] = {"binary_data_size": row.nbytes}
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    return json.dumps(document).encode(), row.tobytes()


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""
        self.sent = 0.0

    def send(self, request: bytes) -> None:
        self.sent = time.perf_counter()
        self.socket.sendall(request)

    def answered(self) -> bool:
        """Reads what has come; whether the answer is complete."""
        self.received += self.socket.recv(2**16)
        head, separator, body = self.received.partition(b"\r\n\r\n")
        if not separator:
            return False
        lower = head.lower()
        if not lower.startswith(b"http/1.1 200"):
            raise RuntimeError(f"the server refused a request: {self.received[:500]!r}")
        length = int(lower.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return False
        self.received = b""
        return True


def load(port: int, requests: Iterator[bytes], clients: int, seconds: float) -> Load:
    """Keeps so many clients busy for a while."""
    latencies = []
    with selectors.DefaultSelector() as selector:
        for _ in range(clients):
            client = Client(port)
            selector.register(client.socket, selectors.EVENT_READ, client)
            client.send(next(requests))
        began = time.perf_counter()
        busy = clients
        while busy:
            for key, _ in selector.select():
                client = key.data
                if not client.answered():
                    continue
                now = time.perf_counter()
                latencies.append(now - client.sent)
                if now - began < seconds:
                    client.send(next(requests))
                else:
                    selector.unregister(client.socket)
                    client.socket.close()
                    busy -= 1
    return Load(time.perf_counter() - began, sorted(latencies))
