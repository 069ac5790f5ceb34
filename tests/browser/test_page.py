"""The expert's page in a real browser, as people use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from services import drawn_png, shifted
from torch import Tensor

import adanpc
from adanpc.core import Relabel
from adanpc.lab.data.drawn import draw_thing
from adanpc.serve import Tokens, add_token, create, serving

Opened = Callable[..., Page]
VIEWS = ("answers", "answers/q-12", "questions", "stream", "map", "changes")
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
WRONG = 5  # the row whose label is wrong
SEVERE = ("serious", "critical")
MORE_CLASSES = tuple(f"thing {number}" for number in range(28))

expect.set_options(timeout=120_000)


def settled(page: Page) -> None:
    """Waits until the view is drawn and live."""
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator("[aria-busy=true]")).to_have_count(0)


def say_who(page: Page, name: str) -> None:
    page.get_by_role("button", name="Who are you?").click()
    page.get_by_label("Name").fill(name)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("button", name=name)).to_be_visible()


def cards(page: Page) -> Any:
    return page.locator(".neighbor")


def first_rows(page: Page, count: int) -> list[int]:
    expect(cards(page).first).to_be_visible()
    return [int(cards(page).nth(place).get_attribute("data-row") or -1) for place in range(count)]


def entries(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = requests.get(f"{url}/v1/log?kind=expert").json()["entries"]
    return found


# Answers


def test_an_image_is_chosen_and_its_answer_taken_apart(opened: Opened, address: str, tmp_path: Path) -> None:
    file = tmp_path / "fish.png"
    draw_thing("fish", "cartoon", 500).save(file)
    page = opened(address)
    page.get_by_label("Choose an image").set_input_files(file)
    expect(page.locator(".verdict")).to_be_visible()
    answer = requests.get(f"{address}/v1/queries/q-13").json()
    assert answer["joined"] is None  # it learns only if that is ticked
    expect(page.locator(".verdict")).to_have_text(answer["name"])
    rows = first_rows(page, 10)
    assert rows == [neighbor["id"] for neighbor in answer["neighbors"][:10]]
    first = cards(page).first
    expect(first).to_contain_text(answer["neighbors"][0]["name"])
    expect(first).to_contain_text(f"{answer['neighbors'][0]['similarity']:.3f}")
    expect(first).to_contain_text("source")
    assert first.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    shown = page.locator(".bars .number").all_text_contents()
    assert shown[0] == f"{round(100 * max(answer['probs']))}\u00a0%"
    page.get_by_role("button", name="more row").click()
    expect(cards(page)).to_have_count(len(answer["neighbors"]))


def test_an_image_is_dropped_and_may_be_learned_from(opened: Opened, address: str, bank: adanpc.DurableBank) -> None:
    page = opened(address)
    page.get_by_label("The bank may learn from it").check()
    content = list(drawn_png("house", 501))
    transfer = page.evaluate_handle(
        """content => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(content)], "house.png", { type: "image/png" }));
            return transfer;
        }""",
        content,
    )
    page.dispatch_event(".drop", "drop", {"dataTransfer": transfer})
    expect(page).to_have_url(f"{address}/#/answers/q-13")
    expect(cards(page).first).to_be_visible()
    joined = requests.get(f"{address}/v1/queries/q-13").json()["joined"]
    assert joined == bank.contents.next_id - 1
    expect(page.locator(".bench .facts")).to_contain_text(f"as row {joined}")


def test_a_file_that_is_no_image_is_refused_in_a_sentence(opened: Opened, address: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.png"
    file.write_text("no image")
    page = opened(address)
    page.get_by_label("Choose an image").set_input_files(file)
    expect(page.locator(".drop").get_by_role("alert")).to_contain_text("The image is none of JPEG, PNG")


def test_answers_are_listed_by_age_and_by_doubt(opened: Opened, address: str) -> None:
    page = opened(address)
    links = page.locator(".answer-list a")
    for order, text in (("latest", "Latest"), ("uncertain", "Least certain")):
        page.get_by_text(text, exact=True).click()
        listed = requests.get(f"{address}/v1/queries", params={"order": order}).json()["queries"]
        for place, query in enumerate(listed[:4]):
            expect(links.nth(place)).to_have_attribute("data-query", query["query"])


def test_a_veto_is_previewed_confirmed_with_a_reason_and_lasts(
    opened: Opened, address: str, bank: adanpc.DurableBank
) -> None:
    page = opened(address, "answers/q-12")
    rows = first_rows(page, 2)
    for row in rows:
        page.locator(f"#votes-{row}").uncheck()
    preview = requests.post(f"{address}/v1/preview", json={"query": "q-12", "without": rows}).json()
    after = f"{preview['name']} {round(100 * preview['confidence'])} %"
    expect(page.locator(".outcome")).to_contain_text("Without 2 rows: ")
    expect(page.locator(".outcome")).to_contain_text(after.replace(" %", "\u00a0%"))
    assert bank.position == 13, "a preview changes nothing"
    page.get_by_role("button", name="Veto 2 rows").click()
    expect(page.get_by_role("alert").filter(has_text="Say why")).to_be_visible()
    page.get_by_label("Why should they not vote?").fill("They are blurred.")
    page.get_by_role("button", name="Veto 2 rows").click()
    expect(page.get_by_text("Vetoed 2 rows.")).to_be_visible()
    assert set(bank.contents.vetoed) == set(rows)
    page.reload()
    assert not set(rows) & set(first_rows(page, 5))
    expect(page.get_by_role("heading", name="Vetoed since it was asked")).to_be_visible()


def test_ticking_a_row_on_again_brings_the_vote_back(opened: Opened, address: str) -> None:
    page = opened(address, "answers/q-12")
    (row,) = first_rows(page, 1)
    before = page.locator(".bars .number").all_text_contents()
    page.locator(f"#votes-{row}").uncheck()
    expect(page.locator(".trial")).to_be_visible()
    page.get_by_role("button", name="Reset").click()
    expect(page.locator(".trial")).to_be_hidden()
    expect(page.locator(f"#votes-{row}")).to_be_checked()
    assert page.locator(".bars .number").all_text_contents() == before


def test_a_label_is_corrected_and_taken_back(opened: Opened, address: str, bank: adanpc.DurableBank) -> None:
    page = opened(address, "map")
    say_who(page, "Zoë")
    page.get_by_label("Row", exact=True).fill(str(WRONG))
    page.get_by_role("button", name="Find").click()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name=f"Row {WRONG}")
    expect(dialog).to_contain_text("Nobody has changed this row.")
    dialog.get_by_label("Why?").fill("It is a tree.")
    dialog.get_by_role("button", name="Correct the label").click()
    expect(dialog.get_by_role("alert")).to_contain_text("already labeled boat")
    dialog.get_by_label("Label").select_option("tree")
    dialog.get_by_role("button", name="Correct the label").click()
    expect(dialog).to_contain_text("Zoë relabeled it, which was boat before")
    expect(dialog.locator(".facts")).to_contain_text("tree")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_text("was taken back")).to_be_visible()
    kinds = [(entry["kind"], entry["who"], entry["label"]) for entry in entries(address)]
    assert kinds == [("relabel", "Zoë", 0), ("relabel", "Zoë", 5)]


def test_a_wrong_answer_that_joined_is_corrected_where_it_is_seen(
    opened: Opened, address: str, bank: adanpc.DurableBank
) -> None:
    joined = requests.get(f"{address}/v1/queries/q-12").json()["joined"]
    page = opened(address, "answers/q-12")
    page.get_by_label("It is").select_option("cup")
    page.get_by_label("How do you know?").fill("I drew it.")
    page.get_by_role("button", name="Tell the bank").click()
    expect(page.get_by_text(f"Row {joined} is now labeled cup.")).to_be_visible()
    assert requests.get(f"{address}/v1/rows/{joined}").json()["name"] == "cup"


# Several people


def test_two_experts_see_what_the_other_does(opened: Opened, address: str, bank: adanpc.DurableBank) -> None:
    ann = opened(address, "answers/q-12")
    bob = opened(address, "answers/q-12")
    say_who(ann, "Ann")
    say_who(bob, "Bob")
    both = first_rows(bob, 2)
    bob.locator(f"#votes-{both[0]}").uncheck()
    bob.locator(f"#votes-{both[1]}").uncheck()
    expect(bob.locator(".outcome")).to_contain_text("Without 2 rows")
    ann.locator(f"#votes-{both[0]}").uncheck()
    ann.get_by_label("Why should they not vote?").fill("Ann's reason.")
    ann.get_by_role("button", name="Veto 1 row").click()
    expect(bob.get_by_text("Ann vetoed 1 row.")).to_be_visible()
    expect(bob.locator(".outcome")).to_contain_text("Without 1 row:")  # his own tick stays, hers has come true
    expect(bob.locator(f"#votes-{both[0]}")).to_have_count(0)
    bob.get_by_label("Why should they not vote?").fill("Bob's reason.")
    bob.get_by_role("button", name="Veto 1 row").click()
    expect(ann.get_by_text("Bob vetoed 1 row.")).to_be_visible()
    assert set(bank.contents.vetoed) == set(both)
    bob.get_by_role("link", name="Changes").click()
    expect(bob.locator(".entry")).to_have_count(2)
    expect(bob.locator(".entry").last).to_contain_text("Ann's reason.")
    bob.locator(".entry").last.get_by_role("button", name="Undo").click()
    expect(ann.get_by_text("Bob restored 1 row.")).to_be_visible()
    assert set(bank.contents.vetoed) == {both[1]}
    expect(bob.locator(".entry")).to_have_count(3)
    expect(bob.locator(".entry").last.get_by_role("button", name="Undo")).to_have_count(0)


def test_a_correction_of_rows_with_different_labels_is_taken_back_by_one_change(
    opened: Opened, address: str, bank: adanpc.DurableBank
) -> None:
    rows = [0, 1, 2]
    before = bank.contents.table("label")["label"][rows].tolist()
    requests.post(f"{address}/v1/relabel", json={"rows": rows, "label": 1})
    page = opened(address, "changes")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".entry")).to_have_count(2)
    expect(page.locator(".entry").first).to_contain_text("relabeled rows 0, 1, 2 as boat, cup, fish.")
    assert bank.contents.table("label")["label"][rows].tolist() == before


def test_the_bank_is_rolled_back_after_a_look_and_that_is_undone(
    opened: Opened, address: str, bank: adanpc.DurableBank
) -> None:
    digest = bank.digest()
    rows = [row for row in range(48) if row != WRONG]
    requests.post(f"{address}/v1/relabel", json={"rows": rows, "label": 1}).raise_for_status()
    page = opened(address, "changes")
    expect(page.locator(".entry")).to_have_count(1)
    page.get_by_text("All", exact=True).click()
    page.get_by_role("button", name="Roll back to position 13").click()
    dialog = page.get_by_role("dialog", name="Roll back to position 13")
    expected = requests.post(f"{address}/v1/rollback", json={"to": 13, "preview": True}).json()
    assert expected["queries"], "some of the answers are others since all rows are cups"
    expect(dialog.locator(".counts dd")).to_have_text(["1", "0", "0", str(expected["labels_changing"]), "0"])
    expect(dialog).to_contain_text(f"{len(expected['queries'])} recent answers would change")
    dialog.get_by_role("button", name="Roll back").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Say why")
    dialog.get_by_label("Why?").fill("All of it was wrong.")
    dialog.get_by_role("button", name="Roll back").click()
    expect(page.get_by_text("The bank is as it was at position 13.")).to_be_visible()
    expect(page.locator(".entry").first).to_contain_text("rolled the bank back to position 13")
    labels = bank.contents.table("label")["label"][:12].tolist()
    assert labels == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]
    page.get_by_role("button", name="Undo the rollback").click()
    again = page.get_by_role("dialog", name="Roll back to position 14")
    again.get_by_label("Why?").fill("It was right after all.")
    again.get_by_role("button", name="Roll back").click()
    expect(page.locator(".entry").first).to_contain_text("rolled the bank back to position 14")
    assert bank.contents.table("label")["label"][:4].tolist() == [1, 1, 1, 1]
    assert bank.digest() != digest


def test_a_point_of_the_timeline_leads_back(opened: Opened, address: str) -> None:
    page = opened(address, "stream")
    slider = page.get_by_role("slider", name="Point of the timeline")
    expect(slider).to_have_attribute("aria-valuenow", "12")
    slider.focus()
    page.keyboard.press("Home")
    expect(slider).to_have_attribute("aria-valuenow", "1")
    expect(page.locator(".readout")).to_contain_text("Position of the bank")
    page.get_by_role("button", name="Roll back to position 2…").click()
    expect(page.get_by_role("dialog", name="Roll back to position 2")).to_contain_text("rows leave")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_have_count(0)


# Questions


@pytest.fixture
def doubtful(tmp_path: Path) -> Iterator[str]:
    """A service that has learned from a shifted stream and was asked queries on which that changes the answer."""
    yield from doubtful_service(tmp_path, *shifted())


@pytest.fixture
def doubtful_with_many_classes(tmp_path: Path) -> Iterator[str]:
    """The same with thirty classes."""
    yield from doubtful_service(tmp_path, *shifted(MORE_CLASSES))


def doubtful_service(tmp_path: Path, classifier: adanpc.AdaNPC, given: Tensor) -> Iterator[str]:
    with adanpc.DurableBank.create(tmp_path / "doubtful", classifier) as bank, serving(create(bank)) as url:
        requests.post(f"{url}/v1/predict", json={"features": given[:30].tolist()}).raise_for_status()
        requests.post(f"{url}/v1/predict?adapt=false", json={"features": given[30:].tolist()}).raise_for_status()
        yield url


def test_questions_are_answered_by_a_click_and_corrected_rows_can_be_taken_back(opened: Opened, doubtful: str) -> None:
    asked = requests.get(f"{doubtful}/v1/ask").json()["questions"]
    joined = next(question for question in asked if question["joined"] is not None)
    label = requests.get(f"{doubtful}/v1/rows/{joined['joined']}").json()["label"]
    right = ("cat", "dog")[1 - label]
    page = opened(doubtful, "questions")
    items = page.locator(".questions li")
    expect(items).to_have_count(len(asked))
    item = page.locator(f".questions li[data-query={joined['query']}]")
    item.get_by_role("button", name=right).click()
    expect(page.get_by_text(f"is now labeled {right}")).to_be_visible()
    expect(item).to_have_count(0)
    assert [entry["kind"] for entry in entries(doubtful)] == ["relabel", "feedback"]
    page.get_by_role("link", name="Changes").click()
    expect(page.locator(".entry.feedback")).to_contain_text(f"said that a query was {right}")


def test_of_many_classes_the_two_answers_are_buttons_and_the_others_a_list(
    opened: Opened, doubtful_with_many_classes: str
) -> None:
    url = doubtful_with_many_classes
    asked = requests.get(f"{url}/v1/ask").json()["questions"]
    joined = next(question for question in asked if question["joined"] is not None)
    page = opened(url, "questions")
    item = page.locator(f".questions li[data-query={joined['query']}]")
    expect(item.get_by_role("button")).to_have_count(2)
    item.get_by_label("Another class").select_option("thing 7")
    expect(page.get_by_text("is now labeled thing 7")).to_be_visible()
    assert requests.get(f"{url}/v1/rows/{joined['joined']}").json()["name"] == "thing 7"


def test_on_the_map_the_largest_of_many_classes_are_buttons_and_the_others_a_list(
    opened: Opened, doubtful_with_many_classes: str
) -> None:
    page = opened(doubtful_with_many_classes, "map")
    expect(page.locator(".map-status")).to_contain_text("in 30 classes")
    buttons = page.locator(".legend button")
    expect(buttons).to_have_count(12)
    buttons.first.click()
    expect(buttons.first).to_have_attribute("aria-pressed", "true")
    page.get_by_label("Another class").select_option("thing 20")
    expect(buttons.first).to_have_attribute("aria-pressed", "false")
    buttons.nth(1).click()
    expect(page.get_by_label("Another class")).to_have_value("")


def test_an_estimate_that_says_nothing_yet_is_not_shown_as_a_number(opened: Opened, address: str) -> None:
    page = opened(address, "stream")
    expect(page.locator(".tiles").get_by_text("not enough queries yet")).to_have_count(2)
    expect(page.locator(".readout")).to_contain_text("Estimated accuracy–")


def test_an_answer_whose_confidence_has_changed_says_what_it_was(
    opened: Opened, address: str, bank: adanpc.DurableBank
) -> None:
    page = opened(address, "answers/q-12")
    expect(page.locator(".bench-facts")).to_contain_text("Confidence")
    row = first_rows(page, 1)[0]
    given = requests.get(f"{address}/v1/queries/q-12").json()
    other = next(label for label in range(6) if label != given["label"])
    bank.apply(Relabel((row,), other, "Ann", "to see what happens"))
    page.reload()
    expect(page.locator(".bench-facts")).to_contain_text("When it was asked")


# Without a mouse


def tab_to(page: Page, selector: str) -> None:
    """Presses Tab until the focus is on something."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab does not lead to {selector}")


