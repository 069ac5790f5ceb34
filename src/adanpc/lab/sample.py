"""A sample service to try: drawn pictures, a small network trained on three styles, and a bank for a fourth style."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from adanpc.errors import AdaNPCError
from adanpc.lab.banks import of_run
from adanpc.lab.data.drawn import STYLES, draw_thing, write_drawn
from adanpc.lab.train.assemble import prepare
from adanpc.lab.train.loop import train
from adanpc.lab.train.run import Run
from adanpc.lab.train.spec import Spec
from adanpc.progress import track
from adanpc.store import DurableBank

TARGET = "cartoon"  # the style that is not trained on
SEED = 0
STATE = "adanpc-sample"  # a file with the number of source rows in the bank, or that the sample is unfinished
UNFINISHED = "unfinished"
LATER = 10  # pictures of each thing that are sent to a service that starts again

# The thing, the wrong class whose folder it is put into, and the style: something for an expert to find.
MISPLACED = (("fish", "boat", "sketch"), ("cup", "house", "photo"), ("tree", "flower", "art_painting"))


@dataclass(frozen=True)
class Sample:
    """Where the parts of a sample are.

    Args:
        bank: the folder of the durable bank.
        run: the folder of the run whose network makes the features.
        stream: the files of the pictures to send, in order.
        later: the files of other pictures in that style.
        source_rows: the number of rows in the bank before it answered anything.
    """

    bank: Path
    run: Path
    stream: list[Path]
    later: list[Path]
    source_rows: int


def make(folder: Path, *, count: int = 36, steps: int = 60) -> Sample:
    """The sample in a folder; if there is none, it is made, which takes about half a minute.

    Args:
        folder: for pictures, run and bank; it must be new, empty, or the folder of a sample.
        count: pictures of each thing in each style.
        steps: training steps.
    """
    folder = folder.absolute()  # a run remembers where its pictures are, whatever the working folder
    state = folder / STATE
    pictures = folder / "pictures"
    bank = folder / "bank"
    if not state.exists() or state.read_text() == UNFINISHED:
        _empty(folder)
        _draw(folder, count)
        run = _train(folder / "run", pictures, steps)
        with DurableBank.create(bank, of_run(run)) as opened:
            rows = len(opened.contents)
        state.write_text(str(rows))
    stream = _shuffled(pictures / TARGET)
    later = _shuffled(folder / "later")
    return Sample(bank, folder / "run", stream, later, int(state.read_text()))


def _empty(folder: Path) -> None:
    """Creates the folder, or removes from it a sample that was left unfinished; refuses a folder of something else."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / STATE).exists() and any(folder.iterdir()):
        raise AdaNPCError(f"{folder} holds something else: choose another folder for the sample")
    (folder / STATE).write_text(UNFINISHED)
    for name in ("pictures", "later", "run", "bank"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _shuffled(folder: Path) -> list[Path]:
    """The pictures of all things in a folder, in a random order that is always the same."""
    files = sorted(folder.glob("*/*.png"))
    random.Random(SEED).shuffle(files)
    return files


def _draw(folder: Path, count: int) -> None:
    """Draws all pictures, some of them into the folder of a wrong class."""
    for style in track(tuple(STYLES), "drawing"):
        write_drawn(folder / "pictures" / style, style, range(count))
    for thing, wrong, style in MISPLACED:
        draw_thing(thing, style, count).save(folder / "pictures" / style / wrong / f"{count:03}.png")
    write_drawn(folder / "later", TARGET, range(count, count + LATER))


def _train(folder: Path, pictures: Path, steps: int) -> Run:
    spec = Spec(
        "folder",
        targets=(TARGET,),
        encoder="cifar-resnet-20",
        steps=steps,
        every=steps,
        batch=16,
        hyper={"lr": 2e-3},
        pretrained=False,
        augment=False,
        seed=SEED,
    )
    prepared = prepare(spec, pictures)
    run = Run.create(folder, prepared.spec, prepared.description)
    train(run, prepared=prepared, workers=0)
    return run


def ask(address: str, sample: Sample, is_new: bool) -> None:
    """Sends pictures to a service, one after another, until all are answered or the service has stopped.

    Args:
        address: the address of the service, such as http://127.0.0.1:8080.
        sample: the sample whose bank is served.
        is_new: send the whole stream, from which the bank learns; otherwise the later pictures, without learning.
    """
    asked = sample.later
    adapt = "false"
    if is_new:
        asked = sample.stream
        adapt = "true"
    connection = HTTPConnection(urlsplit(address).netloc, timeout=600)
    try:
        for file in asked:
            connection.request("POST", f"/v1/predict?adapt={adapt}", file.read_bytes(), {"Content-Type": "image/png"})
            connection.getresponse().read()
    except (OSError, HTTPException):
        return  # the service has stopped
    finally:
        connection.close()
