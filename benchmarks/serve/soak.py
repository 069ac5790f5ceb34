"""A service that is used for a while in all ways at once, and its memory meanwhile.

``python -m benchmarks.serve.soak --minutes 30`` starts a durable service over a bank with a capacity, and clients that
ask, preview, judge, look and listen. It prints the memory of the service every minute, and writes it to a file.
"""

from __future__ import annotations

import argparse
import io
import random
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import requests
import torch

from adanpc import AdaNPC, MemoryBank
from adanpc.lab.environment import machine
from adanpc.store import DurableBank, verify
from benchmarks.serve.started import Running, running

DIM = 64
CLASSES = 5
CAPACITY = 0.5  # rows of the stream for each source row, so that the bank itself stops growing
CLIENTS = 4
PAUSE = 0.02  # seconds between two requests of a client
NEWEST = 50  # rows of the stream, among which people judge


class Client:
    """Somebody who uses the service until told to stop."""

    def __init__(self, number: int, url: str, centers: np.ndarray) -> None:
        self.chance = random.Random(number)
        self.generator = np.random.default_rng(number)
        self.url = url
        self.centers = centers
        self.requests = 0
        self.session = requests.Session()
        self.last: list[int] = []

    def queries(self) -> np.ndarray:
        count = self.chance.choice([1, 1, 1, 8])
        labels = self.generator.integers(0, CLASSES, count)
        noise = self.generator.normal(0, 1.5, (count, DIM))
        return (self.centers[labels] + noise + 0.3).astype(np.float32)

    def act(self) -> None:
        """Makes one request of any kind."""
        self.requests += 1
        match self.chance.randrange(12):
            case 0 | 1 | 2:
                body = {"features": self.queries().tolist(), "request": f"{id(self)}-{self.requests}"}
                self.remember(self.post("predict", json=body))
            case 3 | 4 | 5:
                file = io.BytesIO()
                np.save(file, self.queries())
                self.remember(self.post("predict", data=file.getvalue(), headers={"Content-Type": "application/x-npy"}))
            case 6:
                tensor: dict[str, Any] = {"name": "features", "shape": [1, DIM], "datatype": "FP32"}
                data = self.centers[0].astype(np.float32).tolist()
                self.session.post(f"{self.url}/v2/models/adanpc/infer", json={"inputs": [{**tensor, "data": data}]})
            case 7 | 8:
                if self.last:
                    kind = self.chance.choice(["veto", "restore"])
                    self.post(kind, json={"rows": [self.chance.choice(self.last)], "why": "to see"})
            case 9:
                self.post("preview", json={"features": self.queries()[0].tolist(), "without": [0, 1, 2]})
            case 10:
                path = self.chance.choice(["v1/log", "v1/bank", "v1/timeline", "v1/queries", "v1/map", "v1/ask"])
                self.session.get(f"{self.url}/{path}").raise_for_status()
            case _:
                self.session.get(f"{self.url}/metrics").raise_for_status()

    def post(self, path: str, **options: object) -> requests.Response:
        answer = self.session.post(f"{self.url}/v1/{path}", **options)  # type: ignore[arg-type]
        assert answer.status_code < 500, answer.text
        return answer

    def remember(self, answer: requests.Response) -> None:
        joined = [one["joined"] for one in answer.json()["answers"] if one["joined"] is not None]
        self.last = [*self.last, *joined][-NEWEST:]


def listen(url: str, ended: threading.Event) -> None:
    """Somebody who follows the events, and comes back every so often."""
    while not ended.is_set():
        with requests.get(f"{url}/v1/events", stream=True, timeout=60) as stream:
            for number, _ in enumerate(stream.iter_lines()):
                if number > 2000 or ended.is_set():
                    break


def use(client: Client, ended: threading.Event) -> None:
    while not ended.is_set():
        client.act()
        time.sleep(PAUSE)


def create_bank(folder: Path, rows: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, DIM, generator=generator)
    labels = torch.arange(rows) % CLASSES
    classifier = AdaNPC(MemoryBank(DIM, CLASSES, soft=True, capacity=int(CAPACITY * rows)), preset="safe")
    classifier.learn(centers[labels] + 1.5 * torch.randn(rows, DIM, generator=generator), labels)
    DurableBank.create(folder, classifier).close()
    return centers.numpy()


def main() -> None:
    """Uses a service for a while, and writes what its memory was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rows", type=int, default=2000, help="of the source")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak.md"))
    options = parser.parse_args()
    with TemporaryDirectory() as place:
        folder = Path(place) / "bank"
        centers = create_bank(folder, options.rows)
        with running("durable", folder) as server:
            clients, samples = soak(server, centers, options.minutes)
        report = verify(folder)
        assert not report.problems, report.problems
    total = sum(client.requests for client in clients)
    about = (
        f"`python -m benchmarks.serve.soak --minutes {options.minutes:g} --rows {options.rows}` on {machine()}: "
        f"{CLIENTS} clients that ask, preview, judge and look, and one that listens; {total:,} requests, "
        f"{report.position:,} changes, a bank with a capacity. "
        "Memory of the service (resident), one number a minute, in MiB:"
    )
    numbers = " ".join(f"{sample:.0f}" for sample in samples)
    lines = ["# Soak", "", about, "", numbers, "", "Afterwards the bank was whole (`verify`)."]
    options.out.write_text("\n".join(lines) + "\n")


def soak(server: Running, centers: np.ndarray, minutes: float) -> tuple[list[Client], list[float]]:
    """All clients, and the memory of the service every minute."""
    ended = threading.Event()
    clients = [Client(number, server.url, centers) for number in range(CLIENTS)]
    threads = [threading.Thread(target=use, args=(client, ended)) for client in clients]
    threads.append(threading.Thread(target=listen, args=(server.url, ended)))
    for thread in threads:
        thread.start()
    samples = []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and all(thread.is_alive() for thread in threads):
        time.sleep(min(60.0, max(end - time.monotonic(), 0.1)))
        samples.append(server.memory() / 2**20)
        print(f"{sum(client.requests for client in clients):,} requests: {samples[-1]:.1f} MiB", flush=True)
    alive = all(thread.is_alive() for thread in threads)
    ended.set()
    for thread in threads:
        thread.join()
    assert alive, "a client has failed"
    return clients, samples


if __name__ == "__main__":
    main()