def test_a_veto_by_keys_alone(opened: Opened, address: str, bank: adanpc.DurableBank) -> None:
    page = opened(address)
    expect(page.locator(".answer-list a")).to_have_count(12)
    tab_to(page, ".answer-list a")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    (row,) = first_rows(page, 1)
    tab_to(page, ".neighbor input")
    second = int(cards(page).nth(1).get_attribute("data-row") or -1)
    page.keyboard.press("ArrowRight")
    expect(page.locator(f"#votes-{second}")).to_be_focused()
    page.keyboard.press("Space")
    expect(page.locator(".outcome")).to_contain_text("Without 1 row")
    tab_to(page, "#veto-why")
    page.keyboard.type("By keys.")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Vetoed 1 row.")).to_be_visible()
    assert set(bank.contents.vetoed) == {second}
    assert row != second


def test_the_map_by_keys_alone(opened: Opened, address: str) -> None:
    page = opened(address, "map")
    expect(page.locator(".map-status")).to_contain_text("in 6 classes")
    tab_to(page, ".map")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".map-status")).to_contain_text("Row ")
    where = page.locator(".map-status").text_content()
    for key in ("ArrowRight", "ArrowDown", "+", "-", "0"):
        page.keyboard.press(key)
    assert page.locator(".map-status").text_content() != where
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator(".map")).to_be_focused()


