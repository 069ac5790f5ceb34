"""Clients: connections that each send a request, wait for its answer, and send the next."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

PATH = "/v2/models/adanpc/infer"


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


def requests_of(features: np.ndarray, ids: bool, host: str) -> Iterator[bytes]:
    """Requests of one query each, as a client of the Open Inference Protocol with binary tensors sends them."""
    number = 0
    while True:
        row = features[number % len(features)]
        number += 1
        tensor = {"name": "features", "shape": [1, len(row)], "datatype": "FP32"}
        document = {
            "inputs": [{**tensor, "parameters": {"binary_data_size": row.nbytes}}],
            "parameters": {"binary_data_output": True},
        }
        if ids:
            document["id"] = f"{time.time_ns()}-{number}"
        text = json.dumps(document).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/octet-stream\r\n"
            f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + row.nbytes}\r\n\r\n"
        )
        yield head.encode() + text + row.tobytes()


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
