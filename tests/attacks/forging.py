"""Bank files taken apart and put together again by somebody who knows the format, and random changes to them."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import pytest
import torch

from adanpc.core import AdaNPC, Admission, MemoryBank, Relabel, Restore, Veto
from adanpc.models import Wrapped
from adanpc.store import BankFileError, load, save

ORDER = {"int64": "I64", "float64": "F64", "float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8"}
PATIENCE = int(os.environ.get("ADANPC_FUZZ", "1"))  # how many times as many random changes are tried
NUMBERS = [0, 1, -1, 2, 3, 4, 5, 7, 8, 9, 12, 37, 255, 2**24, 2**24 + 1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, 10**400]
FLOATS = [0.0, -0.0, 0.5, 1.0, 1.5, -3.0, 1e-320, 1e308, -1e308]
TEXTS = [
    "",
    "inf",
    "-inf",
    "nan",
    "veto",
    "restore",
    "relabel",
    "float32",
    "int8",
    "fifo",
    "source",
    "stream",
    "\ud800",
]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [[0, []]], {"": ""}, [1, 2, 3]]
GOLDEN = Path(__file__).parents[1] / "store" / "golden"
Document = dict[str, Any]
Columns = dict[str, numpy.ndarray[Any, Any]]


@cache
def honest(storage: str) -> bytes:
    """The bytes of a small bank with admitted, vetoed, restored and relabeled rows, soft labels, capacity and means."""
    bank = MemoryBank(4, 3, storage=storage, capacity=4, evict="reservoir", soft=True, seed=5)
    classifier = AdaNPC(bank, k=3, admission=Admission(min_confidence=0.1), centering="stream")
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    classifier.learn(rows[:5], torch.tensor([0, 1, 2, 0, 1]))
    classifier.step(rows[5:])
    classifier.apply(Veto((1, 2, 6), "Ann", "wrong", 1.5))
    classifier.apply(Restore((2,), "Bob", "right", 2.5))
    classifier.apply(Relabel((1, 3), 2, "Cem", "it is the other one"))
    with TemporaryDirectory() as folder:
        save(Wrapped(torch.nn.Linear(1, 1), classifier, "fc", "scale"), Path(folder) / "bank")
        return (Path(folder) / "bank").read_bytes()


@cache
def of_format_1(storage: str) -> bytes:
    """The bytes that the first release wrote for a bank with all of that but restored and relabeled rows."""
    return (GOLDEN / f"format-1-{storage}.safetensors").read_bytes()


def refusal(path: Path) -> str:
    """The sentence by which the file is refused."""
    with pytest.raises(BankFileError) as caught:
        load(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path} was not loaded: ")
    assert "; " in sentence
    assert "\n" not in sentence
    assert len(sentence) < len(str(path)) + 400
    return sentence.removeprefix(f"{path} was not loaded: ")


def written(path: Path, data: bytes) -> Path:
    """The path, once it holds these bytes; not emptied first, which takes the file system most of the time."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.write(data)
        file.truncate()
    return path


def taken_apart(data: bytes) -> tuple[Document, Columns]:
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    document = json.loads(header.pop("__metadata__")["adanpc"])
    types = {short: name for name, short in ORDER.items()}
    columns = {}
    for name, about in header.items():
        first, end = about["data_offsets"]
        column = numpy.frombuffer(data[start + first : start + end], types[about["dtype"]]).reshape(about["shape"])
        columns[name] = column.copy()
    return document, columns


def compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def seal(document: Document, columns: Columns) -> str:
    unsealed = ("seal", "signature")
    total = hashlib.sha256(compact({name: document[name] for name in document if name not in unsealed}).encode())
    for name in sorted(columns):
        if name == "row" and "row_sha256" in document:
            continue
        total.update(compact([name, ORDER[str(columns[name].dtype)], columns[name].shape]).encode())
        data = columns[name].tobytes()
        if "row_sha256" in document:  # of one piece, and as a text
            data = hashlib.sha256(hashlib.sha256(data).digest()).hexdigest().encode()
        total.update(data)
    return total.hexdigest()


def with_header(text: bytes, data: bytes = b"", multiple: int = 8) -> bytes:
    text += b" " * (-len(text) % multiple)
    return len(text).to_bytes(8, "little") + text + data


def forged(document: Document, columns: Columns, text: str | None = None, multiple: int = 8) -> bytes:
    """A file in perfect order around these contents, or around another text of the document."""
    ranks = list(ORDER)
    names = sorted(columns, key=lambda name: (ranks.index(str(columns[name].dtype)), name))
    header: Document = {"__metadata__": {"adanpc": text or compact({**document, "seal": seal(document, columns)})}}
    end = 0
    for name in names:
        start, end = end, end + columns[name].nbytes
        dtype = ORDER[str(columns[name].dtype)]
        header[name] = {"dtype": dtype, "shape": list(columns[name].shape), "data_offsets": [start, end]}
    return with_header(json.dumps(header).encode(), b"".join(columns[name].tobytes() for name in names), multiple)


def a_value(chance: random.Random) -> Any:
    pools: list[list[Any]] = [NUMBERS, FLOATS, TEXTS, OTHERS]
    return chance.choice(chance.choice(pools))


def change_somewhere(value: Any, chance: random.Random) -> None:
    """Puts another value into a JSON object or array, anywhere, or takes one away, or adds one."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        place = chance.choice(places)
        if not isinstance(value[place], dict | list) or not value[place] or not chance.randrange(6):
            break
        value = value[place]
    match chance.randrange(6):
        case 0:
            del value[place]
        case 1 if isinstance(value, dict):
            value[chance.choice(["more", *places])] = value.pop(place)
        case 1:
            value.insert(place, value[place])
        case 2 if isinstance(value[place], int) and not isinstance(value[place], bool):
            value[place] += chance.choice([-8, -1, 1, 8])
        case _:
            value[place] = a_value(chance)


@contextmanager
def numbered(number: int) -> Iterator[None]:
    """Adds to whatever is raised inside by which number it can be raised again."""
    try:
        yield
    except Exception as error:
        error.add_note(f"the number was {number}")
        raise
