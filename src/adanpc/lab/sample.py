"""A sample to look at: drawn pictures, a small network trained on three styles, and a bank that meets a fourth."""

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
STATE = "adanpc-sample"  # a file that says how far the sample in a folder is
UNFINISHED = "unfinished"
LATER = 10  # pictures of each thing that a service is asked about when it starts again

# Pictures that lie in the folder of another class: something for an expert to find.
MISPLACED = (("fish", "boat", "sketch"), ("cup", "house", "photo"), ("tree", "flower", "art_painting"))


@dataclass(frozen=True)
class Sample:
    """Where the parts of a sample are.

    Args:
        bank: the folder of the durable bank.
        run: the folder of the run whose network makes the features.
        stream: the files of the pictures that are to be asked, in their order.
        later: files of other pictures in that style.
        source_rows: of the bank, before it was asked anything.
    """

    bank: Path
    run: Path
    stream: list[Path]
    later: list[Path]
    source_rows: int


def make(folder: Path, *, count: int = 36, steps: int = 60) -> Sample:
    """The sample in a folder; it is made if it is not there, in about half a minute.

    Args:
        folder: for pictures, run and bank; new, empty, or that of a sample.
        count: pictures of each thing in each style.
        steps: of the training.
    """
    folder = folder.absolute()  # a run remembers where its pictures are
    state = folder / STATE
    pictures = folder / "pictures"
    bank = folder / "bank"
    if not state.exists() or state.read_text() == UNFINISHED:
        _begin(folder)
        _draw(folder, count)
        run = _train(folder / "run", pictures, steps)
        with DurableBank.create(bank, of_run(run)) as opened:
            rows = len(opened.contents)
        state.write_text(str(rows))
    stream = _shuffled(pictures / TARGET)
    later = _shuffled(folder / "later")
    return Sample(bank, folder / "run", stream, later, int(state.read_text()))


def _begin(folder: Path) -> None:
    """An empty folder, also where somebody stopped the making of a sample."""
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
    """Asks a service about pictures, one after another, until all were asked or it has ended.

    Args:
        address: of the service, such as http://127.0.0.1:8080.
        sample: whose bank it answers for.
        is_new: asks the whole stream, and the bank learns; otherwise about the later pictures, and it does not.
    """
    asked = sample.stream if is_new else sample.later
    adapt = "true" if is_new else "false"
    connection = HTTPConnection(urlsplit(address).netloc, timeout=600)
    try:
        for file in asked:
            connection.request("POST", f"/v1/predict?adapt={adapt}", file.read_bytes(), {"Content-Type": "image/png"})
            connection.getresponse().read()
    except (OSError, HTTPException):
        return  # the service has ended
    finally:
        connection.close()
