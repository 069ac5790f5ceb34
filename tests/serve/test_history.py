"""What many clients were answered at the same time is what one after another would have been answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import requests
import torch
from PIL import Image
from torch import Tensor

import adanpc
from adanpc.core import Append
from adanpc.serve import create, serving
from adanpc.store import Thumbnails

CLIENTS = 8
EACH = 6


def fresh() -> adanpc.AdaNPC:
    classifier = adanpc.AdaNPC(adanpc.MemoryBank(4, 2), k=5, admission=adanpc.everyone)
    features = torch.eye(4)[[0, 1] * 10] + 0.3 * torch.rand(20, 4, generator=torch.Generator().manual_seed(0))
    classifier.learn(features, torch.tensor([0, 1] * 10))
    return classifier


def encode(images: Sequence[Any]) -> Tensor:
    """The mean of each color, and a constant: it does not depend on what else is in the batch."""
    return torch.tensor([[*pixels.mean((0, 1)), 50.0] for pixels in images], dtype=torch.float32)


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (3, 5, 3)).astype(np.uint8) // (1 + seed % 3)
    written = BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def pixels_of(content: bytes) -> Any:
    return np.array(Image.open(BytesIO(content)))


def test_every_answer_is_that_of_an_independent_replay(tmp_path: Path) -> None:
    with adanpc.DurableBank.create(tmp_path / "bank", fresh()) as bank:
        app = create(bank, encoder=encode, thumbnails=Thumbnails(tmp_path / "bank"))
        with serving(app) as url:

            def client(number: int) -> list[tuple[bytes, dict[str, Any]]]:
                heard = []
                with requests.Session() as session:
                    for turn in range(EACH):
                        content = png(100 * number + turn)
                        answered = session.post(
                            f"{url}/v1/predict", data=content, headers={"Content-Type": "image/png"}
                        )
                        heard.append((content, answered.json()["answers"][0]))
                    session.post(f"{url}/v1/veto", json={"rows": [number]}).raise_for_status()
                return heard

            with ThreadPoolExecutor(CLIENTS) as pool:
                heard = [pair for pairs in pool.map(client, range(CLIENTS)) for pair in pairs]
            joined = heard[0][1]["joined"]
            assert requests.get(f"{url}/v1/rows/{joined}/picture").headers["content-type"] == "image/jpeg"
        by_row = {answer["joined"]: (content, answer) for content, answer in heard}
        assert len(by_row) == CLIENTS * EACH
        replayed = fresh()
        for change in bank.log.read(bank.log.start):
            if not isinstance(change, Append):
                replayed.apply(change)
                continue
            for _ in range(len(change.labels)):
                content, answer = by_row.pop(replayed.bank.next_id)
                expected = replayed.step(encode([pixels_of(content)]))
                assert answer["probs"] == expected.probs[0].tolist()
                voted = expected.neighbors.ids[0][expected.weights[0] != 0].tolist()
                assert sorted(neighbor["id"] for neighbor in answer["neighbors"]) == sorted(voted)
        assert not by_row


def test_what_people_look_at(tmp_path: Path) -> None:
    with adanpc.DurableBank.create(tmp_path / "bank", fresh()) as bank, serving(create(bank, encoder=encode)) as url:
        stream = requests.get(f"{url}/v1/events", stream=True)
        lines = stream.iter_lines(chunk_size=1)
        assert next(lines) == b": ping"
        requests.post(f"{url}/v1/predict?adapt=false", data=png(1), headers={"Content-Type": "image/png"})
        while not (line := next(lines)).startswith(b"data"):
            pass
        assert json.loads(line.removeprefix(b"data: "))["query"] == "q-1"
        stream.close()
        assert requests.get(f"{url}/v1/bank?digest=true").json()["digest"] == bank.digest()
        before = bank.position
        requests.post(f"{url}/v1/relabel", json={"rows": [0], "label": 1}).raise_for_status()
        preview = requests.post(f"{url}/v1/rollback", json={"to": before, "preview": True}).json()
        assert (preview["changes"], preview["labels_changing"], preview["rows_leaving"]) == (1, 1, 0)
        requests.post(f"{url}/v1/rollback", json={"to": before}).raise_for_status()
        assert [entry["kind"] for entry in requests.get(f"{url}/v1/log").json()["entries"]][:2] == [
            "rollback",
            "relabel",
        ]
        header, _, columns = requests.get(f"{url}/v1/map").content.partition(b"\n")
        assert json.loads(header)["count"] == 20
        assert len(columns) == 20 * (8 + 4 + 4 + 2 + 1 + 1)
        assert requests.get(f"{url}/v1/timeline").json()["points"][0]["queries"] == 1
        assert requests.get(f"{url}/v1/queries?order=uncertain").json()["queries"][0]["query"] == "q-1"
        assert b"adanpc_log_position 3.0" in requests.get(f"{url}/metrics").content
        broken = requests.post(f"{url}/v1/predict", data=b"no image", headers={"Content-Type": "image/png"})
        assert broken.status_code == 415
        assert requests.post(f"{url}/v1/feedback", json={"query": "q-1", "label": 0}).status_code == 422


def test_every_inference_answer_is_that_of_an_independent_replay(tmp_path: Path) -> None:
    """Programs ask in JSON, with several queries at a time, twice with the same id, and now and then wrongly."""

    def document(number: int, turn: int) -> dict[str, Any]:
        random = np.random.default_rng(100 * number + turn)
        values = random.random((1 + turn % 3, 4), dtype=np.float32)
        given = {"name": "features", "shape": list(values.shape), "datatype": "FP32", "data": values.ravel().tolist()}
        return {"id": f"{number} {turn}", "inputs": [given]}

    with adanpc.DurableBank.create(tmp_path / "bank", fresh()) as bank, serving(create(bank)) as url:

        def client(number: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
            heard = []
            with requests.Session() as session:
                for turn in range(EACH):
                    sent = document(number, turn)
                    answers = [session.post(f"{url}/v2/models/adanpc/infer", json=sent).json() for _ in range(2)]
                    assert answers[0] == answers[1]
                    heard.append((sent, answers[0]))
                    wrong = {**sent, "id": "", "inputs": [{**sent["inputs"][0], "data": [0] * 4, "shape": [1, 4]}]}
                    assert session.post(f"{url}/v2/models/adanpc/infer", json=wrong).status_code == 422
            return heard

        with ThreadPoolExecutor(CLIENTS) as pool:
            heard = [pair for pairs in pool.map(client, range(CLIENTS)) for pair in pairs]
        replayed = fresh()
        in_order = sorted(heard, key=lambda pair: output(pair[1], "joined")[0])
        for sent, answer in in_order:
            features = torch.tensor(sent["inputs"][0]["data"]).reshape(sent["inputs"][0]["shape"])
            expected = replayed.step(features)
            assert output(answer, "joined") == expected.joined.tolist()
            assert output(answer, "labels") == expected.labels.tolist()
            assert output(answer, "probs") == expected.probs.flatten().tolist()
        assert replayed.bank.next_id == bank.contents.next_id


def output(answer: dict[str, Any], name: str) -> list[Any]:
    (found,) = [tensor["data"] for tensor in answer["outputs"] if tensor["name"] == name]
    numbers: list[Any] = found
    return numbers
