"""Test-time methods answer as the code of their authors does, batch after batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adanpc.lab.adapt import Source, find
from adanpc.lab.networks.source import SourceModel

CLASSES = 6
DIM = 10


# By the name of the peer's answers: our method, and the settings that the peer had.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tent": ("tent", {}),
    "rpl": ("rpl", {"lr": 1e-2}),
    "roid-published": ("roid-published", {"lr": 1e-2}),
    "cmf-noisy": ("cmf-published", {"lr": 1e-2}),
    "eta": ("eta", {"lr": 1e-2, "similarity": 0.4}),
    "eta-adam": ("eta", {"lr": 1e-2, "similarity": 0.4, "optimizer": "adam"}),
    "eata": ("eata", {"lr": 1e-2, "similarity": 0.4, "weight": 50.0, "samples": 48}),
    "deyo-doebler": ("deyo-published", {"lr": 1e-2}),
    "sar-published": ("sar-published", {"lr": 1e-2}),
    "sar-published-recovering": ("sar-published", {"lr": 1e-2, "margin": 0.11}),
    "tent-come": ("tent-come", {}),
    "eata-come": ("eata-come", {"lr": 1e-2, "margin": 0.8, "similarity": 0.4, "weight": 50.0, "samples": 48}),
    "sar-come": ("sar-come", {"lr": 1e-2, "margin": 0.8}),
    "rdumb": ("rdumb", {"lr": 1e-2, "every": 36}),
    "asr-often": ("asr", {"lr": 1e-2, "start": 0.98, "slope": 1.0}),
    "rotta-fast": ("rotta", {"lr": 1e-2, "capacity": 24, "every": 12, "momentum": 0.8}),
    "petta": ("petta", {"lr": 1e-2, "capacity": 24, "every": 12, "momentum": 0.95}),
    "lame-knn": ("lame", {"kernel": "knn", "k": 3}),
    "lame-rbf": ("lame", {"kernel": "rbf", "k": 3}),
    "lame-linear": ("lame", {"kernel": "linear"}),
    "t3a": ("t3a", {"keep": 4}),
    "t3a-published": ("t3a-published", {}),
    "tent-clf": ("tent-clf", {}),
    "tent-prebn": ("tent-prebn", {}),
    "pl-clf": ("pl-clf", {"threshold": 0.7}),
    "pl-full": ("pl-full", {"threshold": 0.7}),
    "shot": ("shot", {"threshold": 0.7, "weight": 0.1}),
    "shot-im": ("shot-im", {}),
    "adanpc-published": ("adanpc-published", {"k": 5, "temperature": 0.1, "threshold": 0.33}),
    "adanpc-bn-published": ("adanpc-bn-published", {"k": 5, "temperature": 0.1, "threshold": 0.2, "alpha": 5.0}),
    "cotta": ("cotta", {"lr": 1e-2, "momentum": 0.9, "restore": 0.1, "threshold": 0.99, "views": 4}),
    "note": ("note", {"lr": 1e-2, "capacity": 72, "every": 12}),
    "tast": ("tast", {"keep": 4, "heads": 5, "k": 2, "lr": 1e-2, "steps": 2}),
    "tast-all": ("tast", {"keep": None, "heads": 5, "k": 2, "lr": 1e-2, "steps": 2}),
    "bn-adapt": ("bn-adapt", {}),
    "neo": ("neo", {}),
    "memo": ("memo", {"copies": 8, "lr": 0.05}),
    "memo-source": ("memo", {"copies": 8, "lr": 0.05, "prior": float("inf")}),
    "ttt": ("ttt", {"copies": 8, "lr": 0.02, "steps": 3}),
    "ttt-online": ("ttt-online", {"copies": 8, "lr": 0.02}),
}
# LAME's rounds end by another rule, a bank rounds its rows to multiples of 2**-24, and NOTE's peer adds 1e-6 in a
# logarithm.
LOOSE = {"lame-knn": 3e-6, "lame-rbf": 3e-6, "lame-linear": 3e-6, "adanpc-published": 1e-6, "note": 1e-6}


class Encoder(nn.Module):
    """Three blocks, of which the last has the name by which SAR and DeYO know the last block of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.layer4 = nn.Sequential(nn.Conv2d(8, DIM, 3, stride=2, padding=1), nn.BatchNorm2d(DIM), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.layer4(self.layer2(self.layer1(images)))
        return maps.mean((2, 3))


def source_of(images: dict[str, Tensor]) -> Source:
    """The network that all peers had, and 48 source images."""
    model = SourceModel(Encoder(), DIM, CLASSES)
    weights = {key.removeprefix("model/"): value for key, value in images.items() if key.startswith("model/")}
    model.load_state_dict(weights)
    model.eval()
    rotation_head = nn.Linear(DIM, 4)
    rotation_head.load_state_dict({"weight": images["rotation/weight"], "bias": images["rotation/bias"]})
    rows = images["source"]
    with torch.no_grad():
        features = model.features(rows)
    return Source(
        model, features, images["labels"], images=lambda numbers: rows[numbers], lr=1e-2, rotation_head=rotation_head
    )


def mirrored(images: Tensor) -> Tensor:
    """The view that stands for random ones on both sides."""
    return images.flip(3)


def mirrored_copies(image: Tensor, copies: int, mirror: bool) -> Tensor:
    """What stands for TTT's random views of an image (1, C, H, W) on both sides."""
    return mirrored(image.expand(copies, *image.shape[1:]))


def copies_in_turn(image: Tensor, copies: int, mirror: bool) -> Tensor:
    """What stands for MEMO's random views on both sides: the image and its mirror image, in turn."""
    views = image.repeat(copies, 1, 1, 1)
    views[1::2] = mirrored(views[1::2])
    return views


@pytest.mark.no_cover
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_the_peer(name: str, images: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("roid", "memory", "petta", "teacher"):
        monkeypatch.setattr(f"adanpc.lab.adapt.{module}.view", mirrored)
    monkeypatch.setattr("adanpc.lab.adapt.rotation.shifted", mirrored_copies)
    monkeypatch.setattr("adanpc.lab.adapt.views._views", copies_in_turn)
    monkeypatch.setattr("adanpc.lab.adapt.cmf.NOISE", 40.0)
    method, settings = CASES[name]
    source = source_of(images)
    adapter = find(method)(source, **settings)
    for number, batch in enumerate(images["batches"]):
        seen = batch
        if adapter.sees == "features":
            with torch.no_grad():
                seen = source.model.features(batch)
        torch.manual_seed(number)  # DeYO, CoTTA, TTT and their peers draw the same numbers
        answers = adapter.step(seen)
        torch.testing.assert_close(answers, images[f"answers/{name}"][number], atol=LOOSE.get(name, 2e-7), rtol=0)


def test_every_stored_answer_is_compared(images: dict[str, Tensor]) -> None:
    stored = {key.removeprefix("answers/") for key in images if key.startswith("answers/")}
    assert stored == set(CASES)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("lame")])
def test_the_peer_has_learned(name: str, images: dict[str, Tensor]) -> None:
    """A golden vector in which nothing was learned would prove nothing: the answers are not those of the source."""
    source = source_of(images)
    with torch.no_grad():
        unchanged = source.model(images["batches"].flatten(0, 1)).softmax(1)
    answers = images[f"answers/{name}"].flatten(0, 1)
    assert (answers - unchanged).abs().max() > 1e-2
