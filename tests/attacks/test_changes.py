"""Bytes of changes that were damaged or forged: refused, or carried out whole. ``ADANPC_FUZZ`` as for bank files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks.forging import PATIENCE, change_somewhere, numbered

from adanpc.core import (
    AdaNPC,
    Admission,
    Append,
    Change,
    Delete,
    Judgment,
    MemoryBank,
    Origin,
    Relabel,
    Restore,
    Rollback,
    Veto,
)
from adanpc.core.changes import Observed
from adanpc.core.codec import MAGIC, PREFIX, VERSION, canonical, decode, encode
from adanpc.errors import AdaNPCError, ChangeError
from adanpc.store import load, save

ROUNDS = 150 * PATIENCE
KINDS = ("append", "veto", "restore", "relabel", "delete", "rollback")
WITH_TENSORS = ("append", "rollback")  # the other kinds are a header alone
DIM, CLASSES = 4, 3


def features(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def in_mid_stream(storage: str = "float32") -> tuple[AdaNPC, dict[str, Change]]:
    """A classifier that has met everything, and a change of each kind that it could meet next."""
    bank = MemoryBank(DIM, CLASSES, storage=storage, capacity=6, evict="balanced", soft=True)
    classifier = AdaNPC(bank, k=3, admission=Admission(min_confidence=0.1), centering="stream")
    classifier.learn(features(6, 0), torch.arange(6) % CLASSES, domain=torch.arange(6) % 2)
    classifier.step(features(6, 1))
    classifier.apply(Veto((1, 6), "Ann", "blurred", 1.5))
    earlier = bank.contents
    classifier.step(features(3, 2))
    classifier.apply(Relabel((2, 13), 0, "Bob"))
    classifier.apply(Restore((1,), "Bob"))
    classifier.apply(Delete((0,)))
    _, proposed = classifier.propose(features(4, 3), keys=torch.arange(4))
    assert proposed is not None
    changes: dict[str, Change] = {
        "append": proposed,
        "veto": Veto((2, 3), "Ann", "“blurred”", 2.5),
        "restore": Restore((6,), "Ann", "", 3),
        "relabel": Relabel((3, 4), 1, "Ann", "it is the other one", 4.5),
        "delete": Delete((4, 6), "Ann", "asked for by a patient"),
        "rollback": classifier.rollback(earlier, who="guard", why="too many errors", when=5.5),
    }
    return classifier, changes


def packed(header: Any, tensors: bytes) -> bytes:
    """What a forger writes: any header, as adanpc would write it."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return PREFIX.pack(MAGIC, VERSION, len(text)) + text + tensors


def taken_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    _, _, length = PREFIX.unpack_from(data)
    end = PREFIX.size + length
    return json.loads(data[PREFIX.size : end]), data[end:]


# Each takes the bytes of a change and a source of randomness, and returns other bytes.


