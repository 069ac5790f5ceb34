"""A sample to look at: drawn pictures, a small network trained on three styles, and a bank that meets a fourth."""

from __future__ import annotations

import random
from dataclasses import dataclass
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image

from adanpc.lab.banks import of_run
from adanpc.lab.data.drawn import STYLES, THINGS, draw_thing, write_drawn
from adanpc.lab.train.assemble import prepare, splits
from adanpc.lab.train.loop import train
from adanpc.lab.train.run import Run
from adanpc.lab.train.spec import Spec
from adanpc.progress import track
from adanpc.store import DurableBank, Thumbnails

TARGET = "cartoon"  # the style that is not trained on
SOURCES = tuple(style for style in STYLES if style != TARGET)
SEED = 0
COMPLETE = "complete"  # a file that is written last

# Pictures that lie in the folder of another class: something for an expert to find.
MISPLACED = (("fish", "boat", "sketch"), ("cup", "house", "photo"), ("tree", "flower", "art_painting"))


@dataclass(frozen=True)
class Sample:
    """Where the parts of a sample are.

    Args:
        bank: the folder of the durable bank, with thumbnails of its rows.
        run: the folder of the run whose network makes the features.
        stream: the files of the pictures that are to be asked, in their order.
    """

    bank: Path
    run: Path
    stream: list[Path]


def make(folder: Path, *, count: int = 36, steps: int = 60) -> Sample:
    """The sample in a folder; it is made if it is not there, in about half a minute.

    Args:
        folder: for pictures, run and bank.
        count: pictures of each thing in each style.
        steps: of the training.
    """
    pictures = folder / "pictures"
    sample = Sample(folder / "bank", folder / "run", _stream(pictures, count))
    if (folder / COMPLETE).exists():
        return sample
    _draw(pictures, count)
    run = _train(sample.run, pictures, steps)
    _create_bank(sample.bank, run)
    (folder / COMPLETE).touch()
    return sample


def _stream(pictures: Path, count: int) -> list[Path]:
    files = [pictures / TARGET / thing / f"{number:03}.png" for thing in THINGS for number in range(count)]
    random.Random(SEED).shuffle(files)
    return files


def _draw(pictures: Path, count: int) -> None:
    for style in track(tuple(STYLES), "drawing"):
        write_drawn(pictures, (style,), count)
    for thing, wrong, style in MISPLACED:
        draw_thing(thing, style, count).save(pictures / style / wrong / f"{count:03}.png")


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


def _create_bank(folder: Path, run: Run) -> None:
    """A bank of what the run was trained on; row i is the i-th picture of the source styles."""
    with DurableBank.create(folder, of_run(run)):
        pass
    parts = splits(run, None)
    thumbnails = Thumbnails(folder)
    row = 0
    for style in SOURCES:
        domain = parts[style].large
        for place in range(len(domain)):
            thumbnails.keep(row, _jpeg(domain.take([place])[0]))
            row += 1
    thumbnails.close()


def _jpeg(image: torch.Tensor) -> bytes:
    """An image (3, H, W) in [0, 1] as a file."""
    pixels = (255 * image).round().byte().permute(1, 2, 0).numpy()
    written = BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(written, "JPEG", quality=90)
    return written.getvalue()


def send(address: str, stream: list[Path]) -> None:
    """Asks a running service about pictures, one after another; it may learn from them.

    Args:
        address: of the service, such as http://127.0.0.1:8000.
        stream: files of pictures.
    """
    connection = HTTPConnection(urlsplit(address).netloc, timeout=600)
    for file in stream:
        connection.request("POST", "/v1/predict?adapt=true", file.read_bytes(), {"Content-Type": "image/png"})
        response = connection.getresponse()
        response.read()
    connection.close()
