"""``python -m benchmarks.crashes.service``: the service itself, killed again and again while clients ask it over HTTP.

Each life is a process of its own, ended by SIGKILL at a random moment. Clients send requests with ids. After a restart,
each request that was answered is sent again, and must get the same bytes; then those that were not answered are sent,
and the bank must have learned from each request once.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import requests
import torch

from adanpc import AdaNPC, Append, MemoryBank, everyone
from adanpc.store import DurableBank, SqliteLog, verify
from benchmarks.serve.started import Running, running

ROWS = 2000
DIM = 32
CLASSES = 5
CLIENTS = 8
SHORTEST = 0.05  # seconds of a life after its first request
LONGEST = 1.0
KEPT = 5000  # of the newest requests are sent again; the service keeps the answers to 10,000


class Account:
    """What was sent, and what came back."""

    def __init__(self) -> None:
        self.sent: dict[str, list[float]] = {}
        self.answered: dict[str, bytes] = {}
        self.flaws: list[str] = []
        self.lock = threading.Lock()

    def ask(self, url: str, session: requests.Session, name: str) -> bool:
        """Sends a request; whether it was answered. An answer that was given before must be given again."""
        body: dict[str, Any] = {
            "id": name,
            "inputs": [{"name": "features", "shape": [1, DIM], "datatype": "FP32", "data": self.sent[name]}],
        }
        try:
            response = session.post(f"{url}/v2/models/adanpc/infer", json=body, timeout=100)
        except requests.RequestException:
            return False
        if response.status_code != 200:
            self.flaws.append(f"{name} was refused: {response.text}")
            return False
        with self.lock:
            before = self.answered.setdefault(name, response.content)
        if before != response.content:
            self.flaws.append(f"{name} was answered {before!r} before, and now {response.content!r}")
        return True


def main() -> None:
    """Runs so many lives, and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    account = Account()
    chance = random.Random(0)
    with TemporaryDirectory() as place:
        folder = Path(place) / "bank"
        create(folder)
        for life in range(options.kills):
            with running("durable", folder) as server:
                again(account, server.url)
                live(account, server, life, chance)
        with running("durable", folder) as server:
            again(account, server.url)
        account.flaws += verify(folder).problems
        joined = rows_that_joined(folder)
    if joined != len(account.sent):
        account.flaws.append(f"{len(account.sent)} requests were sent, and {joined} rows have joined")
    if account.flaws:
        raise SystemExit("\n".join(account.flaws))
    print(
        f"{options.kills} kills of the service while {CLIENTS} clients asked it over HTTP: {len(account.sent):,} "
        "requests, each answered the same however often it was sent, and learned from once; the bank was whole "
        "afterwards."
    )


def create(folder: Path) -> None:
    """Creates a durable bank that learns from every query."""
    generator = torch.Generator().manual_seed(0)
    classifier = AdaNPC(MemoryBank(DIM, CLASSES), k=5, admission=everyone)
    labels = torch.arange(ROWS) % CLASSES
    classifier.learn(torch.randn(ROWS, DIM, generator=generator), labels)
    DurableBank.create(folder, classifier).close()


def again(account: Account, url: str) -> None:
    """Sends what was answered, and what was not, and expects answers to all of it."""
    with requests.Session() as session:
        for name in list(account.sent)[-KEPT:]:
            if not account.ask(url, session, name):
                account.flaws.append(f"{name} was not answered")


def live(account: Account, server: Running, life: int, chance: random.Random) -> None:
    """Lets clients ask until the service is killed."""
    first = threading.Event()

    def client(number: int) -> None:
        generator = np.random.default_rng([life, number])
        with requests.Session() as session:
            turn = 0
            name = f"{life}-{number}-{turn}"
            while True:
                account.sent[name] = generator.normal(size=DIM).astype(np.float32).tolist()
                if not account.ask(server.url, session, name):
                    return
                first.set()
                turn += 1
                name = f"{life}-{number}-{turn}"

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    first.wait()
    time.sleep(chance.uniform(SHORTEST, LONGEST))
    server.process.kill()
    for thread in clients:
        thread.join()


def rows_that_joined(folder: Path) -> int:
    """How many rows the log says have joined."""
    log = SqliteLog(folder, read_only=True)
    try:
        return sum(len(change.features) for change in log.read(log.start) if isinstance(change, Append))
    finally:
        log.close()


if __name__ == "__main__":
    main()
