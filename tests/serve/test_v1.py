"""Every route of /v1, asked over a real connection and compared with the classifier itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from PIL import Image
from services import CLASSES, ROWS, encode, filled, png, queries, shifted

import adanpc
from adanpc.core import Append, Origin
from adanpc.serve import create, serving
from adanpc.store import Thumbnails

PNG = {"Content-Type": "image/png"}
NPY = {"Content-Type": "application/x-npy"}
KNOWN_IMAGE = np.full((300, 200, 3), 77, np.uint8)


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[adanpc.DurableBank]:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()) as opened:
        yield opened


@pytest.fixture
def url(bank: adanpc.DurableBank, tmp_path: Path) -> Iterator[str]:
    thumbnails = Thumbnails(tmp_path / "bank")
    with serving(create(bank, encoder=encode, thumbnails=thumbnails)) as address:
        yield address
    thumbnails.close()


def npy(array: Any) -> bytes:
    written = BytesIO()
    np.save(written, array)
    return written.getvalue()


def asked(url: str, features: Any, **parameters: Any) -> list[dict[str, Any]]:
    """The answers to features."""
    answered = requests.post(f"{url}/v1/predict", json={"features": features.tolist()}, params=parameters)
    assert answered.status_code == 200, answered.text
    answers: list[dict[str, Any]] = answered.json()["answers"]
    return answers


def changed(url: str, name: str, **body: Any) -> int:
    """The position after a change."""
    answered = requests.post(f"{url}/v1/{name}", json=body, headers={"X-Expert": "Ann"})
    assert answered.status_code == 200, answered.text
    return int(answered.json()["position"])


def test_features_are_answered_alike_as_json_and_npy(url: str, bank: adanpc.DurableBank) -> None:
    given = queries(3)
    expected = filled().predict(torch.from_numpy(given)).probs.tolist()
    assert [answer["probs"] for answer in asked(url, given, adapt="false")] == expected
    assert asked(url, given[0], adapt="false")[0]["probs"] == expected[0]
    for array in (given, given.astype(np.float64), np.asfortranarray(given), given.astype(">f4")):
        answered = requests.post(f"{url}/v1/predict?adapt=false", data=npy(array), headers=NPY).json()
        assert [answer["probs"] for answer in answered["answers"]] == expected
        assert answered["position"] == 1
    assert bank.position == 1


def test_an_answer_names_its_class_and_all_who_voted(url: str) -> None:
    given = queries(1)
    expected = filled().step(torch.from_numpy(given))
    (answer,) = asked(url, given)
    assert answer["name"] == CLASSES[answer["label"]]
    assert answer["confidence"] == max(answer["probs"])
    assert answer["frozen"] == pytest.approx(answer["probs"])
    shares = {}
    for row, weight in zip(expected.neighbors.ids[0].tolist(), expected.weights[0].tolist(), strict=True):
        if weight:
            shares[row] = weight
    assert {neighbor["id"]: neighbor["share"] for neighbor in answer["neighbors"]} == shares
    for neighbor in answer["neighbors"]:
        assert neighbor["origin"] == "source"
        assert neighbor["name"] == CLASSES[neighbor["id"] % 2]
        assert -1 <= neighbor["similarity"] <= 1
    listed = [neighbor["share"] for neighbor in answer["neighbors"]]
    assert listed == sorted(listed, reverse=True)


def test_a_request_that_is_sent_twice_enters_once(url: str, bank: adanpc.DurableBank) -> None:
    body = {"features": queries(5).tolist(), "request": "from a client that lost the first answer"}
    first, second = (requests.post(f"{url}/v1/predict", json=body).json() for _ in range(2))
    for one, other in zip(first["answers"], second["answers"], strict=True):
        assert (one["probs"], one["joined"]) == (other["probs"], other["joined"])
    joined = [answer for answer in first["answers"] if answer["joined"] is not None]
    assert joined
    assert len(bank.contents) == ROWS + len(joined)


def test_an_image_or_an_array_that_is_sent_twice_enters_once(url: str, bank: adanpc.DurableBank) -> None:
    for name, content, headers in (("photo 17", png(1), PNG), ("array", npy(queries(1)), NPY)):
        before = len(bank.contents)
        answers = []
        for _ in range(2):
            sent = requests.post(f"{url}/v1/predict", params={"request": name}, data=content, headers=headers)
            answers.append(sent.json()["answers"][0])
        assert answers[0]["joined"] == answers[1]["joined"] == before
        assert answers[0]["probs"] == answers[1]["probs"]
        assert len(bank.contents) == before + 1
    too_long = requests.post(f"{url}/v1/predict", params={"request": "x" * 201}, data=png(1), headers=PNG)
    assert too_long.json()["code"] == "invalid-value"


def test_an_image_is_encoded_answered_and_remembered_in_small(url: str) -> None:
    content = png(1, side=400)
    answered = requests.post(f"{url}/v1/predict", data=content, headers=PNG).json()["answers"][0]
    pixels = np.array(Image.open(BytesIO(content)))
    assert answered["probs"] == filled().step(encode([pixels])).probs[0].tolist()
    shown = requests.get(url + answered["picture"])
    assert shown.headers["content-type"] == "image/jpeg"
    assert max(Image.open(BytesIO(shown.content)).size) == 256
    row = answered["joined"]
    assert requests.get(f"{url}/v1/rows/{row}").json()["picture"] == f"/v1/rows/{row}/picture"
    assert requests.get(f"{url}/v1/rows/{row}/picture").content == shown.content
    nothing = requests.get(f"{url}/v1/rows/0/picture")
    assert (nothing.status_code, nothing.json()["code"]) == (404, "not-found")
    no_image = asked(url, queries(1))[0]
    assert no_image["picture"] is None
    assert requests.get(f"{url}/v1/queries/{no_image['query']}/picture").status_code == 404


def test_pictures_of_the_stream_are_kept_only_if_that_is_wanted(bank: adanpc.DurableBank, tmp_path: Path) -> None:
    with serving(create(bank, encoder=encode)) as url:
        answered = requests.post(f"{url}/v1/predict", data=png(1), headers=PNG).json()["answers"][0]
        assert not requests.get(f"{url}/v1/bank").json()["thumbnails"]
        assert requests.get(f"{url}/v1/rows/{answered['joined']}").json()["picture"] is None
        assert requests.get(f"{url}/v1/rows/{answered['joined']}/picture").status_code == 404
    assert not list((tmp_path / "bank").glob("thumbnails*"))


def test_pictures_of_source_rows_come_from_their_keys(tmp_path: Path) -> None:
    classifier = filled()
    classifier.apply(Append(torch.eye(4)[:2], torch.tensor([0, 1]), keys=torch.tensor([3, 4])))

    def image_of_key(key: int) -> Any:
        return KNOWN_IMAGE if key == 3 else None

    with (
        adanpc.DurableBank.create(tmp_path / "bank", classifier) as bank,
        serving(create(bank, image_of_key=image_of_key)) as url,
    ):
        assert requests.get(f"{url}/v1/rows/{ROWS}").json()["key"] == 3
        shown = Image.open(BytesIO(requests.get(f"{url}/v1/rows/{ROWS}/picture").content))
        assert shown.size == (171, 256)
        assert shown.getpixel((9, 9)) == (77, 77, 77)
        assert requests.get(f"{url}/v1/rows/{ROWS + 1}/picture").status_code == 404
        assert requests.get(f"{url}/v1/rows/0/picture").status_code == 404


def test_queries_are_listed_by_age_and_by_doubt(url: str) -> None:
    answers = asked(url, queries(6), adapt="false")
    latest = requests.get(f"{url}/v1/queries", params={"limit": 4}).json()["queries"]
    assert [query["query"] for query in latest] == ["q-6", "q-5", "q-4", "q-3"]
    doubtful = requests.get(f"{url}/v1/queries", params={"order": "uncertain"}).json()["queries"]
    assert [query["confidence"] for query in doubtful] == sorted(answer["confidence"] for answer in answers)
    again = requests.get(f"{url}/v1/queries/q-2").json()
    assert again == answers[1]
    assert requests.get(f"{url}/v1/queries/q-7").json()["code"] == "not-found"


def test_a_preview_is_the_vote_without_rows_and_leaves_no_trace(url: str, bank: adanpc.DurableBank) -> None:
    given = queries(1)
    (answer,) = asked(url, given, adapt="false")
    without = [neighbor["id"] for neighbor in answer["neighbors"][:3]]
    exclude = torch.tensor([without])
    expected = filled().predict(torch.from_numpy(given), exclude=exclude).probs[0].tolist()
    bodies: list[dict[str, Any]] = [{"query": answer["query"]}, {"features": given[0].tolist()}]
    for body in bodies:
        preview = requests.post(f"{url}/v1/preview", json={**body, "without": without}).json()
        assert preview["probs"] == expected
        assert not set(without) & {neighbor["id"] for neighbor in preview["neighbors"]}
    assert bank.position == 1
    bodies = [{}, {"query": "q-1", "features": [1.0, 0.0, 0.0, 0.0]}]
    for body in bodies:
        assert requests.post(f"{url}/v1/preview", json=body).status_code == 400


def test_a_query_that_joined_has_no_vote_on_itself(tmp_path: Path) -> None:
    classifier = adanpc.AdaNPC(adanpc.MemoryBank(4, 2), k=5, admission=adanpc.everyone)
    classifier.learn(torch.from_numpy(queries(10)), torch.tensor([0, 1] * 5))
    with adanpc.DurableBank.create(tmp_path / "bank", classifier) as bank, serving(create(bank)) as url:
        (answer,) = asked(url, queries(1, seed=1))
        assert answer["joined"] == 10
        preview = requests.post(f"{url}/v1/preview", json={"query": answer["query"]}).json()
        assert preview["probs"] == answer["probs"]
        by_features = requests.post(f"{url}/v1/preview", json={"features": queries(1, seed=1)[0].tolist()}).json()
        assert by_features["neighbors"][0]["id"] == 10


def test_changes_do_what_the_bank_does_and_are_signed(url: str, bank: adanpc.DurableBank) -> None:
    assert changed(url, "veto", rows=[1, 2], why="blurred") == 2
    assert set(bank.contents.vetoed) == {1, 2}
    assert changed(url, "restore", rows=[2], why="sharp enough") == 3
    assert set(bank.contents.vetoed) == {1}
    assert changed(url, "relabel", rows=[0], label="dog", why="it barks") == 4
    row = requests.get(f"{url}/v1/rows/0").json()
    assert (row["name"], row["vetoed"]) == ("dog", False)
    assert [(entry["kind"], entry["label"], entry["who"], entry["why"]) for entry in row["history"]] == [
        ("relabel", 0, "Ann", "it barks")
    ]
    assert changed(url, "relabel", rows=[0], label=0) == 5
    assert changed(url, "rollback", to=1, why="all of it was wrong") == 6
    assert not bank.contents.vetoed
    entries = requests.get(f"{url}/v1/log").json()["entries"]
    kinds = [entry["kind"] for entry in entries]
    assert kinds == ["rollback", "relabel", "relabel", "restore", "veto"]
    assert entries[0]["to"] == 1
    assert entries[4] == {
        "position": 2, "kind": "veto", "rows": 2, "ids": [1, 2], "who": "Ann", "why": "blurred",
        "when": entries[4]["when"], "undoable": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "body", "status", "code"),
    [
        ("veto", {"rows": [999]}, 404, "unknown-row"),
        ("veto", {"rows": []}, 422, "invalid-value"),
        ("veto", {"rows": [-1]}, 422, "invalid-value"),
        ("veto", {"rows": [1], "reason": "a field that is not known"}, 422, "invalid-value"),
        ("veto", {"rows": [1], "why": "x" * 2001}, 422, "invalid-value"),
        ("relabel", {"rows": [1], "label": "cow"}, 422, "bad-labels"),
        ("relabel", {"rows": [1], "label": 2}, 422, "bad-labels"),
        ("relabel", {"rows": [1], "label": True}, 422, "invalid-value"),
        ("rollback", {"to": 7}, 404, "not-found"),
        ("rollback", {"to": 0, "preview": True}, 404, "not-found"),
        ("undo", {"position": 7}, 404, "not-found"),
        ("undo", {"position": 1}, 404, "not-found"),
        ("feedback", {"query": "q-1", "label": 0}, 404, "not-found"),
        ("delete", {"rows": [1], "why": ""}, 422, "invalid-value"),
    ],
)
def test_changes_that_cannot_be_made_are_refused_and_none_is_made(
    url: str, bank: adanpc.DurableBank, name: str, body: dict[str, Any], status: int, code: str
) -> None:
    refused = requests.post(f"{url}/v1/{name}", json=body)
    assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert set(refused.json()) == {"error", "code"}
    assert bank.position == 1


def labels_of(bank: adanpc.DurableBank, rows: int) -> list[int]:
    """The labels of the first rows."""
    labels: list[int] = bank.contents.table("label")["label"][:rows].tolist()
    return labels


def test_a_correction_of_different_labels_is_taken_back_whole(url: str, bank: adanpc.DurableBank) -> None:
    position = changed(url, "relabel", rows=[0, 1, 2], label=1)
    veto = changed(url, "veto", rows=[2])
    undone = changed(url, "undo", position=position)
    assert undone == veto + 1  # by one change
    assert labels_of(bank, 3) == [0, 1, 0]
    entry = requests.get(f"{url}/v1/log").json()["entries"][0]
    assert (entry["ids"], entry["label"], entry["undoable"]) == ([0, 1, 2], [0, 1, 0], True)
    again = changed(url, "undo", position=undone)
    assert labels_of(bank, 3) == [1, 1, 1]
    changed(url, "undo", position=again)
    assert labels_of(bank, 3) == [0, 1, 0]
    assert 2 in bank.contents.vetoed  # the other judgment stands
    changed(url, "undo", position=veto)
    assert 2 not in bank.contents.vetoed
    asked(url, queries(1))
    refused = requests.post(f"{url}/v1/undo", json={"position": bank.position})
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")


def test_of_two_experts_who_take_the_same_change_back_at_once_one_does(url: str, bank: adanpc.DurableBank) -> None:
    for _ in range(10):
        position = changed(url, "relabel", rows=[0, 1, 2], label=1)
        with ThreadPoolExecutor(2) as experts:
            asked = [experts.submit(requests.post, f"{url}/v1/undo", json={"position": position}) for _ in range(2)]
        assert sorted(one.result().status_code for one in asked) == [200, 409]
        assert bank.position == position + 1
        assert labels_of(bank, 3) == [0, 1, 0]


def test_deleted_rows_are_gone_with_their_pictures(url: str, bank: adanpc.DurableBank) -> None:
    row = requests.post(f"{url}/v1/predict", data=png(1), headers=PNG).json()["answers"][0]["joined"]
    assert requests.get(f"{url}/v1/rows/{row}/picture").status_code == 200
    changed(url, "delete", rows=[row], why="a person asked for it")
    assert requests.get(f"{url}/v1/rows/{row}").json()["code"] == "unknown-row"
    assert requests.get(f"{url}/v1/rows/{row}/picture").status_code == 404
    changed(url, "rollback", to=2)
    assert requests.get(f"{url}/v1/rows/{row}").status_code == 404


def test_a_rollback_shows_first_what_it_would_change(url: str, bank: adanpc.DurableBank) -> None:
    asked(url, queries(8))
    changed(url, "relabel", rows=list(range(0, ROWS, 2)), label=1)
    preview = requests.post(f"{url}/v1/rollback", json={"to": 1, "preview": True}).json()
    joined = len(bank.contents) - ROWS
    assert (preview["changes"], preview["rows_leaving"], preview["labels_changing"]) == (2, joined, ROWS // 2)
    features = torch.from_numpy(queries(8))
    now = bank.predict(features).labels.tolist()
    then = filled().predict(features).labels.tolist()
    differing = [number for number in range(8) if now[number] != then[number]]
    assert sorted(query["query"] for query in preview["queries"]) == [f"q-{number + 1}" for number in differing]
    assert bank.position == 3


def test_a_rollback_shows_which_vetoes_it_would_change(url: str, bank: adanpc.DurableBank) -> None:
    position = changed(url, "veto", rows=[1, 2, 3])
    changed(url, "restore", rows=[3])
    changed(url, "veto", rows=[4])
    for to, changing in ((1, 3), (position, 2), (bank.position, 0)):
        preview = requests.post(f"{url}/v1/rollback", json={"to": to, "preview": True}).json()
        assert preview["vetoes_changing"] == changing


def test_questions_are_those_of_the_bank_and_labels_are_noted(tmp_path: Path) -> None:
    classifier, given = shifted()
    expected = classifier.ask(given.flip(0), most=20)  # the newest query comes first
    with adanpc.DurableBank.create(tmp_path / "bank", classifier) as bank, serving(create(bank)) as url:
        assert requests.get(f"{url}/v1/ask").json() == {"questions": []}
        asked(url, given.numpy(), adapt="false")
        questions = requests.get(f"{url}/v1/ask").json()["questions"]
        assert [question["query"] for question in questions] == [f"q-{60 - question.query}" for question in expected]
        assert len(questions) > 5
        first = questions[0]
        assert (first["frozen_label"], first["adapted_label"]) == (expected[0].frozen, expected[0].adapted)
        changed(url, "feedback", query=first["query"], label=first["adapted_label"], why="I know it")
        entry = requests.get(f"{url}/v1/log").json()["entries"][0]
        assert (entry["kind"], entry["label"], entry["who"]) == ("feedback", first["adapted_label"], "Ann")
        agreed = {f"q-{number}" for number in range(1, 61)} - {question["query"] for question in questions}
        refused = requests.post(f"{url}/v1/feedback", json={"query": sorted(agreed)[0], "label": 0})
        assert (refused.status_code, refused.json()["code"]) == (409, "conflict")


def test_the_log_finds_what_people_did_among_what_joined(url: str, bank: adanpc.DurableBank) -> None:
    for number in range(30):
        asked(url, queries(1, seed=number))
        if number % 10 == 5:
            changed(url, "veto", rows=[number])
    people = requests.get(f"{url}/v1/log?kind=expert&limit=2").json()
    assert [entry["ids"] for entry in people["entries"]] == [[25], [15]]
    rest = requests.get(f"{url}/v1/log?kind=expert&before={people['before']}").json()
    assert [entry["ids"] for entry in rest["entries"]] == [[5]]
    assert rest["before"] is None
    seen = []
    before = ""
    while True:
        page = requests.get(f"{url}/v1/log?limit=7{before}").json()
        seen += [entry["position"] for entry in page["entries"]]
        if page["before"] is None:
            break
        before = f"&before={page['before']}"
    assert seen == list(range(bank.position, bank.log.start, -1))


def test_the_bank_describes_itself(url: str, bank: adanpc.DurableBank) -> None:
    asked(url, queries(3))
    changed(url, "veto", rows=[0])
    described = requests.get(f"{url}/v1/bank?digest=true", headers={"X-Expert": "J%C3%BCrgen"}).json()
    assert described["who"] == "Jürgen"
    assert described["digest"] == bank.digest()
    assert described["rows"] == described["source_rows"] + described["stream_rows"] == len(bank.contents)
    assert (described["vetoed_rows"], described["classes"], described["dim"]) == (1, list(CLASSES), 4)
    assert described["signs"]["queries"] == described["stream_rows"]
    assert (described["position"], described["log_start"], described["preset"]) == (3, 1, "safe")


def test_the_map_has_every_row_and_does_not_turn_as_rows_join(url: str) -> None:
    def points() -> tuple[dict[str, Any], Any, Any]:
        header, _, columns = requests.get(f"{url}/v1/map").content.partition(b"\n")
        count = json.loads(header)["count"]
        ids = np.frombuffer(columns[: 8 * count], "<i8")
        plane = np.frombuffer(columns[8 * count : 16 * count], "<f4").reshape(2, count)
        return json.loads(header), ids, plane

    header, ids, before = points()
    assert header["classes"] == list(CLASSES)
    assert ids.tolist() == list(range(ROWS))
    # The first axis is the one along which rows differ most: the two classes lie on either side.
    assert len({before[0, number] > before[0].mean() for number in range(0, ROWS, 2)}) == 1
    asked(url, queries(5))
    _, ids, after = points()
    assert len(ids) == ROWS + 5
    np.testing.assert_array_equal(after[:, :ROWS], before)
    assert len(requests.get(f"{url}/v1/map?limit=3").content.partition(b"\n")[2]) == 3 * 20


def test_the_timeline_has_shares_however_requests_are_cut(url: str) -> None:
    answers = asked(url, queries(10))
    answers += asked(url, queries(2, seed=5), adapt="false")
    points = requests.get(f"{url}/v1/timeline").json()["points"]
    assert [point["queries"] for point in points] == [10, 2]
    joined = sum(answer["joined"] is not None for answer in answers)
    assert points[0]["joined"] == joined / 10
    assert points[1]["joined"] == 0
    assert sum(points[0]["shares"]) == pytest.approx(1)
    confidence = sum(answer["confidence"] for answer in answers[:10]) / 10
    assert points[0]["confidence"] == pytest.approx(confidence)
    (one,) = requests.get(f"{url}/v1/timeline?points=1").json()["points"]
    assert (one["queries"], one["joined"]) == (12, joined / 12)


def test_a_timeline_begins_with_what_joined_before_the_process(tmp_path: Path) -> None:
    with adanpc.DurableBank.create(tmp_path / "bank", filled()) as bank:
        bank.classify(torch.from_numpy(queries(7)))
    with adanpc.DurableBank.open(tmp_path / "bank") as bank, serving(create(bank)) as url:
        points = requests.get(f"{url}/v1/timeline").json()["points"]
        assert sum(point["queries"] for point in points) == len(bank.contents) - ROWS


def test_whoever_listens_hears_answers_and_changes(url: str) -> None:
    with requests.get(f"{url}/v1/events", stream=True) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines(chunk_size=1)
        next(lines)  # somebody listens now
        (answer,) = asked(url, queries(1))
        position = changed(url, "veto", rows=[3])
        heard: dict[str, Any] = {}
        kind = ""
        while not {"answer", "change", "signs"} <= heard.keys():
            line = next(lines).decode()
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                heard[kind] = json.loads(line.removeprefix("data: "))
                if kind == "change":
                    requests.get(f"{url}/v1/bank")  # looks at the signs, which are told, too, once a second
    assert heard["answer"] == {
        "query": answer["query"], "label": answer["label"], "confidence": answer["confidence"],
        "joined": answer["joined"],
    }  # fmt: skip
    assert heard["change"] == {"position": position, "kind": "veto", "rows": 1, "who": "Ann"}
    assert "words" in heard["signs"]


def test_a_row_of_the_stream_says_how_it_came(url: str) -> None:
    (answer,) = asked(url, queries(1))
    row = requests.get(f"{url}/v1/rows/{answer['joined']}").json()
    assert (row["origin"], row["label"]) == (Origin.ADMITTED.name.lower(), answer["label"])
    assert sum(row["probs"]) == pytest.approx(1, abs=1e-5)
    assert row["key"] is None
    assert requests.get(f"{url}/v1/rows/999").json()["code"] == "unknown-row"


def test_a_change_is_told_at_its_own_position_however_much_happens_meanwhile(
    url: str, bank: adanpc.DurableBank
) -> None:
    """Whoever takes it back by this position must not take back what somebody else did."""
    ended = threading.Event()

    def ask() -> None:
        with requests.Session() as session:
            number = 0
            while not ended.is_set():
                number += 1
                session.post(f"{url}/v1/predict", json={"features": queries(1, seed=number).tolist()})

    def judge(expert: int) -> list[tuple[int, str, str]]:
        made = []
        for number in range(20):
            why = f"{expert}-{number}"
            for kind in ("veto", "restore"):
                made.append((changed(url, kind, rows=[expert], why=why), kind, why))
            made.append((changed(url, "relabel", rows=[expert], label=1, why=why), "relabel", why))
            made.append((changed(url, "undo", position=made[-1][0], why=why), "relabel", why))
        return made

    with ThreadPoolExecutor(5) as people:
        for _ in range(3):
            people.submit(ask)
        told = [people.submit(judge, expert) for expert in range(2)]
        try:
            made = [each for one in told for each in one.result()]
            for turn in range(10):
                made.append((changed(url, "rollback", to=bank.log.start, why=str(turn)), "rollback", str(turn)))
        finally:
            ended.set()
    changes = dict(enumerate(bank.log.read(bank.log.start), bank.log.start + 1))
    for position, kind, why in made:
        change = changes[position]
        assert (type(change).__name__.lower(), change.why) == (kind, why)