def test_the_map_by_mouse(opened: Opened, address: str) -> None:
    page = opened(address, "map")
    expect(page.locator(".map-status")).to_contain_text("in 6 classes")
    tab_to(page, ".map")
    page.keyboard.press("ArrowRight")
    title = (page.locator(".map-status").text_content() or "").partition(":")[0]
    box = page.locator(".map").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.wheel(0, -100)
    page.get_by_role("button", name="boat").click()
    expect(page.get_by_role("button", name="boat")).to_have_attribute("aria-pressed", "true")
    page.get_by_label("Row", exact=True).fill(title.removeprefix("Row "))
    page.get_by_role("button", name="Find").click()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)  # what was found is in the middle
    expect(page.get_by_role("dialog", name=title)).to_be_visible()


# Small screens, dark colors, and those who hear the page


@pytest.mark.parametrize(
    "options",
    [{}, {"color_scheme": "dark"}, PHONE, {**PHONE, "color_scheme": "dark"}],
    ids=["light", "dark", "phone", "both"],
)
def test_no_view_has_a_serious_finding_or_scrolls_sideways(
    opened: Opened, address: str, options: dict[str, Any]
) -> None:
    page = opened(address, **options)
    for view in VIEWS:
        page.goto(f"{address}/#/{view}")
        settled(page)
        if view.endswith("q-12"):
            (row,) = first_rows(page, 1)
            page.locator(f"#votes-{row}").uncheck()
            expect(page.locator(".outcome")).to_contain_text("Without 1 row")
        found = Axe().run(page).response["violations"]
        severe = [(view, finding["id"], finding["nodes"]) for finding in found if finding["impact"] in SEVERE]
        assert severe == []
        width, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= room, view
    page.locator(".answer-list a, nav a").first.wait_for()
    is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    assert is_dark == ("color_scheme" in options)


