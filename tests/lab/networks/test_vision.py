"""The door to timm: open when needed, and a torchvision built for another torch does not close it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adanpc.errors import AdaNPCError
from adanpc.lab.networks.vision import vision

# Fails as torchvision does whose compiled half cannot be loaded: nobody declared the operators it describes.
FOREIGN = """
import torch
for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}")(lambda dets, scores, iou_threshold: dets)
"""
SOUND = "import torch; torch.library.define('torchvision::nms', '(Tensor dets) -> Tensor')"
BROKEN = "raise RuntimeError('the driver is too old')"
SCRIPT = """
import sys, torch
from adanpc.lab.networks.vision import vision
assert "timm" not in sys.modules and "torchvision" not in sys.modules
sys.path[:0] = sys.argv[1:2]
try:
    vision()
except RuntimeError as error:
    print(error)
    sys.path[:1] = sys.argv[2:]
print(vision().__name__, torch.ops.torchvision.nms.default._schema)
"""


def run(folder: Path, *kinds: str) -> str:
    """What a fresh process prints that finds these torchvisions, one after the other, and a timm that needs them."""
    places = [folder / str(number) for number in range(len(kinds))]
    for place, kind in zip(places, kinds, strict=True):
        place.mkdir()
        (place / "torchvision.py").write_text(kind)
        (place / "timm.py").write_text("import torchvision")
    command = [sys.executable, "-W", "error", "-c", SCRIPT, *map(str, places)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_torchvision_for_another_torch_can_be_imported(tmp_path: Path) -> None:
    assert run(tmp_path, FOREIGN) == (
        "timm torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor\n"
    )


def test_a_sound_torchvision_is_left_alone_and_other_failures_are_not_hidden(tmp_path: Path) -> None:
    assert run(tmp_path, BROKEN, SOUND) == "the driver is too old\ntimm torchvision::nms(Tensor dets) -> Tensor\n"


@pytest.fixture
def closed() -> Iterator[None]:
    vision.cache_clear()
    yield
    vision.cache_clear()


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as Python itself notes a module that must not be imported
    with pytest.raises(AdaNPCError, match=rf"{name}.*: pip install 'adanpc\[vision\]'"):
        vision()
