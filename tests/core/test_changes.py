"""Changes as values, and their codec."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from adanpc import AdaNPC, Append, Delete, Feedback, MemoryBank, Origin, Relabel, Restore, Rollback, Veto
from adanpc.core.changes import Change, Observed
from adanpc.core.codec import MAGIC, PREFIX, canonical, decode, encode
from adanpc.core.table import TableError
from adanpc.errors import AdaNPCError, ChangeError

CHANGES: list[Change] = [
    Append(torch.rand(2, 3), torch.tensor([0, 1])),
    Append(
        torch.rand(2, 3, dtype=torch.float64),
        torch.tensor([1, 0], dtype=torch.int32),
        Origin.ADMITTED,
        soft=torch.tensor([[0.25, 0.75], [1.0, 0.0]]),
        domain=torch.tensor([4, -1]),
        confidence=torch.tensor([0.75, 1.0]),
        keys=torch.tensor([7, 8]),
        centered=True,
        source_mean=torch.rand(3, dtype=torch.float64),
        observed=Observed(torch.rand(3, dtype=torch.float64), 5),
        who="Ada",
        why="naïve 😀",
        when=1.7e9,
    ),
    Append(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), Origin.ADMITTED, domain=3),
    Veto((1, 2), "Ada", "blurred", 0.1),
    Restore((1,)),
    Relabel((3, 4), 1, who="Bob"),
    Relabel((4, 3), (1, 0), who="Bob"),
    Delete(()),
    Feedback(1, frozen=0, adapted=1, who="Ada", when=2.5),
]


def rollback() -> Rollback:
    made = AdaNPC(MemoryBank(3, 2, soft=True, storage="int8"), k=1, centering="stream")
    made.learn(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
    made.apply(Veto((1,), "Ada", "blurred", 3.5))
    earlier = made.bank.contents
    made.step(torch.rand(5, 3))
    made.apply(Relabel((2,), 1))
    made.apply(Delete((3,)))
    return made.rollback(earlier, who="guard", why="answers fell apart")


@pytest.mark.parametrize("change", [*CHANGES, rollback()], ids=lambda change: type(change).__name__)
def test_bytes_give_the_change_back(change: Change) -> None:
    data = encode(change)
    again = decode(data)
    assert type(again) is type(change)
    assert encode(again) == data
    for name in (
        "who",
        "why",
        "when",
        "ids",
        "label",
        "frozen",
        "adapted",
        "to",
        "removed",
        "judgments",
        "stream_count",
        "centered",
    ):
        assert getattr(again, name, None) == getattr(change, name, None)


def test_a_change_in_bytes_is_what_the_documentation_says() -> None:
    data = encode(Append(torch.tensor([[1.0, -2.0]]), torch.tensor([3]), Origin.EXPERT, who="Ada", when=2.5))
    magic, version, length = PREFIX.unpack_from(data)
    assert (magic, version) == (MAGIC, 1) == (b"ADNC", 1)
    header = json.loads(data[9 : 9 + length])
    assert header == {
        "kind": "append",
        "origin": 2,
        "centered": False,
        "who": "Ada",
        "why": "",
        "when": 2.5,
        "tensors": [["features", "F32", [1, 2]], ["labels", "I64", [1]], ["domain", "I64", []]],
    }
    assert data[9 + length :].hex() == "0000803f000000c00300000000000000ffffffffffffffff"


@pytest.mark.parametrize(
    ("data", "change"),
    [
        (
            b'ADNC\x01S\0\0\0{"ids":[3,4],"kind":"relabel","label":1,"tensors":[],"when":null,"who":"","why":""}',
            Relabel((3, 4), 1),
        ),
        (
            b'ADNC\x02W\0\0\0{"ids":[3,4],"kind":"relabel","label":[1,0],"tensors":[],"when":null,"who":"","why":""}',
            Relabel((3, 4), (1, 0)),
        ),
    ],
    ids=["version 1", "version 2"],
)
def test_corrections_that_were_logged_are_read(data: bytes, change: Relabel) -> None:
    assert decode(data) == change
    assert encode(change) == data


def forged(header: Any, tail: bytes = b"", version: int = 1, magic: bytes = MAGIC) -> bytes:
    text = header if isinstance(header, bytes) else canonical(header).encode()
    return PREFIX.pack(magic, version, len(text)) + text + tail


SIGNED: dict[str, Any] = {"who": "", "why": "", "when": None}
RELABEL: dict[str, Any] = {**SIGNED, "kind": "relabel", "ids": [3, 4], "tensors": []}
APPEND: dict[str, Any] = {**SIGNED, "kind": "append", "origin": 0, "centered": False}
ROLLBACK: dict[str, Any] = {
    **SIGNED, "kind": "rollback", "to": 1, "at": 1, "removed": [], "stream_count": 0, "judgments": [], "tensors": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "at least 9 bytes, got 0"),
        (forged({}, magic=b"PK\x03\x04"), "must begin with b'ADNC'"),
        (forged({}, version=3), "up to version 2, got 3: upgrade adanpc"),
        (forged({**RELABEL, "label": 1}, version=2), "with this header has version 1, got 2"),
        (forged({**RELABEL, "label": [1, 0]}, version=1), "with this header has version 2, got 1"),
        (forged({**RELABEL, "label": [1]}, version=2), "as many labels as there are different ids"),
        (forged({**RELABEL, "ids": [3, 3], "label": [1, 0]}, version=2), "as many labels as there are different ids"),
        (forged({**RELABEL, "label": [1, "x"]}, version=2), "label must be a whole number, got 'x'"),
        (forged(RELABEL), "valid relabel"),
        (forged({**SIGNED, "kind": "veto", "ids": [1], "tensors": []})[:-3], "header of a change cannot be read"),
        (forged(b"[]"), "header of a change cannot be read"),
        (forged(b"[" * 100_000), "header of a change cannot be read"),
        (forged({**SIGNED, "kind": "veto", "ids": [1]}), "header of a change cannot be read"),
        (forged(b'{"a":1, "tensors":[]}'), "not written as adanpc writes it"),
        (forged({"kind": "explode", "tensors": []}), "there is no kind of change 'explode'"),
        (forged({**SIGNED, "kind": "veto", "ids": [1], "tensors": []}, b"x"), "must end after"),
        (forged({**SIGNED, "kind": "veto", "ids": "12", "tensors": []}), "valid veto: ids must be"),
        (forged({**SIGNED, "kind": "veto", "tensors": []}), "valid veto"),
        (forged({**SIGNED, "kind": "veto", "ids": [1], "tensors": [["x", "U8", [1]]]}, b"x"), "veto has no tensors"),
        (forged({**SIGNED, "kind": "veto", "ids": [1], "who": 3, "tensors": []}), "who must be a string"),
        (forged({**SIGNED, "kind": "restore", "ids": [1], "when": "now", "tensors": []}), "when must be a number"),
        (forged({**APPEND, "tensors": [["features", "F32", [2**40, 2**40]]]}), "is cut off"),
        (forged({**APPEND, "tensors": [["features", "F32", [1, 1, 1]]]}, b"xxxx"), "at most two dimensions"),
        (forged({**APPEND, "tensors": [["features", "F31", [1]]]}, b"xxxx"), "header of a change cannot be read"),
        (forged({**APPEND, "tensors": [["keys", "U8", [1]], ["keys", "U8", [1]]]}, b"xx"), "names a tensor twice"),
        (forged({**APPEND, "tensors": [["shoes", "U8", [1]]]}, b"x"), "no tensor 'shoes'"),
        (forged({**APPEND, "origin": 9, "tensors": []}), "no origin 9"),
        (forged({**APPEND, "centered": 1, "tensors": []}), "centered must be true or false"),
        (forged({**APPEND, "observed_count": 1, "tensors": []}), "both a total and a count"),
        (forged({**APPEND, "tensors": []}), "valid append"),
        (forged({**ROLLBACK, "tensors": [["x", "U8", [1]]]}, b"x"), "no tensor 'x'"),
        (forged({**ROLLBACK, "judgments": [[1]]}), "judgments must be"),
        (forged({**ROLLBACK, "judgments": [[1, [["shout", 0, "", "", None]]]]}), "verdict must be one of"),
        (forged({**ROLLBACK, "to": -1}), "to must be at least 0"),
    ],
)
def test_other_bytes_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ChangeError, match=message):
        decode(data)


def test_what_is_not_a_change_has_no_bytes() -> None:
    class Looks:
        ids = (1,)
        who = why = ""
        when = None

    with pytest.raises(ChangeError, match="Looks is not a change"):
        encode(Looks())  # type: ignore[arg-type]


def test_a_rollback_is_for_the_position_at_which_it_was_made() -> None:
    made = AdaNPC(MemoryBank(3, 2), k=1, centering="stream")
    made.learn(torch.rand(2, 3), torch.tensor([0, 1]))
    change = made.rollback(made.bank.contents)
    made.step(torch.rand(1, 3))
    with pytest.raises(ChangeError, match="made at position 1 cannot be applied at 2: make a new one"):
        made.apply(change)


def test_what_was_deleted_does_not_come_back() -> None:
    made = AdaNPC(MemoryBank(3, 2), k=1)
    made.learn(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
    earlier = made.bank.contents
    made.apply(Delete((2,), "a patient"))
    made.apply(made.rollback(earlier))
    assert made.bank.table("id")["id"].tolist() == [0, 1, 3]


def test_a_change_keeps_its_own_numbers() -> None:
    mean = torch.rand(3, dtype=torch.float64)
    made = AdaNPC(MemoryBank(3, 2), k=1, centering="source")
    made.apply(Append(torch.rand(2, 3), torch.tensor([0, 1]), centered=True, source_mean=mean))
    before = made.digest()
    mean.zero_()
    made.state()["tensors"]["source_mean"].zero_()
    assert made.digest() == before
    assert encode(Veto((np.int64(1),), when=np.float32(1.5))) == encode(Veto((1,), when=1.5))  # type: ignore[arg-type]
    with pytest.raises(ChangeError, match="labels of a change cannot be torch.float32"):
        encode(Append(torch.rand(1, 3), torch.tensor([0.2])))


@pytest.mark.parametrize("earlier", ["yesterday", 3, None])
def test_a_rollback_needs_earlier_contents(earlier: Any) -> None:
    made = AdaNPC(MemoryBank(2, 2))
    with pytest.raises(AdaNPCError, match=f"saved as classifier.bank.contents, got {earlier!r}"):
        made.rollback(earlier)


def test_a_rollback_that_does_not_fit_is_refused() -> None:
    made = AdaNPC(MemoryBank(3, 2), k=1)
    made.learn(torch.rand(2, 3), torch.tensor([0, 1]))
    before = made.digest()
    with pytest.raises(TableError, match="the columns must be id, state, label"):
        made.apply(Rollback(0, 1, (), {}))
    table = made.bank.table()
    table["id"] = table["id"] + 9
    with pytest.raises(TableError, match="its ids, 9 … 10, must be between 0 and next_id - 1, 1"):
        made.apply(Rollback(0, 1, (), table))
    assert made.digest() == before


def test_a_rollback_keeps_to_the_capacity() -> None:
    made = AdaNPC(MemoryBank(3, 2, capacity=1), k=1)
    made.learn(torch.rand(2, 3), torch.tensor([0, 1]))
    table = made.bank.table()
    table["origin"][:] = Origin.ADMITTED
    with pytest.raises(TableError, match="it holds 2 admitted rows, more than its capacity of 1"):
        made.apply(Rollback(0, 1, (), table))
