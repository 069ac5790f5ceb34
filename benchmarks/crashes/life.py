"""A small bank, what happens to it, and an independent account of what it must be afterwards."""

from __future__ import annotations

import hashlib
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import torch
from torch import Tensor

from adanpc import AdaNPC, Append, Delete, MemoryBank, Relabel, Restore, Veto, everyone, load
from adanpc.core.codec import decode
from adanpc.errors import AdaNPCError
from adanpc.store import DurableBank
from adanpc.store.answers import encode_answer

DIM = 8
CLASSES = 3
SOURCE = 24
Acknowledge = Callable[[str, list[int], str], None]  # a request, its keys, and a hash of its answer


def features(chance: random.Random, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(chance.randrange(2**32))
    centers = torch.eye(DIM)[torch.randint(0, CLASSES, (count,), generator=generator)]
    return centers + 0.4 * torch.randn(count, DIM, generator=generator) + 0.5


def small_bank(folder: Path) -> None:
    """Creates a durable bank that admits every query, so that each must be found in the log, and forgets the oldest."""
    bank = MemoryBank(DIM, CLASSES, capacity=60)
    classifier = AdaNPC(bank, k=5, admission=everyone, centering="stream")
    classifier.learn(features(random.Random(0), SOURCE), torch.arange(SOURCE) % CLASSES)
    DurableBank.create(folder, classifier).close()


def ask(bank: DurableBank, chance: random.Random, name: str, key: int, acknowledge: Acknowledge) -> int:
    """Sends one request of a few queries, and says so once it was answered; the next key."""
    count = chance.randrange(1, 4)
    keys = list(range(key, key + count))
    answer = bank.classify(features(chance, count), keys=keys, domain=1, request=name)
    acknowledge(name, keys, hash_of(encode_answer(answer)))
    return key + count


def judge(bank: DurableBank, chance: random.Random) -> None:
    """Lets an expert do something; what other threads have made impossible meanwhile is refused, and that is well."""
    row = chance.randrange(bank.contents.next_id)
    with suppress(AdaNPCError):
        match chance.randrange(6):
            case 0 | 1:
                bank.apply(Veto((row,), "Ann", "blurred"))
            case 2:
                bank.apply(Restore((row,), "Bob", "fine"))
            case 3:
                bank.apply(Relabel((row,), chance.randrange(CLASSES), "Cem", "the other one"))
            case 4:
                bank.apply(Delete((row,), "Bob", "asked for") if row >= SOURCE else Veto((row,), "Bob", "no"))
            case _:
                start = bank.log.start
                bank.rollback(chance.randrange(start, bank.position + 1), who="Ann", why="a bad day")


class Account:
    """What a bank must be at each position, by replaying its changes without the store.

    Args:
        folder: of the bank when it was created.
    """

    def __init__(self, folder: Path) -> None:
        (snapshot,) = (folder / "snapshots").glob("*.safetensors")
        self.classifier = load(snapshot)
        self.digests = [self.classifier.digest()]
        self.keys: list[list[int]] = [[]]  # that joined with each change
        self.bytes: list[bytes] = [b""]

    def add(self, data: bytes) -> None:
        """Notes the change at the next position."""
        change = decode(data)
        self.classifier.apply(change)
        self.digests.append(self.classifier.digest())
        joined: list[int] = []
        if isinstance(change, Append) and change.keys is not None:
            joined = change.keys.tolist()
        self.keys.append(joined)
        self.bytes.append(data)

    def follow(self, folder: Path, start: int) -> None:
        """Notes the changes that the log of a bank, which began at a position, has beyond what is known."""
        address = f"file:{folder / 'log.sqlite'}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            known = start + len(self.digests) - 1
            query = "SELECT position, change FROM entry WHERE position > ? ORDER BY position"
            for position, data in connection.execute(query, (known,)):
                assert position == start + len(self.digests)
                self.add(data)


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