def test_dialogs_have_no_serious_finding(opened: Opened, address: str) -> None:
    page = opened(address, "answers/q-12")
    cards(page).first.get_by_role("button").click()
    expect(page.get_by_role("dialog")).to_contain_text("State")
    findings = Axe().run(page).response["violations"]
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Who are you?").click()
    findings += Axe().run(page).response["violations"]
    assert [finding["id"] for finding in findings if finding["impact"] in SEVERE] == []


def test_on_a_phone_an_answer_opens_and_closes(opened: Opened, address: str) -> None:
    page = opened(address, **PHONE)
    page.locator(".answer-list a").first.tap()
    expect(cards(page).first).to_be_visible()
    expect(page.locator(".side")).to_be_hidden()
    page.get_by_role("link", name="All answers").tap()
    expect(page.locator(".side")).to_be_visible()


# Tokens


def test_the_page_asks_for_a_token_and_shows_what_its_role_may_do(
    opened: Opened, bank: adanpc.DurableBank, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    looker = add_token(file, "Bob", "predict")
    expert = add_token(file, "Ann", "expert")
    with serving(create(bank, tokens=Tokens(file))) as url:
        headers = {"Authorization": f"Bearer {looker}"}
        features = [1.0] * 11 + [1.5]
        requests.post(f"{url}/v1/predict", json={"features": features}, headers=headers).raise_for_status()
        page = opened(url, "answers/q-1")
        for token in ("wrong", looker):
            page.get_by_label("Token", exact=True).fill(token)
            page.get_by_role("button", name="Continue").click()
        (row,) = first_rows(page, 1)
        page.locator(f"#votes-{row}").uncheck()
        expect(page.locator(".outcome")).to_be_visible()
        expect(page.get_by_label("Why should they not vote?")).to_have_count(0)
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        page.get_by_role("button", name="Bob").click()
        expect(page.get_by_role("dialog")).to_contain_text("Bob, with the role predict")
        page.get_by_role("button", name="Use another token").click()
        page.get_by_label("Token", exact=True).fill(expert)
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_role("button", name="Ann")).to_be_visible()
        page.locator(f"#votes-{row}").uncheck()
        expect(page.get_by_label("Why should they not vote?")).to_be_visible()