def with_other_bytes(data: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        place = chance.randrange(len(damaged) + 1)
        match chance.randrange(4):
            case 0:
                del damaged[place : place + chance.choice([1, 4, 8, 30])]
            case 1:
                damaged[place:place] = chance.randbytes(chance.choice([1, 4, 8, 30]))
            case _:
                damaged[place : place + 1] = chance.randbytes(1)
    return bytes(damaged)


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def with_another_header(data: bytes, chance: random.Random) -> bytes:
    header, tensors = taken_apart(data)
    for _ in range(chance.choice([1, 1, 2, 3])):
        change_somewhere(header, chance)
    return packed(header, tensors)


def with_other_tensors(data: bytes, chance: random.Random) -> bytes:
    header, tensors = taken_apart(data)
    damaged = bytearray(tensors)
    for _ in range(chance.choice([1, 1, 2, 8])):
        if damaged:
            place = chance.randrange(len(damaged))
            value = chance.choice([b"\0", b"\xff", b"\x7f", b"\x80", b"\x01", chance.randbytes(1)])
            damaged[place : place + 1] = value
    return packed(header, bytes(damaged))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_what_the_forger_writes_is_what_encode_writes(kind: str, storage: str) -> None:
    _, changes = in_mid_stream(storage)
    data = encode(changes[kind])
    assert packed(*taken_apart(data)) == data
    assert encode(decode(data)) == data
    assert canonical(taken_apart(data)[0]) in data.decode("latin-1")
    assert bool(taken_apart(data)[1]) == (kind in WITH_TENSORS)


def kinds_and_changes() -> list[Any]:
    """Every kind of change with every way of changing its bytes."""
    cases = []
    for kind in KINDS:
        for change in (with_other_bytes, cut, with_another_header):
            cases.append((kind, change))
    for kind in WITH_TENSORS:
        cases.append((kind, with_other_tensors))
    return cases


@pytest.mark.no_cover
@pytest.mark.parametrize(("kind", "change"), kinds_and_changes())
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_a_change_that_was_changed(
    tmp_path: Path, storage: str, kind: str, change: Callable[[bytes, random.Random], bytes]
) -> None:
    """It is refused and nothing has changed, or it is carried out and the classifier works."""
    classifier, changes = in_mid_stream(storage)
    state = classifier.state()
    before = classifier.digest()
    data = encode(changes[kind])
    for number in range(ROUNDS):
        damaged = change(data, random.Random(number))
        if damaged == data:
            continue  # a byte may be replaced by itself
        with numbered(number):
            try:
                decoded = decode(damaged)
            except ChangeError:
                continue
            try:
                classifier.apply(decoded)
            except AdaNPCError:
                assert classifier.digest() == before
                continue
            check_that_it_works(classifier, tmp_path)
            classifier = AdaNPC.load(state)


def check_that_it_works(classifier: AdaNPC, folder: Path) -> None:
    digest = classifier.digest()
    save(classifier, folder / "bank")
    assert load(folder / "bank").digest() == digest
    answer = classifier.predict(torch.ones(1, DIM))
    assert answer.probs.isfinite().all()
    classifier.step(features(3, 9))
    assert int(classifier.bank.admitted.sum()) <= 6
    for row in classifier.bank.vetoes:
        assert classifier.bank.history(row)


# Bytes that decode should refuse


def with_field(kind: str, name: str, value: Any) -> bytes:
    _, changes = in_mid_stream()
    header, tensors = taken_apart(encode(changes[kind]))
    return packed({**header, name: value}, tensors)


DECODED = [
    pytest.param("veto", "kind", [], id="a kind that is a list"),
    pytest.param("veto", "kind", {}, id="a kind that is an object"),
    pytest.param("veto", "when", 10**400, id="a time beyond floats"),
    pytest.param("rollback", "judgments", [[0, [["veto", 0, "", "", 10**400]]]], id="a judgment's time beyond floats"),
]


@pytest.mark.parametrize(("kind", "name", "value"), DECODED)
def test_fields_that_cannot_be(kind: str, name: str, value: Any) -> None:
    with pytest.raises(ChangeError):
        decode(with_field(kind, name, value))


# Changes that can be decoded, but that apply should refuse


def rolled_back(classifier: AdaNPC, **columns: Any) -> Rollback:
    """A rollback that brings back the rows that are there, with other columns."""
    table = {name: column.clone() for name, column in classifier.bank.table().items()}
    for name, (place, value) in columns.items():
        table[name][place] = value
    statistics = classifier.bank.contents.statistics
    at = classifier.position
    return Rollback(0, at, (), table, {}, statistics.source_mean, statistics.stream_total, statistics.stream_count)


def with_rows(classifier: AdaNPC, **fields: Any) -> Rollback:
    """A rollback that changes nothing but these fields."""
    nothing = {name: column[:0] for name, column in classifier.bank.table().items()}
    statistics = classifier.bank.contents.statistics
    given: dict[str, Any] = {
        "to": 0,
        "at": classifier.position,
        "removed": (),
        "rows": nothing,
        "source_mean": statistics.source_mean,
        "stream_total": statistics.stream_total,
        "stream_count": statistics.stream_count,
    }
    return Rollback(**(given | fields))


def appended(**fields: Any) -> Append:
    return Append(features(1, 5), torch.tensor([0]), Origin.SOURCE, centered=True, **fields)


VETO = Judgment("veto", 0)
APPLIED: list[tuple[str, Callable[[AdaNPC], Change]]] = [
    ("an id beyond 64 bits", lambda _: Veto((2**70,))),
    ("a deleted id beyond 64 bits", lambda _: Delete((2**70,))),
    ("a removed id beyond 64 bits", lambda classifier: with_rows(classifier, removed=(2**70,))),
    ("a source mean of another length", lambda _: appended(source_mean=torch.zeros(5).double())),
    ("a source mean that is NaN", lambda _: appended(source_mean=torch.full((DIM,), torch.nan).double())),
    ("a sum of another length", lambda _: appended(observed=Observed(torch.zeros(5).double(), 1))),
    ("a sum of the wrong shape", lambda _: appended(observed=Observed(torch.zeros(1, DIM).double(), 1))),
    ("a sum that is infinite", lambda _: appended(observed=Observed(torch.full((DIM,), torch.inf).double(), 1))),
    ("a label beyond the classes", lambda classifier: rolled_back(classifier, label=(0, 77))),
    ("a label below 0", lambda classifier: rolled_back(classifier, label=(0, -1))),
    ("an id below 0", lambda classifier: rolled_back(classifier, id=(0, -5))),
    ("an id twice", lambda classifier: rolled_back(classifier, id=(0, 2))),
    ("an unknown state", lambda classifier: rolled_back(classifier, state=(0, 9))),
    ("an unknown origin", lambda classifier: rolled_back(classifier, origin=(0, 9))),
    ("a row that is NaN", lambda classifier: rolled_back(classifier, row=(0, torch.nan))),
    ("a row that is zero", lambda classifier: rolled_back(classifier, row=(0, 0))),
    ("a confidence that is NaN", lambda classifier: rolled_back(classifier, confidence=(0, torch.nan))),
    ("soft labels that are none", lambda classifier: rolled_back(classifier, soft=(0, 5))),
    ("a vetoed row without a veto", lambda classifier: rolled_back(classifier, state=(0, 2))),
    ("a row removed twice", lambda classifier: with_rows(classifier, removed=(14, 14))),
    ("judgments of a row that is not there", lambda classifier: with_rows(classifier, judgments={0: (VETO,)})),
    ("a veto of a row that votes", lambda classifier: with_rows(classifier, judgments={2: (VETO,)})),
    ("a mean of another length", lambda classifier: with_rows(classifier, source_mean=torch.zeros(5).double())),
    ("a count without a sum", lambda classifier: with_rows(classifier, stream_total=None)),
    ("a position that is yet to come", lambda classifier: with_rows(classifier, to=10**6)),
    ("a rollback made at another position", lambda classifier: with_rows(classifier, at=classifier.position - 1)),
    ("a deleted row that comes back", lambda classifier: rolled_back(classifier, id=(0, 0))),
    ("columns of other lengths", lambda classifier: shortened(with_rows(classifier), "label")),
    ("a column of another type", lambda classifier: converted(rolled_back(classifier), "row", torch.float16)),
    ("more rows than the capacity", lambda classifier: rolled_back(classifier, origin=(slice(None), 1))),
]


def shortened(change: Rollback, name: str) -> Rollback:
    rows = {**change.rows, name: torch.zeros(3, dtype=torch.int64)}
    return replace(change, rows=rows)


def converted(change: Rollback, name: str, dtype: torch.dtype) -> Rollback:
    rows = {**change.rows, name: change.rows[name].to(dtype)}
    return replace(change, rows=rows)


@pytest.mark.parametrize(("name", "make"), APPLIED, ids=[name for name, _ in APPLIED])
def test_values_that_cannot_be(name: str, make: Callable[[AdaNPC], Change]) -> None:
    classifier, _ = in_mid_stream()
    before = classifier.digest()
    with pytest.raises(AdaNPCError):
        classifier.apply(make(classifier))
    assert classifier.digest() == before
