"""Requests that are malformed in every way: each is answered in the one shape, and none costs memory or the service.

``ADANPC_FUZZ=40 pytest tests/attacks/test_uploads.py`` sends more than ten thousand.
"""

from __future__ import annotations

import json
import random
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import requests
import torch
from attacks.forging import PATIENCE, change_somewhere
from PIL import Image
from torch import Tensor

import adanpc
from adanpc.serve import create, serving
from adanpc.serve.encoding import BatchingEncoder

ROUNDS = 90 * PATIENCE  # of each kind
DIM = 4
GROWTH = 96 * 2**20  # bytes that the process may grow by; a leak of 100 kB a request would be twice that
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")


class Upload(NamedTuple):
    """A request."""

    path: str
    kind: str  # of its body
    body: bytes
    headers: dict[str, str]


def colors_of(images: Sequence[Any]) -> Tensor:
    """Features of images: the mean of each color, and a constant."""
    return torch.tensor([[*image.reshape(-1, 3).mean(0), 1.0] for image in images], dtype=torch.float32)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[adanpc.DurableBank]:
    classifier = adanpc.AdaNPC(adanpc.MemoryBank(DIM, ["cat", "dog"], soft=True, capacity=100), preset="safe")
    generator = torch.Generator().manual_seed(0)
    rows = torch.eye(DIM)[[0, 1] * 20] + 0.1 * torch.rand(40, DIM, generator=generator)
    classifier.learn(rows, torch.tensor([0, 1] * 20))
    with adanpc.DurableBank.create(tmp_path_factory.mktemp("uploads") / "bank", classifier) as opened:
        yield opened


@pytest.fixture(scope="module")
def url(bank: adanpc.DurableBank) -> Iterator[str]:
    with serving(create(bank, encoder=colors_of)) as address:
        yield address


# Each makes a request of what was well-formed once.


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Bytes of which some were changed, cut off, taken away or put in."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 20])):
        place = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0 | 1:
                changed[place : place + 1] = chance.randbytes(1)
            case 2:
                del changed[place:]
            case 3:
                del changed[place : place + chance.choice([1, 4, 100])]
            case _:
                changed[place:place] = chance.randbytes(chance.choice([1, 4, 100]))
    return bytes(changed)


def changed(document: Any, times: int, chance: random.Random) -> Any:
    """A document in which something was changed so many times."""
    for _ in range(times):
        if document:
            change_somewhere(document, chance)
        document = json.loads(json.dumps(document))  # values of its own, which another change does not share
    return document


def an_image(chance: random.Random) -> Upload:
    """An image of any format, damaged, under any name."""
    shape = (chance.randrange(1, 40), chance.randrange(1, 40))
    mode = chance.choice(["RGB", "L", "P", "1", "RGBA"])
    file = BytesIO()
    format_ = chance.choice(FORMATS)
    pixels = np.frombuffer(chance.randbytes(shape[0] * shape[1] * 3), np.uint8).reshape(*shape, 3)
    image = Image.fromarray(pixels).convert(mode)
    if format_ in ("JPEG", "PPM") and mode in ("P", "RGBA"):
        image = image.convert("RGB")
    image.save(file, format_)
    kind = chance.choice(["image/png", "image/jpeg", "image/x-anything"])
    return Upload("/v1/predict", kind, damaged(file.getvalue(), chance), {})


