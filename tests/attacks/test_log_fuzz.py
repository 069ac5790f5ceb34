"""Durable banks changed at random: each opens as a bank that works and that its log leads to, or is refused.

``ADANPC_FUZZ=50 pytest tests/attacks`` tries fifty times as many.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from attacks.forging import PATIENCE, change_somewhere, numbered

from adanpc.core import AdaNPC, Delete, MemoryBank, Relabel, Veto, everyone, replay
from adanpc.core.codec import PREFIX, canonical
from adanpc.errors import AdaNPCError, EmptyBankError
from adanpc.store import DurableBank, load, verify

ROUNDS = 60 * PATIENCE
DIM = 4


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A durable bank with every kind of change, an answer, and two snapshots."""
    folder = tmp_path_factory.mktemp("fuzz") / "bank"
    classifier = AdaNPC(MemoryBank(DIM, 3, capacity=5), k=3, admission=everyone, centering="stream")
    rows = torch.randn(30, DIM, generator=torch.Generator().manual_seed(0))
    classifier.learn(rows[:9], torch.arange(9) % 3)
    with DurableBank.create(folder, classifier) as bank:
        bank.classify(rows[9:14], request="one", keys=range(5))
        bank.apply(Veto((1, 2), "Ann", "wrong", 1.5))
        bank.snapshot()
        bank.apply(Relabel((3,), 2, "Bob"))
        bank.apply(Delete((4,), "Bob"))
        bank.classify(rows[14:20])
        bank.rollback(3, who="Cem")
        bank.classify(rows[20:22], request="two")
    for path in (folder / "snapshots").glob("*9-*"):
        path.unlink()  # what comes after position 3 is to be read from the log
    return folder


# Each changes a copy of the bank.


def with_other_bytes(folder: Path, chance: random.Random) -> None:
    """Bytes of any file that were changed, taken away or put in."""
    path = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 2, 20])):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 | 1:
                data[place : place + 1] = chance.randbytes(1)
            case 2:
                del data[place : place + chance.choice([1, 100, 4096])]
            case _:
                data[place:place] = chance.randbytes(chance.choice([1, 100, 4096]))
    path.write_bytes(data)


def without_a_file(folder: Path, chance: random.Random) -> None:
    path = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    path.unlink()
    if chance.randrange(2):
        path.mkdir()


def with_other_rows(folder: Path, chance: random.Random) -> None:
    """Another database, by somebody who knows SQL and deletes the head."""
    statements = [
        "DELETE FROM entry WHERE position = ?",
        "DELETE FROM entry WHERE position > ?",
        "UPDATE entry SET position = position + 1000 WHERE position = ?",
        "UPDATE entry SET change = randomblob(40) WHERE position = ?",
        "UPDATE entry SET change = NULL, seal = 5 WHERE position = ?",
        "UPDATE entry SET seal = CAST('text' AS TEXT) WHERE position = ?",
        "UPDATE start SET position = ?",
        "UPDATE start SET seal = randomblob(?)",
        "UPDATE answer SET answer = randomblob(?)",
        "UPDATE answer SET request = NULL, number = number + ?",
        "INSERT INTO entry VALUES (100 + ?, x'00', x'00')",
    ]
    with closing(sqlite3.connect(folder / "log.sqlite")) as connection:
        for _ in range(chance.choice([1, 1, 2])):
            try:
                connection.execute(chance.choice(statements), (chance.randrange(1, 12),))
            except sqlite3.IntegrityError:
                continue
        connection.commit()
    (folder / "head").unlink()


def with_forged_changes(folder: Path, chance: random.Random) -> None:
    """Other changes under right seals, by somebody who knows the format."""
    with closing(sqlite3.connect(folder / "log.sqlite")) as connection:
        ((seal,),) = connection.execute("SELECT seal FROM start").fetchall()
        entries = connection.execute("SELECT position, change FROM entry ORDER BY position").fetchall()
        chosen = chance.choice([position for position, _ in entries if position > 3])
        for position, data in entries:
            changed = forged(data, chance) if position == chosen else data
            seal = hashlib.sha256(seal + position.to_bytes(8, "little") + changed).digest()
            connection.execute("UPDATE entry SET change = ?, seal = ? WHERE position = ?", (changed, seal, position))
        connection.commit()
    (folder / "head").unlink()


def forged(data: bytes, chance: random.Random) -> bytes:
    """A change with another header, or with other numbers behind it."""
    magic, version, length = PREFIX.unpack_from(data)
    header = json.loads(data[PREFIX.size : PREFIX.size + length])
    rest = bytearray(data[PREFIX.size + length :])
    if rest and chance.randrange(2):
        rest[chance.randrange(len(rest))] = chance.randrange(256)
    else:
        change_somewhere(header, chance)
    try:
        text = canonical(header).encode()
    except ValueError:  # what JSON cannot hold
        text = b"{}"
    return PREFIX.pack(magic, version, len(text)) + text + bytes(rest)


def check_that_it_works(folder: Path) -> None:
    """A bank that opens is what its snapshot and its changes lead to, answers, learns, and is the same again."""
    with DurableBank.open(folder) as bank:
        start = min(bank.log.snapshots())
        (oldest,) = (folder / "snapshots").glob(f"{start:018d}-*")
        try:
            expected = replay(bank.log.read(start), load(oldest)).digest()
        except AdaNPCError:  # damage before the newest snapshot: it is not needed, and verifying finds it
            assert verify(folder).problems
        else:
            assert bank.digest() == expected
        queries = torch.ones(2, DIM)
        try:
            bank.classify(queries)
        except EmptyBankError:
            assert not bank.contents.index.count
        digest = bank.digest()
    with DurableBank.open(folder) as bank:
        assert bank.digest() == digest


@pytest.mark.no_cover
@pytest.mark.parametrize("change", [with_other_bytes, without_a_file, with_other_rows, with_forged_changes])
def test_a_bank_that_was_changed(original: Path, tmp_path: Path, change: Callable[[Path, random.Random], None]) -> None:
    folder = tmp_path / "bank"
    sentences = []
    for number in range(ROUNDS):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        change(folder, random.Random(number))
        with numbered(number):
            try:
                DurableBank.open(folder).close()
            except AdaNPCError as error:
                sentences.append(str(error))
            else:
                check_that_it_works(folder)
    assert sentences
    assert not any("\n" in sentence for sentence in sentences)
