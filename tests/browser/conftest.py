"""A real browser, and a service with drawn pictures behind it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright
from services import drawn_png
from torch import Tensor

import adanpc
from adanpc.core import Append
from adanpc.lab.data.drawn import THINGS, draw_thing
from adanpc.serve import create, serving
from adanpc.store import Thumbnails

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE = 120_000  # milliseconds; only a page that is broken takes so long
EACH = 8  # source rows of each thing
ASKED = 12  # queries that were answered before the page is opened
WRONG = 5  # a source row whose label is wrong
DIM = 12

Opened = Callable[..., Page]


@pytest.fixture(scope="module")  # while it runs, no other test of this process can run an event loop of its own
def browser() -> Iterator[Browser]:
    found = [path for path in map(shutil.which, NAMES) if path]
    if not found:
        pytest.skip("there is no Chromium on this machine: install it, as make test does where it may")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found[0], args=FLAGS)
        yield started
        started.close()


def encode(images: list[Any]) -> Tensor:
    """Features of pictures without a network: small, blurred, and centered."""
    rows = []
    for pixels in images:
        small = np.asarray(Image.fromarray(pixels).resize((2, 2), Image.Resampling.BOX), np.float32)
        rows.append((small - small.mean()).reshape(-1) + 1.0)
    return torch.tensor(np.array(rows))


def drawn(thing: str, number: int) -> Any:
    return np.asarray(draw_thing(thing, "cartoon", number))


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[adanpc.DurableBank]:
    things = tuple(THINGS)
    images = [drawn(things[row % len(things)], row) for row in range(EACH * len(things))]
    labels = torch.arange(len(images)) % len(things)
    labels[WRONG] = 0
    classifier = adanpc.AdaNPC(adanpc.MemoryBank(DIM, things, soft=True), preset="safe")
    classifier.apply(Append(encode(images), labels, keys=torch.arange(len(images)), soft=torch.eye(6)[labels]))
    with adanpc.DurableBank.create(tmp_path / "bank", classifier) as opened:
        yield opened


@pytest.fixture
def address(bank: adanpc.DurableBank, tmp_path: Path) -> Iterator[str]:
    """A service that has answered a few pictures, some of which joined."""
    things = tuple(THINGS)

    def image_of_key(key: int) -> Any:
        return drawn(things[key % len(things)], key)

    thumbnails = Thumbnails(tmp_path / "bank")
    app = create(bank, encoder=encode, thumbnails=thumbnails, image_of_key=image_of_key)
    with serving(app) as url:
        for number in range(ASKED):
            ask(url, things[number % len(things)], 100 + number)
        yield url
    thumbnails.close()


def ask(url: str, thing: str, number: int) -> dict[str, Any]:
    """The answer to a picture, from which the bank learns."""
    answered = requests.post(f"{url}/v1/predict", data=drawn_png(thing, number), headers={"Content-Type": "image/png"})
    answer: dict[str, Any] = answered.json()["answers"][0]
    return answer


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opened]:
    """Opens the page as one more person; afterwards nothing may have gone wrong or left the host."""
    contexts: list[BrowserContext] = []
    wrong: list[str] = []

    def note_request(url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "blob:", "data:")):
            wrong.append(f"a request went to {url}")

    def note_console(said: ConsoleMessage) -> None:
        refused = said.text.startswith("Failed to load resource")  # by the service, or because it has ended
        if said.type == "error" and not refused:
            wrong.append(f"console: {said.text}")

    def open_page(url: str, view: str = "answers", **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("request", lambda request: note_request(request.url))
        page.on("pageerror", lambda error: wrong.append(f"the page failed: {error}"))
        page.on("console", note_console)
        page.goto(f"{url}/#/{view}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
