"""Bank files changed at random, most of them under a right seal: each loads to a classifier that works, or is refused.

``ADANPC_FUZZ=50 pytest tests/attacks`` tries fifty times as many.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from attacks.forging import (
    PATIENCE,
    change_somewhere,
    compact,
    forged,
    honest,
    numbered,
    of_format_1,
    taken_apart,
    with_header,
    written,
)
from presets import paper

from adanpc.core import AdaNPC, Append
from adanpc.errors import EmptyBankError
from adanpc.store import BankFileError, load, save
from adanpc.store import file as file_module
from adanpc.store.check import LARGEST

ROUNDS = 200 * PATIENCE
ORIGINALS = [(make, storage) for make in (honest, of_format_1) for storage in ("float32", "float16", "int8")]


def an_original(chance: random.Random) -> bytes:
    make, storage = chance.choice(ORIGINALS)
    return make(storage)


# Each takes a source of randomness and returns the bytes of a file.


def with_other_bytes(chance: random.Random) -> bytes:
    """Bytes that were changed, taken away, doubled or put in."""
    data = bytearray(an_original(chance))
    for _ in range(chance.choice([1, 1, 1, 2, 5, 50])):
        place = chance.randrange(len(data) + 1)
        length = chance.choice([1, 1, 2, 8, 100])
        match chance.randrange(4):
            case 0:
                data[place : place + 1] = chance.randbytes(1)
            case 1:
                del data[place : place + length]
            case 2:
                data[place:place] = data[place : place + length]
            case _:
                data[place:place] = chance.randbytes(length)
    return bytes(data)


def cut(chance: random.Random) -> bytes:
    data = an_original(chance)
    return data[: chance.randrange(len(data))]


def with_another_header(chance: random.Random) -> bytes:
    """A header with other names, types, shapes and offsets; the bytes behind it stay."""
    data = an_original(chance)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    for _ in range(chance.choice([1, 1, 2, 3])):
        change_somewhere(header, chance)
    return with_header(json.dumps(header).encode(), data[start:])


def with_columns_exchanged(chance: random.Random) -> bytes:
    """A header in which two columns have changed places, in part or in whole."""
    data = an_original(chance)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    one, two = chance.sample([name for name in header if name != "__metadata__"], 2)
    for field in chance.sample(["dtype", "shape", "data_offsets"], chance.randrange(1, 4)):
        header[one][field], header[two][field] = header[two][field], header[one][field]
    return with_header(json.dumps(header).encode(), data[start:])


def with_another_document(chance: random.Random) -> bytes:
    """A document with other values, fields and items, and its right seal."""
    document, columns = taken_apart(an_original(chance))
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        change_somewhere(document, chance)
    if chance.randrange(10):
        return forged(document, columns)
    text = list(compact(document))
    text[chance.randrange(len(text))] = chance.choice('0123456789"\\,:[]{} \n-+.eE')
    return forged(document, columns, "".join(text))


def with_other_columns(chance: random.Random) -> bytes:
    """Columns with other values, rows or types, and their right seal."""
    document, columns = taken_apart(an_original(chance))
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        name = chance.choice(sorted(columns))
        column = columns[name]
        match chance.randrange(6):
            case 0:
                raw = bytearray(column.tobytes())
                raw[chance.randrange(len(raw))] = chance.randrange(256)
                columns[name] = numpy.frombuffer(bytes(raw), column.dtype).reshape(column.shape).copy()
            case 1 | 2:
                place = chance.randrange(column.size)
                values = [0, 1, 2, 3, -1, 127, 255, 2**31, 2**62, float("nan"), float("inf"), 1e-40, 1e30]
                with numpy.errstate(all="ignore"):
                    column.reshape(-1)[place] = numpy.array(chance.choice(values)).astype(column.dtype)
            case 3:
                columns[name] = column[::-1].copy()
            case 4:
                with numpy.errstate(all="ignore"):
                    columns[name] = column.astype(chance.choice(["int64", "float64", "float32", "uint8"]))
            case _:
                row = chance.randrange(len(column))
                for each in columns if chance.randrange(4) else [name]:
                    if len(columns[each]) > row:
                        columns[each] = numpy.delete(columns[each], row, 0)
                document["rows"] -= 1
    return forged(document, columns)


def check_that_it_works(classifier: AdaNPC, folder: Path) -> None:
    """A classifier that was loaded answers, is saved and loaded as itself, and learns."""
    digest = classifier.digest()
    save(classifier, folder / "again")
    assert load(folder / "again").digest() == digest
    queries = torch.ones(2, classifier.bank.dim)
    try:
        answer = classifier.predict(queries)
        assert answer.probs.isfinite().all()
        classifier.step(queries)
    except EmptyBankError:
        assert not classifier.bank.contents.index.count or paper(classifier).k_source is not None
    classifier.apply(Append(queries, torch.zeros(2, dtype=torch.int64)))
    assert classifier.predict(queries[:1]).neighbors.ids.numel()
    statistics = classifier.bank.contents.statistics
    if max(classifier.bank.next_id, classifier.position, statistics.stream_count) <= LARGEST:  # else no file can say so
        save(classifier, folder / "again")


@pytest.mark.no_cover
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        with_other_bytes,
        cut,
        with_another_header,
        with_columns_exchanged,
        with_another_document,
        with_other_columns,
    ],
)
def test_a_file_that_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[random.Random], bytes], sealed: bool
) -> None:
    if sealed:  # a forger would write the right seal, whatever else is changed
        monkeypatch.setattr(file_module, "_seal", lambda document, _: document["seal"])
    sentences = []
    for number in range(ROUNDS):
        data = change(random.Random(number))
        with numbered(number):
            try:
                classifier = load(written(tmp_path / "bank", data))
            except BankFileError as error:
                sentences.append(str(error))
            else:
                check_that_it_works(classifier, tmp_path)
    assert not any("\n" in sentence for sentence in sentences)
