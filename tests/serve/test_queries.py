"""The latest queries, in memory and across a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from services import encode, filled, png, queries

import adanpc
from adanpc.serve import create, service, serving
from adanpc.serve.errors import NotFoundError
from adanpc.serve.queries import SKIPPED, Queries
from adanpc.store import Thumbnails
from adanpc.store.latest import FILE


def kept(most: int, *counts: int) -> Queries:
    made = Queries(most)
    classifier = filled()
    for seed, count in enumerate(counts):
        features = torch.from_numpy(queries(count, seed))
        made.keep(features, classifier.step(features), float(seed))
    return made


def names(given: Queries) -> list[str]:
    return [query.name for query in given]


def test_the_newest_are_kept_under_names_that_are_given_once() -> None:
    assert names(kept(3, 2, 0, 1, 1)) == ["q-4", "q-3", "q-2"]
    assert len(kept(3, 5)) == 3
    assert names(kept(3)) == []
    given = kept(3, 2, 2)
    assert given.find("q-3").time == 1.0
    with pytest.raises(NotFoundError, match="only the latest 3 are kept"):
        given.find("q-1")


def test_queries_that_became_certain_rows_are_forgotten() -> None:
    given = kept(3, 2, 2)
    row = given.find("q-3").own_rows[0]
    given.forget([row, 10_000])
    assert names(given) == ["q-4", "q-2", "q-1"]
    given.keep(torch.ones(3, 4), filled().predict(torch.ones(3, 4)), 2.0)
    assert names(given) == ["q-7", "q-6", "q-5"]


@pytest.mark.parametrize("ended", [True, False])
def test_another_process_goes_on(ended: bool) -> None:
    before = kept(3, 2, 2)
    before.forget(before.find("q-3").own_rows)
    latest = before.latest(ended=ended)
    assert latest is not None
    after = Queries(3)
    after.restore(latest)
    assert names(after) == ["q-4", "q-2", "q-1"]
    for own, other in zip(after, before, strict=True):
        assert own.features.equal(other.features)
        assert own.own_rows == other.own_rows
        assert own.confidence == other.confidence
    after.keep(torch.ones(1, 4), filled().predict(torch.ones(1, 4)), 2.0)
    assert names(after)[0] == f"q-{5 if ended else 5 + SKIPPED}"
    assert Queries().latest(ended=True) is None


def asked(url: str, content: bytes) -> dict[str, Any]:
    answer = requests.post(f"{url}/v1/predict", data=content, headers={"Content-Type": "image/png"})
    (one,) = answer.json()["answers"]
    found: dict[str, Any] = one
    return found


@pytest.mark.parametrize("with_pictures", [True, False])
def test_the_latest_answers_are_there_after_a_restart(tmp_path: Path, with_pictures: bool) -> None:
    folder = tmp_path / "bank"
    adanpc.DurableBank.create(folder, filled()).close()

    def options() -> dict[str, Any]:
        thumbnails = Thumbnails(folder) if with_pictures else None
        return {"encoder": encode, "folder": folder, "thumbnails": thumbnails}

    with adanpc.DurableBank.open(folder) as bank, serving(create(bank, **options())) as url:
        first = asked(url, png(1))
        second = asked(url, png(2))
    with adanpc.DurableBank.open(folder) as bank, serving(create(bank, **options())) as url:
        listed = requests.get(f"{url}/v1/queries").json()["queries"]
        assert [query["query"] for query in listed] == [second["query"], first["query"]]
        found = requests.get(f"{url}/v1/queries/{first['query']}").json()
        if not with_pictures:  # they may be private, and are kept if that is asked for
            assert found["picture"] is None
        else:
            assert requests.get(url + found["picture"]).headers["content-type"] == "image/jpeg"
        assert {**found, "picture": first["picture"]} == first
        preview = requests.post(f"{url}/v1/preview", json={"query": second["query"]})
        assert preview.status_code == 200
        body = {"rows": [first["joined"]], "why": "private"}
        requests.post(f"{url}/v1/delete", json=body).raise_for_status()
        assert requests.get(f"{url}/v1/queries/{first['query']}").status_code == 404
        before_the_end = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(before_the_end)  # as if it had been killed
    with adanpc.DurableBank.open(folder) as bank, serving(create(bank, **options())) as url:
        listed = requests.get(f"{url}/v1/queries").json()["queries"]
        assert [query["query"] for query in listed] == [second["query"]]
        assert asked(url, png(3))["query"] == f"q-{3 + SKIPPED}"


def test_they_are_saved_while_the_service_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BETWEEN_SAVES", 0.0)
    folder = tmp_path / "bank"
    app_options: dict[str, Any] = {"folder": folder, "encoder": encode}
    with adanpc.DurableBank.create(folder, filled()) as bank, serving(create(bank, **app_options)) as url:
        asked(url, png(1))
        while not (folder / FILE).exists():
            time.sleep(0.01)
        (folder / FILE).unlink()
        (folder / FILE).mkdir()
        assert asked(url, png(2))["query"] == "q-2"  # what cannot be saved disturbs nobody