def an_array(chance: random.Random) -> Upload:
    """A .npy file with a header of somebody's own, or damaged."""
    shapes = [
        "(1, 4)",
        "(4,)",
        "()",
        "(-1, -4)",
        "(0, 4)",
        "(2, 2)",
        "(True, 4)",
        f"(0, {10**30})",
        "(" + "1, " * 70 + "4)",
    ]
    kinds = ["<f4", ">f8", "<f2", "<i8", "|O", "<U4", "|V16", "<c8", "<M8[s]", "[('a', '<f4')]", "<f16", "|b1"]
    header = {"descr": chance.choice(kinds), "fortran_order": chance.choice([False, False, True, 7])}
    text = f"{header!r}"[:-1] + f", 'shape': {chance.choice(shapes)}}}"
    version = chance.choice([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x07"])
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", chance.choice([len(text), len(text), 2**15, 3]))
    body = b"\x93NUMPY" + version + length + text.encode() + chance.randbytes(chance.choice([0, 8, 16, 32, 64]))
    if chance.randrange(2):
        file = BytesIO()
        np.save(file, np.ones((chance.randrange(3), 4), chance.choice(["f4", "f8", "i2"])))
        body = damaged(file.getvalue(), chance)
    return Upload("/v1/predict", "application/x-npy", body, {})


def a_tensor(chance: random.Random) -> Upload:
    """A request of the Open Inference Protocol with anything anywhere, its numbers in JSON or behind it."""
    data = struct.pack("<4f", 1.0, 0.5, 0.0, 0.1)
    tensor: dict[str, Any] = {"name": "features", "shape": [1, 4], "datatype": "FP32", "data": [1.0, 0.5, 0.0, 0.1]}
    binary = b""
    if chance.randrange(2):
        del tensor["data"]
        tensor["parameters"] = {"binary_data_size": len(data)}
        binary = data
    document: dict[str, Any] = {"inputs": [tensor], "outputs": [{"name": "labels"}, {"name": "neighbor_origins"}]}
    text = json.dumps(changed(document, chance.choice([1, 1, 2, 5]), chance)).encode()
    stated = chance.choice([len(text), len(text), len(text), 0, len(text) + 1, 10**9])
    headers = {"Inference-Header-Content-Length": str(stated)}
    if chance.randrange(4) == 0:
        return Upload("/v2/models/adanpc/infer", "application/octet-stream", damaged(text + binary, chance), headers)
    return Upload("/v2/models/adanpc/infer", "application/octet-stream", text + binary, headers)


def some_json(chance: random.Random) -> Upload:
    """JSON for one of the routes that take it, with anything anywhere."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/predict": {"features": [[1.0, 0.5, 0.0, 0.1]], "request": ""},
        "/v1/preview": {"features": [1.0, 0.5, 0.0, 0.1], "without": [1, 2]},
        "/v1/veto": {"rows": [10**6], "why": "blurred"},
        "/v1/relabel": {"rows": [10**6], "label": "dog", "why": ""},
        "/v1/rollback": {"to": 10**6, "why": "", "preview": True},
        "/v1/undo": {"position": 10**6, "why": ""},
        "/v1/feedback": {"query": "q-0", "label": 1},
    }
    path = chance.choice(sorted(bodies))
    text = json.dumps(changed(bodies[path], chance.choice([1, 1, 2]), chance)).encode()
    if chance.randrange(4) == 0:
        text = damaged(text, chance)
    return Upload(path, "application/json", text, {})


def send(session: requests.Session, url: str, upload: Upload) -> requests.Response:
    return session.post(url + upload.path, data=upload.body, headers={"Content-Type": upload.kind, **upload.headers})


def resident() -> int:
    """Bytes of this process in memory, or 0 where nobody says."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return 0
    return int(status.read_text().split()[1]) * 4096


@pytest.mark.parametrize("make", [an_image, an_array, a_tensor, some_json])
def test_whatever_is_sent_is_answered_in_one_shape(url: str, make: Callable[[random.Random], Upload]) -> None:
    found: Counter[int] = Counter()
    before = 0
    with requests.Session() as session:
        for number in range(ROUNDS):
            if number == ROUNDS // 4:
                before = resident()  # by now everything has been imported and used
            upload = make(random.Random(number))
            answer = send(session, url, upload)
            found[answer.status_code] += 1
            assert answer.status_code < 500, (number, upload, answer.text)
            if answer.status_code >= 400:
                document = answer.json()
                assert set(document) == {"error", "code"}, (number, document)
                assert document["error"]
                assert "\n" not in document["error"]
        grown = resident() - before
        assert grown < GROWTH, f"{grown / 2**20:.0f} MiB more than after a quarter of {ROUNDS} requests"
        assert session.get(f"{url}/v2/health/ready").status_code == 200
        answer = session.post(f"{url}/v1/predict?adapt=false", json={"features": [[1.0, 0.0, 0.0, 0.1]]})
        assert answer.json()["answers"][0]["name"] == "cat"
    print(f"{make.__name__}: {dict(found)}, {grown / 2**20:.1f} MiB")  # noqa: T201
    assert sum(found[status] for status in found if status >= 400) > 0


@pytest.mark.parametrize(
    ("header", "numbers"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -4)}", 16),
        (f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0, {10**30})}}", 0),
        ("{'descr': '<f4', 'fortran_order': True, 'shape': (" + "1, " * 70 + "4)}", 16),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4)}", 16),
    ],
)
def test_a_npy_file_whose_shape_is_none(url: str, header: str, numbers: int) -> None:
    body = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(numbers)
    answer = requests.post(f"{url}/v1/predict", data=body, headers={"Content-Type": "application/x-npy"})
    assert (answer.status_code, answer.json()["error"]) == (400, "the shape is none that an array can have")


def test_a_tensor_of_nothing_whose_shape_is_too_large(url: str) -> None:
    tensor: dict[str, Any] = {
        "name": "features",
        "shape": [0, 2**31 - 1, 2**31 - 1, 2**31 - 1],
        "datatype": "FP32",
        "data": [],
    }
    answer = requests.post(f"{url}/v2/models/adanpc/infer", json={"inputs": [tensor]})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad-request")


def test_a_length_of_thousands_of_digits(url: str) -> None:
    headers = {"Inference-Header-Content-Length": "9" * 5000}
    answer = requests.post(f"{url}/v2/models/adanpc/infer", data=b"{}", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad-request")


# Images


def test_an_image_for_which_nobody_waits_any_more_stops_no_other() -> None:
    busy = threading.Event()
    free = threading.Event()

    def encode(images: Sequence[Any]) -> Tensor:
        busy.set()
        free.wait()
        return colors_of(images)

    encoder = BatchingEncoder(encode)
    pixels = np.zeros((2, 2, 3), np.uint8)
    first = encoder.submit(pixels)
    busy.wait()
    assert encoder.submit(pixels).cancel()  # its connection is gone
    last = encoder.submit(pixels)
    free.set()
    assert first.result(timeout=300).tolist() == last.result(timeout=300).tolist()
    encoder.close()


def test_an_encoder_that_gives_too_few_features_is_an_error_of_each_image() -> None:
    encoder = BatchingEncoder(lambda images: torch.zeros(0, DIM))
    for _ in range(2):  # the thread goes on
        with pytest.raises(ValueError, match="zip"):
            encoder.submit(np.zeros((2, 2, 3), np.uint8)).result(timeout=300)
    encoder.close()
